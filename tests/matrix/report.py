"""Report of the matrix: which kernel passed when, in report.json beside this file; one line per kernel."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

from tl_attention.compilation import manifest, store

from .classes import CallClass
from .parent import FAILED, PASSED, Results

PATH = Path(__file__).with_name("report.json")
LEAST_DRAWS = 3  # that launched a kernel, for a pass of it
Rows = dict[str, dict[str, Any]]

# Kernel name -> why it needs no pass
GRACE: dict[str, str] = {}


def read(path: Path = PATH) -> Rows:
    """Rows of a report by kernel name; none without a file."""
    return json.loads(path.read_text()) if path.exists() else {}


def formatted(rows: Rows) -> str:
    """JSON with one kernel per line, sorted."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
    return f"{{\n{lines}\n}}\n" if rows else "{}\n"


def raw(results: Results, classes: Iterable[CallClass]) -> dict[str, Any]:
    """Results of a run as JSON. Kernels have the names of their files, which say from which sources and compilers they are."""
    kernels = {name: kernel for one in classes for name, kernel in one.kernels.items()}
    return {
        "gpu": results.gpu,
        "date": date.today().isoformat(),
        "seconds": round(results.seconds, 1),
        "ended_by": results.why_ended,
        "files": {name: store.kernel_path(*kernel).name for name, kernel in kernels.items()},
        "classes": {
            name: {
                "state": result.state,
                "draws": result.draws,
                "failures": result.failures,
                "launches": result.launches,
                "seconds": round(result.seconds, 2),
            }
            for name, result in results.classes.items()
        },
    }


def changed(runs: Iterable[dict[str, Any]], classes: Iterable[CallClass]) -> set[str]:
    """Kernels whose sources or compilers are others than in one of the runs, by the names of their files."""
    kernels = {name: kernel for one in classes for name, kernel in one.kernels.items()}
    return {
        name
        for run in runs
        for name, file in run["files"].items()
        if name not in kernels or file != store.kernel_path(*kernels[name]).name
    }


def passed(runs: Iterable[dict[str, Any]], classes: Iterable[CallClass]) -> Rows:
    """Rows, without texts, of kernels that passed: no class of theirs failed, and LEAST_DRAWS draws or more launched them.

    A kernel that has changed since a run is left out.
    """
    runs, classes = list(runs), list(classes)
    by_name, others = {one.name: one for one in classes}, changed(runs, classes)
    draws: Counter[str] = Counter()
    failed, rows = set(), {}
    for run in runs:
        for name, result in run["classes"].items():
            one = by_name.get(name)
            if one is None:
                continue
            if result["state"] == FAILED:
                failed |= one.kernels.keys()
            if result["state"] != PASSED:
                continue
            for kernel, number in result["launches"].items():
                if kernel in one.kernels and kernel not in others:
                    draws[kernel] += number
                    rows[kernel] = {"date": run["date"], "gpu": run["gpu"]}
    return {
        name: {**row, "draws": draws[name]}
        for name, row in rows.items()
        if name not in failed and draws[name] >= LEAST_DRAWS
    }


def merge(
    path: Path,
    runs: Iterable[dict[str, Any]],
    classes: Iterable[CallClass],
    jobs: int | None = None,
    trace: Callable[..., dict[str, str]] = manifest.trace_all,
) -> tuple[int, int]:
    """Put the kernels that passed in runs into a report, with the hashes of their texts, and take out those that failed.

    Returns:
        Numbers of kernels that passed, and of those taken out.
    """
    classes, runs, rows = list(classes), list(runs), read(path)
    found = passed(runs, classes)
    kernels = {name: kernel for one in classes for name, kernel in one.kernels.items()}
    hashes = trace({name: kernels[name] for name in found}, jobs) if found else {}
    by_name = {one.name: one for one in classes}
    failed = {
        kernel
        for run in runs
        for name, result in run["classes"].items()
        if result["state"] == FAILED and name in by_name
        for kernel in by_name[name].kernels
    }
    gone = failed & rows.keys()
    rows = {name: row for name, row in rows.items() if name not in gone}
    rows |= {name: {"text": hashes[name], **row} for name, row in found.items()}
    path.write_text(formatted(rows))
    return len(found), len(gone)
