"""Method "ulysses": ranks exchange tokens for heads, so that each attends to the whole sequence with its share of the heads.

Before attention, a rank sends each other rank the heads of that rank for its own tokens; after it, the results go back. Where key heads
are fewer than ranks, ranks with query heads of one key head get copies of it, and the owner adds up the gradients in fp32.
Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tl_attention.distributed.group import Exchange, Message, Ranks
from tl_attention.distributed.layout import Layout, Range, Segment


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


def _rows(segment: Segment) -> slice:
    return slice(segment.row, segment.row + segment.rows)


def _tokens(segment: Segment) -> slice:
    return slice(segment.start, segment.stop)


def _to_heads(
    tensors: list[torch.Tensor], heads: list[tuple[Range, ...]], layout: Layout, ranks: Ranks
) -> list[torch.Tensor]:
    """Own tokens of all heads [batch, rows, heads, columns] to all tokens of own heads [batch, total, heads of the rank, columns]."""
    sends, receives, found = [], [], []
    own = layout.of_rank(ranks.rank)
    for x, ranges in zip(tensors, heads, strict=True):
        first, last = ranges[ranks.rank]
        whole = x.new_empty(layout.total, len(x), last - first, x.shape[3])
        by_rows = x.transpose(0, 1)
        for segment in own:
            whole[_tokens(segment)] = by_rows[_rows(segment), :, first:last]
        for peer, (start, stop) in enumerate(ranges):
            if peer != ranks.rank:
                part = by_rows[:, :, start:stop].contiguous()
                sends += [Message(peer, part[_rows(segment)]) for segment in own]
                receives += [Message(peer, whole[_tokens(segment)]) for segment in layout.of_rank(peer)]
        found.append(whole.transpose(0, 1))
    Exchange(ranks, sends, receives).wait()
    return found


def _to_tokens(
    tensors: list[torch.Tensor],
    heads: list[tuple[Range, ...]],
    counts: list[int],
    layout: Layout,
    ranks: Ranks,
) -> list[torch.Tensor]:
    """Inverse of _to_heads, for tensors with `counts` heads; it adds up the copies of heads that several ranks have."""
    sends, receives, found = [], [], []
    own, rows = layout.of_rank(ranks.rank), layout.rows(ranks.rank)
    arriving = []
    for x, ranges in zip(tensors, heads, strict=True):
        whole = x.transpose(0, 1).contiguous()
        parts = []
        for peer, (start, stop) in enumerate(ranges):
            part = whole.new_empty(rows, len(x), stop - start, x.shape[3])
            parts.append(part)
            if peer == ranks.rank:
                for segment in own:
                    part[_rows(segment)] = whole[_tokens(segment)]
            else:
                sends += [Message(peer, whole[_tokens(segment)]) for segment in layout.of_rank(peer)]
                receives += [Message(peer, part[_rows(segment)]) for segment in own]
        arriving.append(parts)
    Exchange(ranks, sends, receives).wait()
    for parts, ranges, count in zip(arriving, heads, counts, strict=True):
        copies = sum(stop - start for start, stop in ranges) > count
        if not copies:
            found.append(torch.cat(parts, 2).transpose(0, 1))
            continue
        total = parts[0].new_zeros(rows, parts[0].shape[1], count, parts[0].shape[3], dtype=torch.float32)
        for part, (start, stop) in zip(parts, ranges, strict=True):
            total[:, :, start:stop] += part
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
