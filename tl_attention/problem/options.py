"""Options of a call beyond plain or causal attention, each declared once as a field of Options; and the KV cache of a decode."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from tl_attention.problem.attn_problem import OPTION_ARGUMENTS, length_bucket
from tl_attention.problem.switches import switch

UNLIMITED = -1
BATCH_INVARIANT = -1  # num_splits of a call whose bits may not depend on the rest of the batch
ALWAYS_INVARIANT = switch("TL_ATTENTION_BATCH_INVARIANT")  # every call is one
MAX_WINDOW = 2**30  # above any length, and far from the end of int32
# Kernels multiply softmax_scale and softcap by log2(e) and by their lowest row max, -1e20, and divide one by the other. Within these
# limits all results are finite in fp32; otherwise a query whose first keys are masked would get NaN
MAX_SCALE = 2.0**60
MIN_SOFTCAP, MAX_SOFTCAP = 2.0**-60, 2.0**60


class TensorRule(NamedTuple):
    """What a tensor of options may be.

    Args:
        shapes: one of these, in the sizes of a call, batch and heads, and in numbers.
        dtypes: one of these.
    """

    shapes: tuple[tuple[str | int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def axis(self, size: str, ndim: int) -> int | None:
        """Dimension of that size in a tensor of ndim dimensions, or of the first shape; None: it has none."""
        shape = next((x for x in self.shapes if len(x) == ndim), self.shapes[0])
        return shape.index(size) if size in shape else None


def _metadata(
    schema: str,
    kernel: str = "",
    launch: bool = False,
    reference: bool = False,
    gradient: bool = False,
    public: str = "",
    rule: TensorRule | None = None,
) -> dict[str, Any]:
    """Metadata of a field of Options.

    Args:
        schema: its type in the schema of the torch ops.
        kernel: its name in attn_problem.OPTION_ARGUMENTS, for an option that is compiled into kernels.
        launch: it changes the launch of a kernel, without being compiled into it.
        reference: the reference takes it by its name.
        gradient: it is a tensor that has one.
        public: name of its argument in the public functions, where that is another.
        rule: of a tensor that a user passes by that name.
    """
    return {
        "schema": schema,
        "kernel": kernel,
        "launch": launch,
        "reference": reference,
        "gradient": gradient,
        "public": public,
        "rule": rule,
    }


@dataclass(frozen=True, eq=False)
class Options:
    """Options of a launch. All are runtime values; a kernel is compiled for which of them are on.

    The order is: scale, softcap, ALiBi, masks, softmax (with the sink), dropout. The diagonal of a query is the key
    query + seqlen_k - seqlen_q. A query that sees no key has out 0, and lse -inf or, with a sink, lse = sink.

    Fields are the last arguments of the torch ops, in this order: numbers first, then tensors.

    Args:
        window: (left, right): a query sees diagonal - left <= key <= diagonal + right; -1: no limit. With causal, right is 0.
        softcap: score -> softcap * tanh(score / softcap); 0: none.
        dropout_p: probability of dropping an attention weight; kept weights are divided by 1 - dropout_p. Rounded to a multiple of
            1/256, at least 1/256 if > 0. lse is computed before dropout.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths in cu_seqlens, used by the schedule only.
        num_splits: number of CTAs that share the keys of a forward tile; 1: none do; 0: chosen for the problem; BATCH_INVARIANT: none
            do, and config and order of keys are those of any batch and length.
        parts: bf16 terms per element of fp32 tensors, see problem.PRECISIONS; 0 for tensors of another dtype.
        rng_state: int64 [2]: seed and offset from which reference.dropout_keep makes the mask. Dropout needs it.
        alibi_slopes: fp32 [heads] or [batch, heads], contiguous: score - slope * |diagonal - key|.
        sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no value; it counts in lse.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], starting at 0. q is then [total_q, heads, head_dim], k and v [total_k, heads_kv,
            ...], and sequence i has rows cu_seqlens[i] to cu_seqlens[i + 1], exclusive. Both or neither.
        seqused_q, seqused_k: int32 [batch]: only the first seqused[i] rows of sequence i are read and written. Only with cu_seqlens.
        place: int32 [1, 8]: q and k are parts of longer sequences. Its numbers are first_query and first_key, the positions of the first
            query and key in their sequences; hidden, how many keys from the first on no query sees; stream, what dropout adds to
            batch * heads + head; and four zeros. The diagonal of a query is the key query + first_query - first_key. With dropout
            first_query and first_key are multiples of 16. Only with a window, and without cu_seqlens.
        tree_mask: int64 [seqlen_q] or [batch, seqlen_q], of a decode: key seqlen_k - seqlen_q + j is hidden from the queries without bit
            j. The last dimension is contiguous.
    """

    window: tuple[int, int] = field(
        default=(UNLIMITED, UNLIMITED),
        metadata=_metadata("SymInt[]", kernel="window", reference=True, public="window_size"),
    )
    softcap: float = field(default=0.0, metadata=_metadata("float", kernel="softcap", reference=True))
    dropout_p: float = field(default=0.0, metadata=_metadata("float", kernel="dropout"))
    max_seqlen_q: int = field(default=0, metadata=_metadata("SymInt"))
    max_seqlen_k: int = field(default=0, metadata=_metadata("SymInt"))
    num_splits: int = field(default=0, metadata=_metadata("SymInt", launch=True))
    parts: int = field(default=0, metadata=_metadata("SymInt", launch=True))
    rng_state: torch.Tensor | None = field(
        default=None, metadata=_metadata("Tensor?", rule=TensorRule(((2,),), (torch.int64,)))
    )
    alibi_slopes: torch.Tensor | None = field(
        default=None,
        metadata=_metadata(
            "Tensor?",
            kernel="alibi",
            reference=True,
            rule=TensorRule((("heads",), ("batch", "heads")), (torch.float32,)),
        ),
    )
    sink: torch.Tensor | None = field(
        default=None,
        metadata=_metadata(
            "Tensor?",
            kernel="sink",
            reference=True,
            gradient=True,
            public="learnable_sink",
            rule=TensorRule((("heads",),), (torch.float32, torch.bfloat16, torch.float16)),
        ),
    )
    cu_seqlens_q: torch.Tensor | None = field(default=None, metadata=_metadata("Tensor?", kernel="varlen"))
    cu_seqlens_k: torch.Tensor | None = field(default=None, metadata=_metadata("Tensor?"))
    seqused_q: torch.Tensor | None = field(default=None, metadata=_metadata("Tensor?"))
    seqused_k: torch.Tensor | None = field(default=None, metadata=_metadata("Tensor?"))
    place: torch.Tensor | None = field(default=None, metadata=_metadata("Tensor?", kernel="placed"))
    tree_mask: torch.Tensor | None = field(
        default=None, metadata=_metadata("Tensor?", kernel="tree", reference=True)
    )

    def _has(self, name: str, default: object) -> bool:
        value = getattr(self, name)
        return value is not None if default is None else value != default

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch_invariant(self) -> bool:
        return self.num_splits == BATCH_INVARIANT

    @property
    def on(self) -> tuple[str, ...]:
        """What makes the call other than plain or causal attention with default splits: fields, and batch_invariant."""
        found = tuple(name for name, default in _SWITCHES if self._has(name, default))
        return tuple(
            "batch_invariant" if name == "num_splits" and self.batch_invariant else name for name in found
        )

    @property
    def is_off(self) -> bool:
        """True if the call is plain or causal attention with default splits."""
        return not any(self._has(name, default) for name, default in _SWITCHES)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Options that kernels are compiled for, in the order of attn_problem.OPTION_ARGUMENTS."""
        return tuple(kernel for kernel, name, default in _COMPILED if self._has(name, default))

    @functools.cached_property
    def left(self) -> int:
        """Left bound of the kernels' window: MAX_WINDOW where there is no limit."""
        return MAX_WINDOW if self.window[0] == UNLIMITED else self.window[0]

    @functools.cached_property
    def right(self) -> int:
        """Right bound of the kernels' window: MAX_WINDOW where there is no limit."""
        return MAX_WINDOW if self.window[1] == UNLIMITED else self.window[1]

    @functools.cached_property
    def window_keys(self) -> int:
        """Keys in a window, rounded up to a power of two; without a window a number above any length."""
        return 1 << (self.left + self.right).bit_length()

    @functools.cached_property
    def max_seqlen_q_rounded(self) -> int:
        """max_seqlen_q rounded up to its three leading bits, so that similar lengths share launch plans."""
        return rounded_length(self.max_seqlen_q)

    @functools.cached_property
    def max_seqlen_k_rounded(self) -> int:
        """max_seqlen_k rounded up likewise. The limits of buckets, such as 192, are lengths of this form."""
        return rounded_length(self.max_seqlen_k)

    @property
    def longest_rounded(self) -> int:
        """The larger one of max_seqlen_q and max_seqlen_k, rounded up likewise."""
        return max(self.max_seqlen_q_rounded, self.max_seqlen_k_rounded)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Part of a launch plan's key, without the splits of packed sequences."""
        names = *self.names, self.parts, self.window_keys, self.batch_invariant
        if self.varlen:
            return *names, self.cu_seqlens_q.shape[0], length_bucket(self.max_seqlen_k)
        return *names, self.num_splits

    def with_tensors(self, **tensors: torch.Tensor | None) -> Options:
        """Copy with other tensors of the same shapes and dtypes; `names` and `key` stay those of before.

        Args:
            tensors: by field; a field that is left out keeps its tensor.
        """
        options = object.__new__(
            Options
        )  # replace() would leave out what is cached, and sets each field of a frozen class
        options.__dict__.update(self.__dict__, **tensors)
        return options

    def without_tensors(self) -> Options:
        """Copy without tensors, for a later with_tensors()."""
        _ = self.names, self.key, self.left, self.right, self.drop_below
        return self.with_tensors(**_NO_TENSORS)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Values of the fields that hold tensors, in order."""
        return _tensors_of(self.__dict__)

    def learned(self) -> tuple[torch.Tensor | None, ...]:
        """Values of the fields in GRADIENTS, in order."""
        return tuple([self.__dict__[name] for name in GRADIENTS])

    @functools.cached_property
    def drop_below(self) -> int:
        """Dropout threshold: a weight is dropped if its random byte is below it."""
        return max(1, round(256 * self.dropout_p)) if self.dropout_p else 0

    def for_batch(self, first: int, batch: int) -> Options:
        """Options of the entries first to first + batch, exclusive, of a dense batch."""
        slopes = self.alibi_slopes
        if slopes is None or slopes.ndim == 1:
            return self
        return replace(self, alibi_slopes=slopes[first : first + batch])

    def arguments(self) -> tuple[Any, ...]:
        """Values of all fields in order, the last arguments of a torch op."""
        return tuple(getattr(self, name) for name in FIELDS)

    @property
    def position(self) -> tuple[int, int, int]:
        """(first_query, first_key, stream) of `place`; zeros without it."""
        if self.place is None:
            return 0, 0, 0
        first_query, first_key, _, stream, *_ = self.place[0].tolist()
        return first_query, first_key, stream

    def reference_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the reference, for the options that it takes by name."""
        found = {name: getattr(self, name) for name in _REFERENCE}
        if self.place is not None:
            first_query, first_key, _ = self.position
            found |= {"diagonal": first_query - first_key, "hidden_keys": int(self.place[0, 2])}
        return found


def _schema(option: Field) -> str:
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    return f"{option.metadata['schema']} {option.name}={default}"


_ALL = fields(Options)
FIELDS = tuple(x.name for x in _ALL)
SCHEMA = ", ".join(map(_schema, _ALL))
NUMBERS = sum(x.metadata["schema"] != "Tensor?" for x in _ALL)  # fields before the first tensor
TENSORS = FIELDS[NUMBERS:]
GRADIENTS = tuple(x.name for x in _ALL if x.metadata["gradient"])
PUBLIC_NAMES = {x.name: x.metadata["public"] or x.name for x in _ALL}
TENSOR_RULES = {x.name: x.metadata["rule"] for x in _ALL if x.metadata["rule"]}
PER_HEAD = tuple(
    name for name, rule in TENSOR_RULES.items() if any("heads" in shape for shape in rule.shapes)
)
ALIKE_IN_BATCH = tuple(
    name for name in PER_HEAD if not any("batch" in shape for shape in TENSOR_RULES[name].shapes)
)
_NO_TENSORS = dict.fromkeys(TENSORS)
_tensors_of = operator.itemgetter(*TENSORS)
_REFERENCE = tuple(x.name for x in _ALL if x.metadata["reference"])
_SWITCHES = tuple((x.name, x.default) for x in _ALL if x.metadata["kernel"] or x.metadata["launch"])
_COMPILED = tuple(
    sorted(
        ((x.metadata["kernel"], x.name, x.default) for x in _ALL if x.metadata["kernel"]),
        key=lambda option: tuple(OPTION_ARGUMENTS).index(option[0]),
    )
)


LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class Call(NamedTuple):
    """Arguments of the ops of forward and backward between their tensors and the options."""

    softmax_scale: float
    causal: bool
    lse_base2: bool
    heads_first: bool
    deterministic: bool  # of the backward


PLAIN_ARGUMENTS = "float softmax_scale, bool causal, bool lse_base2, bool heads_first, bool deterministic"
ARGUMENTS = f"{PLAIN_ARGUMENTS}, {SCHEMA}"
PLAIN = len(Call._fields)  # arguments before the options


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys and values in a cache, and where those of each sequence are.

    Args:
        k: [caches, seqlen_cache, heads_kv, head_dim], or with block_table [pages, page_size, heads_kv, head_dim].
        v: as k, head_dim_v wide.
        seqlens: int32 [batch], or one int for all: rows in use before the new keys, left padding included.
        new: number of keys appended to each sequence.
        batch_idx: int32 [batch]: cache of each sequence; None: sequence i has cache i.
        leftpad: int32 [batch]: rows of left padding; None: 0.
        block_table: int32 [batch, pages per sequence]: page i of a sequence holds its keys from i * page_size on.
    """

    k: torch.Tensor
    v: torch.Tensor
    seqlens: torch.Tensor | int
    new: int = 0
    batch_idx: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


def parse_arguments(arguments: Sequence[Any]) -> tuple[Call, Options | None]:
    """Arguments of an op after its tensors. Options are None if all are off."""
    return Call(*arguments[:PLAIN]), parse_options(*arguments[PLAIN:])


def parse_options(*arguments: object) -> Options | None:
    """Options from the last arguments of an op, where trailing defaults may be left out; None if all are off."""
    if not arguments:
        return None
    window, *others = arguments
    options = Options(tuple(window), *others)
    return None if options.is_off else options


@functools.cache
def options_of_terms(terms: int, batch_invariant: bool = ALWAYS_INVARIANT) -> Options | None:
    """Options of a launch that has no other ones: bf16 terms per fp32 element, and batch_invariant; None if both are off."""
    if not (terms or batch_invariant):
        return None
    return Options(num_splits=BATCH_INVARIANT if batch_invariant else 0, parts=terms)


def canonical_window(causal: bool, window_size: Sequence[int | None]) -> tuple[bool, tuple[int, int]]:
    """(causal, window) with at most one of them set, so that each mask has one spelling."""
    left, right = (UNLIMITED if x is None or x == UNLIMITED else min(x, MAX_WINDOW) for x in window_size)
    if causal:
        right = 0
    if left == UNLIMITED and right == 0:
        return True, (UNLIMITED, UNLIMITED)
    return False, (left, right)


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if its memory does not hold its values, for a launch that reads the memory.

    The memory of a lazily negated view, such as the imaginary part of a conjugate, holds the opposite of its values, which only the ops
    of torch know. Integers have no such views, and complex tensors are refused.
    """
    return x.resolve_neg() if x.is_neg() else x


def as_stored_eagerly(x: torch.Tensor) -> torch.Tensor:
    """as_stored(x) outside compiled code, which cannot ask, and whose ops know."""
    return x if torch.compiler.is_compiling() else as_stored(x)


def saveable(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, or a copy of a tensor made in inference mode, which autograd cannot save for a backward."""
    return x.clone() if x is not None and x.is_inference() else x


def writing(*tensors: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which ops of torch write to these tensors: to those made in inference mode they do so in inference mode alone."""
    return torch.inference_mode() if any(x.is_inference() for x in tensors) else contextlib.nullcontext()


def rounded_length(length: int) -> int:
    """A length rounded up to its three leading bits."""
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step


def rows_in_use(cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int) -> torch.Tensor:
    """Mask of the rows that belong to the used part of a sequence: bool [total]. Does not synchronize with the GPU."""
    row = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens[1:] if seqused is None else cu_seqlens[:-1] + seqused
    ends = torch.nn.functional.pad(ends, (0, 1))  # for rows before the first sequence and after the last
    return row < ends[torch.searchsorted(cu_seqlens, row, right=True) - 1]
