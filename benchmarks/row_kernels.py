"""Kernels of our rows: a stored row has digests of their texts, so that it says whether today's kernels are those that it measured.

A digest is made of hashes of the manifest. Kernels of functions (`--set flex`) have none there, so their rows have no digests.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from rows import FP32, HIGH, OURS, PLAIN, Row

from tl_attention.compilation import cubin, manifest
from tl_attention.problem.attn_problem import DTYPES
from tl_attention.testing.shapes import Shape
from tl_attention.tuning import needs

SAME, AROUND, CHANGED, UNKNOWN = "same", "around", "changed", "unknown"
MARK = "†"  # of a row whose kernels with products changed
LEGEND = f"{MARK} measured before its kernel changed."
PASSES = {"fwd_bwd": ("fwd", "bwd"), "fwd_bwd_det": ("fwd", "bwd_det")}  # of rows that time several
PROVIDERS = (OURS, PLAIN, HIGH)  # whose rows have digests
PRECISIONS = {OURS: "float32-highest", HIGH: "float32-high"}  # rows of fp32 -> dtype of their problem


def add_digests(rows: Iterable[Row], commit: str) -> None:
    """Write the digests of the kernels that ran into our rows; none of a changed tree, whose kernels may not be those of the manifest."""
    for row in rows:
        if row["provider"] in PROVIDERS and row["status"] == "ok" and not commit.endswith("-dirty"):
            row["kernels"] = digests(row)


def state(row: Row) -> str:
    """SAME if a row measured today's kernels, AROUND if others without products, CHANGED if others with them, UNKNOWN without digests."""
    stored, today = row.get("kernels"), digests(row)
    if not stored or not today:
        return UNKNOWN
    if stored == today:
        return SAME
    return AROUND if stored[0] == today[0] else CHANGED


def mark(row: Row | None) -> str:
    """MARK behind what a table shows of a row whose products changed."""
    return MARK if row and state(row) == CHANGED else ""


def in_words(rows: Iterable[Row]) -> str:
    """Our rows with a speed that ran today's kernels: 25 of 37, 3 of them with .., 2 not known."""
    found = Counter(state(row) for row in rows if row["provider"] == OURS and row["status"] == "ok")
    total, unknown = found.total(), found[UNKNOWN]
    if unknown == total:
        return "not known"
    good, around = found[SAME] + found[AROUND], ""
    if found[AROUND]:
        around = (
            ", but for kernels without matrix products"
            if not found[SAME]
            else f", {found[AROUND]} of them but for kernels without matrix products"
        )
    return f"{good} of {total}{around}{f', {unknown} not known' if unknown else ''}"


def sentence(races: Mapping[str, Iterable[Row]]) -> str:
    """Races and how many of their rows ran today's kernels."""
    counts = "; ".join(f"{race} {in_words(rows)}" for race, rows in races.items())
    return (
        f"Rows that ran today's kernels, by the hashes of `configs/kernels.json`: {counts}. Kernels without matrix products "
        f"are such as the sums of a backward. {LEGEND}"
    )


def digests(row: Row) -> list[str] | None:
    """Digests of the kernels that a row would run today, those with products and the others; None where the manifest lacks one."""
    dtype = PRECISIONS.get(row["provider"]) if row["dtype"] == FP32 else _dtype_of(row["dtype"])
    if dtype is None:
        return None
    return _digests(row["problem"], row["provider"] == PLAIN, dtype, row["pass"], row["gpu"])


@functools.cache
def _digests(problem: str, plain: bool, dtype: str, direction: str, gpu: str) -> list[str] | None:
    shape = Shape.parse(problem)
    if shape.options.function:
        return None
    try:
        asked, passes = shape.plain if plain else shape, PASSES.get(direction, (direction,))
        kernels = [kernel for name in passes for kernel in needs.kernels_of(asked, dtype, name, gpu=gpu)]
    except ValueError:  # head dims without kernels, or no GPU of gpus.py
        return None
    texts: tuple[set[str | None], set[str | None]] = set(), set()
    for kernel in kernels:
        texts[not cubin.uses_wgmma(kernel[1])].add(_texts().get(manifest.kernel_name(*kernel)))
    return None if None in texts[0] | texts[1] else [_digest(found) for found in texts]


def _digest(texts: set[str]) -> str:
    return hashlib.sha256(" ".join(sorted(texts)).encode()).hexdigest()[:16] if texts else ""


@functools.cache
def _texts() -> dict[str, str]:
    return manifest.committed_texts()


def _dtype_of(short: str) -> str | None:
    return next((dtype.name for dtype in DTYPES.values() if dtype.short == short), None)
