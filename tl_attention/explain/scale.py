"""Time of attention over several GPUs by method, from the model of one GPU and the bytes that ranks exchange.

A rank's kernels are those of one GPU on the shapes that the method gives it. Links are full duplex. Exposed is the communication that the
kernels do not hide:

    gather    all of it: the rank whose two chunks touch needs all keys before its one call, and its key gradients leave after it
    ring      per step what exceeds the kernels of the step; results are merged in fp32, by memory bandwidth

The zigzag layout gives all ranks the same work under a causal mask.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tl_attention.distributed.choice import (
    NVLINK_BYTES,
    RING_BYTES,
    Sizes,
    gather_bytes,
    remote_rows,
)
from tl_attention.distributed.layout import named_layout
from tl_attention.distributed.pieces import Mask
from tl_attention.explain import model, work
from tl_attention.gpus import Gpu
from tl_attention.problem import DTYPES
from tl_attention.testing.shapes import Shape

PASSES = ("fwd", "bwd")
MAX_RANKS = 1024


@dataclass(frozen=True)
class Link:
    """Connection of a rank to the others, the same in both directions.

    Args:
        bytes_s: bytes per second.
        latency: seconds per exchange, with the launch of its kernel.
    """

    words: str
    bytes_s: float
    latency: float


LINKS = {
    "nvlink": Link(
        f"NVLink 4: 450 GB/s per GPU and direction, of which {NVLINK_BYTES / 1e9:.0f} are reached between two H200s",
        NVLINK_BYTES,
        25e-6,
    ),
    "ib": Link("InfiniBand NDR: 400 Gb/s per GPU, of which 45 GB/s are assumed to be reached", 4.5e10, 40e-6),
}
# Bytes of memory per element: of an fp32 result that the kernel merges its own with, of its conversion to bf16 in the end; of an fp32 sum
# and an fp32 gradient that is added to it. Bytes that travel per element of a gradient
MERGE_BYTES, CONVERT_BYTES, ADD_BYTES, GRADIENT_BYTES = 8, 6, 12, 4


@dataclass(frozen=True)
class Scaled:
    """Forward and backward of a method on one rank.

    Args:
        seconds: in all; compute: of the kernels; exposed: of the communication that nothing hides.
        received: bytes; buffer: bytes of keys that a rank holds for the others.
    """

    method: str
    seconds: float
    compute: float
    exposed: float
    received: int
    buffer: int


def sizes_of(shape: Shape, dtype: str) -> Sizes:
    return Sizes(
        shape.batch,
        shape.heads_q,
        shape.heads_kv,
        shape.head_dim,
        shape.head_dim_v,
        DTYPES[dtype].bytes,
        training=True,
    )


@functools.cache
def kernels(shape: Shape, dtype: str, gpu: Gpu) -> tuple[float, float]:
    """Seconds of forward and backward on one GPU."""
    return tuple(model.estimate(work.of_call(shape, one, dtype, gpu)).seconds for one in PASSES)


def methods(shape: Shape, ranks: int, link: Link, dtype: str, gpu: Gpu) -> list[Scaled]:
    """The methods that serve a shape on so many ranks, the fastest first."""
    found = [_gather(shape, ranks, link, dtype, gpu), _ring(shape, ranks, link, dtype, gpu)]
    return sorted(found, key=lambda one: one.seconds)


def efficiency(shape: Shape, one: Scaled, ranks: int, dtype: str, gpu: Gpu) -> float:
    """Share of the ideal speed: one GPU's time over all ranks' time together."""
    return sum(kernels(shape, dtype, gpu)) / (ranks * one.seconds)


def _zigzag(shape: Shape, ranks: int) -> tuple[Shape, Shape]:
    """Calls of the first rank: its first chunk on its own keys, its last chunk on all keys."""
    chunk = max(shape.seqlen_q // (2 * ranks), 1)
    first = replace(shape, seqlen_q=chunk, seqlen_k=chunk if shape.causal else shape.seqlen_k)
    return first, replace(shape, seqlen_q=chunk)


def _rows(shape: Shape, ranks: int) -> int:
    """Keys that a rank needs from others."""
    window = shape.window_size if shape.options.window is not None else (-1, 0 if shape.causal else -1)
    layout = named_layout("zigzag", shape.seqlen_q, ranks)
    return remote_rows(layout, Mask((0, shape.seqlen_q), window))


def _bytes_per_row(sizes: Sizes) -> int:
    return sizes.batch * sizes.heads_kv * (sizes.head_dim + sizes.head_dim_v) * sizes.element_size


def _gather(shape: Shape, ranks: int, link: Link, dtype: str, gpu: Gpu) -> Scaled:
    sizes, rows = sizes_of(shape, dtype), _rows(shape, ranks)
    compute = sum(sum(kernels(part, dtype, gpu)) for part in _zigzag(shape, ranks))
    received = gather_bytes(rows, shape.seqlen_q, ranks, sizes)
    exposed = received / link.bytes_s + 3 * link.latency
    buffer = (rows + shape.seqlen_q // ranks) * _bytes_per_row(sizes)
    return Scaled("gather", compute + exposed, compute, exposed, received, buffer)


def _ring(shape: Shape, ranks: int, link: Link, dtype: str, gpu: Gpu) -> Scaled:
    sizes, rows = sizes_of(shape, dtype), _rows(shape, ranks)
    forward, backward = (
        sum(kernels(part, dtype, gpu)[number] for part in _zigzag(shape, ranks)) for number in (0, 1)
    )
    own = shape.seqlen_q // ranks
    # Steps whose keys some query sees; under a causal mask half the queries see the keys of a step
    steps = -(-rows // own)
    queries = own * (0.5 if shape.causal else 1)
    bandwidth = 1e12 * gpu.tb_s * model.HBM_SHARE
    columns = shape.batch * shape.heads_q
    merged = steps * queries * MERGE_BYTES + own * CONVERT_BYTES
    merge = merged * columns * shape.head_dim_v / bandwidth
    elements = _bytes_per_row(sizes) / sizes.element_size  # of keys and values
    gradients = columns * shape.head_dim, elements  # elements per query and per key
    add = steps * (queries * gradients[0] + own * gradients[1]) * ADD_BYTES
    add = (add + own * sum(gradients) * CONVERT_BYTES) / bandwidth
    there = rows / max(steps, 1) * _bytes_per_row(sizes) / link.bytes_s + link.latency
    back = rows / max(steps, 1) * elements * GRADIENT_BYTES / link.bytes_s + link.latency
    each = (forward + merge) / (steps + 1), (backward + add) / (steps + 1)
    exposed = steps * (max(there - each[0], 0) + max(there + back - each[1], 0)) + back
    compute = forward + backward + merge + add
    received = rows * (2 * _bytes_per_row(sizes) + elements * GRADIENT_BYTES)
    return Scaled("ring", compute + exposed, compute, exposed, received, 2 * own * _bytes_per_row(sizes))


def table(shape: Shape, ranks: list[int], link_name: str, dtype: str, gpu: Gpu) -> str:
    """The answer for a shape: per number of ranks and method times, bytes and efficiency."""
    link = LINKS[link_name]
    alone = sum(kernels(shape, dtype, gpu))
    title = f"{shape}, {dtype}, on several {gpu.name}: forward and backward"
    lines = [
        title,
        "=" * len(title),
        f"link: {link.words}; {1e6 * link.latency:.0f} us per exchange",
        f"one GPU: {_ms(alone)} ms by the model",
        "",
        f"{'ranks':>5}  {'method':8} {'ms':>9} {'kernels':>9} {'exposed':>9} {'received':>9} {'buffer':>9}  {'efficiency':>10}",
    ]
    for count in ranks:
        for one in methods(shape, count, link, dtype, gpu):
            share = efficiency(shape, one, count, dtype, gpu)
            note = "  above the limit of auto: ring" if _is_large(one) else ""
            lines.append(
                f"{count:>5}  {one.method:8} {_ms(one.seconds):>9} {_ms(one.compute):>9} {_ms(one.exposed):>9}"
                f" {_mib(one.received):>9} {_mib(one.buffer):>9}  {share:>10.2f}{note}"
            )
    lines += [
        "",
        "received and buffer in MiB per rank; efficiency: one GPU's time over that of all ranks together",
    ]
    return "\n".join(lines)


def _is_large(one: Scaled) -> bool:
    return one.method == "gather" and one.buffer > RING_BYTES


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}" if seconds < 10 else f"{1e3 * seconds:,.0f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def check(shape: Shape, ranks: list[int]) -> None:
    """Raise ValueError for what the model does not serve."""
    for count in ranks:
        if not 2 <= count <= MAX_RANKS:
            raise ValueError(f"--ranks: expected numbers from 2 to {MAX_RANKS}, got {count}")
    if (
        shape.seqlen_q != shape.seqlen_k
        or shape.is_varlen
        or shape.options.dropout
        or shape.options.alibi
        or shape.options.function
    ):
        raise ValueError(
            f"shape {shape}: expected one sequence with Sq equal to Sk for --ranks, without varlen, dropout, alibi and function"
        )
    if shape.seqlen_q < 2 * max(ranks):
        raise ValueError(f"shape {shape}: expected at least two tokens per rank for --ranks {max(ranks)}")
