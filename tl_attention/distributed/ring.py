"""Method "ring": at step t a rank attends to the shard of the t-th rank before it, while the next shard is on its way.

A rank holds two shards of keys at a time, whatever the number of ranks. Partial results are merged in fp32 by their log-sum-exps. In the
backward the gradients of a shard's keys go home to its owner while the next shard is attended, the last ones beside calls on own keys, and
are added up there in fp32, in a fixed order. Keys that no query of a rank sees are not sent to it.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tl_attention.distributed.calls import Attend, Given, Gradients, Scores
from tl_attention.distributed.group import Arriving, Exchange, Part, Ranks, Rows, by_rows
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


def _part(peer: int, start: int, stop: int) -> list[Part]:
    return [Part(peer, start, stop)] if start < stop else []


class Placed(NamedTuple):
    """A call, and how many calls before it have queries of its rows: none, one, or FEW for more.

    Args:
        last: no call after it has such queries.
    """

    attend: Attend
    before: int
    last: bool


FEW = 2


def _placed(groups: list[list[Attend]]) -> list[list[Placed]] | None:
    """Groups of calls in the order of their launches; None if a call's queries differ in what is asked here."""
    calls = [attend for group in groups for attend in group]
    bounds = sorted({bound for call in calls for bound in (call.rows.start, call.rows.stop)})
    total, before = dict.fromkeys(bounds, 0), dict.fromkeys(bounds, 0)  # by the first row of a part
    parts = [[row for row in bounds if call.rows.start <= row < call.rows.stop] for call in calls]
    for row in itertools.chain(*parts):
        total[row] += 1
    placed = []
    for call, rows in zip(calls, parts, strict=True):
        found = {(min(before[row], FEW), before[row] + 1 == total[row]) for row in rows}
        if len(found) > 1:
            return None
        placed.append(Placed(call, *found.pop()))
        for row in rows:
            before[row] += 1
    every = iter(placed)
    return [[next(every) for _ in group] for group in groups]


def _summed(groups: list[list[Attend]]) -> list[list[Placed]]:
    """Groups of calls whose results are all added to fp32 sums."""
    return [[Placed(attend, FEW, False) for attend in group] for group in groups]


class _Shards:
    """Keys and values of the steps; the next step's are on their way."""

    def __init__(self, ring: Ring, k: torch.Tensor, v: torch.Tensor):
        self._ring, self._own, self._flat = ring, [k, v], [by_rows(x) for x in (k, v)]
        self._arriving: Arriving | None = None

    def of(self, number: int) -> list[torch.Tensor]:
        """Keys and values [batch, rows, heads, columns] of a step. To be called once per step, in their order."""
        ring, tensors = self._ring, self._own
        if number:
            count, arrived = ring.counts[number], self._arriving.wait()
            parts = [of_one[0] for of_one in arrived] if count else [x[:0] for x in self._flat]
            tensors = [rows.view(part, count) for rows, part in zip(ring.rows, parts, strict=True)]
        if number + 1 < len(ring.counts):
            self._arriving = ring.there[number].start(*self._flat)
        return tensors


class Ring:
    """The method for one layout, mask and set of options, on tensors of these sizes.

    Args:
        q, k, v: [batch, rows, heads, columns] of the shard, for their metadata.
        returns_lse: a call returns the log-sum-exp, too.
    """

    def __init__(
        self,
        layout: Layout,
        mask: Mask,
        ranks: Ranks,
        scores: Scores,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        returns_lse: bool,
    ):
        steps = ring_plan(layout, ranks.rank, mask)
        self._steps, self._returns_lse = steps, returns_lse
        self.rows = [Rows.of(x) for x in (k, v)]
        self.counts = [step.rows[1] - step.rows[0] for step in steps]
        self.there, self._back = [], []
        for step, count in zip(steps[1:], self.counts[1:], strict=True):
            mine, theirs = _part(step.target, *step.target_rows), _part(step.source, 0, count)
            widths = [rows.width for rows in self.rows]
            self.there.append(Exchange(ranks, mine, theirs, widths))
            self._back.append(Exchange(ranks, theirs, mine, widths))
        self._out, self._lse = (*q.shape[:3], v.shape[3]), (len(q), q.shape[2], q.shape[1])
        own, *others = [[Attend(call, scores, q.device) for call in step.calls] for step in steps]
        # The backward has calls on own keys while the first keys arrive, and while the last gradients leave. The call on the most own
        # keys comes first: its gradients are the sums that others are added to
        half = (len(own) + 1) // 2
        orders = [own, *others], [own[::-1][:half], *others, own[::-1][half:]]
        placed = [_placed(groups) for groups in orders]
        self._is_mixed = None in placed
        self._forward, self._backward = map(_summed, orders) if self._is_mixed else placed

    def _sums(self, groups: list[list[Placed]], like: torch.Tensor) -> torch.Tensor | None:
        """Memory for fp32 sums over several calls, if there are any."""
        if self._is_mixed:
            return torch.zeros_like(like, dtype=torch.float32)
        merges = any(one.before == FEW or (one.before and not one.last) for group in groups for one in group)
        return torch.empty_like(like, dtype=torch.float32) if merges else None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """(out, lse, tensors for the backward)."""
        shards, out = _Shards(self, k, v), q.new_empty(self._out)
        sums, lse = self._sums(self._forward, out), q.new_empty(self._lse, dtype=torch.float32)
        if self._is_mixed:  # the result without a key
            lse.copy_(
                torch.full_like(lse, -math.inf) if given.sink is None else given.sink[:, None].expand_as(lse)
            )
        for number, group in enumerate(self._forward):
            keys, values = shards.of(number)
            for attend, before, last in group:
                rows, of_keys = attend.rows, attend.key_rows
                qkv = q[:, rows], keys[:, of_keys], values[:, of_keys]
                if not before:
                    _, lse[:, :, rows] = attend.forward(*qkv, Given(sink=given.sink), out[:, rows])
                    continue
                part, part_lse = attend.forward(*qkv)
                weights = _merge(lse[:, :, rows], part_lse)
                if before < FEW:
                    total = torch.mul(out[:, rows], weights[0], out=None if sums is None else sums[:, rows])
                else:
                    total = sums[:, rows].mul_(weights[0])
                torch.addcmul(total, part, weights[1], out=out[:, rows] if last else total)
        if self._is_mixed:
            out.copy_(sums)
        return out, lse if self._returns_lse else None, [q, k, v, out, lse]

    def backward(
        self, dout: torch.Tensor | None, dlse: torch.Tensor | None, saved: list[torch.Tensor], given: Given
    ) -> Gradients:
        """(dq, dk, dv, dsink) of the shard."""
        q, k, v, out, lse = saved
        of_queries = torch.zeros_like(out) if dout is None else dout, q, out, lse, dlse
        dq = q.new_empty(q.shape)
        sums = self._sums(self._backward, dq)
        shards = _Shards(self, k, v)
        first, *others, last = self._backward
        own = shards.of(0)
        totals = self._differentiate(first, own, of_queries, dq, sums, None)
        leaving: list[tuple[Arriving, Step]] = []
        for number, group in enumerate(others, 1):
            keys = shards.of(number)
            grads = self._differentiate(group, keys, of_queries, dq, sums, None)
            flat = [by_rows(grad.to(k.dtype)) for grad in grads]
            leaving.append((self._back[number - 1].start(*flat), self._steps[number]))
            if len(leaving) > 1:
                self._arrive(totals, *leaving.pop(0))
        totals = self._differentiate(last, own, of_queries, dq, sums, totals)
        for one in leaving:
            self._arrive(totals, *one)
        if self._is_mixed:
            dq.copy_(sums)
        dsink = None if given.sink is None else _sink_gradient(given.sink, of_queries[0], out, lse, dlse)
        return dq, *(total.to(k.dtype) for total in totals), dsink

    def _differentiate(
        self,
        group: list[Placed],
        tensors: list[torch.Tensor],
        of_queries: tuple[torch.Tensor | None, ...],
        dq: torch.Tensor,
        sums: torch.Tensor | None,
        totals: list[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Gradients of keys and values after those of `totals`, in fp32 or those of one call alone; that of queries goes to dq or sums."""
        dout, q, out, lse, dlse = of_queries
        for attend, before, final in group:
            rows, of_keys = attend.rows, attend.key_rows
            part, *grads = attend.partial_backward(
                dout[:, rows],
                q[:, rows],
                *(x[:, of_keys] for x in tensors),
                out[:, rows],
                lse[:, :, rows],
                None if dlse is None else dlse[:, :, rows],
                None if before else dq[:, rows],
            )
            if before == 1 and final:
                dq[:, rows] += part
            elif before:
                if before < FEW:
                    sums[:, rows] = dq[:, rows]
                torch.add(sums[:, rows], part, out=dq[:, rows] if final else sums[:, rows])
            if totals is None and grads[0].shape == tensors[0].shape:
                totals = grads
                continue
            if totals is None:
                totals = [torch.zeros_like(x, dtype=torch.float32) for x in tensors]
            totals = [x.float() for x in totals]
            for total, grad in zip(totals, grads, strict=True):
                total[:, of_keys] += grad
        return [torch.zeros_like(x) for x in tensors] if totals is None else totals

    def _arrive(self, totals: list[torch.Tensor], exchange: Arriving, step: Step) -> None:
        """Add the gradients that another rank sent at a step."""
        first, last = step.target_rows
        for number, (rows, parts) in enumerate(zip(self.rows, exchange.wait(), strict=True)):
            for part in parts:
                totals[number] = totals[number].float()
                totals[number][:, first:last] += rows.view(part, last - first)


def _merge(lse: torch.Tensor, part_lse: torch.Tensor) -> list[torch.Tensor]:
    """Weights [batch, rows, heads, 1] of two results for the same queries. lse becomes that of both, [batch, heads, rows].

    lse = log(exp(lse_1) + exp(lse_2))    out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2
    """
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -math.inf, 0)
    weights = [torch.exp(one - finite).mT[..., None] for one in (lse, part_lse)]
    lse.copy_(total)
    return weights


def _sink_gradient(
    sink: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Gradient of the sink, [heads]: minus the sum of exp(sink - lse) * (rowsum(dout * out) - dlse) over the queries."""
    delta = (dout.float() * out.float()).sum(-1).mT
    delta = delta if dlse is None else delta - dlse
    weights = torch.exp(sink.float()[:, None] - lse)
    return -(weights * delta).sum((0, 2)).to(sink.dtype)
