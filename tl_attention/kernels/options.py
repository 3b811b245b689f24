"""What kernels do beside plain attention. A kernel holds code for the options its problem names; their values come with a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.pipeline import SharedTile, sync_consumers
from tl_attention.kernels.roles import Roles
from tl_attention.kernels.softmax import LOG2E
from tl_attention.problem import AttnProblem

# Dropout by Philox-4x32 with 7 rounds (Salmon et al. 2011); reference.dropout_keep says which bits of it decide on which element.
# A lane holds rows r, r + 8 (r = lane / 4) and in every 8 columns 2t, 2t + 1 (t = lane % 4) of the 16 rows of its warp, where rows are
# queries as where they are keys. Two calls decide on 32 elements of a block of 16 x 16, of which 4 lanes hold 8 each: of 4 blocks
# beside each other, each of the 4 draws for one, and two exchanges give each lane its 8 bits of all
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
// Byte i of the result is byte s & 7 of the 8 of high:low, s the i-th hex digit of the selector; if s & 8, its sign bit 8 times
static __device__ __forceinline__ unsigned tl_attention_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}
// 32 bits of rng_state. Volatile, as is the lane, so that a backward by keys spends no registers from step to step on what follows
// from them
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
// keeps[g]: a bit, 1 to keep, for each of the 32 elements a lane holds of columns 64 g .. 64 g + 63 of a tile of 64 rows
template <bool rows_are_keys, int cols>
static __device__ __forceinline__ void tl_attention_draw(
    unsigned* keeps, int row, int col, int head, int offset, int k0, int k1, int drop_below) {
  unsigned lane = rows_are_keys ? tl_attention_lane() : threadIdx.x % 32, r = lane / 4, t = lane % 4;
  unsigned row_block = row / 16 + threadIdx.x / 32 % 4, one_of_4 = rows_are_keys ? r % 4 : t % 2 * 2 + r % 2;
  // The exchange of halves and that of bytes, or where rows are keys of nibbles; a lane keeps one and takes the other at its place
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
    // A number of which words[i] has bit i, for 32 at once: whether it is drop_below at least
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
// All ones for an element that stays, of the n-th two that a lane holds beside each other: 16 bits for each, or 32 for one of them
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


@dataclass(frozen=True)
class Options:
    """Arguments of a kernel that has options; those of options it has not are of no meaning."""

    left: Any  # keys before a query's place that it sees
    right: Any  # after it
    softcap: Any
    Slopes: Any  # [batch, heads] fp32
    Sink: Any  # [heads] fp32
    Rng: Any  # int64 [2]: seed, offset
    drop_below: Any  # of 256: a byte below it drops
    Table: Any  # scheduler.TileOrder

    @property
    def window(self) -> tuple[Any, Any]:
        return self.left, self.right


def option_views() -> tuple[Any, Any, Any, Any]:
    """Of Slopes, Sink, Rng and Table as arguments; of what an option needs that is off, any tensor of the rank."""
    sizes = T.dynamic("slopes_batch, slopes_heads, sink_heads, rng_numbers, table_entries")
    slopes_batch, slopes_heads, sink_heads, rng_numbers, table_entries = sizes
    slopes = T.StridedTensor([slopes_batch, slopes_heads], [T.dynamic("slopes_stride"), 1], "float32")
    return (
        slopes,
        T.Tensor([sink_heads], "float32"),
        T.Tensor([rng_numbers], "int64"),
        T.Tensor([table_entries, 8], "int32"),
    )


def prelude(problem: AttnProblem, roles: Roles) -> str | None:
    """CUDA that a kernel needs beside its own; None for nothing."""
    philox = PHILOX if problem.has("dropout") else ""
    return (roles.prelude or "") + philox or None


@T.meta_class
class LinearBias:
    """ALiBi where it is linear, slope * (key - place of the query), as a product that Q K^T is added to, in the units of raw scores.

    Of a tile [rows, cols] with the bias s * (c - r), or where rows are keys s * (r - c), it is [r s, s] times [1, c]' with r, c < 256,
    which bf16 holds exactly, as it does the three parts that r s and s are split into; shift() is what the place of the tile adds.
    An element takes no instruction of its own, but the tile a GEMM of 16 columns: B4 16 heads 4k d128 1.08 of the time of plain attention
    where two FFMA an element took 1.21 (H200, 2026-11-21).
    """

    def __init__(self, rows_are_keys: bool, name: str = "linear_bias"):
        self.sign = -1.0 if rows_are_keys else 1.0  # of c
        self.slope = T.alloc_var("float32", init=0.0)
        self.rows = T.alloc_fragment([64, 16], "bfloat16")

    @T.inline
    def start(self, slope):
        """slope: of raw scores."""
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

    def shift(self, ahead: Any) -> Any:
        """What the bias of all elements is beside that; ahead: from the first key to the place of the first query."""
        return -self.slope[0] * T.cast(ahead, "float32")


def alloc_bias_columns(problem: AttnProblem, cols: int) -> Any:
    """Shared memory for the columns of LinearBias, if that serves."""
    return SharedTile([cols, 16], "bfloat16", name="bias").tile if problem.bias_is_linear else None


@T.macro
def fill_bias_columns(w, columns, consumers):
    """By the first of all consumer warpgroups, which call this before they multiply."""
    if columns is not None:
        if w == 0:
            for i, j in T.Parallel(columns.shape[0], 16):
                columns[i, j] = T.if_then_else(j < 4, 1.0, T.if_then_else(j < 8, T.cast(i, "float32"), 0.0))
            T.fence_proxy_async()
        sync_consumers(consumers)


@T.meta_class
class Scores:
    """What raw scores Q K^T become before they are masked, and the factor that makes exponents in base 2 of them.

    softcap: c tanh(s scale / c). alibi: less slope * |query + seqlen_k - seqlen_q - key|.
    """

    def __init__(
        self,
        problem: AttnProblem,
        options: Options | None,
        softmax_scale: Any,
        rows_are_keys: bool = False,
        name: str = "scores",
    ):
        self.capped, self.causal = problem.has("softcap"), problem.causal
        self.options, self.softmax_scale, self.rows_are_keys = options, softmax_scale, rows_are_keys
        self.linear = LinearBias(rows_are_keys, name="linear_bias") if problem.bias_is_linear else None
        self.biased = problem.has("alibi") and self.linear is None
        self.alibi_slope = T.alloc_var("float32", init=0.0) if self.biased else None

    @property
    def raw(self) -> bool:
        """Whether the softmax takes them as they are, and the scale with its exponents."""
        return not (self.capped or self.biased)

    @property
    def scale_log2(self) -> Any:
        """Of what cap() and bias() leave, where they do something."""
        return T.float32(LOG2E) if self.biased else self.options.softcap * LOG2E

    def not_too_small(self, raw_scale: Any) -> Any:
        """A scale of raw scores that slopes can be divided by: scores vanish before it does."""
        if self.linear is None:
            return raw_scale
        least = T.if_then_else(raw_scale < 0, -(2.0**-40), 2.0**-40)
        return T.if_then_else(T.abs(raw_scale) < 2.0**-40, least, raw_scale)

    @T.inline
    def start(self, batch, head, scale_log2):
        if self.linear is not None:
            self.linear.start(self.options.Slopes[batch, head] * LOG2E / scale_log2)
        if self.biased:
            self.alibi_slope[0] = self.options.Slopes[batch, head]

    @T.inline
    def begin(self, acc_s, columns):
        """What Q K^T is added to, where there is a linear bias."""
        if self.linear is not None:
            self.linear.multiply(columns, acc_s)

    def shift(self, ahead: Any) -> Any:
        """What scores that Q K^T was added to so still lack, all of a tile the same; else None."""
        return None if self.linear is None else self.linear.shift(ahead)

    @T.inline
    def cap(self, acc_s):
        """s to tanh(s scale / c)"""
        # By the unit that exponentials take, too, but one in four of those as a polynomial took longer: 632 us for 626 at d128, 847 for
        # 786 at d256 (H200, 2026-11-21)
        if self.capped:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = T.tanh(acc_s[i, j] * (self.softmax_scale / self.options.softcap))

    def biased_score(self, score: Any, i: Any, j: Any, ahead: Any) -> Any:
        """What cap() left, or a raw score, less the bias; ahead: from the first key to the place of the first query.

        An int is made a float for the first 8 columns alone, of which a thread has 2 a row: it is a quarter as fast as what makes the
        others from them.
        """
        if not self.biased:
            return score
        factor = self.options.softcap if self.capped else self.softmax_scale
        first = T.cast(ahead + (j % 8 - i if self.rows_are_keys else i - j % 8), "float32")
        from_first = T.cast((1 if self.rows_are_keys else -1) * (j // 8 * 8), "float32")
        return score * factor - (
            # A key past the place of its query is masked, whatever its score
            self.alibi_slope[0] * first + self.alibi_slope[0] * from_first
            if self.causal
            else self.alibi_slope[0] * T.abs(first + from_first)
        )

    @T.inline
    def bias(self, acc_s, ahead):
        if self.biased:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = self.biased_score(acc_s[i, j], i, j, ahead)

    @T.inline
    def prepare(self, acc_s, ahead):
        """For exponent()."""
        self.cap(acc_s)
        if not self.capped:  # else that waits, as slope() is of what cap() left
            self.bias(acc_s, ahead)

    def exponent(self, score: Any, i: Any, j: Any, ahead: Any, scale_log2: Any, lse_log2: Any) -> Any:
        """In base 2, of the probability of a score."""
        if self.linear is not None:
            lse_log2 = lse_log2 - self.linear.shift(ahead) * scale_log2
        return (self.biased_score(score, i, j, ahead) if self.capped else score) * scale_log2 - lse_log2

    def slope(self, score: Any) -> Any:
        """Of the cap: 1 - tanh^2, and 0 where a mask has made that infinite."""
        return T.call_extern("float32", "__saturatef", 1.0 - score * score)


@T.meta_class
class Dropout:
    """Which probabilities of a tile of 64 rows a warpgroup stay, in the registers of an accumulator."""

    def __init__(
        self,
        problem: AttnProblem,
        options: Options | None,
        cols: int,
        rows_are_keys: bool = False,
        name: str = "dropout",
    ):
        self.on, self.options, self.rows_are_keys = problem.has("dropout"), options, rows_are_keys
        self.of = f"<{str(rows_are_keys).lower()}, {cols}>"
        self.k0, self.k1, self.offset = (T.alloc_var("int32", init=0) if self.on else None for _ in range(3))
        self.keeps = T.alloc_local([-(-cols // 64)], "uint32") if self.on else None  # a bit an element

    @T.inline
    def start(self):
        """Where rows are keys, at each step: kept in uniform registers, ptxas serializes all wgmma there (C7515)."""
        if self.on:
            k0, k1, offset = (
                T.call_extern("int32", "tl_attention_random_state", self.options.Rng.data, half)
                for half in range(3)
            )
            # From one lane, so that the keys of the rounds are in uniform registers
            self.k0[0] = k0 if self.rows_are_keys else T.shfl_sync(k0, 0)
            self.k1[0] = k1 if self.rows_are_keys else T.shfl_sync(k1, 0)
            self.offset[0] = offset

    @T.inline
    def draw(self, stream, query, key):
        """For the tile that begins at a query and a key that are multiples of 16; stream: the number of the head in the batch."""
        if self.on:
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_draw{self.of}",
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
        """Of what is kept."""
        return 256.0 / T.cast(T.max(256 - self.options.drop_below, 1), "float32")

    @T.inline
    def drop(self, tile):
        """What the last draw drops becomes 0."""
        if self.on:
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_drop_{'float' if tile.dtype == 'float32' else 'half'}{self.of}",
                    tile.data,
                    self.keeps.data,
                )
            )

    @T.inline
    def scale_kept(self, acc):
        if self.on:
            rows, cols = acc.shape
            for i, j in T.Parallel(rows, cols):
                acc[i, j] *= self.scale
