"""Search the grid of configs on this GPU. Runs only when asked; writes configs.tuned_path, or a table it is told.

Candidates are compiled in parallel, checked against the reference, then timed against each other, all in
subprocesses: one that crashes or hangs costs only itself. One with spills or ptxas warnings is not timed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from tl_attention import configs, cubin
from tl_attention.problem import BUCKETS, TILE_WIDTHS, AttnProblem, FwdConfig, length_bucket, tuning_key
from tl_attention.sandbox import GRACE, Failure, OutOfTime, Sandboxes, time_left
from tl_attention.target import TARGET
from tl_attention.testing import bench
from tl_attention.testing.bench import Shape
from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.numeric import check_fwd

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

T = TypeVar("T")

# Seconds; less where less of the budget is left
COMPILE_LIMIT = 300.0  # for one candidate
CUT_OFF = "compile: no end"  # how the reason of a candidate begins whose compilation ran out of time
COMPILE_FLOOR = 60.0  # that it has at least: to cut one off wastes what it took
CHECK_LIMIT = 30.0  # for one candidate; a hang costs as much
TIME_LIMIT = 300.0  # for the candidates of a group together
MIN_SHARE = 20.0  # of the budget for one group, so that a short budget serves the first ones well
ROUNDS, FINAL_ROUNDS = 5, 15


def prepare_to_compile() -> None:
    logging.disable(logging.WARNING)  # what TileLang says of each kernel would go through the progress bar


def prepare_to_run() -> None:
    torch.zeros(1, device="cuda")


def compile_candidate(problem: AttnProblem, config: FwdConfig) -> cubin.Report:
    """Put the kernel into the disk cache and report on it."""
    from tl_attention import dispatch

    dispatch.compile_fwd(problem, config)
    return cubin.report_compiled(problem, config)


def check_candidate(problem: AttnProblem, config: FwdConfig, shapes: Sequence[Shape]) -> str | None:
    """What is wrong with the outputs, None if nothing is; torch makes them NaN before the kernel runs."""
    for shape in shapes:
        q, k, v = make_inputs(shape, getattr(torch, problem.dtype), seed=time.time_ns() % 2**32)
        scale = shape.head_dim**-0.5
        torch.use_deterministic_algorithms(True)
        try:
            out, lse = _attend(q, k, v, shape, config)
        finally:
            torch.use_deterministic_algorithms(False)
        verdict = check_fwd(out, lse, q, k, v, scale, shape.causal, lse_base2=False)
        if not verdict.ok:
            return f"{shape}: {verdict.text}"
    return None


def time_candidates(
    problem: AttnProblem, candidates: Sequence[FwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[FwdConfig, tuple[float, ...]]:
    """TFLOPS of each candidate on each shape."""
    tflops = {config: () for config in candidates}
    for shape in shapes:
        copies = bench.rotation(bench.input_bytes(shape))
        inputs = [make_inputs(shape, getattr(torch, problem.dtype), seed=seed) for seed in range(copies)]
        calls = {
            config: [functools.partial(_attend, *qkv, shape, config) for qkv in inputs]
            for config in candidates
        }
        for config, timing in bench.time_interleaved(calls, rounds).items():
            tflops[config] += (bench.fwd_flops(shape) / timing.median_ms / 1e9,)
    return tflops


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, config: FwdConfig) -> tuple:
    from tl_attention import dispatch

    return dispatch.fwd(q, k, v, shape.head_dim**-0.5, shape.causal, lse_base2=False, config=config)


@dataclass(frozen=True)
class Trial:
    """The steps of a candidate's way, as functions a subprocess can import."""

    prepare_to_compile: Callable[[], None] = prepare_to_compile
    prepare_to_run: Callable[[], None] = prepare_to_run
    compile: Callable[[AttnProblem, FwdConfig], cubin.Report] = compile_candidate
    check: Callable[[AttnProblem, FwdConfig, Sequence[Shape]], str | None] = check_candidate
    time: Callable[..., dict[FwdConfig, tuple[float, ...]]] = time_candidates
    check_limit_s: float = CHECK_LIMIT


@dataclass
class Attempt:
    """What became of a candidate; fate is winner, slower, faulty, wrong, failed or not reached."""

    config: FwdConfig
    fate: str = "not reached"
    why: str = ""
    report: cubin.Report | None = None
    tflops: tuple[float, ...] = ()  # on each shape of the group, timed together with all others
    again: tuple[float, ...] = ()  # the best two are timed once more, at clocks of their own

    @property
    def score(self) -> float:
        """Geometric mean of the TFLOPS; 0 if it was not timed."""
        return statistics.geometric_mean(self.tflops) if self.tflops else 0.0

    @property
    def score_again(self) -> float:
        return statistics.geometric_mean(self.again) if self.again else 0.0

    def lose(self, fate: str, why: str) -> None:
        self.fate, self.why, self.tflops, self.again = fate, why, (), ()


Group = tuple[AttnProblem, str]  # and its length bucket


def default_shapes() -> list[Shape]:
    """The tuning set: some lengths for every tile width, mask and length bucket."""
    return [
        Shape(batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, *widths, causal)
        for widths in TILE_WIDTHS
        for causal in (False, True)
        for bucket in BUCKETS
        for batch, group, seqlen_q, seqlen_k in configs.tuning_shapes(bucket)
        for heads_kv in [max(8, 2048 // widths[0])]
    ]


def group_shapes(shapes: Iterable[Shape], dtypes: Iterable[str]) -> dict[Group, list[Shape]]:
    """Shapes by what one row of the tuned table serves."""
    groups: dict[Group, list[Shape]] = {}
    shapes = list(shapes)
    for dtype in dtypes:
        for shape in shapes:
            problem = AttnProblem.of(dtype, shape.head_dim, shape.head_dim_v, shape.causal)
            groups.setdefault((problem, length_bucket(shape.seqlen_k)), []).append(shape)
    return groups


def check_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """What a candidate must get right: lengths no tile divides, and the cheapest shape it is timed on."""
    cheapest = min(shapes, key=bench.fwd_flops)
    small = replace(cheapest, batch=2, heads_q=4, heads_kv=2)
    odd = [replace(small, seqlen_q=q, seqlen_k=k) for q, k in ((333, 517), (517, 333), (1, 259))]
    return [*odd, cheapest]


def compile_all(
    pairs: Iterable[tuple[AttnProblem, FwdConfig]], jobs: int | None = None, trial: Trial | None = None
) -> Iterator[tuple[AttnProblem, FwdConfig, cubin.Report | Failure]]:
    """Compile kernels into the disk cache, as many at once as there are CPUs for it; yields each as it is done."""
    trial = trial or Trial()
    with Sandboxes(jobs, trial.prepare_to_compile) as sandboxes:
        for pair, result in sandboxes.map(trial.compile, pairs, COMPILE_LIMIT):
            yield *pair, result


def check_writable(*paths: Path) -> None:
    """Raises OSError if no file can be made in the place of a path."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def tune(
    shapes: Iterable[Shape],
    budget_s: float,
    *,
    dtypes: Sequence[str] = ("bfloat16",),
    only: Sequence[str] = (),
    gpu_name: str | None = None,
    path: Path | None = None,
    log: Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
    trial: Trial | None = None,
) -> dict[str, list[Attempt]]:
    """Find the fastest config for the shapes of each row of the tuned table, and write the rows.

    Args:
        shapes: a row's score is the geometric mean over those it serves.
        budget_s: seconds, shared evenly among rows; rows it does not reach are named and left as they were. What hangs at
            the end is cut off a few times sandbox.GRACE later.
        only: tune rows whose key has all these words.
        gpu_name: as torch gives it; default the current device.
        path: the table to improve, which says what serves now; default configs.tuned_path, and then what serves now is
            what a call would get. Each row is written as soon as it is known.
        log: JSONL, one line a candidate: what the compiler made of it, how fast it was, why it lost.
        jobs: kernels compiled at once, default as many as there are CPUs for this process.
        trial: what stands in for compiling, checking and timing.
    Returns:
        The attempts by tuning key, of the rows that were reached. Ctrl-C returns what there is.
    Raises:
        OSError: the table or the log cannot be written there; nothing was compiled yet.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    trial, console = trial or Trial(), console or Console()
    gpu_name = gpu_name or torch.cuda.get_device_name()
    tables = [path] if path else configs.tuned_paths(gpu_name)
    path = path or configs.tuned_path(gpu_name)
    check_writable(path, *([log] if log else []))
    groups = {
        group: members
        for group, members in group_shapes(shapes, dtypes).items()
        if set(only) <= set(tuning_key(*group).split())
    }
    deadline = time.monotonic() + budget_s
    results: dict[str, list[Attempt]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console) as progress,
        Sandboxes(jobs, trial.prepare_to_compile) as builders,
        Sandboxes(1, trial.prepare_to_run) as judge,
        contextlib.suppress(KeyboardInterrupt),
    ):
        search = Search(trial, builders, judge, progress, tables)
        for done, ((problem, bucket), members) in enumerate(groups.items()):
            left = deadline - time.monotonic()
            if left <= 0 or (done and left < GRACE):
                break
            until = time.monotonic() + min(max(left / (len(groups) - done), MIN_SHARE), left)
            key = tuning_key(problem, bucket)
            attempts = search.run(problem, bucket, members, until)
            results[key] = attempts
            if attempts[0].fate == "winner":
                save_winner(path, gpu_name, key, attempts[0], members)
            if log:
                append_log(log, gpu_name, key, attempts, members)
            console.print(attempt_table(key, attempts))
    if missed := [key for key in (tuning_key(*group) for group in groups) if key not in results]:
        console.print(f"not reached, left as they were: {', '.join(missed)}")
    return results


@dataclass
class Search:
    """The search for one row of the table at a time; kernels that several rows try are compiled once."""

    trial: Trial
    builders: Sandboxes
    judge: Sandboxes
    progress: Progress
    tables: Sequence[Path]
    built: dict[tuple[AttnProblem, FwdConfig], cubin.Report | Failure] = field(default_factory=dict)

    def run(
        self, problem: AttnProblem, bucket: str, shapes: Sequence[Shape], deadline: float
    ) -> list[Attempt]:
        """The attempts of a group, the winner first. What serves it now is among them, and tried first."""
        incumbent = configs.config_of_tables(problem, bucket, self.tables)[0]
        attempts = [Attempt(c) for c in dict.fromkeys([incumbent, *configs.candidates(problem, bucket)])]
        key, begin = tuning_key(problem, bucket), time.monotonic()
        quarter = 0.25 * (deadline - begin)
        built = self._compile(problem, key, attempts, begin + 2 * quarter, begin + 3 * quarter)
        # Checks have a quarter even if the last compilations took long
        begin_by = max(begin + 3 * quarter, time.monotonic() + quarter)
        right = self._check(problem, key, built, shapes, begin_by, deadline)
        timed = self._time(problem, right, shapes, ROUNDS, deadline)
        if not attempts[0].tflops and (
            attempts[0].fate == "not reached" or attempts[0].why.startswith(CUT_OFF)
        ):
            for attempt in timed:
                attempt.lose(
                    "not reached", f"no winner without {incumbent}, which serves now and was not timed"
                )
            timed = []
        ranked, finalists = sorted(timed, key=Attempt.score.fget, reverse=True), []
        while ranked and not finalists:
            finalists = self._time(problem, ranked[:2], shapes, FINAL_ROUNDS, deadline, "again")
            ranked = ranked[2:] if time.monotonic() < deadline else []
        best = max(finalists, key=Attempt.score_again.fget, default=None)
        for attempt in (attempt for attempt in timed if best and attempt.tflops):
            attempt.fate = "winner" if attempt is best else "slower"
            attempt.why = f"{attempt.score / best.score:.3f} of the winner"
            if attempt.again:
                attempt.why += f", timed again {attempt.score_again / best.score_again:.3f}"
        return sorted(attempts, key=lambda attempt: (attempt.fate != "winner", -attempt.score))

    def _compile(
        self, problem: AttnProblem, key: str, attempts: list[Attempt], begin_by: float, end_by: float
    ) -> list[Attempt]:
        """Those that may ship."""
        pairs = [(problem, attempt.config) for attempt in attempts]
        new = [pair for pair in pairs if pair not in self.built]
        end_by = max(end_by, time.monotonic() + COMPILE_FLOOR)
        results = self.builders.map(self.trial.compile, new, COMPILE_LIMIT, begin_by, end_by)
        found = dict(self._tracked(f"{key}: compile", len(new), results))
        # The next row may have time for one that this row cut off
        self.built |= {pair: result for pair, result in found.items() if not isinstance(result, OutOfTime)}
        for attempt, pair in zip(attempts, pairs, strict=True):
            result = self.built.get(pair) or found.get(pair)
            if isinstance(result, Failure):
                attempt.lose("failed", f"compile: {result}")
            elif result:
                attempt.report = result
                if result.fault:
                    attempt.lose("faulty", result.fault)
        return [attempt for attempt in attempts if attempt.report and attempt.fate == "not reached"]

    def _check(
        self,
        problem: AttnProblem,
        key: str,
        attempts: list[Attempt],
        shapes: Sequence[Shape],
        begin_by: float,
        end_by: float,
    ) -> list[Attempt]:
        """Those that are right."""
        by_config, right = {attempt.config: attempt for attempt in attempts}, []
        calls = [(problem, config, check_shapes(shapes)) for config in by_config]
        verdicts = self.judge.map(self.trial.check, calls, self.trial.check_limit_s, begin_by, end_by)
        for (_, config, _), verdict in self._tracked(f"{key}: check", len(calls), verdicts):
            if isinstance(verdict, Failure):
                by_config[config].lose("failed", f"check: {verdict}")
            elif verdict:
                by_config[config].lose("wrong", verdict)
            else:
                right.append(by_config[config])
        return right

    def _time(
        self,
        problem: AttnProblem,
        attempts: list[Attempt],
        shapes: Sequence[Shape],
        rounds: int,
        end_by: float,
        into: str = "tflops",
    ) -> list[Attempt]:
        """Those that were timed: all in one run, or if that fails one by one, to find whose fault it is."""
        if not attempts:
            return []
        try:
            candidates = [attempt.config for attempt in attempts]
            limit_s = time_left(TIME_LIMIT, end_by)
            tflops = self.judge.call(self.trial.time, problem, candidates, shapes, rounds, limit_s=limit_s)
        except Failure as failure:
            if len(attempts) > 1:
                return [
                    timed
                    for attempt in attempts
                    if time.monotonic() < end_by
                    for timed in self._time(problem, [attempt], shapes, rounds, end_by, into)
                ]
            attempts[0].lose("failed", f"timing: {failure}")
            return []
        for attempt in attempts:
            setattr(attempt, into, tflops[attempt.config])
        return attempts

    def _tracked(self, description: str, total: int, results: Iterator[T]) -> Iterator[T]:
        task = self.progress.add_task(description, total=total)
        for result in results:
            self.progress.advance(task)
            yield result
        self.progress.remove_task(task)


def save_winner(path: Path, gpu_name: str, key: str, winner: Attempt, shapes: Sequence[Shape]) -> None:
    """Put a row into the table, with the provenance of this run as the table's own; rows of no class of today go."""
    facts = bench.environment("tl-attention tune")
    date = datetime.now(timezone.utc).date().isoformat()
    provenance = {"gpu": gpu_name, "arch": TARGET["arch"]}
    provenance |= {name: facts[name] for name in ("tilelang", "torch", "cuda", "driver", "commit")} | {
        "date": date
    }
    row = {
        "config": asdict(winner.config),
        "tflops": round(winner.score_again, 1),
        "shapes": {str(shape): round(tflops, 1) for shape, tflops in zip(shapes, winner.again, strict=True)},
        "commit": facts["commit"],
        "date": date,
    }
    keys = {tuning_key(problem, bucket) for problem in configs.problems() for bucket in BUCKETS}
    rows = {name: row for name, row in configs.read_tuned(path)["fwd"].items() if name in keys} | {key: row}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(configs.format_tuned(provenance | {"fwd": rows}))
    scratch.replace(path)


def append_log(
    path: Path, gpu_name: str, key: str, attempts: Sequence[Attempt], shapes: Sequence[Shape]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {
        "key": key,
        "gpu": gpu_name,
        "commit": bench.git_commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shapes": [str(shape) for shape in shapes],
    }
    with path.open("a") as file:
        for attempt in attempts:
            file.write(json.dumps(common | asdict(attempt)) + "\n")


def attempt_table(key: str, attempts: Sequence[Attempt]) -> Table:
    from rich.table import Table

    table = Table("config", "TFLOPS", "fate", *REPORT_COLUMNS, "why", title=key, title_justify="left")
    for attempt in attempts:
        score = f"{attempt.score:.1f}" if attempt.tflops else ""
        why = attempt.why.strip().splitlines()[-1:]
        table.add_row(str(attempt.config), score, attempt.fate, *report_cells(attempt.report), *why)
    return table


REPORT_COLUMNS = ("regs", "spills", "smem", "CTAs/SM", "ptxas", "HGMMA", "TMA", "loops")


def report_cells(report: cubin.Report | None) -> list[str]:
    """The cells of REPORT_COLUMNS."""
    if report is None:
        return [""] * len(REPORT_COLUMNS)
    loops = "/".join(map(str, sorted(set(report.loops), reverse=True)))
    numbers = (report.registers, report.spill_bytes, report.smem_bytes, report.ctas_per_sm)
    return [*map(str, numbers), " ".join(report.warnings), str(report.hgmma), str(report.tma), loops]
