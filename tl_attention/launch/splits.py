"""CTAs that share the keys of a tile of a forward: the number of splits, the tiles of the schedule shared, and models of their time."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tl_attention.config import configs
from tl_attention.problem.attn_problem import (
    BUCKET_ENDS,
    FEW_BUCKET,
    MAX_SPLITS,
    ROWS_BUCKET,
    ROWS_OF_BUCKET,
    SHORT_BUCKET,
    SHORT_ROWS,
    SPLIT_BUCKET,
    TABLE_ROWS,
    AttnProblem,
    length_bucket,
)
from tl_attention.problem.options import Options

# Cost model of a split forward. Unit: a step over one key block (1.3 us at d128). Fixed cost of a CTA, with writing and reading its
# partial output; cost of the combine kernel; cost of each partial output in it.
# Causal d128 on an H200, 2026-11-21: 8 heads of 1024 x 1024 take 16.3 us whole, 19.0 in 2 splits; 4 of 2048 x 2048 26.7 and 24.0;
# 8 of 128 x 1024 15.3, and 11.5 in 4; 8 of 128 x 16k 175, and 21.8 in 16.
CTA_STEPS, COMBINE_STEPS, PART_STEPS = 3, 5, 1 / 8
# The schedule shared: steps that it costs to read and merge a piece; least steps of a piece; least steps that it must save over whole tiles
MERGE_STEPS, MIN_PIECE, LEAST_GAIN = 1, 4, 2
# Steps that it costs to begin, for a second piece of a CTA, and for each tile that a CTA has alone; where they share all tiles
# under a causal mask, for each tile. Time of a step with a running row max over that of one with a held one, as whole tiles have it.
# Fitted to 580 shapes on an H200 (2026-11-23, docs/notes/2026-11-23-shared-tiles.md)
BEGIN_STEPS, SECOND_STEPS, WHOLE_STEPS, TILE_COST, RUNNING_MAX = 1.5, 1, 0.5, 2, 1.1
MAX_WAVES = 6  # the most whole tiles per SM beside shared ones: with more the last wave is little, and none were measured
MAX_STEPS = 2**31  # the kernel numbers steps by int32, times the number of sharers
TIME_SLACK = 1.04  # fewer splits are taken if their time is at most this times the shortest
MAX_TILES_PER_SM = 0.8  # with more tiles per SM a split gains little
TILE = 128  # queries and keys per tile, assumed before the config is known


class Sharing(NamedTuple):
    """Tiles of a forward that CTAs may share by their keys."""

    block_M: int
    block_N: int
    causal: bool


@functools.lru_cache(maxsize=1024)
def sharing(problem: AttnProblem, gpu_name: str) -> Sharing | None:
    """The tiles of a problem that CTAs may share on a GPU (by its name in torch); None if they may not."""
    config = configs.sharing_config(problem, gpu_name)
    return config and Sharing(config.block_M, config.block_N, problem.causal)


@functools.lru_cache(maxsize=4096)
def shared_tiles(tiles: int, steps: int, sms: int) -> tuple[int, int]:
    """(whole, sharers) of the schedule shared: tiles that one CTA computes, the first ones, and the number of CTAs that share the others.

    512 tiles on 132 SMs are three per SM and 116 more, for which 16 SMs would wait. The model, in steps as key_splits(): CTAs begin to
    share at the same time; a tile is cut into equal pieces, or all shared tiles together, where some CTAs have pieces of two.

    Args:
        steps: key blocks per tile.
    """
    left = tiles % sms
    choices = (
        [n for n in (*range(2 * left, sms + 1, left), sms) if left * steps >= n * MIN_PIECE] if left else []
    )
    sharers = min(choices, key=lambda n: pieces_time(left, steps, n), default=0)
    if not sharers or left * steps * (sms + 1) >= MAX_STEPS:
        return tiles, 0
    saved = steps + CTA_STEPS - pieces_time(left, steps, sharers)
    return (tiles - left, sharers) if saved >= LEAST_GAIN else (tiles, 0)


def pieces_time(tiles: int, steps: int, sharers: int, step: float = 1, second: float = CTA_STEPS) -> float:
    """Time of `tiles` tiles that `sharers` CTAs share, see shared_tiles(). step, second: time of a step, cost of a CTA's second piece."""
    pieces, uneven = -(-sharers // tiles), sharers % tiles > 0
    merged = pieces - 1 + uneven
    return -(-tiles * steps // sharers) * step + CTA_STEPS + uneven * second + merged * MERGE_STEPS


@functools.lru_cache(maxsize=4096)
def causal_shares(
    heads: int, seqlen_q: int, seqlen_k: int, block_M: int, block_N: int, sms: int
) -> tuple[int, int, int]:
    """(cost of a head, sharers, tile_cost) of the schedule shared under a causal mask, whose CTAs share all tiles.

    Args:
        heads: those of all batch entries.
    """
    cost = sum(TILE_COST + steps for steps in causal_steps(seqlen_q, seqlen_k, block_M, block_N))
    total = heads * cost
    return cost, max(min(sms, total // (TILE_COST + MIN_PIECE), (MAX_STEPS - 1) // total), 1), TILE_COST


def share_arguments(
    shares: Sharing, heads: int, seqlen_q: int, seqlen_k: int, sms: int, num_splits: int = 0
) -> tuple[int, tuple[int, ...]]:
    """(ctas, last launch arguments) of the schedule shared.

    The arguments are the number of tiles that one CTA computes and the number of sharers; under a causal mask, where all tiles are
    shared, the cost of a head, the number of sharers and tile_cost. See kernels.shared_tiles.SharedPieces.

    Args:
        heads: those of all batch entries.
        num_splits: with 1 no tile is shared; under a causal mask no row of the tables has this schedule then.
    """
    if shares.causal:
        cost, sharers, tile_cost = causal_shares(
            heads, seqlen_q, seqlen_k, shares.block_M, shares.block_N, sms
        )
        return sharers, (cost, sharers, tile_cost)
    tiles = heads * -(-seqlen_q // shares.block_M)
    whole, sharers = (
        (tiles, 0) if num_splits == 1 else shared_tiles(tiles, -(-seqlen_k // shares.block_N), sms)
    )
    return min(tiles, sms) if whole else sharers, (whole, sharers)


def causal_steps(seqlen_q: int, seqlen_k: int, block_M: int, block_N: int) -> list[int]:
    """Steps of the tiles of a head under a causal mask, in the order of their queries."""
    past_diagonals = (first + block_M + seqlen_k - seqlen_q for first in range(0, seqlen_q, block_M))
    return [max(-(-min(keys, seqlen_k) // block_N), 1) for keys in past_diagonals]


@functools.lru_cache(maxsize=4096)
def key_splits(tiles: int, steps: int, sms: int) -> int:
    """Number of splits per tile, each of at least two key blocks: the fewest within TIME_SLACK of the shortest time.

    The model: CTAs run in waves of one per SM, all as long as the longest tile, which has `steps` key blocks. The longest tile decides if
    there is one wave, and causal tiles of a chunk after many cached keys have nearly equal lengths.
    """
    if tiles >= MAX_TILES_PER_SM * sms:
        return 1
    most = min(MAX_SPLITS, max(steps // 2, 1))
    times = [splits_time(tiles, steps, sms, splits) for splits in range(1, most + 1)]
    limit = TIME_SLACK * min(times)
    return next(splits for splits, t in enumerate(times, 1) if t <= limit)


def splits_time(tiles: int, steps: float, sms: int, splits: int, step: float = 1) -> float:
    """Time of tiles whose steps `splits` CTAs share, see key_splits(). step: time of a step."""
    combine = COMBINE_STEPS + splits * PART_STEPS if splits > 1 else 0
    waves = -(-tiles * splits // sms)
    return waves * (-(-steps // splits) * step + CTA_STEPS) + combine


def fwd_bucket(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, sms: int, shares: Sharing | None = None
) -> str:
    """Bucket of a forward in the tuned table, for a GPU with `sms` SMs. shares: tiles that CTAs may share."""
    if max(seqlen_q, seqlen_k) <= SHORT_ROWS:
        return SHORT_BUCKET
    splits = key_splits(batch * heads * -(-seqlen_q // TILE), -(-seqlen_k // TILE), sms)
    if shares and saves_time(shares, batch * heads, seqlen_q, seqlen_k, sms, splits):
        return FEW_BUCKET
    if splits > 1:
        return SPLIT_BUCKET
    return (
        ROWS_BUCKET if seqlen_k <= BUCKET_ENDS[0] and seqlen_q in ROWS_OF_BUCKET else length_bucket(seqlen_k)
    )


def saves_time(shares: Sharing, heads: int, seqlen_q: int, seqlen_k: int, sms: int, splits: int) -> bool:
    """True if the schedule shared takes less time than whole tiles, or than `splits` CTAs per tile.

    Args:
        heads: those of all batch entries.
    """
    if shares.causal:
        return _saves_time_under_causal_mask(shares, heads, seqlen_q, seqlen_k, sms, splits)
    tiles, steps = heads * -(-seqlen_q // shares.block_M), -(-seqlen_k // shares.block_N)
    whole, sharers = shared_tiles(tiles, steps, sms)
    if not sharers or whole > MAX_WAVES * sms:
        return False
    shared = pieces_time(tiles - whole, steps, sharers, RUNNING_MAX, SECOND_STEPS)
    if splits > 1:
        return shared + LEAST_GAIN < _splits_time_of(shares, heads, seqlen_q, steps, sms, splits)
    return shared + BEGIN_STEPS + whole // sms * WHOLE_STEPS <= steps + CTA_STEPS


def _splits_time_of(shares: Sharing, heads: int, seqlen_q: int, steps: float, sms: int, splits: int) -> float:
    """splits_time() in steps of a shared tile with a held row max. Tiles of TILE queries may have fewer empty rows."""
    blocks, rows = -(-seqlen_q // TILE), -(-seqlen_q // shares.block_M) * shares.block_M
    return splits_time(heads * blocks, steps, sms, splits, RUNNING_MAX * blocks * TILE / rows)


def _saves_time_under_causal_mask(
    shares: Sharing, heads: int, seqlen_q: int, seqlen_k: int, sms: int, splits: int
) -> bool:
    """saves_time() in steps of 128 keys. Whole tiles run the longest first; some SM has k + 1 of the k * sms + 1 longest."""
    blocks = shares.block_M, shares.block_N
    tiles, step = heads * -(-seqlen_q // shares.block_M), shares.block_N / TILE
    if tiles * (RUNNING_MAX - 1) > sms:  # the last wave is less than a running row max costs
        return False
    steps = causal_steps(seqlen_q, seqlen_k, *blocks)[::-1]
    cost, sharers, _ = causal_shares(heads, seqlen_q, seqlen_k, *blocks, sms)
    share = heads * cost / sharers
    merged = -(-steps[0] // share)
    shared = step * RUNNING_MAX * share + CTA_STEPS + (1 + merged) * MERGE_STEPS
    if splits > 1:
        return shared < _splits_time_of(shares, heads, seqlen_q, steps[0] * step, sms, splits)
    waves = (steps[i // heads] * (i // sms + 1) for i in range(0, tiles, sms))
    return shared < step * max(heads * sum(steps) / sms, *waves) + CTA_STEPS


def packed_splits(options: Options, total_q: int, total_k: int, heads: int, sms: int) -> int:
    """Number of splits for packed sequences: num_splits, else key_splits of the upper bounds of their lengths."""
    if options.num_splits:
        return min(options.num_splits, MAX_SPLITS)
    batch = options.cu_seqlens_q.shape[0] - 1
    longest_q = min(options.max_seqlen_q, total_q)
    tiles = min(total_q // TABLE_ROWS + batch, batch * -(-longest_q // TABLE_ROWS))
    keys = min(options.max_seqlen_k, total_k, sum(options.bounds) + TABLE_ROWS)  # per tile
    return key_splits(heads * tiles, -(-keys // TILE), sms)
