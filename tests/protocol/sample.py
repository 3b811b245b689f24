"""Results of kinds of calls over draws, in several processes."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context

from tl_attention.compilation import compiler, manifest
from tl_attention.config.kernel_configs import TileTable

from .calls import Kind, call_of
from .check import ORDERS, Program, check
from .draws import draw_of
from .launches import recorded

# Config class -> why its kernels are not checked
NOT_CHECKED = {
    TileTable: "all its numbers differ from thread to thread, and TileLang puts its barriers; tests of its tables run on the GPU",
}


@dataclass
class Result:
    """Outcome of the draws of a kind.

    Args:
        passed: runs of launches per kernel that found nothing.
        faults: kernel -> texts of runs with findings.
        refused: draws that the call refuses for this config, by its words.
        skipped: kernels in NOT_CHECKED, or with an operation that is not modelled, and why.
        templates: of kernels that passed.
    """

    name: str
    passed: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[str]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    templates: set[str] = field(default_factory=set)
    seconds: float = 0.0


@functools.lru_cache(maxsize=40)
def program_of(problem: object, config: object) -> Program:
    return Program(problem, config)


def check_kind(
    kind: Kind, draws: Iterable[int], orders: int = len(ORDERS), most_seconds: float = 1e9
) -> Result:
    """Check the launches of a kind.

    Args:
        draws: numbers of draws.
        orders: per draw; they take turns.
        most_seconds: after them no further draw begins.
    """
    result, begin = Result(kind.name), time.time()
    for number in draws:
        if time.time() - begin > most_seconds:
            break
        draw = draw_of(kind, number)
        try:
            launches = recorded(call_of(kind, draw), draw.sms)
        except (ValueError, NotImplementedError) as error:
            result.refused[str(error)[:120]] += 1
            continue
        chosen = [ORDERS[(number + i) % len(ORDERS)] for i in range(orders)]
        for i, launch in enumerate(launches):
            name = manifest.kernel_name(launch.problem, launch.config)
            if reason := NOT_CHECKED.get(type(launch.config)):
                result.skipped[name] = reason
                continue
            try:
                program = program_of(launch.problem, launch.config)
            except NotImplementedError as error:
                result.skipped[name] = str(error)[:200]
                continue
            policy = None if orders == len(ORDERS) else number
            if runs := check(
                launch, program, orders=chosen, seed=number, policy=policy, following=launches[i + 1 :]
            ):
                result.faults.setdefault(name, []).append(f"draw {number}: {draw}\n{runs[0]}")
            else:
                result.passed[name] += 1
                result.templates.add(compiler.template(launch.config).kind)
    result.seconds = time.time() - begin
    return result


def check_kinds(
    kinds: list[Kind], draws: list[int], orders: int, jobs: int, most_seconds: float
) -> Iterator[Result]:
    """check_kind() of each kind, as results come."""
    of_each = functools.partial(check_kind, draws=draws, orders=orders, most_seconds=most_seconds)
    if jobs <= 1:
        yield from map(of_each, kinds)
        return
    with get_context("spawn").Pool(jobs, maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(of_each, kinds)
