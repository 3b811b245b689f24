// tl_attention_add_tile of diagonals.cuh for a tile of fp32.
#pragma once
#include "diagonals.cuh"

template <int cols>
static __device__ __forceinline__ void tl_attention_add_fp32_tile(void* x, const void* tile, int rows) {
  const float* numbers = (const float*)tile;  // of columns 2 c and 2 c + 1, in two rows of each 8 columns
  int thread = tl_attention_thread(), row = thread / 32 % 4 * 16 + thread % 32 / 4;
  bool is_row = row < rows, is_next = row + 8 < rows;
#pragma unroll
  for (int n = 0; n <= cols / 8; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      float next = n < cols / 8 && is_next ? numbers[n < cols / 8 ? 4 * n + 2 + odd : 0] : 0.f;
      ((float*)x)[2 * n + odd] = n > 0 && is_row ? next + numbers[n > 0 ? 4 * n - 4 + odd : 0] : next;
    }
  }
}
