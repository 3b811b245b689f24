"""The providers of one problem: each checked, timed interleaved with the others that are right, and checked once more."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import providers
import rows as row_files
import torch
from library import Inputs, Ready, Result, Unsupported
from rows import OURS, Row

from tl_attention.testing import timer
from tl_attention.testing.numeric import BwdComparison, FwdComparison
from tl_attention.testing.shapes import Shape


def provider_facts(name: str, pass_name: str, layout: str) -> Row:
    """The part of a row that follows from its provider."""
    library = providers.of_row(name).library(pass_name)
    return {"title": providers.title(name, pass_name), "library": library, "layout": layout}


def new_row(name: str, pass_name: str, layout: str, shape: Shape) -> Row:
    """The row of a provider before it ran."""
    facts = {"provider": name} | provider_facts(name, pass_name, layout) | row_files.sizes_of(shape)
    return facts | dict.fromkeys(row_files.MEASURED) | {"status": "failed", "reason": None}


@contextlib.contextmanager
def reasons(row: Row) -> Iterator[None]:
    """Store an exception of a library in its row. Raise one that every later CUDA call would raise too."""
    try:
        yield
    except Unsupported as reason:
        row |= {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        row |= {"status": "failed", "reason": timer.first_line(error)}
        torch.cuda.synchronize()


@contextlib.contextmanager
def reason_of_all(rows: dict[str, Row]) -> Iterator[None]:
    """Store an exception of the inputs or of the GPU in all rows that are unfinished."""
    try:
        yield
    except Exception as error:
        for row in rows.values():
            if row["status"] == "failed":
                row["reason"] = row["reason"] or timer.first_line(error)


@dataclass(frozen=True)
class Entrant:
    """A provider that is ready for a problem and was right once."""

    ready: Ready
    inputs: Sequence[Inputs]  # arguments of a call, per copy
    checked: Result  # output for the first copy


def compete(
    rows: dict[str, Row],
    rounds: int,
    enter: Callable[[str], tuple[Ready, Sequence[Inputs]]],
    verify: Callable[..., Row],
    speeds: Callable[..., Row],
    *,
    same_bits: bool,
    eager: bool = True,
    **timing_options: float,
) -> None:
    """Fill in the rows of the providers of a problem.

    Args:
        enter: name -> (a pass ready for the problem, arguments of a call per copy of the inputs); may raise.
        verify: (name, result of the first copy, "when timed, " or "") -> correctness as a part of the row.
        speeds: (name, timing, eager or None) -> speeds as a part of the row.
        same_bits: each result of a provider must equal its first bit by bit.
        eager: back-to-back calls are timed too.
        timing_options: arguments of timer.time_interleaved.
    """
    entrants: dict[str, Entrant] = {}
    for name, row in rows.items():
        with reasons(row):
            ready, inputs = enter(name)
            result = ready.launch(*inputs[0])
            row |= verify(name, result, "")
            if row["correct"]:
                entrants[name] = Entrant(ready, inputs, tuple(x if x is None else x.clone() for x in result))

    timings = time_all(entrants, rows, rounds, **timing_options)
    right: dict[str, timer.Timing] = {}
    for name, entrant in entrants.items():
        row, timing = rows[name], timings[name]
        with reasons(row):
            repeated = timer.time_eager(partial(entrant.ready.call, *entrant.inputs[0])) if eager else None
            for result in (timing.result, *([repeated.result] if repeated else ())):
                if row["correct"] and not same(result, entrant.checked):
                    row |= verify(name, result, "when timed, ")
                    if row["correct"] and same_bits:
                        row |= {
                            "correct": False,
                            "status": "wrong",
                            "reason": "when timed, other bits than in the first call",
                        }
            if row["correct"]:
                row |= speeds(name, timing, repeated)
                right[name] = timing
    if OURS in right:
        others = {name: timing for name, timing in right.items() if name != OURS}
        ratios = {name: timer.speedup(right[OURS], timing) for name, timing in others.items()}
        rows[OURS]["ratios"] = {name: [x.p25, x.median, x.p75] for name, x in ratios.items()}


def time_all(
    entrants: dict[str, Entrant], rows: dict[str, Row], rounds: int, **timing_options: float
) -> dict[str, timer.Timing]:
    """Timings of all entrants, interleaved. One that fails is removed, and the others are timed anew."""
    while entrants:
        calls = {name: [partial(e.ready.launch, *copy) for copy in e.inputs] for name, e in entrants.items()}
        try:
            return timer.time_interleaved(calls, rounds, **timing_options)
        except timer.CallFailed as failure:
            del entrants[failure.name]
            with reasons(rows[failure.name]):
                raise failure.__cause__ from None
    return {}


def same(a: Result, b: Result) -> bool:
    """Two results are equal bit by bit."""
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def speeds(shape: Shape, direction: str, timing: timer.Timing, eager: timer.Eager | None) -> Row:
    """The speeds of a row that is right."""
    return {
        "status": "ok",
        "ms": timing.median_ms,
        "p25": timing.p25,
        "p75": timing.p75,
        "timer": timing.timer,
        "launches": timing.launches,
        "rounds": sum(sample is not None for sample in timing.samples),
        "eager_ms": eager and eager.ms,
        "host_us": eager and eager.host_us,
        **row_files.speeds_of(shape, direction, timing.median_ms),
    }


def spread(count: int, every: int) -> list[int]:
    """`count` of `every` heads, evenly spread, the first and the last included; all if there are no more."""
    return list(range(every)) if count >= every else [i * (every - 1) // (count - 1) for i in range(count)]


def finite(x: float) -> float | None:
    """x, or None for the inf and NaN that JSON lacks."""
    return x if math.isfinite(x) else None


def found(
    checks: Sequence[FwdComparison | BwdComparison], when: str, unchecked: Iterable[torch.Tensor] = ()
) -> Row:
    """The result of checks, as a part of a row.

    Args:
        when: what was checked, in words.
        unchecked: tensors that must hold no NaN or inf.
    """
    names = dict.fromkeys(name for check in checks for name in check.mean_errors)
    errors = {
        name: statistics.mean(check.mean_errors[name] for check in checks if name in check.mean_errors)
        for name in names
    }
    row: Row = {
        "correct": all(check.ok for check in checks),
        "max_err_ratio": finite(max(check.max_err_ratio for check in checks)),
        "mean_errors": {name: finite(error) for name, error in errors.items()},
    }
    if not row["correct"]:
        wrong = "; ".join(check.text for check in checks if not check.ok)
        row |= {"status": "wrong", "reason": when + wrong}
    elif not all(bool(x.isfinite().all()) for x in unchecked):
        row |= {
            "correct": False,
            "status": "wrong",
            "reason": f"{when}all is right; other heads have NaN or inf",
        }
    return row
