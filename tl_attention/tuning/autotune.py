"""Search the grid of configs on this GPU, on request only. Writes configs.tuned_path, or another table.

Candidates are compiled in parallel, checked against the reference, then timed in turns, all in subprocesses: a candidate that
crashes or hangs costs only itself. Candidates with spills or ptxas warnings are not timed.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from tl_attention.compilation import building, cubin
from tl_attention.compilation.sandbox import GRACE, Failure, OutOfTime, Sandboxes, time_left
from tl_attention.config import configs
from tl_attention.config.kernel_configs import KernelConfig
from tl_attention.problem.arguments import has_words
from tl_attention.problem.attn_problem import DEFAULT_DTYPE, DIRECTIONS, AttnProblem
from tl_attention.testing.shapes import Shape
from tl_attention.tuning.progress import track
from tl_attention.tuning.results import Attempt, Kernel, append_log, attempt_table, save_winner
from tl_attention.tuning.steps import Row, Steps, check_shapes, compile_kernel, group_shapes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

# Limits in seconds, less if less of the budget is left
COMPILE_LIMIT = 300.0  # seconds per kernel
COMPILE_FLOOR = 60.0  # least time per row to compile, as a build that is cut off is wasted
TIME_LIMIT = 300.0  # for all candidates of a row together
MIN_SHARE = 20.0  # least share of the budget per row, so that a short budget serves the first rows well
ROUNDS, FINAL_ROUNDS = 5, 15


def compile_all(
    kernels: Iterable[Kernel], jobs: int | None = None, limit: float = COMPILE_LIMIT
) -> Iterator[tuple[AttnProblem, KernelConfig, cubin.Report | Failure]]:
    """Compile kernels into the disk cache, by default one per CPU at a time. Yields each result as it comes.

    Args:
        limit: seconds per kernel, after which its result is a Failure.
    """
    with Sandboxes(jobs, building.prepare_to_build) as sandboxes:
        for kernel, result in sandboxes.map(compile_kernel, kernels, limit):
            yield *kernel, result


def check_writable(*paths: Path) -> None:
    """Raise OSError if one of the files cannot be created."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def tune(
    shapes: Sequence[Shape] | None,
    budget_s: float,
    *,
    directions: Sequence[str] = DIRECTIONS,
    dtypes: Sequence[str] = (DEFAULT_DTYPE,),
    only: Sequence[str] = (),
    gpu_name: str | None = None,
    path: Path | None = None,
    log: Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
    steps: Steps | None = None,
) -> dict[str, list[Attempt]]:
    """Find the fastest config for the shapes of each row of the tuned table, and write the rows.

    Args:
        shapes: a row's score is the geometric mean over its shapes; default: the tuning set of each direction.
        budget_s: seconds, shared evenly among rows. A row whose share ends before it has a winner is tried once more after the
            others, when its kernels are compiled. Rows that are not reached are named and left unchanged. A hang at the end is
            ended a few times sandbox.GRACE later.
        only: tune the rows whose direction and key contain all these words.
        gpu_name: name in torch; default: the current device.
        path: the table to improve, whose rows are the incumbents; default: configs.tuned_path, with the configs that calls get
            today as incumbents. Each row is written as soon as it is known.
        log: JSONL, one line per candidate: compiler report, speed, reason of a loss.
        jobs: kernels compiled at a time; default: one per CPU of this process.
        steps: replacements for compiling, checking and timing.
    Returns:
        The attempts by direction and tuning key, for the rows that were reached. Ctrl-C returns the finished rows.
    Raises:
        OSError: the table or the log cannot be written; raised before anything is compiled.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    steps, console = steps or Steps(), console or Console()
    gpu_name = gpu_name or torch.cuda.get_device_name()
    tables = [path] if path else configs.tuned_paths(gpu_name)
    path = path or configs.tuned_path(gpu_name)
    check_writable(path, *([log] if log else []))
    groups = {
        row: members
        for row, members in group_shapes(shapes, dtypes, directions).items()
        if has_words(row, only)
    }
    deadline = time.monotonic() + budget_s
    results: dict[str, list[Attempt]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console) as progress,
        Sandboxes(jobs, steps.prepare_to_compile) as builders,
        Sandboxes(1, steps.prepare_to_run) as runner,
        contextlib.suppress(KeyboardInterrupt),
    ):
        search = Search(steps, builders, runner, progress, tables)
        queue, repeated = deque(groups), set()
        while queue:
            left = deadline - time.monotonic()
            if left <= 0 or (results and left < GRACE):
                break
            until = time.monotonic() + min(max(left / len(queue), MIN_SHARE), left)
            row = queue.popleft()
            members = groups[row]
            attempts = results[str(row)] = search.run(row, members, until)
            if attempts[0].fate == "winner":
                save_winner(path, gpu_name, row, attempts[0], members)
            elif row not in repeated and any(attempt.out_of_time for attempt in attempts):
                repeated.add(row)
                queue.append(row)
            if log:
                append_log(log, gpu_name, row, attempts, members)
            console.print(attempt_table(row, attempts))
    if missed := [str(row) for row in groups if str(row) not in results]:
        console.print(f"not reached, left as they were: {', '.join(missed)}")
    return results


@dataclass
class Search:
    """The search, one row of the table at a time. A kernel that several rows try is compiled once."""

    steps: Steps
    builders: Sandboxes
    runner: Sandboxes
    progress: Progress
    tables: Sequence[Path]
    built: dict[Kernel, cubin.Report | Failure] = field(default_factory=dict)

    def run(self, row: Row, shapes: Sequence[Shape], deadline: float) -> list[Attempt]:
        """The attempts of a row, the winner first. The incumbent is tried first."""
        incumbent = configs.config_of_tables(row.problem, row.bucket, self.tables, row.direction)
        candidates = configs.candidates(row.problem, row.bucket, row.direction)
        attempts = [Attempt(config) for config in dict.fromkeys([incumbent, *candidates])]
        begin = time.monotonic()
        quarter = 0.25 * (deadline - begin)
        built = self._compile(row, attempts, begin + 2 * quarter, begin + 3 * quarter)
        # Checks have a quarter even if the last compilations took long
        begin_by = max(begin + 3 * quarter, time.monotonic() + quarter)
        correct = self._check(row, built, shapes, begin_by, deadline)
        timed = self._time(row, correct, shapes, ROUNDS, deadline)
        if not attempts[0].tflops and attempts[0].out_of_time:
            for attempt in timed:
                attempt.lose("not reached", f"no winner: the incumbent {incumbent} was not timed")
            timed = []
        if len(timed) == 1 and any(attempt.out_of_time for attempt in attempts if attempt is not timed[0]):
            timed.pop().lose("not reached", "no winner: the only candidate timed, as others were not reached")
        ranked, finalists = sorted(timed, key=Attempt.score.fget, reverse=True), []
        while ranked and not finalists:
            finalists = self._time(row, ranked[:2], shapes, FINAL_ROUNDS, deadline, "final_tflops")
            ranked = ranked[2:] if time.monotonic() < deadline else []
        best = max(finalists, key=Attempt.final_score.fget, default=None)
        for attempt in (attempt for attempt in timed if best and attempt.tflops):
            attempt.fate = "winner" if attempt is best else "slower"
            attempt.why = f"{attempt.score / best.score:.3f} of the winner"
            if attempt.final_tflops:
                attempt.why += f", second timing {attempt.final_score / best.final_score:.3f}"
        return sorted(attempts, key=lambda attempt: (attempt.fate != "winner", -attempt.score))

    def _compile(self, row: Row, attempts: list[Attempt], begin_by: float, end_by: float) -> list[Attempt]:
        """Compile the attempts; return those whose kernels may all ship."""
        kernels = [attempt.config.kernels(row.problem) for attempt in attempts]
        new = [kernel for kernel in dict.fromkeys(itertools.chain(*kernels)) if kernel not in self.built]
        end_by = max(end_by, time.monotonic() + COMPILE_FLOOR)
        results = self.builders.map(self.steps.compile, new, COMPILE_LIMIT, begin_by, end_by)
        found = self.built | dict(self._tracked(f"{row}: compile", len(new), results))
        # The next row may have time for a build that was cut off here
        self.built = {kernel: result for kernel, result in found.items() if not isinstance(result, OutOfTime)}
        for attempt, needed in zip(attempts, kernels, strict=True):
            attempt.add_reports({kernel: found[kernel] for kernel in needed if kernel in found})
        return [
            attempt
            for attempt, needed in zip(attempts, kernels, strict=True)
            if attempt.fate == "not reached" and len(attempt.reports) == len(needed)
        ]

    def _check(
        self, row: Row, attempts: list[Attempt], shapes: Sequence[Shape], begin_by: float, end_by: float
    ) -> list[Attempt]:
        """Check the attempts; return the correct ones."""
        by_config, correct = {attempt.config: attempt for attempt in attempts}, []
        calls = [(row, config, check_shapes(shapes)) for config in by_config]
        errors = self.runner.map(self.steps.check, calls, self.steps.check_limit_s, begin_by, end_by)
        for (_, config, _), error in self._tracked(f"{row}: check", len(calls), errors):
            if isinstance(error, Failure):
                by_config[config].lose("failed", f"check: {error}")
            elif error:
                by_config[config].lose("wrong", error)
            else:
                correct.append(by_config[config])
        return correct

    def _time(
        self,
        row: Row,
        attempts: list[Attempt],
        shapes: Sequence[Shape],
        rounds: int,
        end_by: float,
        into: str = "tflops",
    ) -> list[Attempt]:
        """Time the attempts in one run; if that fails, one by one, to find the failing one. Return those that were timed."""
        if not attempts:
            return []
        try:
            candidates = [attempt.config for attempt in attempts]
            limit_s = time_left(TIME_LIMIT, end_by)
            tflops = self.runner.call(self.steps.time, row, candidates, shapes, rounds, limit_s=limit_s)
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
        if not self.progress.console.is_terminal:
            yield from track(results, total, description, self.progress.console)
            return
        task = self.progress.add_task(description, total=total)
        for result in results:
            self.progress.advance(task)
            yield result
        self.progress.remove_task(task)
