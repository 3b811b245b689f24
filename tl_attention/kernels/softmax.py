"""Online softmax over 64 rows of scores, in base 2: exp(x) = exp2(x * LOG2E)."""

from __future__ import annotations

import math

import tilelang.language as T

LOG2E = math.log2(math.e)
# Where the running maximum starts: scores lie above it, its product with a large scale is still finite, and
# LOWEST - LOWEST is 0, where -inf would give NaN
LOWEST = -1e20
# The scale 0 becomes this: masked scores stay -inf * scale = -inf, the others vanish
SMALLEST_SCALE = 2.0**-126
# P stays below 2^8, fit for fp16; its rounding error is relative, so nothing is lost
LAZY = 8.0
# Of a maximum that is held, which bf16 has the range for: larger sums leave too little of it to O
LARGEST_SUM = 2.0**64


def rows_layout():
    """Layout of a loop over the 64 rows of a warpgroup, as wgmma has them: each row at a quad of threads.

    It is given because TileLang 0.1.15 would search for it: the search tries each open loop as the first and all others after it.
    """
    return T.Fragment(
        [64],
        forward_thread_fn=lambda i, rep: i // 16 * 32 + i % 8 * 4 + rep,
        replicate=4,
        forward_index_fn=lambda i: i % 16 // 8,
    )


@T.meta_class
class OnlineSoftmax:
    """Running maximum and sum of the rows of a [64, block_N] tile; the scores are raw, scale_log2 > 0 is folded into the exponent.

    Row sums stay split over the 8 columns a quad of threads holds until finish(), so no step shuffles for them.
    """

    def __init__(self, block_N: int, scale_log2, name: str = "softmax"):
        self.block_N, self.scale_log2 = block_N, scale_log2
        self.row_max = T.alloc_fragment([64], "float32")
        self.row_max_prev = T.alloc_fragment([64], "float32")
        self.row_scale = T.alloc_fragment([64], "float32")  # what the row's output so far is multiplied by
        self.partial_sum = T.alloc_fragment([64, 8], "float32")
        self.block_sum = T.alloc_fragment([64, 8], "float32")
        self.moved = T.alloc_var("int32", init=0)
        self.row_sum = T.alloc_fragment([64], "float32")

    @T.inline
    def reset(self):
        T.fill(self.row_max, LOWEST)
        T.clear(self.partial_sum)

    @T.inline
    def update(self, acc_s, shift=None, follow=True):
        """Replace scores by exp2((score + shift - row_max) * scale_log2), and add to the sums.

        follow: whether row_max follows the running maximum; else it stays, and must be that of some scores already.
        """
        if follow:
            self.follow(acc_s, shift)
        for i, j in T.Parallel(64, self.block_N):
            acc_s[i, j] = T.exp2(acc_s[i, j] * self.scale_log2 - self.score_max(i, shift) * self.scale_log2)
        T.reduce_sum(T.view(acc_s, [64, self.block_N // 8, 8]), self.block_sum, dim=1)
        for i, j in T.Parallel(64, 8):
            if follow:
                self.partial_sum[i, j] = self.partial_sum[i, j] * self.row_scale[i] + self.block_sum[i, j]
            else:
                self.partial_sum[i, j] += self.block_sum[i, j]

    @T.inline
    def follow(self, acc_s, shift):
        """Set row_max, and row_scale for what was summed before.

        row_max follows the running maximum only when that has grown by 2^LAZY: any row_max gives the same quotient, and
        most steps then need no rescale.
        """
        T.copy(self.row_max, self.row_max_prev, loop_layout=rows_layout())
        if shift is None:
            T.reduce_max(acc_s, self.row_max, dim=1, clear=False)
        else:
            T.reduce_max(acc_s, self.row_max, dim=1)
            for i in T.Parallel(64, loop_layout=rows_layout()):
                self.row_max[i] = T.max(self.row_max[i] + shift, self.row_max_prev[i])
        for i in T.Parallel(64, loop_layout=rows_layout()):
            grown = (self.row_max[i] - self.row_max_prev[i]) * self.scale_log2
            self.row_max[i] = T.if_then_else(grown > LAZY, self.row_max[i], self.row_max_prev[i])
        for i in T.Parallel(64, loop_layout=rows_layout()):
            # The difference first: exact for LOWEST, where an FMA would leave its rounding error
            self.row_scale[i] = T.exp2((self.row_max_prev[i] - self.row_max[i]) * self.scale_log2)

    def score_max(self, i, shift):
        """row_max as scores have it."""
        return self.row_max[i] if shift is None else self.row_max[i] - shift

    @T.inline
    def rescale(self, acc_o):
        """Multiply by row_scale, if a row of this warp moved its maximum."""
        rows, cols = acc_o.shape
        self.moved[0] = 0
        for i in T.Parallel(64, loop_layout=rows_layout()):
            if self.row_max[i] > self.row_max_prev[i]:
                self.moved[0] = 1
        if T.any_sync(self.moved[0] != 0):
            for i, j in T.Parallel(rows, cols):
                acc_o[i, j] *= self.row_scale[i]

    @T.inline
    def check_sums(self):
        """For overflowed()."""
        self.moved[0] = 0
        for i, j in T.Parallel(64, 8):
            if self.partial_sum[i, j] > LARGEST_SUM:
                self.moved[0] = 1

    def overflowed(self):
        """Whether a row of this warp has a sum that the maximum it held is too small for."""
        return T.any_sync(self.moved[0] != 0)

    @T.inline
    def finish(self, acc_o, lse, lse_unit, sink=None):
        """Divide by the row sum, and set lse in units of log2 / lse_unit; 0 and -inf for a row with no key.

        sink: a score, in natural units, that takes its share of the sum.
        """
        rows, cols = acc_o.shape
        T.reduce_sum(self.partial_sum, self.row_sum, dim=1)
        if sink is not None:
            for i in T.Parallel(64, loop_layout=rows_layout()):  # to a maximum that holds for the sink, too
                self.row_max_prev[i] = T.max(self.row_max[i] * self.scale_log2, sink * LOG2E)
                self.row_scale[i] = T.exp2(self.row_max[i] * self.scale_log2 - self.row_max_prev[i])
                self.row_sum[i] = self.row_sum[i] * self.row_scale[i] + T.exp2(
                    sink * LOG2E - self.row_max_prev[i]
                )
            for i in T.Parallel(64, loop_layout=rows_layout()):
                lse[i] = (T.log2(self.row_sum[i]) + self.row_max_prev[i]) * lse_unit
                self.row_scale[i] = T.if_then_else(
                    self.row_sum[i] != 0, self.row_scale[i] / self.row_sum[i], 0
                )
        else:
            for i in T.Parallel(64, loop_layout=rows_layout()):
                lse[i] = (T.log2(self.row_sum[i]) + self.row_max[i] * self.scale_log2) * lse_unit
            for i in T.Parallel(64, loop_layout=rows_layout()):
                self.row_scale[i] = T.if_then_else(self.row_sum[i] != 0, 1 / self.row_sum[i], 0)
        for i, j in T.Parallel(rows, cols):
            acc_o[i, j] *= self.row_scale[i]


@T.macro
def probabilities(acc_s, exponent, P=None, slope=None):
    """Replace scores by exp2(exponent(score, i, j)), times slope(score) if that is given; P gets them without."""
    rows, cols = acc_s.shape
    for i, j in T.Parallel(rows, cols):
        if P is not None:
            P[i, j] = T.exp2(exponent(acc_s[i, j], i, j))
        if slope is None:
            acc_s[i, j] = T.exp2(exponent(acc_s[i, j], i, j))
        else:
            acc_s[i, j] = T.exp2(exponent(acc_s[i, j], i, j)) * slope(acc_s[i, j])


@T.macro
def softmax_backward(P, acc_dp, delta, dS):
    """dS = P * (dP - delta(i, j)), which may take the place of P."""
    rows, cols = P.shape
    # bf16 multiplies two at a time, which fp16 lacks the range for
    product = P.dtype if P.dtype == "bfloat16" else "float32"
    for i, j in T.Parallel(rows, cols):
        dS[i, j] = T.cast(P[i, j], product) * T.cast(acc_dp[i, j] - delta(i, j), product)
