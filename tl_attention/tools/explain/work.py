"""FLOPs, bytes and config of a call, and the time that they take at the full rate of a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from tl_attention.config import configs
from tl_attention.config.gpus import EXP_PER_CLOCK, Gpu
from tl_attention.config.kernel_configs import Config, DecodeConfig, page_rows
from tl_attention.problem.attn_problem import DECODE, AttnProblem, decode_problem
from tl_attention.problem.program import Program
from tl_attention.testing import counts, functions
from tl_attention.testing.shapes import Shape, ShapeOptions, sequences
from tl_attention.tuning import question

TENSOR_CORES, EXPONENTIALS, MEMORY = "tensor cores", "exponentials", "memory"
LSE_BYTES, HALF_BYTES = 4, 2


@dataclass(frozen=True)
class Work:
    """A pass of a shape on a GPU.

    Args:
        pairs: a query and a key that it sees, of all heads.
        bytes: each input read and each output written once.
        source: row or line that the config comes from.
        misses: rows and lines tried before, and why each does not serve.
        served_as: the option that computes the function of the shape, or the traced program; empty without a function.
    """

    shape: Shape
    direction: str
    gpu: Gpu
    problem: AttnProblem
    pairs: int
    flops: int
    bytes: int
    config: Config | DecodeConfig
    source: str
    misses: tuple[str, ...] = ()
    served_as: str = ""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def tflops(self) -> float:
        """Tensor throughput for this dtype: a product in fp32 takes several of bf16."""
        return self.gpu.tflops / len(self.problem.products)

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which tensor cores and memory take equally long."""
        return self.tflops / self.gpu.tb_s

    @property
    def limits(self) -> dict[str, float]:
        """Seconds that each unit of the GPU takes at full rate: nothing is faster than the longest."""
        exponentials = EXP_PER_CLOCK * self.gpu.sms * self.gpu.boost_ghz * 1e9
        return {
            TENSOR_CORES: self.flops / (self.tflops * 1e12),
            EXPONENTIALS: self.pairs / exponentials,
            MEMORY: self.bytes / (self.gpu.tb_s * 1e12),
        }

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        return max(self.limits, key=self.limits.__getitem__)


def of_call(shape: Shape, direction: str, dtype: str, gpu: Gpu) -> Work:
    """The work of a pass of a shape, with the config that serves it."""
    if direction == DECODE:
        return _decode(shape, dtype, gpu)
    traced = trace(shape) if shape.options.function else Traced(shape)
    program = _program_of(traced.program, shape, direction) if traced.program else None
    problem = traced.shape.problem(dtype, direction, program)
    bucket = question.shape_bucket(traced.shape, problem, direction, gpu)
    choice = configs.choose_config(problem, bucket, gpu.name, direction)
    pairs = traced.seen * counts.visible_pairs(traced.shape) * shape.heads_q
    captured = traced.bias_bytes * (1 if direction == "fwd" else 2)  # with its gradient
    return Work(
        shape,
        direction,
        gpu,
        problem,
        round(pairs),
        round(traced.seen * counts.flops(traced.shape, direction)),
        _tensor_bytes(shape, direction, problem) + captured,
        choice.config,
        choice.source,
        choice.misses,
        traced.words,
    )


def _tensor_bytes(shape: Shape, direction: str, problem: AttnProblem) -> int:
    """Bytes of the tensors of a pass; the log-sum-exp is fp32 whatever the dtype."""
    lse = LSE_BYTES * shape.batch * shape.heads_q * shape.seqlen_q
    return (counts.traffic(shape, direction) - lse) * problem.output_bytes // HALF_BYTES + lse


def _decode(shape: Shape, dtype: str, gpu: Gpu) -> Work:
    problem = decode_problem(dtype, shape.head_dim, shape.head_dim_v, shape.option_names)
    rows = shape.seqlen_q * shape.heads_q // shape.heads_kv
    pages = page_rows(shape.options.page) if shape.options.page else 0
    items = configs.items_per_sm(shape.batch, shape.heads_kv, gpu.sms)
    line = configs.decode_line(problem, rows, pages, items)
    config = line.config
    width = shape.head_dim + shape.head_dim_v
    # Where the values are the first columns of the keys they are read once
    key_width = shape.head_dim if config.v_in_k else width
    seen = counts.bounds(shape)[0] + shape.seqlen_q  # keys that some query of a sequence sees, at most
    keys = sum(int(min(seqlen_k, seen)) for _, seqlen_k in sequences(shape))
    queries = shape.heads_q * shape.batch * shape.seqlen_q
    return Work(
        shape,
        DECODE,
        gpu,
        problem,
        counts.visible_pairs(shape) * shape.heads_q,
        counts.flops(shape, DECODE),
        HALF_BYTES * (shape.heads_kv * keys * key_width + queries * width),
        config,
        f"[decode] {problem.width} of {configs.data_dir() / 'grid.toml'}, for {line.launches(rows)}",
    )


@dataclass(frozen=True)
class Traced:
    """The function of a shape as flex_attention traces it.

    Args:
        shape: with the options that compute the function; without any for a program.
        program: None: options compute it.
        seen: share of the pairs that its mask shows.
        bias_bytes: of the dense bias.
        words: what computes it.
    """

    shape: Shape
    program: Program | None = None
    seen: float = 1.0
    bias_bytes: int = 0
    words: str = ""


@functools.lru_cache(maxsize=64)
def trace(shape: Shape) -> Traced:
    """Trace the function of a shape. Needs no GPU and none of the memory of a bias."""
    from tl_attention.tracing.builtin_options import builtin_options, program_with_bits
    from tl_attention.tracing.dense_bias import with_bias
    from tl_attention.tracing.trace import trace as trace_functions

    has_mask = shape.options.function not in functions.SCORES | functions.BIASES
    found = functions.of_shape(shape, torch.device("cpu" if has_mask else "meta"))
    given = found.score_mod, found.mask_mod
    call = trace_functions(*(given if found.bias is None else with_bias(*given, found.bias)), True)
    plain = replace(shape, options=ShapeOptions())
    if has_mask:
        program, *_ = program_with_bits(call, max(shape.seqlen_q, shape.seqlen_k))
        return Traced(plain, program, found.seen[0], words=str(program))
    sizes = shape.seqlen_q, shape.seqlen_k, shape.batch, shape.heads_q
    options = builtin_options(call, *sizes, torch.device("meta"))
    if options is not None:
        asked = ShapeOptions(softcap=options.softcap, alibi=options.alibi_slopes is not None)
        return Traced(replace(shape, options=asked), words=f"the option {', '.join(asked.words)}")
    size = 0 if found.bias is None else found.bias.numel() * found.bias.element_size()
    return Traced(plain, call.program, bias_bytes=size, words=str(call.program))


def _program_of(program: Program, shape: Shape, direction: str) -> Program:
    """The program that the kernels of a pass are compiled for."""
    from tl_attention.tracing.by_distance import MIN_SCORES, by_distance

    if direction == "fwd":
        return program.forward
    tables = by_distance(program)
    if tables and shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k >= MIN_SCORES:
        program = tables.program
    return program.as_exact if direction == "bwd_det" else program
