"""Rows of the benchmark, in memory and as files.

A row is a dict: one provider on one problem. `status` is ok, wrong, skipped (the library cannot run the problem) or failed;
`reason` says why it is not ok. Only a row that is ok has a speed.

A file is PASS.jsonl, or PASS_SET.jsonl. Its first line has what all rows share: environment, dtype, libraries. Each other line
is a problem: its shape and, by provider, the measured values. Values that follow from these are computed at reading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tl_attention.problem.attn_problem import DECODE
from tl_attention.testing import counts
from tl_attention.testing.shapes import DIRECTIONS, Shape

Row = dict[str, Any]
OURS = "tl_attention"
PLAIN = "plain"  # ours without the options of a row
HIGH = "high"  # ours in fp32 at the precision high; OURS is highest
OPTION = "option"  # our option instead of a function
FP32 = "fp32"  # dtype and set of fp32 tensors
FLEX = "flex"  # set of scores and masks as functions
SETS = ("main", "more", "options", FP32, FLEX)
TWINS = (PLAIN, HIGH, OPTION)  # ours, which are no peers
DIGITS = 4  # significant digits in files
MEASURED = ("ms", "tflops", "correct", "max_err_ratio")  # None in a row where they are unknown
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
STORED = (
    *(
        "status",
        "reason",
        "max_err_ratio",
        "mean_errors",
        "rms_error",
        "seen",
        "lse_err_ratio",
        "ms",
        "p25",
        "p75",
        "timer",
        "launches",
        "rounds",
    ),
    *("eager_ms", "host_us", "ratios", "score", "score_over", "score_over_fa4", "kernels"),
)
# Values that a file leaves out
USUAL = {"status": "ok", "timer": "graph", "l2": "cold"}


def file_name(direction: str, set_name: str = "main") -> str:
    return f"{direction}.jsonl" if set_name == "main" else f"{direction}_{set_name}.jsonl"


def sizes_of(shape: Shape) -> Row:
    """The part of a row that follows from its problem."""
    row: Row = {key: getattr(shape, key) for key in PROBLEM if key not in ("pass", "dtype")}
    row["problem"] = str(shape)
    if shape.options:
        row |= {"options": shape.options.words, "share": counts.share_of_blocks(shape)}
    return row


def speeds_of(shape: Shape, direction: str, ms: float, dtype: str = "bf16") -> Row:
    """The part of a row that follows from its problem and its time; in fp32 without bytes, which counts.py counts for two per element."""
    row = {"tflops": counts.flops(shape, direction) / ms / 1e9}
    if dtype == FP32:
        return row
    row |= {
        "gbps": counts.traffic(shape, direction) / ms / 1e6,
        "intensity": counts.intensity(shape, direction),
    }
    return row | ({"us": 1000 * ms} if direction == DECODE else {})


def shares_of(row: Row, environment: dict[str, str]) -> Row:
    """The part of a row that follows from its speed and the rates of cuBLAS and of a copy in the same run."""
    rates = {"pct_cublas": ("cuBLAS 8192³ bf16", "tflops"), "pct_copy": ("copy", "gbps")}
    return {
        key: 100 * row[speed] / float(environment[rate].split()[0])
        for key, (rate, speed) in rates.items()
        if rate in environment and speed in row
    }


def write_header(file: TextIO, header: Row) -> None:
    """The first line: pass, set, dtype, gpu, commit, environment, providers (name -> title, library, layout)."""
    file.write(json.dumps(header, ensure_ascii=False) + "\n")
    file.flush()


def write_problem(file: TextIO, rows: Sequence[Row], commit: str | None = None) -> None:
    """The line of a problem, flushed, so that an interrupted run keeps it.

    commit: that of the header; a line of another one says so. None: they are the same.
    """
    line: Row = {key: rows[0][key] for key in ("shape", "problem", "l2") if rows[0][key] != USUAL.get(key)}
    if commit is not None and rows[0]["commit"] != commit:
        line["commit"] = rows[0]["commit"]
    line["rows"] = {row["provider"]: _stored(row) for row in rows}
    file.write(json.dumps(line) + "\n")
    file.flush()


def _stored(row: Row) -> Row:
    return {
        key: _short(row[key])
        for key in STORED
        if row.get(key) is not None and row[key] != {} and row[key] != USUAL.get(key)
    }


def _short(value: Any) -> Any:
    """Numbers with DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: _short(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_short(x) for x in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write(path: Path, rows: Sequence[Row], header: Row) -> None:
    """A file anew, from the rows and the header of `read`."""
    with path.open("w") as file:
        write_header(file, header)
        for group in by_problem(rows).values():
            write_problem(file, list(group.values()), header["commit"])


def add(path: Path, new: Path) -> None:
    """Move the rows of another run into a file: problems that it lacks, and libraries that a problem of it lacks.

    The rows of a problem stay, ours and those of libraries that both runs have. Our ratio to an added library is that of the other
    run.
    """
    (rows, header), (new_rows, new_header) = read(path), read(new)
    groups = by_problem(rows)
    own_run = " (in a run of its own, commit "
    for problem, added in by_problem(new_rows).items():
        if problem not in groups:
            groups[problem] = added
            continue
        for name in [name for name in added if name not in (OURS, PLAIN, *groups[problem])]:
            groups[problem][name] = added[name]
            ratio = added.get(OURS, {}).get("ratios", {}).get(name)
            if ratio and OURS in groups[problem]:
                groups[problem][OURS].setdefault("ratios", {})[name] = ratio
    for name, facts in new_header["providers"].items():
        if name not in header["providers"]:
            library = facts["library"]
            if own_run not in library:  # the other file may have it from a third one
                library += f"{own_run}{new_header['commit']})"
            header["providers"][name] = facts | {"library": library}
    write(path, [row for group in groups.values() for row in group.values()], header)
    new.unlink()


def replace(path: Path, new: Path) -> None:
    """Move the rows of another run into a file, in place of those of the same problems. They keep their commit."""
    (rows, header), (new_rows, new_header) = read(path), read(new)
    groups = by_problem(rows) | by_problem(new_rows)
    header["providers"] = new_header["providers"] | header["providers"]
    write(path, [row for group in groups.values() for row in group.values()], header)
    new.unlink()


def read(path: Path) -> tuple[list[Row], Row]:
    """The rows of a file, and its header."""
    header, *lines = map(json.loads, path.read_text().splitlines())
    return [row for line in lines for row in _read_problem(line, header)], header


def _read_problem(line: Row, header: Row) -> Iterator[Row]:
    shape, direction = Shape.parse(line["problem"]), header["pass"]
    shared = {"shape": line["shape"], "l2": line.get("l2", USUAL["l2"])}
    shared |= {key: header[key] for key in ("pass", "dtype", "gpu")} | sizes_of(shape)
    shared["commit"] = line.get("commit", header["commit"])
    for name, stored in line["rows"].items():
        row: Row = {"provider": name} | header["providers"][name] | shared | dict.fromkeys(MEASURED)
        row |= {"status": "ok", "timer": "graph", "reason": None} | stored
        if row["status"] == "ok":
            solved = shape.plain if name == PLAIN else shape
            row |= {"correct": True} | speeds_of(solved, direction, row["ms"], row["dtype"])
            row["tflops"] *= row.get("seen", 1.0)
            row |= shares_of(row, header["environment"])
            ratios = peer_ratios(row)
            if ratios and row.get("score") is None:
                row["vs_best"] = min(ratios.values())
        elif row["status"] == "wrong":
            row["correct"] = False
        yield row


def stored_files(folder: Path) -> dict[tuple[str, str], Path]:
    """(pass, set) -> file, of the stored runs of a folder."""
    every = ((direction, name) for direction in (*DIRECTIONS, DECODE) for name in SETS)
    paths = {key: folder / file_name(*key) for key in every}
    return {key: path for key, path in paths.items() if path.exists()}


def problem_key(row: Row) -> tuple:
    return (*(row[key] for key in PROBLEM), *row.get("options", ()))


def by_problem(rows: Iterable[Row]) -> dict[tuple, dict[str, Row]]:
    """Problem -> provider -> row, in the order of the rows."""
    grouped: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(problem_key(row), {})[row["provider"]] = row
    return grouped


def compared(rows: Iterable[Row]) -> list[str]:
    """The providers that ran anything, without those of TWINS."""
    ran = dict.fromkeys(row["provider"] for row in rows if row["status"] != "skipped")
    return [name for name in ran if name not in TWINS]


def describe(row: Row) -> str:
    """B4 H16 S4096 d128 causal; H32/8, S512/8192, d192/128 where query and key differ; options, and L2 warm."""

    def both(a: int, b: int) -> str:
        return str(a) if a == b else f"{a}/{b}"

    sizes = (
        f"B{row['batch']} H{both(row['heads_q'], row['heads_kv'])} S{both(row['seqlen_q'], row['seqlen_k'])}"
    )
    warm = ", L2 warm" if row.get("l2") == "warm" else ""
    words = " ".join([row["mask"], *(word.replace("=", " ") for word in row.get("options", ()))])
    return f"{sizes} d{both(row['head_dim'], row['head_dim_v'])} {words}{warm}"


def unit(row: Row) -> str:
    """The unit of speed of its pass."""
    return "GB/s" if row["pass"] == DECODE else "TFLOPS"


def speed(row: Row) -> float:
    """The speed of a row that is ok, in its unit."""
    return row["gbps" if row["pass"] == DECODE else "tflops"]


def best(group: dict[str, Row]) -> float:
    """The highest speed on a problem, NaN if there is none."""
    speeds = (speed(row) for name, row in group.items() if row["status"] == "ok" and name != PLAIN)
    return max(speeds, default=math.nan)


def ratio_over(row: Row, name: str) -> float | None:
    """Our speed over that of a provider: the median of the ratios within rounds."""
    quartiles = row.get("ratios", {}).get(name)
    return quartiles and quartiles[1]


def peer_ratios(row: Row) -> dict[str, float]:
    """Peer -> our speed over its."""
    return {name: quartiles[1] for name, quartiles in row.get("ratios", {}).items() if name not in TWINS}


def error_over(group: dict[str, Row], name: str) -> float | None:
    """Our mean error over that of a provider, the largest of out and gradients; None where it is unknown.

    Both are errors of the same problem, seed and checked heads against the reference, see numeric.mean_error.
    """
    ours, other = (group.get(provider, {}).get("mean_errors") or {} for provider in (OURS, name))
    ratios = [error / other[x] for x, error in ours.items() if error is not None and other.get(x)]
    return max(ratios, default=None)


def cost(row: Row) -> float | None:
    """Our time over that without the options; None where one of them has no speed."""
    ratio = ratio_over(row, PLAIN)
    return ratio and 1 / ratio
