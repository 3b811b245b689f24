"""tl_attention beside the other attention libraries: correctness, then TFLOPS.

    python benchmarks/run.py    the FlashAttention papers' grid and one more row
    python benchmarks/run.py --shapes 'paper-d128-*' 1,32,8,4096,4096,128,causal --rounds 30
    python benchmarks/run.py --pass bwd --deterministic
    python benchmarks/run.py --shapes 'gqa-*' 'small-*' --peers peers.csv    scores beside speeds
    python benchmarks/run.py --shapes 'option-*' --out benchmarks/results/nvidia_h200/options    windows, sinks, dropout, ..
    python benchmarks/run.py --pass decode --out benchmarks/results/nvidia_h200/decode    few queries against a cache
    python benchmarks/run.py --pass decode --shapes 'decode-q1-*' 8,64,8,4,8192,128,causal,page=16,ragged
    python benchmarks/run.py --host    what an eager call and the first call of a process cost the host

A backward is the library's own function from dout, q, k, v, out and lse to dq, dk and dv, everything it launches
included; out and lse are those of the library's forward, which is not timed unless the pass is fwd_bwd. With options, all
libraries are called by their public functions, and a backward is what torch.autograd.grad launches. Launches take turns with
copies of small inputs, so that they find none in L2, but for the shapes few-h* and small-*, whose rows say L2 warm.
How decoding is timed, and the names of its problems, are in benchmarks/decode.py.

Without a Hopper GPU it compiles the shipped kernels for sm_90a, reports on them, and checks the CPU path.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import decode
import host
import no_gpu
import options
import report
import torch
import turns
from providers import PROVIDERS, Inputs, Provider, Ready, Result, prepare
from report import OURS, PLAIN, Row
from rich.console import Console

from tl_attention.problem import DECODE
from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.target import is_hopper
from tl_attention.testing import counts, environment, shapes, timer
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import BwdVerdict, check_bwd, check_fwd
from tl_attention.testing.shapes import Shape, chosen_shapes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = {
    "fwd": ("paper-*", "article"),
    "bwd": ("paper-*", "mla-causal-4k", "mla-full-4k", "article"),
    "fwd_bwd": ("paper-*", "mla-causal-4k", "mla-full-4k", "article"),
    DECODE: ("decode-*",),
}
QUICK = {DECODE: ("decode-*-h64-b*-8k",)}
QUICK |= dict.fromkeys(DEFAULT.keys() - QUICK.keys(), ("paper-*-4k", "article"))
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
        help="names or patterns of configs/shapes.toml (--pass decode: of benchmarks/decode.py), or "
        "B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]",
    )
    every = list(dict.fromkeys([*PROVIDERS, *decode.PROVIDERS]))
    add("--providers", nargs="+", choices=every, default=every, help="default: all that have the pass")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--rounds", type=int, help="samples of each provider (default 15; 5 with --quick or --pass decode)")
    add("--pass", dest="direction", choices=DEFAULT, default="fwd", help="default: fwd")
    add("--deterministic", action="store_true", help="gradients that are equal bit by bit from call to call")
    add("--out", type=Path, default=Path("bench_out"), help="folder of the results (default bench_out)")
    add("--peers", nargs="+", type=Path, default=(), help=report.PEERS_HELP)
    add("--host", action="store_true", help="time the host instead: eager calls, first calls; to host.md")
    add("--quick", action="store_true", help="the 4k rows, fewer rounds; without a GPU, fewer kernels")
    args = parser.parse_args(argv)
    decodes = args.direction == DECODE
    args.providers = [name for name in args.providers if name in (decode.PROVIDERS if decodes else PROVIDERS)]
    if not args.providers:
        parser.error(f"--providers: expected one that has --pass {args.direction}")
    if args.rounds is None:
        args.rounds = 5 if args.quick or decodes else 15
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    try:
        texts = args.shapes or (QUICK if args.quick else DEFAULT)[args.direction]
        args.shapes = decode.chosen_shapes(texts) if decodes else chosen_shapes(texts)
        for text, shape in args.shapes.items():
            if (shape.options.page or shape.options.ragged) and not decodes:
                raise ValueError(f"--shapes {text}: page and ragged are options of --pass decode alone")
        args.peers = report.read_peers(args.peers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.deterministic:
        if "bwd" not in args.direction:
            parser.error("--deterministic: expected --pass bwd or fwd_bwd; a forward always is")
        args.direction += "_det"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if an output of tl_attention is wrong or missing or the GPU fails, 130 after Ctrl-C, or 0."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    arguments = sys.argv[1:] if argv is None else argv
    facts = environment.facts(shlex.join(["python", "benchmarks/run.py", *arguments]))
    report.show_environment(console, facts)
    if torch.cuda.is_available() and is_hopper(torch.cuda.current_device()):
        if args.host:
            return host.run(console, args.out, facts)
        return benchmark(args, console, facts)
    if args.host:
        console.print("--host: expected a Hopper GPU, found none: what the host does is to launch on it")
        return 2
    return no_gpu.run(console, args.quick)


def benchmark(args: argparse.Namespace, console: Console, facts: dict[str, str]) -> int:
    """All shapes, one after the other. What there is when it ends, however it ends, is written and shown."""
    args.out.mkdir(parents=True, exist_ok=True)
    with console.status("measuring cuBLAS and copy rates"):
        cublas, copy = timer.measure_cublas_tflops(), timer.measure_copy_bandwidth()
    measured = {
        "cuBLAS 8192³ bf16": f"{cublas:.0f} TFLOPS",
        "copy": f"{copy:.0f} GB/s, ridge point {1000 * cublas / copy:.0f} FLOP/B",
    }
    report.show_environment(console, measured)
    facts |= measured
    console.print(f"{report.convention(args.direction)}\n")
    common = {"pass": args.direction, "dtype": args.dtype, "commit": facts["commit"]}
    common["gpu"] = torch.cuda.get_device_name()

    take, rows = measurer(args), []
    jsonl_path = args.out / report.jsonl_name(args.direction)
    try:
        with report.progress_bar(console) as progress, jsonl_path.open("w") as jsonl:
            task = progress.add_task("", total=len(args.shapes))
            for name, shape in args.shapes.items():
                progress.update(task, description=name)
                new = take(name, shape)
                for row in new:
                    row |= {"shape": name, "l2": "warm" if is_warm(name) else "cold", **common}
                    if row["status"] == "ok":
                        row["pct_cublas"] = 100 * row["tflops"] / cublas
                        row["pct_copy"] = 100 * row["gbps"] / copy
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
            finish(args.out, console, facts, rows)
    return int(any(row["status"] != "ok" for row in rows if row["provider"] == OURS))


def is_warm(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in WARM)


def measurer(args: argparse.Namespace) -> Callable[[str, Shape], list[Row]]:
    """(name of a shape, shape) -> a row a provider."""
    dtype = DTYPES[args.dtype]
    if args.direction == DECODE:
        caches = decode.Caches(args.shapes.values(), dtype)
        return lambda name, shape: decode.measure(shape, caches, args.providers, args.rounds)
    return lambda name, shape: measure(
        shape, dtype, args.direction, args.providers, args.rounds, is_warm(name)
    )


def gpu_error() -> str | None:
    """The error that every CUDA call of this process meets from now on, if there is one."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return timer.first_line(error)
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
    with turns.reason_of_all(rows):
        compare(shape, make_copies(shape, dtype, direction, warm), direction, rows, rounds)
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
    return turns.new_row(name, provider_of(name, shape), shape)


def compare(shape: Shape, bshd: Sequence[Inputs], direction: str, rows: dict[str, Row], rounds: int) -> None:
    """Fills in the rows, from copies of the inputs."""
    copies = {"bshd": bshd, "bhsd": [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in bshd]}

    def enter(name: str) -> tuple[Ready, Sequence[Inputs]]:
        return prepare(provider_of(name, shape), shape, direction, copies[rows[name]["layout"]])

    def check(name: str, result: Result, when: str) -> Row:
        return verify(name, shape, direction, result, bshd[0], when)

    def speeds(name: str, *timings: Any) -> Row:
        return turns.speeds(options.asked_of(name, shape), direction, *timings)

    turns.compete(rows, rounds, enter, check, speeds, same_bits=shapes.is_deterministic(direction))


def make_copies(shape: Shape, dtype: torch.dtype, direction: str, warm: bool = False) -> list[Inputs]:
    """(q, k, v), or where there is a backward (dout, q, k, v), as [batch, seqlen, heads, head_dim].

    As many copies as it takes for a launch to find none of its inputs in L2; warm: one.
    """
    seeds = range(1 if warm else timer.rotation(counts.input_bytes(shape, direction)))
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
        heads = [turns.spread(option_heads(shape), shape.heads_kv), shape.heads_kv]
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
        found = {"lse_err_ratio": None if lse is None else turns.finite(verdicts[0].lse_err_ratio)}
    else:
        out, grads = (result[:1], result[1:]) if "fwd" in direction else ((), result)
        if out:
            verdicts.append(check_fwd(*out, None, q, k, v, causal=causal, **asked))
        verdicts.append(check_bwd(tuple(grads), *dout, q, k, v, causal=causal, **asked))
    unchecked = [x for x in whole if x is not None and x.ndim == 4] if heads else ()
    return found | turns.found(verdicts, when, unchecked)


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
    pairs = counts.visible_pairs(shape) * shape.heads_q // shape.heads_kv
    return min(shape.heads_kv, max(2, MAX_CHECKED_PAIRS // max(pairs, 1)))


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
    scores = counts.visible_pairs(shape) // shape.batch * shape.heads_q // heads  # of one of them
    every = shape.batch * heads
    most = max(2, MAX_CHECKED_SCORES // max(scores, 1))
    if every <= most:
        return None
    return turns.spread(most, every), heads


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


def finish(out: Path, console: Console, facts: dict[str, str], rows: list[Row]) -> None:
    """Shows the table and writes the report."""
    console.print(report.table(rows))
    why = report.read_why(out, rows[0]["pass"])
    for note in (*report.slowest(rows, why), *report.summary(rows), *report.notes(rows)):
        console.print(f"- {note}", highlight=False, markup=False)
    written = report.write(out, rows, facts)
    console.print(f"Written to {out}: {', '.join([report.jsonl_name(rows[0]['pass']), *written])}")


if __name__ == "__main__":
    sys.exit(main())
