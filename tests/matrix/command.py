"""Command of the matrix: `python -m tests.matrix --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tl_attention.compilation import building, manifest

from . import report
from .classes import CallClass, pack_classes, shipped_classes
from .draws import DRAWS, draws
from .parent import FAILED, NOT_RUN, PASSED, Results, Settings, run

NICE = 10  # of builders, so that workers have CPUs
MOST_LISTED = 40  # failing classes in the table


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("python -m tests.matrix", description=__doc__)
    found.add_argument(
        "words", nargs="*", help="run classes whose name, or a kernel's name, has all these words"
    )
    found.add_argument(
        "--all", action="store_true", help="the kernels of a whole pack, not those of the manifest"
    )
    found.add_argument("--parts", default="1/1", help="i/n: the i-th of n parts of the classes")
    found.add_argument("--few", type=int, default=0, help="at most so many classes of each kind")
    found.add_argument(
        "--class", dest="ids", action="append", default=[], help="id of a class, as failures name it"
    )
    found.add_argument("--draw", type=int, action="append", help="number of a draw; default: all")
    found.add_argument("--draws", type=int, default=DRAWS, help="the first so many draws")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument(
        "--jobs", type=int, default=0, help="workers per GPU; default: half of the CPUs, at most 8"
    )
    found.add_argument("--build-jobs", type=int, default=0, help="processes that build; default: one per CPU")
    found.add_argument("--gpus", default="", help="0,1: GPUs among which workers are spread")
    found.add_argument("--time-limit", type=float, default=1e9, help="seconds after which no class begins")
    found.add_argument("--hang-limit", type=float, default=20.0, help="seconds after which a launch hangs")
    found.add_argument("--out", type=Path, help="file for the results of this run, which --merge reads")
    found.add_argument(
        "--report", type=Path, nargs="?", const=report.PATH, help="report to merge the results into"
    )
    found.add_argument(
        "--merge", type=Path, nargs="+", help="merge files of --out into the report, and run nothing"
    )
    found.add_argument("--list", action="store_true", help="list the chosen classes and run nothing")
    found.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("--build", type=int, nargs="?", const=0, help=argparse.SUPPRESS)
    return found


def chosen(arguments: argparse.Namespace) -> list[CallClass]:
    """The classes that the arguments choose, in an order in which every kind comes early."""
    classes = pack_classes() if arguments.all or arguments.ids else shipped_classes()
    classes = [one for one in classes if one.matches(arguments.words)]
    if arguments.ids:
        classes = [one for one in classes if one.id in arguments.ids]
    classes = kinds_in_turn(classes, arguments.few)
    part, parts = (int(n) for n in arguments.parts.split("/"))
    return classes[part - 1 :: parts]


def kind_of(one: CallClass) -> tuple:
    """Kind of a class: classes of one kind run much of the same code."""
    passes = getattr(one.config, "passes", (one.config,))
    schedules = *(getattr(x, "schedule", "") for x in passes), *(getattr(x, "order", "") for x in passes)
    problem, config = one.problem, passes[0]
    flags = [
        bool(getattr(config, name, False))
        for name in ("split", "hold_max", "one_tile", "term_stages", "page_rows", "max_logits")
    ]
    options = problem.has("varlen"), bool(set(problem.options) - {"varlen"}), problem.program is not None
    return one.part, problem.causal, *options, *schedules, *flags, getattr(config, "rounds_dq", False)


def kinds_in_turn(classes: Sequence[CallClass], most: int = 0) -> list[CallClass]:
    """The first class of each kind, then the second ones, and so on; at most `most` of a kind, unless it is 0."""
    seen: Counter[tuple] = Counter()
    ranked = []
    for one in classes:
        kind = kind_of(one)
        if not most or seen[kind] < most:
            ranked.append((seen[kind], one))
        seen[kind] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def settings_of(arguments: argparse.Namespace) -> Settings:
    draws_of = arguments.draw
    if draws_of is None and arguments.draws < DRAWS:
        draws_of = range(arguments.draws)
    return Settings(
        seed=arguments.seed,
        draws=None if draws_of is None else tuple(draws_of),
        jobs=arguments.jobs or default_jobs(),
        gpus=tuple(arguments.gpus.split(",")),
        time_limit=arguments.time_limit,
        hang_limit=arguments.hang_limit,
        build_jobs=arguments.build_jobs or None,
    )


def default_jobs() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def table(results: Results, classes: Sequence[CallClass], seed: int = 0) -> str:
    """Short table of a run: states of classes per part, then each class that failed, with the command that repeats its first draw."""
    by_part: dict[str, Counter[str]] = {}
    for one in classes:
        result = results.classes[one.name]
        counts = by_part.setdefault(one.part, Counter())
        counts[result.state] += 1
        counts["draws"] += result.draws
        counts["ms"] += round(1000 * result.seconds)
    head = ("part", PASSED, FAILED, NOT_RUN, "draws", "s")
    lines = [f"{head[0]:14}" + "".join(f"{word:>9}" for word in head[1:])]
    total: Counter[str] = Counter()
    for part, counts in [*sorted(by_part.items()), ("all", total)]:
        numbers = [counts[word] for word in (PASSED, FAILED, NOT_RUN, "draws")]
        lines.append(f"{part:14}" + "".join(f"{n:9}" for n in numbers) + f"{counts['ms'] / 1000:9.1f}")
        total.update(counts)
    failing = [one for one in classes if results.classes[one.name].state == FAILED]
    for one in failing[:MOST_LISTED]:
        failures = results.classes[one.name].failures
        draw, text, fault = failures[0]
        again = f"python -m tests.matrix --class {one.id} --seed {seed}" + (
            f" --draw {draw}" if draw >= 0 else ""
        )
        lines.append(f"FAILED {one.name}, {len(failures)} draws, first {text}:\n    {fault}\n    {again}")
    if len(failing) > MOST_LISTED:
        lines.append(f"and {len(failing) - MOST_LISTED} more failed")
    lines.append(
        f"{results.gpu}: {results.seconds:.0f} s"
        + (f", ended by {results.why_ended}" if results.why_ended else "")
    )
    return "\n".join(lines)


def build(jobs: int) -> None:
    """Build the kernels whose names stdin has; write the errors by name."""
    os.nice(NICE)
    kernels = {name: kernel for one in pack_classes() for name, kernel in one.kernels.items()}
    names = json.load(sys.stdin)
    found = building.build_all([kernels[name] for name in names], jobs or None)
    errors = {manifest.kernel_name(*kernel): str(error) for kernel, error in found.items() if error}
    print(json.dumps(errors))


def _merge(path: Path, runs: Sequence[dict], classes: Sequence[CallClass]) -> None:
    passed, gone = report.merge(path, runs, classes)
    others = len(report.changed(runs, classes))
    print(
        f"{path}: {passed} kernels passed, {gone} that failed were taken out, {others} have changed since they ran"
    )


def main(words: Sequence[str]) -> int:
    arguments = parser().parse_args(words)
    if arguments.worker:
        from . import worker

        worker.main()
        return 0
    if arguments.build is not None:
        build(arguments.build)
        return 0
    if arguments.merge:
        runs = [json.loads(path.read_text()) for path in arguments.merge]
        _merge(arguments.report or report.PATH, runs, pack_classes())
        return 0
    classes = chosen(arguments)
    if arguments.list:
        for one in classes:
            print(one.id, one.name)
            for draw in draws(one, arguments.seed) if arguments.draw else ():
                print(*([f"    {draw}"] if draw.index in arguments.draw else []), sep="\n", end="\n")
        print(len(classes), "classes,", len({name for one in classes for name in one.kernels}), "kernels")
        return 0
    results = run(classes, settings_of(arguments), lambda line: print(line, flush=True))
    found = report.raw(results, classes)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=0))
    print(table(results, classes, arguments.seed), flush=True)
    kernels = {name for one in classes for name in one.kernels}
    print(f"{len(report.passed([found], classes))} of {len(kernels)} kernels passed", flush=True)
    if arguments.report:
        _merge(arguments.report, [found], classes)
    return int(any(result.state == FAILED for result in results.classes.values()))
