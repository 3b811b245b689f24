"""Results of the tuner: the attempts of a row, the table's new row, the log, and tables for the terminal."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from tl_attention.compilation import cubin, manifest
from tl_attention.compilation.sandbox import Failure, OutOfTime
from tl_attention.config import catalog, configs
from tl_attention.config.buckets import buckets
from tl_attention.config.kernel_configs import Config, KernelConfig
from tl_attention.problem.attn_problem import DIRECTIONS, AttnProblem, tuning_key
from tl_attention.problem.target import TARGET
from tl_attention.testing import environment
from tl_attention.testing.shapes import Shape
from tl_attention.tuning.steps import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Kernel = tuple[AttnProblem, KernelConfig]
REPORT_COLUMNS = ("regs", "spills", "smem", "CTAs/SM", "ptxas", "HGMMA", "TMA", "loops")


@dataclass
class Attempt:
    """A candidate of a row and its result. fate: winner, slower, faulty, wrong, failed or not reached."""

    config: Config
    fate: str = "not reached"
    why: str = ""
    reports: dict[str, cubin.Report] = field(default_factory=dict)  # by kernel name
    cut_off: bool = False  # a compilation ran out of time
    tflops: tuple[float, ...] = ()  # per shape of the row, timed in turns with all others
    final_tflops: tuple[float, ...] = ()  # the same of the best two, timed a second time without the others

    @property
    def score(self) -> float:
        """Geometric mean of tflops; 0 if not timed."""
        return statistics.geometric_mean(self.tflops) if self.tflops else 0.0

    @property
    def final_score(self) -> float:
        """Geometric mean of final_tflops; 0 if not timed."""
        return statistics.geometric_mean(self.final_tflops) if self.final_tflops else 0.0

    @property
    def out_of_time(self) -> bool:
        """True if it was not tried, or a compilation of it did not end in time."""
        return self.fate == "not reached" or self.cut_off

    def add_reports(self, results: dict[Kernel, cubin.Report | Failure]) -> None:
        """Record the compiled kernels, and lose if one failed or must not ship. manifest.KNOWN_SPILLS has spills that may ship."""
        self.cut_off = any(isinstance(result, OutOfTime) for result in results.values())
        failed, faulty = [], []
        for (problem, config), result in results.items():
            name = f"{problem} {config}"
            if isinstance(result, Failure):
                failed.append(f"{name}: compile: {result}")
                continue
            self.reports[name] = result
            known = manifest.KNOWN_SPILLS.get(manifest.kernel_name(problem, config))
            fault = replace(result, spill_bytes=0).fault if result.spill_bytes == known else result.fault
            if fault:
                faulty.append(f"{name}: {fault}")
        if failed or faulty:
            self.lose("failed" if failed else "faulty", "; ".join(failed + faulty))

    def lose(self, fate: str, why: str) -> None:
        self.fate, self.why, self.tflops, self.final_tflops = fate, why, (), ()


def save_winner(path: Path, gpu_name: str, row: Row, winner: Attempt, shapes: Sequence[Shape]) -> None:
    """Write a row into the table, with the provenance of this run. Rows of classes that no longer exist are dropped."""
    facts = environment.facts("tl-attention tune")
    date = datetime.now(timezone.utc).date().isoformat()
    provenance = {"gpu": gpu_name, "arch": TARGET["arch"]}
    provenance |= {name: facts[name] for name in ("tilelang", "torch", "cuda", "driver", "commit")} | {
        "date": date
    }
    measured = {
        "config": asdict(winner.config),
        "tflops": round(winner.final_score, 1),
        "shapes": {
            str(shape): round(tflops, 1) for shape, tflops in zip(shapes, winner.final_tflops, strict=True)
        },
        "commit": facts["commit"],
        "date": date,
    }
    table = configs.read_tuned(path)
    sections = {}
    for direction in DIRECTIONS:
        classes = itertools.product(catalog.problems(direction), buckets(direction))
        keys = {tuning_key(problem, bucket) for problem, bucket in classes}
        sections[direction] = {key: kept for key, kept in table[direction].items() if key in keys}
    sections[row.direction][row.key] = measured
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(configs.format_tuned(provenance | sections), encoding="utf-8")
    scratch.replace(path)


def append_log(
    path: Path, gpu_name: str, row: Row, attempts: Sequence[Attempt], shapes: Sequence[Shape]
) -> None:
    """Append one JSON line per attempt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {
        "direction": row.direction,
        "key": row.key,
        "gpu": gpu_name,
        "commit": environment.git_commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shapes": [str(shape) for shape in shapes],
    }
    with path.open("a", encoding="utf-8") as file:
        for attempt in attempts:
            file.write(json.dumps(common | asdict(attempt)) + "\n")


def attempt_table(row: Row, attempts: Sequence[Attempt]) -> Table:
    """The attempts of a row as a table for the terminal, a line per kernel."""
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


def print_reports(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of reports; two lines per kernel where the console is narrower than it.

    Args:
        columns: names; the first two are those of the problem and of the config, the last one that of the result.
        rows: cells in the order of the columns.
    """
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(escape, row))
    if Measurement.get(console, console.options.update(width=1 << 16), table).maximum <= console.width:
        console.print(table)
        return
    for problem, config, *cells, result in rows:
        console.print(f"{problem}, {config}: {result}", markup=False, highlight=False)
        found = [f"{name} {cell}" for name, cell in zip(columns[2:-1], cells, strict=True) if cell]
        if found:
            console.print(f"    {', '.join(found)}", markup=False, highlight=False)


def report_cells(report: cubin.Report | None) -> list[str]:
    """The cells of REPORT_COLUMNS; empty without a report."""
    if report is None:
        return [""] * len(REPORT_COLUMNS)
    loops = "/".join(map(str, sorted(set(report.loops), reverse=True)))
    numbers = (report.registers, report.spill_bytes, report.smem_bytes, report.ctas_per_sm)
    return [*map(str, numbers), " ".join(report.warnings), str(report.hgmma), str(report.tma), loops]
