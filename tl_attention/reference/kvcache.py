"""The reference for attention to a KV cache: attention, appending and rotary embedding in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tl_attention.reference import varlen_reference


def kvcache_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ends: Sequence[int],
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    batch_idx: Sequence[int] | None = None,
    leftpad: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """attention_reference for each sequence of a batch and its keys in a cache.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim].
        k_cache: [caches, seqlen_cache, heads_kv, head_dim], or with block_table [pages, page_size, heads_kv, head_dim].
        v_cache: like k_cache, with head_dim_v columns.
        ends: [batch]; the keys of a sequence end before this row of its cache.
        batch_idx: [batch]; the cache of each sequence; None: cache b for sequence b.
        leftpad: [batch]; the keys of a sequence begin at this row of its cache; None: 0.
        block_table: [batch, pages per sequence]; page i of a sequence holds its rows from i * page_size on.
        options: as for attention_reference, without keep.
    Returns:
        out: [batch, seqlen_q, heads_q, head_dim_v].
        lse: [batch, heads_q, seqlen_q].
    Rows outside leftpad to ends are not read.
    """
    batch, seqlen_q = q.shape[:2]
    with torch.autocast(q.device.type, enabled=False):  # torch.cat would cast, or refuse the dtype
        k, v, cu_seqlens_k = packed_cache(
            k_cache, v_cache, ends, batch_idx=batch_idx, leftpad=leftpad, block_table=block_table
        )
    cu_seqlens_q = torch.arange(batch + 1, device="cpu") * seqlen_q
    out, lse = varlen_reference(
        q.flatten(0, 1), k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **options
    )
    return out.view(batch, seqlen_q, *out.shape[1:]), lse.view(q.shape[2], batch, seqlen_q).transpose(0, 1)


def paged_varlen_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    lengths: Sequence[int],
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """varlen_reference for keys in pages.

    Args:
        k, v: [pages, page_size, heads_kv, columns].
        lengths: [batch], keys per sequence.
        block_table: [batch, pages per sequence]; page i of a sequence holds its keys from i * page_size on.
        q, cu_seqlens_q, softmax_scale, causal, options: as for varlen_reference.
    """
    with torch.autocast(q.device.type, enabled=False):
        k, v, cu_seqlens_k = packed_cache(k, v, lengths, block_table=block_table)
    return varlen_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **options)


def packed_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ends: Sequence[int],
    *,
    batch_idx: Sequence[int] | None = None,
    leftpad: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack the keys and values of kvcache_reference's sequences; return k, v and cu_seqlens_k for varlen_reference."""

    def rows(cache: torch.Tensor, b: int, end: int) -> torch.Tensor:
        if block_table is None:
            return cache[b if batch_idx is None else batch_idx[b], :end]
        return cache[block_table[b, : -(-end // cache.shape[1])].long()].flatten(0, 1)[:end]

    parts = [
        [rows(cache, b, end)[0 if leftpad is None else leftpad[b] :] for b, end in enumerate(ends)]
        for cache in (k_cache, v_cache)
    ]
    lengths = [len(part) for part in parts[0]]
    k, v = (
        torch.cat(x) if x else cache[:0].flatten(0, 1)
        for x, cache in zip(parts, (k_cache, v_cache), strict=True)
    )
    return k, v, torch.tensor([0, *itertools.accumulate(lengths)], device="cpu")


def append_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ends: Sequence[int],
    *,
    batch_idx: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Append k and v [batch, new, heads_kv, ..] to the cache of kvcache_reference; `ends` are the ends before the call."""
    for x, cache in ((k, k_cache), (v, v_cache)):
        for b, end in enumerate(ends):
            rows = torch.arange(end, end + x.shape[1], device=x.device)
            cache_index = b if batch_idx is None else batch_idx[b]
            if block_table is not None:
                cache_index, rows = block_table[b, rows // cache.shape[1]].long(), rows % cache.shape[1]
            cache[cache_index, rows] = x[b]


def rotary_reference(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotary embedding: rotate pairs of the first rotary_dim columns, in fp32 (Su et al. 2021, RoFormer).

    Args:
        x: [batch, rows, heads, head_dim].
        positions: [batch, rows], indices of rows of cos and sin.
        cos, sin: [positions, rotary_dim / 2].
        interleaved: pairs are the columns (2i, 2i + 1), else (i, i + rotary_dim / 2).
    Returns:
        The rotated x, in the dtype of x. A row at a position outside the table is not rotated.
    """
    if not cos.shape[0]:
        return x.clone()  # each position is outside the table, which has no row to read
    with torch.autocast(x.device.type, enabled=False):  # as in kvcache_reference
        half, last = cos.shape[1], cos.shape[0] - 1
        outside = ((positions < 0) | (positions > last))[:, :, None, None]
        cos, sin = (
            y.float()[positions.clamp(0, last)][:, :, None].masked_fill(outside, fill)
            for y, fill in ((cos, 1), (sin, 0))
        )  # [batch, rows, 1, rotary_dim / 2]
        columns, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
        first, second = (
            columns.unflatten(-1, (half, 2)).unbind(-1) if interleaved else columns.split(half, -1)
        )
        rotated = first * cos - second * sin, first * sin + second * cos
        rotated = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
        return torch.cat((rotated.to(x.dtype), rest), -1)
