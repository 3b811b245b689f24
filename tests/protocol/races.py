"""Order of accesses to shared memory and registers, by vector clocks: a finding does not need an unlucky run.

A clock has an entry per warp and one per mbarrier, for the copies that arrive there. Who has acquired an entry's time knows that what
its owner did until then is over.

A product is asynchronous: it reads its tiles until its warp waits for it. A product that reads what is not there, or what may be
overwritten meanwhile, *taints* its accumulator. That is an error where the accumulator is read; a product that starts the accumulator
anew, or any other write of the whole, clears the taint. So products whose result nothing uses need no exception.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

Tile = tuple[str, int]  # (buffer, slot)
Share = tuple[str, int] | None  # (how a tile is divided, whose part); None: the whole tile


@dataclass
class Product:
    """A product of a warp's accumulator."""

    accumulator: str
    operands: frozenset[str]  # fragments that it reads
    accesses: list[Access] = field(default_factory=list)
    used: bool = False  # its result has been read
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A fault of an access, and where the warp was."""

    kind: str
    text: str
    key: object
    where: object = None


@dataclass
class Access:
    """A read or a write of a tile.

    Args:
        entry: of the clock.
        time: inf: it is not over.
        generic: by ld or st, not by TMA or wgmma.
        fenced: time of the proxy fence after a generic write; None: none yet.
        product: that reads.
    """

    entry: int
    time: float
    share: Share
    generic: bool
    who: str
    fenced: int | None = None
    product: Product | None = None


def overlap(a: Share, b: Share) -> bool:
    """False if two parts of a tile are disjoint: those of different warps in the same division."""
    return a is None or b is None or a[0] != b[0] or a[1] == b[1]


def covers(a: Share, b: Share) -> bool:
    """True if part a has all of part b."""
    return a is None or a == b


@dataclass
class TileState:
    """Accesses to a tile: the last write of each part, and the reads since."""

    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)

    def read(self, access: Access, clock: list[int], tile: Tile) -> Iterable[tuple[str, str, object]]:
        """Note a read. Yields (kind, text, key) of its faults."""
        if not self.writes:
            name = name_of(tile)
            yield "reads early", f"reads {name}, which nothing has filled", ("empty", name)
        for write in self.writes:
            if not overlap(write.share, access.share):
                continue
            if write.time > clock[write.entry]:
                name = name_of(tile)
                yield "reads early", f"reads {name}, which {write.who} may still write", ("early", name)
            elif (
                write.generic
                and not access.generic
                and not (write.fenced is not None and write.fenced <= clock[write.entry])
            ):
                name = name_of(tile)
                yield (
                    "no fence",
                    f"reads {name}, which {write.who} wrote without a proxy fence before its arrival",
                    name,
                )
        if access.product is None:
            self.reads = [
                x for x in self.reads if x.entry != access.entry or x.share != access.share or x.product
            ]
        self.reads.append(access)

    def write(
        self, access: Access, clock: list[int], tile: Tile
    ) -> Iterable[tuple[Access, str, str, object]]:
        """Note a write. Yields (the access that it disturbs, kind, text, key)."""
        for verb, others in (("read", self.reads), ("write", self.writes)):
            for other in others:
                if overlap(other.share, access.share) and other.time > clock[other.entry]:
                    name, how = name_of(tile), "a product of " if other.product is not None else ""
                    yield (
                        other,
                        "overwrites",
                        f"writes {name}, which {how}{other.who} may still {verb}",
                        (name, verb, other.who),
                    )
        self.reads = [x for x in self.reads if self._stays(x, access, clock)]
        self.writes = [x for x in self.writes if self._stays(x, access, clock)]
        self.writes.append(access)

    def _stays(self, old: Access, new: Access, clock: list[int]) -> bool:
        """False if an access needs no further notice: whoever knows the new write knows it, too. Copies of a phase fill a whole tile."""
        if new.generic:
            return not covers(new.share, old.share)
        return old.time > clock[old.entry] or not overlap(old.share, new.share)


@dataclass
class Registers:
    """Fragments of a warp and the products in flight, oldest first."""

    flying: list[Product] = field(default_factory=list)
    # Products that each fragment is the sum of
    contents: dict[str, list[Product]] = field(default_factory=dict)

    def start(self, product: Product, clear: bool) -> None:
        before = [] if clear else [x for x in self.contents.get(product.accumulator, ()) if not x.used]
        self.contents[product.accumulator] = [*before, product]
        self.flying.append(product)

    def wait(self, left: int, time: int) -> None:
        """Wait until at most `left` products are in flight."""
        for product in self.flying[: max(len(self.flying) - left, 0)]:
            for access in product.accesses:
                access.time = time
        del self.flying[: max(len(self.flying) - left, 0)]

    def touch(self, reads: Iterable[str], writes: Iterable[str], clears: Iterable[str]) -> Iterable[Fault]:
        """Note reads, writes and whole writes of fragments. Yields their faults."""
        for product in self.flying:
            if product.accumulator in (*reads, *writes, *clears):
                text = f"uses {product.accumulator}, which a product in flight computes"
                yield Fault("registers", text, (product.accumulator, "uses"))
            for name in product.operands.intersection((*writes, *clears)):
                yield Fault("registers", f"writes {name}, which a product in flight reads", (name, "writes"))
        for name in reads:
            for product in self.contents.get(name, ()):
                product.used = True
                yield from product.faults
                product.faults = []
        for name in clears:
            self.contents[name] = []


def join(a: list, b: list) -> list:
    """Clock that is not before either of two."""
    return [x if x > y else y for x, y in zip(a, b, strict=True)] if a and b else list(a or b)


def name_of(tile: Tile) -> str:
    name, slot = tile
    return f"{name}{list(slot) if isinstance(slot, tuple) else [slot]}"


NEVER = math.inf
