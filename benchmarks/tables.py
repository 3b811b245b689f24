"""Tables and lines of rows, for the terminal and for Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import rows as row_files
from peers import MEASURES, REFERENCES
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
from row_kernels import mark
from rows import (
    OURS,
    PLAIN,
    Row,
    best,
    compared,
    describe,
    error_over,
    peer_ratios,
    ratio_over,
    speed,
    unit,
)

from tl_attention.problem.attn_problem import DECODE

SLOWEST = 10  # rows that the terminal lists
TITLES = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_det": "backward, deterministic",
    "fwd_bwd": "forward and backward",
    "fwd_bwd_det": "forward and backward, deterministic",
    DECODE: "decoding",
}
HEADINGS = {
    "main": "{}",
    "more": "{}: other sizes",
    "options": "{} with options",
    "fp32": "{} in fp32",
    "flex": "{} with functions",
}
WIDTHS = {
    "fwd": "head_dim + head_dim_v",
    "bwd": "3 head_dim + 2 head_dim_v",
    "fwd_bwd": "4 head_dim + 3 head_dim_v",
}
METHOD = (
    "Pairs are visible pairs: causal counts those that the mask leaves, s(s+1)/2 per head where both lengths are s.",
    "A time is the median of CUDA-graph replays, with the libraries interleaved; a ratio is the median of the ratios within rounds.",
    "The time of a backward is that of everything it launches.",
    "Each library gets contiguous tensors in its own layout. A launch finds none of its inputs in L2, unless the row says L2 warm.",
    "A speed is shown only where the output of the last timed call is correct.",
)
DECODE_CONVENTION = (
    "Speeds are in GB/s: keys and values of all sequences, q and out, 2 bytes per element and each counted once, over the median "
    "time of a launch in CUDA-graph replays. `% copy` is the share of the rate of a copy in the same run (bytes read and written). "
    "S is queries / keys of a sequence, causal is bottom-right. page 16: pages of 16 keys, in random order. ragged: lengths are "
    "log-uniform from S/16 to S. A launch finds none of its cache in L2. A speed is shown only where the output of the last "
    "timed call is correct."
)
OPTIONS_CONVENTION = (
    "With options, the pairs are those left by the window and the lengths. varlen: packed sequences of one length. uneven: packed "
    "sequences with log-normal lengths, always the same; S is their mean. packed: q, k and v are slices of one tensor, as are "
    "their gradients. Libraries are called by their public functions, and a backward is the work of torch.autograd.grad, "
    "including the gradient of a sink. Where a library draws its own dropout mask, its results are checked on average: regressed "
    "on those without dropout."
)
Columns = Mapping[str, tuple[str, str]]  # of our row: column -> key and format
DETAILS: Columns = {
    "ms": ("ms", ".3f"),
    "error": ("max_err_ratio", ".2f"),
    "error by fa2": ("error_over_fa2", ".2f"),
    "score": ("score", ".2f"),
    "by fa4": ("score_over_fa4", ".2f"),
}
DECODE_DETAILS: Columns = {
    "µs": ("us", ".1f"),
    "% copy": ("pct_copy", ".1f"),
    "error": ("max_err_ratio", ".2f"),
    "error by fa2": ("error_over_fa2", ".2f"),
}


def definition(direction: str) -> str:
    """The definition of a speed in a pass; but for decoding METHOD has the rest."""
    if direction == DECODE:
        return DECODE_CONVENTION
    return f"FLOPs: 2 x pairs x ({WIDTHS[direction.removesuffix('_det')]}) x batch x query heads."


def convention(direction: str) -> str:
    """The definition of a speed in a pass, and how it is measured."""
    return " ".join([definition(direction), *(() if direction == DECODE else METHOD)])


def details_of(rows: Sequence[Row]) -> Columns:
    return DECODE_DETAILS if rows[0]["pass"] == DECODE else DETAILS


def show_environment(console: Console, facts: dict[str, str]) -> None:
    for key, value in facts.items():
        console.print(f"{key}: {value}", highlight=False, markup=False)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def cell(row: Row | None, fastest: float, bold: tuple[str, str]) -> str:
    """The speed, the fastest in bold; or a dash, WRONG, FAILED."""
    if row is None or row["status"] == "skipped":
        return "–"
    if row["status"] != "ok":
        return row["status"].upper()
    return f"{speed(row):.0f}".join(bold if speed(row) == fastest else ("", ""))


def line(rows: list[Row]) -> str:
    """One problem, printed while the others run."""
    rows = [row for row in rows if row["provider"] != PLAIN]
    fastest = best({row["provider"]: row for row in rows})
    speeds = (
        f"{row['title']} {cell(row, fastest, ('[bold]', '[/]'))}"
        for row in rows
        if row["status"] != "skipped"
    )
    return f"{describe(rows[0])}: {', '.join(speeds)}"


def heading(direction: str, set_name: str) -> str:
    return HEADINGS[set_name].format(TITLES[direction].capitalize())


def parts_of(name: str, rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """(name, rows) of a run; a decode has parts, as one query per sequence and several are different problems."""
    if rows[0]["pass"] != DECODE:
        return [(name, rows)]
    parts: dict[str, list[Row]] = {}
    for row in rows:
        queries = "1 query" if row["seqlen_q"] == 1 else "several queries"
        layout = ", pages or ragged lengths" if row.get("options") else ""
        parts.setdefault(f"{name}, {queries}{layout}", []).append(row)
    return sorted(parts.items(), key=lambda part: len(part[0]))


def geomeans(rows: Iterable[Row]) -> dict[str, tuple[float, int, int]]:
    """Provider -> (geometric mean of our speed over its, rows where we are faster, rows where both ran)."""
    ours = [row for row in rows if row["provider"] == OURS and row["status"] == "ok"]
    ratios = {
        name: [ratio for row in ours if (ratio := ratio_over(row, name))]
        for name in compared(rows)
        if name != OURS
    }
    return {name: mean_and_wins(values) for name, values in ratios.items() if values}


def mean_and_wins(ratios: Sequence[float]) -> tuple[float, int, int]:
    """Geometric mean, how many exceed 1, how many there are."""
    return statistics.geometric_mean(ratios), sum(ratio > 1 for ratio in ratios), len(ratios)


def over_best(rows: Iterable[Row]) -> list[float]:
    """Our speed over that of the fastest peer of the run, for each problem with one."""
    ours = (row for row in rows if row["provider"] == OURS and row["status"] == "ok")
    return [min(ratios.values()) for row in ours if (ratios := peer_ratios(row))]


def group_of(row: Row) -> str:
    """The first word of the name of its shape, two words of a decode; "unnamed" for a shape given by its sizes."""
    words = 2 if row["pass"] == DECODE else 1
    return "unnamed" if "," in row["shape"] else "-".join(row["shape"].split("-")[:words])


def judged(rows: Iterable[Row]) -> list[tuple[float, str, Row]]:
    """(value, its key in MEASURES, row) of our judged rows."""
    return [
        (row[key], key, row)
        for row in rows
        if row["provider"] == OURS
        for key in MEASURES
        if row.get(key) is not None
    ]


def summary(rows: Iterable[Row]) -> list[str]:
    """Geometric mean and worst row of each group of shapes and measure; then the number of rows without a speed."""
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


def slowest(rows: Iterable[Row]) -> list[str]:
    """The SLOWEST rows of ours, the worst first."""
    worst = sorted(judged(rows), key=lambda found: found[0])[:SLOWEST]
    return [f"{value:.2f} {MEASURES[key]}, {row['shape']} ({describe(row)})" for value, key, row in worst]


def notes(rows: Iterable[Row]) -> list[str]:
    """Reasons why rows have no speed, or none from a graph; each once, with the problems if they are few."""
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


def _order(group: dict[str, Row]) -> tuple:
    """Sort key of a problem: decodes by options and sizes, since they run by bytes; others keep their order."""
    row = next(iter(group.values()))
    if row["pass"] != DECODE:
        return ()
    sizes = (row[key] for key in ("seqlen_q", "heads_q", "heads_kv", "batch", "seqlen_k"))
    return (tuple(row.get("options", ())), *sizes)


def _grid(rows: list[Row], bold: tuple[str, str], details: Columns) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table that terminal and Markdown share."""
    names = compared(rows)
    titles = {row["provider"]: row["title"] for row in rows}
    groups = sorted(row_files.by_problem(rows).values(), key=_order)
    of_ours = [group.get(OURS, {}) | {"error_over_fa2": error_over(group, "fa2")} for group in groups]
    details = {
        column: spec
        for column, spec in details.items()
        if any(row.get(spec[0]) is not None for row in (*rows, *of_ours))
    }
    lines = []
    for group, ours in zip(groups, of_ours, strict=True):
        fastest = best(group)
        problem = describe(next(iter(group.values()))) + mark(group.get(OURS))
        speeds = [cell(group.get(name), fastest, bold) for name in names]
        lines.append([problem, *speeds, *(_number(ours, *spec) for spec in details.values())])
    return ["problem", *(titles[name] for name in names), *details], lines


def terminal(rows: list[Row]) -> Table:
    """All problems, with the geometric means at the foot."""
    header, lines = _grid(rows, ("[bold green]", "[/]"), details_of(rows))
    means = {name: f"{mean:.2f}x" for name, (mean, _, _) in geomeans(rows).items()}
    foot = ["geomean of ours over", *(means.get(name, "") for name in compared(rows))]
    result = Table(title=f"{TITLES[rows[0]['pass']]}, {unit(rows[0])}", show_footer=True)
    for i, column in enumerate(header):
        result.add_column(
            column, foot[i] if i < len(foot) else "", justify="right" if i else "left", no_wrap=i == 0
        )
    for cells in lines:
        result.add_row(*(text.replace("WRONG", "[bold red]WRONG[/]") for text in cells))
    return result


def markdown(rows: list[Row], details: Columns | None = None) -> str:
    """All problems; details: default those of the pass."""
    return markdown_table(*_grid(rows, ("**", "**"), details_of(rows) if details is None else details))


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(header: list[str], lines: Iterable[list[str]], *, texts: int = 0) -> str:
    """The first column and the last `texts` ones left-aligned, the others right-aligned."""
    rule = ["---", *["---:"] * (len(header) - 1 - texts), *["---"] * texts]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))
