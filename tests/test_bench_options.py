"""The benchmark's rows of options without a GPU: words, lengths, pairs, calls, checks and tables."""

from __future__ import annotations

import contextlib
import json
import math
import sys
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
pytest.importorskip("matplotlib", reason="the benchmark needs matplotlib")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import options as option_rows
import providers
import report
import run

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
        ("1,2,2,8,8,64,causal,fast", "expected options of window=.., .*ragged, got 'fast'"),
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
    monkeypatch.setattr(run, "make_inputs", partial(run.make_inputs, device="cpu"))
    monkeypatch.setattr(run, "make_dout", partial(run.make_dout, device="cpu"))
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


def attempt(name: str, shape: Shape, direction: str) -> tuple[report.Row, providers.Result]:
    """What the check says of a provider, and its result."""
    copies = run.make_copies(shape, torch.bfloat16, direction)
    ready, (inputs, _) = providers.prepare(run.provider_of(name, shape), shape, direction, copies)
    result = ready.launch(*inputs)
    return run.verify(name, shape, direction, result, copies[0]), result


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


def without(name: str, attend_of: Callable) -> Callable:
    """A provider that leaves an option out."""

    def attend(shape: Shape, needs: option_rows.Tensors) -> option_rows.Attend:
        fewer = ShapeOptions.parse([word for word in shape.options.words if not word.startswith(name)])
        return attend_of(replace(shape, options=fewer), needs)

    return attend


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("option", ["window", "softcap", "alibi", "sink", "dropout", "varlen"])
def test_bench_check_sees_that_an_option_is_left_out(
    option: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"window": "=9", "softcap": "=20", "dropout": "=0.1"}.get(option, "")
    shape = Shape.parse(f"3,4,2,40,40,32,32,causal,{option}{value}")
    stub = option_rows._provider(without(option, option_rows.tl_attention), "tl_attention")
    monkeypatch.setitem(option_rows.PROVIDERS, "tl_attention", stub)
    if option == "varlen":  # a sequence reads the one before: as if all were one
        stub = option_rows._provider(as_one_sequence, "tl_attention")
        monkeypatch.setitem(option_rows.PROVIDERS, "tl_attention", stub)
    if (option, direction) == ("sink", "bwd"):
        with pytest.raises(RuntimeError, match="to not have been used"):
            attempt("tl_attention", shape, direction)
        return
    found, _ = attempt("tl_attention", shape, direction)
    assert found["status"] == "wrong"


def as_one_sequence(shape: Shape, needs: option_rows.Tensors) -> option_rows.Attend:
    ends = needs.cu_seqlens[0][[0, -1]]
    one = {"cu_seqlens": (ends, ends), "max_seqlens": (int(ends[1]),) * 2}
    return option_rows.tl_attention(shape, replace(needs, **one))


def fake_fa4(module: str, name: str) -> Callable:
    """FlashAttention 4's functions, by way of ours."""
    import tl_attention

    def attend(
        *qkv: torch.Tensor, window_size: tuple, return_lse: bool, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert module == "flash_attn.cute"
        window = tuple(-1 if bound is None else bound for bound in window_size)
        options |= {"window_size": window, "return_attn_probs": return_lse}
        return getattr(tl_attention, name)(*qkv, **options)[:2]

    return attend


def fake_varlen_attn(*given: torch.Tensor, window_size: tuple[int, int]) -> torch.Tensor:
    import tl_attention

    return tl_attention.flash_attn_varlen_func(*given, window_size=window_size)


def fake_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> tuple[torch.Tensor]:
    """Both of PyTorch's ops, which end in dropout_p and is_causal."""
    *_, dropout_p, causal = rest
    given = {"dropout_p": dropout_p, "is_causal": causal, "enable_gqa": True}
    return (torch.nn.functional.scaled_dot_product_attention(q, k, v, **given),)


CAN = {  # of SMALL, in its order
    "fa2": "nyynnnyynyy",
    "cudnn": "nnnnnnynnyn",
    "fa4": "yyyynynynyy",
    "flex": "yynyyynynyy",
}


@pytest.fixture
def fake_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(module: str, name: str) -> Callable:
        return fake_varlen_attn if name == "varlen_attn" else fake_fa4(module, name)

    ours = option_rows.import_function
    monkeypatch.setattr(
        option_rows, "import_function", lambda *at: ours(*at) if at[0] == "tl_attention" else fake(*at)
    )
    monkeypatch.setattr(option_rows, "has_flash_attn", lambda: False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.fixture
def sdpa_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("flash", "cudnn"):
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{library}_attention", fake_sdpa)


@pytest.mark.usefixtures("on_cpu", "fake_libraries")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("name", "shape", "can"),
    [(name, *row) for name, cans in CAN.items() for row in zip(SMALL, cans, strict=True)],
)
def test_bench_library_gets_its_options_or_says_why_not(
    name: str, shape: str, can: str, direction: str, request: pytest.FixtureRequest
) -> None:
    shape = Shape.parse(shape)
    if name != "flex":
        request.getfixturevalue("sdpa_on_cpu")
    elif direction == "bwd":
        pytest.skip("flex_attention has no backward on a CPU")
    torch.manual_seed(0)
    if name == "fa2" and shape.heads_q != shape.heads_kv and can == "y" and not shape.options.dropout:
        with pytest.raises(providers.Unsupported, match="no GQA"):
            attempt(name, shape, direction)
        shape = replace(shape, heads_q=shape.heads_kv)
    if can == "n":
        with pytest.raises(providers.Unsupported):
            attempt(name, shape, direction)
        return
    found, result = attempt(name, shape, direction)
    assert found["correct"], found["reason"]
    if direction == "bwd" and shape.options.packed:
        assert len({x.untyped_storage().data_ptr() for x in result}) == 1


@pytest.mark.usefixtures("on_cpu", "fake_libraries", "sdpa_on_cpu")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bench_own_dropout_masks_are_checked_on_average(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape.parse("2,4,4,256,256,32,32,causal,dropout=0.1")
    torch.manual_seed(0)
    found, _ = attempt("cudnn", shape, direction)
    assert found["correct"], found["reason"]
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention
    unscaled = lambda *given: (0.9 * sdpa(*given)[0],)  # noqa: E731
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", unscaled)
    found, _ = attempt("cudnn", shape, direction)
    assert found["status"] == "wrong"
    assert "of that without dropout on average" in found["reason"]


@pytest.mark.usefixtures("on_cpu")
def test_bench_options_have_no_deterministic_rows() -> None:
    with pytest.raises(providers.Unsupported, match="deterministic"):
        attempt("tl_attention", Shape.parse(SMALL[0]), "bwd_det")


def test_bench_packed_inputs_are_slices_of_one_tensor(on_cpu: None) -> None:
    ((q, k, v), _) = run.make_copies(Shape.parse("2,3,3,5,5,8,8,full,packed"), torch.bfloat16, "fwd")
    qkv = option_rows._packed(q, k, v)
    assert all(
        x.data_ptr() == y.data_ptr() and x.equal(y) for x, y in zip(qkv.unbind(2), (q, k, v), strict=True)
    )


def stored_row(
    provider: str, shape: str, tflops: float | None, direction: str, **other: object
) -> report.Row:
    named = shapes.chosen_shapes([shape])[shape]
    row = run.new_row(provider, named) | {"pass": direction, "dtype": "bf16", "gpu": "H", "shape": shape}
    if tflops is None:
        return row | {"status": "skipped", "reason": "it has no dropout"} | other
    return row | {"status": "ok", "tflops": tflops, "ms": 1.0, "timer": "graph", "max_err_ratio": 0.5} | other


def option_run(direction: str) -> list[report.Row]:
    return [
        stored_row(
            "tl_attention", "option-window-1k", 500.0, direction, ratio_vs_plain=6.0, ratio_vs_fa4=1.1
        ),
        stored_row("plain", "option-window-1k", 700.0, direction),
        stored_row("fa4", "option-window-1k", 450.0, direction),
        stored_row("tl_attention", "option-dropout", 400.0, direction, ratio_vs_plain=0.8),
        stored_row("plain", "option-dropout", 500.0, direction),
        stored_row("fa4", "option-dropout", None, direction),
        stored_row("tl_attention", "option-gemma2", None, direction, status="wrong", reason="no"),
        stored_row("plain", "option-gemma2", 500.0, direction),
    ]


ENVIRONMENT = {"gpu": "H", "power limit": "700 W", "torch": "2", "cuda": "13", "tilelang": "0.1.15"}


def test_bench_readme_shows_what_options_cost(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / report.OPTIONS_FOLDER
    folder.mkdir()
    for direction in ("fwd", "bwd"):
        rows = option_run(direction)
        (folder / report.jsonl_name(direction)).write_text("".join(json.dumps(row) + "\n" for row in rows))
        report.write(folder, rows, ENVIRONMENT)
    text = report.readme_options(folder)
    assert (
        "| problem | share | forward | backward | forward / share | backward / share | target |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| B1 H16 S16384 d128 causal window 1023 | 0.135 | 0.17 | 0.17 | 1.23 | 1.23 | 1.15 |\n"
        "| B2 H16 S4096 d128 causal dropout 0.1 | 1.000 | 1.25 | 1.25 | 1.25 | 1.25 | 1.35 |\n"
        "| B1 H16/8 S8192 d256 causal window 4095 softcap 50 | 0.762 | – | – | – | – | – |\n"
    ) in text
    assert (
        "Beyond the target: option-window-1k forward 1.23 of 1.15; option-window-1k backward 1.23 of 1.15."
        in text
    )
    assert "| problem | tl_attention | fa4 |" in text
    assert "| B1 H16 S16384 d128 causal window 1023 | **500** | 450 |" in text, "plain is no peer"
    assert "1.10x fa4 (faster in 1 of 1 rows)" in text
    page = (folder / "fwd.md").read_text()
    assert "fa4 skipped: it has no dropout (B2 H16 S4096 d128 causal dropout 0.1)" in page
    assert report.OPTIONS_CONVENTION in page
    assert "plain" not in report.line(option_run("fwd")[:3])


def test_bench_rows_of_options_have_no_score_of_the_plain_problem() -> None:
    row = option_run("fwd")[0]
    peers = {tuple(row[key] for key in report.PEER_PROBLEM): {"cudnn": 1.0, "fa4": 1.0}}
    report.judge([row], peers)
    assert (row["score"], row["vs_best"]) == (None, 1.1)


def test_bench_readme_shows_the_stored_costs() -> None:
    root = Path(__file__).parents[1]
    folder = root / "benchmarks/results/nvidia_h200" / report.OPTIONS_FOLDER
    if not report.is_stored(folder, "fwd"):
        pytest.skip(
            "no results are stored: python benchmarks/run.py --shapes 'option-*' --out " + str(folder)
        )
    _, _, rest = (root / "README.md").read_text().partition("<!-- options -->\n")
    shown, _, _ = rest.partition("<!-- /options -->\n")
    assert shown.strip() == report.readme_options(folder).strip(), f"run benchmarks/report.py {folder.parent}"
