"""Results of the forward: how O and Lse go to global memory, and how they are merged with the result of other keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config import query_tiles
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.cuda import source
from tl_attention.kernels.forward.query_slots import QuerySlots
from tl_attention.kernels.seams.pipeline import (
    fragment_address,
    store_fragment,
    sync_warpgroup,
    wait_for_stores,
)
from tl_attention.kernels.seams.row_stores import store_vector
from tl_attention.kernels.seams.softmax import LOWEST, rows_layout
from tl_attention.kernels.sources.tiles import (
    DenseSplitTiles,
    DenseTiles,
    PackedSplitTiles,
    PackedTiles,
    PagedSplitTiles,
    PagedTiles,
    result_argument,
    strided,
)
from tl_attention.problem.attn_problem import AttnProblem


@dataclass(frozen=True)
class Results:
    """How a forward stores O and Lse.

    O leaves from registers, through the tile of its queries, or through an smem tile of its own. With the schedule stream-K a CTA may leave
    a piece for another CTA instead, or merge the pieces of others.

    Args:
        slots: of Q, through which O may leave.
        Tiles: class of the tiles in global memory.
        splits: number of splits, a runtime value; None without a split.
        O, Lse: types of the kernel's arguments.
        from_registers: O does not pass through shared memory.
        shares: the schedule is stream-K.
        lse_is_final: nothing is merged into Lse, so the kernel stores it before O is complete.
        MaxLogits: type of the argument, in the shape of Lse; None where the largest scores are not stored.
    """

    slots: QuerySlots
    Tiles: type[DenseTiles]
    splits: Any
    O: Any
    Lse: Any
    from_registers: bool = False
    shares: bool = False
    lse_is_final: bool = True
    MaxLogits: Any = None

    @T.inline
    def store(self, w, q_step, tile, query, blocks, cta, chunks, lse):
        """Store O of 64 queries, and Lse unless it has been stored."""
        tiles, smem, slots = cta.tiles, cta.smem, self.slots
        if self.shares:
            if blocks.partners[0] < 0:  # another CTA merges this piece
                smem.pieces.store(blocks.rank[0], w, chunks[0], lse)
                slots.free_after_piece(q_step, smem.Q)
            smem.pieces.merge(blocks.rank[0], w, blocks.partners[0], chunks[0], lse, cta.lse_unit)
        if self.is_stored_here(blocks):
            if self.from_registers:
                tiles.store_result(chunks, lse, tile, query)
            elif slots.holds_output:
                store_output(w, tile, query, tiles, smem.Q.tiles, q_step % smem.Q.slots, chunks[0])
                slots.free_after_result(q_step, smem.Q)
            else:
                wait_for_stores()  # of the previous tile
                sync_warpgroup(w)
                store_output(w, tile, query, tiles, smem.O, w, chunks[0])
            if not self.lse_is_final:
                tiles.store_lse(lse, tile, query)

    def is_stored_here(self, blocks: Any) -> Any:
        """True if this CTA stores the result of the tile, and does not leave a piece of it."""
        return blocks.partners[0] >= 0 if self.shares else True


def results_of(
    problem: AttnProblem, config: FwdConfig, batch: Any, heads: Any, seqlen_q: Any, columns_v: Any
) -> Results:
    """Results of a problem; see kernel.flash_fwd for the layouts."""
    paged, varlen = config.page_rows > 0, problem.has("varlen")
    from_registers = config.split or problem.has("added") or problem.dtype_of("o") == "float32"
    through_slots = problem.head_dim == problem.head_dim_v and not from_registers
    slots = QuerySlots(config, through_slots, functools.partial(query_tiles.first_row, problem, config))
    if config.split:
        Tiles = PagedSplitTiles if paged else PackedSplitTiles if varlen else DenseSplitTiles
        splits = T.dynamic("splits")
        o_view = T.Tensor([splits, batch, heads, seqlen_q, problem.head_dim_v], "float32")
        lse_view = T.Tensor([splits, batch, heads, seqlen_q], "float32")
        return Results(slots, Tiles, splits, o_view, lse_view, from_registers)
    o_view = result_argument(problem, "o", batch, seqlen_q, heads, columns_v)
    lse_shape = [heads, seqlen_q] if varlen else [batch, heads, seqlen_q]
    if problem.has("added"):
        Tiles = AddedPackedTiles if varlen else AddedTiles
        lse_view = strided("lse", lse_shape, "float32")
        return Results(slots, Tiles, None, o_view, lse_view, from_registers, lse_is_final=False)
    dense = TilesFromEnd if query_tiles.end_at_last_query(problem, config) else DenseTiles
    Tiles = PagedTiles if paged else PackedTiles if varlen else dense
    shares = config.schedule == "stream-K"
    lse_view = T.Tensor(lse_shape, "float32")
    return Results(
        slots,
        Tiles,
        None,
        o_view,
        lse_view,
        from_registers,
        shares=shares,
        lse_is_final=not shares,
        MaxLogits=T.Tensor(lse_shape, "float32") if config.max_logits else None,
    )


@dataclass(frozen=True)
class MaxArguments:
    """Last argument of a kernel with FwdConfig.max_logits, or its type; None for a kernel without."""

    MaxLogits: Any


@T.macro
def add_stored(acc, lse, O, batch, head, lse_at, first_row, rows_left):
    """Merge stored O and Lse of other keys, rows from first_row on, into acc and lse, which then hold the result of all keys.

    Lse = log2(2^lse_1 + 2^lse_2)    O = 2^(lse_1 - Lse) O_1 + 2^(lse_2 - Lse) O_2

    O of a row whose stored Lse is -inf may hold anything.

    Args:
        acc, lse: fp32 [64, columns], [64].
        O: [batch, seqlen, heads, columns].
        lse_at: lse_at(row) -> Lse of a row, base 2.
    """
    rows, cols = acc.shape
    stored = T.alloc_fragment([rows], "float32")  # stored Lse, then the weight of stored O
    weight = T.alloc_fragment([rows], "float32")  # Lse of all keys
    # The larger Lse, then Lse of all keys if finite, then the weight of acc
    peak = T.alloc_fragment([rows], "float32")
    # Variables: as expressions they kept the layout inference of TileLang 0.1.15 busy for half a minute
    row = T.alloc_var("int32", init=first_row)
    last = T.alloc_var("int32", init=first_row + rows_left - 1)
    for i in T.Parallel(rows, loop_layout=rows_layout()):
        stored[i] = lse_at(T.min(row + i, last))
    for i in T.Parallel(rows, loop_layout=rows_layout()):
        peak[i] = T.max(T.max(stored[i], lse[i]), LOWEST)
        weight[i] = T.log2(T.exp2(stored[i] - peak[i]) + T.exp2(lse[i] - peak[i])) + peak[i]
        peak[i] = T.max(weight[i], LOWEST)
        stored[i] = T.exp2(stored[i] - peak[i])
    for i in T.Parallel(rows, loop_layout=rows_layout()):
        peak[i] = T.exp2(lse[i] - peak[i])
        lse[i] = weight[i]
    for i, j in T.Parallel(rows, cols):
        acc[i, j] *= peak[i]
    for i, j in T.Parallel(rows, cols):
        if (stored[i] > 0) & (j < O.shape[3]):
            acc[i, j] += stored[i] * O[batch, T.min(row + i, last), head, j]


def store_code(columns: int, from_registers: bool) -> str:
    """CUDA that the stores of a forward need. columns: of O. from_registers: O does not pass through shared memory."""
    if from_registers:
        return source("vectors") + source("rows")
    return source("vectors") + (source("fragments") if _fits_stmatrix(columns) else "")


def _fits_stmatrix(columns: int) -> bool:
    """True if smem tiles [64, columns] have the layout of store_fragment()."""
    return columns % 64 == 0


@T.macro
def store_output(w, tile, first_row, tiles, shared_tiles, number, acc_o):
    """Store O of 64 rows of a tile through smem tile `number` of tiles [.., 64, columns]."""
    if _fits_stmatrix(acc_o.shape[1]):
        rounded = T.alloc_fragment(acc_o.shape, tiles.O.dtype)
        T.copy(acc_o, rounded)
        T.evaluate(store_fragment(rounded, fragment_address(shared_tiles[number, 0, 0])))
    else:
        T.copy(acc_o, shared_tiles[number, :, :])
    T.fence_proxy_async()
    sync_warpgroup(w)
    if tiles.may_store(first_row):
        T.tma_copy(shared_tiles[number, :, :], tiles.o(tile, first_row, 64))


@dataclass(frozen=True)
class TilesFromEnd(DenseTiles):
    """DenseTiles of a forward whose tiles end at the last query: see query_tiles.py.

    Some warpgroups of tile 0 have negative queries. TMA reads zeros there, but a store that begins there is an illegal instruction.
    """

    def first_query(self, tile: Any, block_M: int) -> Any:
        tiles, seqlen_q = tile.order.m_blocks, self.Q.shape[1]
        return query_tiles.first_query(tile.m_block, tiles, block_M, seqlen_q, from_end=True)

    def may_store(self, start: Any) -> Any:
        return start >= 0

    @T.inline
    def store_lse(self, lse, tile, start):
        rows = T.if_then_else(self.may_store(start), self.Lse.shape[-1] - start, 0)
        store_vector(lse, self.Lse, self.lse_place(tile, start), rows)


@dataclass(frozen=True)
class AddedTiles(DenseTiles):
    """DenseTiles whose O, fp32, and Lse hold the result of other keys."""

    @T.inline
    def store_result(self, accs, lse, tile, start):
        rows_left = self.O.shape[1] - start
        add_stored(
            accs[0],
            lse,
            self.O,
            tile.batch,
            tile.head,
            lambda row: self.Lse[tile.batch, tile.head, row],
            start,
            rows_left,
        )
        self.store_o(accs[0], tile, start)


@dataclass(frozen=True)
class AddedPackedTiles(PackedTiles):
    """PackedTiles whose O [1, total_q, heads, columns], fp32, and Lse [heads, total_q] hold the result of other keys."""

    @T.inline
    def store_result(self, accs, lse, tile, start):
        first_row = tile.end_q[0] - tile.len_q[0] + start
        rows_left = tile.len_q[0] - start
        add_stored(
            accs[0],
            lse,
            self.O,
            0,
            tile.head,
            lambda row: self.Lse[tile.head, row],
            first_row,
            rows_left,
        )
        self.store_o(accs[0], tile, start)
