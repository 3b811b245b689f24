"""Kernels of a backward: which ones a call needs, found or built once per process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tl_attention.checks.fp32 import has_gradient_kernels
from tl_attention.compilation.store import Kernel
from tl_attention.config.buckets import bwd_bucket
from tl_attention.config.kernel_configs import (
    BwdConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    delta_width,
    reduce_kernels,
    table_kernels,
    terms_kernels,
)
from tl_attention.launch.common import build_ahead, compile_config, dtype_name, find_config
from tl_attention.launch.traced import backward_call
from tl_attention.problem.attn_problem import FAR, AttnProblem
from tl_attention.problem.options import Options
from tl_attention.problem.program import Call

_kernels: dict[tuple, BwdKernels] = {}


@dataclass(frozen=True)
class BwdKernels:
    """The compiled kernels of a backward."""

    problem: AttnProblem
    delta: Kernel
    passes: tuple[tuple[BwdPass, Kernel], ...]
    sum_qk: Kernel
    sum_v: Kernel
    sum_shared_qk: Kernel | None  # of the tiles that several CTAs share, where a pass is stream-K
    sum_shared_v: Kernel | None
    tile_table: Kernel | None  # runs first for packed sequences
    terms: Kernel | None  # runs first in fp32: splits q and dout, or the first heads of them
    reduce: dict[int, Kernel]  # runs last, by the number of a stored gradient: sums it


def kernel_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    heads_first: bool,
    options: Options | None,
    traced: Call | None,
    deterministic: bool,
    partial: bool = False,
) -> tuple:
    """Key of the kernels of a backward, as find_config takes it."""
    packed = options is not None and options.varlen
    head, seq = (-3, -2) if heads_first else (-2, -3)
    longest = options.max_seqlen_k if packed else k.shape[seq]
    queries = q.shape[seq] if q.dtype == torch.float32 and not packed else 0
    if deterministic and options is not None and options.batch_invariant:  # one config for all lengths
        longest, queries = FAR, min(queries, 1) * FAR
    bucket = bwd_bucket(deterministic, q.shape[head], k.shape[head], longest, partial, queries)
    # The log-sum-exp already contains the sink: no kernel is compiled for it
    names = () if options is None else tuple(name for name in options.names if name != "sink")
    if partial:
        names = *names, "partial"
    program = None if traced is None else traced.program
    dtype = dtype_name(q.dtype, options)
    return dtype, q.shape[-1], v.shape[-1], causal, names, program, bucket, q.device.index


def _find_kernels(key: tuple, direction: str, config: BwdConfig | None) -> BwdKernels:
    """Compiled kernels of a key of find_config()."""
    problem, config = find_config(key, direction, config)
    compiled = compile_config(problem, config)
    of_qk, of_v = problem.sum_problem(problem.head_dim), problem.sum_problem(problem.head_dim_v)
    return BwdKernels(
        problem,
        delta=compiled[problem.helper_problem(delta_width(problem.head_dim_v)), BwdDelta()],
        passes=tuple((bwd_pass, compiled[problem, bwd_pass]) for bwd_pass in config.passes),
        sum_qk=compiled[of_qk, BwdSum()],
        sum_v=compiled[of_v, BwdSum()],
        sum_shared_qk=compiled.get((of_qk, BwdSum(shared=True))),
        sum_shared_v=compiled.get((of_v, BwdSum(shared=True))),
        tile_table=next((compiled[kernel] for kernel in table_kernels(problem)), None),
        terms=next((compiled[kernel] for kernel in terms_kernels(problem, config.makes_terms)), None),
        reduce={number: compiled[kernel] for number, kernel in reduce_kernels(problem).items()},
    )


def cached_kernels(key: tuple, deterministic: bool, config: BwdConfig | None) -> BwdKernels:
    """Kernels of a problem, found once per process, or those of an explicit config."""
    direction = "bwd_det" if deterministic else "bwd"
    if config is not None:
        return _find_kernels(key, direction, config)
    kernels = _kernels.get((direction, key))
    if kernels is None:
        kernels = _kernels[direction, key] = _find_kernels(key, direction, None)
    return kernels


def goes_by_sequence(problem: AttnProblem, passes: Iterable[BwdPass]) -> bool:
    """True for packed sequences whose dq a pass rounds. Its key tiles are in a sequence_order.SequenceOrder."""
    return problem.has("varlen") and any(bwd_pass.rounds(problem) for bwd_pass in passes)


def build_backward_ahead(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    heads_first: bool,
    deterministic: bool,
    options: Options | None,
    traced: Call | None,
) -> None:
    """Start to build missing kernels of a forward call's backward, without waiting."""
    if options is not None and not has_gradient_kernels(q, v, options.parts):
        return
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key = kernel_key(
        q, k, v, causal, heads_first, options, backward_call(traced, deterministic), deterministic
    )
    direction = "bwd_det" if deterministic else "bwd"
    if (direction, key) not in _kernels:
        build_ahead(key, direction, "for the backward pass")
