"""The timer of all benchmarks and of the tuner: CUDA-graph replays of several calls, interleaved.

All calls are warmed up and captured first. A sample is one replay of a CUDA graph, between two events; the graph
holds as many launches as last about 10 ms. Each round takes one sample of each call, in an order of its own, with no idle
time in between, so clocks are sustained (see `round_order`). Small inputs rotate over copies (see `rotation`), so a
launch finds none of them in L2. Ratios are computed within a round. The last launch of a sample uses the first copy. Its
outputs are overwritten with NaN before each sample, so `result` shows whether the timed launches wrote them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

L2_BYTES = 50 << 20
MAX_COPIES = 1024
MIN_SAMPLES = 3


@dataclass(frozen=True)
class Quartiles:
    p25: float
    median: float
    p75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Timing:
    """Milliseconds per launch, one sample per round."""

    samples: tuple[float | None, ...]  # None in rounds without a sample of a slow call
    launches: int  # per sample
    timer: str  # "graph", or "eager: " and the reason
    result: object = None  # output of the last launch, for the first copy

    @property
    def quartiles(self) -> Quartiles:
        return Quartiles.of([sample for sample in self.samples if sample is not None])

    @property
    def median_ms(self) -> float:
        return self.quartiles.median

    @property
    def p25(self) -> float:
        return self.quartiles.p25

    @property
    def p75(self) -> float:
        return self.quartiles.p75


def speedup(timing: Timing, base: Timing) -> Quartiles:
    """Speed of timing over that of base: quartiles of the ratios within rounds that have both."""
    pairs = zip(timing.samples, base.samples, strict=True)
    return Quartiles.of([theirs / ours for ours, theirs in pairs if ours is not None and theirs is not None])


def rotation(nbytes: int) -> int:
    """Number of copies of inputs of nbytes that together exceed twice the L2 cache."""
    return min(MAX_COPIES, 2 * L2_BYTES // nbytes + 1)


def round_order(costs_ms: Mapping[str, float], rounds: int, cap_ms: float) -> list[list[str]]:
    """Calls sampled in each round, in order.

    Each round has a random order, the same in every process. Power limits the clock: behind a call that draws less power a call runs
    faster, by up to 10 % behind FlashAttention-2 (H200, 2026-11-26). In a fixed order one call would always have that advantage.

    A call whose samples would take more than cap_ms skips rounds, evenly, down to MIN_SAMPLES; the first round has all calls.
    """
    names = list(costs_ms)
    most = max(1, rounds // MIN_SAMPLES)
    stride = {name: min(most, math.ceil(cost * rounds / cap_ms) or 1) for name, cost in costs_ms.items()}
    generator = random.Random(0)
    turns = [[name for name in names if i % stride[name] == 0] for i in range(rounds)]
    for turn in turns:
        generator.shuffle(turn)
    return turns


Call = Callable[[], object]


class CallFailed(RuntimeError):
    """Failure of one of several calls: its name, with its exception as the cause."""

    def __init__(self, name: object, cause: Exception):
        super().__init__(f"{name}: {first_line(cause)}")
        self.name = name


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """The stream of graph capture. Autograd launches a backward on the stream of its forward, so forwards run here too."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_capture_stream() -> Iterator[None]:
    """Launch on capture_stream, ordered after earlier and before later work of the current stream."""
    before, stream = torch.cuda.current_stream(), capture_stream()
    if before == stream:
        yield
        return
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


def time_interleaved(
    calls: Mapping[str, Call | Sequence[Call]],
    rounds: int = 15,
    *,
    sample_ms: float = 10.0,
    cap_ms: float = 500.0,
) -> dict[str, Timing]:
    """Time each call on the current CUDA device by the method of this module.

    Args:
        calls: by name; a sequence holds the same call on several copies of its inputs, launched in turn.
            Outputs are overwritten, so they must not be inputs.
        sample_ms: approximate length of a sample, which has at least one launch per copy.
        cap_ms: approximate time for all samples of one call; a slower call is sampled in fewer rounds.
    Returns:
        The timings by name. A call that no graph can capture is launched from the host, and `timer` says so.
    Raises:
        ValueError: fewer than one round.
        CallFailed: a call raised outside of capture.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    turns = {name: [call] if callable(call) else list(call) for name, call in calls.items()}
    costs: dict[str, float] = {}  # milliseconds per sample
    samplers: dict[str, _Sampler] = {}
    for name, copies in turns.items():
        with _blamed(name):
            cost = _warm_up(copies)
            samplers[name] = _Sampler(copies, max(len(copies), round(sample_ms / cost)))
            costs[name] = cost * samplers[name].launches

    samples = {name: [None] * rounds for name in turns}
    for i, order in enumerate([list(turns), *round_order(costs, rounds, cap_ms)]):
        events = {}
        for name in order:
            with _blamed(name):
                samplers[name].spoil()
                events[name] = _events(samplers[name])
        torch.cuda.synchronize()
        if i == 0:
            continue  # first replays upload the graphs
        for name, (start, end) in events.items():
            samples[name][i - 1] = start.elapsed_time(end) / samplers[name].launches
    return {
        name: Timing(tuple(samples[name]), sampler.launches, sampler.timer, sampler.result)
        for name, sampler in samplers.items()
    }


@dataclass(frozen=True)
class Eager:
    """Cost of a call without graphs: back-to-back calls from Python, L2 warm."""

    ms: float  # per call, the slower of host and device
    host_us: float  # per call, time on the host
    result: object  # output of the last call


def time_eager(call: Call, *, sample_ms: float = 10.0) -> Eager:
    """Median of 3 runs, each of as many back-to-back calls as last about sample_ms, at most 100."""
    count = min(100, max(1, round(sample_ms / _warm_up([call]))))
    device, host, results = [], [], []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start, end = _events(lambda: results.append(_repeat([call], count)))
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end))
    return Eager(statistics.median(device) / count, statistics.median(host) / count * 1e6, results[-1])


def _events(work: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    return start, end


def _repeat(copies: Sequence[Call], count: int) -> object:
    """`count` calls over the copies in turn, ending with the first copy, whose output is returned."""
    for i in range(1 - count, 0):
        copies[i % len(copies)]()
    return copies[0]()


@contextlib.contextmanager
def _blamed(name: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CallFailed(name, error) from error


def _warm_up(copies: Sequence[Call]) -> float:
    """Milliseconds of a call, estimated after first calls have compiled, tuned and loaded, and planned for each copy."""
    _repeat(copies, max(3, len(copies)))
    torch.cuda.synchronize()
    start, end = _events(partial(_repeat, copies, 1))
    torch.cuda.synchronize()
    count = max(1, min(25, int(20 / max(start.elapsed_time(end), 1e-3))))
    start, end = _events(partial(_repeat, copies, count))
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) / count, 1e-3)


class _Sampler:
    """Callable that takes one sample: a graph replay, or launches from the host."""

    def __init__(self, copies: Sequence[Call], launches: int):
        self.copies, self.launches, self.timer, self.result = copies, launches, "graph", None
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self.graph, stream=capture_stream()):
                self.result = _repeat(copies, launches)
        except Exception as error:  # libraries raise anything; the reason is reported
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream set
            torch.cuda.synchronize()
            self.graph, self.timer = None, f"eager: graph capture failed, {first_line(error)}"

    def __call__(self) -> None:
        if self.graph:
            self.graph.replay()
        else:
            self.result = _repeat(self.copies, self.launches)

    def spoil(self) -> None:
        """Overwrite the output with NaN, so that the output of an earlier sample cannot pass for the next."""
        for x in self.result if isinstance(self.result, tuple) else (self.result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.fill_(math.nan)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def measure_cublas_tflops(size: int = 8192) -> float:
    """TFLOPS of cuBLAS for random normal bf16 matrices [size, size], timed like the rows."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    product = {"cublas": partial(torch.mm, a, b, out=out)}
    return 2 * size**3 / time_interleaved(product)["cublas"].median_ms / 1e9


def measure_copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """GB/s, read plus written, of a kernel that copies nbytes. A memcpy node in a graph reaches two thirds of it."""
    source = torch.randn(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    timing = time_interleaved({"copy": partial(torch.neg, source, out=torch.empty_like(source))})["copy"]
    return 2 * nbytes / timing.median_ms / 1e6
