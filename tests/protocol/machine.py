"""CTAs of a launch: warps as generators, mbarriers, named barriers, copies in flight, and a scheduler that interleaves them.

A warp yields requests that may wait or that others see: ('wait', barrier, slot, parity, phase). Machine.do_<kind> answers them. What only
the warp itself and the clocks of races.py see are methods of Warp, which it calls.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .races import NEVER, Access, Fault, Product, Registers, Share, Tile, TileState, join
from .values import UNKNOWN, Place, Variable, known

WARP = 32  # threads
WARPS = 4  # per warpgroup


@dataclass
class Mbarrier:
    """A phase completes when `count` arrivals and all expected bytes have come.

    Args:
        entry: of clocks, for the copies that arrive here.
    """

    name: str
    count: int
    entry: int
    pending: int = 0
    bytes: int = 0
    completed: int = 0  # phases
    arrived: Counter = field(default_factory=Counter)  # arrivals of each warp in this phase
    coming: list = field(default_factory=list)  # clock of all arrivals so far
    clock: list = field(default_factory=list)  # the same when the last phase was complete

    def __post_init__(self) -> None:
        self.pending = self.count

    def settle(self) -> bool:
        """Complete the phase if all has come; True then."""
        if self.pending or self.bytes:
            return False
        self.completed += 1
        self.clock = list(self.coming)
        self.clock[self.entry] = self.completed
        self.pending = self.count
        self.arrived.clear()
        return True

    def passes(self, parity: int) -> bool:
        return self.completed % 2 != parity


@dataclass
class NamedBarrier:
    """bar.sync and bar.arrive: a generation is complete when `threads` have come."""

    threads: int = 0
    arrived: int = 0
    generation: int = 0
    any: bool = False
    result: dict = field(default_factory=dict)
    coming: list = field(default_factory=list)  # clock of all arrivals so far
    clocks: dict = field(default_factory=dict)  # the same of each generation


@dataclass
class Finding:
    """A fault, and where in the kernel."""

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
    """A run that does not end."""


class Numbers:
    """An integer tensor in global memory. An index outside of it is an error."""

    def __init__(self, name: str, x: Any):
        self.name, self.x, self.numbers = name, x, {}

    def __getitem__(self, where: tuple) -> int:
        if where in self.numbers:
            return self.numbers[where]
        self.check(where)
        return int(self.x[where])

    def __setitem__(self, where: tuple, value: int) -> None:
        self.check(where)
        self.numbers[where] = value

    def check(self, where: tuple) -> None:
        if not all(0 <= i < n for i, n in zip(where, self.x.shape, strict=True)):
            raise IndexError(f"{self.name}{list(where)} of {list(self.x.shape)}")


@dataclass(frozen=True)
class Kernel:
    """A translated kernel with the arguments of a launch.

    Args:
        run: generator function (warp, thread, block, given).
        lines: its text.
        barriers: name -> arrivals of each slot.
        shape: threads of a CTA (x, y, z).
        given: values of names.
        tensors: integer tensors.
        synced: the compiler puts barriers between plain accesses to shared memory.
    """

    run: Callable
    lines: Sequence[str]
    barriers: dict[str, list[int]]
    shape: tuple[int, ...]
    given: dict
    tensors: dict[str, Numbers]
    synced: bool

    @property
    def warps(self) -> int:
        threads = 1
        for n in self.shape:
            threads *= n
        return threads // WARP


class Cta:
    """Barriers and shared memory of a CTA."""

    def __init__(self, machine: Machine, kernel: Kernel, block: dict):
        self.machine, self.kernel, self.block = machine, kernel, block
        slots = [
            (name, i, count) for name, counts in kernel.barriers.items() for i, count in enumerate(counts)
        ]
        self.mbarriers = {
            (name, i): Mbarrier(f"{name}[{i}]", count, kernel.warps + number)
            for number, (name, i, count) in enumerate(slots)
        }
        self.entries = kernel.warps + len(slots)
        for barrier in self.mbarriers.values():
            barrier.coming = [0] * self.entries
        self.named: dict[int, NamedBarrier] = {}
        self.words: dict[tuple, Any] = {}
        self.tiles: dict[Tile, TileState] = {}
        self.warps = [Warp(self, number) for number in range(kernel.warps)]

    def tile(self, tile: Tile) -> TileState:
        state = self.tiles.get(tile)
        if state is None:
            state = self.tiles[tile] = TileState()
        return state

    def left(self) -> list[str]:
        """Leftovers of its end: phases begun, bytes that never came."""
        return [
            f"{b.name}: {b.count - b.pending} of {b.count} arrivals in phase {b.completed}"
            for b in self.mbarriers.values()
            if b.pending != b.count or b.bytes
        ]


class Warp:
    """A warp and what it calls."""

    def __init__(self, cta: Cta, number: int):
        self.cta, self.machine, self.number = cta, cta.machine, number
        self.clock = [0] * cta.entries
        self.clock[number] = 1
        self.registers = Registers()
        self.puts: list[list[Access]] = []  # stores by TMA that may still read
        self.sums: list[
            tuple[int, int]
        ] = []  # (row block of dq, event) of additions that it has not counted, see externs.py
        self.unfenced: list[Access] = []  # generic writes since the last proxy fence
        self.request: tuple | None = None
        self.answer: Any = None
        self.ticket = -1  # generation of the named barrier that it waits for
        self.blocked = -1  # version of the machine at which it had to wait
        x, y, _ = (*cta.kernel.shape, 1, 1)[:3]
        first = number * WARP
        self.thread = first % x, first // x % y, first // (x * y)
        self.last_group = cta.kernel.warps > WARPS and number >= (cta.kernel.warps - 1) // WARPS * WARPS
        self.generator = cta.kernel.run(self, self.thread, cta.block, cta.kernel.given)

    @cached_property
    def role(self) -> str:
        """Name of its role: the producer and the warps beside it are the last four, see kernels/seams/roles.py."""
        of = f" of CTA {list(self.cta.block.values())}" if self.machine.has_several else ""
        if not self.last_group:
            return f"warpgroup {self.number // WARPS}, warp {self.number % WARPS}{of}"
        place = self.number % WARPS
        return f"beside the producer, warp {place}{of}" if place else f"producer{of}"

    @property
    def starts_none(self) -> bool:
        """True if another warp of its warpgroup starts copies and stores by TMA."""
        return not self.last_group and self.number % WARPS != 0

    @property
    def now(self) -> int:
        return self.clock[self.number]

    # What a warp calls

    def truth(self, value: Any, site: int) -> bool:
        """A condition; the policy answers for unknown data."""
        return bool(value) if known(value) else self.machine.choose(self.number, site)

    def elect(self, threads: int) -> bool:
        return self.number == 0 if threads == 0 else self.number % (threads // WARP) == 0

    def read(self, name: str, where: tuple) -> Any:
        """Read a word of shared memory."""
        if not known(*where):
            return UNKNOWN
        self.tile_read(name, where)
        return self.cta.words.get((name, where), UNKNOWN)

    def load(self, name: str, where: tuple) -> Any:
        """Read an integer of global memory."""
        return self.cta.kernel.tensors[name][where] if known(*where) else UNKNOWN

    def put_number(self, name: str, where: tuple, value: Any) -> None:
        """Write an integer to global memory."""
        if known(*where, value) and name in self.cta.kernel.tensors:
            self.cta.kernel.tensors[name][where] = value
        self.machine.version += 1

    def atomic(self, name: str, where: tuple, value: int, how: Callable[[int, int], int]) -> int:
        """Change an integer in global memory; its value before."""
        numbers = self.cta.kernel.tensors[name]
        before = numbers[where]
        numbers[where] = how(before, value)
        self.machine.version += 1
        return before

    def atomic_add(self, name: str, where: tuple, value: int) -> int:
        return self.atomic(name, where, value, int.__add__)

    def atomic_max(self, name: str, where: tuple, value: int) -> int:
        return self.atomic(name, where, value, max)

    def at(self, place: Place) -> int:
        return self.load(place.tensor, (place.index,))

    def touch(
        self, reads: Iterable[str] = (), writes: Iterable[str] = (), clears: Iterable[str] = ()
    ) -> None:
        """Note uses of fragments; clears: those that are wholly written."""
        for fault in self.registers.touch(reads, writes, clears):
            self.note(fault)

    def tile_read(self, name: str, slot: Any, share: Share = None) -> None:
        """Read a tile by plain loads."""
        if self.cta.kernel.synced:
            return
        access = Access(self.number, self.now, share, True, self.role)
        for fault in self.cta.tile((name, slot)).read(access, self.clock, (name, slot)):
            self.note(Fault(*fault))

    def tile_write(self, name: str, slot: Any, division: str = "threads") -> None:
        """Write this warp's share of a tile by plain stores."""
        if self.cta.kernel.synced:
            return
        of = self.number % WARPS if division == "rows" else self.number
        access = Access(self.number, self.now, (division, of), True, self.role)
        self.unfenced.append(access)
        self.disturb((name, slot), access)

    def disturb(self, tile: Tile, access: Access) -> None:
        """Note a write of a tile. A product that it disturbs taints its accumulator."""
        for other, *fault in self.cta.tile(tile).write(access, self.clock, tile):
            if other.product is not None and not other.product.used:
                other.product.faults.append(Fault(*fault, self.place()))
            else:
                self.note(Fault(*fault))

    def fence(self) -> None:
        """fence.proxy.async: products and TMA see what this warp has written."""
        for access in self.unfenced:
            access.fenced = self.now
        self.unfenced.clear()

    def product(
        self,
        tiles: list[tuple[Tile, bool]],
        operands: Sequence[str],
        accumulator: str,
        clear: bool,
        waits: bool,
    ) -> None:
        """Start a product of fragments and tiles, of which the warp reads its 16 rows or all; waits: and wait for it."""
        self.touch(reads=operands)
        product = Product(accumulator, frozenset(operands))
        for tile, by_rows in tiles:
            share = ("rows", self.number % WARPS) if by_rows else None
            access = Access(self.number, NEVER, share, False, self.role, product=product)
            product.accesses.append(access)
            for fault in self.cta.tile(tile).read(access, self.clock, tile):
                product.faults.append(Fault(*fault, self.place()))
        self.registers.start(product, self.truth(clear, 0))
        if waits:
            self.registers.wait(0, self.now)

    def products(self, left: int) -> None:
        """Wait until at most `left` products are in flight."""
        self.registers.wait(left, self.now)

    def put(self, name: str, slot: Any, waits: bool = False, share: Share = None) -> None:
        """Start a store of a tile by TMA; in a consumer warpgroup by its first warp."""
        if self.cta.kernel.synced or (share is None and self.starts_none):
            return
        access = Access(self.number, NEVER, share, False, f"a store of {self.role}")
        for fault in self.cta.tile((name, slot)).read(access, self.clock, (name, slot)):
            self.note(Fault(*fault))
        self.puts.append([access])
        if waits:
            self.wait_puts(0)

    def wait_puts(self, left: int) -> None:
        """Wait until at most `left` stores by TMA still read shared memory."""
        for accesses in self.puts[: max(len(self.puts) - left, 0)]:
            for access in accesses:
                access.time = self.now
        del self.puts[: max(len(self.puts) - left, 0)]

    # Where it is

    def place(self) -> tuple[int, str, dict]:
        """(line of the translated kernel, its text, values of the loops around it and of the kernel's variables)."""
        frame = self.generator.gi_frame
        if frame is None:
            return 0, "its end", {}
        line, values, lines = frame.f_lineno, {}, self.cta.kernel.lines
        depth = len(lines[line - 1])
        for above in reversed(lines[:line]):
            indent = len(above) - len(above.lstrip())
            if indent < depth:
                depth = indent
                if found := re.match(r"for (\w+) in", above.strip()):
                    values[found[1]] = frame.f_locals.get(found[1])
        for name, value in frame.f_locals.items():
            if isinstance(value, Variable) and len(value) == 1:
                (value,) = value.values()
                if isinstance(value, int) and value:
                    values[name] = value
        return line, lines[line - 1].strip(), values

    def note(self, fault: Fault) -> None:
        line, source, values = fault.where or self.place()
        self.machine.add(Finding(fault.kind, self.role, fault.text, line, source, values), fault.key)

    def send(self) -> list[int]:
        """The clock at an arrival; what the warp does next is later."""
        clock = list(self.clock)
        self.clock[self.number] += 1
        return clock

    def learn(self, clock: list[int]) -> None:
        self.clock = join(self.clock, clock)


class Machine:
    """CTAs of a launch that run together, and the order in which they go on.

    Args:
        blocks: block indices of the CTAs.
        residents: CTAs that run at a time. A further one begins when one ends.
        who: "producer first", "consumers first", "one ahead", "one late", "helpers late", "random": which warp goes on, of those that
            can. Helpers are the warps beside the producer; copies land before they go on.
        copies: "first", "last", "random": when copies land.
        choose: function (warp, site) that answers conditions on unknown data.
    """

    def __init__(
        self,
        kernel: Kernel,
        blocks: list[dict],
        residents: int,
        who: str,
        copies: str,
        choose: Callable[[int, int], bool],
        seed: int,
        limit: int = 3_000_000,
    ):
        self.kernel, self.copies, self.choose, self.limit = kernel, copies, choose, limit
        self.random = random.Random(seed)
        self.flying: list[tuple[Mbarrier, int, list[int]]] = []
        self.findings: list[Finding] = []
        self.seen: set = set()
        self.events = self.version = 0
        self.coming, self.ctas, self.warps = list(blocks), [], []
        self.has_several = len(blocks) > 1
        self.left: list[str] = []
        # Of row blocks of the sums of dq, see externs.py: (counter, event) of roundings, and counters of additions that are not rounded
        self.rounded: dict[int, list[tuple[int, int]]] = {}
        self.added: dict[int, set[int]] = {}
        special = self.random.randrange(kernel.warps) if who in ("one ahead", "one late") else 0
        self.order: Callable[[Warp], Any] | None = {
            "producer first": lambda warp: -warp.number,
            "consumers first": lambda warp: warp.number,
            "one ahead": lambda warp: (warp.number != special, self.random.random()),
            "one late": lambda warp: (warp.number == special, self.random.random()),
            "helpers late": lambda warp: (warp.number if self.is_helper(warp) else 0, self.random.random()),
            "random": None,
        }[who]
        self.helpers_late = who == "helpers late"
        self.requests = {name[3:]: getattr(self, name) for name in dir(self) if name.startswith("do_")}
        for _ in range(residents):
            self.begin_cta()

    def is_helper(self, warp: Warp) -> bool:
        return warp.last_group and warp.number % WARPS != 0

    def add(self, finding: Finding, key: Any) -> None:
        if (found := (finding.kind, finding.line, key)) not in self.seen:
            self.seen.add(found)
            self.findings.append(finding)

    def begin_cta(self) -> None:
        if self.coming:
            cta = Cta(self, self.kernel, self.coming.pop(0))
            self.ctas.append(cta)
            self.warps += cta.warps

    # Requests. They return False if the warp has to wait

    def do_go(self, warp: Warp) -> bool:
        return True

    def do_until(self, warp: Warp, condition: Callable[[], bool], text: str) -> bool:
        """Wait for a number in global memory."""
        return condition()

    def do_store(self, warp: Warp, name: str, where: tuple, value: Any) -> bool:
        """Write a word of shared memory. Several warps may write the same value."""
        if not known(*where):
            raise TypeError(f"an index of {name} depends on unknown data")
        words, writes = warp.cta.words, warp.cta.tile((name, where)).writes
        again = writes and writes[-1].entry != warp.number and known(value) and words[name, where] == value
        if not again and not self.kernel.synced:
            warp.disturb((name, where), Access(warp.number, warp.now, None, True, warp.role))
        words[name, where] = value
        return True

    def do_arrive(self, warp: Warp, name: str, slot: int) -> bool:
        self.arrive(warp, warp.cta.mbarriers[name, slot], warp.send())
        return True

    def arrive(self, warp: Warp, barrier: Mbarrier, clock: list[int]) -> None:
        barrier.coming = join(barrier.coming, clock)
        barrier.arrived[warp.number] += 1
        if barrier.arrived[warp.number] > 1 and barrier.count > 1:
            warp.note(
                Fault("arrives twice", f"twice in phase {barrier.completed} of {barrier.name}", barrier.name)
            )
        barrier.pending -= 1
        self.version += barrier.settle()

    def do_load(self, warp: Warp, name: str, slot: int, size: int, arrives: bool, tile: Tile) -> bool:
        """Start a copy by TMA; in a consumer warpgroup its first warp does. Copies of one phase go to different parts of a tile."""
        if warp.starts_none:
            return True
        barrier = warp.cta.mbarriers[name, slot]
        share = f"{barrier.name} {barrier.completed}", self.events
        warp.disturb(
            tile, Access(barrier.entry, barrier.completed + 1, share, False, f"a copy of {warp.role}")
        )
        barrier.bytes += size
        clock = warp.send()
        self.flying.append((barrier, size, clock))
        if arrives:
            self.arrive(warp, barrier, clock)
        return True

    def do_wait(self, warp: Warp, name: str, slot: int, parity: int, phase: int | None) -> bool:
        barrier = warp.cta.mbarriers[name, slot]
        if not barrier.passes(parity):
            return False
        if phase is not None and barrier.completed != phase + 1:
            kind = "passes early" if barrier.completed < phase + 1 else "passes late"
            text = f"{barrier.name} has completed {barrier.completed} phases, the wait means phase {phase}"
            warp.note(Fault(kind, text, barrier.name))
        warp.learn(barrier.clock)
        return True

    def _arrive_named(self, warp: Warp, number: int, threads: int | None) -> None:
        barrier = warp.cta.named.setdefault(number, NamedBarrier())
        threads = WARP * self.kernel.warps if threads is None else threads
        if barrier.arrived and barrier.threads != threads:
            text = f"{number} for {threads} threads, others came for {barrier.threads}"
            warp.note(Fault("named barrier", text, number))
        barrier.threads = threads
        barrier.coming = join(barrier.coming, warp.send())
        barrier.arrived += WARP
        if barrier.arrived >= threads:
            barrier.arrived -= threads
            barrier.result[barrier.generation] = barrier.any
            barrier.any = False
            barrier.clocks[barrier.generation] = list(barrier.coming)
            barrier.generation += 1
            self.version += 1

    def do_pass(self, warp: Warp, number: int, threads: int) -> bool:
        self._arrive_named(warp, number, threads)
        return True

    def do_sync(self, warp: Warp, number: int, threads: int | None) -> bool:
        barrier = warp.cta.named.setdefault(number, NamedBarrier())
        if warp.ticket < 0:
            warp.ticket = barrier.generation
            self._arrive_named(warp, number, threads)
        if barrier.generation <= warp.ticket:
            return False
        warp.learn(barrier.clocks[warp.ticket])
        warp.ticket = -1
        return True

    def do_any(self, warp: Warp, number: int, threads: int, flag: Any) -> bool:
        barrier = warp.cta.named.setdefault(number, NamedBarrier())
        if warp.ticket < 0 and warp.truth(flag != 0, 0):
            barrier.any = True
        ticket = barrier.generation if warp.ticket < 0 else warp.ticket
        if not self.do_sync(warp, number, threads):
            return False
        warp.answer = int(barrier.result[ticket])
        return True

    # The scheduler

    def step(self, warp: Warp) -> bool:
        """Let a warp take one step. False if it waits."""
        self.events += 1
        if self.events > self.limit:
            raise Stuck("too many events")
        if warp.request is None:
            try:
                warp.request = warp.generator.send(warp.answer)
            except StopIteration:
                self.end_warp(warp)
                return True
            warp.answer = None
        kind, *rest = warp.request
        if not self.requests[kind](warp, *rest):
            warp.blocked = self.version
            return False
        warp.request = None
        return True

    def end_warp(self, warp: Warp) -> None:
        self.warps.remove(warp)
        for kind, left in (("store by TMA", warp.puts), ("product", warp.registers.flying)):
            if left:
                warp.note(Fault("ends early", f"ends while a {kind} may still read shared memory", kind))
        if not any(other.cta is warp.cta for other in self.warps):
            self.left += warp.cta.left()
            self.begin_cta()
            self.version += 1

    def land(self) -> None:
        """Let a copy land."""
        barrier, size, clock = self.flying.pop(self.random.randrange(len(self.flying)))
        barrier.coming = join(barrier.coming, clock)
        barrier.bytes -= size
        self.version += barrier.settle()

    def run(self) -> None:
        """Run all warps to their ends. Raises Stuck if none can go on."""
        while self.warps:
            if self.flying and (
                self.copies == "first" or (self.copies == "random" and self.random.random() < 0.2)
            ):
                self.land()
                continue
            ready = [warp for warp in self.warps if warp.blocked != self.version]
            if not ready:
                if not self.flying:
                    raise Stuck("deadlock")
                self.land()
                continue
            if self.order is None:
                self.step(self.random.choice(ready))
                continue
            warp = min(ready, key=self.order)
            if self.helpers_late and self.flying and self.is_helper(warp):
                self.land()
                continue
            while self.step(warp) and warp in self.warps:  # a warp goes on until it waits
                pass

    def waiting(self) -> list[Finding]:
        """Place where each warp waits; warps of a warpgroup that wait at one place are one finding."""
        found: dict[tuple, Finding] = {}
        for warp in self.warps:
            line, source, values = warp.place()
            kind, *rest = warp.request or ("go",)
            if kind == "wait":
                name, slot, parity, phase = rest
                b = warp.cta.mbarriers[name, slot]
                text = f"waits at {b.name} for phase {phase} (parity {parity}), which has completed {b.completed} phases; in this one "
                text += f"{b.count - b.pending} of {b.count} arrivals, {b.bytes} bytes still to come"
            elif kind == "until":
                text = f"waits until {rest[1]}"
            elif kind in ("sync", "any"):
                b = warp.cta.named[rest[0]]
                text = f"waits at named barrier {rest[0]} with {b.arrived} of {b.threads} threads"
            else:
                text = "goes on"
            role, _, one = warp.role.partition(", warp ")
            key = role, line, text, tuple(values.items())
            if key in found:
                found[key].role += f" {one}"
            else:
                found[key] = Finding("waits", warp.role, text, line, source, values)
        return list(found.values())
