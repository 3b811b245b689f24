"""Rows with options without a GPU: words, lengths, pairs, calls, checks and the page."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_attention.testing import counts, shapes, timer
from tl_attention.testing.shapes import Shape, ShapeOptions

pytest.importorskip("rich", reason="the benchmark needs rich")
import fwd_bwd
import library
import options as option_rows
import peers
import performance
import rows as row_files
import tables
from libraries import ours
from providers import PROVIDERS
from test_bench_report import fake_row, store

sizes = st.integers(1, 70)
options = st.builds(
    ShapeOptions,
    window=st.none() | st.integers(0, 80),
    softcap=st.sampled_from([0.0, 50.0, 12.5]),
    alibi=st.booleans(),
    sink=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]),
    varlen=st.booleans(),
)
problem_shapes = st.builds(
    lambda batch, heads_kv, group, *rest: Shape(batch, heads_kv * group, heads_kv, *rest),
    *(
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 4),
        sizes,
        sizes,
        sizes,
        sizes,
        st.booleans(),
        options,
    ),
)


def sees(shape: Shape, query: int, key: int) -> bool:
    left, right = (math.inf if bound < 0 else bound for bound in shape.window_size)
    beyond = key - (query + shape.seqlen_k - shape.seqlen_q)
    return -left <= beyond <= (0 if shape.causal else right)


@given(problem_shapes, st.integers(1, 40), st.integers(1, 40))
def test_bench_pairs_and_blocks_are_those_of_the_window(shape: Shape, block_M: int, block_N: int) -> None:
    seen = [(i, j) for i in range(shape.seqlen_q) for j in range(shape.seqlen_k) if sees(shape, i, j)]
    assert counts.visible_pairs(shape) == shape.batch * len(seen)
    blocks = {(i // block_M, j // block_N) for i, j in seen}
    assert counts.visible_blocks(shape, block_M, block_N) == shape.batch * len(blocks)


@given(problem_shapes)
def test_bench_shape_with_options_round_trip(shape: Shape) -> None:
    assert Shape.parse(str(shape)) == shape
    assert str(shape.plain) == ",".join(str(shape).split(",")[:8])
    assert bool(shape.options) == (shape != shape.plain)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,2,8,8,64,causal,fast", "expected options of window=.., .*ragged, function=.., got 'fast'"),
        ("1,2,2,8,8,64,causal,window", "got 'window'"),
        ("1,2,2,8,8,64,causal,window=-1", "got 'window=-1'"),
        ("1,2,2,8,8,64,causal,sink=1", "got 'sink=1'"),
        ("1,2,2,8,9,64,causal,uneven", "uneven lengths with Sq equal to Sk, got 8 and 9"),
        ("1,4,2,8,8,64,causal,packed", "packed with q, k and v of one size"),
        ("1,2,2,8,8,64,sink", "mask causal or full, got 'sink'"),
    ],
)
def test_bench_option_errors_say_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shape.parse(text)


@given(st.integers(1, 40), st.integers(1, 3000))
def test_bench_uneven_lengths_are_fixed_and_fill_the_batch(batch: int, seqlen: int) -> None:
    shape = Shape.parse(f"{batch},1,1,{seqlen},{seqlen},64,causal,uneven")
    lengths = [q for q, k in shapes.sequences(shape) if q == k]
    assert (len(lengths), sum(lengths), min(lengths) > 0) == (batch, batch * seqlen, True)
    assert counts.visible_pairs(shape) == sum(n * (n + 1) // 2 for n in lengths)


def test_bench_option_rows_leave_the_share_of_blocks_that_they_should() -> None:
    rows = shapes.chosen_shapes(["option-*"])
    assert len(rows) == 14
    shares = {name: counts.share_of_blocks(shape) for name, shape in rows.items()}
    # 9 blocks of 128 keys a block of 128 queries, but fewer for the first 8, of the 128 x 129 / 2 of causal 16384
    assert shares["option-window-1k"] == (9 * 128 - 36) / (128 * 129 / 2)
    left = {"option-window-4k", "option-window-both", "option-documents-16k", "option-documents-64k"}
    left |= {"option-window-1k", "option-gemma2", "option-gpt-oss"}
    assert {name for name, share in shares.items() if share != 1} == left
    lengths = [seqlen for seqlen, _ in shapes.sequences(rows["option-documents-16k"])]
    assert lengths[:4] == [571, 708, 1378, 622], "the same on every machine"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("make_inputs", "make_dout"):
        monkeypatch.setattr(fwd_bwd, name, partial(getattr(fwd_bwd, name), device="cpu"))
    monkeypatch.setattr(timer, "rotation", lambda nbytes: 2)
    monkeypatch.setattr(timer, "on_capture_stream", contextlib.nullcontext)


SMALL = [
    "2,4,2,40,40,32,16,causal,window=9",
    "2,4,2,30,50,32,32,full,window=9",
    "2,4,2,30,50,32,32,full,varlen",
    "2,4,2,40,40,32,32,causal,softcap=20",
    "2,4,2,40,40,32,32,full,alibi",
    "2,4,2,40,40,32,32,causal,window=9,sink",
    "2,4,2,256,256,32,32,causal,dropout=0.1",
    "3,4,2,24,24,32,32,causal,varlen",
    "5,4,2,24,24,32,32,causal,window=9,softcap=20,alibi,sink,dropout=0.1,uneven",
    "2,4,4,40,40,32,32,causal,packed",
    "5,4,4,24,24,32,32,full,uneven,packed",
]


def attempt(name: str, shape: Shape, direction: str) -> tuple[row_files.Row, library.Result]:
    """The checked row of a provider, and its result."""
    copies = fwd_bwd.make_copies(shape, torch.bfloat16, direction)
    ready, (inputs, _) = library.prepare(fwd_bwd.provider_of(name, shape), shape, direction, copies)
    result = ready.launch(*inputs)
    return fwd_bwd.verify(name, shape, direction, result, copies[0]), result


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("name", ["tl_attention", "plain"])
def test_bench_ours_is_right_with_options(name: str, shape: str, direction: str) -> None:
    shape = Shape.parse(shape)
    found, result = attempt(name, shape, direction)
    assert found["correct"], found["reason"]
    if direction == "bwd":
        assert len(result) == 3 + (shape.options.sink and name == "tl_attention")
        packed = {x.untyped_storage().data_ptr() for x in result}
        assert (len(packed) == 1) == (shape.options.packed and name == "tl_attention")


def without(option: str) -> Callable:
    """Our options pass, which leaves an option out."""

    def attend_with_options(shape: Shape, needs: option_rows.Tensors) -> library.Attend:
        fewer = ShapeOptions.parse([word for word in shape.options.words if not word.startswith(option)])
        return ours.attend_with_options(replace(shape, options=fewer), needs)

    return attend_with_options


def as_one_sequence(shape: Shape, needs: option_rows.Tensors) -> library.Attend:
    """Our options pass with all sequences as one: a sequence reads the one before."""
    ends = needs.cu_seqlens[0][[0, -1]]
    one = {"cu_seqlens": (ends, ends), "max_seqlens": (int(ends[1]),) * 2}
    return ours.attend_with_options(shape, replace(needs, **one))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("option", ["window", "softcap", "alibi", "sink", "dropout", "varlen"])
def test_bench_check_sees_that_an_option_is_left_out(
    option: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"window": "=9", "softcap": "=20", "dropout": "=0.1"}.get(option, "")
    shape = Shape.parse(f"3,4,2,40,40,32,32,causal,{option}{value}")
    changed = as_one_sequence if option == "varlen" else without(option)
    stub = replace(ours.PROVIDER, passes={"options": changed})
    monkeypatch.setitem(PROVIDERS, "tl_attention", stub)
    if (option, direction) == ("sink", "bwd"):
        with pytest.raises(RuntimeError, match="to not have been used"):
            attempt("tl_attention", shape, direction)
        return
    found, _ = attempt("tl_attention", shape, direction)
    assert found["status"] == "wrong"


@pytest.mark.usefixtures("on_cpu")
def test_bench_options_have_no_deterministic_rows() -> None:
    with pytest.raises(library.Unsupported, match="deterministic"):
        attempt("tl_attention", Shape.parse(SMALL[0]), "bwd_det")


def test_bench_packed_inputs_are_slices_of_one_tensor(on_cpu: None) -> None:
    ((q, k, v), _) = fwd_bwd.make_copies(Shape.parse("2,3,3,5,5,8,8,full,packed"), torch.bfloat16, "fwd")
    qkv = option_rows.packed_qkv(q, k, v)
    assert all(
        x.data_ptr() == y.data_ptr() and x.equal(y) for x, y in zip(qkv.unbind(2), (q, k, v), strict=True)
    )


def option_run(direction: str) -> list[row_files.Row]:
    window, dropout = "option-window-1k", "option-dropout"

    def ours(shape: str, **ratios: float) -> row_files.Row:
        quartiles = {name: [x] * 3 for name, x in ratios.items()}
        return fake_row("tl_attention", shape, 1.0, direction, ratios=quartiles)

    no_dropout = {"status": "skipped", "correct": None, "reason": "no dropout"}
    return [
        ours(window, plain=6.0, fa4=1.1),
        fake_row("plain", window, 6.0, direction),
        fake_row("fa4", window, 1.1, direction),
        ours(dropout, plain=0.8),
        fake_row("plain", dropout, 0.8, direction),
        fake_row("fa4", dropout, None, direction, **no_dropout),
        fake_row("tl_attention", "option-gemma2", None, direction),
        fake_row("plain", "option-gemma2", 1.0, direction),
    ]


def test_bench_page_shows_what_options_cost(tmp_path: Path) -> None:
    for direction in ("fwd", "bwd"):
        store(tmp_path, option_run(direction), "options")
    text = performance.section(tmp_path, tmp_path / "performance.md")
    assert (
        "| problem | share | forward | backward | forward / share | backward / share | target |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| B1 H16 S16384 d128 causal window 1023 | 0.135 | 0.17 | 0.17 | 1.23 | 1.23 | 1.15 |\n"
        "| B2 H16 S4096 d128 causal dropout 0.1 | 1.000 | 1.25 | 1.25 | 1.25 | 1.25 | 1.35 |\n"
        "| B1 H16/8 S8192 d256 causal window 4095 softcap 50 | 0.762 | – | – | – | – | – |\n"
    ) in text
    above = "option-window-1k forward 1.23 (target 1.15); option-window-1k backward 1.23 (target 1.15)."
    assert f"Above the target: {above}" in text
    assert "### Forward with options" in text
    assert "| problem | tl_attention | fa4 | ms | error |" in text, "plain is no peer"
    assert "1.10x fa4 (faster in 1 of 1 rows)" in text
    assert "fa4 skipped: no dropout (B2 H16 S4096 d128 causal dropout 0.1)" in text
    assert tables.OPTIONS_CONVENTION in text
    assert "plain" not in tables.line(option_run("fwd")[:3])


def test_bench_rows_of_options_have_no_score_of_the_plain_problem() -> None:
    row = option_run("fwd")[0]
    table = {tuple(row[key] for key in peers.PEER_PROBLEM): {"cudnn": 1.0, "fa4": 1.0}}
    peers.judge([row], table)
    assert (row["score"], row["vs_best"]) == (None, 1.1)
