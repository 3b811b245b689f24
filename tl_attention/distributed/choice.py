"""Choice of a method, "ring" where gathered keys and values would take too much memory, and the bytes that a rank receives."""

from __future__ import annotations

import functools
import os
import sys
from typing import NamedTuple

from tl_attention.distributed.gather import KEPT_BYTES, needed_keys
from tl_attention.distributed.layout import Layout
from tl_attention.distributed.pieces import Mask

METHODS = ("auto", "ring", "gather")
# Bytes per second and direction: all-to-all between two H200s, NVLink 4 (2026-11-22): 8 MiB in 55 us, 64 in 261, 128 in 478
NVLINK_BYTES = 2.85e11
RING_BYTES = 8 << 30  # if gathered keys and values took more, the ring is chosen


class Sizes(NamedTuple):
    """Sizes of a call on all ranks.

    Args:
        training: the backward runs, too.
    """

    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    element_size: int
    training: bool


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


def gather_bytes(rows: int, total: int, world: int, sizes: Sizes) -> int:
    """Bytes that a rank receives: keys and values of `rows` tokens; in training also their gradients, and the rows again if not kept.

    total: tokens of the whole sequence. world: number of ranks.
    """
    per_row = sizes.batch * sizes.heads_kv * (sizes.head_dim + sizes.head_dim_v) * sizes.element_size
    buffer = rows + total // world
    kept = buffer * per_row <= KEPT_BYTES or buffer * sizes.heads_kv <= total // world * sizes.heads
    return rows * per_row * (1 if not sizes.training else 2 if kept else 3)


@functools.lru_cache(maxsize=256)
def choose(layout: Layout, mask: Mask, sizes: Sizes) -> Choice:
    """The method of a call; the same on all ranks, as it depends on nothing else."""
    per_row = sizes.batch * sizes.heads_kv * (sizes.head_dim + sizes.head_dim_v) * sizes.element_size
    most = max(layout.rows(rank) for rank in range(layout.world)) + remote_rows(layout, mask)
    method = "ring" if most * per_row > RING_BYTES else "gather"
    reason = f"gathered keys and values take {most * per_row >> 20} MiB, ring from {RING_BYTES >> 20}"
    choice = Choice(method, reason)
    if os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1":
        print(
            f"tl_attention: distributed over {layout.world} ranks -> {choice.method} ({choice.reason})",
            file=sys.stderr,
        )
    return choice
