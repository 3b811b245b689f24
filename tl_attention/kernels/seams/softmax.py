"""Online softmax over 64 rows of scores, in base 2: exp(x) = exp2(x * LOG2E)."""

from __future__ import annotations

import math

import tilelang.language as T

from tl_attention.kernels.seams.pipeline import any_of_warpgroup, indices

LOG2E = math.log2(math.e)
# Initial row max. It is below all scores, its product with a large scale is finite, and LOWEST - LOWEST is 0, where -inf would give NaN
LOWEST = -1e20
# Replaces a scale of 0: masked scores stay -inf * scale = -inf, all others become 0
SMALLEST_SCALE = 2.0**-126
# Growth of the row max, in powers of 2, that needs no rescale: P stays below 2^8, which fp16 holds, and rounding errors are relative
LAZY_GROWTH = 8.0
# Largest row sum with a held row max. bf16 has the range for it; larger sums would leave too little range for O
LARGEST_HELD_SUM = 2.0**64
# Largest magnitude of a row max, in base 2, in place of which 0 may be held
NEAR_ZERO = 30.0


def rows_layout():
    """Layout of a loop over the 64 rows of a warpgroup, as wgmma distributes them: each row to a quad of threads.

    Given explicitly, as TileLang 0.1.15 would search for it: it tries each loop without a layout as the first one, then all others.
    """
    return T.Fragment(
        [64],
        forward_thread_fn=lambda i, rep: i // 16 * 32 + i % 8 * 4 + rep,
        replicate=4,
        forward_index_fn=lambda i: i % 16 // 8,
    )


def of_row(value, i):
    """The value of row i. value: a number for all rows, or a function from a row."""
    return value(i) if callable(value) else value


@T.meta_class
class OnlineSoftmax:
    """Row max and row sum of score tiles [64, block_N], one tile after another.

    The row max is a maximum of raw scores; scale_log2 > 0 multiplies them in the exponent. Until finish() each thread of a quad sums its
    own columns of a row, so no step needs a shuffle for row sums. P is at most 2 ** growth.

    growth: increase of a row max, in powers of 2, up to which update_max() leaves row_max as it is.
    may_hold_zero: hold_zero() may be called. at_zero is then 1 while the row max of all rows of a warpgroup is held at 0.
    sums_directly: steps that hold the row max add to the sums of all steps, not to a sum of their own first.
    rounds_alike: row max times scale is rounded before it is subtracted. Else the compiler decides in each kernel whether to fuse both into
        an FMA.
    keeps_largest: `largest` is the largest score of each row, from which row_max may differ by `growth`. Each step updates the row max.
    """

    def __init__(
        self,
        block_N: int,
        scale_log2,
        growth: float = LAZY_GROWTH,
        may_hold_zero: bool = False,
        sums_directly: bool = False,
        rounds_alike: bool = False,
        keeps_largest: bool = False,
        name: str = "softmax",
    ):
        self.block_N, self.scale_log2, self.growth = block_N, scale_log2, growth
        self.sums_directly, self.rounds_alike = sums_directly, rounds_alike
        self.at_zero = T.alloc_var("int32", init=0) if may_hold_zero else None
        self.row_max = T.alloc_fragment([64], "float32")
        self.row_max_prev = T.alloc_fragment([64], "float32")
        self.row_scale = T.alloc_fragment([64], "float32")  # factor for the row's output so far
        self.partial_sum = T.alloc_fragment([64, 8], "float32")
        self.block_sum = T.alloc_fragment([64, 8], "float32")
        self.flag = T.alloc_var("int32", init=0)
        self.row_sum = T.alloc_fragment([64], "float32")
        self.largest = T.alloc_fragment([64], "float32") if keeps_largest else None

    @T.inline
    def reset(self):
        T.fill(self.row_max, LOWEST)
        T.clear(self.partial_sum)
        if self.largest is not None:
            T.fill(self.largest, LOWEST)

    @T.inline
    def update(self, acc_s, shift=None, updates_max=True, at_zero=False):
        """Replace scores by exp2((score + shift - row_max) * scale_log2), and add them to the row sums.

        updates_max: update row_max first; else row_max is held, and each row must have seen a score before.
        at_zero: the row max is 0 and held, and scores are exponents already.
        """
        if updates_max:
            self.update_max(acc_s, shift)
        for i, j in T.Parallel(64, self.block_N):
            acc_s[i, j] = T.exp2(self.exponent(acc_s[i, j], i, shift, at_zero))
        if self.sums_directly and not updates_max:
            # reduce_sum in other steps gives partial_sum its layout: these loops alone would get one with all columns (TileLang 0.1.15)
            for n in tuple(range(self.block_N // 8)):
                for i, j in T.Parallel(64, 8):
                    self.partial_sum[i, j] += acc_s[i, 8 * n + j]
        else:
            T.reduce_sum(T.view(acc_s, [64, self.block_N // 8, 8]), self.block_sum, dim=1)
            for i, j in T.Parallel(64, 8):
                if updates_max:
                    self.partial_sum[i, j] = self.partial_sum[i, j] * self.row_scale[i] + self.block_sum[i, j]
                else:
                    self.partial_sum[i, j] += self.block_sum[i, j]

    @T.inline
    def update_max(self, acc_s, shift):
        """Update row_max, and set row_scale, the factor for what was summed before.

        row_max changes only if the maximum has grown by more than `growth`, so that most steps need no rescale. Any row_max gives the same
        quotient.
        """
        T.copy(self.row_max, self.row_max_prev, loop_layout=rows_layout())
        if shift is None:
            T.reduce_max(acc_s, self.row_max, dim=1, clear=False)
        else:
            T.reduce_max(acc_s, self.row_max, dim=1)
            for i in T.Parallel(64, loop_layout=rows_layout()):
                self.row_max[i] = T.max(self.row_max[i] + shift, self.row_max_prev[i])
        if self.largest is not None:
            # row_max is an earlier score or LOWEST, or a larger score of this step
            for i in T.Parallel(64, loop_layout=rows_layout()):
                self.largest[i] = T.max(self.largest[i], self.row_max[i])
        for i in T.Parallel(64, loop_layout=rows_layout()):
            grown = (self.row_max[i] - self.row_max_prev[i]) * self.scale_log2
            if self.at_zero is None:
                self.row_max[i] = T.if_then_else(grown > self.growth, self.row_max[i], self.row_max_prev[i])
            else:
                grown_much = (grown > self.growth) & (self.at_zero[0] == 0)
                self.row_max[i] = T.if_then_else(grown_much, self.row_max[i], self.row_max_prev[i])
        for i in T.Parallel(64, loop_layout=rows_layout()):
            # Subtract first: exact for LOWEST, where an FMA would leave a rounding error
            self.row_scale[i] = T.exp2((self.row_max_prev[i] - self.row_max[i]) * self.scale_log2)

    @T.inline
    def hold_zero(self, w, acc_s, may):
        """Hold a row max of 0, which saves its subtraction, if `may` and all row maxima of a warpgroup are near 0.

        Call it after the first update(). acc_s and the row sums become relative to 0. A thread with flag 1 prevents it.
        """
        for i in T.Parallel(64, loop_layout=rows_layout()):
            if T.abs(self.row_max[i] * self.scale_log2) > NEAR_ZERO:
                self.flag[0] = 1
        self.at_zero[0] = 0
        # Without the shuffle the compiler keeps the descriptors of all steps out of uniform registers, 32 R2UR per step at d128
        if T.shfl_sync(any_of_warpgroup(w, self.flag[0]), 0) == 0:
            if may:
                self.at_zero[0] = 1
                for i in T.Parallel(64, loop_layout=rows_layout()):
                    self.row_scale[i] = T.exp2(self.row_max[i] * self.scale_log2)
                    self.row_max[i] = 0.0
                self.scale_rows((acc_s,))
                for i, j in T.Parallel(64, 8):
                    self.partial_sum[i, j] *= self.row_scale[i]

    def exponent(self, score, i, shift, at_zero):
        """Exponent of 2 of a score of row i. at_zero: see update()."""
        if at_zero:
            return score
        return score * self.scale_log2 - self.scaled(self.score_max(i, shift))

    def scaled(self, row_max):
        """A row max in base 2."""
        if self.rounds_alike:
            return T.call_extern("float32", "__fmul_rn", row_max, self.scale_log2)
        return row_max * self.scale_log2

    def score_max(self, i, shift):
        """row_max relative to scores that lack `shift`."""
        return self.row_max[i] if shift is None else self.row_max[i] - shift

    @T.inline
    def rescale(self, accs):
        """Multiply O, tiles side by side, by row_scale, if the row max of any row of this warp changed."""
        self.flag[0] = 0
        for i in T.Parallel(64, loop_layout=rows_layout()):
            if self.row_max[i] > self.row_max_prev[i]:
                self.flag[0] = 1
        if T.any_sync(self.flag[0] != 0):
            self.scale_rows(accs)

    @T.inline
    def scale_rows(self, accs):
        """Multiply tiles side by side by row_scale."""
        for n in indices(accs):
            rows, cols = accs[n].shape
            for i, j in T.Parallel(rows, cols):
                accs[n][i, j] *= self.row_scale[i]

    @T.inline
    def check_sums(self):
        """Set flag to 1 in threads with a row sum above LARGEST_HELD_SUM, else to 0; for overflowed()."""
        self.flag[0] = 0
        for i, j in T.Parallel(64, 8):
            if self.partial_sum[i, j] > LARGEST_HELD_SUM:
                self.flag[0] = 1

    def overflowed(self):
        """True if flag is set in a thread of this warp: the held row max of one of its rows does not serve."""
        return T.any_sync(self.flag[0] != 0)

    @T.inline
    def finish(self, lse, lse_unit, sink=None):
        """Set row_scale to the factors that divide O by the row sums, and lse = log2(sum of exp2) * lse_unit; without keys 0 and -inf.

        sink: score in natural units, added to the row sum, or a function from a row to it; None: no sink.
        """
        T.reduce_sum(self.partial_sum, self.row_sum, dim=1)
        if sink is not None:
            # Relative to a maximum that includes the sink
            for i in T.Parallel(64, loop_layout=rows_layout()):
                self.row_max_prev[i] = T.max(self.scaled(self.row_max[i]), of_row(sink, i) * LOG2E)
                self.row_scale[i] = T.exp2(self.scaled(self.row_max[i]) - self.row_max_prev[i])
                self.row_sum[i] = self.row_sum[i] * self.row_scale[i] + T.exp2(
                    of_row(sink, i) * LOG2E - self.row_max_prev[i]
                )
            for i in T.Parallel(64, loop_layout=rows_layout()):
                lse[i] = (T.log2(self.row_sum[i]) + self.row_max_prev[i]) * lse_unit
                self.row_scale[i] = T.if_then_else(
                    self.row_sum[i] != 0, self.row_scale[i] / self.row_sum[i], 0
                )
        else:
            for i in T.Parallel(64, loop_layout=rows_layout()):
                lse[i] = (T.log2(self.row_sum[i]) + self.scaled(self.row_max[i])) * lse_unit
            for i in T.Parallel(64, loop_layout=rows_layout()):
                self.row_scale[i] = T.if_then_else(self.row_sum[i] != 0, 1 / self.row_sum[i], 0)

    @T.inline
    def finish_largest(self):
        """Turn `largest` into natural units; -inf without keys."""
        for i in T.Parallel(64, loop_layout=rows_layout()):
            self.largest[i] = T.if_then_else(
                self.largest[i] > LOWEST,
                self.largest[i] * (self.scale_log2 * (1 / LOG2E)),
                -T.infinity("float32"),
            )


@T.meta_class
class TangentSums:
    """Sums of H = P * (scale tS - center) over the keys, for the rows of an OnlineSoftmax.

    The tangent of the output is (sum of H V + P tV) / row_sum - mean(H) O, for any center of a row. The center is the mean of the first
    tile's tangents, which keeps H small if all tangents of a row are large and alike.
    """

    def __init__(self, softmax, scale, name: str = "sums"):
        self.softmax, self.scale = softmax, scale
        self.center = T.alloc_fragment([64], "float32")
        self.partial_sum = T.alloc_fragment([64, 8], "float32")
        self.block_sum = T.alloc_fragment([64, 8], "float32")
        self.mean = T.alloc_fragment([64], "float32")  # tangent of the log-sum-exp, after finish()

    @T.inline
    def reset(self):
        T.clear(self.partial_sum)
        T.clear(self.center)

    @T.inline
    def update(self, P, acc_ts):
        """Replace raw tangents of scores by H; P are the unrounded probabilities that softmax.update() left."""
        rows, cols = P.shape
        for i, j in T.Parallel(rows, cols):
            acc_ts[i, j] = P[i, j] * (acc_ts[i, j] * self.scale - self.center[i])
        T.reduce_sum(T.view(acc_ts, [rows, cols // 8, 8]), self.block_sum, dim=1)
        for i, j in T.Parallel(rows, 8):
            self.partial_sum[i, j] = self.partial_sum[i, j] * self.softmax.row_scale[i] + self.block_sum[i, j]

    @T.inline
    def find_center(self, P, acc_ts):
        """Set center to the mean of the first tile's tangents; 0 for a row that sees none of the tile's keys."""
        weighted = T.alloc_fragment(P.shape, "float32")
        for i, j in T.Parallel(*P.shape):
            weighted[i, j] = P[i, j] * acc_ts[i, j]
        T.reduce_sum(weighted, self.center, dim=1)
        T.reduce_sum(P, self.mean, dim=1)
        for i in T.Parallel(64, loop_layout=rows_layout()):
            self.center[i] = T.if_then_else(self.mean[i] > 0, self.center[i] * self.scale / self.mean[i], 0)

    @T.inline
    def finish(self, acc_to, O, lse_unit):
        """Turn the sum acc_to into the tangent of O, and mean into that of the log-sum-exp; after softmax.finish()."""
        rows, cols = acc_to.shape
        T.reduce_sum(self.partial_sum, self.mean, dim=1)
        for i in T.Parallel(64, loop_layout=rows_layout()):
            self.mean[i] *= self.softmax.row_scale[i]
        for i, j in T.Parallel(rows, cols):
            acc_to[i, j] = acc_to[i, j] * self.softmax.row_scale[i] - self.mean[i] * O[i, j]
        for i in T.Parallel(64, loop_layout=rows_layout()):
            self.mean[i] = (self.mean[i] + self.center[i]) * lse_unit * LOG2E


@T.macro
def probabilities(acc_s, exponent, P=None, sloped=None):
    """Replace scores by p = exp2(exponent(score, i, j)), or sloped(p, score, i, j) if given; P gets p."""
    rows, cols = acc_s.shape
    for i, j in T.Parallel(rows, cols):
        if P is not None:
            P[i, j] = T.exp2(exponent(acc_s[i, j], i, j))
        if sloped is None:
            acc_s[i, j] = T.exp2(exponent(acc_s[i, j], i, j))
        else:
            acc_s[i, j] = sloped(T.exp2(exponent(acc_s[i, j], i, j)), acc_s[i, j], i, j)


@T.macro
def softmax_backward(P, acc_dp, delta, dS):
    """Set dS = P * (dP - delta(i, j)), computed in fp32; dS may be P."""
    rows, cols = P.shape
    for i, j in T.Parallel(rows, cols):
        dS[i, j] = P[i, j] * (acc_dp[i, j] - delta(i, j))
