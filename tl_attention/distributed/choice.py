"""Choice of a method, "ring" where gathered keys and values would take too much memory."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Literal, NamedTuple, get_args

from tl_attention.distributed.gather import needed_keys
from tl_attention.distributed.layout import Layout
from tl_attention.distributed.pieces import Mask
from tl_attention.problem.switches import switch

MethodName = Literal["auto", "ring", "gather"]
METHODS: tuple[str, ...] = get_args(MethodName)
LOG = logging.getLogger(__name__)
RING_BYTES = 8 << 30  # if gathered keys and values took more, the ring is chosen


class Choice(NamedTuple):
    """The method of a call, and the reason in words."""

    method: str
    reason: str


@functools.lru_cache(maxsize=256)
def remote_rows(layout: Layout, mask: Mask) -> int:
    """Most keys that a rank needs from other ranks."""
    needed = (
        sum(stop - start for start, stop in needed_keys(layout, rank, mask)) for rank in range(layout.world)
    )
    return max(rows - layout.rows(rank) for rank, rows in enumerate(needed))


@functools.lru_cache(maxsize=256)
def choose(layout: Layout, mask: Mask, row_bytes: int) -> Choice:
    """The method of a call; the same on all ranks, as it depends on nothing else. row_bytes: of keys and values per token."""
    most = max(layout.rows(rank) for rank in range(layout.world)) + remote_rows(layout, mask)
    method = "ring" if most * row_bytes > RING_BYTES else "gather"
    reason = f"gathered keys and values take {most * row_bytes >> 20} MiB, ring from {RING_BYTES >> 20}"
    choice = Choice(method, reason)
    LOG.debug("distributed over %d ranks -> %s (%s)", layout.world, method, reason)
    if switch("TL_ATTENTION_PRINT_CONFIGS"):
        print(
            f"tl_attention: distributed over {layout.world} ranks -> {choice.method} ({choice.reason})",
            file=sys.stderr,
        )
    return choice
