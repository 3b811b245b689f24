"""Measured times of a call, from benchmarks/results of a checkout, and the command that measures one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tl_attention.config import configs
from tl_attention.problem.attn_problem import DECODE, DTYPES, FP32_DTYPES
from tl_attention.problem.target import gpu_slug
from tl_attention.testing.shapes import Shape

OURS = "tl_attention"
FP32_ROWS = {OURS: "fp32-highest", "high": "fp32-high"}  # our rows in files of fp32 -> their dtype


@dataclass(frozen=True)
class Measurement:
    """Our time of a call in a file of results."""

    name: str
    ms: float
    path: Path
    commit: str
    warm: bool  # its inputs were in L2


def results_dir() -> Path | None:
    """benchmarks/results of a checkout; None in an installed wheel, which has no results."""
    folder = Path(__file__).parents[3] / "benchmarks" / "results"
    return folder if folder.is_dir() and not configs.installed() else None


def find(shape: Shape, direction: str, dtype: str, gpu_name: str) -> list[Measurement]:
    """Measurements of a call on a GPU."""
    folder = results_dir()
    paths = sorted((folder / gpu_slug(gpu_name)).glob("*.jsonl")) if folder else []
    return [found for path in paths for found in _read(path, shape, direction, DTYPES[dtype].short)]


def _read(path: Path, shape: Shape, direction: str, dtype: str) -> Iterator[Measurement]:
    """Measurements in a file: its first line has what all share, each other line is a problem, maybe of another commit."""
    header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    if header["pass"] != direction:
        return
    rows = FP32_ROWS if header["dtype"] == "fp32" else {OURS: header["dtype"]}
    for line in lines:
        if Shape.parse(line["problem"]) != shape:
            continue
        for row, its_dtype in rows.items():
            if its_dtype == dtype and (ms := line["rows"].get(row, {}).get("ms")):
                commit = line.get("commit", header["commit"])
                yield Measurement(line["shape"], ms, path, commit, line.get("l2") == "warm")


def bench_words(shape: Shape, direction: str, dtype: str) -> str | None:
    """Arguments with which `tl-attention bench` measures a call; None if it measures no such call."""
    of_decode = "page", "ragged"
    others = [word for word in shape.options.words if word.partition("=")[0] not in (*of_decode, "function")]
    words = ["--pass bwd --deterministic" if direction == "bwd_det" else f"--pass {direction}"]
    words.append(f"--shapes {shape}")
    if shape.options.function or dtype in FP32_DTYPES:  # sets of their own
        if direction == "bwd_det" or dtype == "float16" or others:
            return None
        words.append("--set flex" if shape.options.function else "--set fp32")
    elif direction == DECODE and others:
        return None
    elif dtype == "float16":
        words.append("--dtype fp16")
    return " ".join(words)
