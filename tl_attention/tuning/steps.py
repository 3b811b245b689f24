"""Steps of the tuner: which shapes a row is tuned on, and compiling, checking and timing a candidate, each run in a subprocess."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tl_attention.compilation import building, cubin
from tl_attention.config import configs
from tl_attention.config.buckets import buckets
from tl_attention.config.kernel_configs import Config, KernelConfig
from tl_attention.problem.attn_problem import DEFAULT_DTYPE, DIRECTIONS, AttnProblem, tile_widths, tuning_key
from tl_attention.problem.options import Options
from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.testing import counts, timer
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import check_bwd, check_fwd
from tl_attention.testing.shapes import Shape
from tl_attention.tuning.question import gpu_of, shape_bucket

FP32_ERROR = 1e-4  # largest rms error / rms value of a correct result
RESULTS: dict[bool, tuple[str, ...]] = {
    True: ("out", "lse"),
    False: ("dq", "dk", "dv"),
}  # of a forward, of a backward
CHECK_LIMIT = 30.0  # seconds for the check of one candidate; also the cost of a hang


@dataclass(frozen=True)
class Row:
    """A row of a tuned table."""

    direction: str  # one of DIRECTIONS
    problem: AttnProblem
    bucket: str

    @property
    def key(self) -> str:
        """The tuning key within the section of the direction."""
        return tuning_key(self.problem, self.bucket)

    def __str__(self) -> str:
        """bwd bf16 d128 causal 4k"""
        return f"{self.direction} {self.key}"


def default_shapes(direction: str = "fwd", dtype: str = DEFAULT_DTYPE) -> list[Shape]:
    """The tuning set: several shapes for every tile width, mask and bucket of a direction."""
    return [
        Shape(batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, *widths, causal)
        for widths in tile_widths(direction, dtype)
        for causal in (False, True)
        for bucket in buckets(direction)
        for batch, group, seqlen_q, seqlen_k in configs.tuning_shapes(bucket)
        for heads_kv in [min(max(8, 2048 // widths[0]), 32)]
    ]


def group_shapes(
    shapes: Sequence[Shape] | None, dtypes: Iterable[str], directions: Iterable[str] = DIRECTIONS
) -> dict[Row, list[Shape]]:
    """Shapes (default: the tuning set) grouped by the row that serves them."""
    groups: dict[Row, list[Shape]] = {}
    for direction, dtype in itertools.product(directions, dtypes):
        for shape in shapes or default_shapes(direction, dtype):
            problem = shape.problem(dtype, direction)
            row = Row(direction, problem, shape_bucket(shape, problem, direction, gpu_of(None)))
            groups.setdefault(row, []).append(shape)
    return groups


def check_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes for the correctness check: lengths that no tile divides, and the cheapest shape that is timed."""
    cheapest = min(shapes, key=counts.fwd_flops)
    small = replace(cheapest, batch=2, heads_q=4, heads_kv=2)
    odd = [replace(small, seqlen_q=q, seqlen_k=k) for q, k in ((333, 517), (517, 333), (1, 259))]
    return [*odd, cheapest]


def prepare_to_run() -> None:
    torch.zeros(1, device="cuda")


def compile_kernel(problem: AttnProblem, config: KernelConfig) -> cubin.Report:
    """Compile a kernel into the disk cache and report on it."""
    building.build_here(problem, config)
    return cubin.report_compiled(problem, config)


def check_candidate(row: Row, config: Config, shapes: Sequence[Shape]) -> str | None:
    """The first error in a candidate's results, or None. torch fills outputs with NaN before the kernels run."""
    for shape in shapes:
        inputs = _make_inputs(row, shape, seed=time.time_ns() % 2**32)
        torch.use_deterministic_algorithms(True)
        try:
            results = _run(row, inputs, shape, config)
        finally:
            torch.use_deterministic_algorithms(False)
        options = {"softmax_scale": shape.head_dim**-0.5, "causal": shape.causal, "lse_base2": False}
        if row.problem.is_fp32:
            if error := _fp32_error(row, results, inputs, shape):
                return f"{shape}: {error}"
            continue
        if row.direction == "fwd":
            check = check_fwd(*results, *inputs, **options)
        else:
            dout, q, k, v, _, _ = inputs
            check = check_bwd(results, dout, q, k, v, **options)
        if not check.ok:
            return f"{shape}: {check.text}"
    return None


def _fp32_error(
    row: Row, results: tuple[Any, ...], inputs: tuple[torch.Tensor, ...], shape: Shape
) -> str | None:
    """The first result of an fp32 row that is wrong: its rms error against fp64 is at most FP32_ERROR of its rms value."""
    if row.direction == "fwd":
        exact = attention_reference(*inputs, causal=shape.causal, dtype=torch.float64)
    else:
        exact = attention_backward_reference(*inputs[:4], causal=shape.causal, dtype=torch.float64)
    for name, x, ref in zip(RESULTS[row.direction == "fwd"], results, exact, strict=True):
        seen = ref > -math.inf  # the log-sum-exp of a query without keys is -inf
        error = float(((x - ref)[seen].square().mean() / ref[seen].square().mean()).sqrt())
        if not error <= FP32_ERROR or not torch.equal(x > -math.inf, seen):
            return f"{name} has an rms error of {error:.1e} of its values, expected at most {FP32_ERROR}"
    return None


def time_candidates(
    row: Row, candidates: Sequence[Config], shapes: Sequence[Shape], rounds: int
) -> dict[Config, tuple[float, ...]]:
    """TFLOPS of each candidate on each shape, over all its kernels."""
    tflops = {config: () for config in candidates}
    for shape in shapes:
        copies = timer.rotation(counts.input_bytes(shape))
        inputs = [_make_inputs(row, shape, seed) for seed in range(copies)]
        calls = {
            config: [functools.partial(_run, row, tensors, shape, config) for tensors in inputs]
            for config in candidates
        }
        for config, timing in timer.time_interleaved(calls, rounds).items():
            tflops[config] += (counts.flops(shape, row.direction) / timing.median_ms / 1e9,)
    return tflops


def _make_inputs(row: Row, shape: Shape, seed: int) -> tuple[torch.Tensor, ...]:
    """(q, k, v), or for a backward (dout, q, k, v, out, lse), as views [batch, seqlen, heads, head_dim].

    out and lse come from the reference: the forward kernel may not be compiled.
    """
    dtype = torch.float32 if row.problem.is_fp32 else getattr(torch, row.problem.dtype)
    q, k, v = make_inputs(shape, dtype, seed=seed)
    if row.direction == "fwd":
        return q, k, v
    out, lse = attention_reference(q, k, v, shape.head_dim**-0.5, shape.causal)
    return make_dout(shape, dtype, "bshd", seed, q.device), q, k, v, out.to(dtype), lse


def _run(row: Row, inputs: tuple[torch.Tensor, ...], shape: Shape, config: Config) -> tuple[Any, ...]:
    from tl_attention import launch

    arguments = (*inputs, shape.head_dim**-0.5, shape.causal)
    given = {"lse_base2": False, "config": config}
    if row.problem.is_fp32:
        given["options"] = Options(parts=row.problem.terms)
    if row.direction == "fwd":
        return launch.forward(*arguments, **given)
    grads = launch.backward(*arguments, deterministic=row.direction == "bwd_det", **given)
    return tuple(grads.values())


@dataclass(frozen=True)
class Steps:
    """The steps a candidate passes, as functions a subprocess can import. `compile` is called once per kernel."""

    prepare_to_compile: Callable[[], None] = building.prepare_to_build
    prepare_to_run: Callable[[], None] = prepare_to_run
    compile: Callable[[AttnProblem, KernelConfig], cubin.Report] = compile_kernel
    check: Callable[[Row, Config, Sequence[Shape]], str | None] = check_candidate
    time: Callable[..., dict[Config, tuple[float, ...]]] = time_candidates
    check_limit_s: float = CHECK_LIMIT
