"""AttnProblem, the static part of a call, and the tables that sort calls into problems: dtypes, tile widths, length buckets.

A kernel is compiled once per pair of a problem and a kernel config (kernel_configs.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tl_attention.program import Program


@dataclass(frozen=True)
class DType:
    """An element type of inputs and outputs; for fp32 with the precision of its products."""

    name: str  # as in torch and in TileLang; fp32: float32 and the precision
    short: str  # in a tuning key
    bytes: int  # per element of a Q, K or V tile, all parts of it
    # fp32: an element is the sum of so many bf16 numbers, which the tensor cores multiply; 0 for elements that they take as they are
    parts: int = 0


# Precisions of fp32, as torch.set_float32_matmul_precision names them -> parts per element. One part is bf16: its kernels serve medium
PRECISIONS = {"highest": 3, "high": 2, "medium": 1}
# Products (part of the left factor, part of the right one) by the number of parts: those above the rounding error of the result, the
# smallest first, so that they are added before the sum is large
PRODUCTS = {
    1: ((0, 0),),
    2: ((1, 0), (0, 1), (0, 0)),
    3: ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)),
}
HALF_DTYPES = {dtype.name: dtype for dtype in (DType("bfloat16", "bf16", 2), DType("float16", "fp16", 2))}
FP32_DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType(f"float32-{word}", f"fp32-{word}", 2 * n, n) for word, n in PRECISIONS.items() if n > 1
    )
}
DTYPES = HALF_DTYPES | FP32_DTYPES
# The first dtype: tuned by default, and the one of kernels that serve every dtype
DEFAULT_DTYPE = next(iter(DTYPES))
# Operands of kernels, see AttnProblem.dtype_of
OPERANDS = ("q", "k", "v", "o", "p", "do", "ds", "dq", "dk", "dv")
FP32_OPERANDS = ("o", "dq", "dk", "dv")  # those that fp32 kernels have in fp32

# (head_dim, head_dim_v) of the forward kernels, least work first. A problem runs at the first width that holds it: TMA fills
# the missing columns of a tile with zeros on load and drops them on store.
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
# Widths of fp32. 64 rows of three parts of two tensors of 256 columns fill shared memory: the backward of three parts ends before
FP32_TILE_WIDTHS = ((64, 64), (128, 128), (256, 256))
FP32_BWD_WIDTHS = {3: FP32_TILE_WIDTHS[:2], 2: FP32_TILE_WIDTHS}  # by the number of parts
# Widths of the backward, which compiles more kernels per problem
BWD_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# Widths of decode. The last is multi-head latent attention with absorbed weights: V is the first columns of K.
DECODE_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512))
# Widths of the forward with its derivative along a direction, whose consumers hold two outputs in registers
JVP_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128))
MAX_JVP_HEAD_DIM = JVP_TILE_WIDTHS[-1][0]

# The last seqlen_k of each length bucket; the last bucket is open-ended
BUCKET_ENDS = (1024, 4096)
BUCKETS = ("1k", "4k", "long")
# A further bucket of the forward: problems with so few tiles that several CTAs split the keys of a tile
SPLIT_BUCKET = "split"
# Another: at most SHORT_ROWS queries and keys, which leave most of a tile of 128 or 192 queries empty. Without a row that of 1k serves
SHORT_BUCKET, SHORT_ROWS = "short", 64
MAX_SPLITS = 128  # CTAs per tile

TABLE_ROWS = 128  # queries or keys per tile of packed sequences, and the padding unit of their fp32 rows
FAR = 2**30  # rows; larger than any length, see kernels.tiles.packed

# Variants of plain attention, in this order. A kernel knows only whether an option is on; its value is a runtime argument.
#   window   a query sees only keys near its diagonal
#   softcap  softcap * tanh(score / softcap)
#   alibi    score - slope * |distance|
#   sink     one extra logit per head in the softmax denominator
#   dropout  random probabilities become 0
#   varlen   packed sequences of different lengths
OPTIONS = ("window", "softcap", "alibi", "sink", "dropout", "varlen")
# Variants of calls on parts of a sequence, after the options and served by the configs of a problem without them
#   placed   the first query and the first key have positions of their own; always with window, never with varlen
#   added    the forward merges its result with that of other keys, which is in memory in fp32
PART_OPTIONS = ("placed", "added")
DECODE_OPTIONS = ("window", "softcap", "alibi", "sink")

# bwd_det: a backward whose gradients are equal bit by bit from run to run
DIRECTIONS = ("fwd", "bwd", "bwd_det")
DECODE = "decode"  # a further pass, a few queries against a cache; not tuned
JVP = "jvp"  # a further pass, the forward with its derivative along a direction; not tuned


@dataclass(frozen=True)
class AttnProblem:
    """The static part of a call. Batch, heads, lengths, strides and scale are runtime arguments of the kernel.

    head_dim (of Q and K) and head_dim_v (of V and O) are tile widths: one of TILE_WIDTHS, at least the tensors' own.
    options: a subset of OPTIONS and PART_OPTIONS, in their order. A windowed problem is never causal: the right end of the window says it.
    program: score_mod and mask_mod; neither causal nor options then.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    options: tuple[str, ...] = ()
    program: Program | None = None

    @classmethod
    def of(
        cls,
        dtype: str,
        head_dim: int,
        head_dim_v: int,
        causal: bool,
        direction: str = "fwd",
        options: tuple[str, ...] = (),
        program: Program | None = None,
    ) -> AttnProblem:
        """The problem that serves tensors of these head dims in one of DIRECTIONS, or JVP."""
        return cls(dtype, *tile_width(head_dim, head_dim_v, direction, dtype), causal, options, program)

    def helper_problem(self, width: int) -> AttnProblem:
        """Key of helper kernels (delta, sum, combine), which depend only on dtype, one width and packing; fp32: on no precision."""
        dtype = next(iter(FP32_DTYPES)) if self.is_fp32 else self.dtype
        return AttnProblem(dtype, width, width, False, ("varlen",) if self.has("varlen") else ())

    def has(self, option: str) -> bool:
        return option in self.options

    @property
    def is_fp32(self) -> bool:
        """True for fp32, whose Q, K and V the kernels get as bf16 parts, side by side in the columns of a tensor."""
        return self.dtype in FP32_DTYPES

    @property
    def parts(self) -> int:
        """Parts per element of Q, K, V and P."""
        return max(DTYPES[self.dtype].parts, 1)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The products of parts that make one product of tiles: (part of the left tile, part of the right one)."""
        return PRODUCTS[self.parts]

    @property
    def element_bytes(self) -> int:
        """Bytes per element of Q, K and V in shared memory."""
        return DTYPES[self.dtype].bytes

    @property
    def output_bytes(self) -> int:
        """Bytes per element of O and of the gradients."""
        return 4 if self.is_fp32 else self.element_bytes

    def dtype_of(self, operand: str) -> str:
        """Dtype of one of OPERANDS: that of the inputs; for fp32 bf16 where the tensor cores multiply."""
        assert operand in OPERANDS, f"{operand=}"
        if operand == "o" and self.has("added"):
            return "float32"
        if not self.is_fp32:
            return self.dtype
        return "float32" if operand in FP32_OPERANDS else "bfloat16"

    @property
    def bias_is_linear(self) -> bool:
        """True where the ALiBi bias is linear in the key: a causal mask hides the keys past the diagonal.

        Not for fp32: products added to a bias that is larger than they are round to its last digit.
        """
        return self.has("alibi") and self.causal and not self.has("softcap") and not self.is_fp32

    @property
    def profits_from_held_max(self) -> bool:
        """True if P has the range for FwdConfig.hold_max, and its first blocks of keys tell something about the row max.

        Tiles begin at the last keys. With ALiBi and no mask the row max grows from there to the query's own key, so a held one overflows
        in most tiles, which then run twice.
        """
        grows = self.has("alibi") and not self.causal and not self.has("window")
        return self.dtype_of("p") == "bfloat16" and not grows

    @property
    def is_sloped(self) -> bool:
        """True where the gradient of a raw score is not that of the score times the scale, but times a slope, too."""
        return self.has("softcap") or (self.program is not None and self.program.slope is not None)

    @property
    def learns(self) -> bool:
        """True where captured tensors of the program get gradients."""
        return self.program is not None and bool(self.program.gradients)

    @property
    def learns_dS(self) -> bool:
        """True where the gradient of a captured tensor is dS as kernels round it, which a pass by keys can store, too."""
        return self.learns and self.program.learns_dS and self.dtype_of("ds") == "bfloat16"

    @property
    def changes_scores(self) -> bool:
        """True where a score_mod changes scores."""
        return self.program is not None and self.program.score is not None

    @property
    def fetches(self) -> bool:
        """True where tiles of captured tensors are fetched for a tile of scores."""
        return self.program is not None and bool(self.program.dense_loads)

    @property
    def stages(self) -> bool:
        """True where these tiles are prefetched to shared memory."""
        return self.fetches and self.head_dim == TILE_WIDTHS[0][0] and self.program.is_staged

    def staged_bytes(self, columns: int, rows_are_keys: bool = False) -> list[int]:
        """Shared memory of a warp for the tiles that it prefetches for 16 rows of `columns` scores."""
        if not self.stages:
            return []
        return (
            self.program.staged_bytes(columns, 16)
            if rows_are_keys
            else self.program.staged_bytes(16, columns)
        )

    @property
    def is_uneven(self) -> bool:
        """True where tiles have different numbers of steps, by a causal or a block mask."""
        return self.causal or self.is_listed

    @property
    def is_listed(self) -> bool:
        """True where a block mask lists the blocks to compute."""
        return self.program is not None and self.program.listed

    @property
    def has_bits(self) -> bool:
        """True where a bit per element stands for the mask of a program."""
        return self.program is not None and self.program.bits

    @property
    def served_as(self) -> AttnProblem:
        """The problem without PART_OPTIONS whose configs serve this one.

        A place takes registers where dropout has none to spare: such a problem gets a config for dropout and a softcap.
        """
        names = (*self.options, "softcap") if self.has("placed") and self.has("dropout") else self.options
        return replace(self, options=tuple(name for name in OPTIONS if name in names))

    @property
    def plain(self) -> AttnProblem:
        """The same problem without options, for its tuned rows and defaults. A window counts as causal."""
        return AttnProblem(self.dtype, self.head_dim, self.head_dim_v, self.causal or self.has("window"))

    @property
    def width(self) -> str:
        """d128, d192-128"""
        if self.head_dim == self.head_dim_v:
            return f"d{self.head_dim}"
        return f"d{self.head_dim}-{self.head_dim_v}"

    @property
    def tile_class(self) -> str:
        """Name of a class of problems that share tiles in the grid: d128 for bf16 and fp16, fp32-high d128."""
        return f"{DTYPES[self.dtype].short} {self.width}" if self.is_fp32 else self.width

    @property
    def mask(self) -> str:
        """causal or full"""
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        """The words of a tuning key: bf16 d128 causal, fp16 d192-128 full, bf16 d64 full window sink."""
        program = () if self.program is None else (str(self.program),)
        return " ".join((DTYPES[self.dtype].short, self.width, self.mask, *self.options, *program))


def decode_problem(dtype: str, head_dim: int, head_dim_v: int, options: Iterable[str] = ()) -> AttnProblem:
    """The problem that serves a decode. Its window is always on: the bounds are runtime values, and causal is one of them."""
    names = tuple(name for name in DECODE_OPTIONS if name in ("window", *options))
    return AttnProblem(dtype, *decode_width(head_dim, head_dim_v), False, names)


def tile_width(
    head_dim: int, head_dim_v: int, direction: str = "fwd", dtype: str = DEFAULT_DTYPE
) -> tuple[int, int]:
    """The first tile width of a direction that holds head_dim columns of Q and K and head_dim_v of V and O."""
    return next((qk, v) for qk, v in tile_widths(direction, dtype) if qk >= head_dim and v >= head_dim_v)


def tile_widths(direction: str, dtype: str = DEFAULT_DTYPE) -> tuple[tuple[int, int], ...]:
    """The (head_dim, head_dim_v) that a direction has kernels for."""
    if dtype in FP32_DTYPES:
        return FP32_TILE_WIDTHS if direction == "fwd" else FP32_BWD_WIDTHS[FP32_DTYPES[dtype].parts]
    return {"fwd": TILE_WIDTHS, JVP: JVP_TILE_WIDTHS}.get(direction, BWD_TILE_WIDTHS)


def dtypes(direction: str) -> tuple[str, ...]:
    """Names of the DTYPES that a direction, DECODE or JVP has kernels for."""
    return tuple(HALF_DTYPES if direction in (DECODE, JVP) else DTYPES)


def decode_width(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The first of DECODE_TILE_WIDTHS that holds head_dim columns of Q and K and head_dim_v of V and O."""
    return next((qk, v) for qk, v in DECODE_TILE_WIDTHS if qk >= head_dim and v >= head_dim_v)


def buckets(direction: str) -> tuple[str, ...]:
    """The buckets of a problem in one of DIRECTIONS: one tuned row each."""
    return (*BUCKETS, SPLIT_BUCKET, SHORT_BUCKET) if direction == "fwd" else BUCKETS


def length_bucket(seqlen_k: int) -> str:
    """The one of BUCKETS that holds a key length."""
    return BUCKETS[sum(seqlen_k > end for end in BUCKET_ENDS)]


def tuning_key(problem: AttnProblem, bucket: str) -> str:
    """bf16 d128 causal 4k"""
    return f"{problem} {bucket}"
