// Stores of an fp32 fragment [64, cols] to rows in global memory.
// A thread has two adjacent columns of every 8, of rows 8 apart. TileLang 0.1.15 stores each number alone, behind six comparisons and with
// an address of its own: O of 128 queries, d128, took 9,300 to 10,000 clocks. In pairs it takes 2,000 to 2,700, which is what an SM can
// write; in 16 bytes, after an exchange between neighbours, as long (fp32, H200, 2026-11-26).
#pragma once

#include <tl_templates/cuda/common.h>
template <int cols>
TL_DEVICE void tl_attention_store_rows(float *first, int64_t row_stride, int rows, int columns, float const *fragment) {
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  bool aligned = (reinterpret_cast<uint64_t>(first) | row_stride * 4 | columns * 4) % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float *place = first + (row + 8 * half) * row_stride + col;
    float const *pairs = fragment + 2 * half;
    int left = row + 8 * half < rows ? columns - col : 0;
    if (aligned) {
#pragma unroll
      for (int i = 0; i < cols / 8; ++i)
        if (8 * i < left) *reinterpret_cast<float2 *>(place + 8 * i) = make_float2(pairs[4 * i], pairs[4 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < cols / 4; ++i)
        if (i / 2 * 8 + i % 2 < left) place[i / 2 * 8 + i % 2] = pairs[i / 2 * 4 + i % 2];
    }
  }
}
