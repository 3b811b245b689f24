// Stores of numbers per row to global memory. Four threads have the number of a row.
#pragma once

#include <tl_templates/cuda/common.h>
TL_DEVICE void tl_attention_store_vector(float *first, int rows, float const *fragment) {
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  if (threadIdx.x % 4 == 0) {
    if (row < rows) first[row] = fragment[0];
    if (row + 8 < rows) first[row + 8] = fragment[1];
  }
}
