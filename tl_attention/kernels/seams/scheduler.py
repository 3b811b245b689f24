"""Schedules: which CTA computes which tile (block_M queries of one head), and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.seams.pipeline import indices

# The next tile is drawn this many steps before the end of a tile: in time to be located and to have its pages looked up
DRAW_AHEAD = 4


@dataclass(frozen=True)
class TileCounts:
    """Counts that the host computes per launch (launch.common.tile_counts), as divisions are cheap there.

    Args:
        heads_per_kv: query heads per key head.
        m_blocks: tiles per head.
        group_heads: heads whose keys and values stay in the L2 together.
        ctas: CTAs of the launch.
    """

    heads_per_kv: Any
    m_blocks: Any
    group_heads: Any
    ctas: Any


@dataclass(frozen=True)
class TileOrder:
    """Numbering of the tiles of a problem.

    Causal: within a group of heads whose keys and values fit into the L2 together, the tiles of the last queries of all heads come first,
    as they see the most keys; then the next group. Full: all tiles of a head, then the next head. Split, several CTAs per tile: all tiles
    of a group of heads for one share of the keys, then for the next share, so that neighbouring CTAs read the same keys.

    Args:
        longest_first: the order for causal masks and windows.
        all_heads: heads * batch.
        splits: CTAs per tile; None without a split.
        table: varlen: int32 [m_blocks, 8], the tiles of all sequences from tile_table.py, the longest first. `heads` then
            are those of one sequence, and a group of heads goes through all tiles before the next group.
        tiles_per_entry: adjacent tiles per entry of the table; m_blocks counts tiles. The last one may lie past the sequence.
    """

    longest_first: bool
    heads: Any
    all_heads: Any
    heads_per_kv: Any
    m_blocks: Any
    group_heads: Any
    splits: Any = None
    table: Any = None
    tiles_per_entry: int = 1

    @classmethod
    def of_queries(
        cls,
        counts: TileCounts,
        longest_first: bool,
        heads: Any,
        all_heads: Any,
        splits: Any = None,
        table: Any = None,
        tiles_per_entry: int = 1,
    ) -> TileOrder:
        """Order of a launch whose tiles are blocks of queries."""
        return cls(
            longest_first,
            heads,
            all_heads,
            counts.heads_per_kv,
            counts.m_blocks,
            counts.group_heads,
            splits,
            table,
            tiles_per_entry,
        )

    @property
    def grouped(self) -> bool:
        """True if tiles are numbered within groups of heads."""
        return self.longest_first or self.splits is not None or self.table is not None

    @property
    def ctas_per_head(self) -> Any:
        return self.m_blocks if self.splits is None else self.m_blocks * self.splits

    @property
    def num_tiles(self) -> Any:
        return self.m_blocks * self.all_heads


@T.meta_class
class Tile:
    """Position of the current tile: query block, head and batch index; number of its split; sequence, where there is a table.

    The numbers are variables: as expressions of the tile's number they took the prover of TileLang 0.1.15 a minute.

    loads_keys: a warp that loads keys has this tile, so it also needs the key head of a tile that it reads from a TileBox.
    """

    def __init__(self, order: TileOrder, loads_keys: bool = False, name: str = "tile"):
        self.order, self.loads_keys = order, loads_keys
        self.batch_idx, self.head_idx, self.kv_head_idx, self.block = (
            T.alloc_var("int32", init=0) for _ in range(4)
        )
        self.first_head, self.number_in_group, self.heads_in_group = (
            T.alloc_var("int32", init=0) for _ in range(3)
        )
        self.split_idx = None if order.splits is None else T.alloc_var("int32", init=0)
        # Varlen: one past the sequence's last row in q and k, its lengths, its first row in padded tensors
        self.end_q, self.len_q, self.end_k, self.len_k, self.padded_q, self.padded_k = (
            None if order.table is None else T.alloc_var("int32", init=0) for _ in range(6)
        )

    @property
    def exists(self) -> Any:
        """True if the table has an entry for the tile; the launch counts more tiles than there are."""
        return True if self.order.table is None else self.block[0] >= 0

    @property
    def group_end(self) -> Any:
        """Number one past the last tile of this head group. Once a tile is missing, all later tiles of the group are missing too."""
        return (self.first_head[0] + self.heads_in_group[0]) * self.order.m_blocks

    @property
    def position(self) -> tuple:
        """Variables that a TileBox holds of each tile."""
        return self.block, self.head_idx, self.batch_idx

    @property
    def sequence(self) -> tuple:
        """Variables that a TileBox holds of the sequence of a tile in a table."""
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
        """Set the position of the tile with this number."""
        order = self.order
        if order.grouped:
            self.first_head[0] = (
                T.truncdiv(number, order.group_heads * order.ctas_per_head) * order.group_heads
            )
            self.number_in_group[0] = number - self.first_head[0] * order.ctas_per_head
            self.heads_in_group[0] = T.min(order.group_heads, order.all_heads - self.first_head[0])
            if order.splits is not None:
                self.split_idx[0] = T.truncdiv(
                    self.number_in_group[0], self.heads_in_group[0] * order.m_blocks
                )
                self.number_in_group[0] = T.truncmod(
                    self.number_in_group[0], self.heads_in_group[0] * order.m_blocks
                )
            self.head_idx[0] = self.first_head[0] + T.truncmod(
                self.number_in_group[0], self.heads_in_group[0]
            )
            self.block[0] = order.m_blocks - 1 - T.truncdiv(self.number_in_group[0], self.heads_in_group[0])
        else:
            self.head_idx[0] = T.truncdiv(number, order.m_blocks)
            self.block[0] = T.truncmod(number, order.m_blocks)
        if order.table is not None and order.tiles_per_entry > 1:
            self.number_in_group[0] = order.m_blocks - 1 - self.block[0]
            self.read_table(T.truncdiv(self.number_in_group[0], order.tiles_per_entry))
            self.block[0] = self.block[0] * order.tiles_per_entry + T.truncmod(
                self.number_in_group[0], order.tiles_per_entry
            )
        elif order.table is not None:
            self.read_table(order.m_blocks - 1 - self.block[0])
        else:
            self.batch_idx[0] = T.truncdiv(self.head_idx[0], order.heads)
            self.head_idx[0] = T.truncmod(self.head_idx[0], order.heads)
        self.find_kv_head()

    @T.inline
    def find_kv_head(self):
        self.kv_head_idx[0] = T.truncdiv(self.head_idx[0], self.order.heads_per_kv)

    @T.inline
    def read_table(self, entry):
        """Set the sequence and block from an entry of the table."""
        self.batch_idx[0] = T.shfl_sync(self.order.table[entry, 0], 0)
        self.block[0] = T.shfl_sync(self.order.table[entry, 1], 0)
        self.end_q[0] = T.shfl_sync(self.order.table[entry, 2], 0)
        self.len_q[0] = T.shfl_sync(self.order.table[entry, 3], 0)
        self.end_k[0] = T.shfl_sync(self.order.table[entry, 4], 0)
        self.len_k[0] = T.shfl_sync(self.order.table[entry, 5], 0)
        self.padded_q[0] = T.shfl_sync(self.order.table[entry, 6], 0)
        self.padded_k[0] = T.shfl_sync(self.order.table[entry, 7], 0)


@T.meta_class
class TileBox:
    """Mailbox in shared memory with two slots, in which the producer describes each tile to the consumers.

    Consumers so neither divide nor count. The numbers of a description:

        0 to 2  position of the tile; -1 in place of the m_block ends the work
        3       first step of the tile
        4 to 7  step counts
        8, ..   with has_table 4 of the sequence, and with `padded` 4 more; without a table these are for further step counts

    Turn i of a CTA, its i-th tile, uses slot i % 2.

    The producer posts a description once it has room for the tile's queries. Consumers have then released the queries of one or two turns
    before, and they read this slot before they release them. An mbarrier does not keep the compiler from moving plain loads and stores
    across it; a sync_warp on either side does.
    """

    posts_first_step = True  # False: readers count the steps, as number 3 belongs to the position

    def __init__(self, has_table: bool, padded: bool = False, name: str = "tile_box"):
        self.tiles = T.alloc_shared([2, 8 + 4 * has_table + 4 * padded], "int32")
        self.full = T.alloc_barrier([1, 1])

    @T.inline
    def post(self, turn, tile, first_step, blocks):
        if T.get_thread_binding() % 32 == 0:
            for i in indices(tile.position):
                self.tiles[turn % 2, i] = tile.position[i][0]
            self.tiles[turn % 2, 3] = first_step
            for i in indices(blocks.counts):
                self.tiles[turn % 2, 4 + i] = blocks.counts[i][0]
            for i in indices(tile.sequence):
                self.tiles[turn % 2, 8 + i] = tile.sequence[i][0]
        self.announce(turn)

    @T.inline
    def close(self, turn):
        """Post the end of the work."""
        if T.get_thread_binding() % 32 == 0:
            self.tiles[turn % 2, 0] = -1
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

    @T.inline
    def each_posted(self, tile, blocks, work):
        """Read each posted tile and its blocks, and call work(turn, first_step), until the end of the work.

        first_step: of the tile in the rings, whose steps are counted through all tiles of a CTA.
        """
        turn = T.alloc_var("int32", init=0)
        counted = None if self.posts_first_step else T.alloc_var("int32", init=0)
        self.wait(0)
        while not self.at_end(turn):
            self.read_tile(turn, tile)
            self.read_blocks(turn, blocks)
            if self.posts_first_step:
                work(turn, self.first_step(turn))
            else:
                work(turn, counted)
                counted += blocks.steps
            turn += 1
            self.wait(turn)

    def at_end(self, turn: Any) -> Any:
        return self.tiles[turn % 2, 0] < 0

    @T.inline
    def read_tile(self, turn, tile):
        for i in indices(tile.position):
            tile.position[i][0] = self.tiles[turn % 2, i]
        for i in indices(tile.sequence):
            tile.sequence[i][0] = self.tiles[turn % 2, 8 + i]
        T.sync_warp()
        if tile.loads_keys:
            tile.find_kv_head()

    @T.inline
    def read_blocks(self, turn, blocks):
        # From one lane, so in uniform registers, as in KeyBlocks.start
        for i in indices(blocks.counts):
            blocks.counts[i][0] = T.shfl_sync(self.tiles[turn % 2, 4 + i], 0)

    def first_step(self, turn: Any) -> Any:
        return T.shfl_sync(self.tiles[turn % 2, 3], 0)


@T.meta_class
class Overflows:
    """Per turn of a held row max: whether the tile is a recomputation, and whether a row sum overflowed so that it needs one.

    The producer reads the flags of a turn before it posts the tile of two turns later, so the tile is still in the TileBox.
    """

    def __init__(self, consumer_warps: int, name: str = "overflows"):
        self.flags = T.alloc_shared([2, 2], "int32")  # [slot, (recomputes, overflowed)]
        self.done = T.alloc_barrier([consumer_warps] * 2)

    @T.inline
    def begin(self, turn, recomputes):
        """Set the flags of a turn; called by the producer, before it posts the tile."""
        if T.get_thread_binding() % 32 == 0:
            self.flags[turn % 2, 0] = recomputes
            self.flags[turn % 2, 1] = 0

    def recomputes(self, turn: Any) -> Any:
        return T.shfl_sync(self.flags[turn % 2, 0], 0)

    @T.inline
    def report(self, turn):
        """Request a recomputation; called by a consumer warp, before finish()."""
        if T.get_thread_binding() % 32 == 0:
            self.flags[turn % 2, 1] = 1

    @T.inline
    def finish(self, turn):
        """Arrive; called by each consumer warp after its last read of the turn's TileBox."""
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.done[turn % 2])


class OneTile:
    """Stand-in for the TileStream of a CTA that computes one tile: there is no other to draw."""

    def draw(self, *others: Any) -> None:
        return None

    def draw_near_end(self, *others: Any) -> None:
        return None


@T.meta_class
class TileStream:
    """Sequence of the tiles that a CTA computes, for its producer.

    persistent: every ctas-th tile. dynamic: the next tile that no CTA has drawn, by a counter in global memory: tickets [2] holds
    the numbers of tiles drawn and of CTAs done, both 0 before and after the kernel. overflows: tiles that overflowed come a second time.
    all_drawn: the caller draws the first tile of a CTA too, so that running CTAs have the first tiles, however many run.
    """

    def __init__(
        self,
        schedule: str,
        first: Any,
        order: TileOrder,
        ctas: Any,
        tickets: Any,
        tile_box: TileBox,
        overflows: Overflows | None,
        all_drawn: bool = False,
        name: str = "stream",
    ):
        self.dynamic, self.order, self.ctas, self.tickets = schedule == "dynamic", order, ctas, tickets
        self.tile_box, self.overflows = tile_box, overflows
        self.not_drawn = 0 if all_drawn else ctas
        self.number = T.alloc_var("int32", init=first)
        self.drawn = T.alloc_var("int32", init=0)
        # Turns since the overflowed tile that is recomputed; 0 for a new tile
        self.turns_ago = T.alloc_var("int32", init=0) if overflows is not None else None

    @property
    def stop(self) -> Any:
        """A number past those of all tiles."""
        return self.order.num_tiles

    @property
    def has_next(self) -> Any:
        is_new = self.number[0] < self.stop
        return is_new if self.overflows is None else is_new | (self.turns_ago[0] > 0)

    @property
    def recomputes(self) -> Any:
        return 0 if self.overflows is None else self.turns_ago[0]

    def is_new(self, turn: Any) -> Any:
        """True if the posted tile of this turn is new; read from shared memory, as a producer has no register for it."""
        return True if self.overflows is None else self.overflows.recomputes(turn) == 0

    @T.inline
    def locate(self, turn, tile):
        self.locate_whole(turn, tile)

    @T.inline
    def locate_whole(self, turn, tile):
        """Locate a tile that the CTA computes alone."""
        if self.overflows is None:
            tile.locate(self.number[0])
        else:
            if self.turns_ago[0] > 0:
                self.tile_box.read_tile(turn - self.turns_ago[0], tile)
            else:
                tile.locate(self.number[0])

    @T.inline
    def draw(self, turn):
        """Draw the next number some time before advance(), which then need not wait for the counter."""
        if self.is_new(turn):
            self.draw_ticket()

    @T.inline
    def draw_near_end(self, turn, step, steps):
        """draw() at a step DRAW_AHEAD before the end of a tile of `steps` steps, or at its first.

        Not earlier, as a drawn tile has to wait for its CTA: with draws at the first step, chunks of a prompt after 5000 to 12000 cached
        keys took 1.18 times as long; a simulation of the schedule agrees.
        """
        if step == T.max(steps - DRAW_AHEAD, 0):
            self.draw(turn)

    @T.inline
    def draw_ticket(self):
        """Draw a number from the counter, in lane 0."""
        if self.dynamic:
            if T.get_thread_binding() % 32 == 0:
                self.drawn[0] = T.atomic_add(self.tickets[0], 1, return_prev=True)

    @T.inline
    def advance(self, turn):
        """Go to the next number, unless the tile of this turn was a recomputation."""
        if self.is_new(turn):
            self.next_number()

    @T.inline
    def next_number(self):
        """Set `number` to what draw_ticket() has drawn, or to the next of every ctas-th."""
        if self.dynamic:
            self.number[0] = self.not_drawn + T.shfl_sync(self.drawn[0], 0)
        else:
            self.number[0] += self.ctas

    @T.inline
    def skip_to(self, end):
        """Go to the next number from `end` on: those before it have no tiles."""
        if self.dynamic:
            if T.get_thread_binding() % 32 == 0:
                T.atomic_max(self.tickets[0], end - self.not_drawn)
            self.draw_ticket()
        self.next_number()

    @T.inline
    def find_overflow(self, turn):
        """Find a tile that overflowed and is not recomputed yet; `turn` is the next one.

        It checks the tile of two turns ago, with which consumers are done or soon will be; at the end also the last tile.
        """
        if self.overflows is not None:
            flags, done = self.overflows.flags, self.overflows.done
            at_end = self.number[0] >= self.stop
            self.turns_ago[0] = 0
            for back in (2, 1):
                if (self.turns_ago[0] == 0) & (turn >= back) & (at_end | (back == 2)):
                    T.mbarrier_wait_parity(done[(turn - back) % 2], (turn - back) // 2 % 2)
                    T.sync_warp()
                    if T.shfl_sync(flags[(turn - back) % 2, 1], 0) != 0:
                        self.turns_ago[0] = back
                        if T.get_thread_binding() % 32 == 0:
                            flags[(turn - back) % 2, 1] = 0
                    T.sync_warp()

    @T.inline
    def close(self):
        """End the stream; call it after the last tile."""
        if self.dynamic:
            self.reset_tickets()

    @T.inline
    def reset_tickets(self):
        """Set the counters back to 0 for the next kernel on this stream, in the last CTA that ends."""
        if T.get_thread_binding() % 32 == 0:
            if T.atomic_add(self.tickets[1], 1, return_prev=True) == self.ctas - 1:
                self.tickets[0] = 0
                self.tickets[1] = 0
