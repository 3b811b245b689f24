"""Method "ring": at step t a rank attends to the shard of the t-th rank before it, while the next shard is on its way.

A rank holds two shards of keys at a time, whatever the number of ranks. Partial results are merged in fp32 by their log-sum-exps. In the
backward the gradients of a shard's keys go home to its owner while the next shard is attended, and are added up there in fp32, in the
order of the steps. Keys that no query of a rank sees are not sent to it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.distributed import calls
from tl_attention.distributed.calls import Scores
from tl_attention.distributed.group import Exchange, Part, Ranks
from tl_attention.distributed.layout import Layout, Range
from tl_attention.distributed.pieces import Call, Mask, calls_of


@dataclass(frozen=True)
class Step:
    """Keys of one rank that another rank attends to.

    Args:
        source: rank that owns the keys.
        rows: rows of its shard.
        calls: on these rows.
        target: rank that needs keys of this rank at the same step.
        target_rows: rows of this rank's shard that it needs.
    """

    source: int
    rows: Range
    calls: tuple[Call, ...]
    target: int
    target_rows: Range


def _needed(layout: Layout, rank: int, source: int, mask: Mask) -> tuple[Range, tuple[Call, ...]]:
    """Rows of the shard of `source` that the queries of a rank see, and the calls on them."""
    pieces = [
        piece.moved(queries.row - queries.start, keys.row - keys.start)
        for queries in layout.of_rank(rank)
        for keys in layout.of_rank(source)
        for piece in mask.pieces((queries.start, queries.stop), (keys.start, keys.stop))
    ]
    if not pieces:
        return (0, 0), ()
    first = min(piece.k[0] for piece in pieces)
    last = max(piece.k[1] for piece in pieces)
    return (first, last), tuple(calls_of(piece.moved(0, -first) for piece in pieces))


@functools.lru_cache(maxsize=64)
def ring_plan(layout: Layout, rank: int, mask: Mask) -> tuple[Step, ...]:
    """The steps of a rank; the first has its own keys."""
    world = layout.world
    steps = []
    for shift in range(world):
        source, target = (rank - shift) % world, (rank + shift) % world
        target_rows, _ = _needed(layout, target, rank, mask)
        steps.append(Step(source, *_needed(layout, rank, source, mask), target, target_rows))
    return tuple(steps)


class _Shards:
    """Keys and values of the steps, [rows, batch, heads, columns]; the next step's are on their way."""

    def __init__(self, steps: tuple[Step, ...], ranks: Ranks, k: torch.Tensor, v: torch.Tensor):
        self._steps, self._ranks = steps, ranks
        self._own = [x.transpose(0, 1).contiguous() for x in (k, v)]
        self._arriving: Exchange | None = None

    def of(self, number: int) -> list[torch.Tensor]:
        """Keys and values [batch, rows, heads, columns] of a step. To be called once per step, in their order."""
        first, last = self._steps[number].rows
        tensors = [x[first:last] for x in self._own]
        if number:
            arrived = self._arriving.wait()
            tensors = [parts[0] if parts else x[:0] for x, parts in zip(self._own, arrived, strict=True)]
        if number + 1 < len(self._steps):
            step = self._steps[number + 1]
            rows = step.rows[1] - step.rows[0]
            self._arriving = Exchange(
                self._ranks, _part(step.target, *step.target_rows), _part(step.source, 0, rows), self._own
            )
        return [x.transpose(0, 1) for x in tensors]


def _part(peer: int, start: int, stop: int) -> list[Part]:
    return [Part(peer, start, stop)] if start < stop else []


class _States:
    """Out [batch, rows, heads, columns] and lse [batch, heads, rows] over the keys so far, both fp32."""

    def __init__(self, q: torch.Tensor, columns: int):
        batch, rows, heads, _ = q.shape
        self.out = q.new_zeros(batch, rows, heads, columns, dtype=torch.float32)
        self.lse = q.new_full((batch, heads, rows), -math.inf, dtype=torch.float32)
        self._touched: list[Range] = []

    def merge(self, call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the keys of a call, whose result is out and lse, to its queries.

        lse = log(exp(lse_1) + exp(lse_2))    out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2
        """
        start, stop = call.q
        own_out, own_lse = calls.queries(self.out, call), self.lse[:, :, start:stop]
        if all(stop <= low or high <= start for low, high in self._touched):
            own_out.copy_(out)
            own_lse.copy_(lse)
        else:
            total = torch.logaddexp(own_lse, lse)
            finite = total.masked_fill(total == -math.inf, 0)
            own_out.mul_(torch.exp(own_lse - finite).mT[..., None])
            own_out.addcmul_(out, torch.exp(lse - finite).mT[..., None])
            own_lse.copy_(total)
        self._touched.append(call.q)

    def add_sink(self, sink: torch.Tensor) -> None:
        """Add one more key without value, of these scores [heads], to all queries."""
        total = torch.logaddexp(self.lse, sink.float()[:, None])
        self.out.mul_(torch.exp(self.lse - total).mT[..., None])
        self.lse = total


class _Ring(torch.autograd.Function):
    """Attention of [batch, rows, heads, head_dim] shards."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        scores: Scores,
        steps: tuple[Step, ...],
        ranks: Ranks,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shards, states = _Shards(steps, ranks, k, v), _States(q, v.shape[3])
        for number, step in enumerate(steps):
            tensors = shards.of(number)
            for call in step.calls:
                of_keys = (calls.keys(x, call) for x in tensors)
                states.merge(call, *calls.forward(call, scores, calls.queries(q, call), *of_keys))
        if sink is not None:
            states.add_sink(sink)
        out, lse = states.out.to(q.dtype), states.lse
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.asked = scores, steps, ranks
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        q, k, v, out, lse, sink = ctx.saved_tensors
        scores, steps, ranks = ctx.asked
        dout = torch.zeros_like(out) if dout is None else dout
        shards = _Shards(steps, ranks, k, v)
        totals = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        home: list[tuple[Exchange, Step]] = []
        for number, step in enumerate(steps):
            tensors = shards.of(number)
            parts = [torch.zeros_like(x, dtype=torch.float32) for x in tensors]
            for call in step.calls:
                of_queries = [calls.queries(x, call) for x in (dout, q, out)]
                of_keys = [calls.keys(x, call) for x in tensors]
                of_lse = [None if x is None else x[:, :, call.q[0] : call.q[1]] for x in (lse, dlse)]
                dq, *grads = calls.partial_backward(
                    call, scores, of_queries[0], of_queries[1], *of_keys, of_queries[2], *of_lse
                )
                calls.queries(totals[0], call).add_(dq)
                for part, grad in zip(parts, grads, strict=True):
                    calls.keys(part, call).add_(grad)
            if not number:
                _add(totals[1:], parts, step.rows)
                continue
            rows = step.rows[1] - step.rows[0]
            leaving = [x.to(k.dtype).transpose(0, 1).contiguous() for x in parts]
            home.append((Exchange(ranks, _part(step.source, 0, rows), _part(step.target, *step.target_rows), leaving), step))  # fmt: skip
            if len(home) > 1:
                _arrive(totals[1:], *home.pop(0))
        for one in home:
            _arrive(totals[1:], *one)
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
        dsink = None if sink is None else _sink_gradient(sink, dout, out, lse, dlse)
        return dq, dk, dv, dsink, None, None, None


def _add(totals: list[torch.Tensor], parts: list[torch.Tensor], rows: Range) -> None:
    for total, part in zip(totals, parts, strict=True):
        total[:, rows[0] : rows[1]] += part


def _arrive(totals: list[torch.Tensor], exchange: Exchange, step: Step) -> None:
    """Add the gradients that another rank sent at a step."""
    arrived = [part.transpose(0, 1) for parts in exchange.wait() for part in parts]
    if arrived:
        _add(totals, arrived, step.target_rows)


def _sink_gradient(
    sink: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Gradient of the sink, [heads]: minus the sum of exp(sink - lse) * (rowsum(dout * out) - dlse) over the queries."""
    delta = (dout.float() * out.float()).sum(-1).mT
    delta = delta if dlse is None else delta - dlse
    weights = torch.exp(sink.float()[:, None] - lse)
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    scores: Scores,
    layout: Layout,
    mask: Mask,
    ranks: Ranks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of [batch, rows, heads, head_dim] shards."""
    return _Ring.apply(q, k, v, sink, scores, ring_plan(layout, ranks.rank, mask), ranks)
