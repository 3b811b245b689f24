"""AttnProblem, the static part of a call, and the tables that map calls to problems: dtypes, tile widths, length buckets.

A kernel is compiled once per pair of a problem and a kernel config (kernel_configs.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tl_attention.problem.program import Program


@dataclass(frozen=True)
class DType:
    """An element type of inputs and outputs; for fp32 together with the precision of products."""

    name: str  # as in torch and in TileLang; fp32: float32 and the precision
    short: str  # in a tuning key
    bytes: int  # per element of a Q, K or V tile, all terms of it
    # fp32: number of bf16 terms whose sum is an element, and which the tensor cores multiply; 0 for other dtypes
    terms: int = 0


# Precision of products of fp32 tensors, as named by torch.set_float32_matmul_precision
Precision = Literal["highest", "high", "medium"]
# -> terms per element. With one term the bf16 kernels serve
PRECISIONS: dict[str, int] = {"highest": 3, "high": 2, "medium": 1}
# Number of terms -> products (term of the left factor, term of the right one) that exceed the rounding error of the result, smallest
# first, so that they are added while the sum is small
PRODUCTS: dict[int, tuple[tuple[int, int], ...]] = {
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
# The first dtype: tuned by default, and used in the key of kernels that serve every dtype
DEFAULT_DTYPE = next(iter(DTYPES))
# Operands of kernels, see AttnProblem.dtype_of
OPERANDS = ("q", "k", "v", "o", "p", "do", "ds", "dq", "dk", "dv")
FP32_OPERANDS = ("o", "dq", "dk", "dv")  # operands that are fp32 in fp32 kernels

# Tile widths (head_dim, head_dim_v) of the forward kernels, least work first. A problem runs at the first width that is large enough:
# TMA fills the missing columns of a tile with zeros on load and drops them on store.
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
# Widths of fp32. The backward of three terms has none above 128: 64 rows of three terms of two tensors of 256 columns fill shared memory
FP32_TILE_WIDTHS = ((64, 64), (128, 128), (256, 256))
FP32_BWD_WIDTHS: dict[int, tuple[tuple[int, int], ...]] = {
    3: FP32_TILE_WIDTHS[:2],
    2: FP32_TILE_WIDTHS,
}  # by number of terms
# Widths of the backward, which compiles more kernels per problem
BWD_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
# One more tile width, of AttnProblem.has_narrow_kernels(): heads of folding models and of windows in vision models
NARROW_WIDTH = (32, 32)
# fp32 backwards of wider heads have no shared memory for values of functions, see program.Program.by_score
BY_SCORE_WIDTH = 128
# Widths of decode. The last is multi-head latent attention with absorbed weights: V is the first columns of K.
DECODE_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512))
# Widths of forward mode, whose consumers hold two outputs in registers
JVP_TILE_WIDTHS = ((64, 64), (96, 96), (128, 128))
MAX_JVP_HEAD_DIM = JVP_TILE_WIDTHS[-1][0]

# The last seqlen_k of each length bucket; the last bucket is open-ended. config/buckets.py has the others
BUCKET_ENDS = (1024, 4096)
BUCKETS = ("1k", "4k", "long")
# Forwards without as many tiles as SMs need: CTAs split the keys of a tile, or share the last tiles by their keys; see launch.splits
SPLIT_BUCKET, FEW_BUCKET = "split", "few"
# Forwards whose bits may not depend on the batch; they have no rows, see configs.choose_invariant()
INVARIANT_BUCKET = "invariant"
MAX_SPLITS = 128  # CTAs per tile

TABLE_ROWS = 128  # queries or keys per tile of packed sequences, and the padding unit of their fp32 rows
FAR = 2**30  # rows; larger than any length, see sources.tiles.packed


class OptionArgument(NamedTuple):
    """An argument of the kernels with options: its type in a kernel, its value in a launch.

    Args:
        name: in the kernels.
        dtype: of a number, or of the elements of a tensor.
        value: attribute of options.Options that is the number or tensor. For a tensor that is None a launch passes one that nobody reads.
        shape: of a tensor, in sizes by name, each a runtime value of its own, and in numbers; (): a number. One per batch entry is
            strided, and in a launch a view with the batch of the call.
    """

    name: str
    dtype: str
    value: str
    shape: tuple[str | int, ...] = ()

    @property
    def is_per_entry(self) -> bool:
        """True for a tensor with a row of numbers per batch entry."""
        return "batch" in self.shape


# Variants of plain attention, and the arguments of kernels that have their values, both in this order. Which options are on is compiled in.
OPTION_ARGUMENTS: dict[str, tuple[OptionArgument, ...]] = {
    # A query sees only keys near its diagonal
    "window": (OptionArgument("left", "int32", "left"), OptionArgument("right", "int32", "right")),
    # softcap * tanh(score / softcap)
    "softcap": (OptionArgument("softcap", "float32", "softcap"),),
    # score - slope * |distance|
    "alibi": (OptionArgument("Slopes", "float32", "alibi_slopes", ("batch", "heads")),),
    # One extra logit per head in the softmax denominator
    "sink": (OptionArgument("Sink", "float32", "sink", ("heads",)),),
    # Probabilities become 0 at random
    "dropout": (
        OptionArgument("Rng", "int64", "rng_state", ("numbers",)),
        OptionArgument("drop_below", "int32", "drop_below"),
    ),
    # Packed sequences of different lengths. Their launch passes a table of tiles as Table, which `placed` leaves to them
    "varlen": (),
    # Variants for calls on parts of a sequence. The configs of the problem without them serve.
    # Positions of the first query and key in their sequences are runtime values; always with window, never with varlen
    "placed": (OptionArgument("Table", "int32", "place", ("entries", 8)),),
    # The forward merges its result into that of other keys, which is in memory in fp32
    "added": (),
    # The backward stores its gradients, to which those of other calls are added, in fp32; not with fp32 inputs
    "partial": (),
    # Variants of decodes alone.
    # The last keys are those of the queries, the nodes of a tree: a bit per query and key says whether the query sees it
    "tree": (OptionArgument("Tree", "int64", "tree_mask", ("batch", "queries")),),
}
PART_OPTIONS = ("placed", "added", "partial")
ONLY_DECODE = ("tree",)
OPTIONS = tuple(name for name in OPTION_ARGUMENTS if name not in (*PART_OPTIONS, *ONLY_DECODE))
DECODE_OPTIONS = ("window", "softcap", "alibi", "sink", *ONLY_DECODE)
# All that a tree combines with, beside the window of every decode
DECODE_TREE_OPTIONS = ("softcap", "sink", "tree")


def arguments_of(options: Iterable[str]) -> tuple[OptionArgument, ...]:
    """Arguments of kernels that may have these options."""
    return tuple(argument for name in options for argument in OPTION_ARGUMENTS[name])


# Arguments of forwards and backwards with options
KERNEL_ARGUMENTS = arguments_of((*OPTIONS, *PART_OPTIONS))

# bwd_det: a backward whose gradients are equal bit by bit from run to run
DIRECTIONS = ("fwd", "bwd", "bwd_det")
DECODE = "decode"  # one more pass: a few queries against a cache; not tuned
JVP = "jvp"  # one more pass: forward mode, the forward with its derivative along a direction; not tuned


@dataclass(frozen=True)
class AttnProblem:
    """The static part of a call. Batch, heads, lengths, strides and scale are runtime arguments of the kernel.

    head_dim (of Q and K) and head_dim_v (of V and O) are tile widths: one of TILE_WIDTHS, at least the tensors' own.
    options: a subset of OPTION_ARGUMENTS, in their order. A windowed problem is never causal: a right bound of 0 is.
    program: score_mod and mask_mod; not together with causal or options.
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
        width = tile_width(head_dim, head_dim_v, direction, dtype)
        found = cls(dtype, *width, causal, options, program)
        if max(head_dim, head_dim_v) <= NARROW_WIDTH[0] and found.has_narrow_kernels(direction):
            return replace(found, head_dim=NARROW_WIDTH[0], head_dim_v=NARROW_WIDTH[1])
        if program is not None and found.is_fp32 and direction != "fwd" and found.head_dim > BY_SCORE_WIDTH:
            return replace(found, program=replace(program, by_score=True))
        return found

    def has_narrow_kernels(self, direction: str) -> bool:
        """True if heads of up to 32 columns have kernels of NARROW_WIDTH: in 16 bits, without options.

        Of functions masks as bits have them, and dense biases alone: their forward, and the backward that learns them with dq summed in any
        order.
        """
        if self.options or self.is_fp32 or direction == JVP:
            return False
        if self.program is None or self.is_mask_of_bits:
            return True
        return self.program.is_bias if direction == "fwd" else direction == "bwd" and self.learns_bias

    def helper_problem(self, width: int) -> AttnProblem:
        """Key of helper kernels (delta, sum, combine), which depend only on dtype, one width and varlen; for fp32 not on the precision."""
        dtype = next(iter(FP32_DTYPES)) if self.is_fp32 else self.dtype
        return AttnProblem(dtype, width, width, False, ("varlen",) if self.has("varlen") else ())

    def sum_problem(self, width: int) -> AttnProblem:
        """Key of the kernel that sums gradients: helper_problem(); that of fp32 where these are stored in fp32."""
        helper = self.helper_problem(width)
        return replace(helper, dtype=next(iter(FP32_DTYPES))) if self.has("partial") else helper

    def has(self, option: str) -> bool:
        return option in self.options

    @property
    def is_fp32(self) -> bool:
        """True for fp32, whose Q, K and V kernels get as bf16 terms, side by side in the columns of a tensor."""
        return self.dtype in FP32_DTYPES

    @property
    def terms(self) -> int:
        """Terms per element of Q, K, V and P."""
        return max(DTYPES[self.dtype].terms, 1)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The products of terms that make one product of tiles: (term of the left tile, term of the right one)."""
        return PRODUCTS[self.terms]

    @property
    def element_bytes(self) -> int:
        """Bytes per element of Q, K and V in shared memory."""
        return DTYPES[self.dtype].bytes

    @property
    def output_bytes(self) -> int:
        """Bytes per element of O and of the gradients."""
        return 4 if self.is_fp32 else self.element_bytes

    def dtype_of(self, operand: str) -> str:
        """Dtype of one of OPERANDS: that of the inputs; for fp32 bf16 if the tensor cores multiply it."""
        assert operand in OPERANDS, f"{operand=}"
        if (operand == "o" and self.has("added")) or (operand == "dq" and self.has("partial")):
            return "float32"
        if not self.is_fp32:
            return self.dtype
        return "float32" if operand in FP32_OPERANDS else "bfloat16"

    @property
    def bias_is_linear(self) -> bool:
        """True where the ALiBi bias is linear in the key: a causal mask hides the keys past the diagonal.

        Not for fp32: products that are added to a larger bias are rounded to its last digit.
        """
        return self.has("alibi") and self.causal and not self.has("softcap") and not self.is_fp32

    @property
    def bias_has_two_sides(self) -> bool:
        """True where the ALiBi bias is linear in the key on each side of the diagonal, and a forward computes it so: without a mask."""
        others = {*self.options} - {"alibi", "sink", "varlen"}
        return self.has("alibi") and not self.causal and not others and not self.is_fp32

    @property
    def can_share(self) -> bool:
        """True for a forward whose CTAs can share tiles by their keys without a kernel after it: the schedule stream-K."""
        return not self.options and self.program is None and not self.is_fp32

    @property
    def profits_from_held_max(self) -> bool:
        """True if P has the range for FwdConfig.hold_max, and the first key blocks predict the row max.

        Tiles start at the last keys. With ALiBi and no mask scores grow from there to the query's own key, so a held row max overflows in
        most tiles, which then run twice, unless the blocks near the diagonal come first: mask.NearFirstKeyBlocks.
        """
        grows = self.has("alibi") and not (self.causal or self.has("window") or self.bias_has_two_sides)
        return self.dtype_of("p") == "bfloat16" and not grows

    @property
    def is_sloped(self) -> bool:
        """True if the derivative of the score with respect to the raw score is not the constant scale: with a softcap or a score_mod."""
        return self.has("softcap") or (self.program is not None and self.program.slope is not None)

    @property
    def learns(self) -> bool:
        """True if captured tensors of the program get gradients."""
        return self.program is not None and bool(self.program.gradients)

    @property
    def learns_dS(self) -> bool:
        """True if the gradient of a captured tensor is dS as a pass by keys has it, in bf16 or in fp32, so that it can store it."""
        if not self.learns or not self.is_fp32:
            return self.learns and self.program.learns_bf16_dS and self.dtype == "bfloat16"
        return self.program.learns_dS

    @property
    def stores_dS(self) -> bool:
        """True if a pass by keys stores dS as the gradient of a captured tensor; else it adds its diagonals, if the problem learns_dS."""
        return self.learns_dS and bool(self.program.stored)

    @property
    def sends_dS(self) -> bool:
        """True if it stores dS by TMA. Wider heads have no registers for the position: d128 spills 32 bytes (nvcc 13.0.88). Nor has a pass
        with a block mask. In fp32 shared memory has terms of dS.
        """
        is_whole = self.stores_dS and not self.is_fp32
        return is_whole and not self.is_listed and self.head_dim <= 64

    @property
    def learns_bias(self) -> bool:
        """True for a dense bias alone whose gradient is dS in bf16."""
        return self.stores_dS and not self.is_fp32 and self.program.is_bias

    @property
    def changes_scores(self) -> bool:
        """True if a score_mod changes scores."""
        return self.program is not None and self.program.score is not None

    @property
    def fetches(self) -> bool:
        """True if a tile of scores needs tiles of captured tensors."""
        return self.program is not None and bool(self.program.dense_loads)

    @property
    def stages(self) -> bool:
        """True if tiles of captured tensors are prefetched to shared memory."""
        return self.fetches and self.head_dim <= 64 and self.program.is_staged

    @property
    def has_diagonals(self) -> bool:
        """True where values of a program are computed once per diagonal of a tile."""
        return self.program is not None and bool(self.program.diagonals)

    @property
    def is_diagonal_bias(self) -> bool:
        """True for a score_mod alone that only adds a value per diagonal, as a relative bias does, whose gradient, if learned, sums dS."""
        return (
            self.changes_scores
            and self.program.adds_diagonal
            and (self.learns_dS or not self.learns)
            and not self.program.hides
        )

    @property
    def is_mask_of_bits(self) -> bool:
        """True for a block mask as bits, without a score_mod."""
        return self.has_bits and not self.changes_scores

    @property
    def is_band(self) -> bool:
        """True for a mask of bits that shows a range of distances."""
        return self.is_mask_of_bits and self.program.band

    @property
    def compiled_as(self) -> AttnProblem:
        """The problem that kernels are compiled for. Whether a mask is a band decides on their config alone."""
        return replace(self, program=replace(self.program, band=False)) if self.is_band else self

    def diagonal_bytes(self, columns: int) -> int:
        """Shared memory of a warp for these values of 16 rows of `columns` scores."""
        return sum(self.program.diagonal_bytes(columns)) if self.has_diagonals else 0

    def staged_bytes(self, columns: int, rows_are_keys: bool = False) -> list[int]:
        """Bytes of shared memory of a warp for the tiles that it prefetches for 16 rows of `columns` scores."""
        rows, cols = (columns, 16) if rows_are_keys else (16, columns)
        return self.program.staged_bytes(rows, cols, rows_are_keys) if self.stages else []

    @property
    def is_only_capped(self) -> bool:
        """True if a softcap changes scores, and nothing else does; not in fp32, whose tanh has to be accurate."""
        return self.has("softcap") and not (self.has("alibi") or self.program is not None or self.is_fp32)

    @property
    def scores_stay_close(self) -> bool:
        """True for a score_mod that hides no keys, and whose scores do not grow with the position of a key, but by captured values."""
        program = self.program
        if not self.changes_scores or program.hides or self.fetches:
            return False
        return not (program.grows_with_positions or program.chooses_scores)

    @property
    def is_plain_causal(self) -> bool:
        """True if a causal mask alone hides scores."""
        return self.causal and not self.has("window") and self.program is None

    @property
    def is_uneven(self) -> bool:
        """True if tiles have different numbers of steps because of a causal or a block mask."""
        return self.causal or self.is_listed

    @property
    def is_listed(self) -> bool:
        """True if a block mask lists the blocks to compute."""
        return self.program is not None and self.program.listed

    @property
    def has_bits(self) -> bool:
        """True if the mask of a program is given as a bit per element."""
        return self.program is not None and self.program.bits

    @property
    def served_as(self) -> AttnProblem:
        """The problem whose configs serve this one: of PART_OPTIONS it has `placed` alone, which some configs do not take.

        `placed` takes registers that the config for dropout does not have to spare: such a problem gets the config for dropout and softcap.
        """
        names = (*self.options, "softcap") if self.has("placed") and self.has("dropout") else self.options
        return replace(self, options=tuple(name for name in (*OPTIONS, "placed") if name in names))

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
    """The problem that serves a decode. Its window is always on, as the bounds are runtime values; causal is a right bound of 0."""
    names = tuple(name for name in DECODE_OPTIONS if name in ("window", *options))
    return AttnProblem(dtype, *decode_width(head_dim, head_dim_v), False, names)


def tile_width(
    head_dim: int, head_dim_v: int, direction: str = "fwd", dtype: str = DEFAULT_DTYPE
) -> tuple[int, int]:
    """The first tile width that any call of a direction has, and that holds head_dim columns of Q and K and head_dim_v of V and O."""
    widths = tile_widths(direction, dtype, with_options=True)
    return next((qk, v) for qk, v in widths if qk >= head_dim and v >= head_dim_v)


def tile_widths(
    direction: str, dtype: str = DEFAULT_DTYPE, with_options: bool = False
) -> tuple[tuple[int, int], ...]:
    """The (head_dim, head_dim_v) that a direction has kernels for; with_options: without NARROW_WIDTH."""
    if dtype in FP32_DTYPES:
        return FP32_TILE_WIDTHS if direction == "fwd" else FP32_BWD_WIDTHS[FP32_DTYPES[dtype].terms]
    if direction == JVP:
        return JVP_TILE_WIDTHS
    widths = TILE_WIDTHS if direction == "fwd" else BWD_TILE_WIDTHS
    return widths if with_options else (NARROW_WIDTH, *widths)


def dtypes(direction: str) -> tuple[str, ...]:
    """Names of the DTYPES that a direction, DECODE or JVP has kernels for."""
    return tuple(HALF_DTYPES if direction in (DECODE, JVP) else DTYPES)


def decode_arguments(options: Iterable[str]) -> tuple[OptionArgument, ...]:
    """Arguments of a decode kernel with these options: all that it shares with a forward, on or off, then those of decodes alone."""
    shared = (name for name in DECODE_OPTIONS if name in OPTIONS)
    return arguments_of((*shared, *(name for name in ONLY_DECODE if name in options)))


def decode_width(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The first of DECODE_TILE_WIDTHS that holds head_dim columns of Q and K and head_dim_v of V and O."""
    return next((qk, v) for qk, v in DECODE_TILE_WIDTHS if qk >= head_dim and v >= head_dim_v)


def length_bucket(seqlen_k: int) -> str:
    """The one of BUCKETS that holds a key length."""
    return BUCKETS[sum(seqlen_k > end for end in BUCKET_ENDS)]


def tuning_key(problem: AttnProblem, bucket: str) -> str:
    """bf16 d128 causal 4k"""
    return f"{problem} {bucket}"
