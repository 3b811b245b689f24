"""Stores of fp32 tiles and of numbers per row to global memory, straight from registers, in the layout of wgmma."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernels.softmax import indices

# A thread has two adjacent columns of every 8, of rows 8 apart. TileLang 0.1.15 stores each number alone, behind six comparisons and with
# an address of its own: O of 128 queries, d128, took 9,300 to 10,000 clocks. In pairs it takes 2,000 to 2,700, which is what an SM can
# write; in 16 bytes, after an exchange between neighbours, as long (fp32, H200, 2026-11-26)
STORE_ROWS = """
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
"""
# Four threads have the number of a row
STORE_VECTOR = """
#include <tl_templates/cuda/common.h>
TL_DEVICE void tl_attention_store_vector(float *first, int rows, float const *fragment) {
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  if (threadIdx.x % 4 == 0) {
    if (row < rows) first[row] = fragment[0];
    if (row + 8 < rows) first[row + 8] = fragment[1];
  }
}
"""


def store_rows(acc: Any, tensor: Any, place: tuple, row_stride: Any, rows: Any) -> None:
    """Store an accumulator [64, cols] of a warpgroup in a tensor, except rows from `rows` on and columns that the tensor lacks.

    Needs STORE_ROWS. place: indices of its first element.
    """
    columns = tensor.shape[-1] - place[-1]
    name = f"tl_attention_store_rows<{acc.shape[1]}>"
    T.evaluate(
        T.call_extern("handle", name, T.address_of(tensor[place]), row_stride, rows, columns, acc.data)
    )


def store_vector(vector: Any, tensor: Any, place: tuple, rows: Any) -> None:
    """Store numbers [64] of the rows of a warpgroup in a tensor whose last stride is 1, except rows from `rows` on. Needs STORE_VECTOR."""
    name = "tl_attention_store_vector"
    T.evaluate(T.call_extern("handle", name, T.address_of(tensor[place]), rows, vector.data))


@T.macro
def store_to_tensor(tensor, batch, first_row, rows_left, head, acc, first_col=0):
    """store_rows() to tensor [batch, seqlen, heads, columns]."""
    # Variables: as expressions they kept the layout inference of TileLang 0.1.15 busy for half a minute
    row = T.alloc_var("int32", init=first_row)
    left = T.alloc_var("int32", init=rows_left)
    store_rows(acc, tensor, (batch, row, head, first_col), tensor.strides[1], left)


@T.macro
def store_columns(tensor, tile, first_row, accs):
    """store_to_tensor() of tiles side by side, of a key head."""
    for n in indices(accs):
        first_col = n * accs[n].shape[1]
        rows_left = tensor.shape[1] - first_row
        store_to_tensor(tensor, tile.batch, first_row, rows_left, tile.kv_head, accs[n], first_col)
