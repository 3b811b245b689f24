"""Runs of launches in several orders."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .launches import Launch
from .machine import WARP, Finding, Machine, Stuck, make_warps
from .translate import Translator, places
from .values import BINARY, UNKNOWN, both, cast, either, largest, least, opposite, truncdiv, truncmod

HOWS = "copies first", "copies last", "producer first", "consumers first", "random", "random"
OVERFLOWS = "never", "always", "random"


class Variable(dict):
    def __missing__(self, key: tuple) -> Any:
        return UNKNOWN


class Numbers:
    """An integer tensor in global memory. An index outside of it is an error."""

    def __init__(self, name: str, x: torch.Tensor):
        self.name, self.x, self.numbers = name, x, {}

    def __getitem__(self, where: tuple) -> int:
        if where in self.numbers:
            return self.numbers[where]
        if not all(0 <= i < n for i, n in zip(where, self.x.shape, strict=True)):
            raise IndexError(f"{self.name}{list(where)} of {list(self.x.shape)}")
        return int(self.x[where])

    def __setitem__(self, where: tuple, value: int) -> None:
        self.numbers[where] = value


class Program:
    """A kernel as a generator of requests."""

    def __init__(self, problem: Any, config: Any):
        from tl_attention.compilation import compiler

        self.problem, self.config = problem, config
        with places() as found:
            function = compiler.trace(problem, config)
        self.translated = Translator(function, found)
        self.use(self.translated.source())

    def use(self, text: str) -> None:
        """Replace the kernel's text."""
        names = {f.__name__: f for f in (truncdiv, truncmod, least, largest, both, either, opposite, cast)}
        scope = {"UNKNOWN": UNKNOWN, "BINARY": BINARY, "Variable": Variable, **names}
        exec(compile(text, "kernel", "exec"), scope)
        self.warp, self.text, self.lines = scope["warp"], text, text.splitlines()

    def bind(self, arguments: tuple) -> tuple[dict, dict]:
        """(values of names, integer tensors) of a launch."""
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
        return given, tensors


@dataclass
class Run:
    """A run of a CTA with findings."""

    cta: str
    how: str
    overflows: str
    seed: int
    end: str | None
    findings: list[Finding]

    def __str__(self) -> str:
        head = f"{self.cta}, {self.how}, overflows {self.overflows}, seed {self.seed}: {self.end or 'ends'}"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings[:6])])


def role_of(threads: int) -> Callable[[int], str]:
    """Names of warps: the producer and the warps beside it are the last four, see kernels/roles.py."""
    warps = threads // WARP

    def role(number: int) -> str:
        if number < warps - 4 or warps <= 4:
            return f"warpgroup {number // 4}, warp {number % 4}"
        return "producer" if number == warps - 4 else f"beside the producer, warp {number % 4}"

    return role


def run_cta(
    program: Program, given: dict, tensors: dict, blocks: dict, how: str, overflows: str, seed: int
) -> Run | None:
    chance = random.Random(seed)
    choose = {
        "never": lambda *_: False,
        "always": lambda *_: True,
        "random": lambda *_: chance.random() < 0.5,
    }[overflows]
    shape = program.translated.threads
    machine = Machine(program.translated.barriers, math.prod(shape), how, seed)
    machine.lines, machine.loaded = program.lines, program.translated.loaded
    make_warps(machine, program.warp, shape, blocks, given, tensors, choose, role_of(math.prod(shape)))
    end = None
    try:
        machine.run()
        if machine.left():
            end = "unfinished phases: " + ", ".join(machine.left())
    except Stuck as stuck:
        end = str(stuck)
    except (
        TypeError,
        KeyError,
        IndexError,
    ) as error:  # an index that depends on unknown data, or outside of a tensor
        end = f"{type(error).__name__}: {error}"
    findings = machine.findings + (machine.waiting() if end == "deadlock" else [])
    return (
        Run(f"CTA {list(blocks.values())}", how, overflows, seed, end, findings) if findings or end else None
    )


def grid_of(program: Program, given: dict) -> list[dict]:
    """Block indices of all CTAs of a launch."""
    sizes = {
        tag: range(eval(text, {"truncdiv": truncdiv}, given)) for tag, text in program.translated.grid.items()
    }
    return [dict(zip(sizes, place, strict=True)) for place in itertools.product(*sizes.values())]


def check(launch: Launch, program: Program, most: int = 8, hows: tuple = HOWS) -> list[Run]:
    """Run CTAs of a launch in several orders; those with findings."""
    given, tensors = program.bind(launch.arguments)
    bad, grid = [], grid_of(program, given)
    for overflows in OVERFLOWS if getattr(program.config, "hold_max", False) else OVERFLOWS[:1]:
        for number, how in enumerate(hows):
            for x in tensors.values():
                x.numbers.clear()
            for blocks in grid if len(grid) <= most else random.Random(number).sample(grid, most):
                if run := run_cta(program, given, tensors, blocks, how, overflows, number):
                    bad.append(run)
                    break
    return bad
