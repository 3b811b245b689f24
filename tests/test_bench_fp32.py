"""Rows of fp32 without a GPU: the command, errors beside speeds, and the page."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tl_attention.testing import timer
from tl_attention.testing.shapes import Shape

pytest.importorskip("rich", reason="the benchmark needs rich")
import fp32
import library
import rows as row_files
import run
import tables
from test_bench import gpu_stub  # noqa: F401

SHAPE = "1,2,2,48,48,32,32,causal"


def off(shape: Shape, _: object) -> library.Attend:
    """Attention whose results are 1 % too large."""
    attend = fp32.sdpa(fp32.SDPBackend.MATH, heads_first=True)(shape, None)
    return lambda *qkv: (1.01 * attend(*qkv)[0], None)


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bench_fp32_shows_errors_beside_speeds(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(timer, "on_capture_stream", contextlib.nullcontext)
    wrong = library.Provider({"options": off}, lambda _: "torch", layout="bhsd")
    monkeypatch.setitem(fp32.PROVIDERS, "flex-ieee", wrong)
    names = ["tl_attention", "high", "math", "flex-ieee"]
    argv = ["--set", "fp32", "--pass", direction, "--shapes", SHAPE, "--providers", *names]
    assert run.main([*argv, "--out", str(tmp_path), "--rounds", "3"]) == 0
    assert "to build: ['" + direction + "', 'float32-high']" in capsys.readouterr().out
    rows, header = row_files.read(tmp_path / f"{direction}_fp32.jsonl")
    by_name = {row["provider"]: row for row in rows}
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "wrong"]
    assert "its rms error is 1.0e-02 of the values" in by_name["flex-ieee"]["reason"]
    for name in names[:3]:
        assert 0 < by_name[name]["rms_error"] < 1e-6, "CPU tensors run the reference in fp32"
    assert header["dtype"] == by_name["high"]["dtype"] == "fp32"
    assert "gbps" not in by_name["math"] and by_name["tl_attention"]["ratios"]["math"] == [3.0] * 3
    page = (tmp_path / "performance.md").read_text()
    title = "Forward" if direction == "fwd" else "Backward"
    assert f"### {title} in fp32" in page
    assert "| problem | highest | high | math | flex ieee | highest / efficient | high / efficient |" in page
    assert "3.00x (3.00–3.00, 1 rows)" in page and "WRONG" in page


def test_bench_fp32_peers_say_what_they_cannot() -> None:
    needs = None
    large = Shape.parse("1,32,32,8192,8192,64,64,full")
    with pytest.raises(library.Unsupported, match="left out above 4096 keys, as it takes too long"):
        fp32.sdpa(fp32.SDPBackend.MATH, heads_first=True)(large, needs)
    with pytest.raises(library.Unsupported, match="its causal mask is top-left"):
        fp32.sdpa(fp32.SDPBackend.MATH, heads_first=True)(Shape.parse("1,1,1,8,9,64,64,causal"), needs)


def test_bench_fp32_nan_is_wrong() -> None:
    x = torch.ones(4, 4)
    found = fp32.judged([x], [x.double()], "", finite=False, allowed=1e-4)
    assert (found["status"], found["reason"]) == ("wrong", "it has NaN or inf")
    found = fp32.judged([x * torch.nan], [x.double()], "when timed, ", finite=False, allowed=1e-4)
    assert found["rms_error"] is None and found["reason"] == "when timed, it has NaN or inf"


@pytest.mark.parametrize(
    "argv",
    [
        ["--deterministic", "--pass", "bwd"],
        ["--providers", "fa3"],
        ["--dtype", "fp16"],
        ["--shapes", "1,2,2,64,64,64,causal,window=32"],
    ],
)
def test_bench_fp32_bad_arguments_end_with_a_message(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run.parse_args(["--set", "fp32", *argv])
    assert "expected" in capsys.readouterr().err


def test_bench_fp32_has_no_column_in_the_table_of_means() -> None:
    assert tables.HEADINGS.keys() == set(row_files.SETS)
