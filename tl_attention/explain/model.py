"""Time of a call on a GPU, from the work of its kernels and the rates of the GPU.

A step has up to four kinds of work: products, whose time is that of the tensor cores or of the shared memory that feeds them; the
softmax, exponentials and other instructions of the same warps; additions in L2; and traffic of captured tensors. It takes the time of
the longest, and a share of the time of the others, which no schedule hides whole. A tile takes its steps, a fixed latency, and the
transfer of what it loads first and stores last at its SM's share of the memory bandwidth, unless the schedule moves that under the
steps of its neighbours; in a forward a part of it. Tiles are given to CTAs as the kernel does it, so a last, partly filled wave costs
what it costs. Clocks are those at which NVIDIA states the tensor throughput: a GPU at its power limit runs slower, which the model
ignores.

The constants here are fitted to benchmarks/results, the same for every row, and rounded. All other numbers are counts or facts of
gpus.py. docs/explain.md has the errors; `tl-attention explain --check` prints them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from tl_attention.explain.clocks import GATHERING, HBM, HBM_SHARE
from tl_attention.explain.tiles import Runs, expand
from tl_attention.explain.work import Kernel, Work
from tl_attention.problem import DECODE

# Share of the other units' time in a step that the longest does not hide. Forward: the softmax of a warpgroup is computed under the
# products of another. Backward: dP, dS and dQ of a step wait for each other, unless a warpgroup of its own computes dQ
UNHIDDEN, UNHIDDEN_BWD = 0.2, 0.5
# A tile of a forward waits for this share of what it loads first and stores last: queries of the next tile are loaded early, and nothing
# waits for its stores. A backward waits for all
EXPOSED_FWD = 0.6
BESIDE = 0.6  # share of the time that bytes moved by idle warps of the main kernels would take alone
TILE_CLOCKS = 500  # latency of the first loads of a tile, its first scores and its last stores
LAUNCH_US = 3.0  # per kernel in a CUDA graph
MERGE_US = 0.3  # per round of loads of partial outputs
DECODE_US = 2.5  # finding the work of a CTA, and the first loads
EXACT_TILES = 1 << 20  # with more, tiles are taken as evenly divisible
# Units of a kind of work: the products wait for one of the two, the softmax takes the sum
PRODUCTS = "tensor cores", "shared memory"
SOFTMAX = "exponential unit", "fp32 instructions", GATHERING
MEMORY, LAUNCHES, IDLE = HBM, "launches and latency", "idle SMs"


@dataclass(frozen=True)
class KernelTime:
    """Time of a kernel, and how its SMs are used."""

    seconds: float
    units: dict[str, float]  # seconds that each unit of an SM is busy, if all SMs are equally busy
    waves: float  # tiles per CTA that runs at once
    busy: float  # share of the SMs' time from the first tile to the last in which they have one


@dataclass(frozen=True)
class Estimate:
    """The model's time of a call."""

    seconds: float
    kernels: tuple[KernelTime, ...]
    units: dict[str, float]  # unit -> its time alone at full rate, of all kernels together
    bound: str  # the unit that takes most of the time
    hbm_bytes: int  # as the schedule moves them
    sm_bytes: int  # into shared memory, from L2 or HBM

    def tflops(self, flops: int) -> float:
        return flops / self.seconds / 1e12


def estimate(work: Work) -> Estimate:
    """The time of a call."""
    clock, bandwidth = 1e9 * work.gpu.boost_ghz, 1e12 * work.gpu.tb_s * HBM_SHARE
    sm_bytes = sum(k.steps * k.step_bytes + k.count * k.tile_bytes for k in work.kernels)
    moved = hbm_bytes(work)
    parts = [kernel_time(kernel, work, clock, bandwidth) for kernel in work.kernels]
    helped = sum(helper.bytes * (BESIDE if helper.beside else 1) for helper in work.helpers) / bandwidth
    latency = 1e-6 * (LAUNCH_US * work.launches + MERGE_US * work.merge_rounds)
    if work.direction == DECODE:
        latency += 1e-6 * DECODE_US
    own_bytes = moved - sum(helper.bytes - helper.known for helper in work.helpers)
    seconds = max(sum(part.seconds for part in parts), own_bytes / bandwidth) + helped + latency
    names = dict.fromkeys(name for part in parts for name in part.units)
    units = {name: sum(part.units.get(name, 0.0) for part in parts) for name in names}
    units[MEMORY], units[LAUNCHES] = moved / bandwidth, latency
    units[LAUNCHES] += sum(
        k.count * TILE_CLOCKS / clock / min(work.gpu.sms, k.count) for k in work.kernels if k.ctas_per_sm == 1
    )
    units[IDLE] = sum((1 - part.busy) * part.seconds for part in parts)
    bound = max(units, key=units.__getitem__)
    return Estimate(seconds, tuple(parts), units, bound, moved, sm_bytes)


def hbm_bytes(work: Work) -> int:
    """Bytes of HBM as the schedule moves them.

    Each input and output once. What the tiles of a head stream through their SMs is read again by each wave of CTAs if it is
    larger than the L2. Partial results are written and read.
    """
    total = work.least_bytes + work.again_bytes + sum(helper.bytes - helper.known for helper in work.helpers)
    for kernel in work.kernels:
        if kernel.stream_bytes > 1e6 * work.gpu.l2_mb and work.direction != DECODE:
            streamed = kernel.steps * kernel.step_bytes // work.gpu.sms
            total += max(streamed - kernel.stream_bytes * kernel.streams, 0)
    return total


def kernel_time(kernel: Kernel, work: Work, clock: float, bandwidth: float) -> KernelTime:
    """The time of one kernel without its launch."""
    sms = work.gpu.sms
    units = {name: clocks * kernel.steps / sms / clock for name, clocks in kernel.clocks.items()}
    at_once = sms * kernel.ctas_per_sm
    waves = kernel.count / at_once
    # Sums along diagonals come between the products of a step
    overlaps = work.direction in ("fwd", DECODE) or (
        kernel.config.dq_apart and not work.problem.is_diagonal_bias
    )
    step = step_clocks(kernel.clocks, UNHIDDEN if overlaps else UNHIDDEN_BWD)
    if work.direction == DECODE:
        longest = max(steps for steps, _ in kernel.tiles)
        shared = min(kernel.ctas_per_sm, -(-kernel.count // sms))
        alone = sum(clocks for name, clocks in kernel.clocks.items() if name != "shared memory")
        seconds = longest * max(shared * step, alone) / clock
        return KernelTime(seconds, units, waves, min(kernel.count / at_once, 1.0))
    exposed = kernel.is_exposed * (EXPOSED_FWD if work.direction == "fwd" else 1.0)
    fixed = TILE_CLOCKS + exposed * kernel.tile_bytes * clock * sms / bandwidth
    spent = sum(count * (fixed + steps * step) for steps, count in kernel.tiles)
    clocks = makespan(kernel.tiles, sms, lambda steps: fixed + steps * step, kernel.static)
    return KernelTime(clocks / clock, units, waves, spent / (sms * clocks))


def step_clocks(clocks: dict[str, float], unhidden: float) -> float:
    """Clocks of a step from those of its units: those of the longest kind of work, and a share of the others."""
    fed, softmax = ([clocks.get(name, 0.0) for name in names] for names in (PRODUCTS, SOFTMAX))
    others = (clocks[name] for name in clocks.keys() - {*PRODUCTS, *SOFTMAX})
    works = [max(fed) + UNHIDDEN * min(fed), sum(softmax), *others]
    longest = max(works)
    return longest + unhidden * (sum(works) - longest)


def makespan(tiles: Runs, ctas: int, duration: Callable[[float], float], static: bool = False) -> float:
    """The end of the last of these tiles, which `ctas` CTAs process in order; each starts its next tile when it has finished one.

    Args:
        static: every ctas-th tile belongs to the same CTA.
    """
    count = sum(count for _, count in tiles)
    if count > EXACT_TILES:
        return sum(count * duration(steps) for steps, count in tiles) / ctas
    if len(tiles) == 1:
        return -(-count // ctas) * duration(tiles[0][0])
    ends = [0.0] * ctas
    for number, steps in enumerate(expand(tiles)):
        if static:
            ends[number % ctas] += duration(steps)
        else:
            heapq.heapreplace(ends, ends[0] + duration(steps))
    return max(ends)
