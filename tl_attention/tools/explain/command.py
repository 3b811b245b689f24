"""Arguments of `tl-attention explain`, their checks, and the text that it prints."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from tl_attention.config.gpus import GPUS
from tl_attention.problem.arguments import PassWords, dtype_name
from tl_attention.problem.attn_problem import (
    DECODE,
    DECODE_OPTIONS,
    DEFAULT_DTYPE,
    DTYPES,
    FP32_DTYPES,
    OPTIONS,
)
from tl_attention.testing import counts, functions
from tl_attention.testing.shapes import Shape, chosen_shapes, sequences
from tl_attention.tools.explain import measured, work
from tl_attention.tools.explain.work import Work
from tl_attention.tools.text import as_json, columns, filled
from tl_attention.tuning import question

MAX_HEADS, MAX_KEYS = 1 << 18, 1 << 26  # whose sequences and blocks are listed, in seconds
MAX_BLOCKS = 1 << 26  # random ones, of all heads
LABEL = 14  # columns of a label
TITLES = {"fwd": "forward", "bwd": "backward", "bwd_det": "deterministic backward", DECODE: "decode"}
OF_FORWARD = "2 x pairs x (head_dim + head_dim_v): S = QK', O = PV"
OF_BACKWARD = "2 x pairs x (3 head_dim + 2 head_dim_v): S, dP, dV, dK, dQ"
FLOPS = {"fwd": OF_FORWARD, "bwd": OF_BACKWARD, "bwd_det": OF_BACKWARD, DECODE: OF_FORWARD}
TENSORS = "q, k, v, out, dout and lse read, dq, dk and dv written"
BYTES = {
    "fwd": "q, k and v read, out and lse written",
    "bwd": TENSORS,
    "bwd_det": TENSORS,
    DECODE: "the visible keys and values and q read, out written",
}
HELP = {
    work.TENSOR_CORES: "fewer visible pairs would help, faster memory would not",
    work.EXPONENTIALS: "an SM makes 16 per clock, whatever the head dim; a larger one hides them",
    work.MEMORY: "fewer or narrower keys and values (GQA, MLA) would help, faster tensor cores would not",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments, and the function that serves them."""
    command.add_argument(
        "words",
        nargs="*",
        action="extend",
        default=[],
        metavar="SHAPE",
        help="names or patterns of configs/shapes.toml, or B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]; the option function= is one of "
        "tl_attention/testing/functions.py, or listed-0.25: a quarter of the blocks at random",
    )
    command.add_argument(
        "--pass",
        action=PassWords,
        passes=question.PASSES,
        others="words",
        default=("fwd",),
        dest="directions",
        metavar="PASS",
        help="of fwd, bwd, bwd_det (the deterministic backward), decode; default: fwd",
    )
    command.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        default=DEFAULT_DTYPE,
        help="or short bf16, fp16, ..; default: %(default)s",
    )
    command.add_argument("--gpu", metavar="NAME", help=question.GPU_HELP)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the answers. Raises SystemExit with the fault of an argument."""
    dtype = arguments.dtype
    try:
        gpu = question.gpu_of(arguments.gpu)
        if not " ".join(arguments.words).replace(";", " ").strip():
            raise ValueError("SHAPE: expected a name or B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..], got none")
        asked = list(itertools.product(chosen_shapes(arguments.words).values(), arguments.directions))
        for shape, direction in asked:
            check(shape, direction, dtype)
    except ValueError as error:
        raise SystemExit(f"tl-attention explain: {error}") from None
    calls = [work.of_call(*call, dtype, gpu) for call in asked]
    if arguments.json:
        print(as_json([_record(call, dtype) for call in calls]))
    else:
        print("\n\n".join(text(call, dtype) for call in calls))
    return 0


def check(shape: Shape, direction: str, dtype: str = DEFAULT_DTYPE) -> None:
    """Raise ValueError for a shape that a pass does not run, or that is too large to count."""
    for name, number, most in (
        ("B x Hq", shape.batch * shape.heads_q, MAX_HEADS),
        ("Sq", shape.seqlen_q, MAX_KEYS),
        ("Sk", shape.seqlen_k, MAX_KEYS),
    ):
        if number > most:
            raise ValueError(f"shape {shape}: expected {name} of at most {most}, got {number}")
    question.check_head_dims(shape.head_dim, shape.head_dim_v, direction, dtype)
    if shape.options.function:
        _check_function(shape, direction, dtype)
    if direction == DECODE:
        _check_decode(shape)
    elif shape.options.page or shape.options.ragged:
        word = "page" if shape.options.page else "ragged"
        raise ValueError(f"shape {shape}: {word} is an option of --pass decode, got --pass {direction}")
    if not counts.visible_pairs(shape):
        raise ValueError(f"shape {shape}: expected a query that sees a key, got none")


def _check_function(shape: Shape, direction: str, dtype: str) -> None:
    functions.check(shape)
    if direction == DECODE or dtype in FP32_DTYPES:
        given = f"--dtype {dtype}" if direction != DECODE else "--pass decode"
        raise ValueError(
            f"shape {shape}: expected --pass fwd, bwd or bwd_det and --dtype bfloat16 or float16 for a function, got {given}"
        )
    others = functions.MASKS | functions.SCORES | functions.BIASES
    blocks = shape.heads_q * (shape.seqlen_q // functions.BLOCK) ** 2
    if shape.options.function not in others and blocks > MAX_BLOCKS:
        size = f"{functions.BLOCK} x {functions.BLOCK}"
        raise ValueError(
            f"shape {shape}: expected at most {MAX_BLOCKS} blocks of {size} in all heads, got {blocks}"
        )


def _check_decode(shape: Shape) -> None:
    known = [name for name in DECODE_OPTIONS if name in OPTIONS]
    others = [name for name in shape.option_names if name not in known]
    others += ["packed"] * shape.options.packed
    if others:
        expected = ", ".join((*known, "page", "ragged"))
        raise ValueError(f"shape {shape}: expected some of {expected} for --pass decode, got {others[0]}")
    if shape.options.page % 16:
        raise ValueError(f"shape {shape}: expected page=N with N a multiple of 16, got {shape.options.page}")


def _record(call: Work, dtype: str) -> dict[str, object]:
    """The answer for a program that reads it."""
    known = measured.find(call.shape, call.direction, dtype, call.gpu.name)
    return {
        "shape": str(call.shape),
        "pass": call.direction,
        "dtype": dtype,
        "gpu": call.gpu.name,
        "pairs": call.pairs,
        "flops": call.flops,
        "bytes": call.bytes,
        "flops_per_byte": call.intensity,
        "ridge": call.ridge,
        "seconds_at_full_rate": call.limits,
        "bound": call.bound,
        "function_served_as": call.served_as,
        "measured": [
            {"ms": one.ms, "row": one.name, "file": one.path, "commit": one.commit} for one in known
        ],
        "config": call.config,
        "source": call.source,
        "misses": call.misses,
    }


def text(call: Work, dtype: str) -> str:
    """The answer for one pass of one shape."""
    title = f"{TITLES[call.direction]} of {call.shape}, {dtype}, on {call.gpu.name}"
    lines = (*_counts(call), *_roofline(call), *_measured(call, dtype), *_config(call))
    return "\n".join((title, "=" * min(len(title), columns()), *itertools.starmap(_line, lines)))


def _line(label: str, words: str) -> str:
    """A line with its label; what is too long goes below the words."""
    return filled(words, f"{label:{LABEL}}", " " * LABEL)


def _counts(call: Work) -> Iterator[tuple[str, str]]:
    every = sum(q * k for q, k in sequences(call.shape)) * call.shape.heads_q
    yield (
        "visible pairs",
        f"{short(call.pairs, '')} of a query and a key, {100 * call.pairs / every:.3g} % of all",
    )
    if call.served_as:
        yield "function", f"{call.shape.options.function}: {call.served_as}"
    yield "FLOPs", f"{short(call.flops, 'FLOP')} = {FLOPS[call.direction]}"
    captured = ", a bias read and its gradient written" if "bwd" in call.direction else ", a bias read"
    has_bias = call.shape.options.function in functions.BIASES
    yield "bytes", f"{short(call.bytes, 'B')}: {BYTES[call.direction]}{captured * has_bias}, each once"


def _roofline(call: Work) -> Iterator[tuple[str, str]]:
    gpu = call.gpu
    known = "" if gpu.name in GPUS else "; this GPU is unknown, its rates are those of the nearest Hopper GPU"
    ridge = f"{call.ridge:.0f} ({call.tflops:.0f} TFLOPS over {gpu.tb_s:g} TB/s)"
    yield "intensity", f"{call.intensity:.4g} FLOP per byte; the ridge of this GPU is at {ridge}{known}"
    limits = sorted(call.limits.items(), key=lambda item: -item[1])
    yield "at full rate", ", ".join(f"{unit} {duration(seconds)}" for unit, seconds in limits)
    yield "bound by", f"{call.bound}: {HELP[call.bound]}"


def _measured(call: Work, dtype: str) -> Iterator[tuple[str, str]]:
    if measured.results_dir() is None:
        words = "no results here: an installed package has none; a checkout has them in benchmarks/results"
        yield "measured", words
        return
    found = measured.find(call.shape, call.direction, dtype, call.gpu.name)
    for one in found:
        seconds = one.ms / 1e3
        speed = f"{call.flops / seconds / 1e12:.4g} TFLOPS"
        if call.direction == DECODE:
            speed = f"{call.bytes / seconds / 1e9:.4g} GB/s"
        share = f"{call.bound} busy {100 * call.limits[call.bound] / seconds:.0f} % at least"
        where = f"{one.path.parent.name}/{one.path.name}, row {one.name}, commit {one.commit}"
        warm = ", inputs in L2" * one.warm
        yield "measured", f"{duration(seconds)}, {speed}, {share} ({where}{warm})"
    if not found:
        words = measured.bench_words(call.shape, call.direction, dtype)
        how = (
            f"; tl-attention bench {words} measures it" if words else ", and tl-attention bench measures none"
        )
        yield "measured", f"benchmarks/results has no such row for {call.gpu.name}{how}"


def _config(call: Work) -> Iterator[tuple[str, str]]:
    yield "config", str(call.config)
    yield "from", question.short_paths(call.source)


def short(number: float, unit: str) -> str:
    """A number with three digits and a prefix: 137 GFLOP."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
