"""Kernels that calls on a shape will load, without making a call."""

from __future__ import annotations

from collections.abc import Sequence

from tl_attention.config import catalog, configs, gpus
from tl_attention.config.buckets import bwd_bucket, option_buckets
from tl_attention.config.kernel_configs import JVP_CONFIGS, append_kernel, page_rows
from tl_attention.problem.attn_problem import (
    DECODE,
    DECODE_TILE_WIDTHS,
    JVP,
    SPLIT_BUCKET,
    AttnProblem,
    decode_problem,
    decode_width,
    length_bucket,
    tile_widths,
)
from tl_attention.problem.target import gpu_name
from tl_attention.testing.shapes import Shape, sequences
from tl_attention.tuning.question import gpu_of, shape_bucket
from tl_attention.tuning.results import Kernel


def kernels_of(
    shape: Shape, dtype: str, direction: str, all_lengths: bool = False, gpu: str | None = None
) -> list[Kernel]:
    """Kernels that a call on a shape loads, once each.

    Args:
        direction: one of problem.DIRECTIONS, DECODE or JVP.
        all_lengths: add the kernels for other lengths; for a decode, for other page sizes and numbers of queries.
        gpu: its name in torch; None: this GPU, or an H200 where there is none.
    Raises:
        ValueError: no kernels have these head dims, or options, or pages.
    """
    widths = DECODE_TILE_WIDTHS if direction == DECODE else tile_widths(direction, dtype)
    if not any(qk >= shape.head_dim and v >= shape.head_dim_v for qk, v in widths):
        raise ValueError(
            f"{shape}: expected head dims within one of {widths}, the kernels of --pass {direction}"
        )
    if direction == DECODE:
        return _decode_kernels(shape, dtype, all_lengths, gpu)
    problem = shape.problem(dtype, direction)
    if shape.options.page and (direction != "fwd" or not problem.has("varlen")):
        raise ValueError(
            f"{shape}: expected page=.. with --pass decode, or with --pass fwd and varlen, got {direction}"
        )
    if direction == JVP:
        if shape.option_names:
            raise ValueError(f"{shape}: expected no options, as the kernels of --pass {JVP} have none")
        return [(problem, JVP_CONFIGS[problem.width])]
    chosen = [
        configs.pick_config(problem, bucket, gpu or gpu_name(), direction)[0]
        for bucket in (
            option_buckets(direction, problem.options)
            if all_lengths
            else _buckets(shape, problem, direction, gpu)
        )
    ]
    if shape.options.page:
        chosen = [config.paged(problem, page_rows(shape.options.page)) for config in chosen]
    return list(dict.fromkeys(kernel for config in chosen for kernel in config.kernels(problem)))


def _buckets(shape: Shape, problem: AttnProblem, direction: str, gpu: str | None) -> Sequence[str]:
    """Buckets that a call may need; for packed sequences two, as their split depends on the totals."""
    if not shape.is_varlen:
        return [shape_bucket(shape, problem, direction, gpu_of(gpu))]
    longest = max(seqlen_k for _, seqlen_k in sequences(shape))
    if direction == "fwd":
        return [length_bucket(longest), SPLIT_BUCKET]
    return [bwd_bucket(direction == "bwd_det", shape.heads_q, shape.heads_kv, longest)]


def _decode_kernels(shape: Shape, dtype: str, all_lengths: bool, gpu: str | None) -> list[Kernel]:
    width = decode_width(shape.head_dim, shape.head_dim_v)
    if all_lengths:
        return catalog.decode_kernels([dtype], [width], shape.option_names)
    problem = decode_problem(dtype, shape.head_dim, shape.head_dim_v, shape.option_names)
    rows = shape.seqlen_q * shape.heads_q // shape.heads_kv
    pages = page_rows(shape.options.page) if shape.options.page else 0
    items = configs.items_per_sm(shape.batch, shape.heads_kv, gpus.resolve(gpu or gpu_name()).sms)
    config = configs.decode_config(problem, rows, pages, items)
    return [*config.kernels(problem), append_kernel(dtype)]
