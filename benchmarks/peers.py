"""Scores: our rows judged by a table of peers' speeds measured beforehand, or else by the peers of the same run."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from rows import OURS, PROBLEM, Row, peer_ratios

# The tables hold bf16 forwards and nondeterministic backwards
PEER_PROBLEM = tuple(name for name in PROBLEM if name != "dtype")
# A table of TFLOPS, where q, k and v have one length, number of heads and head_dim; and a table of microseconds
TFLOPS_COLUMNS = ("pass", "batch", "heads", "seqlen", "head_dim", "mask", "cudnn", "best")
MICROSECOND_COLUMNS = (*PEER_PROBLEM, "cudnn_us")
REFERENCES = ("cudnn", "fa4")  # a score goes through the first of them that the run and the table both have
MEASURES = {"score": "score", "vs_best": "vs best peer in run"}  # key of a row -> column
HELP = "CSV files of peers' TFLOPS or microseconds on this GPU, or folders of them, for scores"

Table = Mapping[tuple, Mapping[str, float]]

JUDGED = (
    "`score` is our speed over that of the best peer of a table measured beforehand, by way of a reference that both runs have: "
    "(ours / cudnn here) / (best peer / cudnn there), with fa4 where cudnn did not run. `by fa4` always goes through fa4: the "
    "difference shows how far the peers' relative speeds differ between table and run. `vs best peer in run` is our speed over "
    "that of the fastest peer of the run, where the table lacks the problem. 1.00 is level."
)


def read(paths: Iterable[Path]) -> dict[tuple, dict[str, float]]:
    """PEER_PROBLEM -> reference -> speed of the best peer over its, from CSV files or folders of them.

    Raises:
        ValueError: a file with the columns of neither table, or a folder without a CSV file.
    """
    peers = {}
    for path in paths:
        files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: expected CSV files in it, found none")
        for file in files:
            peers |= _read_file(file)
    return peers


def _read_file(path: Path) -> dict[tuple, dict[str, float]]:
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


def judge(rows: Iterable[Row], peers: Table) -> None:
    """Add the MEASURES to our rows that are ok: by the table, or else by the peers of the run."""
    for row in rows:
        if row["provider"] == OURS and row["status"] == "ok":
            row |= dict.fromkeys((*MEASURES, "score_over", "score_over_fa4")) | (
                _score(row, peers) or _vs_best(row)
            )


def _score(row: Row, peers: Table) -> Row:
    """(ours / reference in this run) / (best / reference in the table), by the first of REFERENCES that both have."""
    known = row["dtype"] == "bf16" and not row.get("options")
    table = peers.get(tuple(row[key] for key in PEER_PROBLEM), {}) if known else {}
    ratios = peer_ratios(row)
    scores = {name: ratios[name] / table[name] for name in REFERENCES if name in table and name in ratios}
    over = next(iter(scores), None)
    return {"score": scores[over], "score_over": over, "score_over_fa4": scores.get("fa4")} if over else {}


def _vs_best(row: Row) -> Row:
    ratios = peer_ratios(row)
    return {"vs_best": min(ratios.values())} if ratios else {}
