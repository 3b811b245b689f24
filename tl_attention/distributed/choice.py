"""Choice of a method by a model of its time, and the bytes that each method moves.

The model: a rank computes at COMPUTE_FLOPS and receives at NVLINK_BYTES, and the two times add up, as if nothing overlapped. "gather" and
"ring" move keys, which GQA makes few, and the slowest rank of the layout counts. "ulysses" moves queries and results, too, but each rank
receives about 1 / world of that, and work is even whatever the documents are.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import NamedTuple

from tl_attention.distributed.gather import KEPT_BYTES, needed_keys
from tl_attention.distributed.layout import Layout, work_of_ranks
from tl_attention.distributed.pieces import Mask
from tl_attention.distributed.ulysses import heads_divide

METHODS = ("auto", "ring", "gather", "ulysses")
COMPUTE_FLOPS = 5.8e14  # H200, causal d128 in bf16 from 8k to 64k, forward and backward together (2026-11-22)
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


def ulysses_bytes(total: int, world: int, sizes: Sizes) -> int:
    """Bytes that a rank receives: its heads of all tokens, and the results of its tokens; in training also the gradients of both."""
    heads = sizes.heads / world
    heads_kv = max(sizes.heads_kv / world, 1)  # copies where key heads are fewer
    width = sizes.head_dim + sizes.head_dim_v
    columns = heads * width + heads_kv * width  # q and out, k and v
    once = total * (world - 1) / world * columns * sizes.batch * sizes.element_size
    return int(once * (2 if sizes.training else 1))


def supported(method: str, sizes: Sizes, world: int) -> str:
    """The error message if a method does not support a call; empty if it does."""
    if method != "ulysses" or heads_divide(sizes.heads, sizes.heads_kv, world):
        return ""
    return (
        f"method: expected heads that {world} ranks can share for 'ulysses', got {sizes.heads} query heads and {sizes.heads_kv} key"
        " heads; pass method='gather'"
    )


@functools.lru_cache(maxsize=256)
def choose(layout: Layout, mask: Mask, sizes: Sizes) -> Choice:
    """The method of a call; the same on all ranks, as it depends on nothing else."""
    world = layout.world
    rows = remote_rows(layout, mask)
    per_row = sizes.batch * sizes.heads_kv * (sizes.head_dim + sizes.head_dim_v) * sizes.element_size
    most = max(layout.rows(rank) for rank in range(world)) + rows
    work = work_of_ranks(layout, mask.documents, mask.window)
    flops = (
        2 * sizes.batch * sizes.heads * (sizes.head_dim + sizes.head_dim_v) * (3.5 if sizes.training else 1)
    )
    moved = gather_bytes(rows, layout.total, world, sizes)
    times = {"gather": max(work) * flops / COMPUTE_FLOPS + moved / NVLINK_BYTES}
    refused = supported("ulysses", sizes, world)
    if not refused:
        bytes_ulysses = ulysses_bytes(layout.total, world, sizes)
        times["ulysses"] = sum(work) / world * flops / COMPUTE_FLOPS + bytes_ulysses / NVLINK_BYTES
    words = [f"{method} {seconds * 1e3:.3g} ms" for method, seconds in times.items()]
    words += [refused] if refused else []
    method = min(times, key=times.__getitem__)
    if method == "gather" and most * per_row > RING_BYTES:
        method = "ring"
        words.append(f"gathered keys and values would take {most * per_row >> 20} MiB")
    choice = Choice(method, "; ".join(words))
    if os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1":
        print(
            f"tl_attention: distributed over {world} ranks -> {choice.method} ({choice.reason})",
            file=sys.stderr,
        )
    return choice
