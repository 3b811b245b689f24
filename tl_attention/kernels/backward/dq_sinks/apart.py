"""dQ by a warpgroup of its own, which owns no keys: the order "apart" of a backward by keys.

The consumers only share dS' of each step. The product of dQ, its registers and its additions are not theirs. A warp adds 16 rows of 64
columns at a time: it writes them to shared memory, from where TMA adds them to the sums.

With the schedule ordered a warp adds in the turns of order.py. An addition by TMA takes about as long as a step, so those of a step are
announced in the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tilelang.language as T

from tl_attention.kernels.backward.dq_sinks.order import AddingOrder
from tl_attention.kernels.backward.dq_sinks.round import RowMajorBlocks
from tl_attention.kernels.backward.load import KeyTileProducer, key_step

ROWS, COLUMNS = 64, 64  # of dQ at a time: 32 registers


@T.meta_class
class DqSums:
    """Shared memory in which dQ waits to be added. Needs add_by_tma.cuh."""

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
                T.address_of(self.tile[0]),
                acc_dq.data,
            )
        )


@T.meta_class
class TakenTurns:
    """Turns in which the warps of dQ add. Needs fence_additions.cuh.

    Args:
        adding: AddingOrder of these warps.
    """

    def __init__(self, adding: AddingOrder, name: str = "turns"):
        self.adding = adding
        self.step = T.alloc_var("int32", init=-1)  # whose additions are under way; -1: none are

    @T.inline
    def end(self):
        """Announce the additions that are under way, when they are complete."""
        T.tma_store_wait(0, False)
        self.adding.announce(self.step[0])
        self.step[0] = -1

    @T.inline
    def begin(self, step):
        """End the turn of the step before, and wait for that of a step."""
        if self.step[0] >= 0:
            self.end()
        self.adding.wait(step)
        T.evaluate(T.call_extern("handle", "tl_attention_fence_additions"))
        self.step[0] = step


def pieces(producer: KeyTileProducer) -> tuple[tuple[int, int], ...]:
    """(first row, first column) of each piece of dQ of a step."""
    rows, columns = range(0, producer.config.block_M, ROWS), range(0, producer.problem.head_dim, COLUMNS)
    return tuple(itertools.product(rows, columns))


@T.macro
def add_step(producer, acc_dq, turns, step, tile, blocks):
    """Compute dQ = dS K of a step, and add it to the sums. turns: TakenTurns; None: in any order."""
    tiles, shared, config = producer.tiles, producer.shared, producer.config
    row_block = tiles.dq_row_block(tile, blocks.head, blocks.query)
    shared.dS.wait(step)
    for first_row, first_col in pieces(producer):
        for w in tuple(range(config.warpgroups)):
            T.wgmma_gemm(
                shared.dS.columns(step, w, slice(first_row, first_row + ROWS)),
                shared.K.tiles[w, :, first_col : first_col + COLUMNS],
                acc_dq,
                transpose_A=True,
                policy=T.GemmWarpPolicy.FullRow,
                clear_accum=w == 0,
            )
        T.wait_wgmma(0)
        if (first_row, first_col) == pieces(producer)[-1]:
            shared.dS.release(step)
        if turns is not None and (first_row, first_col) == (0, 0):
            turns.begin(step)
        shared.dq_sums.add(acc_dq, tiles.dQ_sum, row_block + first_row // 16, first_col)


@T.macro
def report(producer, tile):
    """Count this warp's rows of a tile as added, for the warps that round dQ."""
    T.tma_store_wait(0, False)
    if T.get_thread_binding() % 32 == 0:
        rounding = producer.shared.rounding
        rounding.count_added(tile, rounding.weight(tile, producer.tiles))


def add_dq(producer: KeyTileProducer) -> None:
    """Add dQ of each step of a CTA."""
    config, ring, rounding = producer.config, producer.shared.K, producer.shared.rounding
    acc_dq = T.alloc_fragment([ROWS, COLUMNS], "float32")
    turns = TakenTurns(producer.shared.adding) if config.is_ordered else None

    def for_all_keys(call: Callable[[Any], Any], turn: Any) -> None:
        for w in range(config.warpgroups):
            call(key_step(config, turn, w))

    def begin_tile(turn: Any, tile: Any) -> None:
        for_all_keys(lambda step: T.evaluate(ring.wait(step)), turn)
        if rounding is not None:
            rounding.await_slot(tile)

    def end_tile(turn: Any, tile: Any) -> None:
        if turns is not None:
            turns.end()
        for_all_keys(ring.release, turn)
        if rounding is not None:
            report(producer, tile)

    producer.walk(
        lambda *place: add_step(producer, acc_dq, turns, *place),
        begin=begin_tile,
        end=end_tile,
    )
    T.evaluate(T.tma_store_wait(0, False))  # TMA reads dq_sums, which end with the CTA
