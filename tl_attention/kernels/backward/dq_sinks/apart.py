"""dQ by a warpgroup of its own, which owns no keys: the order "apart" of a backward by keys.

The consumers write dS' of each step to shared memory, and have no part in the product and the additions of dQ. A warp of the warpgroup adds
16 rows of 64 columns at a time: it writes them to shared memory, from where TMA adds them to the sums.

With the schedule ordered a warp adds in the turns of order.py. An addition by TMA takes about as long as a step, so those of a step are
announced in the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.backward.dq_sinks.order import AddingOrder, AnyOrder
from tl_attention.kernels.backward.dq_sinks.round import NoRounding, Rounding, RowMajorBlocks
from tl_attention.kernels.backward.load import KeyTileProducer, key_step

ROWS, COLUMNS = 64, 64  # of dQ at a time, at most: 32 registers


@T.meta_class
class DqMemory:
    """Shared memory in which dQ waits to be added by TMA. Needs add_by_tma.cuh."""

    def __init__(self, name: str = "dq_sums"):
        self.tile = T.alloc_shared([ROWS * COLUMNS], "float32")

    @T.inline
    def add(self, acc_dq, sums, row_block, first_col):
        """Start to add a fragment [64, columns], when the additions before have read the shared memory."""
        order = ", true" if isinstance(sums, RowMajorBlocks) else ""
        name = f"tl_attention_add_by_tma<{acc_dq.shape[1]}, {sums.tensor.shape[1]}{order}>"
        T.evaluate(
            T.call_extern(
                "handle",
                name,
                T.address_of(sums.tensor[row_block, first_col // 8, 0, 0]),
                T.access_ptr(self.tile[0], "r"),  # written, too, but the function has the fence that "w" adds
                acc_dq.data,
            )
        )


@dataclass(frozen=True)
class SumsByTma:
    """DqSink without the calls of consumers, which do not compute dQ: add_dq() does, and adds it to sums in global memory.

    Args:
        turns: of order.OrderKeeper.
        rounding: the sums, and how they are rounded.
    """

    order: AnyOrder | AddingOrder
    turns: Any
    rounding: Rounding | NoRounding
    softmax_scale: Any
    memory: DqMemory

    @property
    def tiles_wait(self) -> bool:
        return self.order.tiles_wait or self.rounding.tiles_wait

    def row_block(self, tiles: Any, tile: Any, blocks: Any) -> Any:
        return 0

    def further_warps(self, producer: KeyTileProducer) -> tuple[Callable[[], None], ...]:
        return (
            *self.order.further_warps(producer, self.turns),
            *self.rounding.further_warps(self.softmax_scale),
        )


def piece_columns(producer: KeyTileProducer) -> int:
    """Columns of a piece of dQ."""
    return min(COLUMNS, producer.problem.head_dim)


def pieces(producer: KeyTileProducer) -> tuple[tuple[int, int], ...]:
    """(first row, first column) of each piece of dQ of a step."""
    first_rows = range(0, producer.config.block_M, ROWS)
    first_columns = range(0, producer.problem.head_dim, piece_columns(producer))
    return tuple(itertools.product(first_rows, first_columns))


@T.macro
def add_step(producer, acc_dq, turns, step, tile, blocks):
    """Compute dQ = dS K of a step, and add it to the sums. turns: of order.by_tma()."""
    smem, config, sums = producer.smem, producer.config, producer.smem.dq.rounding.sums
    row_block = producer.tiles.dq_row_block(sums, tile, blocks.head, blocks.query)
    smem.dS.wait(step)
    for first_row, first_col in pieces(producer):
        for w in tuple(range(config.warpgroups)):
            T.wgmma_gemm(
                smem.dS.columns(step, w, slice(first_row, first_row + ROWS)),
                smem.K.tiles[w, :, first_col : first_col + piece_columns(producer)],
                acc_dq,
                transpose_A=True,
                policy=T.GemmWarpPolicy.FullRow,
                clear_accum=w == 0,
            )
        T.wait_wgmma(0)
        if (first_row, first_col) == pieces(producer)[-1]:
            smem.dS.release(step)
        if (first_row, first_col) == (0, 0):
            turns.begin(step)
        smem.dq.memory.add(acc_dq, sums, row_block + first_row // 16, first_col)


def add_dq(producer: KeyTileProducer) -> None:
    """Add dQ of each step of a CTA."""
    config, ring, sink = producer.config, producer.smem.K, producer.smem.dq
    acc_dq = T.alloc_fragment([ROWS, piece_columns(producer)], "float32")
    turns = sink.order.by_tma()

    def for_all_keys(call: Callable[[Any], Any], turn: Any) -> None:
        for w in range(config.warpgroups):
            call(key_step(config, turn, w))

    def begin_tile(turn: Any, tile: Any) -> None:
        for_all_keys(lambda step: T.evaluate(ring.wait(step)), turn)
        sink.rounding.await_slot(tile)

    def end_tile(turn: Any, tile: Any) -> None:
        turns.end()
        for_all_keys(ring.release, turn)
        sink.rounding.report(tile, producer.tiles)

    producer.each_step(
        lambda *place: add_step(producer, acc_dq, turns, *place),
        begin=begin_tile,
        end=end_tile,
    )
    T.evaluate(T.tma_store_wait(0, False))  # TMA reads the shared memory, which ends with the CTA
