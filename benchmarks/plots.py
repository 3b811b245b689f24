"""One plot per pass: TFLOPS against sequence length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rows import OURS, Row, describe
from tables import TITLES


def plot(rows: list[Row], path: Path) -> bool:
    """Write an SVG with a panel per head dims and mask. False, and no file, where no series has two lengths.

    A panel holds problems that differ in length alone, at a constant number of tokens.
    """
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row["status"] == "ok" and row["seqlen_q"] == row["seqlen_k"]:
            tokens = row["batch"] * row["seqlen_q"]
            sizes = describe(row | {"batch": 0, "seqlen_q": 0, "seqlen_k": 0})
            key = f"{sizes.removeprefix('B0 ').replace(' S0', '')}, {tokens // 1024}k tokens"
            panels.setdefault(key, {}).setdefault(row["title"], {})[row["seqlen_q"]] = row["tflops"]
    panels = {key: series for key, series in panels.items() if max(map(len, series.values())) > 1}
    if not panels:
        return False
    columns = 2 if len(panels) > 1 else 1
    count = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(6 * columns, 3.6 * count), layout="constrained")
    axes = list(figure.subplots(count, columns, squeeze=False).flat)
    handles: dict[str, Any] = {}
    colors = {title: f"C{i}" for i, title in enumerate(dict.fromkeys(row["title"] for row in rows))}
    for (name, panel), axis in zip(panels.items(), axes, strict=False):
        for title, series in panel.items():
            points = zip(*sorted(series.items()), strict=True)
            width = 3 if title == OURS else 1.5
            (handles[title],) = axis.plot(*points, "o-", label=title, color=colors[title], lw=width)
        lengths = sorted({length for series in panel.values() for length in series})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        axis.minorticks_off()
        axis.set(title=name, xlabel="sequence length", ylabel="TFLOPS", ylim=(0, None))
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.legend(handles=handles.values(), loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"Attention {TITLES[rows[0]['pass']]} on {rows[0]['gpu']}")
    with matplotlib.rc_context({"svg.hashsalt": "tl_attention", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True
