"""One call of attention, as a public function got it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tl_attention.problem.attn_problem import Precision
from tl_attention.problem.options import ALWAYS_INVARIANT

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Functions = tuple[ScoreMod | None, MaskMod | None, Any, torch.Tensor | None]


class Request(NamedTuple):
    """Tensors and options of a call by the names of flash_attn_func, unchecked.

    The functions of api/ make it, and pass it on whole: torch_ops/attend.py checks and runs it, api/flex_calls.py one with functions of
    scores.

    Args:
        heads_first: q, k and v are [batch, heads, seqlen, head_dim]; else [batch, seqlen, heads, head_dim], with lengths [total, heads,
            head_dim].
        lse_base2: the log-sum-exp is wanted in base 2; else natural.
        batch_invariant: the bits of a query's result may not depend on the rest of the batch.
        lengths: of packed sequences: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k.
        functions: score_mod, mask_mod, block_mask, attn_bias of flex_attention; None: there are none.
        enable_gqa: of a call with functions: k and v may have fewer heads than q.
        max_logits: the largest score of each query is wanted, too.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float | None
    causal: bool
    deterministic: bool
    precision: Precision | None
    window_size: Sequence[int | None]
    softcap: float
    dropout_p: float
    alibi_slopes: torch.Tensor | None
    learnable_sink: torch.Tensor | None
    rng_state: torch.Tensor | None
    num_splits: int
    batch_invariant: bool
    lengths: tuple[Any, ...] | None
    heads_first: bool
    lse_base2: bool
    functions: Functions | None
    enable_gqa: bool
    max_logits: bool


_new = tuple.__new__  # half the time of a call of the class
_is_compiling = torch.compiler.is_compiling


def or_always(batch_invariant: bool) -> bool:
    """batch_invariant of a call, or of the environment."""
    return ALWAYS_INVARIANT if batch_invariant is False else batch_invariant


def new_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    precision: Precision | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    lengths: tuple[Any, ...] | None = None,
    heads_first: bool = False,
    lse_base2: bool = False,
    functions: Functions | None = None,
    enable_gqa: bool = True,
    max_logits: bool = False,
) -> Request:
    fields = (
        q, k, v, softmax_scale, causal, deterministic, precision, window_size, softcap, dropout_p, alibi_slopes, learnable_sink,
        rng_state, num_splits, or_always(batch_invariant), lengths, heads_first, lse_base2, functions, enable_gqa,
        max_logits,
    )  # fmt: skip
    # torch.compile knows the class of a named tuple in all versions
    return Request(*fields) if _is_compiling() else _new(Request, fields)
