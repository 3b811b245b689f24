"""One CTA: warps as generators, mbarriers, named barriers, copies in flight, and a scheduler that interleaves them."""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .values import UNKNOWN, known

WARP = 32  # threads
WARPS = 4  # of a warpgroup


@dataclass
class Mbarrier:
    """Shared-memory barrier: a phase completes when `count` arrivals and all expected bytes have come."""

    name: str
    count: int
    pending: int = 0
    bytes: int = 0
    completed: int = 0  # phases
    arrived: Counter = field(default_factory=Counter)  # arrivals of each warp in this phase
    coming: list = field(default_factory=list)  # clock of all arrivals so far
    clock: list = field(default_factory=list)  # the same when the last phase was complete

    def __post_init__(self) -> None:
        self.pending = self.count

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.clock = list(self.coming)
            self.pending = self.count
            self.arrived.clear()

    def arrive(self, warp: int) -> bool:
        """Arrive; False if this warp has arrived before in the same phase."""
        self.arrived[warp] += 1
        again = self.arrived[warp] > 1
        self.pending -= 1
        self.settle()
        return not again

    def passes(self, parity: int) -> bool:
        return self.completed % 2 != parity


@dataclass
class NamedBarrier:
    threads: int = 0  # that a generation needs
    arrived: int = 0
    generation: int = 0
    any: bool = False
    result: dict = field(default_factory=dict)
    coming: list = field(default_factory=list)  # clock of all arrivals so far
    clocks: dict = field(default_factory=dict)  # the same of each generation


@dataclass
class Accesses:
    """Last write of a word or tile, and the reads since: (warp, its time). A read that is not over has no time yet."""

    write: tuple[int, int] | None = None
    reads: dict[int, float] = field(default_factory=dict)


@dataclass
class Warp:
    number: int
    role: str
    run: Any
    request: tuple | None = None
    products: list = field(default_factory=list)  # tiles that each product in flight reads
    stores: list = field(default_factory=list)  # the same of stores by TMA
    ticket: int = -1  # generation of the named barrier that it waits for
    answer: Any = None


@dataclass
class Finding:
    kind: str
    role: str
    text: str
    line: int = 0
    source: str = ""
    values: dict = field(default_factory=dict)

    def __str__(self) -> str:
        values = ", ".join(f"{k} {v}" for k, v in self.values.items())
        code, _, place = self.source.partition("  # ")
        return f"{self.kind}: {self.role}: {self.text}\n    in {place or '?'}\n    {code}\n    {values}"


class Stuck(Exception):
    pass


def join(a: list, b: list) -> list:
    """Clock that is not before either of two."""
    return list(map(max, a, b)) if a and b else list(a or b)


class Machine:
    """State of a CTA and its scheduler.

    Args:
        barriers: name -> arrivals of each slot.
        how: "random", "copies first", "copies last", "producer first", "consumers first": who goes first of those that can.
    """

    def __init__(
        self, barriers: dict[str, list[int]], threads: int, how: str, seed: int, limit: int = 3_000_000
    ):
        self.mbarriers = {
            (n, i): Mbarrier(f"{n}[{i}]", c) for n, counts in barriers.items() for i, c in enumerate(counts)
        }
        self.named: dict[int, NamedBarrier] = {}
        self.threads, self.how, self.random, self.limit = threads, how, random.Random(seed), limit
        self.shared: dict[tuple, Any] = {}
        self.flying: list[tuple[Mbarrier, int, tuple]] = []
        self.loading: Counter = Counter()  # copies in flight to each tile
        self.filled: set = set()  # tiles that a copy has filled
        self.loaded: set[str] = set()  # buffers of such tiles
        self.warps: list[Warp] = []
        self.findings: list[Finding] = []
        self.seen: set = set()
        self.events = 0
        # Vector clocks: clocks[w][x] is the time of warp x that warp w knows to be over
        self.clocks = [[int(x == w) for x in range(threads // WARP)] for w in range(threads // WARP)]
        self.accesses: defaultdict = defaultdict(Accesses)

    # What is ordered by barriers, in whichever order this run went

    def knows(self, warp: int, other: int, time: float) -> bool:
        return other == warp or self.clocks[warp][other] >= time

    def reads(self, warp: Warp, what: tuple, over: bool = True) -> None:
        """Note a read. over: it is complete, else finished() follows."""
        at = self.accesses[what]
        if at.write is not None and not self.knows(warp.number, *at.write):
            self.note(
                "not ordered",
                warp,
                f"reads {what[0]}{list(what[1:])}, which {self.roles[at.write[0]]} may still write",
                what,
            )
        at.reads[warp.number] = self.clocks[warp.number][warp.number] if over else math.inf

    def finished(self, warp: Warp, what: tuple) -> None:
        self.accesses[what].reads[warp.number] = self.clocks[warp.number][warp.number]

    def writes(self, warp: Warp, what: tuple) -> None:
        at = self.accesses[what]
        others = [*at.reads.items(), *([] if at.write is None else [at.write])]
        for other, time in others:
            if not self.knows(warp.number, other, time):
                self.note(
                    "not ordered",
                    warp,
                    f"writes {what[0]}{list(what[1:])}, which {self.roles[other]} may still use",
                    (what, other // WARPS),
                )
        at.write, at.reads = (warp.number, self.clocks[warp.number][warp.number]), {}

    def send(self, warp: Warp) -> list:
        """The warp's clock at an arrival; what it does next is later."""
        clock = list(self.clocks[warp.number])
        self.clocks[warp.number][warp.number] += 1
        return clock

    # Where a warp is

    def place(self, warp: Warp) -> tuple[int, str, dict]:
        """(line of the translated kernel, its text, values of the loops around it and of the kernel's variables)."""
        frame = warp.run.gi_frame
        if frame is None:
            return 0, "its end", {}
        line, values = frame.f_lineno, {}
        depth = len(self.lines[line - 1])
        for above in reversed(self.lines[:line]):
            indent = len(above) - len(above.lstrip())
            if indent < depth:
                depth = indent
                if found := re.match(r"for (\w+) in", above.strip()):
                    values[found[1]] = frame.f_locals.get(found[1])
        for name, value in frame.f_locals.items():
            if type(value).__name__ == "Variable" and len(value) == 1:
                (value,) = value.values()
                if isinstance(value, int) and value:
                    values[name] = value
        return line, self.lines[line - 1].strip(), values

    def note(self, kind: str, warp: Warp, text: str, key: Any = None) -> None:
        line, source, values = self.place(warp)
        found = kind, line, key
        if found not in self.seen:
            self.seen.add(found)
            self.findings.append(Finding(kind, warp.role, text, line, source, values))

    # Requests

    def step(self, warp: Warp) -> bool:
        """Let a warp take one step. False if it waits."""
        if warp.request is None:
            try:
                warp.request = warp.run.send(warp.answer)
            except StopIteration:
                self.warps.remove(warp)
                return True
            warp.answer = None
        kind, *rest = warp.request
        if not getattr(self, "do_" + kind)(warp, *rest):
            return False
        warp.request = None
        return True

    def do_go(self, warp: Warp) -> bool:
        return True

    def do_store(self, warp: Warp, name: str, where: tuple, value: Any) -> bool:
        if (
            (name, where) not in self.shared or (known(value) and self.shared[name, where] != value)
        ):  # else several warps may do so
            self.writes(warp, (name, *where))
        self.shared[name, where] = value
        return True

    def do_arrive(self, warp: Warp, name: str, slot: int) -> bool:
        barrier = self.mbarriers[name, slot]
        phase = barrier.completed
        barrier.coming = join(barrier.coming, self.send(warp))
        if not barrier.arrive(warp.number) and barrier.count > 1:
            self.note("arrives twice", warp, f"twice in phase {phase} of {barrier.name}", barrier.name)
        return True

    def do_load(self, warp: Warp, name: str, slot: int, size: int, arrives: bool, tile: tuple) -> bool:
        barrier = self.mbarriers[name, slot]
        for other in self.warps:
            for what, reads in (("product", other.products), ("store", other.stores)):
                if any(tile in read for read in reads):
                    self.note(
                        "overwrites",
                        warp,
                        f"a copy to {tile[0]}[{tile[1]}], which a {what} of {other.role} still reads",
                        tile,
                    )
        self.writes(warp, tile)
        barrier.bytes += size
        self.loading[tile] += 1
        clock = self.send(warp)
        self.flying.append((barrier, size, tile, clock))
        if arrives:
            barrier.coming = join(barrier.coming, clock)
            barrier.arrive(warp.number)
        return True

    def do_product(self, warp: Warp, tiles: list, waits: bool) -> bool:
        for tile in tiles:
            if tile[0] in self.loaded and (self.loading[tile] or tile not in self.filled):
                self.note(
                    "reads early", warp, f"a product reads {tile[0]}[{tile[1]}], which is not filled", tile
                )
            self.reads(warp, tile, over=waits)
        if waits:
            warp.products.clear()
        else:
            warp.products.append(tiles)
        return True

    def do_put(self, warp: Warp, tile: tuple) -> bool:
        if warp.number % WARPS == 0:
            warp.stores.append([tile])
            self.accesses[tile].reads[warp.number] = math.inf
        return True

    def do_puts(self, warp: Warp, left: int) -> bool:
        """Wait until at most `left` stores still read shared memory."""
        self.end_reads(warp, warp.stores, left)
        return True

    def do_products(self, warp: Warp, left: int) -> bool:
        """Wait until at most `left` products are in flight."""
        self.end_reads(warp, warp.products, left)
        return True

    def end_reads(self, warp: Warp, reads: list, left: int) -> None:
        for _ in range(len(reads) - left):
            for tile in reads.pop(0):
                self.finished(warp, tile)

    def do_wait(self, warp: Warp, name: str, slot: int, parity: int, phase: int | None) -> bool:
        barrier = self.mbarriers[name, slot]
        if not barrier.passes(parity):
            return False
        if phase is not None and barrier.completed != phase + 1:
            early = barrier.completed < phase + 1
            kind = "passes early" if early else "passes late"
            self.note(
                kind,
                warp,
                f"{barrier.name} has completed {barrier.completed} phases, the wait means phase {phase}",
                barrier.name,
            )
        self.clocks[warp.number] = join(self.clocks[warp.number], barrier.clock)
        return True

    def _arrive_named(self, warp: Warp, number: int, threads: int | None) -> NamedBarrier:
        barrier = self.named.setdefault(number, NamedBarrier())
        threads = self.threads if threads is None else threads
        if barrier.arrived and barrier.threads != threads:
            self.note(
                "named barrier", warp, f"{number} for {threads} threads, others came for {barrier.threads}"
            )
        barrier.threads = threads
        barrier.coming = join(barrier.coming, self.send(warp))
        barrier.arrived += WARP
        if barrier.arrived >= threads:
            barrier.arrived -= threads
            barrier.result[barrier.generation] = barrier.any
            barrier.any = False
            barrier.clocks[barrier.generation] = list(barrier.coming)
            barrier.generation += 1
        return barrier

    def do_pass(self, warp: Warp, number: int, threads: int) -> bool:
        self._arrive_named(warp, number, threads)
        return True

    def do_sync(self, warp: Warp, number: int, threads: int | None) -> bool:
        if warp.ticket < 0:
            barrier = self.named.setdefault(number, NamedBarrier())
            warp.ticket = barrier.generation
            self._arrive_named(warp, number, threads)
        if self.named[number].generation <= warp.ticket:
            return False
        self.clocks[warp.number] = join(self.clocks[warp.number], self.named[number].clocks[warp.ticket])
        warp.ticket = -1
        return True

    def do_any(self, warp: Warp, number: int, threads: int, flag: Any) -> bool:
        barrier = self.named.setdefault(number, NamedBarrier())
        if warp.ticket < 0 and self.truth(flag != 0, 0):
            barrier.any = True
        ticket = barrier.generation if warp.ticket < 0 else warp.ticket
        if not self.do_sync(warp, number, threads):
            return False
        warp.answer = int(barrier.result[ticket])
        return True

    # The scheduler

    def land(self, i: int) -> None:
        barrier, size, tile, clock = self.flying.pop(i)
        barrier.coming = join(barrier.coming, clock)
        self.loading[tile] -= 1
        self.filled.add(tile)
        barrier.bytes -= size
        barrier.settle()

    def run(self) -> None:
        """Run all warps to their ends. Raises Stuck if none can go on."""
        while self.warps:
            self.events += 1
            if self.events > self.limit:
                raise Stuck("too many events")
            if self.flying and (
                self.how == "copies first" or (self.how == "random" and self.random.random() < 0.2)
            ):
                self.land(self.random.randrange(len(self.flying)))
                continue
            order = list(self.warps)
            if self.how == "producer first":
                order.sort(key=lambda warp: -warp.number)
            elif self.how != "consumers first":
                self.random.shuffle(order)
            for warp in order:
                if self.step(warp):
                    if self.how != "random":  # a warp goes on until it waits
                        while warp in self.warps and self.step(warp):
                            self.events += 1
                            if self.events > self.limit:
                                raise Stuck("too many events")
                    break
            else:
                if not self.flying:
                    raise Stuck("deadlock")
                self.land(self.random.randrange(len(self.flying)))

    def waiting(self) -> list[Finding]:
        """Where each warp waits; warps of a warpgroup that wait at one place are one finding."""
        found: dict[tuple, Finding] = {}
        for warp in self.warps:
            line, source, values = self.place(warp)
            kind, *rest = warp.request
            if kind == "wait":
                name, slot, parity, phase = rest
                b = self.mbarriers[name, slot]
                text = f"waits at {b.name} for phase {phase} (parity {parity}), which has completed {b.completed} phases; in this one "
                text += f"{b.count - b.pending} of {b.count} arrivals, {b.bytes} bytes still to come"
            else:
                b = self.named[rest[0]]
                text = f"waits at named barrier {rest[0]} with {b.arrived} of {b.threads} threads"
            role, _, one = warp.role.partition(", warp ")
            key = role, line, text, tuple(values.items())
            if key in found:
                found[key].role += f" {one}"
            else:
                found[key] = Finding("waits", warp.role, text, line, source, values)
        return list(found.values())

    def left(self) -> list[str]:
        """What the end leaves: phases begun, bytes that never came."""
        said = [
            f"{b.name}: {b.count - b.pending} of {b.count} arrivals in phase {b.completed}"
            for b in self.mbarriers.values()
            if b.pending != b.count or b.bytes
        ]
        return said


def make_warps(
    machine: Machine,
    function: Callable,
    shape: tuple[int, ...],
    blocks: dict,
    given: dict,
    globals_: dict,
    choose: Callable,
    roles: Callable,
) -> None:
    """Fill a machine with the warps of a CTA of `shape` threads (x, y, z)."""
    machine.given = given

    def truth_of(number: int) -> Callable:
        def truth(value: Any, site: int) -> bool:
            return bool(value) if known(value) else choose(number, site)

        return truth

    machine.truth = truth_of(-1)

    def load(name: str, where: tuple) -> Any:
        return globals_[name][where] if known(*where) else UNKNOWN

    def atomic_add(name: str, where: tuple, value: int) -> int:
        before = globals_[name][where]
        globals_[name][where] = before + value
        return before

    def atomic_max(name: str, where: tuple, value: int) -> None:
        globals_[name][where] = max(globals_[name][where], value)

    x, y, z = (*shape, 1, 1)[:3]
    for number in range(x * y * z // WARP):
        first = number * WARP
        thread = first % x, first // x % y, first // (x * y)

        def read(name: str, where: tuple, number: int = number) -> Any:
            if not known(*where):
                return UNKNOWN
            machine.reads(machine.by_number[number], (name, *where))
            return machine.shared.get((name, where), UNKNOWN)

        def elect(threads: int, number: int = number) -> bool:
            return number == 0 if threads == 0 else number % (threads // WARP) == 0

        run = function(
            thread,
            blocks,
            given,
            truth_of(number),
            elect,
            read,
            load,
            atomic_add,
            atomic_max,
            globals_.__getitem__,
        )
        machine.warps.append(Warp(number, roles(number), run))
    machine.by_number = {warp.number: warp for warp in machine.warps}
    machine.roles = {warp.number: warp.role for warp in machine.warps}
