"""Method "gather": each rank gets the keys that its queries see, by one exchange, and calls attention on them.

The queries of a range of tokens see one contiguous range of keys, so a range takes one call, and nothing is merged: the forward rounds as
one GPU does. In the backward one exchange brings the gradients of keys home, where they are added up in a fixed order.

Exchange and kernels follow one another. Beside attention kernels, which fill all SMs until they end, NCCL's kernel would wait for them,
and with it the other ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tl_attention.distributed import calls
from tl_attention.distributed.calls import Scores
from tl_attention.distributed.group import Exchange, Part, Ranks
from tl_attention.distributed.layout import Layout, Range, Segment, joined
from tl_attention.distributed.pieces import Call, Mask, calls_of

# Gathered keys and values are kept for the backward if they take at most so many bytes, or no more than q and out, which are kept, too.
# Larger ones are gathered a second time
KEPT_BYTES = 64 << 20


class Origin(NamedTuple):
    """Origin of the rows [start, stop) of a buffer: entry `received` of a plan's receives, or with None the shard, from row `row` on."""

    start: int
    stop: int
    received: int | None
    row: int = 0

    def of(self, shard: torch.Tensor, arrived: list[torch.Tensor]) -> torch.Tensor:
        """The rows, from a shard [rows, ...] and what arrived from other ranks."""
        if self.received is not None:
            return arrived[self.received]
        return shard[self.row : self.row + self.stop - self.start]


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """Exchange and calls of a rank.

    Args:
        sends: rows of the shard, by the rank that needs them, then by token.
        receives: rows of the buffer, by the rank that owns them, then by token.
        buffer: origins of the buffer's rows, in their order.
        calls: one per range of queries, more where documents need different windows.
        rows: rows of the buffer.
        most_rows: those of the rank with the largest buffer.
        share: rows of a shard on average, rounded down.
        silent: no rank needs keys of another.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    buffer: tuple[Origin, ...]
    calls: tuple[Call, ...]
    rows: int
    most_rows: int
    share: int
    silent: bool

    @functools.cached_property
    def is_shard(self) -> bool:
        """True if the buffer is the shard itself, or empty."""
        return len(self.buffer) < 2 and not self.receives

    @functools.cached_property
    def senders(self) -> int:
        """Number of ranks that send gradients to this one."""
        return len({part.peer for part in self.sends})

    def is_kept(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """True if the buffers stay until the backward: the same answer on all ranks, which else exchange keys again."""
        if self.most_rows * k.shape[2] <= self.share * q.shape[2]:
            return True
        columns = k.shape[2] * (k.shape[3] + v.shape[3])
        return self.most_rows * k.shape[0] * columns * k.element_size() <= KEPT_BYTES


def needed_keys(layout: Layout, rank: int, mask: Mask) -> tuple[Range, ...]:
    """Ranges of keys that the queries of a rank see."""
    return joined([mask.keys_seen(*queries) for queries in layout.ranges[rank]])


@functools.lru_cache(maxsize=64)
def gather_plan(layout: Layout, rank: int, mask: Mask) -> GatherPlan:
    """The plan of a rank."""
    own = layout.of_rank(rank)
    needed = [needed_keys(layout, other, mask) for other in range(layout.world)]
    sends = [
        Part(other, *rows)
        for other in range(layout.world)
        if other != rank
        for part in needed[other]
        for rows in _rows_in(own, part)
    ]
    found: list[tuple[Segment, int]] = []  # segments of the buffer and their first rows in it
    shifts, rows = {}, 0
    for start, stop in needed[rank]:
        shifts[start, stop] = rows - start
        found += [(segment, rows + segment.start - start) for segment in layout.cut(start, stop)]
        rows += stop - start
    arriving = sorted(
        (segment.rank, segment.start, row, segment.rows) for segment, row in found if segment.rank != rank
    )
    receives = tuple(Part(peer, row, row + count) for peer, _, row, count in arriving)
    numbers = {part.start: number for number, part in enumerate(receives)}
    buffer = tuple(Origin(row, row + segment.rows, numbers.get(row), segment.row) for segment, row in found)
    pieces = []
    for queries in own:
        keys = mask.keys_seen(queries.start, queries.stop)
        shift = next(shift for (start, stop), shift in shifts.items() if start <= keys[0] < stop)
        pieces += [
            piece.moved(queries.row - queries.start, shift)
            for piece in mask.pieces((queries.start, queries.stop), keys)
        ]
    sizes = [sum(stop - start for start, stop in ranges) for ranges in needed]
    silent = all(size == layout.rows(other) for other, size in enumerate(sizes))
    share = layout.total // layout.world
    return GatherPlan(
        tuple(sends), receives, buffer, tuple(calls_of(pieces)), rows, max(sizes), share, silent
    )


def _rows_in(segments: tuple[Segment, ...], part: Range) -> list[Range]:
    """Rows of those tokens of these segments that are in a range."""
    found = []
    for _, row, start, stop in segments:
        low, high = max(start, part[0]), min(stop, part[1])
        if low < high:
            found.append((row + low - start, row + high - start))
    return found


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """[batch, rows, heads, columns] as contiguous [rows, batch, heads, columns]."""
    return x.transpose(0, 1).contiguous()


def _gathered(plan: GatherPlan, ranks: Ranks, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Buffers [batch, rows, heads, columns] of keys and of values, from those of the shard."""
    if plan.silent:
        return list(tensors)
    shards = [_by_rows(x) for x in tensors]
    arrived = Exchange(ranks, plan.sends, plan.receives, shards).wait()
    if plan.is_shard:
        return list(tensors)
    return [
        torch.cat([origin.of(shard, parts) for origin in plan.buffer]).transpose(0, 1)
        for shard, parts in zip(shards, arrived, strict=True)
    ]


def _brought_home(
    plan: GatherPlan, ranks: Ranks, sums: list[torch.Tensor], shards: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Gradients of the shard [batch, rows, heads, columns] from those of the buffers of all ranks."""
    if plan.silent:
        return sums
    buffers = [_by_rows(x) for x in sums]
    arrived = Exchange(ranks, plan.receives, plan.sends, buffers).wait()
    if not plan.buffer:
        return [torch.zeros_like(x) for x in shards]
    # Each rank adds to a row at most once, and a single addition rounds once in either dtype
    dtype = shards[0].dtype if plan.senders < 2 else torch.float32
    totals = []
    for buffer, parts in zip(buffers, arrived, strict=True):
        own = [buffer[x.start : x.stop] for x in plan.buffer if x.received is None]
        total = own[0].to(dtype, copy=True) if len(own) == 1 else torch.cat(own).to(dtype)
        for part, grad in zip(plan.sends, parts, strict=True):
            total[part.start : part.stop].add_(grad)
        totals.append(total.to(shards[0].dtype).transpose(0, 1))
    return totals


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
        keys, values = _gathered(plan, ranks, (k, v))
        outs, lses = [], []
        for call in plan.calls:
            out, lse = calls.forward(call, scores, calls.queries(q, call), calls.keys(keys, call), calls.keys(values, call))  # fmt: skip
            outs.append(out)
            lses.append(lse)
        if not outs:  # no queries
            outs, lses = [q.new_empty(*q.shape[:3], v.shape[3])], [q.new_empty(len(q), q.shape[2], 0).float()]
        out, lse = _joined(outs, 1), _joined(lses, 2)
        kept = (keys, values) if plan.is_kept(q, k, v) else ()
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
        keys, values = kept or _gathered(plan, ranks, (k, v))
        dqs, sums, dsink = [], [], None
        # The last range of queries sees the most keys under a causal mask: its gradients are the sums that others are added to
        for call in reversed(plan.calls):
            rows = slice(*call.q)
            dq, dk, dv, dsink_part = calls.backward(
                call,
                scores,
                dout[:, rows],
                q[:, rows],
                calls.keys(keys, call),
                calls.keys(values, call),
                out[:, rows],
                lse[:, :, rows],
                None if dlse is None else dlse[:, :, rows],
            )
            dqs.append(dq)
            sums = _added(plan, call, sums, (dk, dv))
            if sink is not None:
                dsink = dsink_part.float() if dsink is None else dsink + dsink_part
        dqs.reverse()
        dq = _joined(dqs, 1) if dqs else torch.zeros_like(q)
        if sink is not None:
            dsink = torch.zeros_like(sink) if dsink is None else dsink.to(sink.dtype)
        dk, dv = _brought_home(plan, ranks, sums or [torch.zeros_like(x) for x in (k, v)], (k, v))
        return dq, dk, dv, dsink, None, None, None


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _added(
    plan: GatherPlan, call: Call, sums: list[torch.Tensor], grads: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Sums [batch, rows of the buffer, heads, columns] with the gradients of a call's keys."""
    if not sums:
        if call.k == (0, plan.rows):
            return list(grads)
        sums = [grad.new_zeros(len(grad), plan.rows, *grad.shape[2:]) for grad in grads]
    for total, grad in zip(sums, grads, strict=True):
        calls.keys(total, call).add_(grad)
    return sums


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
