"""Method "ulysses": ranks exchange tokens for heads, so that each attends to the whole sequence with its share of the heads.

Before attention, a rank sends each other rank the heads of that rank for its own tokens; after it, the results go back. If there are
fewer key heads than ranks, ranks with query heads of one key head get copies of it, and the owner adds up the gradients in fp32.
Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from tl_attention.distributed.calls import Attend, Given, Gradients, Task
from tl_attention.distributed.group import Exchange, Part, Ranks, by_rows, exchange
from tl_attention.distributed.layout import Layout, Range
from tl_attention.distributed.pieces import Call, Mask, calls_of, spread


class Heads(NamedTuple):
    """Heads of each rank: [start, stop) of the query heads and of the key heads that they read."""

    q: tuple[Range, ...]
    kv: tuple[Range, ...]


def heads_divide(heads: int, heads_kv: int, world: int) -> bool:
    """True if each of `world` ranks can have whole groups of query heads, or an equal part of one group."""
    if not heads or heads % world:
        return False
    share, group = heads // world, heads // heads_kv
    return not share % group or not group % share


def heads_of_ranks(heads: int, heads_kv: int, world: int) -> Heads:
    """Heads of each rank, where heads_divide()."""
    share, group = heads // world, heads // heads_kv
    of_q = tuple((rank * share, (rank + 1) * share) for rank in range(world))
    return Heads(of_q, tuple((start // group, (stop - 1) // group + 1) for start, stop in of_q))


class Side(NamedTuple):
    """A tensor in an exchange: the heads [start, stop) of each rank, and its columns."""

    heads: tuple[Range, ...]
    columns: int

    @property
    def width(self) -> int:
        """Elements of a row with the heads of one rank, of which all ranks have equally many."""
        start, stop = self.heads[0]
        return (stop - start) * self.columns


class Crossing:
    """Exchange of tokens for heads, and back, of tensors with these sides."""

    def __init__(self, layout: Layout, ranks: Ranks, batch: int, sides: list[Side]):
        self._layout, self._ranks, self._batch, self._sides = layout, ranks, batch, sides
        self._width = sum(side.width for side in sides)
        rank, rows = ranks.rank, [layout.rows(peer) for peer in range(ranks.world)]
        others = [peer for peer in range(ranks.world) if peer != rank]
        self._peers, self._rows = others, rows
        unit = batch * self._width
        self._sent = [rows[rank] * unit if peer != rank else 0 for peer in range(ranks.world)]
        self._received = [count * unit if peer != rank else 0 for peer, count in enumerate(rows)]
        # Back, rows are tokens of the whole sequence
        sends = [Part(part.rank, part.start, part.stop) for peer in others for part in layout.of_rank(peer)]
        receives = [Part(peer, 0, rows[rank]) for peer in others if rows[rank]]
        self._back = Exchange(ranks, sends, receives, [batch * side.width for side in sides])

    def to_heads(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Own tokens of all heads [batch, rows, heads, columns] to all tokens of own heads [batch, total, heads of the rank, columns]."""
        batch, width, rank = self._batch, self._width, self._ranks.rank
        flat = [x.transpose(0, 1).flatten(2) for x in tensors]  # [rows, batch, heads * columns]
        shape = self._rows[rank], batch, width
        # Heads of a rank in all tensors, side by side
        sent, first = flat[0].new_empty(sum(self._sent)), 0
        for peer in self._peers:
            size = self._sent[peer]
            torch.cat(self._cut(flat, peer), 2, out=sent[first : first + size].view(shape))
            first += size
        pieces = list(
            exchange(self._ranks, sent, self._sent, self._received).split_with_sizes(self._received)
        )
        pieces[rank] = torch.cat(self._cut(flat, rank), 2)
        pieces = [x.view(rows, batch, width) for x, rows in zip(pieces, self._rows, strict=True)]
        whole = torch.cat(
            [pieces[part.rank][part.row : part.row + part.rows] for part in self._layout.segments]
        )
        found, first = [], 0
        for side in self._sides:
            size = batch, len(whole), side.width // side.columns, side.columns
            found.append(whole.as_strided(size, (width, batch * width, side.columns, 1), first))
            first += side.width
        return found

    def _cut(self, flat: list[torch.Tensor], peer: int) -> list[torch.Tensor]:
        return [
            x[:, :, side.heads[peer][0] * side.columns : side.heads[peer][1] * side.columns]
            for x, side in zip(flat, self._sides, strict=True)
        ]

    def to_tokens(
        self, tensors: list[torch.Tensor], outs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Inverse of to_heads, in new memory or in `outs`; it adds up the copies of heads that several ranks have."""
        rank, rows, batch = self._ranks.rank, self._rows[self._ranks.rank], self._batch
        flat = [by_rows(x) for x in tensors]
        arrived = self._back.run(*flat)
        segments, found = self._layout.of_rank(rank), []
        outs = [None] * len(tensors) if outs is None else outs
        for x, parts, side, out in zip(flat, arrived, self._sides, outs, strict=True):
            width = batch * side.width
            own = [x[part.start * width : part.stop * width] for part in segments]
            if not own:
                found.append(x.new_empty(batch, 0, side.heads[-1][1], side.columns))
                continue
            parts.insert(rank, own[0] if len(own) == 1 else torch.cat(own))
            heads = side.width // side.columns
            by_tokens = [part.view(rows, batch, heads, side.columns).transpose(0, 1) for part in parts]
            joined = torch.cat(by_tokens, 2, out=out)
            if (count := side.heads[-1][1]) != joined.shape[2]:
                joined = joined.unflatten(2, (count, -1)).sum(3, dtype=torch.float32).to(joined.dtype)
            found.append(joined)
        return found


class Ulysses:
    """The method for one task, on tensors of these sizes.

    Args:
        q, k, v: [batch, rows, heads, columns] of the shard, for their metadata.
    """

    needs_out = False  # the backward has out of its own heads

    def __init__(self, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        layout, mask, ranks, scores, self._returns_lse = task
        self._sizes = len(q), layout.total
        heads, batch = heads_of_ranks(q.shape[2], k.shape[2], ranks.world), len(q)
        self._heads = slice(*heads.q[ranks.rank])
        qkv = [Side(heads.q, q.shape[3]), Side(heads.kv, k.shape[3]), Side(heads.kv, v.shape[3])]
        self._qkv = Crossing(layout, ranks, batch, qkv)
        self._out = Crossing(layout, ranks, batch, [Side(heads.q, v.shape[3])])
        self._lse = Crossing(layout, ranks, batch, [Side(heads.q, 1)])
        self._folds = bool(scores.dropout_p)
        if self._folds:
            scores = scores._replace(packed=True)
            calls = [_call_with_dropout(mask, batch, ranks)]
        else:
            pieces = mask.pieces((0, layout.total), (0, layout.total))
            calls = calls_of(pieces, mask.window)
        self._attends = [Attend(call, scores, q) for call in calls if layout.total]

    def _given(self, given: Given) -> Given:
        """Options of the own heads."""
        slopes, sink, state = given
        slopes = None if slopes is None else slopes[..., self._heads].contiguous()
        return Given(slopes, None if sink is None else sink[self._heads].contiguous(), state)

    def _folded(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, total, ...] as one packed sequence [1, batch * total, ...]; without dropout, as it is."""
        return x.reshape(1, -1, *x.shape[2:]) if self._folds else x

    def _unfolded(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of _folded."""
        return x.unflatten(1, self._sizes)[0] if self._folds else x

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Given, out: torch.Tensor
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Write out; return (lse, tensors for the backward)."""
        q, k, v = (self._folded(x) for x in self._qkv.to_heads([q, k, v]))
        own = self._given(given)
        found, lse = (
            q.new_empty(*q.shape[:3], v.shape[3]),
            q.new_empty(len(q), q.shape[2], q.shape[1]).float(),
        )
        for attend in self._attends:
            found, lse = attend.forward(q, k, v, own)
        saved = [q, k, v, found, lse]
        self._out.to_tokens([self._unfolded(found)], [out])
        if not self._returns_lse:
            return None, saved
        (lse,) = self._lse.to_tokens([self._unfolded(lse.mT)[..., None]])
        return lse[..., 0].mT.clone(memory_format=torch.contiguous_format), saved

    def backward(
        self,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        _: None,
        saved: list[torch.Tensor],
        given: Given,
    ) -> Gradients:
        """(dq, dk, dv, dsink) of the shard; dsink of the own heads and all queries."""
        q, k, v, out, lse = saved
        if dout is not None:
            (dout,) = map(self._folded, self._out.to_heads([dout]))
        if dlse is not None:
            (dlse,) = map(self._folded, self._lse.to_heads([dlse.mT[..., None]]))
            dlse = dlse[..., 0].mT
        dout = torch.zeros_like(out) if dout is None else dout
        grads, dsink = [torch.zeros_like(x) for x in (q, k, v)], None
        for attend in self._attends:
            *grads, dsink = attend.backward(dout, q, k, v, out, lse, dlse, self._given(given))
        grads = self._qkv.to_tokens([self._unfolded(x) for x in grads])
        if given.sink is None:
            return *grads, None
        of_all = torch.zeros_like(given.sink)
        if dsink is not None:
            of_all[self._heads] = dsink
        return *grads, of_all


def _call_with_dropout(mask: Mask, batch: int, ranks: Ranks) -> Call:
    """The call on all sequences, one after the other, whose dropout masks are those of one GPU.

    A mask depends on sequence * heads + head. One GPU has world * heads of this rank: sequence i and head h of this rank are sequence
    i * world + rank here, among empty ones.
    """
    lengths = [stop - start for start, stop in pairwise(mask.documents)] * batch
    count = len(lengths) * ranks.world
    numbers = range(ranks.rank, count, ranks.world)
    all_lengths, rows = spread(count, numbers, lengths), (0, sum(lengths))
    documents = tuple(number // ranks.world for number in range(count))
    return Call(rows, rows, mask.window, all_lengths, all_lengths, documents)
