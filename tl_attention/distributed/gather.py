"""Method "gather": each rank gets the keys that its queries see, by one exchange, and calls attention on them.

The queries of a range of tokens see one contiguous range of keys, so a range takes one call, and nothing is merged: the forward rounds as
one GPU does. The calls run side by side, so that tiles of one fill the SMs that another leaves. In the backward one exchange returns the
gradients of keys to their owners, which add them up in a fixed order.

Exchange and kernels do not overlap: attention kernels fill all SMs until they end, so NCCL's kernel would wait for them, and the other
ranks for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tl_attention.distributed.calls import Attend, Given, Gradients, Task
from tl_attention.distributed.group import Exchange, Part, Rows, by_rows
from tl_attention.distributed.lanes import side_by_side
from tl_attention.distributed.layout import Layout, Range, Segment, joined
from tl_attention.distributed.pieces import NOTHING, Call, Mask, Needs, calls_of

# Gathered keys and values are kept for the backward if they take at most this many bytes, or no more than q and out, which are kept
# anyway. Larger ones are gathered a second time
KEPT_BYTES = 64 << 20


class Origin(NamedTuple):
    """Origin of the rows [start, stop) of a buffer: entry `received` of a plan's receives, or for None the own shard from row `row` on."""

    start: int
    stop: int
    received: int | None
    row: int = 0

    def of(self, shard: torch.Tensor, arrived: list[torch.Tensor], width: int = 1) -> torch.Tensor:
        """The rows, from a flat shard with `width` elements per row and what arrived from other ranks."""
        if self.received is not None:
            return arrived[self.received]
        return shard[self.row * width : (self.row + self.stop - self.start) * width]


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """Exchange and calls of a rank.

    Args:
        sends: rows of the shard, by the rank that needs them, then by token.
        receives: rows of the buffer, by the rank that owns them, then by token.
        buffer: origins of the buffer's rows, in their order.
        calls: one per range of queries, more where documents need different windows.
        rows: rows of the buffer.
        most_rows: rows of the largest buffer of all ranks.
        share: rows of a shard on average, rounded down.
        silent: no rank needs keys of another one: nothing is exchanged.
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

    def is_kept(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """True if the buffers are kept until the backward, else keys are exchanged again. The same on all ranks."""
        if self.most_rows * k.shape[2] <= self.share * q.shape[2]:
            return True
        columns = k.shape[2] * (k.shape[3] + v.shape[3])
        return self.most_rows * k.shape[0] * columns * k.element_size() <= KEPT_BYTES


def needed_keys(layout: Layout, rank: int, mask: Mask) -> tuple[Range, ...]:
    """Ranges of keys that the queries of a rank see."""
    return joined([mask.keys_seen(*queries) for queries in layout.ranges[rank]])


@functools.lru_cache(maxsize=64)
def gather_plan(layout: Layout, rank: int, mask: Mask, needs: Needs = NOTHING) -> GatherPlan:
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
        tuple(sends),
        receives,
        buffer,
        tuple(calls_of(pieces, mask.window, needs)),
        rows,
        max(sizes),
        share,
        silent,
    )


def _rows_in(segments: tuple[Segment, ...], part: Range) -> list[Range]:
    """Rows of those tokens of these segments that are in a range."""
    found = []
    for _, row, start, stop in segments:
        low, high = max(start, part[0]), min(stop, part[1])
        if low < high:
            found.append((row + low - start, row + high - start))
    return found


class Gather:
    """The method for one task, on tensors of these sizes.

    Args:
        q, k, v: [batch, rows, heads, columns] of the shard, for their metadata.
    """

    def __init__(self, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        layout, mask, ranks, scores, self._returns_lse, self._returns_max_logits = task
        plan = gather_plan(layout, ranks.rank, mask, scores.needs)
        self._plan = plan
        # The last rows first. Under a causal mask they see the most keys: their tiles take longest, and gradients of other calls are added
        # to those of their keys
        self._attends = [Attend(call, scores, q) for call in reversed(plan.calls)]
        self._lse = len(q), q.shape[2], q.shape[1]
        self._rows = [Rows.of(x) for x in (k, v)]
        widths = [rows.width for rows in self._rows]
        self._there = Exchange(ranks, plan.sends, plan.receives, widths)
        self._back = Exchange(ranks, plan.receives, plan.sends, widths)
        self._is_kept = plan.is_kept(q, k, v)
        self._own = [
            (number, origin.start * width, origin.stop * width)
            for number, width in enumerate(widths)
            for origin in plan.buffer
            if origin.received is None
        ]
        # Per rank that sends gradients: tensor and number of what arrives, its place in the gradients of keys and then of values
        first = 0, q.shape[1] * widths[0]
        self._adds = [
            [
                (number, index, first[number] + part.start * width, first[number] + part.stop * width)
                for number, width in enumerate(widths)
                for index, part in enumerate(plan.sends)
                if part.peer == peer
            ]
            for peer in sorted({part.peer for part in plan.sends})
        ]

    def _gathered(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Buffers [batch, rows, heads, columns] of keys and of values, from those of the shard."""
        plan = self._plan
        if plan.silent:
            return shards
        flat = [by_rows(x) for x in shards]
        arrived = self._there.run(*flat)
        if plan.is_shard:
            return shards
        parts = [
            origin.of(x, pieces, rows.width)
            for x, pieces, rows in zip(flat, arrived, self._rows, strict=True)
            for origin in plan.buffer
        ]
        return self._tensors(torch.cat(parts), plan.rows)

    def _tensors(self, flat: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Tensors [batch, count, heads, columns] of keys and of values that follow one another in memory."""
        k, v = self._rows
        return [k.view(flat, count), v.view(flat, count, count * k.width)]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Given, out: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
        """Write out; return (lse, max_logits, tensors for the backward)."""
        keys, values = self._gathered([k, v])

        def attended(attend: Attend) -> tuple[torch.Tensor, ...]:
            rows, of_keys = attend.rows, attend.key_rows
            qkv = q[:, rows], keys[:, of_keys], values[:, of_keys]
            return attend.forward(*qkv, given, out[:, rows], self._returns_max_logits)

        results = side_by_side([functools.partial(attended, attend) for attend in self._attends], q.device)
        lses = [lse for _, lse, *_ in results]

        def joined_rows(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts[::-1], 2) if parts else q.new_empty(self._lse, dtype=torch.float32)

        lse = joined_rows(lses) if self._returns_lse else None
        largest = joined_rows([x for _, _, x in results]) if self._returns_max_logits else None
        return lse, largest, [q, *([keys, values] if self._is_kept else [k, v]), *lses]

    def backward(
        self,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        saved: list[torch.Tensor],
        given: Given,
    ) -> Gradients:
        """(dq, dk, dv, dsink) of the shard."""
        q, *kept = saved[:3]
        dout = torch.zeros_like(out) if dout is None else dout
        keys, values = kept if self._is_kept else self._gathered(kept)
        dq, sums, dsink = q.new_empty(q.shape), None, None

        def differentiated(attend: Attend, lse: torch.Tensor) -> Gradients:
            rows, of_keys = attend.rows, attend.key_rows
            return attend.backward(
                dout[:, rows],
                q[:, rows],
                keys[:, of_keys],
                values[:, of_keys],
                out[:, rows],
                lse,
                None if dlse is None else dlse[:, :, rows],
                given,
                dq[:, rows],
            )

        calls = [
            functools.partial(differentiated, *call) for call in zip(self._attends, saved[3:], strict=True)
        ]
        for attend, grads in zip(self._attends, side_by_side(calls, q.device), strict=True):
            _, dk, dv, dsink_partial = grads
            sums = self._added(attend, sums, [dk, dv])
            if given.sink is not None:
                dsink = dsink_partial.float() if dsink is None else dsink + dsink_partial
        if given.sink is not None:
            dsink = torch.zeros_like(given.sink) if dsink is None else dsink.to(given.sink.dtype)
        if sums is None:
            rows = self._plan.rows
            sums = self._tensors(q.new_zeros(rows * sum(x.width for x in self._rows)), rows)
        return dq, *self._brought_home(sums), dsink

    def _added(
        self, attend: Attend, sums: list[torch.Tensor] | None, grads: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Sums [batch, rows of the buffer, heads, columns] with the gradients of a call's keys."""
        if sums is None:
            if attend.key_rows == slice(0, self._plan.rows):
                return grads
            sums = [grad.new_zeros(len(grad), self._plan.rows, *grad.shape[2:]) for grad in grads]
        torch._foreach_add_([total[:, attend.key_rows] for total in sums], grads)
        return sums

    def _brought_home(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the shard [batch, rows, heads, columns] from those of the buffers of all ranks."""
        if self._plan.silent:
            return sums
        flat = [by_rows(x) for x in sums]
        arrived = self._back.run(*flat)
        dtype = flat[0].dtype
        own = [flat[number][start:stop] for number, start, stop in self._own]
        total = torch.cat(own) if own else flat[0]
        # Each rank adds to a row at most once. A single addition rounds once in either dtype
        if len(self._adds) > 1:
            total = total.float()
        for adds in self._adds:
            places = [total[start:stop] for _, _, start, stop in adds]
            torch._foreach_add_(places, [arrived[number][index] for number, index, _, _ in adds])
        return self._tensors(total.to(dtype), self._lse[2])
