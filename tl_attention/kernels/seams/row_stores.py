"""Stores of fp32 tiles and of numbers per row to global memory, straight from registers, in the layout of wgmma."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernels.seams.pipeline import indices


def store_rows(acc: Any, tensor: Any, place: tuple, row_stride: Any, rows: Any) -> None:
    """Store an accumulator [64, cols] of a warpgroup in a tensor, except rows from `rows` on and columns that the tensor lacks.

    Needs rows.cuh. place: indices of its first element.
    """
    columns = tensor.shape[-1] - place[-1]
    name = f"tl_attention_store_rows<{acc.shape[1]}>"
    T.evaluate(
        T.call_extern("handle", name, T.address_of(tensor[place]), row_stride, rows, columns, acc.data)
    )


def store_vector(vector: Any, tensor: Any, place: tuple, rows: Any) -> None:
    """Store numbers [64] of the rows of a warpgroup in a tensor whose last stride is 1, except rows from `rows` on. Needs vectors.cuh."""
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
