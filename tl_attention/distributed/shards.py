"""Helpers for the shards of a sequence: cutting, joining, positions and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch

from tl_attention.checks.common import (
    check_window,
    describe,
    expect_bool,
    expect_local,
    expect_tensor,
    holds_ints,
    is_int,
)
from tl_attention.distributed.group import Exchange, Group, Part, ranks_of
from tl_attention.distributed.layout import (
    NAMES,
    Layout,
    LayoutName,
    balanced_layout,
    document_positions,
    named_layout,
    shard_documents,
)
from tl_attention.distributed.pieces import CAUSAL
from tl_attention.problem.options import as_stored, canonical_window
from tl_attention.tracing.captures import has_values

Lengths = torch.Tensor | Sequence[int] | None


def documents_of(cu_seqlens: Lengths) -> tuple[int, ...] | None:
    """Checked cu_seqlens as a tuple; None for None.

    Raises:
        TypeError, ValueError: not integers on the CPU that start at 0 and do not decrease.
    """
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor):
        expect_tensor("cu_seqlens", cu_seqlens)
        expect_local("cu_seqlens", cu_seqlens)
        if cu_seqlens.device.type != "cpu" or not has_values(cu_seqlens):
            unread = ", which cannot be read here" if cu_seqlens.device.type == "cpu" else ""
            raise ValueError(
                "cu_seqlens: expected a tensor on the CPU, as its values decide what ranks exchange, got"
                f" {describe(cu_seqlens)}{unread}; keep a copy on the CPU, or pass a list"
            )
        if cu_seqlens.ndim != 1 or not holds_ints(cu_seqlens):
            raise TypeError(f"cu_seqlens: expected integers [documents + 1], got {describe(cu_seqlens)}")
        cu_seqlens = cu_seqlens.tolist()
    try:
        found = tuple(cu_seqlens)
    except TypeError:
        raise TypeError(
            f"cu_seqlens: expected a tensor or a list of ints, got {describe(cu_seqlens)}"
        ) from None
    if not all(type(x) is int for x in found):
        raise TypeError(f"cu_seqlens: expected ints, got {describe(found)}")
    if len(found) < 2 or found[0] or any(b < a for a, b in pairwise(found)):
        raise ValueError(
            f"cu_seqlens: expected at least two numbers that start at 0 and do not decrease, got {found[:8]}"
        )
    return found


def layout_of(layout: LayoutName | Layout, total: int, world: int) -> Layout:
    """Layout by name, or the given one after a check that it fits these tokens and ranks."""
    if isinstance(layout, Layout):
        if layout.world != world or layout.total != total:
            raise ValueError(
                f"layout: expected one of {total} tokens on {world} ranks, got one of {layout.total} on {layout.world}; make one for"
                " this sequence with make_layout"
            )
        return layout
    if not isinstance(layout, str) or layout not in NAMES:
        raise ValueError(
            f"layout: expected {' or '.join(map(repr, NAMES))} or the result of make_layout, got {describe(layout)}"
        )
    return named_layout(layout, total, world)


def _layout_for(
    group: Group, seqlen: int | None, cu_seqlens: Lengths, layout: str | Layout
) -> tuple[Layout, tuple, int]:
    """(layout, documents, rank) of the arguments of a helper."""
    ranks, documents = ranks_of(group), documents_of(cu_seqlens)
    if documents is None:
        if seqlen is None and isinstance(layout, Layout):
            seqlen = layout.total
        if not is_int(seqlen) or seqlen < 0:
            raise ValueError(
                f"seqlen: expected the tokens of the whole sequence, or cu_seqlens, got {describe(seqlen)}"
            )
        documents = (0, seqlen)
    elif seqlen not in (None, documents[-1]):
        raise ValueError(f"seqlen: expected None or the end of cu_seqlens, {documents[-1]}, got {seqlen}")
    return layout_of(layout, documents[-1], ranks.world), documents, ranks.rank


def make_layout(
    group: Group = None,
    *,
    seqlen: int | None = None,
    cu_seqlens: Lengths = None,
    layout: LayoutName | Literal["balanced"] = "balanced",
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
) -> Layout:
    """Layout of a sequence, to be passed to the other functions.

    Args:
        group: see attention().
        seqlen: tokens of the whole sequence; or cu_seqlens: cumulative lengths of its documents, on the CPU.
        layout: "balanced": ranks have equally many tokens, up to 1, and nearly equal work under the mask, whatever the documents are;
            made on the CPU, in about a millisecond per rank and 100,000 tokens. "zigzag": chunks r and 2 * world - 1 - r of 2 * world.
            "contiguous": chunk r of world.
        causal, window_size: the mask that work is balanced for.
    """
    expect_bool("causal", causal)
    check_window(window_size)
    if not (isinstance(layout, str) and layout == "balanced"):
        return _layout_for(group, seqlen, cu_seqlens, layout)[0]
    _, documents, _ = _layout_for(group, seqlen, cu_seqlens, "contiguous")
    is_causal, window = canonical_window(causal, window_size)
    return balanced_layout(documents, ranks_of(group).world, CAUSAL if is_causal else window)


def _check_dim(x: torch.Tensor, dim: int) -> None:
    if not x.ndim:
        raise ValueError(f"x: expected at least one dimension, got {describe(x)}")
    if not is_int(dim) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim: expected a dimension of x, {-x.ndim} to {x.ndim - 1}, got {describe(dim)}")


def shard(
    x: torch.Tensor,
    group: Group = None,
    *,
    dim: int = 0,
    cu_seqlens: Lengths = None,
    layout: LayoutName | Layout = "zigzag",
) -> torch.Tensor:
    """Shard of a tensor that all ranks have whole: the tokens of this rank, on any device; differentiable.

    Args:
        x: all tokens in dimension `dim`.
        group, cu_seqlens, layout: see attention(); cu_seqlens is only checked, as named layouts do not depend on documents.
    """
    expect_tensor("x", x)
    _check_dim(x, dim)
    found, _, rank = _layout_for(group, x.shape[dim], cu_seqlens, layout)
    parts = [x.narrow(dim, start, stop - start) for start, stop in found.ranges[rank]]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


@torch.no_grad()
def unshard(
    x: torch.Tensor,
    group: Group = None,
    *,
    dim: int = 0,
    seqlen: int | None = None,
    layout: LayoutName | Layout = "zigzag",
) -> torch.Tensor:
    """Tensor of all tokens from the shards of all ranks, which must call this function together. Not differentiable.

    Args:
        x: tokens of this rank in dimension `dim`; the other dimensions are the same on all ranks.
        group, layout: see attention().
        seqlen: tokens of the whole sequence; None: world size times those of x.
    """
    expect_tensor("x", x)
    _check_dim(x, dim)
    ranks = ranks_of(group)
    if seqlen is None and not isinstance(layout, Layout):
        seqlen = x.shape[dim] * ranks.world
    found, *_ = _layout_for(group, seqlen, None, layout)
    if x.shape[dim] != found.rows(ranks.rank):
        raise ValueError(
            f"x: expected the {found.rows(ranks.rank)} tokens of rank {ranks.rank} in dimension {dim}, got {x.shape[dim]}; pass seqlen"
            " for shards of unequal length"
        )
    own = as_stored(x).movedim(dim, 0).contiguous()
    others = [peer for peer in range(ranks.world) if peer != ranks.rank]
    if not others:
        return x
    mine, shape = len(own), own.shape[1:]
    width = own.element_size() * math.prod(shape)  # bytes: gloo and NCCL lack dtypes, each of them others
    sends = [Part(peer, 0, mine) for peer in others if mine]
    receives = [Part(peer, 0, found.rows(peer)) for peer in others if found.rows(peer)]
    (arrived,) = Exchange(ranks, sends, receives, [width]).run(own.view(-1).view(torch.uint8))
    of_ranks = {
        part.peer: x.view(own.dtype).view(part.stop, *shape)
        for part, x in zip(receives, arrived, strict=True)
    }
    of_ranks[ranks.rank] = own
    parts = [of_ranks[part.rank][part.row : part.row + part.rows] for part in found.segments]
    return (torch.cat(parts) if parts else own).movedim(0, dim)


def positions(
    group: Group = None,
    *,
    seqlen: int | None = None,
    cu_seqlens: Lengths = None,
    layout: LayoutName | Layout = "zigzag",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Positions of the tokens of this rank in their sequence or document, int64 [rows], for rotary embeddings.

    Args:
        group, cu_seqlens, layout: see attention().
        seqlen: tokens of the whole sequence, without cu_seqlens.
    """
    found, documents, rank = _layout_for(group, seqlen, cu_seqlens, layout)
    return document_positions(found, rank, documents).to(device)


def shard_cu_seqlens(
    cu_seqlens: torch.Tensor | Sequence[int],
    group: Group = None,
    *,
    layout: LayoutName | Layout = "zigzag",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Cumulative lengths of the parts of documents that this rank holds, int32 [parts + 1]; documents without a token here are left out.

    Args:
        cu_seqlens, group, layout: see attention().
    """
    if cu_seqlens is None:
        raise TypeError("cu_seqlens: expected a tensor or a list of ints, got None")
    found, documents, rank = _layout_for(group, None, cu_seqlens, layout)
    return torch.tensor(shard_documents(found, rank, documents), dtype=torch.int32, device=device)
