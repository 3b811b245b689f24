"""Softcap by polynomials where the scores of a tile are small beside the cap.

While the tensor cores work, a tanh.approx takes as long as seven multiply-adds (H200, 2026-11-27; docs/measurements.md, "Softcap: what
bounds it").
"""

from __future__ import annotations

import math
from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import FwdConfig
from tl_attention.kernels.pipeline import TileRing, any_of_warpgroup, sync_warpgroup
from tl_attention.kernels.softmax import LOG2E, OnlineSoftmax, rows_layout
from tl_attention.problem import AttnProblem

# tanh(x) = x (c0 + c1 x² + c2 x⁴) for |x| <= LARGEST, minimax: relative error 2.2e-4. That of tanh.approx is 4.9e-4
LARGEST = 0.75
COEFFICIENTS = (0.9997852, -0.3262967, 0.0973555)
# tanh(x) = x (b0 + b1 x²) for |x| <= r <= 0.45, minimax: 1 - b0, which is the relative error, and b1 + 1/3 as polynomials of r², here
# from r⁴ and from r² on
CUBIC_0 = (0.0166438, -0.0067734)
CUBIC_1 = (0.1330749, -0.0440306)
# r⁵ times the cap, so that a score errs by 0.006 at most, in natural units. At caps of 20, 30 and 50 r is 0.443, 0.408 and 0.369, and
# the relative error 5.9e-4, 4.3e-4 and 2.9e-4
LARGEST_CUBIC = 0.34
# Share of a row sum, as a power of 2, that scores below the range may have: that of the rounding of a weight in bf16
NEGLIGIBLE = -9
# Factor of the maximum of step 0 that scores of later steps may have: a tile that is computed twice takes 1.6 times as long
HEADROOM = 1.75
# Share of a row sum, as a power of 2, that step 0 predicts for each of its 8 partial sums: an eighth, and half a power for its error
PARTIAL_SHARE = -2.5
# Smallest cap tanh(LARGEST), in base 2, for which it is worth a try: caps from 19.7 on
LEAST_HIGHEST = 18.0
# Magnitudes of c0 and c2, times the scale and powers of scale / cap, for which all products are normal numbers
SMALLEST_COEFFICIENT, LARGEST_COEFFICIENT = 2.0**-100, 2.0**100
# Steps of a tile from which the cubic pays off: Q has to be scaled for it
LEAST_STEPS = 8
# Bits of fp32: of 1 and 2^63, the exponent, and the sum of the exponents of scale / cap and of the unit in CubicCap
ONE, LARGEST_UNIT, EXPONENT, EXPONENT_SUM = 127 << 23, 190 << 23, 255 << 23, 253 << 23
# The fence makes the tile visible to wgmma
SCALE_TILE = """
template <int vectors>
static __device__ __forceinline__ void tl_attention_scale_tile(void const *tiles, int slot, float factor) {
  uint4 *place = const_cast<uint4 *>(static_cast<uint4 const *>(tiles)) + slot * (vectors * 128) + threadIdx.x % 128;
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(factor));
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    uint4 numbers = place[i * 128];
    for (uint32_t *two : {&numbers.x, &numbers.y, &numbers.z, &numbers.w})
      asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(*two) : "r"(pair));
    place[i * 128] = numbers;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
"""


@T.meta_class
class CubicCap:
    """Cubic c tanh(s scale / c) of raw scores s, for tiles of many steps, in place of the polynomial of a PolynomialCap; and its range.

    s (b0 + b1 s²) decreases beyond |s scale / c| = 1, so s² is limited to 1, which costs no instruction. For that Q is divided by
    unit, a power of 2: then scale is between half of the cap and the cap, and the polynomial increases everywhere. So a score above the
    range makes the log of a partial row sum more than `highest`.

    scale: softmax_scale of scores of the divided Q.
    """

    def __init__(self, softmax_scale: Any, softcap: Any, steps: Any, name: str = "cubic"):
        raw_factor = T.alloc_var("float32", init=softmax_scale / softcap)
        unit = T.alloc_var("int32", init=EXPONENT_SUM - (T.reinterpret(raw_factor[0], "int32") & EXPONENT))
        pays = (steps >= LEAST_STEPS) & (unit[0] > ONE) & (unit[0] < LARGEST_UNIT)
        self.unit = T.alloc_var("int32", init=T.if_then_else(pays, unit[0], ONE))  # bits of fp32
        self.scale = T.alloc_var("float32", init=softmax_scale * T.reinterpret(self.unit[0], "float32"))
        factor = self.scale[0] / softcap
        largest = T.alloc_var("float32", init=T.exp2(0.2 * (math.log2(LARGEST_CUBIC) - T.log2(softcap))))
        square = T.alloc_var("float32", init=largest[0] * largest[0])
        b0, b1 = cubic_coefficients(square[0])
        self.b0 = T.alloc_var("float32", init=b0 * LOG2E * self.scale[0])
        self.b1 = T.alloc_var("float32", init=b1 * LOG2E * self.scale[0] * factor * factor)
        self.highest = T.alloc_var("float32", init=LOG2E * softcap * largest[0] * (b0 + b1 * square[0]))
        self.flag = T.alloc_var("int32", init=0)  # 1 for a thread with a row out of range

    @staticmethod
    def of(config: FwdConfig, softmax_scale: Any, options: Any, steps: Any) -> CubicCap | None:
        """The cubic of a tile, or None. options: OptionArguments; steps: of the tile."""
        return CubicCap(softmax_scale, options.softcap, steps) if config.cubic_cap else None

    @staticmethod
    def scale_of(cubic: CubicCap | None, softmax_scale: Any) -> Any:
        """softmax_scale of scores of the Q that there is."""
        return softmax_scale if cubic is None else cubic.scale[0]

    @T.inline
    def divide_queries(self, w, Q: TileRing, q_step):
        """Divide a warpgroup's Q by unit, exactly: only numbers below 2^-63 can underflow. Needs SCALE_TILE."""
        if self.unit[0] != ONE:
            T.evaluate(scale_tile(Q, q_step, T.reinterpret(2 * ONE - self.unit[0], "float32")))
            sync_warpgroup(w)

    @T.inline
    def apply(self, acc_s):
        """Replace raw scores by capped ones, in base 2: exponents, as the row max is 0."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            square = T.call_extern("float32", "__saturatef", acc_s[i, j] * acc_s[i, j])
            acc_s[i, j] *= self.b0[0] + self.b1[0] * square

    @T.inline
    def flag_if_out_of_range(self, softmax: OnlineSoftmax, log_sum, largest_sum, margin):
        """Set flag if a row would leave the range, were each step to add as much as step 0.

        log_sum: function of a row, the log of the sum that it would have. largest_sum: the largest in the warp.
        margin: of log sums above -highest, with which scores below -highest are negligible.
        """
        self.flag[0] = 0
        for i in T.Parallel(64, loop_layout=rows_layout()):
            peak = T.max(softmax.row_max[i] * softmax.scale_log2 * HEADROOM, log_sum(i) + PARTIAL_SHARE)
            if T.Not(peak < self.highest[0]):  # or NaN
                self.flag[0] = 1
        if largest_sum < margin - self.highest[0]:
            self.flag[0] = 1

    @T.inline
    def choose(self, w, softmax: OnlineSoftmax):
        """Set softmax.at_zero to 2 where the cubic serves; after softmax.hold_zero()."""
        if self.unit[0] != ONE:
            if T.shfl_sync(any_of_warpgroup(w, self.flag[0]), 0) == 0:
                softmax.at_zero[0] *= 2

    @T.inline
    def check_sums(self, softmax: OnlineSoftmax, log_sum, margin):
        """Set softmax.flag for a tile that has used the cubic out of its range; after PolynomialCap.check_sums()."""
        if softmax.at_zero[0] == 2:
            for i, j in T.Parallel(64, 8):
                if T.Not(T.log2(softmax.partial_sum[i, j]) < self.highest[0]):  # or NaN
                    softmax.flag[0] = 1
            for i in T.Parallel(64, loop_layout=rows_layout()):
                if (log_sum(i) < margin - self.highest[0]) & (softmax.row_sum[i] != 0):
                    softmax.flag[0] = 1


@T.meta_class
class PolynomialCap:
    """Polynomial c tanh(s scale / c) of raw scores s, for the steps of a tile that hold the row max, and the test of its range.

    The polynomial increases everywhere, so a score s with s scale > LARGEST c becomes more than c tanh(LARGEST), and with it the log of
    the row sum, which is compared with that at the end of the tile. Scores with s scale < -LARGEST c become less than
    -c tanh(LARGEST), as c tanh(s scale / c) is; the log of the row sum is so large that they are negligible. A tile out of this range is
    computed again with tanh. The row sums of step 0, which has tanh, predict which tiles are.

    keys: number of keys that a row of the tile may see.
    cubic: in place of this where it serves, or None.
    """

    def __init__(
        self, softmax_scale: Any, softcap: Any, keys: Any, cubic: CubicCap | None, name: str = "polynomial"
    ):
        self.cubic = cubic
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

    @staticmethod
    def of(
        problem: AttnProblem,
        config: FwdConfig,
        softmax_scale: Any,
        options: Any,
        keys: Any,
        cubic: CubicCap | None,
    ) -> PolynomialCap | None:
        """The polynomial of a tile, or None. options: OptionArguments."""
        if not PolynomialCap.serves(problem, config):
            return None
        return PolynomialCap(CubicCap.scale_of(cubic, softmax_scale), options.softcap, keys, cubic)

    def forms(self, softmax: OnlineSoftmax) -> tuple[tuple[PolynomialCap | CubicCap, Any], ...]:
        """Polynomials of the tile's steps with a row max of 0, each with True if the tile has it."""
        if self.cubic is None:
            return ((self, softmax.at_zero[0] != 0),)
        return (self.cubic, softmax.at_zero[0] == 2), (self, softmax.at_zero[0] == 1)

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
        if self.cubic is not None:
            self.cubic.flag_if_out_of_range(
                softmax,
                lambda i: self.log2_sum(softmax, i) + T.log2(T.cast(steps, "float32")),
                T.warp_reduce_max(self.log_sum[0]),
                self.margin,
            )

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
        if self.cubic is not None:
            self.cubic.check_sums(softmax, lambda i: self.log2_sum(softmax, i), self.margin)

    @property
    def margin(self) -> Any:
        """Logarithm, in base 2, of a row sum beside which all scores of the row below 0 are negligible."""
        return self.lowest[0] + self.highest[0]

    def log2_sum(self, softmax: OnlineSoftmax, i: Any) -> Any:
        """Logarithm of a row sum in base 2; row_sum holds it relative to row_max."""
        return T.log2(softmax.row_sum[i]) + softmax.row_max[i] * softmax.scale_log2


def cubic_coefficients(square: Any) -> tuple[Any, Any]:
    """b0 and b1 of the cubic for a range of which the square is given."""
    b0 = 1 - square * square * (CUBIC_0[0] + CUBIC_0[1] * square)
    return b0, square * (CUBIC_1[0] + CUBIC_1[1] * square) - 1 / 3


def scale_tile(ring: TileRing, step: Any, factor: Any) -> Any:
    """Multiply the tile of a step, 64 rows of bf16, by a power of 2; for all threads of a warpgroup."""
    _, rows, cols = ring.tiles.shape
    # "r": for a write TileLang 0.1.15 would put a fence in front of the first wgmma of every tile
    tiles = ring.tiles.access_ptr("r"), step % ring.slots
    return T.call_extern("handle", f"tl_attention_scale_tile<{rows * cols // 1024}>", *tiles, factor)
