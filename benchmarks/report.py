"""Rows of the benchmark as a terminal table, Markdown, JSON lines and plots.

    python benchmarks/report.py FOLDER    the report of a stored run anew, and what README says of it

A row is a dict, a line of the JSONL: one provider on one problem. `status` is ok, wrong, skipped (the library
cannot run the problem) or failed; `reason` says why it is not ok; without ok there is no speed.

Beside the results lies notes.toml, written by hand: under the pass, name of a shape = why it is no faster.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tl_attention.problem import DECODE
from tl_attention.testing.shapes import DIRECTIONS

Row = dict[str, Any]
OURS = "tl_attention"
PLAIN = "plain"  # ours without the options of a row: their cost is beside it
DETERMINISTIC = "deterministic"  # ours in the column of README's table
PROBLEM = (
    "pass",
    "dtype",
    "batch",
    "heads_q",
    "heads_kv",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "mask",
)
# What the tables of peers measured: bf16 forward and nondeterministic backward
PEER_PROBLEM = tuple(name for name in PROBLEM if name != "dtype")
OPTIONS_FOLDER = "options"  # of the stored runs of shapes with options, in the folder of the others
DECODE_FOLDER = "decode"  # of the stored run of decoding, likewise
TARGETS = {  # option that a row has alone -> its time over that of the plain row, times the share of blocks that is left
    "window": 1.15,
    "softcap": 1.25,
    "alibi": 1.15,
    "sink": 1.02,
    "dropout": 1.35,
    "varlen": 1.05,
}
# Of a table of TFLOPS, where q, k and v have one length, head number and head_dim, and of one of microseconds
TFLOPS_COLUMNS = ("pass", "batch", "heads", "seqlen", "head_dim", "mask", "cudnn", "best")
MICROSECOND_COLUMNS = (*PEER_PROBLEM, "cudnn_us")
REFERENCES = ("cudnn", "fa4")  # of a score: the first that both the run and the peers' table have
MEASURES = {"score": "score", "vs_best": "vs best peer in run"}  # by which rows are judged, and their columns
NOTES_NAME = "notes.toml"
SLOWEST = 10  # rows, of which the report says why
PEERS_HELP = "CSV files of peers' TFLOPS or microseconds on this GPU, or folders of them, which give scores"
MEASURED = ("ms", "tflops", "correct", "max_err_ratio")  # None in a row where they are unknown

TITLES = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_det": "backward, deterministic",
    "fwd_bwd": "forward and backward",
    "fwd_bwd_det": "forward and backward, deterministic",
    DECODE: "decoding",
}
WIDTHS = {
    "fwd": "head_dim + head_dim_v",
    "bwd": "3 head_dim + 2 head_dim_v",
    "fwd_bwd": "4 head_dim + 3 head_dim_v",
}


DECODE_CONVENTION = (
    "A speed is in GB/s: keys and values of all sequences, q and out, 2 bytes an element and each once, over the median time of a launch "
    "in CUDA-graph replays, the providers in turn; `% copy` is its share of the rate of a copy in the same run, bytes read and written. "
    "S is queries and keys of a sequence; causal is bottom-right; page 16: the keys lie in pages of so many, in a random order; ragged: "
    "sequences are of log-uniform lengths from a 16th of S up. A launch finds none of its cache in L2. A speed stands only where the "
    "output of the last timed call is correct."
)


def convention(direction: str) -> str:
    """What a speed is."""
    if direction == DECODE:
        return DECODE_CONVENTION
    backward = " A backward's time is that of all it launches." if "bwd" in direction else ""
    return (
        f"TFLOPS count visible pairs: 2 x pairs x ({WIDTHS[direction.removesuffix('_det')]}) x batch x query heads; "
        "causal counts what the mask leaves, s(s+1)/2 pairs a head where the lengths are equal. A time is the median "
        f"of CUDA-graph replays, the providers in turn; a ratio is the median of those of the rounds.{backward} Each "
        "provider has contiguous tensors in the layout it is made for, bshd ([batch, seqlen, heads, head_dim]) or "
        "bhsd. A launch finds none of its inputs in L2, unless the row says L2 warm. A speed stands only where the "
        "output of the last timed call is correct."
    )


JUDGED = (
    "`score` is our speed over that of the best peer of a table measured beforehand, by way of a peer that both runs have: "
    "(ours / cudnn here) / (best peer / cudnn there), fa4 in the place of cudnn where that did not run; `by fa4` always has fa4 "
    "there, and shows how far the peers' speeds relative to each other differ between the table and this run. Where the table "
    "lacks the problem, `vs best peer in run` is our speed over that of the fastest peer here. 1.00 is level with it."
)

OPTIONS_CONVENTION = (
    "With options, pairs are those that the window and the lengths leave. varlen: packed sequences of one length; uneven: of "
    "log-normal lengths, always the same, S their mean; packed: q, k and v are slices of one tensor, as are their gradients. All "
    "libraries are called by their public functions, and a backward is what torch.autograd.grad launches, the gradient of a sink "
    "included. Where the dropout mask is a library's own, its results are checked on average: regressed on those without dropout."
)


def jsonl_name(direction: str) -> str:
    return f"{direction}.jsonl"


def environment_name(direction: str) -> str:
    return "environment.json" if direction == "fwd" else f"environment_{direction}.json"


def show_environment(console: Console, facts: dict[str, str]) -> None:
    for key, value in facts.items():
        console.print(f"{key}: {value}", highlight=False, markup=False)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def problem_key(row: Row) -> tuple:
    return (*(row[key] for key in PROBLEM), *row.get("options", ()))


def problems(rows: Iterable[Row]) -> dict[tuple, dict[str, Row]]:
    """Problem -> provider -> row, in the order of the rows."""
    grouped: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(problem_key(row), {})[row["provider"]] = row
    return grouped


def providers(rows: Iterable[Row]) -> list[str]:
    """Those that ran anything; ours without options is not compared with the others."""
    ran = dict.fromkeys(row["provider"] for row in rows if row["status"] != "skipped")
    return [name for name in ran if name != PLAIN]


def describe(row: Row) -> str:
    """B4 H16 S4096 d128 causal, with both of what differs (query/key): H32/8, S512/8192, d192/128; options, and L2 warm."""

    def both(a: int, b: int) -> str:
        return str(a) if a == b else f"{a}/{b}"

    sizes = (
        f"B{row['batch']} H{both(row['heads_q'], row['heads_kv'])} S{both(row['seqlen_q'], row['seqlen_k'])}"
    )
    warm = ", L2 warm" if row.get("l2") == "warm" else ""
    words = " ".join([row["mask"], *(word.replace("=", " ") for word in row.get("options", ()))])
    return f"{sizes} d{both(row['head_dim'], row['head_dim_v'])} {words}{warm}"


def unit(row: Row) -> str:
    """Of a speed of its pass."""
    return "GB/s" if row["pass"] == DECODE else "TFLOPS"


def speed(row: Row) -> float:
    """Of a row that is ok, in its unit."""
    return row["gbps" if row["pass"] == DECODE else "tflops"]


def best(group: dict[str, Row]) -> float:
    speeds = (speed(row) for name, row in group.items() if row["status"] == "ok" and name != PLAIN)
    return max(speeds, default=math.nan)


def cell(row: Row | None, fastest: float, bold: tuple[str, str]) -> str:
    """The speed, the fastest in bold; or why there is none."""
    if row is None or row["status"] == "skipped":
        return "–"
    if row["status"] != "ok":
        return row["status"].upper()
    return f"{speed(row):.0f}".join(bold if speed(row) == fastest else ("", ""))


def line(rows: list[Row]) -> str:
    """One problem while the others run."""
    rows = [row for row in rows if row["provider"] != PLAIN]
    fastest = best({row["provider"]: row for row in rows})
    speeds = (
        f"{row['title']} {cell(row, fastest, ('[bold]', '[/]'))}"
        for row in rows
        if row["status"] != "skipped"
    )
    return f"{describe(rows[0])}: {', '.join(speeds)}"


def geomeans(rows: Iterable[Row]) -> dict[str, tuple[float, int, int]]:
    """Provider -> (geometric mean of our speed over its, rows where we are faster, rows where both ran)."""
    ours = [row for row in rows if row["provider"] == OURS and row["status"] == "ok"]
    ratios = {
        name: [row[f"ratio_vs_{name}"] for row in ours if f"ratio_vs_{name}" in row]
        for name in providers(rows)
    }
    return {
        name: (statistics.geometric_mean(values), sum(value > 1 for value in values), len(values))
        for name, values in ratios.items()
        if values and name != OURS
    }


def group_of(row: Row) -> str:
    """What comes before the first - of the name of its shape, of decoding before the second; a shape given by its sizes has no name."""
    words = 2 if row["pass"] == DECODE else 1
    return "unnamed" if "," in row["shape"] else "-".join(row["shape"].split("-")[:words])


def judged(rows: Iterable[Row]) -> list[tuple[float, str, Row]]:
    """(value, its key in MEASURES, row) of our rows that have one."""
    return [
        (row[key], key, row)
        for row in rows
        if row["provider"] == OURS
        for key in MEASURES
        if row.get(key) is not None
    ]


def summary(rows: Iterable[Row]) -> list[str]:
    """Of each group of shapes: geometric mean and worst row, of what is judged by the peers' table and of what is not.

    And how many rows of it count in neither, as we have no speed there.
    """
    rows = list(rows)
    groups: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for value, key, row in judged(rows):
        groups.setdefault((group_of(row), key), []).append((value, row["shape"]))
    lines = [
        f"{group}, {MEASURES[key]}: {statistics.geometric_mean(value for value, _ in values):.2f} by geometric mean of "
        f"{len(values)}, worst {min(values)[0]:.2f} ({min(values)[1]})"
        for (group, key), values in groups.items()
    ]
    missing = Counter(group_of(row) for row in rows if row["provider"] == OURS and row["status"] != "ok")
    return lines + [f"{group}: {OURS} has no speed in {count}" for group, count in missing.items()]


def slowest(rows: Iterable[Row], why: Mapping[str, str]) -> list[str]:
    """The SLOWEST rows of ours, the worst first, and what binds them.

    why: name of a shape -> in words, of read_why.
    """
    worst = sorted(judged(rows), key=lambda found: found[0])[:SLOWEST]
    return [
        f"{value:.2f} {MEASURES[key]}, {row['shape']} ({describe(row)}): {why.get(row['shape'], 'no reason recorded')}"
        for value, key, row in worst
    ]


def read_why(folder: Path, direction: str) -> dict[str, str]:
    """What notes.toml of a folder says of the shapes of a pass; nothing where there is none."""
    path = folder / NOTES_NAME
    return tomllib.loads(path.read_text()).get(direction, {}) if path.exists() else {}


def notes(rows: Iterable[Row]) -> list[str]:
    """Why rows have no speed, or one that no graph timed: each reason once, with where if that is short."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            found.setdefault((row["title"], f"{row['status']}: {row['reason']}"), []).append(describe(row))
        elif row["timer"] != "graph":
            found.setdefault((row["title"], row["timer"]), []).append(describe(row))
        if row.get("score_over") not in (None, REFERENCES[0]):
            found.setdefault((row["title"], f"score by way of {row['score_over']}"), []).append(describe(row))
    return [
        f"{title} {reason} ({', '.join(where) if len(where) <= 3 else f'{len(where)} rows'})"
        for (title, reason), where in found.items()
    ]


def _number(row: Row | None, key: str, form: str) -> str:
    return format(row[key], form) if row and row.get(key) is not None else "–"


def cost(row: Row) -> float | None:
    """Our time over that without the options, of the rounds' ratios; None where one has no speed."""
    return 1 / row[f"ratio_vs_{PLAIN}"] if f"ratio_vs_{PLAIN}" in row else None


DETAILS = {  # of our row: column -> key and format
    "ms": ("ms", ".3f"),
    "eager ms": ("eager_ms", ".3f"),
    "% cuBLAS": ("pct_cublas", ".0f"),
    "GB/s": ("gbps", ".0f"),
    "FLOP/B": ("intensity", ".0f"),
    "error": ("max_err_ratio", ".2f"),
    "vs plain": ("ratio_vs_plain", ".2f"),
    "vs fa2": ("ratio_vs_fa2", ".2f"),
    "vs cudnn": ("ratio_vs_cudnn", ".2f"),
    "score": ("score", ".2f"),
    "by fa4": ("score_over_fa4", ".2f"),
    "vs best peer in run": ("vs_best", ".2f"),
}


DECODE_DETAILS = {
    "µs": ("us", ".1f"),
    "% copy": ("pct_copy", ".1f"),
    "error": ("max_err_ratio", ".2f"),
    "vs best peer in run": ("vs_best", ".2f"),
}


def details_of(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    return DECODE_DETAILS if rows[0]["pass"] == DECODE else DETAILS


def _order(group: dict[str, Row]) -> tuple:
    """Of the problems in tables: that of the rows, but of decoding, where the fewest bytes are run first, by kind and sizes."""
    row = next(iter(group.values()))
    if row["pass"] != DECODE:
        return ()
    sizes = (row[key] for key in ("seqlen_q", "heads_q", "heads_kv", "batch", "seqlen_k"))
    return (tuple(row.get("options", ())), *sizes)


def _grid(
    rows: list[Row], bold: tuple[str, str], details: dict[str, tuple[str, str]]
) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table that terminal and Markdown share."""
    names = providers(rows)
    titles = {row["provider"]: row["title"] for row in rows}
    details = {
        column: spec for column, spec in details.items() if any(row.get(spec[0]) is not None for row in rows)
    }
    lines = []
    for group in sorted(problems(rows).values(), key=_order):
        fastest, ours = best(group), group.get(OURS)
        speeds = [cell(group.get(name), fastest, bold) for name in names]
        lines.append(
            [
                describe(next(iter(group.values()))),
                *speeds,
                *(_number(ours, *spec) for spec in details.values()),
            ]
        )
    return ["problem", *(titles[name] for name in names), *details], lines


def table(rows: list[Row]) -> Table:
    """For the terminal, with the geomeans at its foot."""
    header, lines = _grid(rows, ("[bold green]", "[/]"), details_of(rows))
    means = {name: f"{mean:.2f}x" for name, (mean, _, _) in geomeans(rows).items()}
    foot = ["geomean of ours over", *(means.get(name, "") for name in providers(rows))]
    result = Table(title=f"{TITLES[rows[0]['pass']]}, {unit(rows[0])}", show_footer=True)
    for i, column in enumerate(header):
        result.add_column(
            column, foot[i] if i < len(foot) else "", justify="right" if i else "left", no_wrap=i == 0
        )
    for line in lines:
        result.add_row(*(text.replace("WRONG", "[bold red]WRONG[/]") for text in line))
    return result


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def markdown(
    environment: dict[str, str],
    rows: list[Row],
    plot_name: str | None = None,
    why: Mapping[str, str] | None = None,
) -> str:
    """The report: where it was measured, the speeds of all, the slowest rows, geomeans, what did not run; why: of read_why."""
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    worst = slowest(rows, why or {})
    parts = [
        f"# Attention {TITLES[rows[0]['pass']]}, {dtypes}",
        bullets(
            f"{key}: {f'`{value}`' if key == 'command' else value}" for key, value in environment.items()
        ),
        bullets(f"{row['title']}: {row['library']}, {row['layout']}" for row in _libraries(rows)),
        convention(rows[0]["pass"])
        + " The fastest of a row is bold. `error` is the largest error over the error allowed.",
        OPTIONS_CONVENTION if any(row.get("options") for row in rows) else "",
        JUDGED if worst else "",
        decode_groups(rows) if rows[0]["pass"] == DECODE else "",
        _markdown_of(rows, details_of(rows)),
        f"The {len(worst)} slowest beside their best peers, and why:" if worst else "",
        bullets(worst),
        bullets(summary(rows)),
        bullets(
            f"{mean:.2f}x {name}: geometric mean of {count} rows, faster in {wins}"
            for name, (mean, wins, count) in geomeans(rows).items()
        ),
        bullets(notes(rows)),
    ]
    if plot_name:
        parts.append(f"![TFLOPS against sequence length]({plot_name})")
    return "\n\n".join(part for part in parts if part) + "\n"


def _libraries(rows: list[Row]) -> list[Row]:
    """A row of each provider that ran anything."""
    ran = {row["provider"]: row for row in rows if row["status"] != "skipped"}
    return [ran[name] for name in providers(rows)]


def _markdown_of(rows: list[Row], details: dict[str, tuple[str, str]]) -> str:
    return markdown_table(*_grid(rows, ("**", "**"), details))


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """The first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def readme(folder: Path) -> str:
    """What README says of the stored runs of a folder, forward and backward."""
    parts = []
    for direction in ("fwd", "bwd"):
        if is_stored(folder, direction):
            stored = is_stored(folder, f"{direction}_det")
            deterministic = read(folder, f"{direction}_det")[0] if stored else []
            parts.append(_readme_part(*read(folder, direction), deterministic))
    return "\n".join(parts)


def readme_options(folder: Path) -> str:
    """What README says of the stored runs of options of a folder: what each costs beside the plain kernel, then the speeds."""
    stored = {
        direction: read(folder, direction) for direction in ("fwd", "bwd") if is_stored(folder, direction)
    }
    costs = cost_table({direction: rows for direction, (rows, _) in stored.items()})
    return "\n".join([costs, *(_readme_part(*run, ()) for run in stored.values())])


def cost_table(runs: Mapping[str, list[Row]]) -> str:
    """Of each problem with options: our time over that without them, and over the share of it that the mask leaves.

    Args:
        runs: fwd, bwd or both -> their rows.
    """
    ours = {
        direction: {row["shape"]: row for row in rows if row["provider"] == OURS and row.get("options")}
        for direction, rows in runs.items()
    }
    titles = [TITLES[direction] for direction in ours]
    header = ["problem", "share", *titles, *(f"{title} / share" for title in titles), "target"]
    lines, beyond = [], []
    for shape in dict.fromkeys(shape for rows in ours.values() for shape in rows):
        found = [rows.get(shape) for rows in ours.values()]
        row = next(row for row in found if row)
        times = [row and cost(row) for row in found]
        beside = [time and time / row["share"] for time in times]
        target = target_of(row)
        lines.append([describe(row), f"{row['share']:.3f}", *map(_times, (*times, *beside)), _times(target)])
        beyond += [
            f"{shape} {title} {ratio:.2f} of {target:.2f}"
            for title, ratio in zip(titles, beside, strict=True)
            if ratio and target and ratio > target
        ]
    return (
        "Our time with an option over that without it, the medians of ratios within rounds. `share` is of the 128 x 128 blocks of "
        "scores that the plain problem visits, those that a window or the lengths of documents leave; the plain problem of sequences "
        f"is a batch of one length. {OPTIONS_CONVENTION}\n\n"
        + markdown_table(header, lines)
        + f"\n\nBeyond the target: {'; '.join(beyond) or 'none'}.\n"
    )


def target_of(row: Row) -> float | None:
    """Of the one option of a row; None for others and for several."""
    words = row["options"]
    return TARGETS.get(words[0].partition("=")[0]) if len(words) == 1 else None


def _times(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"


def readme_decode(folder: Path) -> str:
    """What README says of the stored run of decoding of a folder: its groups, and of one query and 64 heads every speed."""
    rows, environment = read(folder, DECODE)
    shown = [row for row in rows if row["shape"].startswith("decode-q1-h64-")]
    parts = [
        f"{_where(rows, environment)}; copy {environment['copy'].partition(',')[0]}. {DECODE_CONVENTION}",
        _means(rows),
        decode_groups(rows),
        _markdown_of(shown, DECODE_DETAILS) if shown else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def decode_groups(rows: list[Row]) -> str:
    """Of each group of problems: our share of the copy rate and of the speed of one query in a plain cache, and of the best peer's."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["provider"] == OURS and row["status"] == "ok":
            groups.setdefault(group_of(row), []).append(row)
    plain = {_sizes(row): row["gbps"] for row in groups.get("decode-q1", ())}
    lines = []
    for group, members in sorted(groups.items()):
        large = [row["pct_copy"] for row in members if row["batch"] >= 32 and row["seqlen_k"] >= 8192]
        kept = [row["gbps"] / plain[_sizes(row)] for row in members if _sizes(row) in plain]
        ahead = [row["vs_best"] for row in members if row.get("vs_best") is not None]
        lines.append(
            [
                group,
                str(len(members)),
                *(
                    _mean_and_worst(found, form)
                    for found, form in ((large, ".1f"), (kept, ".2f"), (ahead, ".2f"))
                ),
            ]
        )
    header = [
        "problems",
        "rows",
        "% copy of B32 and B128, S 8k and more",
        "speed over that of decode-q1",
        "over that of the best peer",
    ]
    return "Of ours, geometric mean (worst):\n\n" + markdown_table(header, lines)


def _sizes(row: Row) -> tuple:
    return tuple(row[key] for key in ("dtype", "batch", "heads_q", "heads_kv", "seqlen_k", "head_dim"))


def _mean_and_worst(values: Sequence[float], form: str) -> str:
    return f"{statistics.geometric_mean(values):{form}} ({min(values):{form}})" if values else "–"


def _where(rows: list[Row], environment: dict[str, str]) -> str:
    """On what, with what, which pass was measured."""
    versions = [f"torch {environment['torch']}", f"CUDA {environment['cuda']}"]
    versions += [f"tilelang {environment['tilelang']}"]
    versions += [f"{row['title']}: {row['library']}" for row in _libraries(rows) if row["provider"] != OURS]
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    return (
        f"{environment['gpu']}, power limit {environment['power limit']}; {'; '.join(versions)}. "
        f"{TITLES[rows[0]['pass']].capitalize()}, {dtypes}"
    )


def _means(rows: list[Row]) -> str:
    """Our speed beside that of each, and of decoding beside that of the best peer of each row."""
    means = [
        f"{mean:.2f}x {name} (faster in {wins} of {count} rows)"
        for name, (mean, wins, count) in geomeans(rows).items()
    ]
    ahead = [row["vs_best"] for row in rows if row["pass"] == DECODE and row.get("vs_best") is not None]
    if ahead:
        wins = sum(value > 1 for value in ahead)
        means.append(
            f"{statistics.geometric_mean(ahead):.2f}x the best of them (faster in {wins} of {len(ahead)} rows)"
        )
    return f"Geometric mean of the speed of {OURS} over that of each: {', '.join(means)}." if means else ""


def _readme_part(rows: list[Row], environment: dict[str, str], deterministic: Iterable[Row]) -> str:
    """Where a run was measured, geomeans, TFLOPS of all.

    Args:
        deterministic: rows of another run; ours on the same problems become the last column.
    """
    column = _deterministic_column(rows, deterministic)
    parts = [
        f"{_where(rows, environment)}, {unit(rows[0])}; medians of CUDA-graph replays at sustained clocks, the fastest bold.",
        _means(rows) + _slowdown(problems([*rows, *column]).values()),
        _markdown_of([*rows, *column], {}),
    ]
    return "\n\n".join(parts) + "\n"


def _deterministic_column(rows: Iterable[Row], deterministic: Iterable[Row]) -> list[Row]:
    """Ours of a deterministic run on the problems of rows, as if it were a provider of their run."""
    known = problems(rows)
    ours = (row for row in deterministic if row["provider"] == OURS)
    renamed = {"provider": DETERMINISTIC, "title": DETERMINISTIC}
    column = (row | renamed | {"pass": row["pass"].removesuffix("_det")} for row in ours)
    return [row for row in column if problem_key(row) in known]


def _slowdown(groups: Iterable[dict[str, Row]]) -> str:
    """What the deterministic column costs, in words."""
    pairs = [(group.get(OURS), group.get(DETERMINISTIC)) for group in groups]
    times = [
        theirs["ms"] / ours["ms"]
        for ours, theirs in pairs
        if ours and theirs and ours["status"] == theirs["status"] == "ok"
    ]
    if not times:
        return ""
    return f" Deterministic gradients take {statistics.geometric_mean(times):.2f}x the time, {max(times):.2f}x at most."


def is_stored(folder: Path, direction: str) -> bool:
    return (folder / jsonl_name(direction)).exists()


def read(folder: Path, direction: str) -> tuple[list[Row], dict[str, str]]:
    """The rows and the environment of a stored run."""
    rows = [json.loads(line) for line in (folder / jsonl_name(direction)).read_text().splitlines()]
    return rows, json.loads((folder / environment_name(direction)).read_text())


def write(folder: Path, rows: list[Row], environment: dict[str, str]) -> list[str]:
    """All of a report but the JSONL; the names of the files."""
    direction = rows[0]["pass"]
    page, facts, picture = f"{direction}.md", environment_name(direction), f"{direction}.png"
    drawn = [picture] if plot(rows, folder / picture) else []
    why = read_why(folder, direction)
    (folder / page).write_text(markdown(environment, rows, drawn[0] if drawn else None, why))
    (folder / facts).write_text(json.dumps(environment, indent=1) + "\n")
    return [page, facts, *drawn]


def write_jsonl(file: TextIO, rows: Iterable[Row]) -> None:
    """Appends the rows and flushes, so that an interrupted run keeps them."""
    for row in rows:
        file.write(json.dumps(row) + "\n")
    file.flush()


def plot(rows: list[Row], path: Path) -> bool:
    """TFLOPS against seqlen as PNG, a panel per head dims and mask; False where no series has two lengths.

    A panel holds problems that differ in length alone, the number of tokens being constant.
    """
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row["status"] == "ok" and row["seqlen_q"] == row["seqlen_k"]:
            tokens = row["batch"] * row["seqlen_q"]
            key = (
                describe(row | {"batch": 0, "seqlen_q": 0, "seqlen_k": 0})
                .removeprefix("B0 ")
                .replace(" S0", "")
            )
            series = panels.setdefault(f"{key}, {tokens // 1024}k tokens", {}).setdefault(row["title"], {})
            series[row["seqlen_q"]] = row["tflops"]
    panels = {key: lines for key, lines in panels.items() if max(map(len, lines.values())) > 1}
    if not panels:
        return False
    columns = 2 if len(panels) > 1 else 1
    count = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(6 * columns, 3.6 * count), layout="constrained")
    axes = figure.subplots(count, columns, squeeze=False).flat
    handles: dict[str, Any] = {}
    colors = {title: f"C{i}" for i, title in enumerate(dict.fromkeys(row["title"] for row in rows))}
    for (name, lines), axis in zip(panels.items(), axes, strict=False):
        for title, series in lines.items():
            ours = title == OURS
            axis.plot(
                *zip(*sorted(series.items()), strict=True),
                "o-",
                label=title,
                color=colors[title],
                lw=3 if ours else 1.5,
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths := sorted({length for series in lines.values() for length in series}))
        axis.set_xticklabels([f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        axis.set(title=name, xlabel="sequence length", ylabel="TFLOPS", ylim=(0, None))
        axis.grid(alpha=0.3)
        handles |= {line.get_label(): line for line in axis.get_lines()}
    for axis in list(axes):
        axis.set_visible(False)
    figure.legend(handles=handles.values(), loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"Attention {TITLES[rows[0]['pass']]} on {rows[0]['gpu']}")
    figure.savefig(path, dpi=120)
    return True


def read_peers(paths: Iterable[Path]) -> dict[tuple, dict[str, float]]:
    """PEER_PROBLEM -> peer -> how many times as fast as it the best peer is, of CSV files or the folders they lie in.

    Raises:
        ValueError: a file has other columns than both kinds of table, or a folder no CSV file.
    """
    peers = {}
    for path in paths:
        files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: expected CSV files in it, found none")
        for file in files:
            peers |= _read_table(file)
    return peers


def _read_table(path: Path) -> dict[tuple, dict[str, float]]:
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        for columns, problem_and_peers in ((TFLOPS_COLUMNS, _tflops), (MICROSECOND_COLUMNS, _microseconds)):
            if set(columns) <= set(table.fieldnames or ()):
                return dict(map(problem_and_peers, table))
    kinds = " or ".join(", ".join(columns) for columns in (TFLOPS_COLUMNS, MICROSECOND_COLUMNS))
    raise ValueError(f"{path}: expected the columns {kinds}, found {', '.join(table.fieldnames or ['none'])}")


def _tflops(line: dict[str, str]) -> tuple[tuple, dict[str, float]]:
    seqlen, heads, head_dim = (int(line[key]) for key in ("seqlen", "heads", "head_dim"))
    sizes = (int(line["batch"]), heads, heads, seqlen, seqlen, head_dim, head_dim)
    best = float(line["best"])
    problem = (line["pass"], *sizes, line["mask"])
    return problem, {name: best / float(line[name]) for name in REFERENCES if line.get(name)}


def _microseconds(line: dict[str, str]) -> tuple[tuple, dict[str, float]]:
    problem = tuple(line[key] if key in ("pass", "mask") else int(line[key]) for key in PEER_PROBLEM)
    times = {key.removesuffix("_us"): float(x) for key, x in line.items() if key.endswith("_us") and x}
    best = min(times.values())
    return problem, {name: times[name] / best for name in REFERENCES if name in times}


def judge(rows: Iterable[Row], peers: Mapping[tuple, Mapping[str, float]]) -> None:
    """Adds to our rows that are ok what MEASURES names, by the peers' table or else by the peers of the run."""
    for row in rows:
        if row["provider"] == OURS and row["status"] == "ok":
            row |= dict.fromkeys((*MEASURES, "score_over", "score_over_fa4")) | (
                _score(row, peers) or _vs_best(row)
            )


def _score(row: Row, peers: Mapping[tuple, Mapping[str, float]]) -> Row:
    """(ours / reference in this run) / (best / reference in the peers' table), of the first of REFERENCES that both have."""
    known = row["dtype"] == "bf16" and not row.get("options")
    table = peers.get(tuple(row[key] for key in PEER_PROBLEM), {}) if known else {}
    scores = {
        name: ratio / table[name]
        for name in REFERENCES
        if name in table and (ratio := row.get(f"ratio_vs_{name}"))
    }
    over = next(iter(scores), None)
    return {"score": scores[over], "score_over": over, "score_over_fa4": scores.get("fa4")} if over else {}


def _vs_best(row: Row) -> Row:
    peers = (key for key in row if key.startswith("ratio_vs_") and key != f"ratio_vs_{PLAIN}")
    ratios = [row[key] for key in peers]
    return {"vs_best": min(ratios)} if ratios else {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/report.py",
        description="Make the reports of the stored runs of a folder anew; print README's section.",
    )
    parser.add_argument("folder", type=Path, help="has fwd.jsonl and environment.json, and may have others")
    parser.add_argument(
        "--peers", nargs="+", type=Path, default=(), help=f"{PEERS_HELP}; default: those stay"
    )
    args = parser.parse_args(argv)
    folder, peers = args.folder, read_peers(args.peers)
    for direction in (*DIRECTIONS, DECODE):
        if is_stored(folder, direction):
            rows, environment = read(folder, direction)
            if peers:
                judge(rows, peers)
                with (folder / jsonl_name(direction)).open("w") as jsonl:
                    write_jsonl(jsonl, rows)
            write(folder, rows, environment)
    print(readme(folder), end="")
    if is_stored(folder / OPTIONS_FOLDER, "fwd"):
        print(f"\n{readme_options(folder / OPTIONS_FOLDER)}", end="")
    if is_stored(folder / DECODE_FOLDER, DECODE):
        print(f"\n{readme_decode(folder / DECODE_FOLDER)}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
