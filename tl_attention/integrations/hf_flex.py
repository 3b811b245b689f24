"""Masks and biases of transformers that options cannot express, by flex_attention: mask functions, 4-D masks, position biases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tl_attention.api.block_masks import create_block_mask
from tl_attention.api.flex import flex_attention
from tl_attention.checks.common import describe, expect_tensor
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.integrations.hf_checks import VARLEN_ROWS, is_block_mask
from tl_attention.integrations.hf_mask import Mask
from tl_attention.tracing.dense_bias import element

_NAMES = Renaming({"block_mask": "attention_mask"})


@torch._disable_dynamo
def block_mask_of(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function: Callable,
    padding: torch.Tensor | None,
    device: torch.device | str,
) -> tuple[Any, Callable[[torch.Tensor], Any]]:
    """BlockMask of padding and of a mask function of transformers, which is called with positions.

    Args:
        q_offset, kv_offset: positions of the first query and of the first key.
        padding: bool or ints [batch, at most kv_offset + kv_length], False or 0 for padding; None: none.
    Returns:
        (BlockMask, of_documents); of_documents(document of each token [1, q_length]) is the same mask within these documents.
    """
    # Copied: a static cache changes the tensor in place before mask_mod is called
    offset = q_offset.reshape(()).clone() if isinstance(q_offset, torch.Tensor) else q_offset
    real = None
    if padding is not None and batch and kv_length:
        real = padding[:, kv_offset : kv_offset + kv_length].bool()
        real = torch.nn.functional.pad(real, (0, kv_length - real.shape[1]))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = mask_function(b, h, q_idx + offset, kv_idx + kv_offset)
        return seen if real is None else seen & real[b, kv_idx]

    @functools.lru_cache(1)  # one BlockMask for all layers
    def of_documents(documents: torch.Tensor) -> Any:
        document = torch.nn.functional.pad(documents[0], (0, kv_length - documents.shape[1]), value=-1)

        def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return mask_mod(b, h, q_idx, kv_idx) & (document[q_idx] == document[kv_idx])

        return create_block_mask(within, batch, None, q_length, kv_length, device)

    return create_block_mask(mask_mod, batch, None, q_length, kv_length, device), of_documents


def needs_flex(attention_mask: Any, position_bias: torch.Tensor | None) -> bool:
    """True for a mask or bias that options cannot express."""
    if isinstance(attention_mask, Mask):
        return position_bias is not None or attention_mask.block_mask is not None
    return position_bias is not None or attention_mask is not None


def flex_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    position_bias: torch.Tensor | None,
    documents: torch.Tensor | None,
    scaling: float | None,
    window: tuple[bool, int, int],
    softcap: float,
    sink: torch.Tensor | None,
    deterministic: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    """Attention of one layer with a BlockMask, a 4-D mask or a position bias: [batch, seqlen_q, heads, head_dim_v], contiguous.

    Args:
        attention_mask: Mask of hf.attention_mask; BlockMask; bool or additive mask [batch or 1, heads or 1, seqlen_q or 1, at least
            seqlen_k]; None.
        documents: document of each token [batch, seqlen_q], where queries and keys are the same tokens; None: one per row.
        position_bias: of the same shape as an additive mask.
        window: (causal, left, right); applied if attention_mask is None or a Mask without a BlockMask.
        softcap: cap of the scores, before masks and biases; 0: none.
        sink: [heads], scores of the sink; None: no sink.
    """
    bias, mask_mod, block_mask, rows = None, None, None, None
    if isinstance(attention_mask, Mask):
        block_mask, rows = attention_mask.block_mask, attention_mask.rows_for(query.shape[2])
        if documents is not None:
            rows = None
            block_mask = None if block_mask is None else attention_mask.of_documents(documents)
    elif is_block_mask(attention_mask):
        block_mask = attention_mask
    elif attention_mask is not None:
        seen = _element("attention_mask", attention_mask, query, key)
        if attention_mask.dtype == torch.bool:

            def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return seen(b, h, q_idx, kv_idx)
        else:
            bias = seen
    if block_mask is None and (attention_mask is None or isinstance(attention_mask, Mask)):
        mask_mod = _mask_of_options(rows, query, key, window)
        if documents is not None:
            mask_mod = _within(documents, mask_mod)
    positions = None if position_bias is None else _element("position_bias", position_bias, query, key)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if positions is not None:
            score = score + positions(b, h, q_idx, kv_idx)
        return score if bias is None else score + bias(b, h, q_idx, kv_idx)

    functions = None if positions is None and bias is None and not softcap else score_mod, block_mask
    options = {"enable_gqa": True, "return_lse": True, "mask_mod": mask_mod}
    options |= {"deterministic": deterministic, "batch_invariant": batch_invariant}
    try:
        out, lse = flex_attention(query, key, value, *functions, scaling, **options)
    except ARGUMENT_ERRORS as error:
        raise _NAMES.of(error) from None
    if sink is not None:  # the sink is one extra key per query, without a value
        out = (out * _weight_of_keys(lse, sink.float()[:, None])[..., None]).to(out.dtype)
    return out.transpose(1, 2).contiguous()


def _weight_of_keys(lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Weight of the keys beside that of the sink: exp(lse) / (exp(lse) + exp(sink)).

    Equal infinities become 0, before the subtraction: it, or its gradient, would be NaN. Where both are -inf, out is 0.
    """
    alike = lse.isinf() & (lse == sink)
    return torch.sigmoid(lse.masked_fill(alike, 0) - sink.expand_as(lse).masked_fill(alike, 0))


def _within(documents: torch.Tensor, mask_mod: Callable | None) -> Callable:
    """mask_mod of keys in the query's document that another mask_mod shows, too."""

    def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = documents[b, q_idx] == documents[b, kv_idx]
        return same if mask_mod is None else same & mask_mod(b, h, q_idx, kv_idx)

    return within


def _element(name: str, x: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Callable:
    """dense_bias.element() of a mask or bias [batch or 1, heads or 1, seqlen_q or 1, at least seqlen_k], checked."""
    expect_tensor(name, x)
    sizes = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    fits = x.ndim == 4 and all(n in (1, size) for n, size in zip(x.shape[:3], sizes[:3], strict=True))
    if not fits or (x.shape[3] < sizes[3] and x.shape[3] != 1):
        raise ValueError(
            f"{name}: expected shape [batch or 1, heads or 1, seqlen_q or 1, at least seqlen_k] for {sizes}, got {tuple(x.shape)}"
        )
    if x.dtype not in (torch.bool, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"{name}: expected bool, True for keys that a query sees, or a float tensor to add to the scores, got {describe(x)};"
            f" {name} == 1 makes one of ints"
        )
    if name == "position_bias" and x.dtype == torch.bool:
        raise TypeError(f"{name}: expected a float tensor, got {describe(x)}")
    if x.device != query.device:
        raise ValueError(
            f"{name}: expected the device of query, {query.device}, got {x.device}; move it with .to(query.device)"
        )
    if not x.numel():  # no score reads it; its sum, 0, has its gradient
        x = (x.any() if x.dtype == torch.bool else x.sum()).view(1, 1, 1, 1)
    return element(x)


def _mask_of_options(
    rows: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, window: tuple[bool, int, int]
) -> Callable | None:
    """mask_mod of a causal mask or window, aligned with the last key, and of the padding in rows of hf.attention_mask."""
    causal, left, right = window
    right = 0 if causal else right
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    if not batch or (rows is None and left < 0 and right < 0):
        return None
    offset: Any = seqlen_k - seqlen_q
    begin_q = end_q = begin_k = end_k = None
    if rows is not None:
        # Each batch entry is two sequences, the first of them its padding
        cu_seqlens_q, cu_seqlens_k, used_q, used_k = (x[1::2] for x in rows[:VARLEN_ROWS])
        first = torch.arange(batch, dtype=torch.int32, device=rows.device)
        begin_q, begin_k = cu_seqlens_q - first * seqlen_q, cu_seqlens_k - first * seqlen_k
        end_q, end_k = begin_q + used_q, begin_k + used_k
        offset = end_k - end_q

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx + (offset if begin_q is None else offset[b])
        seen = q_idx >= 0
        if begin_q is not None:
            seen = (kv_idx >= begin_k[b]) & (kv_idx < end_k[b]) & (q_idx >= begin_q[b]) & (q_idx < end_q[b])
        if left >= 0:
            seen = seen & (distance <= left)
        return seen & (distance >= -right) if right >= 0 else seen

    return mask_mod
