"""The one timer, the FLOP, byte and roofline formulas, and the facts of the machine a speed was measured on.

Protocol. All calls are warmed up and captured first. A sample is one replay of a CUDA graph of so many
launches that it lasts about 10 ms, between two events. Every round takes one sample of each call, starting
one place further on, with no idle time in between (sustained clocks). Small inputs take turns with copies
(see `rotation`), so a launch finds none of them in L2. Ratios are taken within a round: both sides see the
same clock. The last launch of a sample is of the first copy, and what it returned the sample before is made
NaN, so that `result` shows whether the calls that were timed did their work.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib.metadata
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from tl_attention import configs
from tl_attention.problem import DECODE, OPTIONS, AttnProblem

L2_BYTES = 50 << 20
MAX_COPIES = 1024
PEAK_TFLOPS = 1071  # dense bf16 of an H200: 132 SMs x 4096 FLOP a clock x 1.98 GHz
MIN_SAMPLES = 3

# What can be measured beside DECODE, named by its passes; det: gradients that are equal bit by bit from call to call.
DIRECTIONS = ("fwd", "bwd", "bwd_det", "fwd_bwd", "fwd_bwd_det")
RAGGED = 16  # the shortest of ragged lengths is not shorter than this part of the longest


def is_deterministic(direction: str) -> bool:
    """Whether its gradients must be equal bit by bit."""
    return direction.endswith("_det")


@dataclass(frozen=True)
class Options:
    """What a problem asks beside its mask, written as words in this order: `window=1023,sink`."""

    window: int | None = (
        None  # keys that a query sees before the diagonal, and as many after it unless causal
    )
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    dropout: float = 0.0
    varlen: bool = False  # the batch is packed sequences, of one length
    uneven: bool = False  # the batch is packed sequences, of the lengths of `sequences`
    packed: bool = False  # q, k and v are slices of one tensor, as are their gradients
    page: int = 0  # decode: keys of a page of the cache; 0: each sequence lies in one piece
    ragged: bool = False  # decode: sequences of the lengths of `sequences`, seqlen_k at most

    @classmethod
    def parse(cls, words: Sequence[str]) -> Options:
        """Raises ValueError with the words expected."""
        asked: dict[str, bool | int | float] = {}
        for word in words:
            name, _, value = word.partition("=")
            try:
                asked[name] = OPTION_TYPES[name](value)
            except (KeyError, ValueError):
                known = ", ".join(
                    name if kind is _flag else f"{name}=.." for name, kind in OPTION_TYPES.items()
                )
                raise ValueError(f"expected options of {known}, got {word!r}") from None
        return cls(**asked)

    @property
    def words(self) -> list[str]:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        asked = [(name, value) for name, value, default in values if value != default]
        return [name if value is True else f"{name}={str(value).removesuffix('.0')}" for name, value in asked]

    def __bool__(self) -> bool:
        return self != Options()


def _flag(value: str) -> bool:
    if value:
        raise ValueError
    return True


def _size(value: str) -> int:
    if not value.isdecimal():
        raise ValueError
    return int(value)


OPTION_TYPES: dict[str, Callable[[str], bool | int | float]] = {
    **dict.fromkeys((field.name for field in fields(Options)), _flag),
    "window": _size,
    "page": _size,
    "softcap": float,
    "dropout": float,
}


@dataclass(frozen=True)
class Shape:
    """An attention problem and its sizes, written `B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]` with mask causal or full."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int  # the mean, where the lengths are uneven
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    options: Options = Options()

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Raises ValueError with the form expected and what is wrong."""
        words = [word.strip() for word in text.split(",")]
        named = next((i for i, word in enumerate(words) if word in ("causal", "full")), len(words) - 1)
        sizes, mask, options = words[:named], words[named], words[named + 1 :]
        complaint = f"shape {text!r}: expected B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]"
        if mask not in ("causal", "full"):
            raise ValueError(f"{complaint} with mask causal or full, got {mask!r}")
        if len(sizes) not in (6, 7):
            raise ValueError(f"{complaint}: 6 or 7 numbers and a mask, got {len(sizes)} numbers")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"{complaint} with positive whole numbers")
        numbers = [int(size) for size in sizes]
        if numbers[1] % numbers[2]:
            raise ValueError(f"{complaint} with Hq a multiple of Hkv, got {numbers[1]} and {numbers[2]}")
        try:
            asked = Options.parse(options)
        except ValueError as error:
            raise ValueError(f"{complaint}: {error}") from None
        if asked.uneven and numbers[3] != numbers[4]:
            raise ValueError(
                f"{complaint}: uneven lengths with Sq equal to Sk, got {numbers[3]} and {numbers[4]}"
            )
        if asked.packed and (
            numbers[1] != numbers[2] or numbers[3] != numbers[4] or numbers[-1] != numbers[5]
        ):
            raise ValueError(f"{complaint}: packed with q, k and v of one size")
        return cls(*numbers[:6], numbers[-1], mask == "causal", asked)

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def plain(self) -> Shape:
        """The same sizes and mask without options; sequences of one length each instead of uneven ones."""
        return replace(self, options=Options())

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right) as FlashAttention has it, -1 without a bound; causal itself bounds nothing here."""
        left = -1 if self.options.window is None else self.options.window
        return left, 0 if self.causal and left >= 0 else left

    @property
    def is_varlen(self) -> bool:
        return self.options.varlen or self.options.uneven

    @property
    def option_names(self) -> tuple[str, ...]:
        """What of OPTIONS it asks for."""
        asked = self.options
        on = {
            "window": asked.window is not None,
            "softcap": asked.softcap,
            "alibi": asked.alibi,
            "sink": asked.sink,
            "dropout": asked.dropout,
            "varlen": self.is_varlen,
        }
        return tuple(name for name in OPTIONS if on[name])

    def problem(self, dtype: str, direction: str = "fwd") -> AttnProblem:
        """What kernels are compiled for: the right end of a window stands for causal, and a backward finds a sink in the log-sum-exp."""
        options = tuple(name for name in self.option_names if name != "sink" or direction == "fwd")
        causal = self.causal and "window" not in options
        return AttnProblem.of(dtype, self.head_dim, self.head_dim_v, causal, direction, options)

    def __str__(self) -> str:
        sizes = (getattr(self, field.name) for field in fields(self)[:7])
        return ",".join([*map(str, sizes), self.mask, *self.options.words])


def chosen_shapes(
    texts: Sequence[str], named: Mapping[str, str] | None = None, where: str = ""
) -> dict[str, Shape]:
    """Name -> shape, of names and patterns and literal shapes, split by space or ;

    Args:
        named: name -> text of a shape, and where they are in words; default: what configs/shapes.toml has.
    Raises:
        ValueError: nothing has this name, or the text is no shape.
    """
    chosen = {}
    if named is None:
        named = configs.named_shapes()
        where = f"configs/shapes.toml, which has {', '.join(named)}"
    for text in " ".join(texts).replace(";", " ").split():
        if "," in text:
            chosen[text] = Shape.parse(text)
            continue
        if not (names := fnmatch.filter(named, text)):
            raise ValueError(f"shape {text!r}: not in {where}")
        chosen |= {name: Shape.parse(named[name]) for name in names}
    return chosen


@functools.cache
def sequences(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(seqlen_q, seqlen_k) of each entry of the batch.

    Uneven lengths are log-normal with sigma 1, as documents are, always the same, and sum to batch x seqlen. Ragged ones are of
    keys alone, log-uniform from a RAGGED-th of seqlen_k up to it, always the same, the first the longest.
    """
    generator = random.Random(0)
    if shape.options.ragged:
        shares = [1.0, *(RAGGED ** -generator.random() for _ in range(shape.batch - 1))]
        return tuple((shape.seqlen_q, max(shape.seqlen_q, round(shape.seqlen_k * share))) for share in shares)
    if not shape.options.uneven:
        return ((shape.seqlen_q, shape.seqlen_k),) * shape.batch
    weights = [generator.lognormvariate(0, 1) for _ in range(shape.batch)]
    spare = shape.batch * (shape.seqlen_q - 1)  # each has one token at least
    ends = [round(spare * sum(weights[: i + 1]) / sum(weights)) for i in range(shape.batch)]
    return tuple((1 + end - begin,) * 2 for begin, end in zip([0, *ends], ends, strict=False))


def _bounds(shape: Shape) -> tuple[float, float]:
    """How far before and after its diagonal, key query + seqlen_k - seqlen_q, a query sees."""
    window = math.inf if shape.options.window is None else shape.options.window
    return window, 0 if shape.causal else window


def visible_pairs(shape: Shape) -> int:
    """(query, key) pairs that one head attends to in all batch entries; causal and windows are bottom-right."""
    left, right = _bounds(shape)
    return sum(
        _pairs_up_to(*lengths, right) - _pairs_up_to(*lengths, -left - 1) for lengths in sequences(shape)
    )


def _pairs_up_to(seqlen_q: int, seqlen_k: int, far: float) -> int:
    """Pairs whose key is at most so far after the diagonal of the query."""

    if far >= seqlen_q:
        return seqlen_q * seqlen_k
    if far <= -seqlen_k:
        return 0

    def rising(start: int) -> int:
        """The sum of max(0, start + i) over the queries, i counting from 1."""
        first, last = max(0, start), max(0, start + seqlen_q)
        return (last * (last + 1) - first * (first + 1)) // 2

    return rising(seqlen_k - seqlen_q + int(far)) - rising(int(far) - seqlen_q)


def visible_blocks(shape: Shape, block_M: int = 128, block_N: int = 128) -> int:
    """Tiles of block_M queries by block_N keys of which the mask leaves any, of one head in all batch entries."""
    left, right = _bounds(shape)
    blocks = 0
    for seqlen_q, seqlen_k in sequences(shape):
        for first in range(0, seqlen_q, block_M):
            last = min(first + block_M, seqlen_q) - 1
            offset = seqlen_k - seqlen_q
            begin, end = max(0, first + offset - left), min(seqlen_k, last + offset + right + 1)
            if begin < end:
                blocks += math.ceil(end / block_N) - int(begin // block_N)
    return blocks


def share_of_blocks(shape: Shape) -> float:
    """Of the visible tiles of the plain problem, how many its options leave: the ideal share of its time."""
    return visible_blocks(shape) / visible_blocks(shape.plain)


def fwd_flops(shape: Shape) -> int:
    """2 FLOPs a multiply-add of S = QKᵀ and O = PV, over the visible pairs of all batch entries and heads."""
    return 2 * visible_pairs(shape) * (shape.head_dim + shape.head_dim_v) * shape.heads_q


def bwd_flops(shape: Shape) -> int:
    """The same of S = QKᵀ, dQ = dS K and dK = dSᵀQ over head_dim, and of dP = dO Vᵀ and dV = PᵀdO over head_dim_v."""
    return 2 * visible_pairs(shape) * (3 * shape.head_dim + 2 * shape.head_dim_v) * shape.heads_q


def flops(shape: Shape, direction: str) -> int:
    """FLOPs of the passes of one of DIRECTIONS, or of DECODE."""
    if direction == DECODE:
        return fwd_flops(shape)
    return _of_passes(fwd_flops, bwd_flops, shape, direction)


def _qkv_bytes(shape: Shape) -> int:
    """q, k and v, or their gradients, 2 bytes an element."""
    q = shape.heads_q * shape.seqlen_q * shape.head_dim
    kv = shape.heads_kv * shape.seqlen_k * (shape.head_dim + shape.head_dim_v)
    return 2 * shape.batch * (q + kv)


def _out_bytes(shape: Shape) -> int:
    """out, or its gradient, 2 bytes an element."""
    return 2 * shape.batch * shape.heads_q * shape.seqlen_q * shape.head_dim_v


def _lse_bytes(shape: Shape) -> int:
    """fp32."""
    return 4 * shape.batch * shape.heads_q * shape.seqlen_q


def input_bytes(shape: Shape, direction: str = "fwd") -> int:
    """What a call is given: q, k, v; where there is a backward, dout; and where it is alone, out and lse."""
    given = _qkv_bytes(shape)
    if "bwd" in direction:
        given += _out_bytes(shape)
    if "fwd" not in direction:
        given += _out_bytes(shape) + _lse_bytes(shape)
    return given


def fwd_bytes(shape: Shape) -> int:
    """q, k, v read once, out and lse written once."""
    return _qkv_bytes(shape) + _out_bytes(shape) + _lse_bytes(shape)


def bwd_bytes(shape: Shape) -> int:
    """dout, q, k, v, out and lse read once, dq, dk and dv written once."""
    return 2 * _qkv_bytes(shape) + 2 * _out_bytes(shape) + _lse_bytes(shape)


def decode_bytes(shape: Shape) -> int:
    """The keys and values of all sequences and q read once, out written once."""
    keys = shape.heads_kv * sum(seqlen_k for _, seqlen_k in sequences(shape))
    queries = shape.heads_q * shape.batch * shape.seqlen_q
    return 2 * (keys + queries) * (shape.head_dim + shape.head_dim_v)


def traffic(shape: Shape, direction: str) -> int:
    """Bytes of the passes of one of DIRECTIONS, or of DECODE."""
    if direction == DECODE:
        return decode_bytes(shape)
    return _of_passes(fwd_bytes, bwd_bytes, shape, direction)


def _of_passes(fwd: Callable[[Shape], int], bwd: Callable[[Shape], int], shape: Shape, direction: str) -> int:
    return ("fwd" in direction) * fwd(shape) + ("bwd" in direction) * bwd(shape)


def intensity(shape: Shape, direction: str) -> float:
    """FLOPs a byte."""
    return flops(shape, direction) / traffic(shape, direction)


def fwd_ceiling(shape: Shape, block_M: int, block_N: int) -> tuple[float, float]:
    """What the model allows a kernel with these tiles at most, in TFLOPS: (exp after MMA, exp under MMA).

    An SM does 4096 tensor FLOPs or 16 exp2 a clock. A tile is computed whole where the mask leaves any of it.
    Source: Shah et al. 2024 (FlashAttention-3), section 3.1, with the numbers of an H200 at its boost clock.
    """
    mma = 2 * (shape.head_dim + shape.head_dim_v) / 4096  # clocks a score
    exp = 1 / 16
    executed = visible_blocks(shape, block_M, block_N) * block_M * block_N
    useful = PEAK_TFLOPS * visible_pairs(shape) / executed if executed else 0.0
    return useful * mma / (mma + exp), useful * mma / max(mma, exp)


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


def version(distribution: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(command: str) -> dict[str, str]:
    """What places a number, in words: GPU, limits, clocks, versions, commit. What is absent says so."""
    facts = {"gpu": "none", "power limit": "unknown", "clocks": "unknown", "driver": "unknown"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs"
        facts |= _nvidia_smi(str(getattr(properties, "uuid", "")))
    packages = ("torch", "triton", "tilelang", "flash-attn", "flash-attn-3", "flash-attn-4")
    return {
        **facts,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version() or "none"),
        "python": platform.python_version(),
        **{package: version(package) or "not installed" for package in packages},
        "commit": git_commit(),
        "command": command,
    }


def _nvidia_smi(uuid: str) -> dict[str, str]:
    fields = "power.limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,driver_version"
    device = ["-i", f"GPU-{uuid}"] if uuid else []
    lines = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", *device])
    values = lines.split("\n")[0].split(", ")
    if len(values) != fields.count(",") + 1:
        return {}
    power, sm, sm_max, memory, temperature, driver = values
    clocks = f"SM {sm} (max {sm_max}), memory {memory}, {temperature} °C at the start"
    return {"power limit": power, "clocks": clocks, "driver": driver}


def git_commit() -> str:
    """Short hash of this package's checkout, -dirty where tracked files differ; unknown where it has none.

    TL_ATTENTION_COMMIT says it for a copy that has no .git.
    """
    if told := os.environ.get("TL_ATTENTION_COMMIT"):
        return told
    root = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root)]
    if _output([*git, "rev-parse", "--show-toplevel"]) != str(root):  # the package is installed in another's
        return "unknown"
    commit = _output([*git, "rev-parse", "--short", "HEAD"])
    dirty = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}{'-dirty' if dirty else ''}" if commit else "unknown"


def _output(command: list[str]) -> str:
    """Standard output of a command; empty where it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
