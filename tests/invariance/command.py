"""Command of the rearrangements: `python -m tests.invariance --help`.

It draws rearranged calls with batch_invariant of one dtype and head dims, and compares out and log-sum-exp of each query bit by bit with a
training forward of its sequence alone: batches, order, bounds of lengths, chunks, caches, pages, decodes, heads. Without a Hopper GPU it
compares the CPU path with itself, within a tolerance.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrix.command import NICE, default_jobs
from matrix.parent import Results, Settings
from matrix.parent import run as run_in_workers

from tl_attention.compilation import building, manifest, store

from .draws import (
    DEFAULT_LATENT_OPTIONS,
    DEFAULT_OPTIONS,
    DTYPES,
    LATENT,
    LONG_ROWS,
    PAGES,
    PER_SET,
    OptionSet,
    Run,
    divided,
    kernels_of,
)
from .worker import COUNTS, Share

FOLDER = Path(__file__).parent
CPU_LONGEST = 150  # keys, without a GPU
PER_SHARE = 5 * PER_SET  # draws


@dataclass(frozen=True)
class ShareClass:
    """A share of the draws in the place of a class of the matrix, whose parent it is given to.

    Args:
        kernels: those of its options, by name.
    """

    run: Run
    share: Share
    kernels: dict[str, Any]

    @property
    def id(self) -> str:
        return self.share.id

    @property
    def name(self) -> str:
        return f"{self.run.name} {self.share.options}, draws {self.share.first} to {self.share.last - 1}"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("python -m tests.invariance", description=__doc__)
    found.add_argument("--draws", type=int, default=2000, help="rearrangements, divided among the options")
    found.add_argument("--dtype", choices=DTYPES, default="bf16")
    found.add_argument(
        "--head-dim",
        default="128",
        help="128, or of q and of v: 192-128; 576-512: decodes of latent attention",
    )
    found.add_argument("--seed", type=int, default=0)
    found.add_argument(
        "--options",
        default="",
        help="sets of options, whose kernels differ: words of causal, full, band, window, softcap, sink, alibi joined by '-'; default:"
        f" {','.join(DEFAULT_OPTIONS)}; with latent attention {','.join(DEFAULT_LATENT_OPTIONS)}",
    )
    found.add_argument("--pages", default=",".join(map(str, PAGES)), help="page sizes, multiples of 16")
    found.add_argument(
        "--longest", type=int, default=0, help=f"most keys; default {LONG_ROWS}, without a GPU {CPU_LONGEST}"
    )
    found.add_argument(
        "--processes",
        type=int,
        default=0,
        help="processes that draw; default: half of the CPUs, at most 8",
    )
    found.add_argument("--draw", action="append", default=[], help="causal:17: repeat this draw alone")
    found.add_argument("--time-limit", type=float, default=1e9, help="seconds after which no share begins")
    found.add_argument("--hang-limit", type=float, default=20.0, help="seconds after which a launch hangs")
    found.add_argument("--out", type=Path, help="JSON file for the results")
    found.add_argument(
        "--build", action="store_true", help="build the kernels, without a GPU, and draw nothing"
    )
    found.add_argument("--list", action="store_true", help="list the kernels, and draw nothing")
    found.add_argument("--cpu", action="store_true", help="the CPU path, also where there is a GPU")
    found.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("--builder", action="store_true", help=argparse.SUPPRESS)
    return found


def run_of(arguments: argparse.Namespace, on_cpu: bool) -> Run:
    """The run that arguments ask for."""
    width = tuple(int(n) for n in arguments.head_dim.split("-"))
    width = width * 2 if len(width) == 1 else width
    if width[0] > 256 and width != LATENT:
        raise ValueError(f"--head-dim: expected at most 256, or 576-512, got {arguments.head_dim}")
    longest = arguments.longest or (CPU_LONGEST if on_cpu else LONG_ROWS)
    pages = tuple(int(n) for n in arguments.pages.split(","))
    return Run(arguments.dtype, width, arguments.seed, longest, pages)


def option_sets(arguments: argparse.Namespace, run: Run) -> list[OptionSet]:
    if arguments.draw:
        return [OptionSet(name) for name in dict.fromkeys(text.split(":")[0] for text in arguments.draw)]
    default = DEFAULT_LATENT_OPTIONS if run.is_latent else DEFAULT_OPTIONS
    return [OptionSet(name) for name in (arguments.options.split(",") if arguments.options else default)]


def shares_of(arguments: argparse.Namespace, options: Sequence[OptionSet]) -> list[Share]:
    """Shares of the draws, those of all options in turn."""
    if arguments.draw:
        found = [text.split(":") for text in arguments.draw]
        return [Share(name, int(n), int(n) + 1) for name, n in found]
    found = []
    for i, (name, count) in enumerate(divided(arguments.draws, [one.name for one in options]).items()):
        for first in range(0, count, PER_SHARE):
            found.append((first, i, Share(name, first, min(first + PER_SHARE, count))))
    return [share for *_, share in sorted(found, key=lambda x: x[:2])]


def again(run: Run, options: str, index: int) -> str:
    """The command that repeats a draw."""
    return f"python -m tests.invariance {' '.join(run.words)} --draw {options}:{index}"


def report_of(run: Run, shares: Sequence[ShareClass], results: Results, on_cpu: bool) -> dict[str, Any]:
    """Results of a run as JSON."""
    counts: Counter[str] = Counter()
    by_options: dict[str, Counter[str]] = {}
    failures, draws = [], 0
    for one in shares:
        result = results.classes[one.name]
        counts.update(result.launches)
        draws += result.draws
        of_options = by_options.setdefault(one.share.options, Counter())
        for name, n in result.launches.items():
            of_options[name.split("|")[1]] += n
        for index, text, fault in result.failures:
            command = again(run, one.share.options, index) if index >= 0 else ""
            failures.append(
                {
                    "options": one.share.options,
                    "draw": index,
                    "text": text,
                    "fault": fault,
                    "command": command,
                }
            )
    kinds = {name.split("|")[0] for name in counts}
    kernels = {name: kernel for one in shares for name, kernel in one.kernels.items()}
    return {
        "gpu": results.gpu,
        "date": datetime.date.today().isoformat(),
        "dtype": run.dtype,
        "head_dims": run.head_dims,
        "seed": run.seed,
        "longest": run.longest,
        "pages": run.pages,
        "compared": "within a tolerance" if on_cpu else "bit by bit",
        "asked": sum(one.share.last - one.share.first for one in shares),
        "draws": draws,
        "seconds": round(results.seconds, 1),
        "ended_by": results.why_ended,
        "kinds": {kind: {name: counts[f"{kind}|{name}"] for name in COUNTS} for kind in sorted(kinds)},
        "options": {kind: {name: found[name] for name in COUNTS} for kind, found in by_options.items()},
        "failures": failures,
        "kernels": {name: store.kernel_path(*kernel).name for name, kernel in kernels.items()},
    }


def table(report: dict[str, Any]) -> str:
    """A line per failure, then counts per kind of rearrangement and per options."""
    lines = [
        f"FAILED {one['text'] or one['options']}: {one['fault']}\n    {one['command']}"
        for one in report["failures"]
    ]
    lines.append(f"{'':24}" + "".join(f"{name:>13}" for name in COUNTS))
    for part in ("kinds", "options"):
        rows = report[part]
        lines += [f"{name:24}" + "".join(f"{row[n]:13}" for n in COUNTS) for name, row in rows.items()]
        total = {n: sum(row[n] for row in rows.values()) for n in COUNTS}
        if part == "kinds":
            lines.append(f"{'all':24}" + "".join(f"{total[n]:13}" for n in COUNTS))
    width = "-".join(map(str, report["head_dims"]))
    lines.append(
        f"{report['dtype']} d{width}, seed {report['seed']}: {report['draws']} of {report['asked']} draws, "
        f"{len(report['failures'])} failures, compared {report['compared']}; rows are queries x heads; "
        f"{report['gpu'] or 'no worker started'}, {report['seconds']:.0f} s"
        + (f", ended by {report['ended_by']}" if report["ended_by"] else "")
    )
    return "\n".join(lines)


def build(kernels: dict[str, Any], jobs: int) -> dict[str, str]:
    """Build missing kernels. Returns the errors by name."""
    found = building.build_all(
        list(kernels.values()), jobs or None, lambda line: print(line, file=sys.stderr)
    )
    return {manifest.kernel_name(*kernel): str(error) for kernel, error in found.items() if error}


def main(words: Sequence[str]) -> int:
    arguments = parser().parse_args(words)
    on_cpu = arguments.cpu
    if not on_cpu:
        import torch

        on_cpu = not torch.cuda.is_available()
    run = run_of(arguments, on_cpu and not (arguments.build or arguments.list or arguments.builder))
    if arguments.worker:
        from . import worker

        worker.main(run, "cpu" if on_cpu else "cuda")
        return 0
    options = option_sets(arguments, run)
    kernels_by_set = {
        one.name: {manifest.kernel_name(*kernel): kernel for kernel in kernels_of(run, [one])}
        for one in options
    }
    kernels = {name: kernel for found in kernels_by_set.values() for name, kernel in found.items()}
    if arguments.builder:  # names from stdin, errors to stdout, as the parent of the matrix asks
        os.nice(NICE)
        names = json.load(sys.stdin)
        print(json.dumps(build({name: kernels[name] for name in names}, arguments.processes)))
        return 0
    if arguments.list or arguments.build:
        if arguments.list:
            print(*sorted(kernels), sep="\n")
        print(f"{len(kernels)} kernels of {run.name}, {', '.join(kernels_by_set)}", flush=True)
        errors = build(kernels, arguments.processes) if arguments.build else {}
        print(*(f"{name}: {error}" for name, error in errors.items()), sep="\n", end="")
        return int(bool(errors))
    shares = [
        ShareClass(run, share, {} if on_cpu else kernels_by_set.get(share.options, {}))
        for share in shares_of(arguments, options)
    ]
    how = [*run.words, "--options", ",".join(kernels_by_set)]
    program = sys.executable, str(FOLDER), *how
    settings = Settings(
        seed=run.seed,
        jobs=arguments.processes or default_jobs(),
        time_limit=arguments.time_limit,
        hang_limit=arguments.hang_limit,
        worker=(*program, "--worker", *(["--cpu"] if on_cpu else [])),
        builder=(*program, "--builder"),
    )
    begin = time.monotonic()
    results = run_in_workers(shares, settings, lambda line: print(line, flush=True))
    results.seconds = time.monotonic() - begin
    report = report_of(run, shares, results, on_cpu)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report), flush=True)
    return int(bool(report["failures"]) or report["draws"] < report["asked"])
