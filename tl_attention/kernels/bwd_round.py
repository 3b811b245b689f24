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

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.tiles import FragmentBlocks
from tl_attention.problem import TABLE_ROWS, AttnProblem
from tl_attention.round_configs import (
    ROUND_STAGE_BYTES,
    ROUND_STAGES,
    ROUNDED_ROWS,
    ROUNDING_BYTES,
    ROUNDING_WARPS,
)

DQ_WARPS = 4  # warps that add dQ in the order "apart"

# Rounding of rows of sums in the order of RowMajorBlocks
ROUND_ROWS = """
#include <tl_templates/cuda/copy_sm90.h>
TL_DEVICE void tl_attention_await_count(int const *counter, int wanted) {
  int count;
  while (true) {  // all lanes, or nvcc takes the warp for diverged
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    if (__all_sync(0xffffffff, count >= wanted)) break;
    __nanosleep(100);
  }
}
TL_DEVICE void tl_attention_await_rounded(int const *counter, int wanted) {
  tl_attention_await_count(counter, wanted);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds to the zeros
}
TL_DEVICE void tl_attention_count(int *counter, int number) {
  asm volatile("fence.acq_rel.gpu;\\n red.relaxed.gpu.global.add.s32 [%0], %1;" :: "l"(counter), "r"(number) : "memory");
}
struct tl_attention_gradient {
  char *x;
  int64_t per_batch, per_row, per_head;  // bytes
  int rows, heads, columns;
};
TL_DEVICE tl_attention_gradient tl_attention_gradient_of(void *x, int64_t per_batch, int64_t per_row, int64_t per_head, int rows,
                                                         int heads, int columns) {
  return {(char *)x, 2 * per_batch, 2 * per_row, 2 * per_head, rows, heads, columns};
}
TL_DEVICE uint32_t tl_attention_pair(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.PAIR.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
TL_DEVICE uint4 tl_attention_round_eight(uint32_t place, float scale) {
  float4 left, right;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(left.x), "=f"(left.y), "=f"(left.z), "=f"(left.w) : "r"(place) : "memory");
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + 16];"
               : "=f"(right.x), "=f"(right.y), "=f"(right.z), "=f"(right.w) : "r"(place) : "memory");
  return make_uint4(tl_attention_pair(left.x * scale, left.y * scale), tl_attention_pair(left.z * scale, left.w * scale),
                    tl_attention_pair(right.x * scale, right.y * scale), tl_attention_pair(right.z * scale, right.w * scale));
}
// rows: of dQ. memory: of the warp, stages * STAGE_BYTES. A step is 16 rows of 32 columns. A lane rounds 8 columns of one row, twice
template <int width, int stages>
TL_DEVICE void tl_attention_round_rows(float *sums, char *rows, int64_t per_row, int rows_left, int columns, float scale, uint32_t memory) {
  int lane, steps = BLOCKS_OF_ROWS * (width / 32);
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
  sums += 4 * lane;
  rows_left -= lane % 16;
  columns -= lane / 16 * 8;
  rows += lane % 16 * per_row + lane / 16 * 16;
  auto load = [&](float const *source, int step) {
    uint32_t place = memory + step % stages * STAGE_BYTES + lane * 16;
    if (step < steps)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place + i * 512), "l"(source + i * 128) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int step = 0; step < stages - 1; ++step) load(sums + step * 512, step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" :: "n"(stages - 2) : "memory");
    __syncwarp();  // all lanes have loaded this step, and read the one before
    load(sums + (stages - 1) * 512, step + stages - 1);
    uint32_t place = memory + step % stages * STAGE_BYTES + lane * 32;
    uint4 first = tl_attention_round_eight(place, scale), second = tl_attention_round_eight(place + 1024, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %1, %1, %1}, %2;"
                   :: "l"(sums + i * 128), "f"(0.0f), "l"(tl::CacheHintSm90::EVICT_LAST) : "memory");
    int column = step % (width / 32) * 32;
    if (rows_left > 0 && column < columns) __stcs(reinterpret_cast<uint4 *>(rows), first);  // not read again
    if (rows_left > 0 && column + 16 < columns) __stcs(reinterpret_cast<uint4 *>(rows + 32), second);
    rows += 64;
    if (column == width - 32) {
      rows += 16 * per_row - 2 * width;
      rows_left -= 16;
    }
    sums += 512;
  }
}
TL_DEVICE int tl_attention_draw_rows(int *progress) {
  int number = 0;
  if (threadIdx.x % 32 == 0)
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(number) : "l"(progress) : "memory");
  return number;
}
"""
# Blocks of 16 rows that have a gradient, of those that a warp draws
BLOCKS_WITH_ROWS = "(min(rows_left, ROUNDED_ROWS) + 15) / 16"
# progress: blocks of ROUNDED_ROWS rows drawn; then per unit DQ_WARPS times the parts of tiles added; then per unit the blocks rounded
ROUND_DQ = """\
// heads_per_unit: query heads per key head. slots: see DqRounding. sum_rows: of the sums of a head. tiles, parts: key tiles of a unit, and
// parts that a tile counts as
template <int width, int stages>
TL_DEVICE void tl_attention_round_dq(int *progress, float *sums, tl_attention_gradient dq, int batch, int heads_per_unit, int slots,
                                     int sum_rows, int tiles, int parts, float scale, void const *memory) {
  int drawn = tl_attention_draw_rows(progress);
#pragma unroll 1
  while (true) {
    int rows = dq.rows, heads = dq.heads, per_unit = heads_per_unit;
    asm volatile("" : "+r"(rows), "+r"(heads), "+r"(per_unit));  // or nvcc keeps what follows from them in registers
    int per_head = (rows + ROUNDED_ROWS - 1) / ROUNDED_ROWS, number = __shfl_sync(0xffffffff, drawn, 0);
    if (number >= per_head * batch * heads) break;
    drawn = tl_attention_draw_rows(progress);
    int head = number / per_head, first = (number - head * per_head) * ROUNDED_ROWS, unit = head / per_unit;
    tl_attention_await_count(progress + 1 + unit, tiles * parts * DQ_WARPS);
    int64_t row = uint64_t(head % unsigned(slots * per_unit)) * unsigned(sum_rows) + first;
    int b = head / heads;
    char *x = dq.x + b * dq.per_batch + (head - b * heads) * dq.per_head + first * dq.per_row;
    uint32_t warp;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(warp));
    uint32_t place = smem_ptr_to_uint(memory) + warp / 32 % WARPS * (stages * STAGE_BYTES);
    tl_attention_round_rows<width, stages>(sums + row * width, x, dq.per_row, rows - first, dq.columns, scale, place);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds to the zeros
    __syncwarp();
    if (threadIdx.x % 32 == 0) tl_attention_count(progress + 1 + batch * heads / per_unit + unit, 1);
  }
}
"""


def rounding_code(problem: AttnProblem, blocks_of_rows: str, loop: str) -> str:
    """CUDA in front of a kernel with a Rounding.

    Args:
        blocks_of_rows: blocks of 16 rows that are rounded and become zeros, where `rows_left` have a gradient.
        loop: of the warps.
    """
    code = ROUND_ROWS.replace("BLOCKS_OF_ROWS", blocks_of_rows) + loop
    code = code.replace("PAIR", {"bfloat16": "bf16x2", "float16": "f16x2"}[problem.dtype])
    sizes = {"DQ_WARPS": DQ_WARPS, "ROUNDED_ROWS": ROUNDED_ROWS}
    sizes |= {"STAGE_BYTES": ROUND_STAGE_BYTES, "WARPS": ROUNDING_WARPS, "TABLE_ROWS": TABLE_ROWS}
    for name, number in sizes.items():
        code = code.replace(name, str(number))
    return code


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
class Rounding:
    """Sums of dQ that are rounded beside the pass that adds to them.

    Args:
        dQ: gradient [batch, seqlen_q, heads, columns <= head_dim]; of packed sequences as tiles.packed has it.
        sums: RowMajorBlocks.
        progress: int32, 0 before the kernel; what it counts is for a subclass to say.
        counts: bwd_tiles.KeyTileCounts.

    Attributes:
        loop: CUDA function that the warps that round run.
    """

    loop = ""

    problem: AttnProblem
    config: BwdPass
    dQ: Any
    sums: Any
    progress: Any
    counts: Any
    heads_kv: Any

    def counter(self, tile: Any) -> Any:
        """Index in `progress` of the count of additions that a tile is part of."""
        raise NotImplementedError

    def weight(self, tile: Any, tiles: Any) -> Any:
        """Count that a warp adds for a tile."""
        raise NotImplementedError

    def await_slot(self, tile: Any) -> Any:
        """Wait until the memory of a tile's sums is free; called by a warp."""
        raise NotImplementedError

    def gradient(self) -> tuple:
        """Arguments of tl_attention_gradient_of()."""
        raise NotImplementedError

    def loop_arguments(self) -> tuple:
        """Arguments of the loop between the gradient and the scale."""
        raise NotImplementedError

    def count_added(self, tile: Any, number: Any) -> Any:
        """Add `number` to the count of additions of a tile; called by one lane."""
        counter = T.address_of(self.progress[self.counter(tile)])
        return T.evaluate(T.call_extern("handle", "tl_attention_count", counter, number))

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
        progress: [1 + 2 * units], see ROUND_DQ.
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
        """1 for a part, `parts` for a tile that no other CTA shares."""
        return T.if_then_else(tiles.shared_number(tile) >= 0, 1, self.counts.parts)

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
        return self.dQ.shape[0], *sums, counts.n_blocks, counts.parts
