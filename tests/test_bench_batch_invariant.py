"""benchmarks/batch_invariant.py without a GPU: its shapes, its calls and its table."""

from __future__ import annotations

import functools

import batch_invariant as bench
import pytest
import torch

from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.shapes import chosen_shapes
from tl_attention.testing.timer import Timing


def test_rows_are_shown_and_stored(monkeypatch, tmp_path, capsys):
    timed = {"plain": 1.0, "batch_invariant": 2.0}
    monkeypatch.setattr(bench, "is_hopper", lambda device: True)
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench, "make_inputs", functools.partial(make_inputs, device="cpu"))
    monkeypatch.setattr(bench, "FORWARDS", ["2,2,2,8,8,64,causal"])
    monkeypatch.setattr(bench, "DECODES", [])
    monkeypatch.setattr(
        bench.timer,
        "time_interleaved",
        lambda calls, *_, **__: {name: Timing((timed[name],), 1, "graph") for name in calls},
    )
    out = tmp_path / "rows.jsonl"
    assert bench.main(["--out", str(out)]) == 0
    assert "( 0.50)" in capsys.readouterr().out and len(out.read_text().splitlines()) == 1


def test_shapes_have_the_columns_of_the_papers():
    shapes = list(chosen_shapes(bench.FORWARDS).values())
    assert all(x.heads_q * x.head_dim == 2048 and x.batch * x.seqlen_q == 16384 for x in shapes[:24])


def test_without_fa3_there_is_no_row_of_it():
    assert bench.fa3_function("no_such_function") is None


@pytest.mark.gpu
def test_calls_check_their_bits():
    q, k, v = (torch.randn(2, 70, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert {"plain", "batch_invariant"} <= bench.forward_calls(q, k, v, True).keys()
    assert {"plain", "batch_invariant"} <= bench.decode_calls(2, 4, 2, 300).keys()
