"""What kernels do beside plain attention. A kernel holds code for the options its problem names; their values come with a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.softmax import LOG2E
from tl_attention.problem import AttnProblem

# A byte of Philox-4x32 with 7 rounds (Salmon et al. 2011) decides on each probability. A call of it serves 4 queries times 4 keys,
# each 8 apart: as a thread holds 2 x 4 of them whether rows are queries or keys, forward and backward use half of each call
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
static __device__ __forceinline__ bool tl_attention_keeps(
    int rows, int row, int cols, int col, int head, int offset, int k0, int k1, unsigned drop_below) {
  int row_set = rows / 4 + row / 32 * 8 + row % 8, col_set = cols / 4 + col / 32 * 8 + col % 8;
  uint4 r = tl_attention_philox(make_uint4(row_set, col_set, head, offset), k0, k1);
  int word = row / 8 % 4, shift = 24 - col / 8 % 4 * 8;
  unsigned bytes = word == 0 ? r.x : word == 1 ? r.y : word == 2 ? r.z : r.w;
  return bytes << shift >= drop_below << 24;
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


def prelude(problem: AttnProblem) -> str | None:
    """CUDA that a kernel needs beside its own."""
    return PHILOX if problem.has("dropout") else None


@T.meta_class
class Scores:
    """What raw scores Q K^T become before they are masked, and the factor that makes exponents in base 2 of them.

    softcap: c tanh(s scale / c). alibi: less slope * |query + seqlen_k - seqlen_q - key|.
    """

    def __init__(
        self, problem: AttnProblem, options: Options | None, softmax_scale: Any, name: str = "scores"
    ):
        self.capped, self.biased, self.causal = problem.has("softcap"), problem.has("alibi"), problem.causal
        self.options, self.softmax_scale = options, softmax_scale
        self.slope = T.alloc_var("float32", init=0.0) if self.biased else None

    @property
    def raw(self) -> bool:
        return not (self.capped or self.biased)

    @property
    def scale_log2(self) -> Any:
        """Of what cap() and bias() leave, where they do something."""
        return T.float32(LOG2E) if self.biased else self.options.softcap * LOG2E

    @T.inline
    def start(self, batch, head):
        if self.biased:
            self.slope[0] = self.options.Slopes[batch, head]

    @T.inline
    def cap(self, acc_s):
        """s to tanh(s scale / c)"""
        if self.capped:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = T.tanh(acc_s[i, j] * (self.softmax_scale / self.options.softcap))

    @T.inline
    def bias(self, acc_s, ahead, rows_are_keys=False):
        """What cap() left, or raw scores, less the bias; ahead: from the first key to the place of the first query.

        An int is made a float for the first 8 columns alone, of which a thread has 2 a row: it is a quarter as fast as what makes the
        others from them.
        """
        if self.biased:
            rows, cols = acc_s.shape
            factor = self.options.softcap if self.capped else self.softmax_scale
            for i, j in T.Parallel(rows, cols):
                first = T.cast(ahead + (j % 8 - i if rows_are_keys else i - j % 8), "float32")
                from_first = T.cast((1 if rows_are_keys else -1) * (j // 8 * 8), "float32")
                acc_s[i, j] = acc_s[i, j] * factor - (
                    # A key past the place of its query is masked, whatever its score
                    self.slope[0] * first + self.slope[0] * from_first
                    if self.causal
                    else self.slope[0] * T.abs(first + from_first)
                )

    @T.inline
    def slopes_of_cap(self, acc_s, slopes):
        """Of the cap at what cap() left: 1 - tanh^2."""
        if self.capped:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                slopes[i, j] = 1.0 - acc_s[i, j] * acc_s[i, j]

    @T.inline
    def through_cap(self, P, slopes):
        """P as the gradient of scores has it, which are the caps' scores."""
        if self.capped:
            rows, cols = P.shape
            for i, j in T.Parallel(rows, cols):
                P[i, j] = P[i, j] * slopes[i, j]


@T.meta_class
class Dropout:
    """Which probabilities stay."""

    def __init__(self, problem: AttnProblem, options: Options | None, name: str = "dropout"):
        self.on, self.options = problem.has("dropout"), options
        self.k0, self.k1, self.offset, self.stream = (
            T.alloc_var("int32", init=0) if self.on else None for _ in range(4)
        )

    @T.inline
    def start(self, stream):
        """stream: the number of the head in the batch."""
        if self.on:
            self.k0[0] = T.cast(self.options.Rng[0] & 0xFFFFFFFF, "int32")
            self.k1[0] = T.cast(self.options.Rng[0] >> 32, "int32")
            self.offset[0] = T.cast(self.options.Rng[1] & 0xFFFFFFFF, "int32")
            self.stream[0] = stream

    def keeps(self, first_query: Any, query: Any, first_key: Any, key: Any) -> Any:
        """Of a query and a key of a tile that begins at multiples of 32."""
        return T.call_extern(
            "bool",
            "tl_attention_keeps",
            first_query,
            query,
            first_key,
            key,
            self.stream[0],
            self.offset[0],
            self.k0[0],
            self.k1[0],
            self.options.drop_below,
        )

    @property
    def scale(self) -> Any:
        """Of what is kept."""
        return 256.0 / T.cast(T.max(256 - self.options.drop_below, 1), "float32")

    @T.inline
    def drop(self, P, first_query, first_key, rows_are_keys=False):
        if self.on:
            rows, cols = P.shape
            for i, j in T.Parallel(rows, cols):
                query, key = (j, i) if rows_are_keys else (i, j)
                P[i, j] = T.if_then_else(self.keeps(first_query, query, first_key, key), P[i, j], 0.0)

    @T.inline
    def scale_kept(self, acc):
        if self.on:
            rows, cols = acc.shape
            for i, j in T.Parallel(rows, cols):
                acc[i, j] *= self.scale

    @T.inline
    def drop_as(self, P, acc_dp):
        """Drop what has been dropped in P; what is 0 there by itself has no gradient."""
        if self.on:
            rows, cols = P.shape
            for i, j in T.Parallel(rows, cols):
                acc_dp[i, j] = T.if_then_else(P[i, j] != 0, acc_dp[i, j], 0.0)
