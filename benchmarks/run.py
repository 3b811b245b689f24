"""tl_attention beside the other attention libraries: correctness, then TFLOPS.

    python benchmarks/run.py    the FlashAttention papers' grid and one more row
    python benchmarks/run.py --shapes 'paper-d128-*' 1,32,8,4096,4096,128,causal --rounds 30
    python benchmarks/run.py --pass bwd --deterministic
    python benchmarks/run.py --shapes 'gqa-*' 'small-*' --peers peers.csv    scores beside speeds
    python benchmarks/run.py --shapes 'option-*' --out benchmarks/results/nvidia_h200/options    windows, sinks, dropout, ..
    python benchmarks/run.py --host    what an eager call and the first call of a process cost the host

A backward is the library's own function from dout, q, k, v, out and lse to dq, dk and dv, everything it launches
included; out and lse are those of the library's forward, which is not timed unless the pass is fwd_bwd. With options, all
libraries are called by their public functions, and a backward is what torch.autograd.grad launches. Launches take turns with
copies of small inputs, so that they find none in L2, but for the shapes few-h* and small-*, whose rows say L2 warm.

Without a Hopper GPU it compiles the shipped kernels for sm_90a, reports on them, and checks the CPU path.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import host
import no_gpu
import options
import report
import torch
from providers import PROVIDERS, Inputs, Provider, Ready, Result, Unsupported, prepare, title
from report import OURS, PLAIN, Row
from rich.console import Console

from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.target import is_hopper
from tl_attention.testing import bench
from tl_attention.testing.bench import Shape, chosen_shapes
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import BwdVerdict, check_bwd, check_fwd

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = {
    "fwd": ("paper-*", "article"),
    "bwd": ("paper-*", "mla-causal-4k", "mla-full-4k", "article"),
    "fwd_bwd": ("paper-*", "mla-causal-4k", "mla-full-4k", "article"),
}
QUICK = ("paper-*-4k", "article")
WARM = ("few-h*", "small-*")  # shapes whose launches share one copy of the inputs, as in the tables of peers

# Scores of the heads that a forward or a backward is checked on: one of 32 heads of 16384 full queries has 2^28
MAX_CHECKED_SCORES = 2**33
MAX_CHECKED_PAIRS = 2**30  # of problems with options, whose reference takes more passes over the scores
SOFTCAP_SPREAD = 8  # q times this, so that a softcap changes scores
SLOPE_RTOL = 0.03  # of results under a dropout mask of the library's own, regressed on those without dropout


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        help="names or patterns of configs/shapes.toml, or B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]",
    )
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--rounds", type=int, help="samples of each provider (default 15, 5 with --quick)")
    add("--pass", dest="direction", choices=DEFAULT, default="fwd", help="default: fwd")
    add("--deterministic", action="store_true", help="gradients that are equal bit by bit from call to call")
    add("--out", type=Path, default=Path("bench_out"), help="folder of the results (default bench_out)")
    add("--peers", nargs="+", type=Path, default=(), help=report.PEERS_HELP)
    add("--host", action="store_true", help="time the host instead: eager calls, first calls; to host.md")
    add("--quick", action="store_true", help="the 4k rows, fewer rounds; without a GPU, fewer kernels")
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 5 if args.quick else 15
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    try:
        args.shapes = chosen_shapes(args.shapes or (QUICK if args.quick else DEFAULT[args.direction]))
        args.peers = report.read_peers(args.peers)
    except (ValueError, OSError) as error:
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
        if args.host:
            return host.run(console, args.out, environment)
        return benchmark(args, console, environment)
    if args.host:
        console.print("--host: expected a Hopper GPU, found none: what the host does is to launch on it")
        return 2
    return no_gpu.run(console, args.quick)


def benchmark(args: argparse.Namespace, console: Console, environment: dict[str, str]) -> int:
    """All shapes, one after the other. What there is when it ends, however it ends, is written and shown."""
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
                warm = any(fnmatch.fnmatch(name, pattern) for pattern in WARM)
                new = measure(shape, DTYPES[args.dtype], args.direction, args.providers, args.rounds, warm)
                for row in new:
                    row |= {"shape": name, "l2": "warm" if warm else "cold", **common}
                    if row["status"] == "ok":
                        row["pct_cublas"] = 100 * row["tflops"] / cublas
                report.judge(new, args.peers)
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


def measure(
    shape: Shape, dtype: torch.dtype, direction: str, names: Sequence[str], rounds: int, warm: bool = False
) -> list[Row]:
    """One row a provider: checked, timed in turn with the others that are right, and checked again.

    What a provider raises is the reason of its row. What the inputs or the GPU raise is that of all rows that
    are not finished by then.

    Args:
        warm: all launches share one copy of the inputs, so that L2 holds what it can of them.
    """
    rows = {name: new_row(name, shape) for name in entering(names, shape)}
    try:
        compare(shape, make_copies(shape, dtype, direction, warm), direction, rows, rounds)
    except Exception as error:
        for row in rows.values():
            if row["status"] == "failed":
                row["reason"] = row["reason"] or bench.first_line(error)
    return list(rows.values())


def entering(names: Sequence[str], shape: Shape) -> list[str]:
    """With options, those of the providers that are compared then, and ours without the options."""
    if not shape.options:
        return list(names)
    every = [*(name for name in names if name in options.PROVIDERS), *[PLAIN] * (OURS in names)]
    return sorted(every, key=list(options.PROVIDERS).index)


def provider_of(name: str, shape: Shape) -> Provider:
    return (options.PROVIDERS if shape.options else PROVIDERS)[name]


def new_row(name: str, shape: Shape) -> Row:
    """A row that nothing is known of."""
    provider = provider_of(name, shape)
    size = asdict(shape) | {"mask": shape.mask}
    del size["causal"], size["options"]
    if shape.options:
        size |= {"options": shape.options.words, "share": bench.share_of_blocks(shape)}
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


def compare(shape: Shape, bshd: Sequence[Inputs], direction: str, rows: dict[str, Row], rounds: int) -> None:
    """Fills in the rows, from copies of the inputs."""
    copies = {"bshd": bshd, "bhsd": [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in bshd]}
    entrants: dict[str, Entrant] = {}
    for name, row in rows.items():
        with reasons(row):
            ready, inputs = prepare(provider_of(name, shape), shape, direction, copies[row["layout"]])
            result = ready.launch(*inputs[0])
            row |= verify(name, shape, direction, result, bshd[0])
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
                    row |= verify(name, shape, direction, result, bshd[0], "when timed, ")
                    if row["correct"] and bench.is_deterministic(direction):
                        row |= {
                            "correct": False,
                            "status": "wrong",
                            "reason": "when timed, other bits than at first",
                        }
            if row["correct"]:
                row |= speeds(options.asked_of(name, shape), direction, timing, eager)
                right[name] = timing
    for name, timing in right.items():
        for other in right.keys() - {name}:
            ratio = bench.speedup(timing, right[other])
            rows[name][f"ratio_vs_{other}"] = ratio.median
            rows[name][f"ratio_range_vs_{other}"] = [ratio.p25, ratio.p75]


def make_copies(shape: Shape, dtype: torch.dtype, direction: str, warm: bool = False) -> list[Inputs]:
    """(q, k, v), or where there is a backward (dout, q, k, v), as [batch, seqlen, heads, head_dim].

    As many copies as it takes for a launch to find none of its inputs in L2; warm: one.
    """
    seeds = range(1 if warm else bench.rotation(bench.input_bytes(shape, direction)))
    layout = "packed" if shape.options.packed else "bshd"
    copies = [make_inputs(shape, dtype, layout, seed=seed) for seed in seeds]
    if shape.options.softcap:
        for q, *_ in copies:
            q *= SOFTCAP_SPREAD
    if "bwd" not in direction:
        return copies
    return [(make_dout(shape, dtype, seed=seed), *copies[seed]) for seed in seeds]


def verify(name: str, shape: Shape, direction: str, result: Result, inputs: Inputs, when: str = "") -> Row:
    """What the error rules say of a provider's result for inputs, which are bshd.

    A large problem is checked on some heads, each with all its queries and keys (a smaller problem, which the rule judges as any
    other): as many as have MAX_CHECKED_SCORES, at least two, evenly spread over batch and heads, the first and the last of them
    included. For a backward these are key heads with all query heads of theirs. In the other heads nothing may be NaN or inf.
    A forward of MAX_CHECKED_SCORES at head_dim 128 is 4.4 TFLOP of the reference in fp32. In rows of options they are some key heads
    of all batch entries, with all query heads of theirs.
    """
    provider, has_options = provider_of(name, shape), bool(shape.options)
    shape = options.asked_of(name, shape)
    if provider.layout == "bhsd":
        result = [x.transpose(1, 2) if x is not None and x.ndim == 4 else x for x in result]
    whole, asked = result, {}
    if has_options:
        heads = [spread(option_heads(shape), shape.heads_kv), shape.heads_kv]
        asked = options.reference_options(
            shape, inputs[0].dtype, inputs[0].device, query_heads(shape, heads[0])
        )
        result, inputs = (
            [x if x is None else of_heads(x, shape, heads[0]) for x in tensors]
            for tensors in (result, inputs)
        )
    elif heads := checked_heads(shape, direction):
        result, inputs = ([take_heads(x, *heads) for x in tensors] for tensors in (result, inputs))
    if heads:
        when += f"in {len(heads[0])} heads that were checked, "
    *dout, q, k, v = inputs
    verdicts, causal, found = [], shape.causal, {}
    if shape.options.dropout and name in options.OWN_MASK:
        verdicts.append(check_on_average(result, direction, *dout, q, k, v, causal=causal))
    elif direction == "fwd":
        out, lse = result
        verdicts.append(check_fwd(out, lse, q, k, v, causal=causal, lse_base2=provider.lse_base2, **asked))
        found = {"lse_err_ratio": None if lse is None else finite(verdicts[0].lse_err_ratio)}
    else:
        out, grads = (result[:1], result[1:]) if "fwd" in direction else ((), result)
        if out:
            verdicts.append(check_fwd(*out, None, q, k, v, causal=causal, **asked))
        verdicts.append(check_bwd(tuple(grads), *dout, q, k, v, causal=causal, **asked))
    found["correct"] = all(verdict.ok for verdict in verdicts)
    found["max_err_ratio"] = finite(max(verdict.max_err_ratio for verdict in verdicts))
    if not found["correct"]:
        wrong = "; ".join(verdict.text for verdict in verdicts if not verdict.ok)
        found |= {"status": "wrong", "reason": when + wrong}
    elif heads and not all(bool(x.isfinite().all()) for x in whole if x is not None and x.ndim == 4):
        found |= {
            "correct": False,
            "status": "wrong",
            "reason": f"{when}all is right; others have NaN or inf",
        }
    return found


def check_on_average(result: Result, direction: str, *inputs: torch.Tensor, causal: bool) -> BwdVerdict:
    """Whether results under an unknown dropout mask are those without dropout on average.

    Each is linear in the mask, whose mean is 1: its regression on the exact one has slope 1.
    """
    *dout, q, k, v = inputs
    named: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    if "fwd" in direction:
        named.append(("out", result[0], attention_reference(q, k, v, causal=causal)[0]))
    if "bwd" in direction:
        exact = attention_backward_reference(*dout, q, k, v, causal=causal)
        named += zip(("dq", "dk", "dv"), result[-3:], exact, strict=True)
    slopes = {name: float((x * ref).sum() / ref.square().sum()) for name, x, ref in named}
    ratios = {
        name: abs(slope - 1) / SLOPE_RTOL if math.isfinite(slope) else math.inf
        for name, slope in slopes.items()
    }
    text = "; ".join(
        f"{name} is {slope:.3f} of that without dropout on average" for name, slope in slopes.items()
    )
    return BwdVerdict(max(ratios.values()) <= 1, ratios, text)


def option_heads(shape: Shape) -> int:
    """How many key heads to check of a problem with options, in all batch entries: what has MAX_CHECKED_PAIRS, at least two."""
    pairs = bench.visible_pairs(shape) * shape.heads_q // shape.heads_kv
    return min(shape.heads_kv, max(2, MAX_CHECKED_PAIRS // max(pairs, 1)))


def spread(count: int, every: int) -> list[int]:
    """So many of a number of heads, evenly, with the first and the last of them; all where there are no more."""
    return list(range(every)) if count >= every else [i * (every - 1) // (count - 1) for i in range(count)]


def query_heads(shape: Shape, key_heads: Sequence[int]) -> list[int]:
    group = shape.heads_q // shape.heads_kv
    return [head * group + i for head in key_heads for i in range(group)]


def of_heads(x: torch.Tensor, shape: Shape, key_heads: Sequence[int]) -> torch.Tensor:
    """What belongs to some key heads, as the reference takes it: of varlen, with the tokens of all sequences in one dimension.

    Args:
        x: [batch, seqlen, heads, columns], [batch, heads_q, seqlen], [heads_q, tokens] or [heads_q].
    """
    dim = {4: 2, 3: 1, 2: 0, 1: 0}[x.ndim]
    chosen = key_heads if dim == 2 and x.shape[dim] == shape.heads_kv else query_heads(shape, key_heads)
    picked = x.index_select(dim, torch.tensor(chosen, device=x.device))
    return picked.flatten(0, 1) if shape.is_varlen and x.ndim == 4 else picked


def checked_heads(shape: Shape, direction: str) -> tuple[list[int], int] | None:
    """The heads to check, counted through the batch entries, and how many an entry has; None for all.

    Heads of q in a forward, of k where there is a backward.
    """
    heads = shape.heads_kv if "bwd" in direction else shape.heads_q
    scores = bench.visible_pairs(shape) // shape.batch * shape.heads_q // heads  # of one of them
    every = shape.batch * heads
    most = max(2, MAX_CHECKED_SCORES // max(scores, 1))
    if every <= most:
        return None
    return spread(most, every), heads


def take_heads(x: torch.Tensor | None, chosen: Sequence[int], heads: int) -> torch.Tensor | None:
    """Some of so many heads an entry, as batch entries, with what belongs to them.

    Args:
        x: [batch, seqlen, H, columns], or an lse [batch, H, seqlen]; if H is not heads, each has several of the H, or shares one.
    """
    if x is None:
        return None
    by_head = x if x.ndim == 3 else x.transpose(1, 2)
    H = by_head.shape[1]
    parts = []
    for i in chosen:
        entry, head = divmod(i, heads)
        first = head * H // heads
        parts.append(by_head[entry, first : first + max(1, H // heads)])
    picked = torch.stack(parts)
    return picked if x.ndim == 3 else picked.transpose(1, 2)


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
    why = report.read_why(out, rows[0]["pass"])
    for note in (*report.slowest(rows, why), *report.summary(rows), *report.notes(rows)):
        console.print(f"- {note}", highlight=False, markup=False)
    written = report.write(out, rows, environment)
    console.print(f"Written to {out}: {', '.join([report.jsonl_name(rows[0]['pass']), *written])}")


if __name__ == "__main__":
    sys.exit(main())
