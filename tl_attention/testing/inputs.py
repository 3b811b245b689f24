"""Inputs and outputs for tests, tuner and benchmarks: random normal values in the layouts that callers use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tl_attention.testing.shapes import Shape

# bshd, bhsd: stored in that order. packed: slices of one [batch, seqlen, columns of q, k and v] tensor.
LAYOUTS = ("bshd", "bhsd", "packed")

GUARD = 4096  # NaN elements before and after a poisoned output; a multiple of 128 bytes


def make_inputs(
    shape: Shape, dtype: torch.dtype, layout: str = "bshd", seed: int = 0, device: torch.device | str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v as [batch, seqlen, heads, head_dim] views; values depend on the seed, not on the layout."""
    sizes = (
        (shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim),
        (shape.batch, shape.seqlen_k, shape.heads_kv, shape.head_dim),
        (shape.batch, shape.seqlen_k, shape.heads_kv, shape.head_dim_v),
    )
    return arrange(*_normal(sizes, dtype, seed, device), layout)


def make_dout(
    shape: Shape, dtype: torch.dtype, layout: str = "bshd", seed: int = 0, device: torch.device | str = "cuda"
) -> torch.Tensor:
    """Return dout as a [batch, seqlen_q, heads_q, head_dim_v] view, with other values than the inputs of this seed.

    Normal values are multiplied by the number of keys that the query sees. Its probabilities are about one over this number,
    so without the factor the last keys of a causal problem would have gradients too small to compare.

    Args:
        layout: one of LAYOUTS; packed: the middle one of three slices, the others NaN.
    """
    size = (shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim_v)
    (dout,) = _normal([size], dtype, seed + 1_000_003, device)
    dout *= _weights_of_queries(shape, dtype, device)[:, None, None]
    nan = dout.new_full((), math.nan).expand_as(dout)
    return arrange(nan, dout, nan, layout)[1]


def make_dlse(
    shape: Shape, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cuda"
) -> torch.Tensor:
    """Return dlse [batch, heads_q, seqlen_q], fp32, of the magnitude of make_dout's values."""
    size = (shape.batch, shape.heads_q, shape.seqlen_q)
    (dlse,) = _normal([size], torch.float32, seed + 2_000_003, device)
    return dlse * _weights_of_queries(shape, dtype, device)


def _weights_of_queries(shape: Shape, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Factors [seqlen_q], proportional to the number of keys that a query sees (at least 1), small enough for fp16 sums."""
    peak, keys = 8 if dtype == torch.float16 else 64, max(shape.seqlen_k, 1)
    first = shape.seqlen_k - shape.seqlen_q + 1 if shape.causal else keys
    seen = torch.arange(first, first + shape.seqlen_q, device=device).clamp(1, keys)
    return seen * (peak / keys)


def _normal(
    sizes: Iterable[tuple[int, ...]], dtype: torch.dtype, seed: int, device: torch.device | str
) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=dtype, device=device) for size in sizes]


def arrange(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, ...]:
    """Copy [batch, seqlen, heads, head_dim] tensors to one of LAYOUTS; memory outside the slices is NaN."""
    if layout == "bshd":
        return q.contiguous(), k.contiguous(), v.contiguous()
    if layout == "bhsd":
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout != "packed":
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    widths = [x.shape[2] * x.shape[3] for x in (q, k, v)]
    packed = q.new_full((q.shape[0], max(q.shape[1], k.shape[1]), sum(widths)), math.nan)
    slices = packed.split(widths, dim=-1)
    return tuple(
        part[:, : x.shape[1]].unflatten(-1, x.shape[2:]).copy_(x)
        for part, x in zip(slices, (q, k, v), strict=True)
    )


def poisoned(
    *shape: int, dtype: torch.dtype, layout: str = "bshd", device: torch.device | str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (whole, view): a dense output filled with NaN, and the 1-D memory that has GUARD more NaN on either side.

    Args:
        shape: shape of the view: [batch, seqlen, heads, head_dim], or any other for an LSE.
        layout: bshd (stored in the order of shape) or bhsd (dimensions 1 and 2 swapped in memory).
    """
    whole = torch.full((math.prod(shape) + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    dense = whole[GUARD : whole.numel() - GUARD]
    if layout == "bshd":
        return whole, dense.view(shape)
    if layout != "bhsd":
        raise ValueError(f"layout: expected bshd or bhsd, got {layout!r}")
    return whole, dense.view(shape[0], shape[2], shape[1], *shape[3:]).transpose(1, 2)


def guard_is_untouched(whole: torch.Tensor, view: torch.Tensor) -> bool:
    """True if nothing was written before or after the view, both as returned by `poisoned`."""
    start, stop = view.storage_offset(), view.storage_offset() + view.numel()
    return bool(whole[:start].isnan().all() and whole[stop:].isnan().all())
