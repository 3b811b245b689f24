"""ALiBi as a matrix product on top of which Q Kᵀ is accumulated."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernels.seams.pipeline import SharedTile, alloc_swizzled, sync_consumers
from tl_attention.problem.attn_problem import AttnProblem


@T.meta_class
class LinearBias:
    """ALiBi that is linear in the key: a matrix product, in units of raw scores, on top of which Q Kᵀ is accumulated.

    For a score tile [rows, cols] the bias is s * (c - r), or s * (r - c) where rows are keys. It is the product of [r s, s] and
    [1, c]ᵀ. bf16 holds r, c < 256 exactly, and r s and s as sums of three terms. shift() adds the part that depends on the tile's
    position. Instead of instructions per element this takes a GEMM of 16 columns per tile: B4 H16 S4096 d128 takes 1.08 of the time of
    plain attention, with two FFMA per element 1.21 (H200, 2026-11-21).
    """

    def __init__(self, rows_are_keys: bool, name: str = "linear_bias"):
        self.sign = -1.0 if rows_are_keys else 1.0  # of c
        self.slope = T.alloc_var("float32", init=0.0)
        self.rows = T.alloc_fragment([64, 16], "bfloat16")

    @T.inline
    def start(self, slope):
        """Set the left factor. slope: in units of raw scores."""
        self.slope[0] = slope
        for i, j in T.Parallel(64, 16):
            x = T.if_then_else(j < 4, -T.cast(i, "float32"), 1.0) * self.slope[0] * self.sign
            high = T.cast(T.cast(x, "bfloat16"), "float32")
            middle = T.cast(T.cast(x - high, "bfloat16"), "float32")
            part = T.if_then_else(j % 4 == 0, high, T.if_then_else(j % 4 == 1, middle, x - high - middle))
            self.rows[i, j] = T.if_then_else((j < 8) & (j % 4 < 3), part, 0.0)

    @T.inline
    def multiply(self, columns, acc_s):
        """Set acc_s to the product of both factors. columns: the right one, see alloc_bias_columns()."""
        T.wgmma_gemm(
            self.rows,
            columns,
            acc_s,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=True,
        )

    @T.inline
    def fold(self, acc_s, diagonal):
        """Change the sign of the bias of elements right of the diagonal. diagonal: as of shift()."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            distance = T.cast(diagonal + i - j % 8, "float32") - T.cast(j // 8 * 8, "float32")
            acc_s[i, j] += 2 * self.slope[0] * T.min(distance, 0.0)

    def shift(self, diagonal: Any, is_right: Any = 0) -> Any:
        """Constant to add to all elements of a tile. diagonal: column that the diagonal of the tile's first query crosses.

        is_right: 1 for a tile right of all diagonals, whose right factor is negative.
        """
        bias = -self.slope[0] * T.cast(diagonal, "float32")
        return bias if isinstance(is_right, int) else T.if_then_else(is_right != 0, -bias, bias)


def alloc_bias_columns(problem: AttnProblem, cols: int, two_sides: bool = False) -> Any:
    """Shared memory [cols, 16] for the right factor of LinearBias; None where the problem has no linear bias.

    two_sides: [2, cols, 16], the factor and its negative.
    """
    if two_sides:
        return alloc_swizzled([2, cols, 16], "bfloat16")
    return SharedTile([cols, 16], "bfloat16", name="bias").tile if problem.bias_is_linear else None


def right_factor(i: Any, j: Any) -> Any:
    """Element j of the right factor of LinearBias for column i of the tile: 1 and i, each for the three terms of the left factor."""
    return T.if_then_else(j < 4, 1.0, T.if_then_else(j < 8, T.cast(i, "float32"), 0.0))


@T.macro
def fill_bias_columns(w, columns, consumers):
    """Fill the right factor of LinearBias. All consumer warpgroups call this before they multiply; the first one writes."""
    if columns is not None:
        if w == 0:
            if len(columns.shape) == 2:
                for i, j in T.Parallel(columns.shape[0], 16):
                    columns[i, j] = right_factor(i, j)
            else:
                for side in (0, 1):
                    for i, j in T.Parallel(columns.shape[1], 16):
                        columns[side, i, j] = right_factor(i, j) if side == 0 else -right_factor(i, j)
            T.fence_proxy_async()
        sync_consumers(consumers)
