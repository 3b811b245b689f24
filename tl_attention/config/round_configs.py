"""Sizes of the rounding of dq beside a backward pass, see kernels/backward/dq_sinks/round.py."""

from __future__ import annotations

import math

ROUNDED_ROWS = 32  # rows of dq that a warp rounds at a time
ROUNDING_WARPS = 2  # per CTA
ROUND_STAGES = 4  # stages of sums that such a warp loads ahead
ROUND_STAGE_BYTES = 2048  # of fp32 sums: 16 rows of 32 columns
ROUNDING_BYTES = ROUNDING_WARPS * ROUND_STAGES * ROUND_STAGE_BYTES  # shared memory per CTA

# Sums that exist at a time, in waves of a key tile per SM, under a causal mask and without one. With more they leave the L2, with fewer the
# tiles of later heads wait
CAUSAL_WAVES, FULL_WAVES = 3, 2
MANY_WAVES = 6  # with more in all, groups of half a wave are faster, see docs/notes/2026-11-25-rounded-dq.md

# Packed sequences, in waves of a key tile per SM. The same note has other values
SIDE_WAVES = 1  # heads of a sequence whose tiles go side by side
LAST_WAVES = 2  # a sequence with fewer tiles behind it is one of the last, whose heads go side by side
RING_WAVES = 3  # sums that exist at a time, at least


def slots_of(units: int, tiles: int, sms: int, causal: bool) -> tuple[int, int]:
    """(group, slots): key heads whose tiles are drawn together, and key heads whose sums exist at a time.

    Tiles of a group may be drawn in any order, so it must fit the slots. There are two at least: tiles add to one while the other is
    rounded.

    Args:
        units: key heads of all batch entries.
        tiles: key tiles per key head.
    """
    slots = max(2, math.ceil((CAUSAL_WAVES if causal else FULL_WAVES) * sms / tiles))
    in_group = sms / 2 if units * tiles > MANY_WAVES * sms else sms
    return math.ceil(in_group / tiles), min(slots, units)


def ring_tiles(tiles: int, longest: int, sms: int) -> int:
    """Tiles of packed sequences whose sums exist at a time, see kernels/backward/dq_sinks/round_packed.py.

    A head of the longest sequence fits, and so do heads side by side. Tiles of other heads may run beside them.

    Args:
        tiles: of all heads of all sequences.
        longest: tiles per head of the longest sequence.
    """
    return min(tiles, max(RING_WAVES * sms, longest + SIDE_WAVES * sms))
