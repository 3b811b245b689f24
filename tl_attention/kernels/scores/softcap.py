"""Softcap by polynomials where the scores of a tile are small beside the cap.

While the tensor cores work, a tanh.approx takes as long as seven multiply-adds (H200, 2026-11-27;
docs/notes/2026-11-27-softcap.md).
"""

from __future__ import annotations

import math
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.seams.softmax import LOG2E, OnlineSoftmax, rows_layout
from tl_attention.problem.attn_problem import AttnProblem

# tanh(x) = x (c0 + c1 x² + c2 x⁴) for |x| <= LARGEST, minimax: relative error 2.2e-4. That of tanh.approx is 4.9e-4
LARGEST = 0.75
COEFFICIENTS = (0.9997852, -0.3262967, 0.0973555)
# Share of a row sum, as a power of 2, that scores below the range may have: that of the rounding of a weight in bf16
NEGLIGIBLE = -9
# Factor of the maximum of step 0 that scores of later steps may have: a tile that is computed twice takes 1.6 times as long
HEADROOM = 1.75
# Smallest cap tanh(LARGEST), in base 2, for which it is worth a try: caps from 19.7 on
LEAST_HIGHEST = 18.0
# Magnitudes of c0 and c2, times the scale and powers of scale / cap, for which all products are normal numbers
SMALLEST_COEFFICIENT, LARGEST_COEFFICIENT = 2.0**-100, 2.0**100


@T.meta_class
class PolynomialCap:
    """Polynomial c tanh(s scale / c) of raw scores s, for the steps of a tile that hold the row max, and the test of its range.

    The polynomial increases everywhere, so a score s with s scale > LARGEST c becomes more than c tanh(LARGEST), and with it the log of
    the row sum, which is compared with that at the end of the tile. Scores with s scale < -LARGEST c become less than
    -c tanh(LARGEST), as c tanh(s scale / c) is; the log of the row sum is so large that they are negligible. A tile out of this range is
    computed again with tanh. The row sums of step 0, which has tanh, predict which tiles are.

    keys: number of keys that a row of the tile may see.
    """

    def __init__(self, softmax_scale: Any, softcap: Any, keys: Any, name: str = "polynomial"):
        factor = softmax_scale / softcap
        c0, c1, c2 = COEFFICIENTS
        self.c0 = T.alloc_var("float32", init=c0 * LOG2E * softmax_scale)
        self.c1 = T.alloc_var("float32", init=c1 * LOG2E * softmax_scale * factor * factor)
        self.c2 = T.alloc_var("float32", init=c2 * LOG2E * softmax_scale * factor * factor * factor * factor)
        self.highest = T.alloc_var("float32", init=math.tanh(LARGEST) * LOG2E * softcap)
        self.log_sum = T.alloc_var("float32", init=0.0)  # the largest of 16 rows after step 0
        self.lowest = T.alloc_var(
            "float32", init=T.log2(T.cast(keys, "float32")) - NEGLIGIBLE - self.highest[0]
        )

    @staticmethod
    def serves(problem: AttnProblem, config: FwdConfig) -> bool:
        """True if steps of a forward kernel use the polynomial. With keys in pages most kernels would spill, 8 to 56 bytes."""
        return config.hold_max and problem.is_only_capped and config.page_rows == 0

    @T.inline
    def apply(self, acc_s):
        """Replace raw scores by capped ones, in base 2: exponents, as the row max is 0."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            square = acc_s[i, j] * acc_s[i, j]
            acc_s[i, j] *= self.c0[0] + square * (self.c1[0] + square * self.c2[0])

    @T.inline
    def flag_if_out_of_range(self, softmax: OnlineSoftmax, steps):
        """Set softmax.flag if a row would leave the range, were each step to add as much as step 0.

        Normal scores reach 1.33 times the maximum of step 0, 64 x 128 of them, in 8192 keys.
        """
        first, last = T.abs(self.c0[0]), T.abs(self.c2[0])
        normal = (T.min(first, last) > SMALLEST_COEFFICIENT) & (T.max(first, last) < LARGEST_COEFFICIENT)
        if T.Not(normal & (self.highest[0] > LEAST_HIGHEST)):
            softmax.flag[0] = 1
        T.reduce_sum(softmax.partial_sum, softmax.row_sum, dim=1)
        self.log_sum[0] = -T.infinity("float32")
        for i in T.Parallel(64, loop_layout=rows_layout()):
            log_sum = self.log2_sum(softmax, i) + T.log2(T.cast(steps, "float32"))
            peak = T.max(softmax.row_max[i] * softmax.scale_log2 * HEADROOM, log_sum)
            if T.Not(peak < self.highest[0]):  # or NaN
                softmax.flag[0] = 1
            self.log_sum[0] = T.max(self.log_sum[0], log_sum)
        # The largest of 16 rows: under a causal mask some rows see few keys in step 0
        if T.warp_reduce_max(self.log_sum[0]) < self.lowest[0]:
            softmax.flag[0] = 1

    @T.inline
    def check_sums(self, softmax: OnlineSoftmax):
        """Set softmax.flag for a tile that has used the polynomial out of its range. A row that has seen no key is in range."""
        if softmax.at_zero[0] != 0:
            T.reduce_sum(softmax.partial_sum, softmax.row_sum, dim=1)
            for i in T.Parallel(64, loop_layout=rows_layout()):
                log_sum = self.log2_sum(softmax, i)
                in_range = (log_sum > self.lowest[0]) & (log_sum < self.highest[0])  # false for NaN
                if T.Not(in_range) & (softmax.row_sum[i] != 0):
                    softmax.flag[0] = 1

    def log2_sum(self, softmax: OnlineSoftmax, i: Any) -> Any:
        """Logarithm of a row sum in base 2; row_sum holds it relative to row_max."""
        return T.log2(softmax.row_sum[i]) + softmax.row_max[i] * softmax.scale_log2
