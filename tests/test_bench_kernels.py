"""Rows that say whether today's kernels are those that they measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tl_attention.compilation import manifest
from tl_attention.problem.target import DEFAULT_GPU
from tl_attention.testing.shapes import Shape

pytest.importorskip("rich", reason="the benchmark needs rich")
import row_grids
import row_kernels
import rows as row_files
import tables
from rows import Row

TEXT = "4,16,16,4096,4096,128,128,causal"


def row_of(text: str = TEXT, direction: str = "bwd", **other: object) -> Row:
    """Our row of today."""
    shape = Shape.parse(text)
    row = {
        "provider": "tl_attention",
        "title": "tl_attention",
        "library": "1",
        "layout": "bshd",
        "shape": text,
    }
    row |= {
        "pass": direction,
        "dtype": "bf16",
        "gpu": DEFAULT_GPU,
        "commit": "c",
        "l2": "cold",
        "timer": "graph",
    }
    row |= row_files.sizes_of(shape) | {"status": "ok", "ms": 1.0, "ratios": {}, "tflops": 500.0} | other
    row_kernels.add_digests([row], row["commit"])
    return row


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch):
    """Change the hash of the kernels whose names have a word."""
    texts = manifest.committed_texts()

    def change_texts(word: str) -> None:
        row_kernels._digests.cache_clear()
        changed = {name: "0" * 16 if word in name else text for name, text in texts.items()}
        monkeypatch.setattr(row_kernels, "_texts", lambda: changed)

    yield change_texts
    row_kernels._digests.cache_clear()


def test_bench_rows_of_todays_kernels_have_no_mark() -> None:
    row = row_of()
    assert row_kernels.state(row) == row_kernels.SAME and not row_kernels.mark(row)
    assert row_kernels.in_words([row, row]) == "2 of 2"
    assert row_grids.cell(row) == "500"


@pytest.mark.parametrize(
    ("word", "state", "words"),
    [
        ("dq+dk+dv", row_kernels.CHANGED, "0 of 1"),
        ("delta", row_kernels.AROUND, "1 of 1, but for kernels without matrix products"),
        ("192x128", row_kernels.SAME, "1 of 1"),
    ],
)
def test_bench_rows_of_other_kernels_say_so(word: str, state: str, words: str, change) -> None:
    row = row_of()
    change(word)
    assert row_kernels.state(row) == state and row_kernels.in_words([row]) == words
    marked = row_kernels.MARK if state == row_kernels.CHANGED else ""
    assert row_grids.cell(row) == f"500{marked}"
    assert f"| B4 H16 S4096 d128 causal{marked} |" in tables.markdown([row])
    assert f"Backward {words}." in row_kernels.sentence({"Backward": [row]})


@pytest.mark.parametrize(
    "other",
    [
        {"provider": "fa3"},
        {"commit": "c-dirty"},
        {"text": "2,2,2,128,128,64,64,full,function=half", "direction": "fwd"},
        {"gpu": "H"},
        {"dtype": "fp8"},
        {"status": "wrong"},
    ],
    ids=str,
)
def test_bench_rows_without_known_kernels_have_no_digests(other: dict) -> None:
    row = row_of(**other)
    assert not row.get("kernels") and row_kernels.state(row) == row_kernels.UNKNOWN
    assert row_kernels.in_words([row]) == "not known"


def test_bench_rows_of_each_kind_have_digests_of_their_own() -> None:
    option = f"{TEXT},window=127"
    rows = [
        row_of(),
        row_of(direction="fwd"),
        row_of(direction="fwd_bwd"),
        row_of(direction="fwd_bwd_det"),
        row_of(option),
        row_of(text="8,32,8,1,8192,128,128,full", direction="decode"),
        row_of(dtype="fp32"),
        row_of(dtype="fp32", provider="high"),
    ]
    assert len({tuple(row["kernels"]) for row in rows}) == len(rows)
    assert row_of(option, provider="plain")["kernels"] == rows[0]["kernels"], "ours without the option"


def test_bench_files_keep_the_digests(tmp_path: Path) -> None:
    row, path = row_of(), tmp_path / "bwd.jsonl"
    facts = {"tl_attention": {key: row[key] for key in ("title", "library", "layout")}}
    header = {key: row[key] for key in ("pass", "dtype", "gpu", "commit")}
    row_files.write(path, [row], header | {"environment": {}, "providers": facts})
    (found,), _ = row_files.read(path)
    assert found["kernels"] == row["kernels"] and row_kernels.state(found) == row_kernels.SAME
