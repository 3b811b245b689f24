"""Method "gather": each rank gets the keys that its queries see, once, and calls attention on them.

The queries of a range see one contiguous range of keys. Keys arrive in stages, one per range of queries, so that the first range is
attended while the keys of the second are on their way. In the backward the stages go in reverse order: the gradients of keys that no
other range sees are on their way home while the next range is computed. Nothing is merged, so the forward rounds as one GPU does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.distributed import calls
from tl_attention.distributed.calls import Scores
from tl_attention.distributed.group import Exchange, Message, Ranks
from tl_attention.distributed.layout import Layout, Range, Segment, joined
from tl_attention.distributed.pieces import Call, Mask, calls_of

# Gathered keys and values of at most so many bytes are kept for the backward; larger ones are gathered a second time
KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class Part:
    """Rows that two ranks share: `rows` rows from `mine` on in the shard or in the buffer of this rank."""

    peer: int
    mine: int
    rows: int


@dataclass(frozen=True)
class Stage:
    """Keys that a range of queries needs beside those of earlier stages, and the calls on it.

    Args:
        receives: rows of the buffer, by the rank that owns them.
        sends: rows of the shard, by the rank that needs them.
        copies: (row of the shard, row of the buffer, rows).
    """

    receives: tuple[Part, ...]
    sends: tuple[Part, ...]
    copies: tuple[tuple[int, int, int], ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class GatherPlan:
    """Stages of a rank.

    Args:
        rows: rows of the buffer of keys.
        most_rows: those of the rank with the largest buffer.
        local: the buffer would be the shard itself.
    """

    stages: tuple[Stage, ...]
    rows: int
    most_rows: int
    local: bool

    def is_kept(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """True if the buffers stay until the backward: the same answer on all ranks, which else exchange keys again."""
        columns = k.shape[2] * (k.shape[3] + v.shape[3])
        return self.most_rows * len(k) * columns * k.element_size() <= KEPT_BYTES


def needed_keys(layout: Layout, rank: int, mask: Mask) -> list[tuple[Range, ...]]:
    """Ranges of keys per stage of a rank: those that its i-th range of queries sees and no earlier one."""
    known: tuple[Range, ...] = ()
    stages = []
    for queries in layout.ranges[rank]:
        new = [mask.keys_seen(*queries)]
        for start, stop in known:
            new = [
                part
                for low, high in new
                for part in ((low, min(high, start)), (max(low, stop), high))
                if part[0] < part[1]
            ]
        stages.append(tuple(new))
        known = joined([*known, *new])
    return stages


@functools.lru_cache(maxsize=64)
def gather_plan(layout: Layout, rank: int, mask: Mask) -> GatherPlan:
    """The plan of a rank."""
    own = layout.of_rank(rank)
    needed = [needed_keys(layout, other, mask) for other in range(layout.world)]
    buffer = joined([part for stage in needed[rank] for part in stage])
    offsets, rows = {}, 0
    for start, stop in buffer:
        offsets[start, stop] = rows - start
        rows += stop - start

    def row(token: int) -> int:
        return next(token + shift for (start, stop), shift in offsets.items() if start <= token < stop)

    stages = []
    for number in range(max(map(len, needed))):
        receives, copies, found = [], [], []
        for part in needed[rank][number] if number < len(needed[rank]) else ():
            for segment in layout.cut(*part):
                if segment.rank == rank:
                    copies.append((segment.row, row(segment.start), segment.rows))
                else:
                    receives.append(Part(segment.rank, row(segment.start), segment.rows))
        sends = [
            Part(other, segment.row, segment.rows)
            for other in range(layout.world)
            if other != rank and number < len(needed[other])
            for part in needed[other][number]
            for segment in _overlaps(own, part)
        ]
        if number < len(own):
            queries = own[number]
            keys = mask.keys_seen(queries.start, queries.stop)
            shift = row(keys[0]) - keys[0]
            found = calls_of(
                piece.moved(queries.row - queries.start, shift)
                for piece in mask.pieces((queries.start, queries.stop), keys)
            )
        stages.append(Stage(tuple(receives), tuple(sends), tuple(copies), tuple(found)))
    held = [copy for stage in stages for copy in stage.copies]
    local = rows == layout.rows(rank) and all(a == b for a, b, _ in held) and sum(n for *_, n in held) == rows
    most_rows = max(sum(stop - start for stage in x for start, stop in stage) for x in needed)
    return GatherPlan(tuple(stages), rows, most_rows, local)


def _overlaps(segments: tuple[Segment, ...], part: Range) -> list[Segment]:
    """Parts of these segments in a range of tokens."""
    found = []
    for rank, row, start, stop in segments:
        low, high = max(start, part[0]), min(stop, part[1])
        if low < high:
            found.append(Segment(rank, row + low - start, low, high))
    return found


class _Keys:
    """Keys and values of a plan, which arrive by stages."""

    def __init__(self, plan: GatherPlan, ranks: Ranks, k: torch.Tensor, v: torch.Tensor):
        shards = [x.transpose(0, 1).contiguous() for x in (k, v)]  # [rows, batch, heads, columns]
        self._exchanges = []
        buffers = shards if plan.local else [x.new_empty(plan.rows, *x.shape[1:]) for x in shards]
        for stage in plan.stages:
            sends = [
                Message(part.peer, x[part.mine : part.mine + part.rows])
                for part in stage.sends
                for x in shards
            ]
            receives = [
                Message(part.peer, x[part.mine : part.mine + part.rows])
                for part in stage.receives
                for x in buffers
            ]
            self._exchanges.append(Exchange(ranks, sends, receives))
        if not plan.local:
            for stage in plan.stages:
                for source, target, rows in stage.copies:
                    for shard, buffer in zip(shards, buffers, strict=True):
                        buffer[target : target + rows] = shard[source : source + rows]
        self.tensors = [x.transpose(0, 1) for x in buffers]  # [batch, rows, heads, columns]

    def wait(self, stages: int) -> None:
        """Wait for the first stages."""
        for exchange in self._exchanges[:stages]:
            exchange.wait()


class _Gathered(torch.autograd.Function):
    """Attention of [batch, rows, heads, head_dim] shards."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        scores: Scores,
        plan: GatherPlan,
        ranks: Ranks,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores._replace(sink=sink)
        gathered = _Keys(plan, ranks, k, v)
        outs, lses = [], []
        for number, stage in enumerate(plan.stages):
            gathered.wait(number + 1)
            for call in stage.calls:
                of_call = (calls.keys(x, call) for x in gathered.tensors)
                out, lse = calls.forward(call, scores, calls.queries(q, call), *of_call)
                outs.append(out)
                lses.append(lse)
        if not outs:  # no queries
            outs, lses = [q.new_empty(*q.shape[:3], v.shape[3])], [q.new_empty(len(q), q.shape[2], 0).float()]
        out, lse = _joined(outs, 1), _joined(lses, 2)
        kept = gathered.tensors if plan.is_kept(k, v) else []
        ctx.save_for_backward(q, k, v, out, lse, sink, scores.slopes, *kept)
        ctx.asked = scores._replace(sink=None, slopes=None), plan, ranks
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        q, k, v, out, lse, sink, slopes, *kept = ctx.saved_tensors
        scores, plan, ranks = ctx.asked
        scores = scores._replace(sink=sink, slopes=slopes)
        dout = torch.zeros_like(out) if dout is None else dout
        if kept:
            tensors = kept
        else:
            gathered = _Keys(plan, ranks, k, v)
            gathered.wait(len(plan.stages))
            tensors = gathered.tensors
        sums = _KeyGradients(plan, ranks, k, v)
        dqs, dsink = [], None
        for number in reversed(range(len(plan.stages))):
            for call in reversed(plan.stages[number].calls):
                of_queries = [calls.queries(x, call) for x in (dout, q, out)]
                of_keys = [calls.keys(x, call) for x in tensors]
                of_lse = [None if x is None else x[:, :, call.q[0] : call.q[1]] for x in (lse, dlse)]
                dq, dk, dv, dsink_part = calls.backward(
                    call, scores, of_queries[0], of_queries[1], *of_keys, of_queries[2], *of_lse
                )
                dqs.append(dq)
                sums.add(call, dk, dv)
                if sink is not None:
                    dsink = dsink_part.float() if dsink is None else dsink + dsink_part
            sums.send(number)
        dqs.reverse()
        dq = _joined(dqs, 1) if dqs else torch.zeros_like(q)
        if sink is not None:
            dsink = torch.zeros_like(sink) if dsink is None else dsink.to(sink.dtype)
        return dq, *sums.result(), dsink, None, None, None


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _KeyGradients:
    """Gradients of keys and values: added up over the calls of a rank, sent to their owners and added up there, in a fixed order."""

    def __init__(self, plan: GatherPlan, ranks: Ranks, k: torch.Tensor, v: torch.Tensor):
        self._plan, self._ranks, self._shards = plan, ranks, (k, v)
        self._sums: list[torch.Tensor] | None = None  # [batch, rows of the buffer, heads, columns]
        self._pending: list[tuple[Exchange, list[Message], Stage]] = []

    def add(self, call: Call, *grads: torch.Tensor) -> None:
        """Add the gradients of a call's keys."""
        if self._sums is None:
            if call.k == (0, self._plan.rows):
                self._sums = list(grads)
                return
            self._sums = [grad.new_zeros(len(grad), self._plan.rows, *grad.shape[2:]) for grad in grads]
        for total, grad in zip(self._sums, grads, strict=True):
            calls.keys(total, call).add_(grad)

    def send(self, number: int) -> None:
        """Send the gradients of a stage's keys to their owners; no later call may add to them."""
        stage = self._plan.stages[number]
        sends, receives = [], []
        for part in stage.receives:
            for total in self._sums:
                rows = total[:, part.mine : part.mine + part.rows].transpose(0, 1).contiguous()
                sends.append(Message(part.peer, rows))
        for part in stage.sends:
            for shard in self._shards:
                rows = shard.new_empty(part.rows, len(shard), *shard.shape[2:])
                receives.append(Message(part.peer, rows))
        self._pending.append((Exchange(self._ranks, sends, receives), receives, stage))

    def result(self) -> tuple[torch.Tensor, ...]:
        """(dk, dv) of the shard."""
        if self._sums is None:
            return tuple(torch.zeros_like(x) for x in self._shards)
        peers = {part.peer for stage in self._plan.stages for part in stage.sends}
        if self._plan.local and not peers:
            return tuple(self._sums)
        # A single addition rounds once in either dtype: each peer adds to a row at most once
        totals = [
            torch.empty_like(x, dtype=x.dtype if len(peers) < 2 else torch.float32) for x in self._shards
        ]
        for stage in self._plan.stages:
            for mine, row, rows in stage.copies:
                for total, parts in zip(totals, self._sums, strict=True):
                    total[:, mine : mine + rows] = parts[:, row : row + rows]
        for exchange, receives, stage in self._pending:
            exchange.wait()
            found = iter(receives)
            for part in stage.sends:
                for total in totals:
                    total[:, part.mine : part.mine + part.rows] += next(found).tensor.transpose(0, 1)
        return tuple(total.to(x.dtype) for total, x in zip(totals, self._shards, strict=True))


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
    return _Gathered.apply(q, k, v, sink, scores, gather_plan(layout, ranks.rank, mask), ranks)
