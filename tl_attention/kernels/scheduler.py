"""Which CTA computes which tile (block_M queries of one head), and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T


@dataclass(frozen=True)
class TileOrder:
    """Numbers the tiles of a problem; what it needs is worked out on the host (dispatch.plan), where a division is cheap.

    Causal: the last queries, which see the most keys, first, over a group of heads whose keys and values stay in the L2 together;
    group after group. Full: all tiles of a head, then the next head. With splits, so many CTAs a tile: those that walk the same keys
    beside each other, so all tiles of a group of heads for one part of the keys, then for the next.

    table: of sequences of any lengths, int32 [m_blocks, 8], the tiles of all of them as tile_table.py puts them, the longest
    first; heads are then those of one sequence, and a group of them goes through all tiles before the next.
    """

    causal: bool
    heads: Any
    all_heads: Any  # heads * batch
    heads_a_kv_head: Any
    m_blocks: Any
    group_heads: Any
    splits: Any = None
    table: Any = None

    @classmethod
    def of(
        cls, launch: Launch, causal: bool, heads: Any, all_heads: Any, splits: Any = None, table: Any = None
    ) -> TileOrder:
        """Of a launch whose tiles are blocks of queries."""
        of_launch = launch.heads_a_kv_head, launch.m_blocks, launch.group_heads
        return cls(causal, heads, all_heads, *of_launch, splits, table)

    @property
    def grouped(self) -> bool:
        return self.causal or self.splits is not None or self.table is not None

    @property
    def ctas_a_head(self) -> Any:
        return self.m_blocks if self.splits is None else self.m_blocks * self.splits

    @property
    def num_tiles(self) -> Any:
        return self.m_blocks * self.all_heads


@dataclass(frozen=True)
class Launch:
    """What dispatch works out of a launch for its tiles."""

    heads_a_kv_head: Any
    m_blocks: Any
    group_heads: Any
    ctas: Any


@T.meta_class
class Tile:
    """Where the tile at hand lies.

    In variables: as expressions of its number they kept the prover of TileLang 0.1.15 busy for a minute.
    """

    def __init__(self, order: TileOrder, name: str = "tile"):
        self.order = order
        self.batch_idx, self.head_idx, self.kv_head_idx, self.block = (
            T.alloc_var("int32", init=0) for _ in range(4)
        )
        self.first_head, self.rank, self.members = (T.alloc_var("int32", init=0) for _ in range(3))
        self.split_idx = None if order.splits is None else T.alloc_var("int32", init=0)
        # Of the sequence: past its last row in q and k, its rows, and where its padded rows begin
        self.end_q, self.len_q, self.end_k, self.len_k, self.padded_q, self.padded_k = (
            None if order.table is None else T.alloc_var("int32", init=0) for _ in range(6)
        )

    @property
    def there(self) -> Any:
        """Whether there is such a tile: a table may have room for more."""
        return True if self.order.table is None else self.block[0] >= 0

    @property
    def group_end(self) -> Any:
        """Past the last tile of its group of heads: none of those from one on that is not there is."""
        return (self.first_head[0] + self.members[0]) * self.order.m_blocks

    @property
    def place(self) -> tuple:
        return self.block, self.head_idx, self.batch_idx

    @property
    def sequence(self) -> tuple:
        return () if self.order.table is None else (self.end_q, self.len_q, self.end_k, self.len_k)

    @property
    def split(self) -> Any:
        return self.split_idx[0]

    @property
    def batch(self) -> Any:
        return self.batch_idx[0]

    @property
    def head(self) -> Any:
        return self.head_idx[0]

    @property
    def kv_head(self) -> Any:
        return self.kv_head_idx[0]

    @property
    def m_block(self) -> Any:
        return self.block[0]

    @T.inline
    def locate(self, number):
        order = self.order
        if order.grouped:
            self.first_head[0] = T.truncdiv(number, order.group_heads * order.ctas_a_head) * order.group_heads
            self.rank[0] = number - self.first_head[0] * order.ctas_a_head
            self.members[0] = T.min(order.group_heads, order.all_heads - self.first_head[0])
            if order.splits is not None:
                self.split_idx[0] = T.truncdiv(self.rank[0], self.members[0] * order.m_blocks)
                self.rank[0] = T.truncmod(self.rank[0], self.members[0] * order.m_blocks)
            self.head_idx[0] = self.first_head[0] + T.truncmod(self.rank[0], self.members[0])
            self.block[0] = order.m_blocks - 1 - T.truncdiv(self.rank[0], self.members[0])
        else:
            self.head_idx[0] = T.truncdiv(number, order.m_blocks)
            self.block[0] = T.truncmod(number, order.m_blocks)
        if order.table is not None:
            self.look_up(order.m_blocks - 1 - self.block[0])
        else:
            self.batch_idx[0] = T.truncdiv(self.head_idx[0], order.heads)
            self.head_idx[0] = T.truncmod(self.head_idx[0], order.heads)
        self.find_kv_head()

    @T.inline
    def find_kv_head(self):
        self.kv_head_idx[0] = T.truncdiv(self.head_idx[0], self.order.heads_a_kv_head)

    @T.inline
    def look_up(self, entry):
        self.batch_idx[0] = T.shfl_sync(self.order.table[entry, 0], 0)
        self.block[0] = T.shfl_sync(self.order.table[entry, 1], 0)
        self.end_q[0] = T.shfl_sync(self.order.table[entry, 2], 0)
        self.len_q[0] = T.shfl_sync(self.order.table[entry, 3], 0)
        self.end_k[0] = T.shfl_sync(self.order.table[entry, 4], 0)
        self.len_k[0] = T.shfl_sync(self.order.table[entry, 5], 0)
        self.padded_q[0] = T.shfl_sync(self.order.table[entry, 6], 0)
        self.padded_k[0] = T.shfl_sync(self.order.table[entry, 7], 0)


def indices(numbers: tuple) -> tuple[int, ...]:
    """What unrolls a loop in a kernel; over variables themselves it would take their names away (TileLang 0.1.15)."""
    return tuple(range(len(numbers)))


@T.meta_class
class TileBox:
    """Where the producer leaves the plan of each tile for the consumers, which so neither divide nor count: 3 numbers of its place,
    its first step, up to 4 of its blocks of keys and, of sequences in a table, 4 of its sequence.

    An m_block of -1 is the end. The producer posts a plan after it has room for the tile's queries: by then the consumers
    have released those of the turn before, or of two turns before, and read the plan in this slot ahead of that. An mbarrier
    does not keep the compiler from moving plain loads and stores across it; a sync_warp on either side does.
    """

    def __init__(self, has_table: bool, name: str = "tile_box"):
        self.plans = T.alloc_shared([2, 12 if has_table else 8], "int32")
        self.full = T.alloc_barrier([1, 1])

    @T.inline
    def post(self, turn, tile, first_step, blocks):
        if T.get_thread_binding() % 32 == 0:
            for i in indices(tile.place):
                self.plans[turn % 2, i] = tile.place[i][0]
            self.plans[turn % 2, 3] = first_step
            for i in indices(blocks.counts):
                self.plans[turn % 2, 4 + i] = blocks.counts[i][0]
            for i in indices(tile.sequence):
                self.plans[turn % 2, 8 + i] = tile.sequence[i][0]
        self.announce(turn)

    @T.inline
    def close(self, turn):
        if T.get_thread_binding() % 32 == 0:
            self.plans[turn % 2, 0] = -1
        self.announce(turn)

    @T.inline
    def announce(self, turn):
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.full[turn % 2])

    @T.inline
    def wait(self, turn):
        T.mbarrier_wait_parity(self.full[turn % 2], turn // 2 % 2)
        T.sync_warp()

    def at_end(self, turn: Any) -> Any:
        return self.plans[turn % 2, 0] < 0

    @T.inline
    def read_tile(self, turn, tile):
        for i in indices(tile.place):
            tile.place[i][0] = self.plans[turn % 2, i]
        for i in indices(tile.sequence):
            tile.sequence[i][0] = self.plans[turn % 2, 8 + i]
        T.sync_warp()

    @T.inline
    def read_blocks(self, turn, blocks):
        # From one lane, as KeyBlocks.start has them
        for i in indices(blocks.counts):
            blocks.counts[i][0] = T.shfl_sync(self.plans[turn % 2, 4 + i], 0)

    def first_step(self, turn: Any) -> Any:
        return T.shfl_sync(self.plans[turn % 2, 3], 0)


@T.meta_class
class Verdicts:
    """Whether the consumers are done with a tile, and whether it has to be walked again, with the maxima followed.

    A turn's verdict is read before the plan of two turns later is posted, so its plan is in the box still.
    """

    def __init__(self, consumer_warps: int, name: str = "verdicts"):
        self.notes = T.alloc_shared([2, 2], "int32")  # of a turn: is it a second walk, is one needed
        self.done = T.alloc_barrier([consumer_warps] * 2)

    @T.inline
    def open(self, turn, again):
        """By the producer, before it posts the plan of the turn."""
        if T.get_thread_binding() % 32 == 0:
            self.notes[turn % 2, 0] = again
            self.notes[turn % 2, 1] = 0

    def again(self, turn: Any) -> Any:
        return T.shfl_sync(self.notes[turn % 2, 0], 0)

    @T.inline
    def fail(self, turn):
        """By a warp of the consumers, before give()."""
        if T.get_thread_binding() % 32 == 0:
            self.notes[turn % 2, 1] = 1

    @T.inline
    def give(self, turn):
        """By each warp of the consumers, after it read the plan of the turn for the last time."""
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.done[turn % 2])


@T.meta_class
class SecondWalk:
    """By the producer: how many turns ago a tile failed that has not been walked again yet; 0 if there is none."""

    def __init__(self, verdicts: Verdicts, name: str = "second_walk"):
        self.verdicts, self.turns_ago = verdicts, T.alloc_var("int32", init=0)

    @property
    def ago(self) -> Any:
        return self.turns_ago[0]

    @T.inline
    def look(self, turn, at_end):
        """At the tile of two turns before, which consumers are done with, or soon are; if there is no other, at that before too."""
        notes, done = self.verdicts.notes, self.verdicts.done
        self.turns_ago[0] = 0
        for back in (2, 1):
            if (self.turns_ago[0] == 0) & (turn >= back) & (at_end | (back == 2)):
                T.mbarrier_wait_parity(done[(turn - back) % 2], (turn - back) // 2 % 2)
                T.sync_warp()
                if T.shfl_sync(notes[(turn - back) % 2, 1], 0) != 0:
                    self.turns_ago[0] = back
                    if T.get_thread_binding() % 32 == 0:
                        notes[(turn - back) % 2, 1] = 0
                T.sync_warp()


@T.meta_class
class TileNumbers:
    """The numbers of the tiles a CTA takes.

    persistent: every ctas-th. dynamic: the next that no CTA has drawn yet, by a counter in global memory, [numbers drawn, CTAs
    done], both 0 before the kernel and after it.
    """

    def __init__(self, schedule: str, first: Any, ctas: Any, tickets: Any, name: str = "tile_numbers"):
        self.dynamic, self.ctas, self.tickets = schedule == "dynamic", ctas, tickets
        self.current = T.alloc_var("int32", init=first)
        self.drawn = T.alloc_var("int32", init=0)

    @T.inline
    def draw(self):
        """Some time before advance, which so need not wait for the counter."""
        if self.dynamic:
            if T.get_thread_binding() % 32 == 0:
                self.drawn[0] = T.atomic_add(self.tickets[0], 1, return_prev=True)

    @T.inline
    def advance(self):
        if self.dynamic:
            self.current[0] = self.ctas + T.shfl_sync(self.drawn[0], 0)
        else:
            self.current[0] += self.ctas

    @T.inline
    def skip(self, end):
        """On, where no tile is there before the one of number `end`."""
        if self.dynamic:
            if T.get_thread_binding() % 32 == 0:
                T.atomic_max(self.tickets[0], end - self.ctas)
            self.draw()
        self.advance()

    @T.inline
    def close(self):
        """The last CTA to see the end puts the counter back to 0 for the next kernel on this stream."""
        if self.dynamic:
            if T.get_thread_binding() % 32 == 0:
                if T.atomic_add(self.tickets[1], 1, return_prev=True) == self.ctas - 1:
                    self.tickets[0] = 0
                    self.tickets[1] = 0
