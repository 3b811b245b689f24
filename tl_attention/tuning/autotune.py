"""Search the grid of configs on this GPU. Runs only when asked; writes configs.tuned_path, or a table it is told.

Candidates are compiled in parallel, checked against the reference, then timed against each other, all in
subprocesses: one that crashes or hangs costs only itself. One with a kernel with spills or ptxas warnings is not timed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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
from tl_attention.kernel_configs import Config, KernelConfig
from tl_attention.problem import DIRECTIONS, AttnProblem, buckets, length_bucket, tile_widths, tuning_key
from tl_attention.reference import attention_reference
from tl_attention.target import H200_SMS, TARGET, sm_count
from tl_attention.testing import counts, environment, timer
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import check_bwd, check_fwd
from tl_attention.testing.shapes import Shape
from tl_attention.tuning.sandbox import GRACE, Failure, OutOfTime, Sandboxes, time_left

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

T = TypeVar("T")

# Seconds; less where less of the budget is left
COMPILE_LIMIT = 300.0  # for one kernel
COMPILE_FLOOR = 60.0  # that it has at least: to cut one off wastes what it took
CHECK_LIMIT = 30.0  # for one candidate; a hang costs as much
TIME_LIMIT = 300.0  # for the candidates of a row together
MIN_SHARE = 20.0  # of the budget for one row, so that a short budget serves the first ones well
ROUNDS, FINAL_ROUNDS = 5, 15

Kernel = tuple[AttnProblem, KernelConfig]


@dataclass(frozen=True)
class Row:
    """What one row of a tuned table serves."""

    direction: str  # one of DIRECTIONS
    problem: AttnProblem
    bucket: str

    @property
    def key(self) -> str:
        """Of the row in its section."""
        return tuning_key(self.problem, self.bucket)

    def __str__(self) -> str:
        """bwd bf16 d128 causal 4k"""
        return f"{self.direction} {self.key}"


def prepare_to_compile() -> None:
    logging.disable(logging.WARNING)  # what TileLang says of each kernel would go through the progress bar


def prepare_to_run() -> None:
    torch.zeros(1, device="cuda")


def compile_kernel(problem: AttnProblem, config: KernelConfig) -> cubin.Report:
    """Put the kernel into the disk cache and report on it."""
    from tl_attention import compiler

    compiler.compile_kernel(problem, config)
    return cubin.report_compiled(problem, config)


def check_candidate(row: Row, config: Config, shapes: Sequence[Shape]) -> str | None:
    """What is wrong with the results, None if nothing is; torch makes them NaN before the kernels run."""
    for shape in shapes:
        inputs = _make_inputs(row, shape, seed=time.time_ns() % 2**32)
        torch.use_deterministic_algorithms(True)
        try:
            results = _run(row, inputs, shape, config)
        finally:
            torch.use_deterministic_algorithms(False)
        options = {"softmax_scale": shape.head_dim**-0.5, "causal": shape.causal, "lse_base2": False}
        if row.direction == "fwd":
            verdict = check_fwd(*results, *inputs, **options)
        else:
            dout, q, k, v, _, _ = inputs
            verdict = check_bwd(results, dout, q, k, v, **options)
        if not verdict.ok:
            return f"{shape}: {verdict.text}"
    return None


def time_candidates(
    row: Row, candidates: Sequence[Config], shapes: Sequence[Shape], rounds: int
) -> dict[Config, tuple[float, ...]]:
    """TFLOPS of each candidate on each shape, of all its kernels together."""
    tflops = {config: () for config in candidates}
    for shape in shapes:
        copies = timer.rotation(counts.input_bytes(shape))
        inputs = [_make_inputs(row, shape, seed) for seed in range(copies)]
        calls = {
            config: [functools.partial(_run, row, tensors, shape, config) for tensors in inputs]
            for config in candidates
        }
        for config, timing in timer.time_interleaved(calls, rounds).items():
            tflops[config] += (counts.flops(shape, row.direction) / timing.median_ms / 1e9,)
    return tflops


def _make_inputs(row: Row, shape: Shape, seed: int) -> tuple[torch.Tensor, ...]:
    """(q, k, v), of a backward (dout, q, k, v, out, lse), as views [batch, seqlen, heads, columns].

    out and lse by the reference, as a forward kernel might have to be compiled first.
    """
    dtype = getattr(torch, row.problem.dtype)
    q, k, v = make_inputs(shape, dtype, seed=seed)
    if row.direction == "fwd":
        return q, k, v
    out, lse = attention_reference(q, k, v, shape.head_dim**-0.5, shape.causal)
    return make_dout(shape, dtype, "bshd", seed, q.device), q, k, v, out.to(dtype), lse


def _run(row: Row, inputs: tuple[torch.Tensor, ...], shape: Shape, config: Config) -> tuple:
    from tl_attention import launch

    arguments = (*inputs, shape.head_dim**-0.5, shape.causal)
    if row.direction == "fwd":
        return launch.forward(*arguments, lse_base2=False, config=config)
    deterministic = row.direction == "bwd_det"
    return launch.backward(*arguments, lse_base2=False, deterministic=deterministic, config=config)


@dataclass(frozen=True)
class Trial:
    """The steps of a candidate's way, as functions a subprocess can import; the first compiles one of its kernels."""

    prepare_to_compile: Callable[[], None] = prepare_to_compile
    prepare_to_run: Callable[[], None] = prepare_to_run
    compile: Callable[[AttnProblem, KernelConfig], cubin.Report] = compile_kernel
    check: Callable[[Row, Config, Sequence[Shape]], str | None] = check_candidate
    time: Callable[..., dict[Config, tuple[float, ...]]] = time_candidates
    check_limit_s: float = CHECK_LIMIT


@dataclass
class Attempt:
    """What became of a candidate; fate is winner, slower, faulty, wrong, failed or not reached."""

    config: Config
    fate: str = "not reached"
    why: str = ""
    reports: dict[str, cubin.Report] = field(default_factory=dict)  # by kernel, in words
    cut_off: bool = False  # whether a compilation ran out of time
    tflops: tuple[float, ...] = ()  # on each shape of the row, timed together with all others
    again: tuple[float, ...] = ()  # the best two are timed once more, at clocks of their own

    @property
    def score(self) -> float:
        """Geometric mean of the TFLOPS; 0 if it was not timed."""
        return statistics.geometric_mean(self.tflops) if self.tflops else 0.0

    @property
    def score_again(self) -> float:
        return statistics.geometric_mean(self.again) if self.again else 0.0

    def take(self, results: dict[Kernel, cubin.Report | Failure]) -> None:
        """What became of its kernels, as far as they were reached."""
        self.cut_off = any(isinstance(result, OutOfTime) for result in results.values())
        failed, faulty = [], []
        for (problem, config), result in results.items():
            name = f"{problem} {config}"
            if isinstance(result, Failure):
                failed.append(f"{name}: compile: {result}")
                continue
            self.reports[name] = result
            if result.fault:
                faulty.append(f"{name}: {result.fault}")
        if failed or faulty:
            self.lose("failed" if failed else "faulty", "; ".join(failed + faulty))

    def lose(self, fate: str, why: str) -> None:
        self.fate, self.why, self.tflops, self.again = fate, why, (), ()


def default_shapes(direction: str = "fwd") -> list[Shape]:
    """The tuning set: some lengths for every tile width of a direction, mask and length bucket."""
    return [
        Shape(batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, *widths, causal)
        for widths in tile_widths(direction)
        for causal in (False, True)
        for bucket in buckets(direction)
        for batch, group, seqlen_q, seqlen_k in configs.tuning_shapes(bucket)
        for heads_kv in [max(8, 2048 // widths[0])]
    ]


def group_shapes(
    shapes: Sequence[Shape] | None, dtypes: Iterable[str], directions: Iterable[str] = DIRECTIONS
) -> dict[Row, list[Shape]]:
    """Shapes, or else the tuning set, by the row of the tuned table that serves them."""
    groups: dict[Row, list[Shape]] = {}
    for direction, dtype in itertools.product(directions, dtypes):
        for shape in shapes or default_shapes(direction):
            row = Row(direction, shape.problem(dtype, direction), shape_bucket(shape, direction))
            groups.setdefault(row, []).append(shape)
    return groups


def shape_bucket(shape: Shape, direction: str) -> str:
    """Which row of a class serves a shape on this GPU, or an H200 where there is none."""
    from tl_attention import launch

    if direction != "fwd":
        return length_bucket(shape.seqlen_k)
    sms = sm_count(torch.cuda.current_device()) if torch.cuda.is_available() else H200_SMS
    return launch.fwd_bucket(shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k, sms)


def check_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """What a candidate must get right: lengths no tile divides, and the cheapest shape it is timed on."""
    cheapest = min(shapes, key=counts.fwd_flops)
    small = replace(cheapest, batch=2, heads_q=4, heads_kv=2)
    odd = [replace(small, seqlen_q=q, seqlen_k=k) for q, k in ((333, 517), (517, 333), (1, 259))]
    return [*odd, cheapest]


def compile_all(
    kernels: Iterable[Kernel], jobs: int | None = None, trial: Trial | None = None
) -> Iterator[tuple[AttnProblem, KernelConfig, cubin.Report | Failure]]:
    """Compile kernels into the disk cache, as many at once as there are CPUs for it; yields each as it is done."""
    trial = trial or Trial()
    with Sandboxes(jobs, trial.prepare_to_compile) as sandboxes:
        for kernel, result in sandboxes.map(trial.compile, kernels, COMPILE_LIMIT):
            yield *kernel, result


def check_writable(*paths: Path) -> None:
    """Raises OSError if no file can be made in the place of a path."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def tune(
    shapes: Sequence[Shape] | None,
    budget_s: float,
    *,
    directions: Sequence[str] = DIRECTIONS,
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
        shapes: a row's score is the geometric mean over those it serves; default the tuning set of each direction.
        budget_s: seconds, shared evenly among rows; rows it does not reach are named and left as they were. What hangs at
            the end is cut off a few times sandbox.GRACE later.
        only: tune rows whose direction and key together have all these words.
        gpu_name: as torch gives it; default the current device.
        path: the table to improve, which says what serves now; default configs.tuned_path, and then what serves now is
            what a call would get. Each row is written as soon as it is known.
        log: JSONL, one line a candidate: what the compiler made of it, how fast it was, why it lost.
        jobs: kernels compiled at once, default as many as there are CPUs for this process.
        trial: what stands in for compiling, checking and timing.
    Returns:
        The attempts by direction and tuning key, of the rows that were reached. Ctrl-C returns what there is.
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
        row: members
        for row, members in group_shapes(shapes, dtypes, directions).items()
        if set(only) <= set(str(row).split())
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
        for done, (row, members) in enumerate(groups.items()):
            left = deadline - time.monotonic()
            if left <= 0 or (done and left < GRACE):
                break
            until = time.monotonic() + min(max(left / (len(groups) - done), MIN_SHARE), left)
            attempts = results[str(row)] = search.run(row, members, until)
            if attempts[0].fate == "winner":
                save_winner(path, gpu_name, row, attempts[0], members)
            if log:
                append_log(log, gpu_name, row, attempts, members)
            console.print(attempt_table(row, attempts))
    if missed := [str(row) for row in groups if str(row) not in results]:
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
    built: dict[Kernel, cubin.Report | Failure] = field(default_factory=dict)

    def run(self, row: Row, shapes: Sequence[Shape], deadline: float) -> list[Attempt]:
        """The attempts of a row, the winner first. What serves it now is among them, and tried first."""
        incumbent = configs.config_of_tables(row.problem, row.bucket, self.tables, row.direction)
        candidates = configs.candidates(row.problem, row.bucket, row.direction)
        attempts = [Attempt(config) for config in dict.fromkeys([incumbent, *candidates])]
        begin = time.monotonic()
        quarter = 0.25 * (deadline - begin)
        built = self._compile(row, attempts, begin + 2 * quarter, begin + 3 * quarter)
        # Checks have a quarter even if the last compilations took long
        begin_by = max(begin + 3 * quarter, time.monotonic() + quarter)
        right = self._check(row, built, shapes, begin_by, deadline)
        timed = self._time(row, right, shapes, ROUNDS, deadline)
        if not attempts[0].tflops and (attempts[0].fate == "not reached" or attempts[0].cut_off):
            for attempt in timed:
                attempt.lose(
                    "not reached", f"no winner without {incumbent}, which serves now and was not timed"
                )
            timed = []
        if len(timed) == 1 and any(
            attempt is not timed[0] and (attempt.fate == "not reached" or attempt.cut_off)
            for attempt in attempts
        ):
            timed.pop().lose("not reached", "no winner of one alone, with others not reached")
        ranked, finalists = sorted(timed, key=Attempt.score.fget, reverse=True), []
        while ranked and not finalists:
            finalists = self._time(row, ranked[:2], shapes, FINAL_ROUNDS, deadline, "again")
            ranked = ranked[2:] if time.monotonic() < deadline else []
        best = max(finalists, key=Attempt.score_again.fget, default=None)
        for attempt in (attempt for attempt in timed if best and attempt.tflops):
            attempt.fate = "winner" if attempt is best else "slower"
            attempt.why = f"{attempt.score / best.score:.3f} of the winner"
            if attempt.again:
                attempt.why += f", timed again {attempt.score_again / best.score_again:.3f}"
        return sorted(attempts, key=lambda attempt: (attempt.fate != "winner", -attempt.score))

    def _compile(self, row: Row, attempts: list[Attempt], begin_by: float, end_by: float) -> list[Attempt]:
        """Those of which every kernel may ship."""
        kernels = [attempt.config.kernels(row.problem) for attempt in attempts]
        new = [kernel for kernel in dict.fromkeys(itertools.chain(*kernels)) if kernel not in self.built]
        end_by = max(end_by, time.monotonic() + COMPILE_FLOOR)
        results = self.builders.map(self.trial.compile, new, COMPILE_LIMIT, begin_by, end_by)
        found = self.built | dict(self._tracked(f"{row}: compile", len(new), results))
        # The next row may have time for one that this row cut off
        self.built = {kernel: result for kernel, result in found.items() if not isinstance(result, OutOfTime)}
        for attempt, needed in zip(attempts, kernels, strict=True):
            attempt.take({kernel: found[kernel] for kernel in needed if kernel in found})
        return [
            attempt
            for attempt, needed in zip(attempts, kernels, strict=True)
            if attempt.fate == "not reached" and len(attempt.reports) == len(needed)
        ]

    def _check(
        self, row: Row, attempts: list[Attempt], shapes: Sequence[Shape], begin_by: float, end_by: float
    ) -> list[Attempt]:
        """Those that are right."""
        by_config, right = {attempt.config: attempt for attempt in attempts}, []
        calls = [(row, config, check_shapes(shapes)) for config in by_config]
        verdicts = self.judge.map(self.trial.check, calls, self.trial.check_limit_s, begin_by, end_by)
        for (_, config, _), verdict in self._tracked(f"{row}: check", len(calls), verdicts):
            if isinstance(verdict, Failure):
                by_config[config].lose("failed", f"check: {verdict}")
            elif verdict:
                by_config[config].lose("wrong", verdict)
            else:
                right.append(by_config[config])
        return right

    def _time(
        self,
        row: Row,
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
            tflops = self.judge.call(self.trial.time, row, candidates, shapes, rounds, limit_s=limit_s)
        except Failure as failure:
            if len(attempts) > 1:
                return [
                    timed
                    for attempt in attempts
                    if time.monotonic() < end_by
                    for timed in self._time(row, [attempt], shapes, rounds, end_by, into)
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


def save_winner(path: Path, gpu_name: str, row: Row, winner: Attempt, shapes: Sequence[Shape]) -> None:
    """Put a row into the table, with the provenance of this run as the table's own; rows of no class of today go."""
    facts = environment.facts("tl-attention tune")
    date = datetime.now(timezone.utc).date().isoformat()
    provenance = {"gpu": gpu_name, "arch": TARGET["arch"]}
    provenance |= {name: facts[name] for name in ("tilelang", "torch", "cuda", "driver", "commit")} | {
        "date": date
    }
    measured = {
        "config": asdict(winner.config),
        "tflops": round(winner.score_again, 1),
        "shapes": {str(shape): round(tflops, 1) for shape, tflops in zip(shapes, winner.again, strict=True)},
        "commit": facts["commit"],
        "date": date,
    }
    table = configs.read_tuned(path)
    sections = {}
    for direction in DIRECTIONS:
        classes = itertools.product(configs.problems(direction), buckets(direction))
        keys = {tuning_key(problem, bucket) for problem, bucket in classes}
        sections[direction] = {key: kept for key, kept in table[direction].items() if key in keys}
    sections[row.direction][row.key] = measured
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(configs.format_tuned(provenance | sections))
    scratch.replace(path)


def append_log(
    path: Path, gpu_name: str, row: Row, attempts: Sequence[Attempt], shapes: Sequence[Shape]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {
        "direction": row.direction,
        "key": row.key,
        "gpu": gpu_name,
        "commit": environment.git_commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shapes": [str(shape) for shape in shapes],
    }
    with path.open("a") as file:
        for attempt in attempts:
            file.write(json.dumps(common | asdict(attempt)) + "\n")


def attempt_table(row: Row, attempts: Sequence[Attempt]) -> Table:
    from rich.table import Table

    columns = ("kernels", "TFLOPS", "fate", *REPORT_COLUMNS, "why")
    table = Table(*columns, title=str(row), title_justify="left", show_lines=row.direction != "fwd")
    for attempt in attempts:
        kernels = attempt.config.kernels(row.problem)
        reports = [attempt.reports.get(f"{problem} {config}") for problem, config in kernels]
        cells = ["\n".join(lines) for lines in zip(*map(report_cells, reports), strict=True)]
        names = "\n".join(str(config) for _, config in kernels)
        score = f"{attempt.score:.1f}" if attempt.tflops else ""
        why = attempt.why.strip().splitlines()[-1:]
        table.add_row(names, score, attempt.fate, *cells, *why)
    return table


REPORT_COLUMNS = ("regs", "spills", "smem", "CTAs/SM", "ptxas", "HGMMA", "TMA", "loops")


def report_cells(report: cubin.Report | None) -> list[str]:
    """The cells of REPORT_COLUMNS."""
    if report is None:
        return [""] * len(REPORT_COLUMNS)
    loops = "/".join(map(str, sorted(set(report.loops), reverse=True)))
    numbers = (report.registers, report.spill_bytes, report.smem_bytes, report.ctas_per_sm)
    return [*map(str, numbers), " ".join(report.warnings), str(report.hgmma), str(report.tma), loops]
