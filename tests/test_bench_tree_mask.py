"""benchmarks/tree_mask.py without a GPU: its trees, its calls and its table."""

from __future__ import annotations

import functools

import pytest
import tree_mask as bench

from tl_attention.testing.timer import Timing

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")


def test_rows_are_shown_and_stored(monkeypatch, tmp_path, capsys):
    timed = {"causal": 1.0, "tree": 1.5}
    monkeypatch.setattr(bench, "is_hopper", lambda device: True)
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench, "SIZES", [(2, 16, 40)])
    monkeypatch.setattr(bench, "calls_of", functools.partial(bench.calls_of, device="cpu"))
    monkeypatch.setattr(
        bench.timer,
        "time_interleaved",
        lambda calls, *_, **__: {name: Timing((timed[name],), 1, "graph") for name in calls},
    )
    out = tmp_path / "rows.jsonl"
    assert bench.main(["--out", str(out)]) == 0
    assert "1.500" in capsys.readouterr().out and len(out.read_text().splitlines()) == 1


def test_trees_have_parents_before_children():
    for row in bench.parents(5, 64).tolist():
        assert all(-1 <= parent < node for node, parent in enumerate(row))


def test_wrong_results_end_the_run():
    call = bench.calls_of(1, 16, 40, device="cpu")["tree"]
    wrong = functools.partial(
        lambda *x, **y: [2 * z for z in call.func(*x, **y)], *call.args, **call.keywords
    )
    with pytest.raises(ArithmeticError):
        bench.error_of(wrong)
