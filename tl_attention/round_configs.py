"""Sizes of the rounding of dq beside a backward pass, see kernels/bwd_round.py."""

from __future__ import annotations

import math

ROUNDED_ROWS = 32  # rows of dq that a warp rounds at a time
ROUNDING_WARPS = 2  # per CTA
ROUND_STAGES = 4  # stages of sums that such a warp loads ahead
ROUND_STAGE_BYTES = 2048  # of fp32 sums: 16 rows of 32 columns
ROUNDING_BYTES = ROUNDING_WARPS * ROUND_STAGES * ROUND_STAGE_BYTES  # shared memory per CTA

# Head dim -> sums that exist at a time, in waves of key tiles: some 17 MB at d128 and 13 at d64, with as many queries as keys and no shared
# key heads. With more they leave the L2, with fewer the tiles of later heads wait. Speed over the kernels before at 1.5, 2, 3 waves (H100,
# 2026-11-25): d128 512 causal 1.05, 1.08, 1.03, full 1.11, 1.13, 1.05; d64 causal 512 1.08, 1.21, 1.21, 1k 0.96, 1.11, 1.13
WAVES = {64: 3, 128: 2}


def slots_of(units: int, tiles: int, sms: int, head_dim: int) -> tuple[int, int]:
    """(group, slots): key heads whose tiles are drawn together, and key heads whose sums exist at a time.

    A group has a tile per SM. Tiles of a group may be drawn in any order, so it must fit the slots.

    Args:
        units: key heads of all batch entries.
        tiles: key tiles per key head.
    """
    group = math.ceil(sms / tiles)
    return group, min(WAVES[head_dim] * group, units)
