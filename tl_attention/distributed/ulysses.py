"""Method "ulysses": ranks exchange tokens for heads, so that each attends to the whole sequence with its share of the heads.

Before attention, a rank sends each other rank the heads of that rank for its own tokens; after it, the results go back. Where key heads
are fewer than ranks, ranks with query heads of one key head get copies of it, and the owner adds up the gradients in fp32.
Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tl_attention.distributed.group import Ranks
from tl_attention.distributed.layout import Layout, Range


class Heads(NamedTuple):
    """Heads of each rank: [start, stop) of the query heads and of the key heads that they read."""

    q: tuple[Range, ...]
    kv: tuple[Range, ...]


def heads_divide(heads: int, heads_kv: int, world: int) -> bool:
    """True if each of `world` ranks can have whole groups of query heads, or a part of one group."""
    if not heads or heads % world:
        return False
    share, group = heads // world, heads // heads_kv
    return not share % group or not group % share


def heads_of_ranks(heads: int, heads_kv: int, world: int) -> Heads:
    """Heads of each rank, where heads_divide()."""
    share, group = heads // world, heads // heads_kv
    of_q = tuple((rank * share, (rank + 1) * share) for rank in range(world))
    return Heads(of_q, tuple((start // group, (stop - 1) // group + 1) for start, stop in of_q))


def _exchanged(
    ranks: Ranks, outgoing: list[list[torch.Tensor]], shapes: list[list[tuple[int, ...]]]
) -> list[list[torch.Tensor]]:
    """Tensors from each rank, of these shapes, for tensors to each rank; both lists are empty for this one."""
    sizes = [sum(x.numel() for x in tensors) for tensors in outgoing]
    first = next(x for tensors in outgoing for x in tensors)
    sent = first.new_empty(sum(sizes))
    parts = sent.split([x.numel() for tensors in outgoing for x in tensors])
    for part, x in zip(parts, itertools.chain(*outgoing), strict=True):
        part.view(x.shape).copy_(x)
    counts = [[math.prod(shape) for shape in of_peer] for of_peer in shapes]
    arrived = first.new_empty(sum(map(sum, counts)))
    dist.all_to_all_single(arrived, sent, [*map(sum, counts)], sizes, group=ranks.group)
    found = iter(arrived.split([*itertools.chain(*counts)]))
    return [[next(found).view(shape) for shape in of_peer] for of_peer in shapes]


def _to_heads(
    tensors: list[torch.Tensor], heads: list[tuple[Range, ...]], layout: Layout, ranks: Ranks
) -> list[torch.Tensor]:
    """Own tokens of all heads [batch, rows, heads, columns] to all tokens of own heads [batch, total, heads of the rank, columns]."""
    by_rows = [x.transpose(0, 1) for x in tensors]  # [rows, batch, heads, columns]
    peers = range(ranks.world)
    outgoing = [
        [x[:, :, slice(*of_ranks[peer])] for x, of_ranks in zip(by_rows, heads, strict=True)]
        if peer != ranks.rank
        else []
        for peer in peers
    ]
    own = [slice(*of_ranks[ranks.rank]) for of_ranks in heads]
    shapes = [
        [
            (layout.rows(peer), x.shape[1], mine.stop - mine.start, x.shape[3])
            for x, mine in zip(by_rows, own, strict=True)
        ]
        if peer != ranks.rank
        else []
        for peer in peers
    ]
    arrived = _exchanged(ranks, outgoing, shapes)
    arrived[ranks.rank] = [x[:, :, mine] for x, mine in zip(by_rows, own, strict=True)]
    return [
        torch.cat([arrived[x.rank][number][x.row : x.row + x.rows] for x in layout.segments]).transpose(0, 1)
        for number in range(len(tensors))
    ]


def _to_tokens(
    tensors: list[torch.Tensor],
    heads: list[tuple[Range, ...]],
    counts: list[int],
    layout: Layout,
    ranks: Ranks,
) -> list[torch.Tensor]:
    """Inverse of _to_heads, for tensors with `counts` heads; it adds up the copies of heads that several ranks have."""
    by_tokens = [x.transpose(0, 1) for x in tensors]  # [total, batch, heads of the rank, columns]
    outgoing = [
        [x[part.start : part.stop] for x in by_tokens for part in layout.of_rank(peer)]
        if peer != ranks.rank
        else []
        for peer in range(ranks.world)
    ]
    rows = layout.rows(ranks.rank)
    shapes = [
        [(rows, x.shape[1], last - first, x.shape[3]) for x, (first, last) in of_peer]
        if peer != ranks.rank
        else []
        for peer in range(ranks.world)
        for of_peer in [[(x, of_ranks[peer]) for x, of_ranks in zip(by_tokens, heads, strict=True)]]
    ]
    arrived = _exchanged(ranks, outgoing, shapes)
    own = layout.of_rank(ranks.rank)
    arrived[ranks.rank] = [
        torch.cat([x[:0], *(x[part.start : part.stop] for part in own)]) for x in by_tokens
    ]
    found = []
    for number, (of_ranks, count) in enumerate(zip(heads, counts, strict=True)):
        parts = [of_peer[number] for of_peer in arrived]
        if sum(last - first for first, last in of_ranks) == count:
            found.append(torch.cat(parts, 2).transpose(0, 1))
            continue
        total = parts[0].new_zeros(rows, parts[0].shape[1], count, parts[0].shape[3], dtype=torch.float32)
        for part, (first, last) in zip(parts, of_ranks, strict=True):
            total[:, :, first:last] += part
        found.append(total.to(parts[0].dtype).transpose(0, 1))
    return found


class _ToHeads(torch.autograd.Function):
    """_to_heads of q, k and v in one exchange."""

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, ranks: Ranks, heads: Heads, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.asked = layout, ranks, [heads.q, heads.kv, heads.kv], [x.shape[2] for x in tensors]
        return tuple(_to_heads(list(tensors), ctx.asked[2], layout, ranks))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        layout, ranks, heads, counts = ctx.asked
        return None, None, None, *_to_tokens(list(grads), heads, counts, layout, ranks)


class _ToTokens(torch.autograd.Function):
    """_to_tokens of a tensor with the heads of q."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, ranks: Ranks, heads: Heads, x: torch.Tensor) -> torch.Tensor:
        ctx.asked = layout, ranks, heads
        return _to_tokens([x], [heads.q], [heads.q[-1][1]], layout, ranks)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        layout, ranks, heads = ctx.asked
        return None, None, None, _to_heads([grad], [heads.q], layout, ranks)[0]


def to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads, layout: Layout, ranks: Ranks
) -> tuple[torch.Tensor, ...]:
    """q, k, v [batch, rows, heads, columns] of the shard as tensors of the whole sequence with the heads of this rank."""
    return _ToHeads.apply(layout, ranks, heads, q, k, v)


def to_tokens(x: torch.Tensor, heads: Heads, layout: Layout, ranks: Ranks) -> torch.Tensor:
    """x [batch, total, heads of this rank, columns] as [batch, rows, heads, columns] of the shard."""
    return _ToTokens.apply(layout, ranks, heads, x)
