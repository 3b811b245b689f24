"""Sums of dq that exist at a time, where a backward pass rounds dq: see kernels/backward/dq_sinks/round.py and round_packed.py."""

from __future__ import annotations

import math

from tl_attention.config.costs import Costs
from tl_attention.config.round_configs import SIDE_WAVES


def slots_of(units: int, tiles: int, costs: Costs, causal: bool) -> tuple[int, int]:
    """(group, slots): key heads whose tiles are drawn together, and key heads whose sums exist at a time.

    Tiles of a group may be drawn in any order, so it must fit the slots. There are two at least: tiles add to one while the other is
    rounded.

    Args:
        units: key heads of all batch entries.
        tiles: key tiles per key head.
    """
    sms, waves = costs.sms, costs.rounding
    slots = max(2, math.ceil((waves.causal if causal else waves.full) * sms / tiles))
    group = waves.many_group if units * tiles > waves.many * sms else waves.group
    return math.ceil(group * sms / tiles), min(slots, units)


def ring_tiles(tiles: int, longest: int, costs: Costs) -> int:
    """Tiles of packed sequences whose sums exist at a time.

    A head of the longest sequence fits, and so do heads side by side. Tiles of other heads may run beside them.

    Args:
        tiles: of all heads of all sequences.
        longest: tiles per head of the longest sequence.
    """
    return min(tiles, max(costs.rounding.ring * costs.sms, longest + SIDE_WAVES * costs.sms))
