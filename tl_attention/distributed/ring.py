"""Method "ring": at step t a rank attends to the shard of the t-th rank before it, while the next shard is on its way.

A rank holds two shards of keys at a time, whatever the number of ranks. Each call merges its result with those before it, in fp32 in the
kernel. With max_logits the kernel does not merge, and PyTorch does. In the backward the gradients of a shard's keys return to its owner in
fp32 while the next shard is attended, the last ones during calls on own keys. The owner adds them up in a fixed order and rounds the sums
once. Keys that no query of a rank sees are not sent to it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from tl_attention.distributed.calls import LN2, Attend, Given, Gradients, Task
from tl_attention.distributed.group import Arriving, Exchange, Part, Rows, by_rows
from tl_attention.distributed.layout import Layout, Range
from tl_attention.distributed.pieces import NOTHING, Call, Mask, Needs, calls_of


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


def _needed(
    layout: Layout, rank: int, source: int, mask: Mask, needs: Needs = NOTHING
) -> tuple[Range, tuple[Call, ...]]:
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
    return (first, last), tuple(calls_of((piece.moved(0, -first) for piece in pieces), mask.window, needs))


@functools.lru_cache(maxsize=64)
def ring_plan(layout: Layout, rank: int, mask: Mask, needs: Needs = NOTHING) -> tuple[Step, ...]:
    """The steps of a rank; the first has its own keys."""
    world = layout.world
    steps = []
    for shift in range(world):
        source, target = (rank - shift) % world, (rank + shift) % world
        target_rows, _ = _needed(layout, target, rank, mask)
        steps.append(Step(source, *_needed(layout, rank, source, mask, needs), target, target_rows))
    return tuple(steps)


def _part(peer: int, start: int, stop: int) -> list[Part]:
    return [Part(peer, start, stop)] if start < stop else []


class Turn(NamedTuple):
    """Range of queries of a call.

    Args:
        rows: their rows in the shard. own_rows: their rows in the call's result.
        is_first: no earlier call has them.
    """

    rows: slice
    own_rows: slice
    is_first: bool


class Placed(NamedTuple):
    """A call, and the ranges of its queries that earlier calls have or have not."""

    attend: Attend
    turns: tuple[Turn, ...]

    @property
    def is_first(self) -> bool:
        """True if no earlier call has any of its queries."""
        return all(turn.is_first for turn in self.turns)


def _placed(groups: list[list[Attend]]) -> list[list[Placed]]:
    """Groups of calls in the order of their launches."""
    calls = [attend.rows for group in groups for attend in group]
    bounds = sorted({bound for rows in calls for bound in (rows.start, rows.stop)})
    seen: set[int] = set()  # starts of the ranges between bounds that earlier calls have

    def placed(attend: Attend) -> Placed:
        turns: list[Turn] = []
        first = attend.rows.start
        for start, stop in pairwise(bounds):
            if not first <= start < attend.rows.stop:
                continue
            is_first = start not in seen
            seen.add(start)
            if turns and turns[-1].is_first == is_first:  # the rows before it, too
                start = turns.pop().rows.start
            turns.append(Turn(slice(start, stop), slice(start - first, stop - first), is_first))
        return Placed(attend, tuple(turns))

    return [[placed(attend) for attend in group] for group in groups]


class _Shards:
    """Keys and values of the steps; the next step's are on their way."""

    def __init__(self, ring: Ring, k: torch.Tensor, v: torch.Tensor):
        self._ring, self._own, self._flat = ring, [k, v], [by_rows(x) for x in (k, v)]
        self._arriving: Arriving | None = None

    def of(self, number: int) -> list[torch.Tensor]:
        """Keys and values [batch, rows, heads, columns] of a step. Call it once per step, in order."""
        ring, tensors = self._ring, self._own
        if number:
            count, arrived = ring.counts[number], self._arriving.wait()
            parts = [of_one[0] for of_one in arrived] if count else [x[:0] for x in self._flat]
            tensors = [rows.view(part, count) for rows, part in zip(ring.rows, parts, strict=True)]
        if number + 1 < len(ring.counts):
            self._arriving = ring.there[number].start(*self._flat)
        return tensors


class Ring:
    """The method for one task, on tensors of these sizes.

    Args:
        q, k, v: [batch, rows, heads, columns] of the shard, for their metadata.
    """

    rows: list[Rows]
    counts: list[int]
    there: list[Exchange]

    def __init__(self, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        layout, mask, ranks, scores, self._returns_lse, self._returns_max_logits = task
        steps = ring_plan(layout, ranks.rank, mask, scores.needs)
        self._steps = steps
        self.rows = [Rows.of(x) for x in (k, v)]
        self.counts = [step.rows[1] - step.rows[0] for step in steps]
        self.there, self._back = [], []
        for step, count in zip(steps[1:], self.counts[1:], strict=True):
            mine, theirs = _part(step.target, *step.target_rows), _part(step.source, 0, count)
            widths = [rows.width for rows in self.rows]
            self.there.append(Exchange(ranks, mine, theirs, widths))
            self._back.append(Exchange(ranks, theirs, mine, widths))
        self._lse = len(q), q.shape[2], q.shape[1]
        own, *others = [[Attend(call, scores, q) for call in step.calls] for step in steps]
        # The backward has calls on own keys while the first keys arrive, and while the last gradients leave. The call on the most own
        # keys comes first: its gradients are the sums that others are added to
        half = (len(own) + 1) // 2
        self._forward = [own, *others]
        self._backward = _placed([own[::-1][:half], *others, own[::-1][half:]])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Given, out: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
        """Write out; return (lse, max_logits, tensors for the backward)."""
        shards = _Shards(self, k, v)
        total = torch.empty_like(out, dtype=torch.float32)
        lse = q.new_full(self._lse, -math.inf, dtype=torch.float32)
        if given.sink is not None:  # counts as a first key without a value
            total.zero_()
            lse.copy_((given.sink.float() / LN2)[:, None].expand_as(lse))
        without_sink = given._replace(sink=None)
        largest = torch.full_like(lse, -math.inf) if self._returns_max_logits else None
        for number, group in enumerate(self._forward):
            keys, values = shards.of(number)
            for attend in group:
                rows, of_keys = attend.rows, attend.key_rows
                qkv = q[:, rows], keys[:, of_keys], values[:, of_keys]
                of_rows = None if largest is None else largest[:, :, rows]
                attend.add(*qkv, without_sink, total[:, rows], lse[:, :, rows], of_rows)
        out.copy_(total)
        lse *= LN2
        return lse.clone() if self._returns_lse else None, largest, [q, k, v, lse]

    def backward(
        self,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        saved: list[torch.Tensor],
        given: Given,
    ) -> Gradients:
        """(dq, dk, dv, dsink) of the shard."""
        q, k, v, lse = saved
        of_queries = torch.zeros_like(out) if dout is None else dout, q, out, lse, dlse
        dq = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        shards = _Shards(self, k, v)
        first, *others, last = self._backward
        own = shards.of(0)
        without_sink = given._replace(sink=None)
        totals = self._differentiate(first, own, of_queries, without_sink, dq, None)
        leaving: list[tuple[Arriving, Step]] = []
        for number, group in enumerate(others, 1):
            grads = self._differentiate(group, shards.of(number), of_queries, without_sink, dq, None)
            flat = [by_rows(grad) for grad in grads]
            leaving.append((self._back[number - 1].start(*flat), self._steps[number]))
            if len(leaving) > 1:
                self._arrive(totals, *leaving.pop(0))
        totals = self._differentiate(last, own, of_queries, without_sink, dq, totals)
        for one in leaving:
            self._arrive(totals, *one)
        dsink = None if given.sink is None else _sink_gradient(given.sink, of_queries[0], out, lse, dlse)
        return dq.to(q.dtype), *(total.to(k.dtype) for total in totals), dsink

    def _differentiate(
        self,
        group: list[Placed],
        tensors: list[torch.Tensor],
        of_queries: tuple[torch.Tensor | None, ...],
        given: Given,
        dq: torch.Tensor,
        totals: list[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Gradients of keys and values in fp32, added to `totals` if there are some; that of queries goes to dq."""
        dout, q, out, lse, dlse = of_queries
        for placed in group:
            rows, of_keys = placed.attend.rows, placed.attend.key_rows
            partial, *grads = placed.attend.partial_backward(
                dout[:, rows],
                q[:, rows],
                *(x[:, of_keys] for x in tensors),
                out[:, rows],
                lse[:, :, rows],
                None if dlse is None else dlse[:, :, rows],
                given,
                dq[:, rows] if placed.is_first else None,
            )
            for turn in () if placed.is_first else placed.turns:
                total, own = dq[:, turn.rows], partial[:, turn.own_rows]
                _ = total.copy_(own) if turn.is_first else total.add_(own)
            if totals is None and grads[0].shape == tensors[0].shape:
                totals = grads
                continue
            if totals is None:
                totals = [torch.zeros_like(x, dtype=torch.float32) for x in tensors]
            for total, grad in zip(totals, grads, strict=True):
                total[:, of_keys] += grad
        return [torch.zeros_like(x, dtype=torch.float32) for x in tensors] if totals is None else totals

    def _arrive(self, totals: list[torch.Tensor], exchange: Arriving, step: Step) -> None:
        """Add the gradients that another rank sent at a step."""
        first, last = step.target_rows
        for total, rows, parts in zip(totals, self.rows, exchange.wait(), strict=True):
            for part in parts:
                total[:, first:last] += rows.view(part, last - first)


def _sink_gradient(
    sink: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Gradient of the sink, [heads]: minus the sum of exp(sink - lse) * (rowsum(dout * out) - dlse) over the queries."""
    delta = (dout.float() * out.float()).sum(-1).mT
    delta = delta if dlse is None else delta - dlse
    weights = torch.exp(sink.float()[:, None] - lse)
    return -(weights * delta).sum((0, 2)).to(sink.dtype)
