"""Layouts: the tokens of a sequence that each rank of a group holds."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

import torch

Range = tuple[int, int]  # start, stop
LayoutName = Literal["zigzag", "contiguous"]
NAMES: tuple[str, ...] = get_args(LayoutName)
CPU = "cpu"  # of all tensors here, under any default device of torch
UNLIMITED = -1  # bound of a window
# Balanced shards may differ in work by this share if that separates fewer keys from their queries
BALANCE_SLACK = 0.01
TOKEN_WORK = 64  # fixed cost of a token, in visible keys: loads, stores, partial tiles


class Segment(NamedTuple):
    """Consecutive tokens that one rank holds in consecutive rows."""

    rank: int
    row: int  # first row in the shard
    start: int  # first token
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Tokens of each rank. A shard holds the tokens of its ranges in increasing order.

    Args:
        ranges: per rank, disjoint (start, stop) in increasing order; all ranks together hold each token once.
    """

    ranges: tuple[tuple[Range, ...], ...]

    @property
    def world(self) -> int:
        return len(self.ranges)

    @functools.cached_property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(stop - start for ranges in self.ranges for start, stop in ranges)

    def rows(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(stop - start for start, stop in self.ranges[rank])

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All ranges with their ranks and rows, by token."""
        found = []
        for rank, ranges in enumerate(self.ranges):
            row = 0
            for start, stop in ranges:
                found.append(Segment(rank, row, start, stop))
                row += stop - start
        return tuple(sorted(found, key=lambda segment: segment.start))

    def of_rank(self, rank: int) -> tuple[Segment, ...]:
        """Segments of a rank, by token."""
        return tuple(segment for segment in self.segments if segment.rank == rank)

    def cut(self, start: int, stop: int) -> Iterator[Segment]:
        """Segments of the tokens [start, stop), by token."""
        first = bisect.bisect_right(self._starts, start) - 1
        for segment in self.segments[max(first, 0) :]:
            if segment.start >= stop:
                return
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                yield Segment(segment.rank, segment.row + low - segment.start, low, high)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [segment.start for segment in self.segments]

    def tokens(self, rank: int) -> torch.Tensor:
        """Tokens of a rank in the order of its rows, int64 [rows] on the CPU."""
        parts = [torch.arange(start, stop, device=CPU) for start, stop in self.ranges[rank]]
        return torch.cat(parts) if parts else torch.arange(0, device=CPU)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Sorted ranges without empty ones; adjacent and overlapping ranges are merged."""
    found: list[list[int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([start, stop])
    return tuple((start, stop) for start, stop in found)


def _even_cuts(total: int, parts: int) -> list[int]:
    return [i * total // parts for i in range(parts + 1)]


@functools.lru_cache(maxsize=256)
def named_layout(name: str, total: int, world: int) -> Layout:
    """Layout "zigzag" or "contiguous" of `total` tokens; no divisibility is needed.

    zigzag: 2 * world chunks of nearly equal length; rank r holds chunks r and 2 * world - 1 - r, so that all ranks have the same work
    under a causal mask. contiguous: rank r holds the r-th of `world` chunks.
    """
    if name == "contiguous":
        return Layout(tuple(joined([chunk]) for chunk in pairwise(_even_cuts(total, world))))
    chunks = list(pairwise(_even_cuts(total, 2 * world)))
    return Layout(tuple(joined([chunks[rank], chunks[-1 - rank]]) for rank in range(world)))


@functools.lru_cache(maxsize=64)
def balanced_layout(documents: tuple[int, ...], world: int, window: Range) -> Layout:
    """Layout in which ranks have the same number of tokens, up to 1, and nearly the same work, whatever the documents.

    The tokens that are left form a ring: the first follows the last. One rank after another takes an arc of it. The work of all arcs of
    its length averages to a fair share and changes little from one arc to the next, so some arc has a fair share. Among the arcs within
    BALANCE_SLACK of it, the one is taken that separates the fewest keys from their queries. A rank holds two ranges on average.

    Args:
        documents: cumulative lengths, as cu_seqlens.
        window: (left, right) of the mask; -1: no limit.
    """
    total = documents[-1]
    work, position = _work_of_tokens(documents, window)
    left_over = torch.arange(total, device=CPU)
    ranges = []
    for rank in range(world):
        size = left_over.numel() // (world - rank)
        if rank == world - 1 or not size:
            ranges.append(_ranges_of(left_over if rank == world - 1 else left_over[:0]))
            continue
        ring = torch.cat((left_over, left_over[:size]))
        ends = torch.nn.functional.pad(work[ring].cumsum(0), (1, 0))
        of_arc = ends[size:] - ends[: ring.numel() - size + 1]
        fair = ends[left_over.numel()] * size / left_over.numel()
        error = (of_arc - fair).abs()
        # Keys before a cut that queries after it see, in the document that the cut divides
        cut = position[ring]
        price = cut[: of_arc.numel() - 1] + cut[size : size + of_arc.numel() - 1]
        error = error[: price.numel()]
        near = error <= max(float(error.min()), BALANCE_SLACK * float(fair))
        first = int(torch.where(near, price, torch.iinfo(price.dtype).max).argmin())
        ranges.append(_ranges_of(ring[first : first + size].sort().values))
        keep = torch.ones(left_over.numel(), dtype=torch.bool, device=CPU)
        keep[torch.arange(first, first + size, device=CPU) % left_over.numel()] = False
        left_over = left_over[keep]
    return Layout(tuple(ranges))


def _work_of_tokens(documents: tuple[int, ...], window: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """Work of each token in keys, fp64 [total], and its position in its document, int64 [total]."""
    bounds = torch.tensor(documents, device=CPU)
    lengths = bounds.diff()
    position = torch.arange(documents[-1], device=CPU) - bounds[:-1].repeat_interleave(lengths)
    after = lengths.repeat_interleave(lengths) - 1 - position
    left, right = window
    seen = position if left == UNLIMITED else position.clamp(max=left)
    seen = seen + (after if right == UNLIMITED else after.clamp(max=right)) + 1
    return (seen + TOKEN_WORK).double(), position


def _ranges_of(tokens: torch.Tensor) -> tuple[Range, ...]:
    """Ranges of increasing tokens."""
    if not tokens.numel():
        return ()
    breaks = (tokens.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), tokens.numel()]
    return tuple((int(tokens[a]), int(tokens[b - 1]) + 1) for a, b in pairwise(bounds))


def document_positions(layout: Layout, rank: int, documents: Sequence[int]) -> torch.Tensor:
    """Position of each token of a rank in its document, int64 [rows] on the CPU."""
    tokens, starts = layout.tokens(rank), torch.tensor(documents[:-1], dtype=torch.int64, device=CPU)
    if not tokens.numel():
        return tokens
    return tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]


def shard_documents(layout: Layout, rank: int, documents: Sequence[int]) -> list[int]:
    """Cumulative lengths of the parts of documents in a shard; documents without a token there are left out."""
    lengths = [0] * (len(documents) - 1)
    for start, stop in layout.ranges[rank]:
        number = max(bisect.bisect_right(documents, start) - 1, 0)
        while number < len(lengths) and documents[number] < stop:
            lengths[number] += max(min(stop, documents[number + 1]) - max(start, documents[number]), 0)
            number += 1
    return [0, *accumulate(length for length in lengths if length)]


@functools.lru_cache(maxsize=256)
def work_of_ranks(layout: Layout, documents: tuple[int, ...], window: Range) -> tuple[int, ...]:
    """Query-key pairs that each rank's queries see, per head."""
    work, _ = _work_of_tokens(documents, window)
    ends = torch.nn.functional.pad((work - TOKEN_WORK).cumsum(0), (1, 0))
    return tuple(
        round(sum(float(ends[stop] - ends[start]) for start, stop in ranges)) for ranges in layout.ranges
    )
