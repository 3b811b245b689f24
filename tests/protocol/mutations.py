"""Faults planted in a translated kernel, one at a time.

Removals take out each wait, arrival, copy, fence, sync and product wait. The others change one: its parity, its slot, its count, its
place, or the steps of a loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from . import externs
from .check import Program, check
from .launches import Launch

REQUEST = re.compile(
    r"yield '(\w+)'|^(products?|fence|wait_puts|put)\(|(?:yield from )?externs\.(\w+)\(|^warp\.(put_number)\("
)
REMOVED = {
    "wait", "arrive", "sync", "pass", "load", "store", "any", "products", "fence", "wait_puts", "put_number", "await_turn", "pass_turn",
    "count", "await_rounded", "await_tiles", "store_piece", "merge_piece", "wait_for_parts",
}  # fmt: skip
ORDERS = (
    ("producer first", "first"),
    ("consumers first", "last"),
    ("one late", "last"),
    ("helpers late", "first"),
    ("random", "random"),
)


@dataclass(frozen=True)
class Mutation:
    """A changed kernel.

    Args:
        kind: of the change.
        what: the line that it changes, or the barrier.
        place: in kernels/, as reports have it.
        line: number of the line, from 0; -1: a barrier's count.
        lines: the whole text.
    """

    kind: str
    what: str
    place: str
    line: int
    lines: tuple[str, ...]
    barriers: dict[str, list[int]]

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.what}" + (f"  # {self.place}" if self.place else "")


def mutations(program: Program, reached: dict[int, set[int]]) -> Iterator[Mutation]:
    """All faults to be planted in a kernel. reached: see reached_lines()."""
    lines, barriers = program.lines, program.barriers
    slots = {name: len(counts) for name, counts in barriers.items()}

    def changed(kind: str, i: int, *new: str) -> Mutation:
        code, at, place = lines[i].strip().partition("  # ")
        space = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        new = tuple(f"{x}{at}{place}" for x in new)
        return Mutation(
            kind, code, place, i, (*lines[:i], *(space + x for x in new), *lines[i + 1 :]), barriers
        )

    def moved_up(kind: str, i: int) -> Mutation | None:
        """The arrival of line i, with the condition above it, in front of the statement before."""
        first = i - 1 if lines[i - 1].strip().startswith("if truth(") else i
        depth = len(lines[first]) - len(lines[first].lstrip())
        j = first - 1
        if len(lines[j]) - len(lines[j].lstrip()) != depth or not REQUEST.search(lines[j].strip()):
            return None
        code, _, place = lines[i].strip().partition("  # ")
        text = (*lines[:j], *lines[first : i + 1], lines[j], *lines[i + 1 :])
        return Mutation(kind, f"{code} before {lines[j].strip()}", place, i, text, barriers)

    for i, line in enumerate(lines):
        code = line.strip().partition("  # ")[0]
        found = REQUEST.search(code)
        kind = next((x for x in found.groups() if x), "") if found else ""
        if kind in REMOVED and " = " not in code.partition("(")[0]:
            yield changed(f"no {kind}", i, "yield ('go',)")
        if kind == "wait":
            *before, parity, phase = arguments(code)
            yield changed("other parity", i, ", ".join([*before, f"1 - ({parity})", phase]))
        if kind in ("wait", "arrive", "load"):
            name = re.search(r"yield '\w+', '(\w+)'", code)[1]
            if slots[name] > 1:
                request, barrier, slot, *rest = arguments(code)
                other = f"({slot} + 1) % {slots[name]}"
                yield changed(f"other slot of {kind}", i, ", ".join([request, barrier, other, *rest]))
        if kind == "arrive":
            yield changed("arrives once more", i, code, code)
            if early := moved_up("arrives early", i):
                yield early
        if kind == "load" and ", True, (" in code:
            yield changed("copy does not arrive", i, code.replace(", True, (", ", False, ("))
        if kind == "fence" and i + 1 < len(lines):
            yield changed("fence of another", i, "if warp.number % 4: fence()")
        if kind == "sync" and re.search(r", 128\b", code):
            yield changed("sync of fewer", i, f"if warp.number % 4 != 3: {code.partition('  # ')[0]}")
        if code.startswith("for ") and any("yield" in x for x in _body(lines, i)):
            yield changed("a step too few", i, re.sub(r"\):$", " - 1):", code))
            yield changed("a step too many", i, re.sub(r"\):$", " + 1):", code))
            by_warp = {n < 4 for n in reached.get(i, ())}
            for w, warps in enumerate(("< 4", ">= 4") if len(by_warp) > 1 else ()):
                yield changed(
                    f"a step too few in warpgroup {w}",
                    i,
                    re.sub(r"\):$", f" - (warp.number {warps})):", code),
                )
        for buffer, slot in (
            re.findall(r"\(\('(\w+)', (\([^']*\))\), \w+\)", code) if kind == "product" else ()
        ):
            other = f"({slot} ^ {2 if '*' in slot else 1})"  # of a ring with a tile per warpgroup: that of the next step
            yield changed(
                f"product of another slot of {buffer}",
                i,
                code.replace(f"'{buffer}', {slot})", f"'{buffer}', {other})", 1),
            )
    for name, counts in barriers.items():
        for more in (1, -1):
            if counts[0] + more > 0:
                other = {**barriers, name: [n + more for n in counts]}
                yield Mutation(f"count {more:+}", name, "", -1, tuple(lines), other)


def _body(lines: list[str], i: int) -> Iterator[str]:
    depth = len(lines[i]) - len(lines[i].lstrip())
    for line in lines[i + 1 :]:
        if len(line) - len(line.lstrip()) <= depth:
            return
        yield line


def arguments(code: str) -> list[str]:
    """Parts of a request between its commas."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(code):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(code[start:i].strip())
            start = i + 1
    return [*parts, code[start:].strip()]


def reached_lines(program: Program, launches: list[Launch]) -> dict[int, set[int]]:
    """Lines with a request that runs of the launches reach -> numbers of the warps that do. The runs have no findings."""
    lines, reached = list(program.lines), defaultdict(set)
    for i, line in enumerate(lines):
        code = line.strip()
        if REQUEST.search(code) or code.startswith("for "):
            space = line[: len(line) - len(line.lstrip())]
            lines[i] = f"{space}externs.REACHED[{i}].add(warp.number)\n{line}"
    externs.REACHED = reached
    program_lines = program.lines
    program.use("\n".join(lines))
    assert not any(check(launch, program, orders=ORDERS) for launch in launches)
    program.use("\n".join(program_lines))
    return reached


def is_found(program: Program, mutation: Mutation, launches: list[Launch], limit: int) -> bool:
    """True if a run of the launches has a finding."""
    lines, barriers = program.lines, program.barriers
    try:
        program.use("\n".join(mutation.lines))
        program.barriers = mutation.barriers
        return any(check(launch, program, orders=ORDERS, limit=limit) for launch in launches)
    except SyntaxError as error:
        raise ValueError(f"{mutation.name}: {error}") from error
    finally:
        program.use("\n".join(lines))
        program.barriers = barriers
