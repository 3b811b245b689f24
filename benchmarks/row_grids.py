"""Races as small tables: a line per kind of problem, a column per length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from row_kernels import mark
from rows import OURS, Row, by_problem, describe, peer_ratios
from tables import markdown_table


def by_length(runs: Mapping[str, Sequence[Row]]) -> str:
    """Our TFLOPS and, in brackets, our speed over the fastest library; bold where that is below 1."""
    lines: dict[str, dict[int, str]] = {}
    groups = [(title, group) for title, rows in runs.items() for group in by_problem(rows).values()]
    for title, group in groups:
        ours = group.get(OURS)
        if not ours or ours["status"] != "ok":
            continue
        lines.setdefault(f"{title}, {series_of(ours)}", {})[ours["seqlen_q"]] = cell(ours)
    lengths = sorted({length for cells in lines.values() for length in cells})
    text = "TFLOPS; in brackets our speed over the fastest of the libraries, bold where it is below 1."
    header = ["queries and keys", *map(short, lengths)]
    table = [[kind, *(cells.get(length, "–") for length in lengths)] for kind, cells in lines.items()]
    return f"{text}\n\n{markdown_table(header, table)}"


def series_of(row: Row) -> str:
    """What rows of a series share that differ in length alone: H16 d128 causal, 16k tokens."""
    kind = describe(row | {"batch": 0, "seqlen_q": 0, "seqlen_k": 0}).removeprefix("B0 ").replace(" S0", "")
    return f"{kind}, {row['batch'] * row['seqlen_q'] // 1024}k tokens"


def cell(ours: Row) -> str:
    """Speed and ratio of a row, as in 436 (1.16), and a mark if its kernels changed."""
    ratios = peer_ratios(ours)
    ratio = f" ({_bold(min(ratios.values()))})" if ratios else ""
    return f"{ours['tflops']:.0f}{ratio}{mark(ours)}"


def of_decode(rows: Sequence[Row]) -> str:
    """Our speed over the fastest library by sequences and keys, bold where it is below 1."""
    lines: dict[tuple, dict[tuple[int, int], str]] = {}
    for group in by_problem(rows).values():
        ours = group.get(OURS)
        ratios = peer_ratios(ours) if ours and ours["status"] == "ok" else {}
        if ratios:
            sizes = ours["batch"], ours["seqlen_k"]
            lines.setdefault(kind_of(ours), {})[sizes] = _bold(min(ratios.values())) + mark(ours)
    columns = sorted({sizes for cells in lines.values() for sizes in cells})
    header = ["queries, heads, layout", *(f"B{batch} {short(keys)}" for batch, keys in columns)]
    table = [
        [title_of(kind), *(cells.get(sizes, "–") for sizes in columns)]
        for kind, cells in sorted(lines.items())
    ]
    text = "Our speed over the fastest of the libraries by sequences (B) and keys, bold where it is below 1."
    return f"{text}\n\n{markdown_table(header, table)}"


def kind_of(row: Row) -> tuple:
    """Queries, layout and heads of a decode, in the order of its lines."""
    return row["seqlen_q"], tuple(row.get("options", ())), row["heads_q"], row["heads_kv"]


def title_of(kind: tuple) -> str:
    """A kind of decode in words, as in q4 H64/8 page=16."""
    queries, options, heads_q, heads_kv = kind
    return " ".join([f"q{queries} H{heads_q}/{heads_kv}", *options])


def short(length: int) -> str:
    """A length in k where it is a whole number of them."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _bold(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"
