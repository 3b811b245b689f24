"""Tiles of a kernel: how many steps each takes, in which order they run, and which steps an edge of the mask cuts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from tl_attention.kernel_configs import FwdConfig
from tl_attention.problem import AttnProblem
from tl_attention.query_tiles import ROWS, end_at_last_query, first_queries, hides_last_steps, hides_steps
from tl_attention.testing.counts import bounds
from tl_attention.testing.shapes import Shape, sequences

# (steps, number of tiles) of consecutive tiles with as many steps; steps of heads that differ are their mean
Runs = tuple[tuple[float, int], ...]


def query_tiles(shape: Shape, block_M: int, block_N: int, from_end: bool = False) -> list[list[int]]:
    """Blocks of keys that each block of queries of a head sees, by sequence. from_end: see query_tiles.end_at_last_query."""
    left, right = bounds(shape)
    return [
        [
            _blocks(max(0, first + k - q - left), min(k, min(first + block_M, q) + k - q + right), block_N)
            for first in first_queries(block_M, q, from_end)
        ]
        for q, k in sequences(shape)
    ]


def forward_tiles(shape: Shape, problem: AttnProblem, config: FwdConfig) -> list[list[float]]:
    """Steps of each tile of a head of a forward, by sequence: the mean over its warpgroups, which may skip steps."""
    M, N, from_end = config.block_M, config.block_N, end_at_last_query(problem, config)
    whole = query_tiles(shape, M, N, from_end)
    skips, skips_last = hides_steps(problem, config), hides_last_steps(problem, config)
    if not skips and not skips_last:
        return whole
    left, right = bounds(shape)

    def steps(row: int, q: int, k: int, of_tile: int) -> int:
        """Steps of the warpgroup whose queries begin at `row`."""
        if skips_last and row >= q:
            return 1
        if not skips:
            return of_tile
        return max(_blocks(max(0, row + k - q - left), min(k, row + ROWS + k - q + right), N), 1)

    return [
        [
            sum(steps(row, q, k, of_tile) for row in range(first, first + M, ROWS)) / config.warpgroups
            for first, of_tile in zip(first_queries(M, q, from_end), of_tiles, strict=True)
        ]
        for (q, k), of_tiles in zip(sequences(shape), whole, strict=True)
    ]


def key_tiles(shape: Shape, block_M: int, block_N: int) -> list[list[int]]:
    """Blocks of queries of a head that see each block of keys, by sequence."""
    left, right = bounds(shape)
    return [
        [
            _blocks(max(0, first - k + q - right), min(q, min(first + block_N, k) - k + q + left), block_M)
            for first in range(0, k, block_N)
        ]
        for q, k in sequences(shape)
    ]


def _blocks(begin: float, end: float, block: int) -> int:
    return int(-(-end // block) - begin // block) if begin < end else 0


def launch_order(
    by_sequence: Sequence[Sequence[float]],
    heads: int,
    group: int,
    packed: bool,
    longest_first: bool,
    last: bool,
    shares: Sequence[int] = (1,),
) -> Runs:
    """Tiles as kernels/scheduler.py numbers them.

    Args:
        by_sequence: steps of the tiles of one head, by sequence.
        heads: heads per sequence.
        group: heads whose tiles are mixed, longest first.
        packed: the tiles of all sequences run longest first. A sequence_order.SequenceOrder ends about as evenly.
        last: the last tile of a head is the longest.
        shares: factors of these steps, one per head in turn; as many as divide `heads`.
    """
    if packed:
        ordered = sorted((steps for one in by_sequence for steps in one), reverse=True)
        return runs((steps * share, heads // len(shares)) for steps in ordered for share in shares)
    if not longest_first:
        each = [*shares] * (heads // len(shares))
        return runs((steps * share, 1) for one in by_sequence for share in each for steps in one)
    every = heads * len(by_sequence)
    tiles = by_sequence[0][::-1] if last else by_sequence[0]
    groups = [range(first, min(first + group, every)) for first in range(0, every, group)]
    counted = [Counter(shares[head % len(shares)] for head in heads_of) for heads_of in groups]
    return runs(
        (steps * share, n) for counts_of in counted for steps in tiles for share, n in counts_of.items()
    )


def share_last(tiles: Runs, whole: int, parts: int) -> Runs:
    """Tiles of which those from number `whole` on are divided among `parts` CTAs each."""
    found = []
    for steps, count in tiles:
        alone = min(count, whole)
        found += [(steps, alone), (steps / parts, (count - alone) * parts)]
        whole -= alone
    return tuple(run for run in found if run[1])


def runs(tiles: Iterable[tuple[float, int]]) -> Runs:
    """Runs with equal neighbours joined."""
    return tuple(
        (steps, sum(count for _, count in run)) for steps, run in groupby(tiles, lambda tile: tile[0])
    )


@functools.lru_cache(maxsize=64)
def cut_share(shape: Shape, block_M: int, block_N: int, from_end: bool = False) -> float:
    """Share of the steps of tiles of block_M queries x block_N keys in which the mask, or the end of the keys, hides something."""
    left, right = bounds(shape)
    seen = whole = 0
    for (q, k), count in Counter(sequences(shape)).items():
        for first in first_queries(block_M, q, from_end):
            last, offset = min(first + block_M, q), k - q
            seen += count * _blocks(max(0, first + offset - left), min(k, last + offset + right), block_N)
            begin, end = max(0, last - 1 + offset - left), min(k, first + offset + right + 1)
            if begin < end:
                whole += count * max(0, int(end // block_N) - int(-(-begin // block_N)))
    return 1 - whole / seen if seen else 0.0


def expand(runs: Runs) -> Iterator[float]:
    """Steps of each tile."""
    for steps, count in runs:
        for _ in range(count):
            yield steps
