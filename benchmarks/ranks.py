"""Stored results of benchmarks/distributed.py as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STORED = "distributed.json"  # in a folder of results


def table(rows: list[dict[str, Any]], ranks: int) -> str:
    """Markdown table of all rows."""
    lines = [
        f"| forward and backward | method | one GPU, ms | {ranks} GPUs, ms | host, ms | efficiency |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in rows:
        speed = (
            f"{one['ms']:.2f} | {one['host_ms']:.2f} | {one['efficiency']:.2f}"
            if one["status"] == "ok"
            else f"WRONG, error {one['error']} | – | –"
        )
        lines.append(f"| {one['problem']} | {one['method']} | {one['one_gpu_ms']:.2f} | {speed} |")
    return "\n".join(lines)


def stored_page(folder: Path) -> str:
    """Table of a folder's results, and what they were measured with."""
    found = json.loads((folder / STORED).read_text())
    facts = found["environment"]
    names = "gpu", "clocks", "power limit", "link", "nccl", "torch", "commit"
    versions = ", ".join(f"{name} {facts[name]}" for name in names if name in facts)
    words = (
        "Efficiency is the time of one GPU on the whole problem, in the same process, over ranks times the time of the slowest rank."
        f" Host: shortest time in which a rank starts the work. {versions}."
    )
    return f"{words}\n\n{table(found['rows'], found['ranks'])}"
