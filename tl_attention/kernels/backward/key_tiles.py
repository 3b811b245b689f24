"""Tiles of the backward by keys: the key tile of a CTA, its mask, and the division of a dQ tile among warpgroups."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.config.round_configs import LAST_WAVES, SIDE_WAVES
from tl_attention.kernels.scores.mask import Mask
from tl_attention.kernels.seams.pipeline import indices
from tl_attention.kernels.seams.scheduler import Tile, TileBox, TileOrder
from tl_attention.kernels.sources.sequence_order import SequenceOrder, SequenceTile
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem

Piece = tuple[slice, slice]  # rows (queries) and columns of a dQ tile


def dq_pieces(block_M: int, head_dim: int, warpgroups: int) -> list[list[Piece]]:
    """Pieces of a dQ tile [block_M, head_dim] that each warpgroup computes.

    A warpgroup gets 64 rows if there are 64 for each, else a share of the columns of all rows: one piece, see key_chunk. A third warpgroup
    gets none.
    """
    if block_M == 64 * warpgroups:
        return [[(slice(64 * w, 64 * w + 64), slice(0, head_dim))] for w in range(warpgroups)]
    share = head_dim // min(warpgroups, 2)
    return [[(slice(0, block_M), slice(w * share, (w + 1) * share))][: w < 2] for w in range(warpgroups)]


def key_chunk(block_M: int, head_dim: int, warpgroups: int) -> int:
    """Columns per chunk of the swizzled layout of K, so that one GEMM computes a warpgroup's share of dQ.

    A GEMM reads a part of one chunk, or whole ones: two warpgroups with 48 columns each take chunks of 16. In chunks of 32, TileLang's
    choice, they had four GEMMs, of 32 and 16 columns, which wait for dS from shared memory.
    """
    width = piece_shape(dq_pieces(block_M, head_dim, warpgroups)[0][0])[1]
    return 64 if 64 % width == 0 else math.gcd(width, 64)


def piece_shape(piece: Piece) -> list[int]:
    """[rows, columns] of a piece."""
    return [part.stop - part.start for part in piece]


def skips_steps(problem: AttnProblem, config: BwdPass) -> bool:
    """True if a causal mask may hide leading steps of a tile from one of its two warpgroups, which then skips them.

    These are the first queries for the last 64 keys, and in a pass that makes dq alone the last keys for the first 64 queries.
    """
    rows, step = config.block_N, config.block_M
    if config.grads == "dq":
        rows, step = step, rows
    return problem.is_fp32 and not problem.options and problem.is_plain_causal and step < rows == 128


def scores_come_first(problem: AttnProblem, config: BwdPass) -> bool:
    """True if a step issues its own S first. Else the step before issues it, and the last step issues an S of no use.

    Two passes with one_sum gain by it: 16 x 16 x 1024 of d128 causal in fp32, high, takes 1.350 ms in place of 1.384 (H200, 2026-11-27).
    """
    two_passes = config.grads == "dq" or (config.grads == "dk+dv" and not config.reuse_registers)
    return problem.is_fp32 and config.one_sum and two_passes


@T.macro
def skip_steps(first, second, step, steps, block):
    """Wait for the tiles of two rings in the steps that a warpgroup skips, and release them.

    The number of waits does not depend on `steps`. If it did, nvcc would take the warp for diverged, and keep descriptors in later loops
    out of uniform registers: 102 R2UR per step of d64.

    Args:
        steps: number of skipped steps, of `block` rows each. Together they have at most 64 rows, rounded up to whole steps.
    """
    for i in tuple(range(-(-64 // block))):
        first.wait(step + T.min(i, steps))
        second.wait(step + T.min(i, steps))
        if i < steps:
            first.release(step + i)
            second.release(step + i)


@dataclass(frozen=True)
class KeyTileCounts:
    """Counts of key tiles, int32, from the host. A CTA owns one key block of a key head, and one share of its query heads or queries."""

    heads_per_kv: Any  # query heads per key head
    heads_per_sharer: Any  # query heads per CTA
    sharers: Any  # CTAs that share the query heads of a key head, or with the schedule stream-K the queries of a shared tile
    n_blocks: Any  # key blocks per sequence; for packed sequences of all together
    group_heads: Any  # heads per group of scheduler.TileOrder
    ctas: Any
    whole: Any = None  # with the schedule stream-K: the number of the first shared tile


@dataclass(frozen=True)
class StreamKOrder(TileOrder):
    """TileOrder in which the tiles from number `whole` on are shared: each is drawn `sharers` times."""

    whole: Any = None
    sharers: Any = None

    @property
    def num_tiles(self) -> Any:
        return self.whole + (self.m_blocks * self.all_heads - self.whole) * self.sharers

    def tile(self, number: Any) -> Any:
        """Number of the tile that is drawn as `number`."""
        shared = self.whole + T.truncdiv(number - self.whole, self.sharers)
        return T.if_then_else(number < self.whole, number, shared)

    def sharer(self, number: Any) -> Any:
        return T.if_then_else(number < self.whole, 0, T.truncmod(number - self.whole, self.sharers))

    def sharers_of(self, number: Any) -> Any:
        return T.if_then_else(number < self.whole, 1, self.sharers)


def order_sharers(config: BwdPass, counts: KeyTileCounts) -> Any:
    """Heads of TileOrder per key head: as many as its tiles have sharers, or one in a stream-K pass."""
    return 1 if config.is_stream_k else counts.sharers


def key_order(
    problem: AttnProblem,
    config: BwdPass,
    counts: KeyTileCounts,
    key_heads: Any,
    heads: Any,
    all_heads: Any,
    table: Any,
) -> TileOrder:
    """Order of the key tiles of a launch: a TileOrder whose blocks are blocks of keys. A key head has order_sharers() of its heads."""
    order = {
        "longest_first": problem.is_uneven or config.is_ordered,
        "heads": heads,
        "all_heads": all_heads,
        "heads_per_kv": order_sharers(config, counts),
        "m_blocks": counts.n_blocks,
        "group_heads": counts.group_heads,
        "table": table,
        "tiles_per_entry": TABLE_ROWS // config.block_N,
    }
    if config.rounds(problem) and problem.has("varlen"):
        last = T.ceildiv(LAST_WAVES * counts.ctas, heads)
        side = {"side_tiles": SIDE_WAVES * counts.ctas, "last_entries": last}
        return SequenceOrder(**order, key_heads=key_heads, **side)
    return (
        StreamKOrder(**order, whole=counts.whole, sharers=counts.sharers)
        if config.is_stream_k
        else TileOrder(**order)
    )


def partial_blocks(config: BwdPass, counts: KeyTileCounts) -> Any:
    """Row blocks of a partial dK or dV: of a tile in a stream-K pass, else of all keys."""
    return config.block_N // 16 if config.is_stream_k else counts.n_blocks * (config.block_N // 16)


@T.meta_class
class KeyTile:
    """Key tile of a CTA: block_N keys of a key head, and the query heads whose gradients flow to them.

    Args:
        ordered, stream_k: as the schedules of a BwdPass.
    """

    def __init__(
        self,
        order: TileOrder,
        block_N: int,
        ordered: bool = False,
        stream_k: bool = False,
        name: str = "key_tile",
    ):
        self.by_sequence = isinstance(order, SequenceOrder)
        self.tile = SequenceTile(order) if self.by_sequence else Tile(order)
        self.block_N, self.ordered, self.stream_k = block_N, ordered, stream_k
        self.steps = T.alloc_var("int32", init=0) if stream_k else None
        self.first = T.alloc_var("int32", init=0)
        self.part_idx = T.alloc_var("int32", init=0)  # number of the CTA among the sharers of the tile
        # Tiles of the head that are drawn before; the tile drawn last of them has queries from this one on. See AddingOrder
        self.rank, self.shared_from = (T.alloc_var("int32", init=0) if ordered else None for _ in range(2))
        self.end_q, self.len_q, self.padded_q = self.tile.end_q, self.tile.len_q, self.tile.padded_q
        self.end_k, self.len_k, self.padded_k = self.tile.end_k, self.tile.len_k, self.tile.padded_k
        self.tiles_before = self.tile.tiles_before if self.by_sequence else None

    @T.inline
    def start(self, number, counts, blocks):
        """Locate tile `number`, and start the loop over its query blocks.

        Under a causal mask the first keys have the most queries, so they come first. Tile puts its last block first: reverse it.
        """
        order = self.tile.order
        self.tile.locate(order.tile(number) if self.stream_k else number)
        if self.ordered:
            self.rank[0] = order.m_blocks - 1 - self.tile.m_block
            self.first[0] = self.rank[0] * self.block_N
            self.shared_from[0] = 0
            if blocks.mask.causal:
                if self.tile.first_head[0] + self.tile.heads_in_group[0] < order.all_heads:
                    # The last keys come first: their loops begin at later queries, so each tile finds the row blocks that it adds to
                    # free. In the last group the longest tiles come first, to end together; the group before keeps them apart
                    self.first[0] = self.tile.m_block * self.block_N
                    seen_from = self.first[0] + self.block_N + blocks.mask.seqlen_q - blocks.mask.seqlen_k
                    self.shared_from[0] = T.max(seen_from, 0)
        elif order.table is not None:
            self.first[0] = self.tile.m_block * self.block_N
        else:
            self.first[0] = (order.m_blocks - 1 - self.tile.m_block) * self.block_N
        self.part_idx[0] = self.sharer_of(number)
        first_head = self.tile.kv_head * counts.heads_per_kv + self.part_idx[0] * counts.heads_per_sharer
        heads = T.min(
            counts.heads_per_sharer, counts.heads_per_kv - self.part_idx[0] * counts.heads_per_sharer
        )
        if blocks.listed:
            parts = order.sharers_of(number) if self.stream_k else counts.sharers
            blocks.start_list(
                self.batch, self.kv_head, counts.heads_per_kv, self.first[0], self.sharer, parts
            )
        elif self.stream_k:
            blocks.start(self.first[0], self.tile.kv_head * counts.heads_per_kv, counts.heads_per_kv)
            blocks.keep_share(self.part_idx[0], order.sharers_of(number))
        else:
            blocks.start(self.first[0], first_head, heads)
        if self.stream_k:
            self.steps[0] = blocks.steps

    def sharer_of(self, number: Any) -> Any:
        order = self.tile.order
        return (
            order.sharer(number) if self.stream_k else self.tile.head - self.tile.kv_head * order.heads_per_kv
        )

    @property
    def position(self) -> tuple:
        return self.first, self.tile.kv_head_idx, self.tile.batch_idx, self.part_idx

    @property
    def sequence(self) -> tuple:
        """Variables of a tile in a table, or of an ordered one."""
        if self.ordered:
            return self.rank, self.shared_from
        padded = () if self.padded_q is None else (self.padded_q, self.padded_k)
        return *self.tile.sequence, *padded, *((self.tiles_before,) if self.by_sequence else ())

    @property
    def exists(self) -> Any:
        """False where the table has no entry, by sequence also where the tile has no keys, or a share of a shared tile no queries."""
        if self.by_sequence:
            return self.tile.exists & self.tile.has_keys
        return self.steps[0] > 0 if self.stream_k else self.tile.exists

    def group_end(self, number: Any) -> Any:
        """Number one past the head group of tile `number`; computed from the number, as the warp that draws tiles has few registers."""
        size = self.tile.order.group_heads * self.tile.order.m_blocks
        return (T.truncdiv(number, size) + 1) * size

    @property
    def batch(self) -> Any:
        return self.tile.batch

    @property
    def kv_head(self) -> Any:
        return self.tile.kv_head

    @property
    def sharer(self) -> Any:
        return self.part_idx[0]

    @property
    def first_key(self) -> Any:
        return self.first[0]


@T.meta_class
class KeyRowsMask:
    """Mask of tiles [64 keys, queries] whose first key is `key`.

    Args:
        mask: mask of the sequence.
        key: first key of the tile.
        relative: count keys from `key`, and read the diagonal from one lane. The sequence lengths then take no registers, of which a pass
            over packed sequences and one in the order apart have none to spare.
    """

    def __init__(self, mask: Mask, key: Any, relative: bool, name: str = "key_rows_mask"):
        self.mask, self.key, self.relative = mask, key, relative
        if relative:
            self.keys_left = T.alloc_var("int32", init=mask.seqlen_k - key)
            self.diagonal_0 = T.alloc_var("int32", init=mask.diagonal(0) - key)
            self.relative_mask = replace(mask, seqlen_q=self.keys_left[0], seqlen_k=self.keys_left[0])

    def diagonal(self, query: Any) -> Any:
        """Row of the tile that the diagonal of `query` crosses; it may lie outside the tile."""
        return self.mask.diagonal(query) - self.key

    @T.inline
    def hide(self, acc_s, query, scale):
        """Set masked scores [64, queries from `query` on] to the infinity that `scale` makes -inf."""
        if self.relative:
            diagonal = T.shfl_sync(self.diagonal_0[0] + query, 0)
            self.relative_mask.hide_transposed(acc_s, 0, diagonal, scale)
        else:
            self.mask.hide_transposed(acc_s, self.key, query, scale)

    @T.inline
    def clear(self, P, query):
        """Set masked probabilities [64, queries from `query` on] to 0."""
        self.mask.clear_transposed(P, self.key, query)


@T.meta_class
class KeyTileBox(TileBox):
    """TileBox of key tiles, in which a separate warp describes each tile to the producer and the consumers.

    A first key of -1 ends the work. Each reader counts the steps.

    Args:
        readers: warps that read it beside the producer.
        five_counts: of blocks, in place of up to four.
    """

    posts_first_step = False

    def __init__(
        self,
        readers: int,
        has_table: bool,
        late: bool,
        ordered: bool,
        five_counts: bool = False,
        name: str = "key_tile_box",
    ):
        super().__init__(has_table or ordered or five_counts, padded=has_table, name=name)
        # Warps that have read the slot; with `late` the producer is none of them, as it signals the end of its loads
        self.empty = T.alloc_barrier([readers if late else readers + 1] * 2)
        self.loaded = T.alloc_barrier([1, 1]) if late else None  # all loads of the tile are issued

    @T.inline
    def post(self, turn, tile, blocks):
        if T.get_thread_binding() % 32 == 0:
            for i in indices(tile.position):
                self.tiles[turn % 2, i] = tile.position[i][0]
            for i in indices(blocks.counts):
                self.tiles[turn % 2, 4 + i] = blocks.counts[i][0]
            for i in indices(tile.sequence):
                self.tiles[turn % 2, 8 + i] = tile.sequence[i][0]
        self.announce(turn)

    @T.inline
    def release(self, turn):
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[turn % 2])

    @T.inline
    def end_loads(self, turn):
        """Request the next tile; called by the producer at the end of its loads for a turn's tile."""
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.loaded[turn % 2])

    def wait_loaded(self, turn: Any) -> Any:
        return T.mbarrier_wait_parity(self.loaded[turn % 2], turn // 2 % 2)

    def wait_empty(self, turn: Any) -> Any:
        return T.mbarrier_wait_parity(self.empty[turn % 2], turn // 2 % 2 ^ 1)

    @T.inline
    def read_tile(self, turn, tile):
        for i in indices(tile.position):
            tile.position[i][0] = self.tiles[turn % 2, i]
        for i in indices(tile.sequence):
            tile.sequence[i][0] = self.tiles[turn % 2, 8 + i]

    @T.inline
    def read_blocks(self, turn, blocks):
        # From one lane, as QueryBlocks.start has the steps
        for i in indices(blocks.counts):
            blocks.counts[i][0] = T.shfl_sync(self.tiles[turn % 2, 4 + i], 0)
        blocks.restart()
