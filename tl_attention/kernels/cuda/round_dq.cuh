// Loop of the warps that round dQ, see dq_sinks/round.py, which fills in the names in capitals.
// progress: blocks of ROUNDED_ROWS rows drawn; then per unit DQ_WARPS times the parts of tiles added; then per unit the blocks rounded.
#pragma once
#include "round_rows.cuh"

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
    uint32_t place = smem_ptr_to_uint(memory) + warp / 32 % ROUNDING_WARPS * (stages * ROUND_STAGE_BYTES);
    tl_attention_round_rows<width, stages>(sums + row * width, x, dq.per_row, rows - first, dq.columns, scale, place);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds to the zeros
    __syncwarp();
    if (threadIdx.x % 32 == 0) tl_attention_count(progress + 1 + batch * heads / per_unit + unit, 1);
  }
}
