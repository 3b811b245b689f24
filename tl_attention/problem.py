"""What is asked (AttnProblem) and how it is computed (FwdConfig, BwdConfig).

A kernel is compiled once per pair of a problem and a KernelConfig: a forward is one of these, a backward is several.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

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
# Those of the backward, which has more kernels to a problem.
BWD_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

# The last seqlen_k of each length bucket but the last, which has no end.
BUCKET_ENDS = (1024, 4096)
BUCKETS = ("1k", "4k", "long")
# Beside them, in the forward: problems with so few tiles that the keys of each are divided among CTAs (dispatch.key_splits)
SPLIT_BUCKET = "split"
MAX_SPLITS = 128  # CTAs a tile


# What a kernel may do beside plain attention, in this order. Only that it does is compiled; how wide a window is, say, is not.
#   window   a query sees so many keys before and after its own place
#   softcap  scores end at a cap
#   alibi    scores fall with the distance of query and key
#   sink     each head has a score that takes a share of the softmax and has no value
#   dropout  some probabilities become 0
#   varlen   sequences of any lengths, packed one after the other
TABLE_ROWS = 128  # queries or keys of a tile of varlen, and what a sequence's rows are padded to a multiple of, in fp32
FAR = 2**30  # more than any length: see kernels.tiles.packed
OPTIONS = ("window", "softcap", "alibi", "sink", "dropout", "varlen")


@dataclass(frozen=True)
class AttnProblem:
    """The static part of a call. Batch, heads, lengths, strides and scale are runtime arguments of the kernel.

    head_dim (of Q and K) and head_dim_v (of V and O) are tile widths: one of TILE_WIDTHS, at least the tensors' own.
    options: some of OPTIONS, in their order; a window is never causal, as its right end says that.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    options: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        dtype: str,
        head_dim: int,
        head_dim_v: int,
        causal: bool,
        direction: str = "fwd",
        options: tuple[str, ...] = (),
    ) -> AttnProblem:
        """The problem that serves tensors of these head dims in one of DIRECTIONS."""
        return cls(dtype, *tile_width(head_dim, head_dim_v, direction), causal, options)

    def of_width(self, width: int) -> AttnProblem:
        """The one problem that kernels are compiled for which know nothing but the dtype, one width and where rows lie."""
        return AttnProblem(self.dtype, width, width, False, ("varlen",) if self.has("varlen") else ())

    def has(self, option: str) -> bool:
        return option in self.options

    @property
    def bias_is_linear(self) -> bool:
        """Whether ALiBi is linear in the key: a causal mask hides those past the place of their query."""
        return self.has("alibi") and self.causal and not self.has("softcap")

    @property
    def plain(self) -> AttnProblem:
        """The same without options, whose tuned rows and defaults serve: a window is about as causal."""
        return AttnProblem(self.dtype, self.head_dim, self.head_dim_v, self.causal or self.has("window"))

    def __str__(self) -> str:
        """The words of a tuning key: bf16 d128 causal, fp16 d192-128 full, bf16 d64 full window sink."""
        dtype = {"bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        dim_v = f"-{self.head_dim_v}" * (self.head_dim_v != self.head_dim)
        return " ".join(
            (f"{dtype} d{self.head_dim}{dim_v}", "causal" if self.causal else "full", *self.options)
        )


REGISTER_LEVEL = 5  # of ptxas, unless told


@dataclass(frozen=True)
class FwdConfig:
    """How a forward kernel cuts and orders its work."""

    block_M: int  # queries a tile; 64 a consumer warpgroup
    block_N: int  # keys a step
    num_stages: int = 2  # depth of the K ring and of the V ring
    ping_pong: bool = False  # warpgroups take turns at the tensor cores
    schedule: str = "grid"  # which CTA computes which tile: see SCHEDULES
    q_stages: int = 1  # depth of the Q ring; 2 loads the queries of the next tile early, if there is one
    split: bool = (
        False  # several CTAs a tile, each with some of its keys; FwdCombine makes one output of theirs
    )
    # The maximum of a row stays what it is when the mask has passed; a tile whose sums then grow too large is walked again, with
    # the maximum followed. Not in fp16, whose numbers end at 2^16
    hold_max: bool = False

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one more holds the producer warp."""
        return self.block_M // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def __str__(self) -> str:
        extras = f" q{self.q_stages}" * (self.q_stages > 1) + " ping-pong" * self.ping_pong
        extras += " split" * self.split + " hold-max" * self.hold_max
        return f"{self.block_M}x{self.block_N}x{self.num_stages} {self.schedule}{extras}"

    @property
    def following(self) -> FwdConfig:
        """What serves where no maximum can be held: then ping-pong pays with three warpgroups alone."""
        ping_pong = self.ping_pong and self.warpgroups > 2
        return replace(self, hold_max=False, ping_pong=ping_pong) if self.hold_max else self

    def kernels(self, problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
        """What is compiled for it."""
        # To it, the rows of packed sequences are those of a batch of one
        after = [(problem.plain.of_width(problem.head_dim_v), FwdCombine())] if self.split else []
        return [(problem, self), *after, *plan_kernels(problem)]


@dataclass(frozen=True)
class FwdCombine:
    """The kernel after a split forward: one output and log-sum-exp of those that the CTAs of a tile made."""

    rows: int = 4  # queries a CTA
    threads: int = 128

    def __str__(self) -> str:
        return f"combine {self.rows}"


# grid: one CTA a tile, the longest first. persistent: one CTA an SM, which takes every ctas-th tile.
# dynamic: one CTA an SM, which takes the next tile nobody has.
SCHEDULES = ("grid", "persistent", "dynamic")


# What a pass of the backward makes. "dq" alone: a CTA owns queries and walks the keys. The others: it owns keys and
# walks the queries; where dq is among them it adds its share to sums in fp32, in whatever order CTAs come to it.
GRADS = ("dq+dk+dv", "dk+dv", "dk", "dv", "dq")


@dataclass(frozen=True)
class BwdPass:
    """How one kernel of a backward cuts its work."""

    grads: str  # one of GRADS
    block_M: int  # queries: of a step, or in "dq" of a CTA, 64 a consumer warpgroup
    block_N: int  # keys: of a CTA, 64 a consumer warpgroup, or in "dq" of a step
    num_stages: int = 2  # depth of the Q ring, in "dq" of the K ring
    num_stages_do: int = 2  # depth of the dO ring, in "dq" of the V ring
    lean: bool = False  # dP in the registers of S, and dS in those of P, 16 bits by then; not for "dq"
    register_level: int = REGISTER_LEVEL  # how freely ptxas takes registers for speed, 0 to 10

    @property
    def makes(self) -> tuple[str, ...]:
        return tuple(self.grads.split("+"))

    @property
    def adds_dq(self) -> bool:
        """Whether it adds to sums of dq in an order that is not fixed."""
        return "dq" in self.makes and self.grads != "dq"

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one more holds the warps that load, and store dq."""
        return (self.block_M if self.grads == "dq" else self.block_N) // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def __str__(self) -> str:
        tile = f"{self.block_M}x{self.block_N}x{self.num_stages}x{self.num_stages_do}"
        level = f" r{self.register_level}" * (self.register_level != REGISTER_LEVEL)
        return f"{self.grads} {tile}" + " lean" * self.lean + level


@dataclass(frozen=True)
class BwdDelta:
    """The kernel before the passes: rowsum(dO * O), and the log-sum-exp in base 2."""

    rows: int = 64  # queries a CTA
    threads: int = 128

    def __str__(self) -> str:
        return f"delta {self.rows}"


@dataclass(frozen=True)
class BwdSum:
    """The kernel after the passes: sums in fp32 to a gradient in the dtype of the inputs."""

    rows: int = 16  # of the gradient, a CTA
    threads: int = 128

    def __str__(self) -> str:
        return f"sum {self.rows}"


@dataclass(frozen=True)
class VarlenPlan:
    """The kernel before those with varlen: where the tiles of sequences lie."""

    threads: int = 1024

    def __str__(self) -> str:
        return f"plan {self.threads}"


# Those of decoding; the last is of multi-head latent attention with absorbed weights, whose values are the first columns of its keys
DECODE_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512))


# Keys that a kernel takes to be together in a cache: of caches without pages, and of those whose pages are multiples of so many
PAGE_ROWS = (0, 16, 64)
DECODE_OPTIONS = ("window", "softcap", "alibi", "sink")


@dataclass(frozen=True)
class DecodeConfig:
    """How a few queries attend to a cache. A tile has the queries of all heads that share a key head."""

    warpgroups: int = 1  # of 64 rows of the tile each, or all of the same 64
    block_N: int = 64  # keys a step
    num_stages: int = 3  # depth of the K ring and of the V ring
    page_rows: int = 0  # one of PAGE_ROWS
    ctas_a_sm: int = 2
    v_in_k: bool = False  # V is the first columns of K: it is not loaded, and warpgroups divide its columns

    @property
    def divides_columns(self) -> bool:
        return self.v_in_k

    @property
    def block_M(self) -> int:
        return 64 if self.divides_columns else 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """With two consumer warpgroups the producer has one of its own, whose registers they take."""
        return 128 * self.warpgroups + (32 if self.warpgroups == 1 else 128)

    def columns(self, problem: AttnProblem) -> int:
        """Of O that a warpgroup computes."""
        return problem.head_dim_v // (self.warpgroups if self.divides_columns else 1)

    def combine(self, problem: AttnProblem) -> tuple[AttnProblem, DecodeCombine]:
        """What merges the parts."""
        columns = self.columns(problem)
        options = ("sink",) if problem.has("sink") else ()
        return AttnProblem(problem.dtype, columns, columns, False, options), DecodeCombine(
            self.divides_columns
        )

    def kernels(self, problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
        return [(problem, self), self.combine(problem)]

    def first_column(self, problem: AttnProblem, warpgroup: int) -> int:
        return self.columns(problem) * warpgroup if self.divides_columns else 0

    def __str__(self) -> str:
        extras = f" pages {self.page_rows}" * (self.page_rows > 0) + " v-in-k" * self.v_in_k
        return f"decode {self.warpgroups}x{self.block_N}x{self.num_stages}x{self.ctas_a_sm}{extras}"


# Of an item of a decode whose parts DecodeCombine merges
MERGE_FIELDS = ("b", "kv_head", "m_block", "parts", "first_slot")
MERGE_NUMBERS = 8  # that there is room for


@dataclass(frozen=True)
class DecodeCombine:
    """The kernel after a decode: one output and log-sum-exp of those that several CTAs made of an item."""

    divides_columns: bool = False  # as DecodeConfig has it
    rows: int = 4  # of queries a CTA
    at_once: int = 8  # parts that are on their way together
    threads: int = 128

    def __str__(self) -> str:
        return f"decode combine {self.rows}" + " columns" * self.divides_columns


@dataclass(frozen=True)
class AppendConfig:
    """The kernel before a decode: new keys and values to the cache, rotated, as are the queries."""

    threads: int = 256

    def __str__(self) -> str:
        return f"append {self.threads}"


KernelConfig = (
    FwdConfig
    | FwdCombine
    | BwdPass
    | BwdDelta
    | BwdSum
    | VarlenPlan
    | DecodeConfig
    | DecodeCombine
    | AppendConfig
)


def register_level(config: KernelConfig) -> int:
    """How freely ptxas takes registers for speed in this kernel, 0 to 10."""
    return config.register_level if isinstance(config, BwdPass) else REGISTER_LEVEL


@dataclass(frozen=True)
class BwdConfig:
    """How a backward is computed: the passes that make dq, dk and dv, each once."""

    passes: tuple[BwdPass, ...]

    @classmethod
    def of(cls, passes: Iterable[dict[str, object]]) -> BwdConfig:
        """From the fields of each pass, as tables hold them."""
        return cls(tuple(BwdPass(**fields) for fields in passes))

    @property
    def deterministic(self) -> bool:
        return not any(one.adds_dq for one in self.passes)

    def kernels(self, problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
        """What is compiled for it: the passes, and what comes before and after them."""
        return [
            *((problem, one) for one in self.passes),
            (problem.of_width(delta_width(problem.head_dim_v)), BwdDelta()),
            *(
                (problem.of_width(width), BwdSum())
                for width in sorted({problem.head_dim, problem.head_dim_v})
            ),
            *plan_kernels(problem),
        ]

    def __str__(self) -> str:
        return ", ".join(map(str, self.passes))


def decode_problem(dtype: str, head_dim: int, head_dim_v: int, options: Iterable[str] = ()) -> AttnProblem:
    """What serves a decode. A window is always on, as its bounds are values of a launch and causal is one of them."""
    names = tuple(name for name in DECODE_OPTIONS if name in ("window", *options))
    return AttnProblem(dtype, *decode_width(head_dim, head_dim_v), False, names)


def page_rows(page_size: int) -> int:
    """That of PAGE_ROWS which pages of so many keys have."""
    return max(rows for rows in PAGE_ROWS[1:] if page_size % rows == 0)


def append_kernel(dtype: str) -> tuple[AttnProblem, AppendConfig]:
    """One for all widths."""
    return AttnProblem(dtype, 64, 64, False), AppendConfig()


def plan_kernels(problem: AttnProblem) -> list[tuple[AttnProblem, KernelConfig]]:
    """What goes before the kernels of a problem: one for all that have varlen."""
    return [(AttnProblem(DTYPES[0], 64, 64, False, ("varlen",)), VarlenPlan())] * problem.has("varlen")


Config = FwdConfig | BwdConfig
# bwd_det: a backward whose gradients are equal bit by bit from run to run
DIRECTIONS = ("fwd", "bwd", "bwd_det")
DECODE = "decode"  # beside them, attention of a few queries to a cache: what serves it is not tuned


def tile_width(head_dim: int, head_dim_v: int, direction: str = "fwd") -> tuple[int, int]:
    """The first of TILE_WIDTHS that holds head_dim columns of Q and K and head_dim_v of V and O."""
    widths = TILE_WIDTHS if direction == "fwd" else BWD_TILE_WIDTHS
    return next((qk, v) for qk, v in widths if qk >= head_dim and v >= head_dim_v)


def decode_width(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The first of DECODE_TILE_WIDTHS that holds so many columns."""
    return next((qk, v) for qk, v in DECODE_TILE_WIDTHS if qk >= head_dim and v >= head_dim_v)


def delta_width(head_dim_v: int) -> int:
    """The tile width of BwdDelta: TileLang 0.1.15 finds no layout for the row sums of 96 columns."""
    return 1 << (head_dim_v - 1).bit_length()


def buckets(direction: str) -> tuple[str, ...]:
    """The rows of the tuned table that a problem has in one of DIRECTIONS."""
    return (*BUCKETS, SPLIT_BUCKET) if direction == "fwd" else BUCKETS


def length_bucket(seqlen_k: int) -> str:
    """Which row of the tuned table serves a key length: one of BUCKETS."""
    return BUCKETS[sum(seqlen_k > end for end in BUCKET_ENDS)]


def tuning_key(problem: AttnProblem, bucket: str) -> str:
    """bf16 d128 causal 4k"""
    return f"{problem} {bucket}"
