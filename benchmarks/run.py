"""tl_attention beside the other attention libraries: correctness, then TFLOPS.

    python benchmarks/run.py    the FlashAttention papers' grid and one more row
    python benchmarks/run.py --shapes 'paper-d128-*' 1,32,8,4096,4096,128,causal --rounds 30

Without a Hopper GPU it compiles the shipped kernels for sm_90a, reports on them, and checks the CPU path.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import no_gpu
import report
import torch
from providers import PROVIDERS, Ready, Unsupported, title
from report import OURS, Row
from rich.console import Console

from tl_attention import configs
from tl_attention.target import is_hopper
from tl_attention.testing import bench
from tl_attention.testing.bench import Shape
from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.numeric import check_fwd

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = ("paper-*", "article")
QUICK = ("paper-*-4k", "article")


def chosen_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """Name -> shape, of names and patterns of configs/shapes.toml and literal shapes, apart by spaces or ';'.

    Raises:
        ValueError: nothing has this name, or the text is no shape.
    """
    named, chosen = configs.named_shapes(), {}
    for text in " ".join(texts).replace(";", " ").split():
        if "," in text:
            chosen[text] = Shape.parse(text)
            continue
        if not (names := fnmatch.filter(named, text)):
            raise ValueError(f"shape {text!r}: not in configs/shapes.toml, which has {', '.join(named)}")
        chosen |= {name: Shape.parse(named[name]) for name in names}
    return chosen


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", help="names or patterns of configs/shapes.toml, or B,Hq,Hkv,Sq,Sk,D[,Dv],mask")
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--rounds", type=int, help="samples of each provider (default 15, 5 with --quick)")
    add("--pass", dest="direction", choices=("fwd",), default="fwd")
    add("--out", type=Path, default=Path("bench_out"), help="folder of the results (default bench_out)")
    add("--peers", type=Path, help="CSV of peers' TFLOPS on this GPU, which adds a column: score")
    add("--quick", action="store_true", help="the 4k rows, fewer rounds; without a GPU, fewer kernels")
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 5 if args.quick else 15
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    try:
        args.shapes = chosen_shapes(args.shapes or (QUICK if args.quick else DEFAULT))
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where an output of tl_attention was wrong or missing, 130 after Ctrl-C, else 0."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    arguments = sys.argv[1:] if argv is None else argv
    environment = bench.environment(shlex.join(["python", "benchmarks/run.py", *arguments]))
    report.show_environment(console, environment)
    if torch.cuda.is_available() and is_hopper(torch.cuda.current_device()):
        return benchmark(args, console, environment)
    return no_gpu.run(console, args.quick)


def benchmark(args: argparse.Namespace, console: Console, environment: dict[str, str]) -> int:
    """All shapes, one after the other. What there is when it ends, however it ends, is written and shown."""
    peers = report.read_peers(args.peers) if args.peers else {}
    args.out.mkdir(parents=True, exist_ok=True)
    with console.status("measuring cuBLAS and copy rates"):
        cublas, copy = bench.measure_cublas_tflops(), bench.measure_copy_bandwidth()
    measured = {
        "cuBLAS 8192³ bf16": f"{cublas:.0f} TFLOPS",
        "copy": f"{copy:.0f} GB/s, ridge point {1000 * cublas / copy:.0f} FLOP/B",
    }
    report.show_environment(console, measured)
    environment |= measured
    console.print(f"{report.CONVENTION}\n")
    common = {"pass": args.direction, "dtype": args.dtype, "commit": environment["commit"]}
    common["gpu"] = torch.cuda.get_device_name()

    rows: list[Row] = []
    try:
        with report.progress_bar(console) as progress, (args.out / "fwd.jsonl").open("w") as jsonl:
            task = progress.add_task("", total=len(args.shapes))
            for name, shape in args.shapes.items():
                progress.update(task, description=name)
                new = measure(shape, DTYPES[args.dtype], args.providers, args.rounds)
                for row in new:
                    row |= {"shape": name, **common}
                    if row["status"] == "ok":
                        row["pct_cublas"] = 100 * row["tflops"] / cublas
                        if row["provider"] == OURS and peers:
                            row["score"] = report.score(row, peers)
                report.write_jsonl(jsonl, new)
                rows += new
                console.print(report.line(new), highlight=False)
                progress.advance(task)
    except KeyboardInterrupt:
        console.print(f"Interrupted after {len(report.problems(rows))} of {len(args.shapes)} rows.")
        return 130
    finally:
        if rows:
            finish(args.out, console, environment, rows)
    return int(any(row["status"] in ("wrong", "failed") for row in rows if row["provider"] == OURS))


def measure(shape: Shape, dtype: torch.dtype, names: Sequence[str], rounds: int) -> list[Row]:
    """One row a provider: checked, then timed in turn with the others that are right."""
    bshd = [make_inputs(shape, dtype, seed=i) for i in range(bench.rotation(bench.input_bytes(shape)))]
    inputs = {"bshd": bshd, "bhsd": [tuple(x.transpose(1, 2).contiguous() for x in qkv) for qkv in bshd]}
    size = asdict(shape) | {"mask": shape.mask}
    del size["causal"]
    rows: dict[str, Row] = {}
    ready: dict[str, Ready] = {}
    for name in names:
        provider = PROVIDERS[name]
        row = rows[name] = {"provider": name, "title": title(name), "library": provider.library(), **size}
        try:
            candidate = provider.prepare(shape, *inputs[provider.layout][0])
            row |= verify(name, candidate, inputs[provider.layout][0], bshd[0], shape.causal)
        except Unsupported as reason:
            row |= {"status": "skipped", "correct": None, "reason": str(reason)}
        except Exception as error:  # whatever a library raises goes into its row
            torch.cuda.synchronize()
            row |= {"status": "failed", "correct": None, "reason": bench.first_line(error)}
        if row["correct"]:
            ready[name] = candidate

    own = {name: inputs[PROVIDERS[name].layout] for name in ready}
    calls = {name: [partial(ready[name].launch, *qkv) for qkv in own[name]] for name in ready}
    timings = bench.time_interleaved(calls, rounds) if calls else {}
    for name, timing in timings.items():
        eager = bench.time_eager(partial(ready[name].call, *own[name][0]))
        rows[name] |= {
            "ms": timing.median_ms,
            "p25": timing.p25,
            "p75": timing.p75,
            "timer": timing.timer,
            "launches": timing.launches,
            "rounds": sum(sample is not None for sample in timing.samples),
            "eager_ms": eager.ms,
            "host_us": eager.host_us,
            "tflops": bench.fwd_flops(shape) / timing.median_ms / 1e9,
            "gbps": bench.fwd_bytes(shape) / timing.median_ms / 1e6,
            "intensity": bench.intensity(shape),
        }
        for other in timings.keys() - {name}:
            ratio = bench.speedup(timing, timings[other])
            rows[name][f"ratio_vs_{other}"] = ratio.median
            rows[name][f"ratio_range_vs_{other}"] = [ratio.p25, ratio.p75]
    return list(rows.values())


def verify(
    name: str, ready: Ready, inputs: Sequence[torch.Tensor], bshd: Sequence[torch.Tensor], causal: bool
) -> Row:
    """What the error rule says of a provider's output for bshd, which inputs hold in its own layout."""
    provider = PROVIDERS[name]
    out, lse = ready.launch(*inputs)
    same = ready.call is ready.launch or torch.equal(out, ready.call(*inputs)[0])
    out = out if provider.layout == "bshd" else out.transpose(1, 2)
    verdict = check_fwd(out, lse, *bshd, causal=causal, lse_base2=provider.lse_base2)
    correct = verdict.ok and same
    wrong = verdict.text if same else "its launch alone gives another output than the call"
    return {
        "status": "ok" if correct else "wrong",
        "correct": correct,
        "reason": None if correct else wrong,
        "max_err_ratio": verdict.max_err_ratio,
        "lse_err_ratio": None if lse is None else verdict.lse_err_ratio,
    }


def finish(out: Path, console: Console, environment: dict[str, str], rows: list[Row]) -> None:
    """Table, Markdown, plots, and the environment as JSON."""
    console.print(report.table(rows))
    for note in report.notes(rows):
        console.print(f"- {note}", highlight=False, markup=False)
    drawn = ["fwd.png"] if report.plot(rows, out / "fwd.png") else []
    (out / "fwd.md").write_text(report.markdown(environment, rows, *drawn))
    (out / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
    console.print(f"Written to {out}: {', '.join(['fwd.jsonl', 'fwd.md', 'environment.json', *drawn])}")


if __name__ == "__main__":
    sys.exit(main())
