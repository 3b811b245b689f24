"""Measured times of a problem, from benchmarks/results of a checkout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tl_attention import configs
from tl_attention.problem import DTYPES
from tl_attention.target import gpu_slug
from tl_attention.testing.shapes import Shape

OURS = "tl_attention"
FP32_ROWS = {OURS: "fp32-highest", "high": "fp32-high"}  # our rows in files of fp32 -> their dtype


@dataclass(frozen=True)
class Measurement:
    """Our time of a problem in a file of results."""

    shape: Shape
    name: str
    ms: float
    path: Path
    commit: str
    direction: str
    dtype: str
    warm: bool  # its inputs were in L2


def results_dir() -> Path | None:
    """benchmarks/results of a checkout; None in an installed wheel, which has no results."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    return folder if folder.is_dir() and not configs.installed() else None


def read(path: Path) -> Iterator[Measurement]:
    """Our measurements in a file: its first line has what all share, each other line is a problem, maybe of another commit."""
    header, *lines = map(json.loads, path.read_text().splitlines())
    dtypes = FP32_ROWS if header["dtype"] == "fp32" else {OURS: header["dtype"]}
    for line in lines:
        for name, dtype in dtypes.items():
            if ms := line["rows"].get(name, {}).get("ms"):
                yield Measurement(
                    Shape.parse(line["problem"]),
                    line["shape"],
                    ms,
                    path,
                    line.get("commit", header["commit"]),
                    header["pass"],
                    dtype,
                    line.get("l2") == "warm",
                )


def find(shape: Shape, direction: str, dtype: str, gpu_name: str) -> list[Measurement]:
    """Measurements of a problem on a GPU."""
    folder = results_dir()
    paths = sorted((folder / gpu_slug(gpu_name)).glob("*.jsonl")) if folder else []
    asked = shape, direction, DTYPES[dtype].short
    return [
        found
        for path in paths
        for found in read(path)
        if (found.shape, found.direction, found.dtype) == asked
    ]
