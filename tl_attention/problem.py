"""What is asked (AttnProblem) and how it is computed (FwdConfig). A kernel is compiled once per pair of them."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16")

# (of Q and K, of V and O), least work first. A problem runs at the first width that holds it: TMA fills the other
# columns of a tile with zeros on its way in and drops them on its way out.
TILE_WIDTHS = (
    (64, 64),
    (96, 64),
    (96, 96),
    (128, 64),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 128),
    (256, 256),
)
MAX_HEAD_DIM = TILE_WIDTHS[-1][0]

# The last seqlen_k of each length bucket but the last, which has no end.
BUCKET_ENDS = (1024, 4096)
BUCKETS = ("1k", "4k", "long")


@dataclass(frozen=True)
class AttnProblem:
    """The static part of a call. Batch, heads, lengths, strides and scale are runtime arguments of the kernel.

    head_dim (of Q and K) and head_dim_v (of V and O) are tile widths: one of TILE_WIDTHS, at least the tensors' own.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool

    @classmethod
    def of(cls, dtype: str, head_dim: int, head_dim_v: int, causal: bool) -> AttnProblem:
        """The problem that serves tensors of these head dims."""
        return cls(dtype, *tile_width(head_dim, head_dim_v), causal)

    def __str__(self) -> str:
        """The words of a tuning key: bf16 d128 causal, fp16 d192-128 full."""
        dtype = {"bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        dim_v = f"-{self.head_dim_v}" * (self.head_dim_v != self.head_dim)
        return f"{dtype} d{self.head_dim}{dim_v} {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class FwdConfig:
    """How a forward kernel cuts and orders its work."""

    block_M: int  # queries a tile; 64 a consumer warpgroup
    block_N: int  # keys a step
    num_stages: int = 2  # depth of the K ring and of the V ring
    ping_pong: bool = False  # warpgroups take turns at the tensor cores
    schedule: str = "grid"  # which CTA computes which tile: see SCHEDULES
    q_stages: int = 1  # depth of the Q ring; 2 loads the queries of the next tile early, if there is one

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one more holds the producer warp."""
        return self.block_M // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def __str__(self) -> str:
        extras = f" q{self.q_stages}" * (self.q_stages > 1) + " ping-pong" * self.ping_pong
        return f"{self.block_M}x{self.block_N}x{self.num_stages} {self.schedule}{extras}"


# grid: one CTA a tile, the longest first. persistent: one CTA an SM, which takes every ctas-th tile.
# dynamic: one CTA an SM, which takes the next tile nobody has.
SCHEDULES = ("grid", "persistent", "dynamic")


def tile_width(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The first of TILE_WIDTHS that holds head_dim columns of Q and K and head_dim_v of V and O."""
    return next((qk, v) for qk, v in TILE_WIDTHS if qk >= head_dim and v >= head_dim_v)


def length_bucket(seqlen_k: int) -> str:
    """Which row of the tuned table serves a key length: one of BUCKETS."""
    return BUCKETS[sum(seqlen_k > end for end in BUCKET_ENDS)]


def tuning_key(problem: AttnProblem, bucket: str) -> str:
    """bf16 d128 causal 4k"""
    return f"{problem} {bucket}"
