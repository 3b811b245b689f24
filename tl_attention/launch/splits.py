"""How many CTAs share the keys of a tile in a forward."""

from __future__ import annotations

import functools

from tl_attention.options import Options
from tl_attention.problem import MAX_SPLITS, SPLIT_BUCKET, TABLE_ROWS, length_bucket

# What a split forward costs, in steps of a block of keys (1.3 us at d128): a CTA beside its steps, with its part's way to memory
# and back; the kernel that combines the parts, and each part in it. Causal d128 on an H200, 2026-11-21, us: 8 heads of 1024 x 1024
# 16.3 whole, 19.0 in 2 parts; 4 of 2048 x 2048 26.7 and 24.0; 8 of 128 x 1024 15.3, 11.5 in 4; 8 of 128 x 16k 175, 21.8 in 16
CTA_STEPS, COMBINE_STEPS, PART_STEPS = 3, 5, 1 / 8
ABOUT = 1.04  # times the least time, for fewer parts in memory
FEW_TILES = 0.8  # of the SMs: with more tiles a split gains little
TILE = 128  # queries, and keys, that a tile has where no config is at hand yet


@functools.lru_cache(maxsize=4096)
def key_splits(tiles: int, steps: int, sms: int) -> int:
    """How many CTAs the blocks of keys of each tile are divided among, at least two blocks each: the fewest that are done about
    as soon as can be.

    CTAs of one length run in waves of one an SM. All are taken to be as long as those of the longest tile, of `steps` blocks: in
    one wave they decide, and with keys of earlier queries before a chunk the tiles of a causal problem are nearly equal.
    """
    if tiles >= FEW_TILES * sms:
        return 1

    def time(splits: int) -> float:
        combine = COMBINE_STEPS + splits * PART_STEPS if splits > 1 else 0
        return -(-tiles * splits // sms) * (-(-steps // splits) + CTA_STEPS) + combine

    times = [time(splits) for splits in range(1, min(MAX_SPLITS, max(steps // 2, 1)) + 1)]
    enough = ABOUT * min(times)
    return next(splits for splits, one in enumerate(times, 1) if one <= enough)


def fwd_bucket(batch: int, heads: int, seqlen_q: int, seqlen_k: int, sms: int) -> str:
    """Which row of the tuned table serves a forward on a GPU with so many SMs."""
    splits = key_splits(batch * heads * -(-seqlen_q // TILE), -(-seqlen_k // TILE), sms)
    return SPLIT_BUCKET if splits > 1 else length_bucket(seqlen_k)


def packed_splits(options: Options, total_q: int, total_k: int, heads: int, sms: int) -> int:
    """key_splits of packed sequences, by what bounds their lengths; or as many as are asked for."""
    if options.num_splits:
        return min(options.num_splits, MAX_SPLITS)
    batch = options.cu_seqlens_q.shape[0] - 1
    longest_q = min(options.max_seqlen_q, total_q)
    tiles = min(total_q // TABLE_ROWS + batch, batch * -(-longest_q // TABLE_ROWS))
    keys = min(options.max_seqlen_k, total_k, sum(options.bounds) + TABLE_ROWS)  # that a tile sees
    return key_splits(heads * tiles, -(-keys // TILE), sms)
