// Additions of a wgmma fragment [64, rows] of a warpgroup, transposed, to a tile [rows, 64] of fp32 numbers in global memory. Eight lanes
// fill a sector of 32 bytes. Whole tiles have no branch per number, as a loop of TileLang 0.1.15 has.
#pragma once

#include <tl_templates/cuda/common.h>
template <int rows, bool whole>
TL_DEVICE void tl_attention_add_tile(float *tile, int64_t stride, int rows_left, int cols_left, float factor, float const *numbers) {
  int lane = threadIdx.x % 32, row = lane % 4 * 2, col = threadIdx.x / 32 % 4 * 16 + lane / 4;
  tile += row * stride + col;
#pragma unroll
  for (int r = 0; r < rows; r += r % 2 ? 7 : 1) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
      if (whole || (row + r < rows_left && col + 8 * c < cols_left))
        asm volatile("red.global.add.f32 [%0], %1;" :: "l"(tile + 8 * c), "f"(numbers[r / 8 * 4 + c * 2 + r % 2] * factor) : "memory");
    asm("" : "+l"(tile));  // or nvcc keeps multiples of the stride in registers
    tile += r % 2 ? 7 * stride : stride;
  }
}
template <int rows>
TL_DEVICE void tl_attention_add_transposed(float *tile, int64_t stride, int rows_left, int cols_left, float factor,
                                           void const *fragment) {
  float const *numbers = reinterpret_cast<float const *>(fragment);
  if (rows_left >= rows && cols_left >= 64)
    tl_attention_add_tile<rows, true>(tile, stride, rows_left, cols_left, factor, numbers);
  else
    tl_attention_add_tile<rows, false>(tile, stride, rows_left, cols_left, factor, numbers);
}
