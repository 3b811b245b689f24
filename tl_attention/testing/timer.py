"""The timer of all benchmarks and of the tuner: CUDA-graph replays of several calls, interleaved.

All calls are warmed up and captured first. A sample is one replay of a CUDA graph, between two events; the graph
holds as many launches as last about 10 ms. Each round takes one sample of each call and starts with the next call in
order, with no idle time in between, so clocks are sustained. Small inputs rotate over copies (see `rotation`), so a
launch finds none of them in L2. Ratios are computed within a round: both calls see the same clock. The last launch of
a sample uses the first copy. Its outputs are overwritten with NaN before each sample, so `result` shows whether the
timed launches did their work.
"""

from __future__ import annotations

import contextlib
import functools
import math
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
    """Milliseconds a launch, one sample a round."""

    samples: tuple[float | None, ...]  # None in a round that a slow call sat out
    launches: int  # in a sample
    timer: str  # graph, or eager and why
    result: object = None  # of the last launch, which is of the first copy

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
    """How many times as fast as base, of the ratios of the rounds that both took part in."""
    pairs = zip(timing.samples, base.samples, strict=True)
    return Quartiles.of([theirs / ours for ours, theirs in pairs if ours is not None and theirs is not None])


def rotation(nbytes: int) -> int:
    """How many copies of inputs of nbytes to take turns with: together they exceed twice the L2 cache."""
    return min(MAX_COPIES, 2 * L2_BYTES // nbytes + 1)


def round_order(costs_ms: Mapping[str, float], rounds: int, cap_ms: float) -> list[list[str]]:
    """Who is sampled in each round, in order.

    Everyone moves one place up each round, so all are first equally often. A call whose samples would take
    more than cap_ms sits out rounds, evenly, but has MIN_SAMPLES; the first round has everyone.
    """
    names = list(costs_ms)
    most = max(1, rounds // MIN_SAMPLES)
    stride = {name: min(most, math.ceil(cost * rounds / cap_ms) or 1) for name, cost in costs_ms.items()}
    turns = ([*names[i % len(names) :], *names[: i % len(names)]] for i in range(rounds))
    return [[name for name in turn if i % stride[name] == 0] for i, turn in enumerate(turns)]


Call = Callable[[], object]


class CallFailed(RuntimeError):
    """What one of several calls raised, as its cause, and which it is."""

    def __init__(self, name: object, cause: Exception):
        super().__init__(f"{name}: {first_line(cause)}")
        self.name = name


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """That graphs are captured on: autograd launches a backward on the stream of its forward, so a forward belongs here."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_capture_stream() -> Iterator[None]:
    """Launches on capture_stream, after what the current stream has to do and before what comes next there."""
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
    """Times each call on the current CUDA device by the protocol of this module.

    Args:
        calls: by name; a sequence holds the same call on different copies of its inputs, launched in turn.
            What they return is overwritten, so it must not be their input.
        sample_ms: about how long a sample lasts; it has one launch of each copy at least.
        cap_ms: about how long all samples of one call may take; a slower one is sampled in fewer rounds.
    Returns:
        The timings by name. A call that no graph can capture is launched from the host, and `timer` says so.
    Raises:
        ValueError: fewer than one round.
        CallFailed: a call raised outside of capture.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    turns = {name: [call] if callable(call) else list(call) for name, call in calls.items()}
    costs: dict[str, float] = {}  # of a sample
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
    """Back-to-back calls from Python, L2 warm: what a launch costs where no graph is used."""

    ms: float  # a call, the slower of host and device
    host_us: float  # the host's share
    result: object  # of the last call


def time_eager(call: Call, *, sample_ms: float = 10.0) -> Eager:
    """Median of 3 runs of as many back-to-back calls as last about sample_ms, at most 100."""
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
    """So many calls in turn; what the last one, of the first copy, returns."""
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
    """Compiles, tunes and loads whatever a first call does, then estimates the milliseconds of one."""
    _repeat(copies, 3)
    torch.cuda.synchronize()
    start, end = _events(partial(_repeat, copies, 1))
    torch.cuda.synchronize()
    count = max(1, min(25, int(20 / max(start.elapsed_time(end), 1e-3))))
    start, end = _events(partial(_repeat, copies, count))
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) / count, 1e-3)


class _Sampler:
    """A sample each time it is called: the replay of a graph, or launches from the host."""

    def __init__(self, copies: Sequence[Call], launches: int):
        self.copies, self.launches, self.timer, self.result = copies, launches, "graph", None
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self.graph, stream=capture_stream()):
                self.result = _repeat(copies, launches)
        except Exception as error:  # whatever a library raises: the reason is reported
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own
            torch.cuda.synchronize()
            self.graph, self.timer = None, f"eager: graph capture failed, {first_line(error)}"

    def __call__(self) -> None:
        if self.graph:
            self.graph.replay()
        else:
            self.result = _repeat(self.copies, self.launches)

    def spoil(self) -> None:
        """Make the result NaN, so that one from an earlier sample cannot pass for that of the next."""
        for x in self.result if isinstance(self.result, tuple) else (self.result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.fill_(math.nan)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def measure_cublas_tflops(size: int = 8192) -> float:
    """TFLOPS of the bf16 product of random normal matrices [size, size], sampled as the rows are."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    product = {"cublas": partial(torch.mm, a, b, out=out)}
    return 2 * size**3 / time_interleaved(product)["cublas"].median_ms / 1e9


def measure_copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """GB/s, read plus written, of a kernel that copies nbytes; a graph's memcpy node reaches two thirds of it."""
    source = torch.randn(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    timing = time_interleaved({"copy": partial(torch.neg, source, out=torch.empty_like(source))})["copy"]
    return 2 * nbytes / timing.median_ms / 1e6
