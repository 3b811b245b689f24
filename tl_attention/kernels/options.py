"""Options of attention inside the kernels: softcap, ALiBi, sink, dropout, and the arguments that carry their values.

A kernel holds code for the options that its problem names; their values come with each launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.pipeline import SharedTile, sync_consumers
from tl_attention.kernels.program_code import program_code
from tl_attention.kernels.roles import Roles
from tl_attention.kernels.softmax import LOG2E
from tl_attention.kernels.traced import Traced, TracedArguments
from tl_attention.problem import AttnProblem

# Dropout by Philox-4x32 with 7 rounds (Salmon et al. 2011); reference.dropout_keep says which bits decide on which element.
# A lane holds rows r, r + 8 (r = lane / 4) and, of every 8 columns, 2t, 2t + 1 (t = lane % 4) of its warp's 16 rows. Two Philox calls
# decide on 32 elements of a block of 16 x 16; 4 lanes hold 8 of them each. Of 4 blocks side by side, each of the 4 lanes draws for one,
# and two exchanges give each lane its 8 bits of all 4
PHILOX = """
static __device__ __forceinline__ uint4 tl_attention_philox(uint4 c, unsigned k0, unsigned k1) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    unsigned long long a = 0xD2511F53ull * c.x, b = 0xCD9E8D57ull * c.z;
    c = make_uint4(unsigned(b >> 32) ^ c.y ^ k0, unsigned(b), unsigned(a >> 32) ^ c.w ^ k1, unsigned(a));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}
// Byte i of the result is byte s & 7 of high:low, where s is the i-th hex digit of the selector; with s & 8 its sign bit, 8 times
static __device__ __forceinline__ unsigned tl_attention_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}
// 32 bits of rng_state. Volatile, like the lane, so that a backward by keys holds nothing derived from them over its steps
static __device__ __forceinline__ int tl_attention_random_state(const void* state, int half) {
  int word;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"((const int*)state + half));
  return word;
}
static __device__ __forceinline__ unsigned tl_attention_lane() {
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// keeps[g]: one bit, 1 to keep, per element that a lane holds of columns 64 g .. 64 g + 63 of a tile of 64 rows
template <bool rows_are_keys, int cols>
static __device__ __forceinline__ void tl_attention_draw(
    unsigned* keeps, int row, int col, int head, int offset, int k0, int k1, int drop_below) {
  unsigned lane = rows_are_keys ? tl_attention_lane() : threadIdx.x % 32, r = lane / 4, t = lane % 4;
  unsigned row_block = row / 16 + threadIdx.x / 32 % 4, one_of_4 = rows_are_keys ? r % 4 : t % 2 * 2 + r % 2;
  // One exchange of halves, one of bytes (of nibbles where rows are keys); a lane keeps one part and receives the other
  bool high_half = rows_are_keys ? r & 2 : t & 1, high = r & 1;
  unsigned halves = high_half ? 0x3276 : 0x5410, bytes = high ? 0x3715 : 0x6240;
  unsigned nibbles = high ? 0xF0F0F0F0 : 0x0F0F0F0F, turn = high ? 28 : 4;
#pragma unroll
  for (int g = 0; g < (cols + 63) / 64; ++g) {
    unsigned col_block = col / 16 + 4 * g + one_of_4;
    unsigned query = rows_are_keys ? col_block * 4 + t : row_block * 4 + r / 2;
    unsigned key = rows_are_keys ? row_block * 4 + r / 4 * 2 : col_block * 4 + t / 2 * 2;
    uint4 x = tl_attention_philox(make_uint4(query, key, head, offset), k0, k1);
    uint4 y = tl_attention_philox(make_uint4(query, key + 1, head, offset), k0, k1);
    unsigned words[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}, keep = ~0u;
    // words[i] holds bit i of 32 numbers; keep: whether each is at least drop_below
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      unsigned open = (drop_below >> i & 1) - 1u;
      keep = words[i] & keep | open & (words[i] | keep);
    }
    keep = tl_attention_bytes(keep, __shfl_xor_sync(~0u, keep, rows_are_keys ? 8 : 1), halves);
    unsigned other = __shfl_xor_sync(~0u, keep, 4);
    keeps[g] = rows_are_keys ? keep & nibbles | (other << turn | other >> 32 - turn) & ~nibbles
                             : tl_attention_bytes(keep, other, bytes);
  }
}
// Mask of the n-th pair of elements that a lane holds side by side: ones to keep, 16 bits for each, or 32 for one of the pair
template <bool rows_are_keys>
static __device__ __forceinline__ unsigned tl_attention_mask(const unsigned* keeps, int n, int of_both = -1) {
  unsigned keep = keeps[n / 16];
  int block = n / 4 % 4, bit = n / 2 % 2 | n % 2 << 1;  // column half, row half of the block
  if (rows_are_keys) bit = n / 2 % 2 << 1 | n % 2;
  unsigned low, high, first, second;
  if (rows_are_keys) {
    low = high = keep << 7 - (block % 2 * 4 + bit);
    first = block / 2 * 2, second = first + 1;
  } else {
    low = keep << 7 - bit, high = keep << 3 - bit;
    first = block, second = 4 + block;
  }
  if (of_both == 0) second = first;
  if (of_both == 1) first = second;
  return tl_attention_bytes(low, high, 0x8888 | first * 0x11 | second * 0x1100);
}
template <bool rows_are_keys, int cols>
static __device__ __forceinline__ void tl_attention_drop_half(void* tile, const unsigned* keeps) {
#pragma unroll
  for (int n = 0; n < cols / 4; ++n) ((unsigned*)tile)[n] &= tl_attention_mask<rows_are_keys>(keeps, n);
}
template <bool rows_are_keys, int cols>
static __device__ __forceinline__ void tl_attention_drop_float(void* tile, const unsigned* keeps) {
#pragma unroll
  for (int n = 0; n < cols / 2; ++n) ((unsigned*)tile)[n] &= tl_attention_mask<rows_are_keys>(keeps, n / 2, n % 2);
}
"""


# tanh with an error of 2e-7: that of --use_fast_math has one of 2^-11. Below 0.55 a polynomial, fitted at Chebyshev's points
TANH = """
static __device__ __forceinline__ float tl_attention_tanh(float x) {
  float square = x * x, power = exp2f(-2.885390082f * fabsf(x));
  float sum = -6.615746300667524e-3f;
  sum = fmaf(sum, square, 2.1312739700078964e-2f);
  sum = fmaf(sum, square, -5.3910065442323685e-2f);
  sum = fmaf(sum, square, 1.3333117961883545e-1f);
  sum = fmaf(sum, square, -3.333333134651184e-1f);
  float small = fmaf(x, square * sum, x), large = copysignf(__fdividef(1.0f - power, 1.0f + power), x);
  return fabsf(x) < 0.55f ? small : large;
}
"""
# A zero that nvcc does not know, see TileRing.part
ZERO = """
static __device__ __forceinline__ int tl_attention_zero() {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}
"""


@dataclass(frozen=True)
class OptionArguments:
    """Arguments of a kernel with options. Those of options that the problem lacks have no meaning."""

    left: Any  # window: keys left of the diagonal
    right: Any  # window: keys right of it
    softcap: Any
    Slopes: Any  # ALiBi: [batch, heads] fp32
    Sink: Any  # [heads] fp32
    Rng: Any  # int64 [2]: seed, offset
    drop_below: Any  # of 256: a random byte below it drops the element
    Table: Any  # varlen: scheduler.TileOrder's table
    traced: TracedArguments | None = None  # of the problem's program

    @property
    def window(self) -> tuple[Any, Any]:
        return self.left, self.right


def option_arguments(problem: AttnProblem) -> OptionArguments:
    """Types of OptionArguments; False, for which TileLang makes no argument, where the problem has no options.

    The tensor of an option that is off may be any tensor of the same rank.
    """
    if not problem.options:
        return OptionArguments(False, False, False, False, False, False, False, False)
    sizes = T.dynamic("slopes_batch, slopes_heads, sink_heads, rng_numbers, table_entries")
    slopes_batch, slopes_heads, sink_heads, rng_numbers, table_entries = sizes
    return OptionArguments(
        left=T.int32,
        right=T.int32,
        softcap=T.float32,
        Slopes=T.StridedTensor([slopes_batch, slopes_heads], [T.dynamic("slopes_stride"), 1], "float32"),
        Sink=T.Tensor([sink_heads], "float32"),
        Rng=T.Tensor([rng_numbers], "int64"),
        drop_below=T.int32,
        Table=T.Tensor([table_entries, 8], "int32"),
    )


def prelude(problem: AttnProblem, roles: Roles) -> str | None:
    """CUDA that a kernel needs beside its own; None for nothing."""
    philox = PHILOX if problem.has("dropout") else ""
    tanh = TANH if problem.has("softcap") and problem.is_fp32 else ""
    zero = ZERO if problem.parts > 1 else ""
    program = "" if problem.program is None else program_code(problem.program)
    return (roles.prelude or "") + philox + tanh + zero + program or None


@T.meta_class
class LinearBias:
    """ALiBi that is linear in the key, as one more product that Q Kᵀ is added to, in units of raw scores.

    For a score tile [rows, cols] the bias is s * (c - r), or s * (r - c) where rows are keys. It is the product of [r s, s] and
    [1, c]ᵀ. bf16 holds r, c < 256 exactly, and r s and s as sums of three parts. shift() is what the tile's position adds.
    No instruction per element is left, but a GEMM of 16 columns per tile: B4 H16 S4096 d128 takes 1.08 of the time of plain
    attention, where two FFMA per element took 1.21 (H200, 2026-11-21).
    """

    def __init__(self, rows_are_keys: bool, name: str = "linear_bias"):
        self.sign = -1.0 if rows_are_keys else 1.0  # of c
        self.slope = T.alloc_var("float32", init=0.0)
        self.rows = T.alloc_fragment([64, 16], "bfloat16")

    @T.inline
    def start(self, slope):
        """Set the left factor. slope: per raw score."""
        self.slope[0] = slope
        for i, j in T.Parallel(64, 16):
            x = T.if_then_else(j < 4, -T.cast(i, "float32"), 1.0) * self.slope[0] * self.sign
            high = T.cast(T.cast(x, "bfloat16"), "float32")
            middle = T.cast(T.cast(x - high, "bfloat16"), "float32")
            part = T.if_then_else(j % 4 == 0, high, T.if_then_else(j % 4 == 1, middle, x - high - middle))
            self.rows[i, j] = T.if_then_else((j < 8) & (j % 4 < 3), part, 0.0)

    @T.inline
    def multiply(self, columns, acc_s):
        T.wgmma_gemm(
            self.rows,
            columns,
            acc_s,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=True,
        )

    def shift(self, diagonal: Any) -> Any:
        """Bias that all elements lack. diagonal: column that the diagonal of the tile's first query crosses."""
        return -self.slope[0] * T.cast(diagonal, "float32")


def alloc_bias_columns(problem: AttnProblem, cols: int) -> Any:
    """Shared memory [cols, 16] for the right factor of LinearBias; None where the problem has no linear bias."""
    return SharedTile([cols, 16], "bfloat16", name="bias").tile if problem.bias_is_linear else None


@T.macro
def fill_bias_columns(w, columns, consumers):
    """Fill the right factor of LinearBias; all consumer warpgroups call this before they multiply, the first one writes."""
    if columns is not None:
        if w == 0:
            for i, j in T.Parallel(columns.shape[0], 16):
                columns[i, j] = T.if_then_else(j < 4, 1.0, T.if_then_else(j < 8, T.cast(i, "float32"), 0.0))
            T.fence_proxy_async()
        sync_consumers(consumers)


@T.meta_class
class Scores:
    """Raw scores Q Kᵀ to scores before the softmax, and the factor that turns them into exponents of base 2.

    softcap: s -> c tanh(s scale / c). alibi: minus slope * |query + seqlen_k - seqlen_q - key|.
    """

    def __init__(
        self,
        problem: AttnProblem,
        options: OptionArguments | None,
        softmax_scale: Any,
        rows_are_keys: bool = False,
        name: str = "scores",
    ):
        self.capped, self.causal, self.is_fp32 = problem.has("softcap"), problem.causal, problem.is_fp32
        self.options, self.softmax_scale, self.rows_are_keys = options, softmax_scale, rows_are_keys
        self.linear = LinearBias(rows_are_keys, name="linear_bias") if problem.bias_is_linear else None
        self.biased = problem.has("alibi") and self.linear is None
        self.alibi_slope = T.alloc_var("float32", init=0.0) if self.biased else None
        self.traced = None
        if problem.program is not None:
            self.traced = Traced(problem.program, options.traced, softmax_scale, rows_are_keys, name="traced")

    @property
    def raw(self) -> bool:
        """True if the softmax takes raw scores, with the scale in its exponents."""
        return not (self.capped or self.biased or self.traced is not None)

    @property
    def scale_log2(self) -> Any:
        """Exponent of base 2 per unit of a score that is not raw."""
        constant = self.biased or self.traced is not None
        return T.float32(LOG2E) if constant else self.options.softcap * LOG2E

    def not_too_small(self, raw_scale: Any) -> Any:
        """Scale of raw scores that slopes can be divided by: scores vanish before it does."""
        if self.linear is None:
            return raw_scale
        least = T.if_then_else(raw_scale < 0, -(2.0**-40), 2.0**-40)
        return T.if_then_else(T.abs(raw_scale) < 2.0**-40, least, raw_scale)

    @T.inline
    def start(self, batch, head, scale_log2):
        """Read the slope of a head."""
        if self.linear is not None:
            self.linear.start(self.options.Slopes[batch, head] * LOG2E / scale_log2)
        if self.biased:
            self.alibi_slope[0] = self.options.Slopes[batch, head]
        if self.traced is not None:
            self.traced.start(batch, head)

    @T.inline
    def begin(self, acc_s, columns):
        """Set acc_s to the linear bias, which Q Kᵀ is then added to."""
        if self.linear is not None:
            self.linear.multiply(columns, acc_s)

    def shift(self, diagonal: Any) -> Any:
        """Bias that all scores of a tile lack after begin(); None without a linear bias."""
        return None if self.linear is None else self.linear.shift(diagonal)

    @T.inline
    def transform(self, acc_s, query, blocks, step, steps):
        """Apply softcap, ALiBi, program and mask to the scores [64, block_N] of the queries from `query` on, at a step of KeyBlocks."""
        self.cap(acc_s)
        self.bias(acc_s, blocks.diagonal(query, step))
        if self.traced is not None:
            self.locate(query, blocks.first_key(step))
            self.traced.apply(acc_s)
        blocks.hide(acc_s, query, step, steps)

    @T.inline
    def cap(self, acc_s):
        """Replace scores s by tanh(s scale / c)."""
        # The unit of exponentials also computes tanh. One in four exponentials as a polynomial took longer: 632 us instead of 626 at d128,
        # 847 instead of 786 at d256 (H200, 2026-11-21)
        if self.capped:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = self.tanh(acc_s[i, j])

    def tanh(self, score: Any) -> Any:
        """tanh(s scale / c) of a score s."""
        if self.is_fp32:
            factor = T.call_extern("float32", "__fdiv_rn", self.softmax_scale, self.options.softcap)
            return T.call_extern("float32", "tl_attention_tanh", score * factor)
        return T.tanh(score * (self.softmax_scale / self.options.softcap))

    def biased_score(self, score: Any, i: Any, j: Any, diagonal: Any) -> Any:
        """Score after cap(), or a raw one, minus the bias. diagonal: column that the diagonal of the tile's first query crosses.

        Only the first 8 columns, of which a thread has 2 per row, convert an int to a float, which takes four times as long as the
        addition that makes the other columns from them.
        """
        if not self.biased:
            return score
        factor = self.options.softcap if self.capped else self.softmax_scale
        first = T.cast(diagonal + (j % 8 - i if self.rows_are_keys else i - j % 8), "float32")
        from_first = T.cast((1 if self.rows_are_keys else -1) * (j // 8 * 8), "float32")
        return score * factor - (
            # A key right of the diagonal is masked, whatever its score
            self.alibi_slope[0] * first + self.alibi_slope[0] * from_first
            if self.causal
            else self.alibi_slope[0] * T.abs(first + from_first)
        )

    @T.inline
    def bias(self, acc_s, diagonal):
        """Apply softmax_scale and subtract ALiBi, where it is not linear."""
        if self.biased:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = self.biased_score(acc_s[i, j], i, j, diagonal)

    def locate(self, query: Any, key: Any) -> None:
        """Say which query and key the first element of a tile belongs to, for a program."""
        if self.traced is not None:
            self.traced.locate(query, key)

    @T.inline
    def prepare(self, acc_s, diagonal):
        """Apply what exponent() leaves to be done before; in the backward."""
        self.cap(acc_s)
        if not self.capped:  # with a softcap the bias waits: slope() is one of scores after cap()
            self.bias(acc_s, diagonal)

    def exponent(self, score: Any, i: Any, j: Any, diagonal: Any, scale_log2: Any, lse_log2: Any) -> Any:
        """Exponent of base 2 of the probability of a score."""
        if self.traced is not None:
            return self.traced.score(score, i, j) * scale_log2 - lse_log2
        if self.linear is not None:
            lse_log2 = lse_log2 - self.linear.shift(diagonal) * scale_log2
        return (self.biased_score(score, i, j, diagonal) if self.capped else score) * scale_log2 - lse_log2

    def sloped(self, P: Any, score: Any, i: Any, j: Any) -> Any:
        """Probability times the derivative of its score: of the program, or of the cap, 1 - tanh², 0 for an infinite score."""
        if self.traced is not None:
            return self.traced.sloped(P, score, i, j)
        return P * T.call_extern("float32", "__saturatef", 1.0 - score * score)


@T.meta_class
class Dropout:
    """Dropout of a tile of 64 rows per warpgroup, in the registers of an accumulator."""

    def __init__(
        self,
        problem: AttnProblem,
        options: OptionArguments | None,
        cols: int,
        rows_are_keys: bool = False,
        name: str = "dropout",
    ):
        self.on, self.options, self.rows_are_keys = problem.has("dropout"), options, rows_are_keys
        self.template = f"<{str(rows_are_keys).lower()}, {cols}>"
        self.k0, self.k1, self.offset = (T.alloc_var("int32", init=0) if self.on else None for _ in range(3))
        self.keeps = T.alloc_local([-(-cols // 64)], "uint32") if self.on else None  # one bit per element

    @T.inline
    def start(self):
        """Read seed and offset.

        Where rows are keys, each step calls this: held in uniform registers, they make ptxas serialize all wgmma (C7515).
        """
        if self.on:
            k0, k1, offset = (
                T.call_extern("int32", "tl_attention_random_state", self.options.Rng.data, half)
                for half in range(3)
            )
            # From one lane, so that the round keys are in uniform registers
            self.k0[0] = k0 if self.rows_are_keys else T.shfl_sync(k0, 0)
            self.k1[0] = k1 if self.rows_are_keys else T.shfl_sync(k1, 0)
            self.offset[0] = offset

    @T.inline
    def draw(self, stream, query, key):
        """Draw the bits of the tile that begins at this query and key, multiples of 16. stream: batch index * heads + head."""
        if self.on:
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_draw{self.template}",
                    self.keeps.data,
                    key if self.rows_are_keys else query,
                    query if self.rows_are_keys else key,
                    stream,
                    self.offset[0],
                    self.k0[0],
                    self.k1[0],
                    self.options.drop_below,
                )
            )

    @property
    def scale(self) -> Any:
        """Factor of kept probabilities, 1 / (1 - p)."""
        return 256.0 / T.cast(T.max(256 - self.options.drop_below, 1), "float32")

    @T.inline
    def drop(self, tile):
        """Set to 0 what the last draw drops."""
        if self.on:
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_drop_{'float' if tile.dtype == 'float32' else 'half'}{self.template}",
                    tile.data,
                    self.keeps.data,
                )
            )

    @T.inline
    def scale_kept(self, acc):
        """Multiply by the factor of kept probabilities."""
        if self.on:
            rows, cols = acc.shape
            for i, j in T.Parallel(rows, cols):
                acc[i, j] *= self.scale
