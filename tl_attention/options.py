"""What a call may ask beside plain or causal attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tl_attention.problem import OPTIONS

UNLIMITED = -1
MAX_WINDOW = 2**30  # more than any length, and far enough from the end of an int32


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a launch. All are values; only which are present is compiled.

    A score goes through scale, softcap, ALiBi and masks; then come the softmax, with the sink, and dropout. The diagonal of a query is the
    key query + seqlen_k - seqlen_q. A query that sees no key has out 0, and lse -inf or, with a sink, lse = sink.

    Args:
        window: (left, right), the keys beside the diagonal that a query sees, inclusive; -1: no limit. Holds what causal says, too.
        softcap: score -> softcap * tanh(score / softcap); 0: none.
        dropout_p: of a probability to become 0, after which the others are divided by 1 - dropout_p; rounded to a multiple of
            1/256, at least one if > 0. lse is of the undropped.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths that cu_seqlens hold, for the schedule alone.
        num_splits: of the keys of a tile of the forward, each to a CTA; 0: as many as suit the problem.
        rng_state: int64 [2]: the seed and the offset that reference.dropout_keep makes the mask from. Dropout needs it.
        alibi_slopes: fp32 [heads] or [batch, heads], contiguous: score - slope * |diagonal - key|.
        sink: [heads], fp32 or the dtype of q: for each query one more key, of no value, whose score is this; in lse, too.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], from 0 on; then q is [total_q, heads, head_dim], k and v [total_k, heads_kv, ...],
            and sequence i has their rows from cu_seqlens[i] to before cu_seqlens[i + 1]. Both or none.
        seqused_q, seqused_k: int32 [batch], of a sequence only so many rows, from its first, are read and written. Only with cu_seqlens.
    """

    # The order of the last arguments of the torch ops: numbers, then tensors
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    softcap: float = 0.0
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    num_splits: int = 0
    rng_state: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def is_off(self) -> bool:
        """Whether the call is a plain or causal one, split as it suits."""
        return (
            self.window == (UNLIMITED, UNLIMITED)
            and self.softcap == 0
            and self.dropout_p == 0
            and self.alibi_slopes is None
            and self.sink is None
            and self.cu_seqlens_q is None
            and self.num_splits == 0
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What is on, as problem.OPTIONS has it."""
        on = {
            "window": self.window != (UNLIMITED, UNLIMITED),
            "softcap": self.softcap != 0,
            "alibi": self.alibi_slopes is not None,
            "sink": self.sink is not None,
            "dropout": self.dropout_p != 0,
            "varlen": self.varlen,
        }
        return tuple(name for name in OPTIONS if on[name])

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """The window as kernels take it, without a sign for no limit."""
        left, right = (MAX_WINDOW if n == UNLIMITED else n for n in self.window)
        return left, right

    @property
    def drop_below(self) -> int:
        """Of the 256 values of a byte of the generator, those below it drop a probability."""
        return max(1, round(256 * self.dropout_p)) if self.dropout_p else 0

    def of_batch(self, first: int, batch: int) -> Options:
        """Those of so many problems of a dense batch."""
        slopes = self.alibi_slopes
        if slopes is None or slopes.ndim == 1:
            return self
        return replace(self, alibi_slopes=slopes[first : first + batch])

    def arguments(self) -> tuple:
        """The fields in their order, as a torch op takes them."""
        return (
            self.window, self.softcap, self.dropout_p, self.max_seqlen_q, self.max_seqlen_k, self.num_splits,
            self.rng_state, self.alibi_slopes, self.sink,
            self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys and values that lie in a cache, and which of them a sequence has.

    Args:
        k: [caches, seqlen_cache, heads_kv, head_dim], or with block_table [pages, page_size, heads_kv, head_dim].
        v: as k, head_dim_v wide.
        seqlens: int32 [batch], or of all: keys before the new ones, with left padding counted from the start of the cache.
        new: keys appended to each.
        batch_idx: int32 [batch]: which cache a sequence has; None: its own number.
        leftpad: int32 [batch]: keys before this are not of the sequence.
        block_table: int32 [batch, pages a sequence]: page i of a sequence holds its keys from i * page_size on.
    """

    k: torch.Tensor
    v: torch.Tensor
    seqlens: torch.Tensor | int
    new: int = 0
    batch_idx: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


SCHEMA = (
    f"SymInt[] window=[{UNLIMITED}, {UNLIMITED}], float softcap=0.0, float dropout_p=0.0, SymInt max_seqlen_q=0,"
    " SymInt max_seqlen_k=0, SymInt num_splits=0, Tensor? rng_state=None, Tensor? alibi_slopes=None, Tensor? sink=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None"
)
NUMBERS = 6  # fields before the first tensor
SINK = 8  # the field


def of_arguments(*arguments: object) -> Options | None:
    """The options that an op got, which may end anywhere; None if none is on."""
    if not arguments:
        return None
    window, *others = arguments
    options = Options(tuple(window), *others)
    return None if options.is_off else options


def canonical_window(causal: bool, window_size: Sequence[int | None]) -> tuple[bool, tuple[int, int]]:
    """(causal, window) of which at most one is set, so that no mask has two names."""
    left, right = (UNLIMITED if x is None or x == UNLIMITED else min(x, MAX_WINDOW) for x in window_size)
    if causal:
        right = 0
    if left == UNLIMITED and right == 0:
        return True, (UNLIMITED, UNLIMITED)
    return False, (left, right)


def rows_in_use(cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int) -> torch.Tensor:
    """Which of so many rows belong to a sequence, and to what it uses: bool [total]. Does not wait for the GPU."""
    row = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens[1:] if seqused is None else cu_seqlens[:-1] + seqused
    ends = torch.nn.functional.pad(ends, (0, 1))  # of rows before the first sequence and after the last
    return row < ends[torch.searchsorted(cu_seqlens, row, right=True) - 1]
