# Written by `python scripts/stubs.py`: change the signatures and docstrings of the code instead

from collections.abc import Sequence
from typing import Literal, overload

import torch

from tl_attention.distributed.choice import MethodName
from tl_attention.distributed.group import Group
from tl_attention.distributed.layout import Layout as Layout
from tl_attention.distributed.layout import LayoutName
from tl_attention.distributed.shards import make_layout as make_layout
from tl_attention.distributed.shards import positions as positions
from tl_attention.distributed.shards import shard as shard
from tl_attention.distributed.shards import shard_cu_seqlens as shard_cu_seqlens
from tl_attention.distributed.shards import unshard as unshard

__all__ = ["Layout", "attention", "make_layout", "positions", "shard", "shard_cu_seqlens", "unshard"]

@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    layout: LayoutName | Layout = "zigzag",
    method: MethodName = "auto",
) -> torch.Tensor:
    """Attention of a sequence that the ranks of a group hold together. Results and gradients are those of one GPU.

    All ranks must call it with equal options, and all or none must run its backward. roll.py compares their calls, without waiting for a
    GPU. A group of one rank calls flash_attn_func or flash_attn_varlen_func.

    Args:
        q: [batch, rows, heads, head_dim], bfloat16 or float16: the tokens of this rank, as shard()
            gives them; with cu_seqlens [rows, heads, head_dim].
        k, v: as q, with heads_kv heads and, for v, head_dim_v columns; the same tokens as q.
        group: a ProcessGroup; a DeviceMesh of one dimension; None: all processes, or this one where
            torch.distributed is not initialized.
        dropout_p: probability of dropping an attention weight, as in flash_attn_func. The dropout
            mask equals that of one GPU. Without rng_state the first rank draws the state for all.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much
            longer the backward takes. The forward always is.
            torch.use_deterministic_algorithms(True) sets it, too.
        return_attn_probs: also return the log-sum-exp.
        return_max_logits: also return the largest score of each query of this rank over the keys of
            all ranks, max_logits, as in flash_attn_func. The largest score of a head is a maximum
            over the ranks (examples/qk_clip.py). Not differentiable.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, as in
            flash_attn_func. Its gradient is that of this rank's queries. As with other parameters,
            the sum over the ranks is the whole gradient.
        rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask
            depends on it, on the entry of the batch, the head, and the positions in the sequence.
            None: drawn from torch's generator. Unused without dropout.
        cu_seqlens: [documents + 1], cumulative lengths of all documents, the same on all ranks: a
            tensor on the CPU or a list. A document may be empty and may end at any token.
        seqlen: tokens of the whole sequence; None: world size times rows, for shards of equal
            length.
        layout: tokens of each rank: "zigzag", "contiguous", or the result of make_layout().
        method: "gather"; "ring", for sequences whose gathered keys do not fit; "auto": one of them
            by the bytes of the keys. TL_ATTENTION_PRINT_CONFIGS=1 prints the choice and the reason.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With return_attn_probs (out, softmax_lse, None), where
            softmax_lse is [batch, heads, rows], or [heads, rows] with cu_seqlens, fp32, natural log. As in flash_attn_func a query that
            sees no key has out 0 and softmax_lse -inf, or with a sink softmax_lse = sink. With return_max_logits max_logits come last,
            (out, max_logits) or (out, softmax_lse, None, max_logits), in the shape of softmax_lse, fp32.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed; on all ranks. Transforms of
            torch.func and forward-mode differentiation are refused.
    """

@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[True],
    return_max_logits: Literal[False] = False,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    layout: LayoutName | Layout = "zigzag",
    method: MethodName = "auto",
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    return_max_logits: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    layout: LayoutName | Layout = "zigzag",
    method: MethodName = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[True],
    return_max_logits: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    layout: LayoutName | Layout = "zigzag",
    method: MethodName = "auto",
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    return_max_logits: bool = False,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    layout: LayoutName | Layout = "zigzag",
    method: MethodName = "auto",
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
): ...
