"""Plots of stored rows as SVG, each made of the rows alone: speeds by length and by problem, decodes, means, and README's plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import row_grids
import svg
import tables
from rows import OURS, PLAIN, Row, by_problem, describe, peer_ratios, speed, unit
from summary import Key, races_of
from svg import LEFT, WIDTH, Panel

from tl_attention.problem.attn_problem import DECODE

SERIES = "paper-d128-causal-"  # shapes of README's plot: 16 heads of 128 columns, 16k tokens
README_PEERS = (OURS, "fa3", "fa4", "cudnn", "fa2")
README_STEP = 200  # TFLOPS per grid line
MEANS = "means.svg"
LINE = 17  # height of a problem
LABELS = 340  # width of their names
RATIOS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12)  # ticks of an axis of ratios, which is logarithmic
SHADES = (  # (below this ratio, color, words)
    (0.9, "#b2182b", "below 0.9"),
    (1.0, "#f4a582", "0.9 to 1"),
    (1.1, "#d1e5f0", "1 to 1.1"),
    (2.0, "#67a9cf", "1.1 to 2"),
    (math.inf, "#2166ac", "2 and more"),
)


def write(folder: Path, runs: Mapping[Key, Sequence[Row]]) -> list[Path]:
    """The plots of a GPU's races, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(runs)
    for name, picture in drawn.items():
        (folder / name).write_text(picture)
    return [folder / name for name in drawn]


def draw(runs: Mapping[Key, Sequence[Row]]) -> dict[str, str]:
    """File name -> SVG: the means of all races, and a plot per race."""
    found = {file_name(*key): of_race(*key, rows) for key, rows in runs.items()}
    found[MEANS] = of_means(runs)
    return {name: picture for name, picture in found.items() if picture}


def file_name(direction: str, set_name: str) -> str:
    return f"{direction}.svg" if set_name == "main" else f"{direction}_{set_name}.svg"


def of_race(direction: str, set_name: str, rows: Sequence[Row]) -> str:
    """The plot of a race; empty where it compares nothing."""
    rows = [row for row in rows if row["provider"] != PLAIN]
    if len({row["provider"] for row in rows}) < 2:
        return ""
    heading = tables.heading(direction, set_name)
    if direction == DECODE:
        return of_decode(rows, heading)
    return by_length(rows, heading) or by_problem_name(rows, heading)


def by_length(rows: Sequence[Row], heading: str) -> str:
    """A panel per head dims and mask, whose problems differ in length alone, at a constant number of tokens.

    Empty where more than a tenth of the problems are in no such panel.
    """
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row["status"] == "ok" and row["seqlen_q"] == row["seqlen_k"]:
            series = panels.setdefault(row_grids.series_of(row), {}).setdefault(row["provider"], {})
            series[row["seqlen_q"]] = speed(row)
    panels = {kind: series for kind, series in panels.items() if max(map(len, series.values())) > 1}
    shown = sum(len({n for points in series.values() for n in points}) for series in panels.values())
    if shown < 0.9 * len(by_problem(rows)):
        return ""
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    most, step = svg.axis_of(
        x for series in panels.values() for points in series.values() for x in points.values()
    )
    width, high, first, gap = (WIDTH - LEFT * columns - 12) / columns, 150, 80, 226
    names = {name for series in panels.values() for name in series}
    parts = [*svg.legend(titles_of(rows, names)), svg.text(LEFT, 46, caption(rows, heading))]
    for i, (kind, series) in enumerate(panels.items()):
        place = Panel(LEFT + i % columns * (width + LEFT), first + i // columns * gap, width, high)
        ours_last = {name: series[name] for name in reversed(svg.in_order(series))}
        parts += place.draw(
            kind, ours_last, most, step, "queries and keys" if i >= len(panels) - columns else ""
        )
    return svg.document(first + gap * math.ceil(len(panels) / columns) - 32, parts)


def by_problem_name(rows: Sequence[Row], heading: str) -> str:
    """A line per problem with a dot per provider at its speed."""
    groups = [
        {name: row for name, row in group.items() if row["status"] == "ok"}
        for group in by_problem(rows).values()
    ]
    groups = [group for group in groups if OURS in group and len(group) > 1]
    if not groups:
        return ""
    names = {name for group in groups for name in group}
    most, step = svg.axis_of(speed(row) for group in groups for row in group.values())
    width, top = WIDTH - LABELS - 24, 82
    bottom = top + LINE * len(groups)
    parts = [*svg.legend(titles_of(rows, names)), svg.text(LEFT, 46, caption(rows, heading))]
    parts += [svg.box(0, top + LINE * i, WIDTH, LINE, svg.SHADE) for i in range(0, len(groups), 2)]
    for value in svg.ticks(most, step):
        x = LABELS + width * value / most
        parts += [svg.line(x, top, x, bottom)]
        parts += [svg.text(x, y, f"{value:g}", "middle") for y in (top - 6, bottom + 16)]
    for i, group in enumerate(groups):
        y = top + LINE * (i + 0.5)
        parts.append(svg.text(LABELS - 8, y + 4, describe(group[OURS]), "end", ' font-size="11"'))
        for name in reversed(svg.in_order(group)):
            place = LABELS + width * speed(group[name]) / most, y
            parts.append(svg.dot(*place, svg.color_of(name), 5 if name == OURS else 3.5))
    return svg.document(bottom + 26, parts)


def of_decode(rows: Sequence[Row], heading: str) -> str:
    """A grid of our speed over the fastest library: a line per queries, heads and layout, a column per sequences and keys."""
    cells: dict[tuple, dict[tuple[int, int], float]] = {}
    for row in rows:
        ratios = peer_ratios(row) if row["provider"] == OURS and row["status"] == "ok" else {}
        if ratios:
            sizes = row["batch"], row["seqlen_k"]
            cells.setdefault(row_grids.kind_of(row), {})[sizes] = min(ratios.values())
    if not cells:
        return ""
    columns = sorted({sizes for found in cells.values() for sizes in found})
    left, top = 190, 84
    width = (WIDTH - left - 16) / len(columns)
    words = f"{heading} ({rows[0]['gpu']}): our speed over the fastest of the libraries, by sequences (B) and keys"
    parts = [svg.title(16, 22, words)]
    for i, (_, color, meaning) in enumerate(SHADES):
        parts += [svg.box(left + 120 * i, 32, 14, 14, color), svg.text(left + 120 * i + 20, 43, meaning)]
    for i, (batch, keys) in enumerate(columns):
        x = left + width * (i + 0.5)
        if i == 0 or batch != columns[i - 1][0]:
            parts.append(svg.text(left + width * i, top - 20, f"B{batch}", extra=' font-weight="bold"'))
        parts.append(svg.text(x, top - 5, svg.length_name(keys), "middle", ' font-size="11"'))
    for j, (kind, found) in enumerate(sorted(cells.items())):
        y = top + LINE * j
        parts.append(svg.text(left - 8, y + 12, row_grids.title_of(kind), "end", ' font-size="11"'))
        for i, sizes in enumerate(columns):
            if sizes in found:
                color = next(shade for limit, shade, _ in SHADES if found[sizes] < limit)
                parts.append(svg.box(left + width * i, y, width - 1, LINE - 1, color))
    return svg.document(top + LINE * len(cells) + 12, parts)


def of_means(runs: Mapping[Key, Sequence[Row]]) -> str:
    """Our speed over each library, by race: a dot at the geometric mean, a line from the worst problem to it."""
    races = races_of(runs)
    if not races:
        return ""
    names = svg.in_order(name for _, found in races for name in found)
    ends = [ends_of(ratios) for _, found in races for ratios in found.values()]
    low, high = (
        math.log(min(0.95, *(least for least, _ in ends))),
        math.log(1.05 * max(mean for _, mean in ends)),
    )
    left, top, step = LABELS, 82, 6

    def place(ratio: float) -> float:
        return left + (WIDTH - left - 24) * (math.log(ratio) - low) / (high - low)

    gpu = next(iter(runs.values()))[0]["gpu"]
    words = f"Our speed over each library ({gpu}): geometric mean, and a line to the worst problem"
    parts = [*svg.legend({name: svg.NAMES.get(name, name) for name in names}), svg.text(LEFT, 46, words)]
    heights = [step * len(found) + 12 for _, found in races]
    bottom = top + sum(heights)
    for ratio in (ratio for ratio in RATIOS if low <= math.log(ratio) <= high):
        x = place(ratio)
        parts.append(svg.line(x, top, x, bottom, "#333333" if ratio == 1 else svg.GRID))
        parts += [svg.text(x, y, f"{ratio:g}x", "middle") for y in (top - 6, bottom + 16)]
    y = top
    for (race, found), height in zip(races, heights, strict=True):
        parts.append(svg.text(left - 12, y + height / 2 + 4, race, "end", ' font-size="11"'))
        for i, name in enumerate(name for name in names if name in found):
            least, mean = ends_of(found[name])
            here = y + 9 + step * i
            parts.append(svg.line(place(least), here, place(mean), here, svg.color_of(name), 1.6))
            parts.append(svg.dot(place(mean), here, svg.color_of(name), 3.5))
        y += height
    return svg.document(bottom + 26, parts)


def ends_of(ratios: Sequence[float]) -> tuple[float, float]:
    """The least ratio and the geometric mean."""
    return min(ratios), statistics.geometric_mean(ratios)


def of_readme(runs: Mapping[str, Sequence[Row]]) -> str:
    """README's plot, with a panel per pass. runs: fwd and bwd -> their rows."""
    panels = {direction: series_of_readme(rows) for direction, rows in runs.items()}
    speeds = [x for panel in panels.values() for points in panel.values() for x in points.values()]
    most = (max(speeds) // README_STEP + 1) * README_STEP
    parts = svg.legend({name: svg.NAMES.get(name, name) for name in README_PEERS})
    for i, (direction, panel) in enumerate(panels.items()):
        gpu = runs[direction][0]["gpu"]
        words = f"{tables.TITLES[direction].capitalize()}, TFLOPS ({gpu}, bf16, d128 causal)"
        place = Panel(LEFT + i * 444, 62, 376, 228)
        parts += place.draw(words, panel, most, README_STEP, "queries and keys, 16k tokens in all")
    return svg.document(340, parts)


def series_of_readme(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Provider -> sequence length -> TFLOPS, of the shapes of SERIES, ours last."""
    panel: dict[str, dict[int, float]] = {name: {} for name in reversed(README_PEERS)}
    for row in rows:
        if row["shape"].startswith(SERIES) and row["status"] == "ok" and row["provider"] in panel:
            panel[row["provider"]][row["seqlen_q"]] = row["tflops"]
    return {name: points for name, points in panel.items() if points}


def caption(rows: Sequence[Row], heading: str) -> str:
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    return f"{heading}, {unit(rows[0])} ({rows[0]['gpu']}, {dtypes})"


def titles_of(rows: Iterable[Row], names: Iterable[str]) -> dict[str, str]:
    """Provider -> its name in a legend."""
    found = {row["provider"]: row["title"] for row in rows}
    return {name: svg.NAMES.get(name, found[name]) for name in svg.in_order(names)}
