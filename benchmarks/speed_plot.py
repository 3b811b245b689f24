"""README's plot: TFLOPS of forward and backward by sequence length, as an SVG that depends on the stored rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rows import OURS, Row
from tables import TITLES

SERIES = "paper-d128-causal-"  # shapes of the plot: 16 heads of 128 columns, 16k tokens
COLORS = {OURS: "#d62728", "fa3": "#1f77b4", "fa4": "#2ca02c", "cudnn": "#9467bd", "fa2": "#7f7f7f"}
NAMES = {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "cudnn": "cuDNN"}
WIDTH, HEIGHT = 880, 340
LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT, GAP = 48, 62, 376, 228, 68
STEP = 200  # TFLOPS per grid line


def draw(runs: Mapping[str, Sequence[Row]]) -> str:
    """An SVG with a panel per pass. runs: fwd and bwd -> their rows."""
    panels = {direction: series_of(rows) for direction, rows in runs.items()}
    speeds = [speed for panel in panels.values() for points in panel.values() for speed in points.values()]
    top = (int(max(speeds)) // STEP + 1) * STEP
    gpu = next(iter(runs.values()))[0]["gpu"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *legend(),
    ]
    for i, (direction, panel) in enumerate(panels.items()):
        title = f"{TITLES[direction].capitalize()}, TFLOPS ({gpu}, bf16, d128 causal)"
        parts += panel_lines(LEFT + i * (PANEL_WIDTH + GAP), title, panel, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def series_of(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Provider -> sequence length -> TFLOPS, of the shapes of SERIES, ours last."""
    panel: dict[str, dict[int, float]] = {name: {} for name in reversed(COLORS)}
    for row in rows:
        if row["shape"].startswith(SERIES) and row["status"] == "ok" and row["provider"] in panel:
            panel[row["provider"]][row["seqlen_q"]] = row["tflops"]
    return {name: dict(sorted(points.items())) for name, points in panel.items() if points}


def legend() -> list[str]:
    """A line and a name per library, in one row at the top."""
    parts = []
    for i, (name, color) in enumerate(COLORS.items()):
        x = LEFT + 165 * i
        parts += [
            f'<line x1="{x}" y1="18" x2="{x + 22}" y2="18" stroke="{color}" stroke-width="{_width(name)}"/>',
            f'<text x="{x + 28}" y="22">{NAMES.get(name, name)}</text>',
        ]
    return parts


def panel_lines(left: int, title: str, panel: Mapping[str, Mapping[int, float]], top: int) -> list[str]:
    """Grid, axis labels and a line per library."""
    lengths = sorted({length for points in panel.values() for length in points})
    bottom = TOP + PANEL_HEIGHT
    x_of = {length: left + PANEL_WIDTH * i / max(len(lengths) - 1, 1) for i, length in enumerate(lengths)}
    parts = [f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{title}</text>']
    for speed in range(0, top + 1, STEP):
        y = bottom - PANEL_HEIGHT * speed / top
        parts += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL_WIDTH}" y2="{y:.1f}" stroke="#dddddd"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{speed}</text>',
        ]
    for length in lengths:
        name = f"{length // 1024}k" if length % 1024 == 0 else str(length)
        parts.append(f'<text x="{x_of[length]:.1f}" y="{bottom + 18}" text-anchor="middle">{name}</text>')
    middle = left + PANEL_WIDTH / 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">queries and keys, 16k tokens in all</text>'
    )
    for name, points in panel.items():
        places = [(x_of[length], bottom - PANEL_HEIGHT * speed / top) for length, speed in points.items()]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{COLORS[name]}" stroke-width="{_width(name)}"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLORS[name]}"/>' for x, y in places]
    return parts


def _width(name: str) -> float:
    return 3 if name == OURS else 1.6
