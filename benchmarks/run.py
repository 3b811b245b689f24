"""tl_attention beside the other attention libraries: correctness, then TFLOPS.

    python benchmarks/run.py    the FlashAttention papers' grid and one more row
    python benchmarks/run.py --shapes 'paper-d128-*' 1,32,8,4096,4096,128,causal --rounds 30
    python benchmarks/run.py --pass bwd --deterministic

A backward is the library's own function from dout, q, k, v, out and lse to dq, dk and dv, everything it launches
included; out and lse are those of the library's forward, which is not timed unless the pass is fwd_bwd.

Without a Hopper GPU it compiles the shipped kernels for sm_90a, reports on them, and checks the CPU path.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import no_gpu
import report
import torch
from providers import PROVIDERS, Inputs, Ready, Result, Unsupported, prepare, title
from report import OURS, Row
from rich.console import Console

from tl_attention.target import is_hopper
from tl_attention.testing import bench
from tl_attention.testing.bench import Shape, chosen_shapes
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import check_bwd, check_fwd

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = {
    "fwd": ("paper-*", "article"),
    "bwd": ("paper-*", "mla-*", "article"),
    "fwd_bwd": ("paper-*", "mla-*", "article"),
}
QUICK = ("paper-*-4k", "article")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", help="names or patterns of configs/shapes.toml, or B,Hq,Hkv,Sq,Sk,D[,Dv],mask")
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--rounds", type=int, help="samples of each provider (default 15, 5 with --quick)")
    add("--pass", dest="direction", choices=DEFAULT, default="fwd", help="default: fwd")
    add("--deterministic", action="store_true", help="gradients that are equal bit by bit from call to call")
    add("--out", type=Path, default=Path("bench_out"), help="folder of the results (default bench_out)")
    add("--peers", type=Path, help="CSV of peers' TFLOPS on this GPU, which adds a column: score")
    add("--quick", action="store_true", help="the 4k rows, fewer rounds; without a GPU, fewer kernels")
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 5 if args.quick else 15
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    try:
        args.shapes = chosen_shapes(args.shapes or (QUICK if args.quick else DEFAULT[args.direction]))
    except ValueError as error:
        parser.error(str(error))
    if args.deterministic:
        if args.direction == "fwd":
            parser.error("--deterministic: expected --pass bwd or fwd_bwd; a forward always is")
        args.direction += "_det"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if an output of tl_attention is wrong or missing or the GPU fails, 130 after Ctrl-C, or 0."""
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
    console.print(f"{report.convention(args.direction)}\n")
    common = {"pass": args.direction, "dtype": args.dtype, "commit": environment["commit"]}
    common["gpu"] = torch.cuda.get_device_name()

    rows: list[Row] = []
    jsonl_path = args.out / report.jsonl_name(args.direction)
    try:
        with report.progress_bar(console) as progress, jsonl_path.open("w") as jsonl:
            task = progress.add_task("", total=len(args.shapes))
            for name, shape in args.shapes.items():
                progress.update(task, description=name)
                new = measure(shape, DTYPES[args.dtype], args.direction, args.providers, args.rounds)
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
                if error := gpu_error():
                    console.print(f"Stopped at {name}: the GPU does nothing more, {error}.", markup=False)
                    return 1
    except KeyboardInterrupt:
        console.print(f"Interrupted after {len(report.problems(rows))} of {len(args.shapes)} rows.")
        return 130
    finally:
        if rows:
            finish(args.out, console, environment, rows)
    return int(any(row["status"] != "ok" for row in rows if row["provider"] == OURS))


def gpu_error() -> str | None:
    """The error that every CUDA call of this process meets from now on, if there is one."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return bench.first_line(error)
    return None


def measure(shape: Shape, dtype: torch.dtype, direction: str, names: Sequence[str], rounds: int) -> list[Row]:
    """One row a provider: checked, timed in turn with the others that are right, and checked again.

    What a provider raises is the reason of its row. What the inputs or the GPU raise is that of all rows that
    are not finished by then.
    """
    rows = {name: new_row(name, shape) for name in names}
    try:
        compare(shape, dtype, direction, rows, rounds)
    except Exception as error:
        for row in rows.values():
            if row["status"] == "failed":
                row["reason"] = row["reason"] or bench.first_line(error)
    return list(rows.values())


def new_row(name: str, shape: Shape) -> Row:
    """A row that nothing is known of."""
    provider = PROVIDERS[name]
    size = asdict(shape) | {"mask": shape.mask}
    del size["causal"]
    facts = {"provider": name, "title": title(name), "library": provider.library(), "layout": provider.layout}
    return facts | size | dict.fromkeys(report.MEASURED) | {"status": "failed", "reason": None}


@contextlib.contextmanager
def reasons(row: Row) -> Iterator[None]:
    """Whatever a library raises here goes into its row; what every later CUDA call meets, too, is raised."""
    try:
        yield
    except Unsupported as reason:
        row |= {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        row |= {"status": "failed", "reason": bench.first_line(error)}
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Entrant:
    """A provider that is ready for a problem, and was right once."""

    ready: Ready
    inputs: list[Inputs]  # of a call, for each copy
    checked: Result  # of the first


def compare(shape: Shape, dtype: torch.dtype, direction: str, rows: dict[str, Row], rounds: int) -> None:
    """Fills in the rows."""
    bshd = make_copies(shape, dtype, direction)
    copies = {"bshd": bshd, "bhsd": [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in bshd]}
    entrants: dict[str, Entrant] = {}
    for name, row in rows.items():
        with reasons(row):
            ready, inputs = prepare(PROVIDERS[name], shape, direction, copies[row["layout"]])
            result = ready.launch(*inputs[0])
            row |= verify(name, direction, result, bshd[0], shape.causal)
            if row["correct"]:
                entrants[name] = Entrant(ready, inputs, tuple(x if x is None else x.clone() for x in result))

    timings = time_all(entrants, rows, rounds)
    right: dict[str, bench.Timing] = {}
    for name, entrant in entrants.items():
        row, timing = rows[name], timings[name]
        with reasons(row):
            eager = bench.time_eager(partial(entrant.ready.call, *entrant.inputs[0]))
            for result in (timing.result, eager.result):
                if row["correct"] and not same(result, entrant.checked):
                    row |= verify(name, direction, result, bshd[0], shape.causal, "when timed, ")
                    if row["correct"] and bench.is_deterministic(direction):
                        row |= {
                            "correct": False,
                            "status": "wrong",
                            "reason": "when timed, other bits than at first",
                        }
            if row["correct"]:
                row |= speeds(shape, direction, timing, eager)
                right[name] = timing
    for name, timing in right.items():
        for other in right.keys() - {name}:
            ratio = bench.speedup(timing, right[other])
            rows[name][f"ratio_vs_{other}"] = ratio.median
            rows[name][f"ratio_range_vs_{other}"] = [ratio.p25, ratio.p75]


def make_copies(shape: Shape, dtype: torch.dtype, direction: str) -> list[Inputs]:
    """(q, k, v), or where there is a backward (dout, q, k, v), as often as L2 demands; [batch, seqlen, heads, head_dim]."""
    seeds = range(bench.rotation(bench.input_bytes(shape, direction)))
    copies = [make_inputs(shape, dtype, seed=seed) for seed in seeds]
    if "bwd" not in direction:
        return copies
    return [(make_dout(shape, dtype, seed=seed), *copies[seed]) for seed in seeds]


def verify(name: str, direction: str, result: Result, inputs: Inputs, causal: bool, when: str = "") -> Row:
    """What the error rules say of a provider's result for inputs, which are bshd."""
    provider = PROVIDERS[name]
    if provider.layout == "bhsd":
        result = [x.transpose(1, 2) if x is not None and x.ndim == 4 else x for x in result]
    *dout, q, k, v = inputs
    verdicts = []
    if direction == "fwd":
        out, lse = result
        verdicts.append(check_fwd(out, lse, q, k, v, causal=causal, lse_base2=provider.lse_base2))
        found = {"lse_err_ratio": None if lse is None else finite(verdicts[0].lse_err_ratio)}
    else:
        *out, dq, dk, dv = result
        found = {}
        if out:
            verdicts.append(check_fwd(*out, None, q, k, v, causal=causal))
        verdicts.append(check_bwd((dq, dk, dv), *dout, q, k, v, causal=causal))
    found["correct"] = all(verdict.ok for verdict in verdicts)
    found["max_err_ratio"] = finite(max(verdict.max_err_ratio for verdict in verdicts))
    if not found["correct"]:
        wrong = "; ".join(verdict.text for verdict in verdicts if not verdict.ok)
        found |= {"status": "wrong", "reason": when + wrong}
    return found


def finite(x: float) -> float | None:
    """JSON has no inf."""
    return x if math.isfinite(x) else None


def same(a: Result, b: Result) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def time_all(entrants: dict[str, Entrant], rows: dict[str, Row], rounds: int) -> dict[str, bench.Timing]:
    """All in turn. One that fails loses its place among the entrants, and the others are timed anew."""
    while entrants:
        calls = {name: [partial(e.ready.launch, *copy) for copy in e.inputs] for name, e in entrants.items()}
        try:
            return bench.time_interleaved(calls, rounds)
        except bench.CallFailed as failure:
            del entrants[failure.name]
            with reasons(rows[failure.name]):
                raise failure.__cause__ from None
    return {}


def speeds(shape: Shape, direction: str, timing: bench.Timing, eager: bench.Eager) -> Row:
    return {
        "status": "ok",
        "ms": timing.median_ms,
        "p25": timing.p25,
        "p75": timing.p75,
        "timer": timing.timer,
        "launches": timing.launches,
        "rounds": sum(sample is not None for sample in timing.samples),
        "eager_ms": eager.ms,
        "host_us": eager.host_us,
        "tflops": bench.flops(shape, direction) / timing.median_ms / 1e9,
        "gbps": bench.traffic(shape, direction) / timing.median_ms / 1e6,
        "intensity": bench.intensity(shape, direction),
    }


def finish(out: Path, console: Console, environment: dict[str, str], rows: list[Row]) -> None:
    """Shows the table and writes the report."""
    console.print(report.table(rows))
    for note in report.notes(rows):
        console.print(f"- {note}", highlight=False, markup=False)
    written = report.write(out, rows, environment)
    console.print(f"Written to {out}: {', '.join([report.jsonl_name(rows[0]['pass']), *written])}")


if __name__ == "__main__":
    sys.exit(main())
