"""tl_attention beside other attention libraries: correctness, then speed.

    python benchmarks/run.py    forwards: the grid of the FlashAttention papers and one more shape
    python benchmarks/run.py --pass bwd --deterministic
    python benchmarks/run.py --shapes 'paper-d128-*' 1,32,8,4096,4096,128,causal --rounds 30
    python benchmarks/run.py --set options    windows, sinks, documents, dropout, ..
    python benchmarks/run.py --set fp32    fp32 tensors, with errors beside speeds
    python benchmarks/run.py --set flex    masks, score_mods and biases as functions, beside PyTorch's flex_attention
    python benchmarks/run.py --set more --peers peers.csv    GQA, small and odd shapes; scores beside speeds
    python benchmarks/run.py --pass decode    few queries against a cache
    python benchmarks/run.py --pass decode --shapes 'decode-q1-*' 8,64,8,4,8192,128,causal,page=16,ragged
    python benchmarks/run.py --host    host time of an eager call and of the first call of a process

A run writes PASS.jsonl, or PASS_SET.jsonl, into the folder of --out, and a page with its tables and plots. docs/benchmarking.md
has the method. Without a Hopper GPU it shows what a Hopper did, compiles a few kernels for sm_90a (--all-kernels: all), reports on
them, and checks the CPU path.
"""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ahead
import decode
import flex
import fp32
import fwd_bwd
import host
import no_gpu
import peers
import performance
import providers
import row_kernels
import rows as row_files
import tables
import torch
import turns
from rich.console import Console
from rows import FLEX, FP32, OURS, Row

from tl_attention.problem.arguments import short_dtype_name
from tl_attention.problem.attn_problem import DECODE, FP32_DTYPES
from tl_attention.problem.target import is_hopper
from tl_attention.testing import environment, functions, timer
from tl_attention.testing.shapes import Shape, chosen_shapes
from tl_attention.tuning import question

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKWARD = ("paper-*", "mla-causal-4k", "mla-full-4k", "article")
SHAPES: dict[str, dict[str, tuple[str, ...]]] = {  # set -> pass -> names of shapes
    "main": {"fwd": ("paper-*", "article"), "bwd": BACKWARD, "fwd_bwd": BACKWARD, DECODE: ("decode-*",)},
    "more": dict.fromkeys(
        ("fwd", "bwd", "fwd_bwd"),
        ("mla-h*", "gqa-*", "few-h*", "small-*", "narrow-*", "chunk-4kx8k", "untuned-*"),
    ),
    "options": dict.fromkeys(("fwd", "bwd", "fwd_bwd"), ("option-*",)),
    FP32: dict.fromkeys(
        ("fwd", "bwd", "fwd_bwd"),
        tuple(
            f"paper-d{d}-{mask}-{n}k" for d in (64, 128) for mask in ("full", "causal") for n in (1, 4, 8, 16)
        ),
    ),
    FLEX: dict.fromkeys(("fwd", "bwd", "fwd_bwd"), ("flex-*",)),
}
QUICK = {DECODE: ("decode-*-h64-b*-8k",)}
QUICK |= dict.fromkeys(SHAPES["main"].keys() - QUICK.keys(), ("paper-*-4k", "article"))
PROVIDERS = tuple(dict.fromkeys([*providers.PROVIDERS, *fp32.PROVIDERS, *flex.PROVIDERS]))  # of all sets
WARM = ("few-h*", "small-*")  # shapes whose launches share one copy of the inputs, as in the tables of peers


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="names or patterns of configs/shapes.toml (--pass decode: of benchmarks/decode.py), or "
        "B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]; default: those of --set",
    )
    add("--set", dest="set_name", choices=SHAPES, default="main", help="named group of shapes (default main)")
    add(
        "--providers",
        nargs="+",
        choices=PROVIDERS,
        metavar="NAME",
        help=f"of {', '.join(PROVIDERS)}; default: all that have the pass",
    )
    add(
        "--dtype",
        type=short_dtype_name,
        choices=DTYPES,
        help="of the inputs (default bf16); not with --set fp32 or flex",
    )
    add(
        "--rounds",
        type=int,
        metavar="N",
        help="samples per provider (default 15; 5 with --quick or --pass decode)",
    )
    add("--pass", dest="direction", choices=SHAPES["main"], default="fwd", help="default: fwd")
    add("--deterministic", action="store_true", help="gradients that are bit-equal from call to call")
    add(
        "--out",
        type=Path,
        default=Path("bench_out"),
        metavar="FOLDER",
        help="folder of the results (default bench_out)",
    )
    add("--add", action="store_true", help="keep the stored rows; add problems and libraries to them")
    add("--replace", action="store_true", help="keep the stored rows but those of the problems of this run")
    add("--peers", nargs="+", type=Path, default=(), metavar="FILE", help=peers.HELP)
    add("--host", action="store_true", help="time the host instead: eager calls, first calls; to host.json")
    add("--quick", action="store_true", help="the 4k rows, fewer rounds")
    add(
        "--all-kernels",
        action="store_true",
        help="without a Hopper GPU: compile every shipped kernel, which takes a core an hour; default: a few",
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of a run, completed and checked; shapes and peers are read. An argument that is wrong ends the process with status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    decodes = args.direction == DECODE
    own = performance.OWN_SETS.get(args.set_name)
    offered = own.PROVIDERS if own else providers.names(DECODE if decodes else "fwd")
    lacking = [name for name in args.providers or () if name not in offered]
    args.providers = [name for name in args.providers or PROVIDERS if name in offered]
    if args.dtype and own:
        parser.error(f"--dtype: expected none with --set {args.set_name}, got {args.dtype}")
    args.dtype = args.dtype or "bf16"
    if not args.providers:
        parser.error(
            f"--providers: expected one that has --pass {args.direction} --set {args.set_name}: {', '.join(offered)}"
        )
    if lacking:
        what = f"--pass {args.direction} --set {args.set_name}"
        print(f"--providers: without {', '.join(lacking)}, which do not have {what}", file=sys.stderr)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: expected a folder, got the file {args.out}")
    if args.host and (
        alone := [name for name in ("shapes", "quick", "add", "all_kernels") if getattr(args, name)]
    ):
        parser.error(
            f"--host: expected no --{alone[0].replace('_', '-')} beside it, as it times calls of its own"
        )
    if args.rounds is None:
        args.rounds = 5 if args.quick or decodes else 15
    if args.add and args.replace:
        parser.error("--replace: expected no --add beside it, which keeps the stored rows of a problem")
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    try:
        args.shapes = shapes_of(args)
        args.peers = peers.read(args.peers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.deterministic:
        if "bwd" not in args.direction:
            parser.error("--deterministic: expected --pass bwd or fwd_bwd; a forward always is")
        if own:
            parser.error(f"--deterministic: expected another set than {args.set_name}")
        args.direction += "_det"
    return args


def shapes_of(args: argparse.Namespace) -> dict[str, Shape]:
    """Name -> shape of a run. Raises ValueError."""
    by_pass: Mapping[str, Sequence[str]] = QUICK if args.quick else SHAPES[args.set_name]
    texts = args.shapes or by_pass.get(args.direction)
    if not texts:
        raise ValueError(f"--set {args.set_name}: expected main with --pass {args.direction}")
    if args.direction == DECODE:
        return decode.chosen_shapes(texts)
    chosen = chosen_shapes(texts)
    for text, shape in chosen.items():
        if shape.options.page or shape.options.ragged:
            raise ValueError(f"--shapes {text}: page and ragged are options of --pass decode alone")
        # The precisions of fp32 have head dims of their own; a row names what one lacks
        if args.set_name != FP32:
            for name in (name for name in ("fwd", "bwd") if name in args.direction):
                question.check_head_dims(shape.head_dim, shape.head_dim_v, name)
        if bool(shape.options.function) is not (args.set_name == FLEX):
            names = ", ".join(functions.FUNCTIONS)
            raise ValueError(
                f"--shapes {text}: expected function= with --set flex, and there alone, of {names}"
            )
        if shape.options.function:
            functions.check(shape)
        if args.set_name == FP32 and shape.options:
            got = shape.options.words[0]
            raise ValueError(f"--shapes {text}: expected no options with --set {FP32}, got {got}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if an output of tl_attention is wrong or missing or the GPU fails, 130 after Ctrl-C, else 0."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    arguments = sys.argv[1:] if argv is None else argv
    facts = environment.facts(shlex.join(["python", "benchmarks/run.py", *arguments]))
    if torch.cuda.is_available() and is_hopper(torch.cuda.current_device()):
        tables.show_environment(console, facts)
        if args.host:
            return host.run(console, args.out, facts)
        return benchmark(args, console, facts)
    if args.host:
        console.print("--host: expected a Hopper GPU, found none: what the host does is to launch on it")
        return 2
    console = Console(width=None if sys.stdout.isatty() else no_gpu.COLUMNS)
    return no_gpu.run(console, args.all_kernels, facts)


def benchmark(args: argparse.Namespace, console: Console, facts: dict[str, str]) -> int:
    """Run all shapes. The rows measured so far are written and shown, however the run ends."""
    args.out.mkdir(parents=True, exist_ok=True)
    dtypes = [str(DTYPES[args.dtype]).removeprefix("torch.")]
    if args.set_name == FP32:
        dtypes, args.dtype = list(FP32_DTYPES), FP32
    if args.set_name == FLEX:
        flex.prepare_run(console, args.shapes.values(), args.direction, args.providers)
    else:
        for dtype in dtypes:
            ahead.build(console, args.shapes.values(), args.direction, dtype, args.providers)
    with console.status("measuring cuBLAS and copy rates"):
        cublas, copy = timer.measure_cublas_tflops(), timer.measure_copy_bandwidth()
    measured = {
        "cuBLAS 8192³ bf16": f"{cublas:.0f} TFLOPS",
        "copy": f"{copy:.0f} GB/s, ridge point {1000 * cublas / copy:.0f} FLOP/B",
    }
    tables.show_environment(console, measured)
    facts |= measured
    console.print(f"{tables.convention(args.direction)}\n")
    common = {"pass": args.direction, "dtype": args.dtype, "commit": facts["commit"]}
    common["gpu"] = torch.cuda.get_device_name()

    measure, rows = measurer(args), []
    stored = args.out / row_files.file_name(args.direction, args.set_name)
    keeps = (args.add or args.replace) and stored.exists()
    path = stored.with_suffix(".added") if keeps else stored
    try:
        with tables.progress_bar(console) as progress, path.open("w") as jsonl:
            row_files.write_header(jsonl, common | {"environment": facts, "providers": provider_facts(args)})
            task = progress.add_task("", total=len(args.shapes))
            for name, shape in args.shapes.items():
                progress.update(task, description=name)
                new = measure(name, shape)
                for row in new:
                    row |= {"shape": name, "l2": "warm" if is_warm(name) else "cold", **common}
                    if row["status"] == "ok":
                        row |= row_files.shares_of(row, facts)
                peers.judge(new, args.peers)
                row_kernels.add_digests(new, facts["commit"])
                row_files.write_problem(jsonl, new)
                rows += new
                console.print(tables.line(new), highlight=False)
                progress.advance(task)
                if error := gpu_error():
                    console.print(f"Stopped at {name}: the GPU runs nothing more, {error}.", markup=False)
                    return 1
    except KeyboardInterrupt:
        console.print(f"Interrupted after {len(row_files.by_problem(rows))} of {len(args.shapes)} rows.")
        return 130
    finally:
        if rows:
            if keeps:
                (row_files.add if args.add else row_files.replace)(stored, path)
            finish(args, stored, console, rows)
    return int(any(row["status"] != "ok" for row in rows if row["provider"] == OURS))


def provider_facts(args: argparse.Namespace) -> dict[str, Row]:
    """Name -> title, library and layout of the providers of a run."""
    if args.direction == DECODE:
        layouts = {name: providers.PROVIDERS[name].decode_layout for name in args.providers}
        return {name: turns.provider_facts(name, DECODE, layout) for name, layout in layouts.items()}
    if args.set_name in performance.OWN_SETS:
        return {name: performance.OWN_SETS[args.set_name].provider_facts(name) for name in args.providers}
    facts: dict[str, Row] = {}
    for shape in args.shapes.values():
        for name in fwd_bwd.entering(args.providers, shape):
            row = fwd_bwd.new_row(name, shape)
            facts[name] = {key: row[key] for key in ("title", "library", "layout")}
    return facts


def is_warm(name: str) -> bool:
    """The launches of a shape share one copy of the inputs."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in WARM)


def measurer(args: argparse.Namespace) -> Callable[[str, Shape], list[Row]]:
    """(name of a shape, shape) -> one row per provider."""
    if args.set_name in performance.OWN_SETS:
        module = performance.OWN_SETS[args.set_name]
        return lambda name, shape: module.measure(shape, args.direction, args.providers, args.rounds)
    dtype = DTYPES[args.dtype]
    if args.direction == DECODE:
        caches = decode.Caches(args.shapes.values(), dtype)
        return lambda name, shape: decode.measure(shape, caches, args.providers, args.rounds)
    return lambda name, shape: fwd_bwd.measure(
        shape, dtype, args.direction, args.providers, args.rounds, is_warm(name)
    )


def gpu_error() -> str | None:
    """The error that every CUDA call of this process raises from now on, or None."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return timer.first_line(error)
    return None


def finish(args: argparse.Namespace, path: Path, console: Console, rows: list[Row]) -> None:
    """Show the table and write the page of the folder."""
    if args.set_name in performance.OWN_SETS:
        text = performance.OWN_SETS[args.set_name].section(rows)
        console.print(text, highlight=False, markup=False)
    else:
        show(console, rows)
    written = [path, *performance.write(args.out)]
    console.print(f"Written: {', '.join(map(str, written))}")


def show(console: Console, rows: list[Row]) -> None:
    """Print the table of a run, and what it says of our rows."""
    console.print(tables.terminal(rows))
    for note in (*tables.slowest(rows), *tables.summary(rows), *tables.notes(rows)):
        console.print(f"- {note}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
