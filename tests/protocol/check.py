"""Runs of a launch in several orders, and what they find."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.config.kernel_configs import DecodeConfig

from . import externs
from .launches import Launch
from .machine import Finding, Kernel, Machine, Numbers, Stuck
from .translate import Translator, places
from .values import (
    BINARY,
    UNKNOWN,
    Address,
    Place,
    Variable,
    both,
    cast,
    compute,
    either,
    largest,
    least,
    opposite,
    truncdiv,
    truncmod,
)

# (who goes on, when copies land)
ORDERS = (
    ("producer first", "first"),
    ("producer first", "last"),
    ("consumers first", "last"),
    ("one late", "last"),
    ("one ahead", "random"),
    ("helpers late", "random"),
    ("random", "random"),
    ("random", "last"),
)
POLICIES = "never", "always", "random"  # answers to conditions on floats, such as whether a row sum overflows
RETURNING = re.compile("ticket|written", re.IGNORECASE)  # counters that are 0 before a launch and after
VALUES = truncdiv, truncmod, least, largest, both, either, opposite, cast, compute


class Program:
    """A kernel as a generator of requests."""

    def __init__(self, problem: Any, config: Any):
        from tl_attention.compilation import compiler

        self.problem, self.config = problem, config
        with places() as found:
            function = compiler.trace(problem, config)
        self.synced = not compiler.pass_configs(problem, config).get("tl.disable_thread_storage_sync", False)
        self.translated = Translator(function, found)
        self.use(self.translated.source())
        self.barriers = self.translated.barriers

    def use(self, text: str) -> None:
        """Replace the kernel's text."""
        scope: dict[str, Any] = {
            "UNKNOWN": UNKNOWN,
            "BINARY": BINARY,
            "Variable": Variable,
            "Address": Address,
            "Place": Place,
        }
        scope |= {f.__name__: f for f in VALUES} | {"externs": externs}
        exec(compile(text, "kernel", "exec"), scope)
        self.run, self.text, self.lines = scope["kernel"], text, text.splitlines()

    def bind(self, arguments: tuple) -> Kernel:
        """The kernel with the arguments of a launch."""
        t, given, tensors, shapes = self.translated, {}, {}, {}
        if len(arguments) != len(t.arguments):
            raise ValueError(f"{len(arguments)} arguments for {[name for _, name in t.arguments]}")
        for (kind, name), value in zip(t.arguments, arguments, strict=True):
            if kind == "scalar":
                given[name] = value
            else:
                shapes[name] = tuple(value.shape)
                if isinstance(value, torch.Tensor):
                    tensors[name] = Numbers(name, value)
        for name, tensor, i in t.shapes:
            given.setdefault(name, shapes[tensor][i])  # placeholders of unused tensors have other sizes
        return Kernel(self.run, self.lines, self.barriers, t.threads, given, tensors, self.synced)

    def grid(self, kernel: Kernel) -> list[dict]:
        """Block indices of all CTAs of a launch."""
        scope = {f.__name__: f for f in VALUES} | {"truth": lambda value, site: bool(value), **kernel.given}
        exec("\n".join(self.translated.before_grid), scope)
        sizes = {tag: range(eval(text, scope)) for tag, text in self.translated.grid.items()}
        return [dict(zip(sizes, place, strict=True)) for place in itertools.product(*sizes.values())]

    @property
    def asks(self) -> bool:
        """True if runs depend on the policy."""
        return "overflow" in self.text or bool(getattr(self.config, "hold_max", False))


@dataclass
class Run:
    """A run with findings."""

    name: str
    end: str | None
    findings: list[Finding]

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.name}: {self.end or 'ends'}", *(f"  {finding}" for finding in self.findings[:8])]
        )


def run(
    kernel: Kernel,
    blocks: Sequence[dict],
    residents: int,
    who: str,
    copies: str,
    policy: str,
    seed: int,
    limit: int = 3_000_000,
) -> Run | None:
    """Run CTAs, `residents` of them at a time. None: without findings."""
    chance = random.Random(seed)
    choose: Callable[[int, int], bool] = {
        "never": lambda *_: False,
        "always": lambda *_: True,
        "random": lambda *_: chance.random() < 0.5,
    }[policy]
    for x in kernel.tensors.values():
        x.numbers.clear()
    machine = Machine(kernel, list(blocks), residents, who, copies, choose, seed, limit)
    end = None
    try:
        machine.run()
        if machine.left:
            end = "unfinished phases: " + ", ".join(machine.left)
    except Stuck as stuck:
        end = str(stuck)
    except (
        TypeError,
        KeyError,
        IndexError,
    ) as error:  # an index that depends on unknown data, or outside of a tensor
        end = f"{type(error).__name__}: {error}"
    findings = machine.findings + (machine.waiting() if end == "deadlock" else [])
    if end is None:
        findings += [
            Finding("counter", "the launch", f"{name}{list(where)} is {value} at the end")
            for name, numbers in kernel.tensors.items()
            if RETURNING.search(name)
            for where, value in numbers.numbers.items()
            if value != int(numbers.x[where])
        ]
    if not findings and end is None:
        return None
    name = f"CTAs {[list(b.values()) for b in blocks[:4]]}, {residents} at a time, {who}, copies {copies}, policy {policy}, seed {seed}"
    return Run(name, end, findings)


def works_together(config: Any) -> bool:
    """True if the CTAs of a launch have counters or a table of work in common."""
    return isinstance(config, DecodeConfig) or any(
        getattr(config, name, default) not in (default, None)
        for name, default in (("schedule", "grid"), ("makes_terms", False), ("rounds_dq", False))
    )


def check(
    launch: Launch,
    program: Program,
    most: int = 6,
    orders: Iterable[tuple[str, str]] = ORDERS,
    stop: bool = True,
    seed: int = 0,
    policy: int | None = None,
    limit: int = 3_000_000,
    following: Sequence[Launch] = (),
) -> list[Run]:
    """Run a launch in several orders; those with findings.

    Args:
        most: CTAs that run, where they have nothing in common.
        stop: return the first only.
        policy: number of one of POLICIES; None: all of them.
        limit: events of a run that does not end.
        following: later launches, whose tensors get what this one writes.
    """
    kernel = program.bind(launch.arguments)
    grid, found = program.grid(kernel), []
    together = works_together(program.config)
    policies = POLICIES if program.asks else POLICIES[:1]
    for answers in policies if policy is None else [policies[policy % len(policies)]]:
        for number, (who, copies) in enumerate(orders):
            at = seed * 100 + number
            if together:
                blocks, residents = grid, (len(grid), 1, 2)[number % 3]
            else:
                blocks, residents = (grid if len(grid) <= most else random.Random(at).sample(grid, most)), 1
            if one := run(kernel, blocks, residents, who, copies, answers, at, limit):
                found.append(one)
                if stop:
                    return found
    if len(blocks) == len(grid):
        for later in following:
            pass_on(launch, kernel, later)
    return found


def pass_on(launch: Launch, kernel: Kernel, later: Launch) -> None:
    """Write the integers that a launch has written to the arguments of a later one that has the same tensors."""
    for place, x in zip(launch.places, launch.arguments, strict=True):
        if not place or place not in later.places:
            continue
        (numbers,) = (numbers for numbers in kernel.tensors.values() if numbers.x is x)
        for where, value in numbers.numbers.items():
            later.arguments[later.places.index(place)][where] = value
