"""The short page of results: per GPU the means of each race, its speeds by length, and every row that another library wins."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import row_grids
import row_kernels
import rows as row_files
import tables
from rows import HIGH, OURS, Row, by_problem, describe, peer_ratios, ratio_over
from tables import heading, markdown_table

from tl_attention.problem.attn_problem import DECODE

PLOTTED = (("fwd", "main"), ("bwd", "main"))
DECODES = (DECODE, "main")
MEANS = ("", "")  # in place of a race: the means of all
OVER = {"fp32": "efficient", "flex": "flex"}  # library of the means of a set with libraries of its own
NOT_ANALYSED = "not analysed"

Key = tuple[str, str]  # pass and set of a race


def section(
    name: str,
    link: str,
    runs: Mapping[Key, Sequence[Row]],
    notes: Mapping[str, Any],
    pictures: Mapping[Key, str],
    *,
    with_grids: bool,
) -> str:
    """One GPU.

    Args:
        link: its full tables, as seen from the page.
        runs: races that have peers, and their rows.
        notes: file stem of a race -> name of a shape -> reason.
        pictures: race, or MEANS -> Markdown of its plot.
        with_grids: with the speeds by length and of decodes.
    """
    parts = [
        f"## {name}",
        f"All rows, a plot per race, environment, commits and tests: [{link}]({link}).",
    ]
    parts += [pictures.get(MEANS, ""), means_table(runs), own_means(runs)]
    parts.append(row_kernels.sentence({heading(*key): rows for key, rows in runs.items()}))
    if with_grids:
        plotted = {heading(*key): runs[key] for key in PLOTTED if key in runs}
        parts += [f"### Speed by length, {name}", "\n".join(pictures.get(key, "") for key in PLOTTED).strip()]
        parts.append(row_grids.by_length(plotted))
        if DECODES in runs:
            parts += [f"### Decoding, {name}", pictures.get(DECODES, "")]
            parts.append(row_grids.of_decode(runs[DECODES]))
    lost = lost_rows(runs, notes)
    parts.append(f"### Lost rows, {name}\n\n{lost}" if lost else "No library is faster in any row.")
    return "\n\n".join(part for part in parts if part)


def means_table(runs: Mapping[Key, Sequence[Row]]) -> str:
    """Our speed over each library, by race."""
    parts = parts_of_races(runs)
    names = list(dict.fromkeys(name for _, rows in parts for name in tables.geomeans(rows)))
    lines = []
    for title, rows in parts:
        found = tables.geomeans(rows)
        best = tables.over_best(rows)
        if best:
            cells = [mean_and_least(rows, name) if name in found else "–" for name in names]
            lost = sum(ratio < 1 for ratio in best)
            lines.append([title, *cells, f"{statistics.geometric_mean(best):.2f}x", f"{lost} of {len(best)}"])
    return markdown_table(["race", *names, "the fastest", "lost"], lines) if lines else ""


def parts_of_races(runs: Mapping[Key, Sequence[Row]]) -> list[tuple[str, list[Row]]]:
    """(name, rows) of the races that share their libraries; a decode has parts."""
    return [
        part
        for key, rows in runs.items()
        if key[1] not in OVER
        for part in tables.parts_of(heading(*key), list(rows))
    ]


def own_means(runs: Mapping[Key, Sequence[Row]]) -> str:
    """Our speed in the races that have libraries of their own, in a sentence."""
    lines = [f"{race}: {_mean_and_least(ratios)} over {title}" for race, title, ratios in own_races(runs)]
    return f"{'; '.join(lines)}." if lines else ""


def own_races(runs: Mapping[Key, Sequence[Row]]) -> Iterator[tuple[str, str, list[float]]]:
    """(race, title of the library, our speeds over its) of the races that have libraries of their own."""
    for (direction, set_name), rows in runs.items():
        peer = OVER.get(set_name)
        for ours in (OURS, HIGH) if peer else ():
            pairs = [
                (group[ours], group[peer])
                for group in by_problem(rows).values()
                if ours in group and peer in group and group[ours]["status"] == group[peer]["status"] == "ok"
            ]
            if pairs:
                precision = f", {'high' if ours == HIGH else 'highest'}" if peer == OVER["fp32"] else ""
                race = heading(direction, set_name) + precision
                yield race, pairs[0][1]["title"], [theirs["ms"] / mine["ms"] for mine, theirs in pairs]


def races_of(runs: Mapping[Key, Sequence[Row]]) -> list[tuple[str, dict[str, list[float]]]]:
    """(race, provider -> our speeds over its): the lines of means_table(), then the races of own_races()."""
    found = [
        (title, {name: ratios_over(rows, name) for name in tables.geomeans(rows)})
        for title, rows in parts_of_races(runs)
    ]
    for race, title, ratios in own_races(runs):
        found.append((race, {title.removeprefix("torch "): ratios}))
    return [(race, peers) for race, peers in found if peers]


def mean_and_least(rows: Sequence[Row], peer: str) -> str:
    """Geometric mean of our speed over a library's, and the least, as in 1.21x (1.02).

    Behind them the number of problems, of a library that did not run all of ours: 1.21x (1.02), 16 of 48.
    """
    ratios, problems = ratios_over(rows, peer), len(_ours(rows))
    text = _mean_and_least(ratios)
    return text if len(ratios) == problems else f"{text}, {len(ratios)} of {problems}"


def ratios_over(rows: Sequence[Row], peer: str) -> list[float]:
    """Our speed over a library's, of each problem with both."""
    return [ratio for row in _ours(rows) if (ratio := ratio_over(row, peer))]


def _ours(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["provider"] == OURS and row["status"] == "ok"]


def _mean_and_least(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f}x ({min(ratios):.2f})"


def lost_rows(runs: Mapping[Key, Sequence[Row]], notes: Mapping[str, Any]) -> str:
    """Every row in which a library is faster, a line per race and reason, but those of decodes, whose table shows them."""
    lost: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for (direction, set_name), rows in runs.items():
        if direction == DECODE:
            continue
        reasons = notes.get(row_files.file_name(direction, set_name).removesuffix(".jsonl"), {})
        for group in by_problem(rows).values():
            ours = group.get(OURS)
            ratios = peer_ratios(ours) if ours and ours["status"] == "ok" else {}
            peer = min(ratios, key=ratios.__getitem__, default=None)
            if peer and ratios[peer] < 1:
                problem = (
                    f"{describe(ours)}{row_kernels.mark(ours)} {ratios[peer]:.2f} {group[peer]['title']}"
                )
                why = heading(direction, set_name), reason_of(ours["shape"], reasons)
                lost.setdefault(why, []).append((ratios[peer], problem))
    lines = sorted((sorted(problems), *why) for why, problems in lost.items())
    cells = [[race, "; ".join(text for _, text in problems), reason] for problems, race, reason in lines]
    header = ["race", "problem, ours over the fastest library", "reason"]
    return markdown_table(header, cells, texts=2) if lines else ""


def reason_of(shape: str, reasons: Mapping[str, str]) -> str:
    """Why a library is faster on a shape. "as NAME" alone stands for the reason of another shape of the race."""
    reason = reasons.get(shape, NOT_ANALYSED)
    other = re.fullmatch(r"as ([\w-]+)", reason)
    return reason_of(other[1], reasons) if other else reason
