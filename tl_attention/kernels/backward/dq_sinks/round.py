"""Rounding of dQ beside the backward by keys: idle warps convert the fp32 sums of a head once all its key tiles have added to them.

The sums of a head take the memory of those of an earlier head. Few exist at a time, so they stay in the L2, if not many query heads share a
key head: neither zeros for all heads nor the reads of a kernel after the pass go through HBM.

A unit is a key head of a batch entry with its query heads, whose sums have the memory of those of unit - `slots`. Counters in global memory
take units through three stages:

1. CTAs add dQ of their key tiles. The warps that add count each tile at its end.
2. When all tiles of a unit have been added, warps round its sums, write dQ, and leave zeros. They draw blocks of rows in the order of
   units.
3. When all rows of a unit are rounded, a tile of a later unit may add. The warps that add wait for that.

A tile waits only for units of earlier groups, as a group fits the slots. Their tiles have all been drawn, by CTAs that run. So however few
CTAs run, they go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.config.round_configs import (
    ROUND_STAGE_BYTES,
    ROUND_STAGES,
    ROUNDED_ROWS,
    ROUNDING_BYTES,
    ROUNDING_WARPS,
)
from tl_attention.kernels.cuda import source
from tl_attention.kernels.sources.tiles import FragmentBlocks
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem

DQ_WARPS = 4  # warps that add dQ in the order "apart"
BLOCKS_PER_TILE = TABLE_ROWS // ROUNDED_ROWS  # of packed sequences: blocks that warps draw, per query head

# Blocks of 16 rows that have a gradient, of those that a warp draws
BLOCKS_WITH_ROWS = "(min(rows_left, ROUNDED_ROWS) + 15) / 16"


def rounding_code(problem: AttnProblem, blocks_of_rows: str, loop: str) -> str:
    """CUDA in front of a kernel with a Rounding.

    Args:
        blocks_of_rows: blocks of 16 rows that are rounded and become zeros, where `rows_left` have a gradient.
        loop: file of kernels/cuda/ with the loop of the warps that round.
    """
    values: dict[str, object] = {
        "BLOCKS_OF_ROWS": blocks_of_rows,
        "PAIR": {"bfloat16": "bf16x2", "float16": "f16x2"}[problem.dtype],
        "ROUND_STAGE_BYTES": ROUND_STAGE_BYTES,
        "ROUNDED_ROWS": ROUNDED_ROWS,
        "TABLE_ROWS": TABLE_ROWS,
        "BLOCKS_PER_TILE": BLOCKS_PER_TILE,
        "DQ_WARPS": DQ_WARPS,
        "ROUNDING_WARPS": ROUNDING_WARPS,
    }
    return source("round_rows", **values) + source(loop, **values).removeprefix("\n")


def key_policy(problem: AttnProblem, config: BwdPass) -> str | None:
    """L2 policy of K, V, dK and dV, which a pass reads or writes once. Where it rounds dQ they leave the L2 before the sums do."""
    return "evict_first" if config.rounds(problem) else None


class RowMajorBlocks(FragmentBlocks):
    """Sums in blocks of 16 x 8 as FragmentBlocks, but each in row-major order. add() and store() do not fit them."""


@dataclass(frozen=True)
class RecycledBlocks(RowMajorBlocks):
    """Sums of which `matrices` exist at a time.

    Args:
        matrices: matrices in the tensor.
    """

    matrices: Any = None

    def row_block(self, matrix: Any, row: Any) -> Any:
        return FragmentBlocks.row_block(self, T.truncmod(matrix, self.matrices), row)


@dataclass(frozen=True)
class NoRounding:
    """Stand-in for the Rounding of a pass that does not round dQ. sums: FragmentBlocks of dQ; None where dQ is stored whole."""

    warps, tiles_wait = 1, False

    sums: FragmentBlocks | None = None

    def await_slot(self, tile: Any) -> None:
        return None

    def report(self, tile: Any, tiles: Any) -> None:
        return None

    def count_empty(self, tile: Any) -> None:
        return None

    def further_warps(self, softmax_scale: Any) -> tuple[Callable[[], None], ...]:
        return ()


@dataclass(frozen=True)
class Rounding:
    """Sums of dQ that are rounded beside the pass that adds to them.

    Args:
        dQ: gradient [batch, seqlen_q, heads, columns <= head_dim]; of packed sequences as tiles.packed has it.
        sums: RowMajorBlocks.
        progress: counters, int32, 0 before the kernel; see the subclasses.
        counts: key_tiles.KeyTileCounts.

    Attributes:
        loop: name of the CUDA function that the warps that round run.
        warps: number of these warps.
        tiles_wait: see DqSink.
    """

    loop = ""
    warps, tiles_wait = ROUNDING_WARPS, True

    problem: AttnProblem
    config: BwdPass
    dQ: Any
    sums: Any
    progress: Any
    counts: Any
    heads_kv: Any

    def counter(self, tile: Any) -> Any:
        """Index in `progress` of the counter of additions of a tile."""
        raise NotImplementedError

    def weight(self, tile: Any, tiles: Any) -> Any:
        """Number that a warp adds to the counter of a tile."""
        raise NotImplementedError

    def await_slot(self, tile: Any) -> Any:
        """Wait until the memory of a tile's sums is free; called by a warp."""
        raise NotImplementedError

    def gradient(self) -> tuple:
        """Arguments of tl_attention_gradient_of()."""
        raise NotImplementedError

    def loop_arguments(self) -> tuple:
        """Arguments of `loop` between the gradient and the scale."""
        raise NotImplementedError

    def count_added(self, tile: Any, number: Any) -> Any:
        """Add `number` to the count of additions of a tile; called by one lane."""
        counter = T.address_of(self.progress[self.counter(tile)])
        return T.evaluate(T.call_extern("handle", "tl_attention_count", counter, number))

    @T.inline
    def report(self, tile, tiles):
        """Count this warp's rows of a tile as added."""
        T.tma_store_wait(0, False)
        if T.get_thread_binding() % 32 == 0:
            self.count_added(tile, self.weight(tile, tiles))

    @T.inline
    def count_empty(self, tile):
        """Count a share without queries as added, for all warps that add."""
        if T.get_thread_binding() % 32 == 0:
            self.count_added(tile, DQ_WARPS)

    def _call(self, memory: Any, softmax_scale: Any) -> Any:
        arguments = (
            T.address_of(self.progress[0]),
            T.address_of(self.sums.tensor[0, 0, 0, 0]),
            T.call_extern("handle", "tl_attention_gradient_of", *self.gradient()),
            *self.loop_arguments(),
            softmax_scale,
            T.address_of(memory[0]),
        )
        name = f"{self.loop}<{self.problem.head_dim}, {ROUND_STAGES}>"
        return T.evaluate(T.call_extern("handle", name, *arguments))

    def further_warps(self, softmax_scale: Any) -> tuple[Callable[[], None], ...]:
        return (lambda: self.round(softmax_scale),)

    @T.inline
    def round(self, softmax_scale):
        """Round the rows that this warp draws, until there are none left."""
        memory = T.alloc_shared([ROUNDING_BYTES // 4], "float32")
        self._call(memory, softmax_scale)


@dataclass(frozen=True)
class DqRounding(Rounding):
    """Rounding of dense tensors by units.

    Args:
        sums: RecycledBlocks of the query heads of `slots` units.
        sum_rows: rows of the sums of a head.
        progress: [1 + 2 * units], see round_dq.cuh.
        slots: units whose sums exist at a time.
    """

    loop = "tl_attention_round_dq"

    sum_rows: Any
    slots: Any

    def unit(self, tile: Any) -> Any:
        """Number of the unit of a tile."""
        return tile.batch * self.heads_kv + tile.kv_head

    @property
    def units(self) -> Any:
        return self.dQ.shape[0] * self.heads_kv

    def counter(self, tile: Any) -> Any:
        return 1 + self.unit(tile)

    def weight(self, tile: Any, tiles: Any) -> Any:
        """1 for the share of a sharer, `sharers` for a tile of one CTA."""
        return T.if_then_else(tiles.shared_number(tile) >= 0, 1, self.counts.sharers)

    def _await_rounded(self, unit: Any) -> Any:
        counter = T.address_of(self.progress[1 + self.units + unit])
        blocks = T.ceildiv(self.dQ.shape[1], ROUNDED_ROWS) * self.counts.heads_per_kv
        return T.evaluate(T.call_extern("handle", "tl_attention_await_rounded", counter, blocks))

    @T.inline
    def await_slot(self, tile):
        if self.unit(tile) >= self.slots:
            self._await_rounded(self.unit(tile) - self.slots)

    def gradient(self) -> tuple:
        return T.address_of(self.dQ[0, 0, 0, 0]), *self.dQ.strides[:3], *self.dQ.shape[1:]

    def loop_arguments(self) -> tuple:
        counts = self.counts
        sums = counts.heads_per_kv, self.slots, self.sum_rows
        return self.dQ.shape[0], *sums, counts.n_blocks, counts.sharers
