"""Number of splits of a forward: CTAs that share the keys of one tile of queries."""

from __future__ import annotations

import functools

from tl_attention.options import Options
from tl_attention.problem import (
    BUCKET_ENDS,
    MAX_SPLITS,
    ROWS_BUCKET,
    ROWS_OF_BUCKET,
    SHORT_BUCKET,
    SHORT_ROWS,
    SPLIT_BUCKET,
    TABLE_ROWS,
    length_bucket,
)

# Cost model of a split forward. Unit: a step over one key block (1.3 us at d128). Fixed cost of a CTA, with writing and reading its
# partial output; cost of the combine kernel; cost of each partial output in it.
# Causal d128 on an H200, 2026-11-21: 8 heads of 1024 x 1024 take 16.3 us whole, 19.0 in 2 splits; 4 of 2048 x 2048 26.7 and 24.0;
# 8 of 128 x 1024 15.3, and 11.5 in 4; 8 of 128 x 16k 175, and 21.8 in 16.
CTA_STEPS, COMBINE_STEPS, PART_STEPS = 3, 5, 1 / 8
# The schedule shared: steps that it costs to read and merge a piece; least steps of a piece; least steps that it must save over whole tiles
MERGE_STEPS, MIN_PIECE, LEAST_GAIN = 1, 4, 2
MAX_STEPS = 2**31  # the kernel numbers steps by int32, times the number of sharers
TIME_SLACK = 1.04  # fewer splits are taken if their time is at most this times the shortest
MAX_TILES_PER_SM = 0.8  # with more tiles per SM a split gains little
TILE = 128  # queries and keys per tile, assumed before the config is known


@functools.lru_cache(maxsize=4096)
def shared_tiles(tiles: int, steps: int, sms: int) -> tuple[int, int]:
    """(whole, sharers) of the schedule shared: tiles that one CTA computes, the first ones, and the number of CTAs that share the others.

    512 tiles on 132 SMs are three per SM and 116 more, for which 16 SMs would wait. The model, in steps as key_splits(): CTAs begin to
    share at the same time; a tile is cut into equal pieces, or all shared tiles together, where some CTAs have pieces of two.

    Args:
        steps: key blocks per tile.
    """
    left = tiles % sms

    def time(sharers: int) -> float:
        pieces, uneven = -(-sharers // left), sharers % left > 0
        merged = pieces - 1 + uneven
        return -(-left * steps // sharers) + (1 + uneven) * CTA_STEPS + merged * MERGE_STEPS

    choices = (
        [n for n in (*range(2 * left, sms + 1, left), sms) if left * steps >= n * MIN_PIECE] if left else []
    )
    sharers = min(choices, key=time, default=0)
    if not sharers or time(sharers) > steps + CTA_STEPS - LEAST_GAIN or left * steps * (sms + 1) >= MAX_STEPS:
        return tiles, 0
    return tiles - left, sharers


@functools.lru_cache(maxsize=4096)
def key_splits(tiles: int, steps: int, sms: int) -> int:
    """Number of splits per tile, each of at least two key blocks: the fewest within TIME_SLACK of the shortest time.

    The model: CTAs run in waves of one per SM, all as long as the longest tile, which has `steps` key blocks. The longest tile decides if
    there is one wave, and causal tiles of a chunk after many cached keys have nearly equal lengths.
    """
    if tiles >= MAX_TILES_PER_SM * sms:
        return 1

    def time(splits: int) -> float:
        combine = COMBINE_STEPS + splits * PART_STEPS if splits > 1 else 0
        waves = -(-tiles * splits // sms)
        return waves * (-(-steps // splits) + CTA_STEPS) + combine

    times = [time(splits) for splits in range(1, min(MAX_SPLITS, max(steps // 2, 1)) + 1)]
    limit = TIME_SLACK * min(times)
    return next(splits for splits, t in enumerate(times, 1) if t <= limit)


def fwd_bucket(batch: int, heads: int, seqlen_q: int, seqlen_k: int, sms: int) -> str:
    """Bucket of a forward in the tuned table, for a GPU with `sms` SMs."""
    if max(seqlen_q, seqlen_k) <= SHORT_ROWS:
        return SHORT_BUCKET
    splits = key_splits(batch * heads * -(-seqlen_q // TILE), -(-seqlen_k // TILE), sms)
    if splits > 1:
        return SPLIT_BUCKET
    return (
        ROWS_BUCKET if seqlen_k <= BUCKET_ENDS[0] and seqlen_q in ROWS_OF_BUCKET else length_bucket(seqlen_k)
    )


def packed_splits(options: Options, total_q: int, total_k: int, heads: int, sms: int) -> int:
    """Number of splits for packed sequences: num_splits, else key_splits of the upper bounds of their lengths."""
    if options.num_splits:
        return min(options.num_splits, MAX_SPLITS)
    batch = options.cu_seqlens_q.shape[0] - 1
    longest_q = min(options.max_seqlen_q, total_q)
    tiles = min(total_q // TABLE_ROWS + batch, batch * -(-longest_q // TABLE_ROWS))
    keys = min(options.max_seqlen_k, total_k, sum(options.bounds) + TABLE_ROWS)  # per tile
    return key_splits(heads * tiles, -(-keys // TILE), sms)
