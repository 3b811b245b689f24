"""Arguments of `tl-attention explain`, its checks and what it runs."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from tl_attention import question
from tl_attention.arguments import at_least, dtype_name
from tl_attention.explain import functions
from tl_attention.problem import DECODE, DECODE_OPTIONS, DEFAULT_DTYPE, DIRECTIONS, DTYPES, FP32_DTYPES
from tl_attention.testing import counts
from tl_attention.testing.shapes import Shape, chosen_shapes

if TYPE_CHECKING:
    from tl_attention.explain.work import Work
    from tl_attention.gpus import Gpu

LINK_NAMES = ("nvlink", "ib")  # of scale.LINKS
PICTURES = (".png", ".svg", ".pdf")
MAX_HEADS, MAX_KEYS = 1 << 18, 1 << 26  # whose tiles are counted one by one, in seconds
NO_MATPLOTLIB = "--plot needs matplotlib: pip install 'tl-attention[bench]'"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments, and the function that serves them."""
    command.add_argument(
        "shapes",
        nargs="*",
        metavar="SHAPE",
        help="names or patterns of configs/shapes.toml, or B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]; the option function= is one of "
        "tl_attention/testing/functions.py, or listed-0.25: a quarter of the blocks at random",
    )
    command.add_argument(
        "--pass", nargs="+", choices=(*DIRECTIONS, DECODE), dest="directions", metavar="PASS",
        help="of fwd, bwd, bwd_det (the deterministic backward), decode; default: fwd",
    )  # fmt: skip
    command.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        default=DEFAULT_DTYPE,
        help="or short bf16, fp16, ..; default: %(default)s",
    )
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help=question.GPU_HELP,
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a roofline picture: .png, .svg or .pdf"
    )
    command.add_argument(
        "--ranks", nargs="+", type=at_least(2), metavar="N", help="forward and backward over N GPUs, by method"
    )  # fmt: skip
    command.add_argument(
        "--link", choices=LINK_NAMES, help=f"between GPUs, with --ranks; default: {LINK_NAMES[0]}"
    )  # fmt: skip
    command.add_argument(
        "--check",
        action="store_true",
        help="compare the model with all results of the GPU in benchmarks/results",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the answers. Raises SystemExit with the fault of an argument."""
    from tl_attention.explain import errors, report, work  # not at the top: other commands need no launch

    try:
        gpu = question.gpu_of(arguments.gpu)
        if not arguments.shapes and not arguments.check:
            raise ValueError("expected a SHAPE such as 1,32,8,4096,4096,128,causal, or --check; got neither")
        _check_words(arguments)
        if arguments.check:
            print(errors.table(gpu))
        directions = arguments.directions or ("fwd",)
        shapes = chosen_shapes(arguments.shapes).values()
        for shape, direction in itertools.product(shapes, directions):
            check(shape, direction, arguments.dtype)
    except ValueError as error:
        raise SystemExit(f"tl-attention explain: {error}") from None
    if arguments.ranks:
        print("\n\n\n".join(_scaled(shape, arguments, gpu) for shape in shapes))
        return 0
    asked = itertools.product(shapes, directions)
    works = [work.of_call(shape, direction, arguments.dtype, gpu) for shape, direction in asked]
    if works:
        print("\n\n\n".join(report.text(one, arguments.dtype) for one in works))
    if arguments.plot:
        _draw(works, arguments)
    return 0


def _check_words(arguments: argparse.Namespace) -> None:
    """Raise ValueError for arguments that do not go together."""
    if arguments.plot and not arguments.shapes:
        raise ValueError("--plot: expected a SHAPE to draw, got none")
    if arguments.plot and arguments.plot.suffix.lower() not in PICTURES:
        raise ValueError(
            f"--plot: expected a file that ends with {', '.join(PICTURES)}, got {arguments.plot}"
        )
    if arguments.link and not arguments.ranks:
        raise ValueError("--link: expected --ranks beside it, got none")
    if arguments.ranks and not arguments.shapes:
        raise ValueError("--ranks: expected a SHAPE, got none")
    for name, given in (("--plot", arguments.plot), ("--pass", arguments.directions)):
        if arguments.ranks and given:
            raise ValueError(
                f"{name}: expected none with --ranks, which prints forward and backward; leave one out"
            )


def _scaled(shape: Shape, arguments: argparse.Namespace, gpu: Gpu) -> str:
    """The table of a shape over several GPUs. Raises SystemExit where there is none."""
    from tl_attention.explain import scale

    try:
        scale.check(shape, arguments.ranks)
    except ValueError as error:
        raise SystemExit(f"tl-attention explain: {error}") from None
    return scale.table(shape, arguments.ranks, arguments.link or LINK_NAMES[0], arguments.dtype, gpu)


def _draw(works: list[Work], arguments: argparse.Namespace) -> None:
    """Write the picture. Raises SystemExit where it cannot."""
    from tl_attention.explain import plot

    try:
        plot.draw(works, arguments.dtype, arguments.plot)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "matplotlib":
            raise
        raise SystemExit(f"tl-attention explain: {NO_MATPLOTLIB}") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"tl-attention explain: --plot: {error}") from None
    print(f"\nroofline: {arguments.plot}")


def check(shape: Shape, direction: str, dtype: str = DEFAULT_DTYPE) -> None:
    """Raise ValueError for a shape that a pass does not run, or that is too large for a count of its tiles."""
    for name, number, most in (
        ("B x Hq", shape.batch * shape.heads_q, MAX_HEADS),
        ("Sq", shape.seqlen_q, MAX_KEYS),
        ("Sk", shape.seqlen_k, MAX_KEYS),
    ):
        if number > most:
            raise ValueError(f"shape {shape}: expected {name} of at most {most}, got {number}")
    question.check_head_dims(shape.head_dim, shape.head_dim_v, direction, dtype)
    asked = shape.options
    if asked.function:
        functions.check(shape)
        if direction == DECODE or dtype in FP32_DTYPES:
            given = f"--dtype {dtype}" if direction != DECODE else "--pass decode"
            raise ValueError(
                f"shape {shape}: expected --pass fwd, bwd or bwd_det and --dtype bfloat16 or float16 for a function, got {given}"
            )
    if direction == DECODE:
        others = [name for name in shape.option_names if name not in DECODE_OPTIONS]
        others += ["packed"] * asked.packed
        if others:
            expected = ", ".join((*DECODE_OPTIONS, "page", "ragged"))
            raise ValueError(f"shape {shape}: expected some of {expected} for --pass decode, got {others[0]}")
        if asked.page % 16:
            raise ValueError(f"shape {shape}: expected page=N with N a multiple of 16, got {asked.page}")
    elif asked.page or asked.ragged:
        word = "page" if asked.page else "ragged"
        raise ValueError(f"shape {shape}: {word} is an option of --pass decode, got --pass {direction}")
    if not counts.visible_pairs(shape):
        raise ValueError(f"shape {shape}: expected a query that sees a key, got none")
