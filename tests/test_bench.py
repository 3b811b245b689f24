"""The benchmark without a GPU: formulas, shapes, rounds, reports, and the command with stubs for the GPU."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_attention import autotune, configs
from tl_attention.problem import DECODE, DIRECTIONS
from tl_attention.testing import counts, environment, shapes, timer
from tl_attention.testing.shapes import Shape
from tl_attention.testing.timer import Eager, Timing

pytest.importorskip("rich", reason="the benchmark needs rich")
pytest.importorskip("matplotlib", reason="the benchmark needs matplotlib")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import host
import no_gpu
import providers
import report
import run
from rich.console import Console

SHAPE = "1,2,2,48,48,32,32,causal"
EVERY_ROW = {
    *("pass", "provider", "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"),
    *("head_dim_v", "mask", "ms", "tflops", "correct", "max_err_ratio", "commit", "gpu", "layout"),
}
TIMED_ROW = EVERY_ROW | {"p25", "p75", "eager_ms", "gbps", "intensity", "pct_cublas", "ratio_vs_naive"}

sizes = st.integers(1, 70)
problem_shapes = st.builds(
    lambda batch, heads_kv, group, *rest: Shape(batch, heads_kv * group, heads_kv, *rest),
    *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), sizes, sizes, sizes, sizes, st.booleans()),
)


@given(problem_shapes)
def test_bench_flops_count_visible_pairs(shape: Shape) -> None:
    seen = [
        (i, j)
        for i in range(shape.seqlen_q)
        for j in range(shape.seqlen_k)
        if not shape.causal or j <= i + shape.seqlen_k - shape.seqlen_q
    ]
    assert counts.visible_pairs(shape) == shape.batch * len(seen)
    scores = shape.batch * shape.heads_q * len(seen)
    assert counts.fwd_flops(shape) == scores * 2 * (shape.head_dim + shape.head_dim_v)
    assert counts.bwd_flops(shape) == scores * 2 * (3 * shape.head_dim + 2 * shape.head_dim_v)
    assert counts.flops(shape, "bwd") == counts.flops(shape, "bwd_det") == counts.bwd_flops(shape)
    assert counts.flops(shape, "fwd_bwd") == counts.fwd_flops(shape) + counts.bwd_flops(shape)


@given(problem_shapes)
def test_bench_bytes_are_those_of_the_tensors(shape: Shape) -> None:
    q, out = (
        torch.empty(shape.batch, shape.seqlen_q, shape.heads_q, d) for d in (shape.head_dim, shape.head_dim_v)
    )
    k, v = (
        torch.empty(shape.batch, shape.seqlen_k, shape.heads_kv, d)
        for d in (shape.head_dim, shape.head_dim_v)
    )
    lse = torch.empty(shape.batch, shape.heads_q, shape.seqlen_q)
    qkv = 2 * (q.numel() + k.numel() + v.numel())
    rows = 2 * out.numel() + 4 * lse.numel()
    assert counts.input_bytes(shape) == qkv
    assert counts.input_bytes(shape, "fwd_bwd") == qkv + 2 * out.numel()
    assert counts.input_bytes(shape, "bwd") == qkv + 2 * out.numel() + rows
    assert counts.fwd_bytes(shape) == counts.traffic(shape, "fwd") == qkv + rows
    assert counts.bwd_bytes(shape) == counts.traffic(shape, "bwd_det") == 2 * qkv + 2 * out.numel() + rows
    assert counts.traffic(shape, "fwd_bwd") == counts.fwd_bytes(shape) + counts.bwd_bytes(shape)


def test_bench_flops_of_the_articles_shape() -> None:
    shape = Shape.parse("1,16,16,4096,4096,128,causal")
    assert counts.fwd_flops(shape) == 4 * 16 * 128 * (4096 * 4097 // 2)
    assert counts.bwd_flops(shape) == 2.5 * counts.fwd_flops(shape)


@given(problem_shapes)
def test_bench_shape_round_trip(shape: Shape) -> None:
    assert Shape.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,2,3,4,64", "mask causal or full, got '64'"),
        ("1,2,2,3,4,causal", "got 5 numbers"),
        ("1,2,2,3,4,64,64,64,full", "got 8 numbers"),
        ("1,2,2,0,4,64,full", "positive whole numbers"),
        ("1,2,2,3,4,-64,full", "positive whole numbers"),
        ("1,3,2,3,4,64,full", "Hq a multiple of Hkv, got 3 and 2"),
        ("", "mask causal or full"),
    ],
)
def test_bench_shape_errors_say_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shape.parse(text)


def test_bench_ceilings_are_those_of_the_model() -> None:
    full, causal = (Shape.parse(f"1,1,1,1024,1024,128,{mask}") for mask in ("full", "causal"))
    after, under = counts.fwd_ceiling(full, 128, 128)
    assert (after, under) == pytest.approx((counts.PEAK_TFLOPS / 1.5, counts.PEAK_TFLOPS))
    wasted = (1024 * 1025 / 2) / (128 * 128 * 36)  # 36 tiles of 128 x 128 touch the triangle
    assert counts.fwd_ceiling(causal, 128, 128) == pytest.approx((after * wasted, under * wasted))


def test_bench_inputs_rotate_beyond_twice_the_l2_cache() -> None:
    for nbytes in (1 << 20, 40 << 20, 100 << 20, 1 << 30):
        copies = timer.rotation(nbytes)
        assert copies * nbytes > 2 * timer.L2_BYTES >= (copies - 1) * nbytes
    assert timer.rotation(1) == timer.MAX_COPIES


def test_bench_rounds_rotate_and_slow_calls_sit_some_out() -> None:
    orders = timer.round_order({"a": 10, "b": 10, "slow": 100, "naive": 5000}, rounds=15, cap_ms=500)
    assert len(orders) == 15
    assert set(orders[0]) == {"a", "b", "slow", "naive"}
    counts = {name: sum(name in order for order in orders) for name in orders[0]}
    assert counts == {"a": 15, "b": 15, "slow": 5, "naive": timer.MIN_SAMPLES}
    assert {order[0] for order in orders} >= {"a", "b"}


def test_bench_speedup_is_the_median_of_the_rounds_ratios() -> None:
    ours, theirs = Timing((1.0, 2.0, 4.0, 8.0), 1, "graph"), Timing((2.0, None, 4.0, 24.0), 1, "graph")
    assert timer.speedup(ours, theirs) == timer.Quartiles(1.5, 2.0, 2.5)
    assert ours.median_ms == 3.0
    assert theirs.median_ms == 4.0


class FakeEvent:
    """Takes the time of the work it stands around from a counter."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = math.nan

    def record(self) -> None:
        self.at = FakeEvent.clock

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def work(ms: float, result: object = None) -> object:
    FakeEvent.clock += ms
    return result


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(timer, "capture_stream", lambda: None)
    for name in ("synchronize", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


@pytest.mark.usefixtures("fake_cuda")
def test_bench_timer_samples_every_round_and_names_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, graph: object, stream: object) -> None:
            raise RuntimeError("not here\nfor many reasons")

    monkeypatch.setattr(torch.cuda, "graph", Refused)
    copies = [partial(work, 1.0), partial(work, 3.0)]
    calls = {"one": partial(work, 0.5), "two": copies, "slow": partial(work, 400.0)}
    timings = timer.time_interleaved(calls, rounds=9)
    medians = {name: timing.median_ms for name, timing in timings.items()}
    assert medians == pytest.approx({"one": 0.5, "two": 1.8, "slow": 400})
    assert [timing.launches for timing in timings.values()] == [20, 5, 1]
    counts = [sum(sample is not None for sample in timing.samples) for timing in timings.values()]
    assert counts == [9, 9, timer.MIN_SAMPLES]
    assert timings["one"].timer == "eager: graph capture failed, RuntimeError: not here"
    assert timer.time_eager(calls["one"]).ms == pytest.approx(0.5)
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        timer.time_interleaved(calls, rounds=0)


class FakeGraph:
    """Its replays take 10 ms and do what `again` says."""

    again = staticmethod(lambda: None)

    def replay(self) -> None:
        FakeEvent.clock += 10
        FakeGraph.again()


@pytest.mark.usefixtures("fake_cuda")
def test_bench_timer_returns_what_the_last_replay_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    first, second = torch.ones(3), torch.ones(3)
    copies = [partial(work, 1.0, (first, None)), partial(work, 1.0, (second, None))]

    idle = timer.time_interleaved({"idle": copies}, rounds=3)["idle"]
    assert idle.timer == "graph"
    assert idle.result[0] is first
    assert first.isnan().all(), "replays that do nothing leave the NaN of the timer"

    monkeypatch.setattr(FakeGraph, "again", staticmethod(lambda: first.fill_(2)))
    assert timer.time_interleaved({"works": copies}, rounds=3)["works"].result[0].eq(2).all()
    assert second.eq(1).all()
    assert timer.time_eager(copies[0]).result[0] is first


@pytest.mark.usefixtures("fake_cuda")
def test_bench_timer_names_the_call_that_fails() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(timer.CallFailed, match="bad: ValueError: no") as caught:
        timer.time_interleaved({"good": partial(work, 1.0), "bad": fail}, rounds=1)
    assert caught.value.name == "bad"


def test_bench_commit_is_that_of_the_packages_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TL_ATTENTION_COMMIT", raising=False)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(
        ["git", "-C", tmp_path, *author, "commit", "-q", "--allow-empty", "-m", "first"], check=True
    )
    for root, known in ((tmp_path, True), (tmp_path / "venv/site-packages", False)):
        file = root / "tl_attention/testing/environment.py"
        file.parent.mkdir(parents=True)
        monkeypatch.setattr(environment, "__file__", str(file))
        assert (environment.git_commit() != "unknown") == known
    monkeypatch.setenv("TL_ATTENTION_COMMIT", "told")
    assert environment.git_commit() == "told"


@pytest.mark.gpu
def test_bench_timer_on_gpu_sees_twice_the_work() -> None:
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def uncapturable() -> float:
        return float((x @ x)[0, 0])

    calls = {"once": lambda: x @ x, "twice": lambda: (x @ x) @ x, "uncapturable": uncapturable}
    timings = timer.time_interleaved(calls, rounds=9)
    torch.testing.assert_close(timings["once"].result, x @ x)
    assert timer.speedup(timings["once"], timings["twice"]).median == pytest.approx(2, rel=0.1)
    assert timings["once"].timer == timings["twice"].timer == "graph"
    assert timings["uncapturable"].timer.startswith("eager: graph capture failed")
    assert timer.time_interleaved({"after": calls["once"]}, rounds=3)["after"].timer == "graph"


def test_bench_paper_grid_is_16k_tokens_of_hidden_2048() -> None:
    paper = {str(shape) for name, shape in shapes.chosen_shapes(["paper-*"]).items()}
    lengths = [512 << i for i in range(6)]
    assert paper == {
        f"{16384 // s},{2048 // d},{2048 // d},{s},{s},{d},{d},{mask}"
        for d in (64, 128, 256)
        for s in lengths
        for mask in ("full", "causal")
    }


def test_bench_named_shapes_are_shapes() -> None:
    named = configs.named_shapes()
    assert len({Shape.parse(text) for text in named.values()}) == len(named)
    assert all(str(Shape.parse(text)) == text for text in named.values())
    counts = {
        direction: len(shapes.chosen_shapes(names))
        for direction, names in run.DEFAULT.items()
        if direction != DECODE
    }
    assert counts == {"fwd": 37, "bwd": 39, "fwd_bwd": 39}
    extra = ("mla-h*", "gqa-*", "few-h*", "small-*", "chunk-*")
    assert [len(shapes.chosen_shapes([pattern])) for pattern in extra] == [8, 9, 6, 4, 1]
    warm = [name for name in named for pattern in run.WARM if fnmatch.fnmatch(name, pattern)]
    assert len(warm) == 10


def test_bench_untuned_shapes_are_not_those_of_the_tuner() -> None:
    untuned = set(shapes.chosen_shapes(["untuned-*"]).values())
    assert len(untuned) == 20
    tuned = {shape for direction in DIRECTIONS for shape in autotune.default_shapes(direction)}
    for path in configs.data_dir().glob("tuned/*.json"):
        table = configs.read_tuned(path)
        tuned |= {
            Shape.parse(text) for name in DIRECTIONS for row in table[name].values() for text in row["shapes"]
        }
    lengths = {(shape.seqlen_q, shape.seqlen_k) for shape in tuned}
    assert not {(shape.seqlen_q, shape.seqlen_k) for shape in untuned} & lengths
    assert {shape.head_dim for shape in untuned} >= {40, 72, 80, 96, 112, 160, 192}
    assert {shape.causal for shape in untuned} == {True, False}
    assert {(shape.seqlen_q > shape.seqlen_k) - (shape.seqlen_q < shape.seqlen_k) for shape in untuned} == {
        -1,
        0,
        1,
    }


def test_bench_shapes_by_name_pattern_and_text() -> None:
    assert list(shapes.chosen_shapes(["article;paper-d64-full-*k", SHAPE])) == [
        "article",
        *(f"paper-d64-full-{n}k" for n in (1, 2, 4, 8, 16)),
        SHAPE,
    ]
    with pytest.raises(ValueError, match=r"'nonsense': not in .*, which has paper-d64-full-512"):
        shapes.chosen_shapes(["nonsense"])


def fake_row(
    provider: str, seqlen: int, tflops: float | None, mask: str = "full", **other: object
) -> report.Row:
    size = {"batch": 16384 // seqlen, "heads_q": 16, "heads_kv": 16, "seqlen_q": seqlen, "seqlen_k": seqlen}
    size |= {"head_dim": 128, "head_dim_v": 128, "mask": mask}
    row = {
        "pass": "fwd",
        "provider": provider,
        "title": provider,
        "library": "1.0",
        "layout": "bhsd",
        "dtype": "bf16",
        "gpu": "H",
        "shape": f"paper-d128-{mask}-{seqlen}",
        **size,
    }
    if tflops is None:
        wrong = {"status": "wrong", "correct": False, "reason": "out[0] is 1 instead of 2"}
        return row | dict.fromkeys(report.MEASURED) | wrong | other
    speed = {
        "ms": 1.0,
        "eager_ms": 1.1,
        "tflops": tflops,
        "gbps": 100.0,
        "intensity": 500.0,
        "pct_cublas": 80.0,
    }
    return row | speed | {"status": "ok", "correct": True, "max_err_ratio": 0.5, "timer": "graph"} | other


ROWS = [
    fake_row("tl_attention", 1024, 600.0, ratio_vs_fa2=2.0, ratio_vs_cudnn=0.9),
    fake_row("fa2", 1024, 300.0),
    fake_row("cudnn", 1024, 660.0),
    fake_row("tl_attention", 4096, 640.0, ratio_vs_fa2=1.125),
    fake_row("fa2", 4096, 570.0, timer="eager: graph capture failed, RuntimeError: no"),
    fake_row("cudnn", 4096, None),
    fake_row("fa4", 4096, None, status="skipped", correct=None, reason="not installed"),
]


def test_bench_geomeans() -> None:
    assert report.geomeans(ROWS) == {"fa2": (pytest.approx(1.5), 2, 2), "cudnn": (pytest.approx(0.9), 0, 1)}


def test_bench_markdown_shows_losses_and_wrong_rows() -> None:
    text = report.markdown({"gpu": "H", "command": "run.py"}, ROWS, "fwd.png")
    assert "| B16 H16 S1024 d128 full | 600 | 300 | **660** |" in text
    assert "| B4 H16 S4096 d128 full | **640** | 570 | WRONG |" in text
    assert "1.50x fa2: geometric mean of 2 rows, faster in 2" in text
    assert "cudnn wrong: out[0] is 1 instead of 2 (B4 H16 S4096 d128 full)" in text
    assert "fa2 eager: graph capture failed" in text
    assert "fa4 skipped: not installed" in text
    assert "visible pairs" in text
    assert "![TFLOPS against sequence length](fwd.png)" in text


ENVIRONMENT = {"gpu": "H", "power limit": "700 W", "torch": "2", "cuda": "13", "tilelang": "0.1.15"}


def store(folder: Path, rows: list[report.Row]) -> list[str]:
    """As a run does; the names of the files of the report."""
    with (folder / report.jsonl_name(rows[0]["pass"])).open("w") as file:
        report.write_jsonl(file, rows)
    return report.write(folder, rows, ENVIRONMENT)


def of_pass(direction: str, rows: list[report.Row]) -> list[report.Row]:
    return [row | {"pass": direction} for row in rows]


def test_bench_readme_section_is_short_and_shows_losses(tmp_path: Path) -> None:
    store(tmp_path, ROWS)
    where, means, table = report.readme(tmp_path).strip().split("\n\n")
    assert "H, power limit 700 W; torch 2; CUDA 13; tilelang 0.1.15; fa2: 1.0; cudnn: 1.0." in where
    assert "Forward, bf16, TFLOPS" in where
    assert "1.50x fa2 (faster in 2 of 2 rows), 0.90x cudnn (faster in 0 of 1 rows)" in means
    assert table.splitlines() == [
        "| problem | tl_attention | fa2 | cudnn |",
        "| --- | ---: | ---: | ---: |",
        "| B16 H16 S1024 d128 full | 600 | 300 | **660** |",
        "| B4 H16 S4096 d128 full | **640** | 570 | WRONG |",
    ]


def test_bench_readme_shows_the_backward_where_it_is_stored(tmp_path: Path) -> None:
    store(tmp_path, ROWS)
    forward = report.readme(tmp_path)
    store(tmp_path, of_pass("bwd", ROWS))
    assert report.readme(tmp_path) == forward + "\n" + forward.replace("Forward", "Backward")
    slower = [
        fake_row("tl_attention", 1024, 500.0, ms=1.2),
        fake_row("fa4", 1024, 900.0),
        fake_row("tl_attention", 2048, 500.0, ms=9.0),  # another problem
        fake_row("tl_attention", 4096, 400.0, ms=1.2),
    ]
    store(tmp_path, of_pass("bwd_det", slower))
    *_, where, means, table = report.readme(tmp_path).strip().split("\n\n")
    assert "Backward, bf16, TFLOPS" in where
    assert means.endswith("Deterministic gradients take 1.20x the time, 1.20x at most.")
    assert table.splitlines() == [
        "| problem | tl_attention | fa2 | cudnn | deterministic |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| B16 H16 S1024 d128 full | 600 | 300 | **660** | 500 |",
        "| B4 H16 S4096 d128 full | **640** | 570 | WRONG | 400 |",
    ]


@pytest.mark.parametrize("direction", shapes.DIRECTIONS)
def test_bench_report_says_what_was_measured(direction: str, tmp_path: Path) -> None:
    rows = of_pass(direction, ROWS)
    assert f"# Attention {report.TITLES[direction]}, bf16" in report.markdown({"gpu": "H"}, rows)
    assert ("3 head_dim + 2 head_dim_v" in report.convention(direction)) == direction.startswith("bwd")
    assert f"{report.TITLES[direction]}, TFLOPS" == report.table(rows).title
    environment = "environment.json" if direction == "fwd" else f"environment_{direction}.json"
    assert store(tmp_path, rows) == [f"{direction}.md", environment, f"{direction}.png"]


def test_bench_report_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = [*store(tmp_path, ROWS), *store(tmp_path, of_pass("bwd", ROWS))]
    before = {name: (tmp_path / name).read_bytes() for name in names if name.endswith(".md")}
    for name in names:
        if not name.endswith(".json"):
            (tmp_path / name).unlink()
    assert report.main([str(tmp_path)]) == 0
    assert all((tmp_path / name).exists() for name in names)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert capsys.readouterr().out == report.readme(tmp_path)


def test_bench_readme_shows_the_stored_results() -> None:
    root = Path(__file__).parents[1]
    folder = root / "benchmarks/results/nvidia_h200"
    if not report.is_stored(folder, "fwd"):
        pytest.skip("no results are stored: python benchmarks/run.py --out benchmarks/results/nvidia_h200")
    _, _, rest = (root / "README.md").read_text().partition("<!-- speed -->\n")
    shown, _, _ = rest.partition("<!-- /speed -->\n")
    assert shown.strip() == report.readme(folder).strip(), f"run benchmarks/report.py {folder}"


def test_bench_table_shows_geomeans() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.table(ROWS))
    text = console.export_text()
    assert "geomean of ours over" in text
    assert "1.50x" in text
    assert "WRONG" in text


def test_bench_plots_where_there_are_two_lengths(tmp_path: Path) -> None:
    assert report.plot(ROWS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not report.plot(ROWS[:3], tmp_path / "none.png")


PEERS = {  # file -> text
    "tflops.csv": "pass,head_dim,mask,seqlen,batch,heads,cudnn,fa4,best\n"
    "fwd,128,full,1024,16,16,500,600,600\n"
    "fwd,128,causal,1024,16,16,,550,600\n"
    "bwd,128,full,1024,16,16,400,300,600\n",
    "us.csv": "pass,batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim,head_dim_v,mask,timer,fa2_us,cudnn_us,fa3_us,fa4_us,best_tflops\n"
    "fwd,1,8,1,128,16384,128,128,causal,graph,426.4,400,160,200,51\n"
    "fwd,8,32,2,2048,2048,256,256,causal,do_bench,,971.3,,917.0,600\n",
}


@pytest.fixture
def peers_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "peers"
    folder.mkdir()
    for name, text in PEERS.items():
        (folder / name).write_text(text)
    return folder


def judged(row: report.Row, peers: dict) -> report.Row:
    row = dict(row)
    report.judge([row], peers)
    return row


def test_bench_score_is_relative_to_the_best_peer(peers_folder: Path) -> None:
    table = report.read_peers([peers_folder])
    assert table == report.read_peers(sorted(peers_folder.iterdir()))
    assert judged(ROWS[0], table)["score"] == pytest.approx(0.9 / 1.2)
    assert judged(ROWS[0] | {"pass": "bwd"}, table)["score"] == pytest.approx(0.9 / 1.5)
    by_fa4 = judged(ROWS[0] | {"mask": "causal", "ratio_vs_fa4": 1.2}, table)
    assert by_fa4["score"] == pytest.approx(1.2 * 550 / 600)
    assert by_fa4["score_over"] == "fa4"
    both = judged(ROWS[0] | {"ratio_vs_fa4": 0.8}, table)
    assert (both["score"], both["score_over_fa4"]) == (pytest.approx(0.75), 0.8)
    assert report.notes([by_fa4]) == ["tl_attention score by way of fa4 (B16 H16 S1024 d128 causal)"]


def test_bench_score_by_a_table_of_microseconds(peers_folder: Path) -> None:
    table = report.read_peers([peers_folder / "us.csv"])
    few = {"batch": 1, "heads_q": 8, "heads_kv": 1, "seqlen_q": 128, "seqlen_k": 16384, "mask": "causal"}
    assert judged(ROWS[0] | few, table)["score"] == pytest.approx(0.9 / (400 / 160))
    assert judged(ROWS[0] | few | {"ratio_vs_cudnn": None, "ratio_vs_fa4": 1.0}, table)["score"] == 160 / 200
    assert judged(ROWS[0] | few | {"heads_kv": 2}, table)["score"] is None


@pytest.mark.parametrize(
    "other", [{"pass": "fwd_bwd"}, {"dtype": "fp16"}, {"seqlen_k": 999}, {"head_dim_v": 64}]
)
def test_bench_rows_without_a_score_are_beside_the_best_of_the_run(other: dict, peers_folder: Path) -> None:
    table = report.read_peers([peers_folder])
    row = judged(judged(ROWS[0], table) | other, table)
    assert (row["score"], row["score_over"], row["vs_best"]) == (None, None, 0.9)
    assert judged(fake_row("tl_attention", 1024, 600.0), {})["vs_best"] is None, "it ran alone"
    assert "vs_best" not in judged(fake_row("cudnn", 1024, 600.0, ratio_vs_fa2=1.0), {})


def test_bench_peers_of_other_columns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="expected CSV files in it, found none"):
        report.read_peers([tmp_path])
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("seqlen,cudnn\n1,2\n")
    with pytest.raises(
        ValueError, match="expected the columns pass, .*best or pass, .*cudnn_us, found seqlen, cudnn"
    ):
        report.read_peers([wrong])
    for path in (wrong, tmp_path / "absent.csv"):
        with pytest.raises(SystemExit):
            run.main(["--peers", str(path)])
        assert path.name in capsys.readouterr().err


def test_bench_summary_has_mean_and_worst_of_each_group() -> None:
    def ours(shape: str, **measure: float) -> report.Row:
        return fake_row("tl_attention", 1024, 600.0, **measure) | {"shape": shape}

    rows = [
        ours("gqa-a", score=0.5),
        ours("gqa-b", score=2.0),
        ours("gqa-c", vs_best=0.9),
        ours("1,1,1,1,1,8,8,full", vs_best=1.5),
        fake_row("tl_attention", 1024, None) | {"shape": "gqa-d"},
        fake_row("fa4", 1024, 600.0, score=9.0),
    ]
    assert report.summary(rows) == [
        "gqa, score: 1.00 by geometric mean of 2, worst 0.50 (gqa-a)",
        "gqa, vs best peer in run: 0.90 by geometric mean of 1, worst 0.90 (gqa-c)",
        "unnamed, vs best peer in run: 1.50 by geometric mean of 1, worst 1.50 (1,1,1,1,1,8,8,full)",
        "gqa: tl_attention has no speed in 1",
    ]


def test_bench_report_says_why_rows_are_slow(tmp_path: Path) -> None:
    rows = [
        fake_row("tl_attention", 1024, 600.0, score=1 - i / 100) | {"shape": f"paper-{i}"} for i in range(12)
    ]
    rows[11] |= {"l2": "warm", "heads_kv": 4, "seqlen_k": 2048}
    assert "no reason recorded" in report.markdown({}, rows)
    (tmp_path / "notes.toml").write_text(
        '[fwd]\npaper-11 = "exp; tried two things"\n"1,1,1,1,1,8,8,full" = "new"\n[bwd]\npaper-10 = "other"\n'
    )
    store(tmp_path, rows)
    text = (tmp_path / "fwd.md").read_text()
    assert "The 10 slowest beside their best peers, and why:" in text
    _, _, listed = text.partition("and why:\n\n")
    lines = listed.splitlines()[:11]
    assert lines[0] == (
        "- 0.89 score, paper-11 (B16 H16/4 S1024/2048 d128 full, L2 warm): exp; tried two things"
    )
    assert lines[1] == "- 0.90 score, paper-10 (B16 H16 S1024 d128 full): no reason recorded"
    assert lines[9].startswith("- 0.98 score, paper-2 ")
    assert lines[10] == ""
    assert report.read_why(tmp_path, "bwd_det") == {}


def test_bench_stored_runs_can_be_judged_anew(
    tmp_path: Path, peers_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    store(tmp_path, ROWS)
    assert report.main([str(tmp_path), "--peers", str(peers_folder)]) == 0
    rows, _ = report.read(tmp_path, "fwd")
    assert rows[0]["score"] == pytest.approx(0.75)
    assert rows[3]["vs_best"] == 1.125
    assert "paper, score: 0.75 by geometric mean of 1" in (tmp_path / "fwd.md").read_text()
    assert "| score | vs best peer in run |" in (tmp_path / "fwd.md").read_text()


class Stub:
    """Times nothing: every call is said to take as many milliseconds as its place."""

    @staticmethod
    def time_interleaved(calls: dict, rounds: int) -> dict[str, Timing]:
        return {
            name: Timing((float(i),) * rounds, 1, "graph", copies[0]())
            for i, (name, copies) in enumerate(calls.items(), 1)
        }

    @staticmethod
    def boom(shape: Shape, *_: object, **_options: object) -> providers.Ready:
        raise RuntimeError("no kernel\nand a long story")

    @staticmethod
    def wrong(shape: Shape, *_: torch.Tensor, saves: bool) -> providers.Ready:
        return providers._same(lambda q, k, v: (v + 1, None))

    @staticmethod
    def wrong_backward(shape: Shape, deterministic: bool, *_: object) -> providers.Ready:
        return providers._same(lambda dout, q, k, v, out, lse: (q + 1, k, v))


def like_naive(forward: Callable | None = None, backward: Callable | str | None = None) -> providers.Provider:
    """A provider whose passes are those of naive but for what is given."""
    naive = providers.PROVIDERS["naive"]
    return providers.Provider(forward or naive.forward, backward or naive.backward, "bhsd", str)


@pytest.fixture
def gpu_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors: naive as ours and as itself, one provider that is wrong, one that raises."""
    naive = providers.PROVIDERS["naive"]
    stubs = {"tl_attention": naive, "naive": naive, "fa3": providers.PROVIDERS["fa3"]}
    stubs |= {
        "fa4": like_naive(Stub.wrong, Stub.wrong_backward),
        "flex": like_naive(Stub.boom),
    }
    monkeypatch.setattr(run, "PROVIDERS", stubs)
    monkeypatch.setattr(run, "make_inputs", partial(run.make_inputs, device="cpu"))
    monkeypatch.setattr(run, "make_dout", partial(run.make_dout, device="cpu"))
    monkeypatch.setattr(timer, "rotation", lambda nbytes: 2)
    monkeypatch.setattr(timer, "time_interleaved", Stub.time_interleaved)
    monkeypatch.setattr(timer, "time_eager", lambda call: Eager(1.0, 5.0, call()))
    monkeypatch.setattr(timer, "measure_cublas_tflops", lambda: 700.0)
    monkeypatch.setattr(timer, "measure_copy_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(run, "is_hopper", lambda device: True)
    monkeypatch.setattr(
        environment, "facts", lambda command: {"gpu": "NVIDIA H200", "commit": "c", "command": command}
    )


NAMES = ["tl_attention", "naive", "fa3", "fa4", "flex"]


ARGUMENTS = {  # of the command, for a direction
    "fwd": [],
    "bwd": ["--pass", "bwd"],
    "bwd_det": ["--pass", "bwd", "--deterministic"],
    "fwd_bwd": ["--pass", "fwd_bwd"],
    "fwd_bwd_det": ["--pass", "fwd_bwd", "--deterministic"],
}


def run_rows(
    tmp_path: Path, *names: str, direction: str = "fwd", status: int = 0, rounds: int = 3
) -> list[report.Row]:
    """The rows of two shapes."""
    shapes = ["--shapes", SHAPE, "1,2,2,96,96,32,32,causal"]
    options = ["--providers", *names, "--out", str(tmp_path), "--rounds", str(rounds)]
    assert run.main([*ARGUMENTS[direction], *shapes, *options]) == status
    return [json.loads(line) for line in (tmp_path / f"{direction}.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize("direction", shapes.DIRECTIONS)
def test_bench_run_gates_speeds_and_writes_all(
    direction: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = run_rows(tmp_path, *NAMES, direction=direction)
    status = {row["provider"]: row["status"] for row in rows}
    assert status == dict(zip(NAMES, ("ok", "ok", "skipped", "wrong", "failed"), strict=True))
    assert [row["shape"] for row in rows[::5]] == [SHAPE, "1,2,2,96,96,32,32,causal"]
    ours, *_, wrong, failed = rows[:5]
    assert ours.keys() >= TIMED_ROW
    assert all(row.keys() >= EVERY_ROW for row in rows)
    assert {row["pass"] for row in rows} == {direction}
    assert ours["layout"] == "bhsd"
    assert ours["ratio_vs_naive"] == 2.0
    assert ours["tflops"] == pytest.approx(counts.flops(Shape.parse(SHAPE), direction) / 1e-3 / 1e12)
    assert wrong["ms"] is wrong["tflops"] is failed["correct"] is failed["max_err_ratio"] is None
    assert "instead of" in wrong["reason"]
    assert failed["reason"] == "RuntimeError: no kernel"
    assert "WRONG" in (tmp_path / f"{direction}.md").read_text()
    environment = json.loads((tmp_path / report.environment_name(direction)).read_text())
    assert environment["copy"] == "4000 GB/s, ridge point 175 FLOP/B"
    assert "2.00x" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bench_run_puts_ours_without_options_beside_it(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "on_capture_stream", contextlib.nullcontext)
    monkeypatch.setitem(run.PROVIDERS, "cudnn", providers.PROVIDERS["cudnn"])
    shape = "2,4,2,48,48,32,32,causal,window=9,sink"
    argv = ["--shapes", shape, "--out", str(tmp_path), "--providers", "cudnn", "naive", "tl_attention"]
    assert run.main([*ARGUMENTS[direction], *argv]) == 0
    ours, plain, cudnn = [
        json.loads(line) for line in (tmp_path / f"{direction}.jsonl").read_text().splitlines()
    ]
    assert [row["provider"] for row in (ours, plain, cudnn)] == ["tl_attention", "plain", "cudnn"]
    assert [row["status"] for row in (ours, plain, cudnn)] == ["ok", "ok", "skipped"]
    assert cudnn["reason"] == "PyTorch's cuDNN backend has no window"
    assert (ours["layout"], ours["options"]) == ("bshd", ["window=9", "sink"])
    assert ours["ratio_vs_plain"] == 2.0
    assert report.cost(ours) == 0.5
    asked = Shape.parse(shape)
    assert ours["tflops"] == pytest.approx(counts.flops(asked, direction) / 1e-3 / 1e12)
    assert plain["tflops"] == pytest.approx(counts.flops(asked.plain, direction) / 2e-3 / 1e12)
    assert "| B2 H4/2 S48 d32 causal window 9 sink |" in (tmp_path / f"{direction}.md").read_text()


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_keeps_l2_warm_for_some_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    monkeypatch.setattr(run, "compare", lambda shape, bshd, *_: copies.append(len(bshd)))
    names = ["small-n59-full", "tiny"]
    argv = ["--shapes", *names, "--providers", "tl_attention", "--out", str(tmp_path)]
    assert run.main(argv) == 1
    rows = [json.loads(line) for line in (tmp_path / "fwd.jsonl").read_text().splitlines()]
    assert [row["l2"] for row in rows] == ["warm", "cold"]
    assert copies == [1, 2]
    assert report.describe(rows[0]) == "B8 H16 S59 d64 full, L2 warm"


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_keeps_what_it_has_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = run.measure

    def interrupted(shape: Shape, *rest: object) -> list[report.Row]:
        if shape.seqlen_q == 96:
            raise KeyboardInterrupt
        return measure(shape, *rest)

    monkeypatch.setattr(run, "measure", interrupted)
    argv = [
        "--shapes",
        SHAPE,
        "1,2,2,96,96,32,32,causal",
        "--providers",
        "tl_attention",
        "--out",
        str(tmp_path),
    ]
    assert run.main(argv) == 130
    assert len((tmp_path / "fwd.jsonl").read_text().splitlines()) == 1
    assert "B1 H2 S48 d32 causal" in (tmp_path / "fwd.md").read_text()


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_leaves_out_a_provider_that_fails_in_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(calls: dict, rounds: int) -> dict[str, Timing]:
        if "fa2" in calls:
            error = RuntimeError("out of memory")
            raise timer.CallFailed("fa2", error) from error
        return Stub.time_interleaved(calls, rounds)

    monkeypatch.setattr(timer, "time_interleaved", fail_once)
    monkeypatch.setitem(run.PROVIDERS, "fa2", run.PROVIDERS["naive"])
    rows = run_rows(tmp_path, "tl_attention", "fa2", "naive")
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"] * 2
    assert rows[1]["reason"] == "RuntimeError: out of memory"
    assert rows[1]["ms"] is None
    assert rows[0]["ratio_vs_naive"] == 2.0
    assert "ratio_vs_fa2" not in rows[0]


class Forgetful:
    """Right at its first call alone: what it returns later is changed."""

    def __init__(self, prepare: Callable[..., providers.Ready], change: Callable) -> None:
        self.prepare, self.change = prepare, change

    def __call__(self, *problem: object, **options: object) -> providers.Ready:
        right, calls = self.prepare(*problem, **options).launch, []

        def attend(*inputs: torch.Tensor) -> providers.Result:
            first, *rest = right(*inputs)
            calls.append(len(calls))
            return (first if calls == [0] else self.change(first), *rest)

        return providers._same(attend)


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize(("direction", "name"), [("fwd", "out"), ("bwd", "dq"), ("fwd_bwd", "dq")])
def test_bench_run_gives_no_speed_to_what_is_wrong_when_timed(
    direction: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naive = providers.PROVIDERS["naive"]
    forgetful = (
        like_naive(Forgetful(naive.forward, lambda x: x * torch.nan))
        if direction == "fwd"
        else like_naive(backward=Forgetful(naive.backward, lambda x: x * torch.nan))
    )
    monkeypatch.setitem(run.PROVIDERS, "fa2", forgetful)
    rows = run_rows(tmp_path, "tl_attention", "fa2", "naive", direction=direction)
    assert [row["status"] for row in rows] == ["ok", "wrong", "ok"] * 2
    assert rows[1]["ms"] is rows[1]["max_err_ratio"] is None
    assert rows[1]["reason"].startswith(f"when timed, {name}[0, 0, 0, 0] is nan instead of")
    assert "ratio_vs_fa2" not in rows[0]


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize(("direction", "status"), [("bwd", "ok"), ("bwd_det", "wrong")])
def test_bench_run_wants_the_same_bits_of_what_is_deterministic(
    direction: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naive = providers.PROVIDERS["naive"]
    rounding = like_naive(backward=Forgetful(naive.backward, lambda x: x * (1 + 2**-7)))
    monkeypatch.setitem(run.PROVIDERS, "fa2", rounding)
    rows = run_rows(tmp_path, "tl_attention", "fa2", direction=direction)
    assert [row["status"] for row in rows] == ["ok", status] * 2
    assert rows[1]["reason"] == (None if status == "ok" else "when timed, other bits than at first")


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_goes_on_after_a_shape_without_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs = run.make_inputs

    def too_large(shape: Shape, *rest: object, **options: object) -> tuple:
        if shape.seqlen_q == 48:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_inputs(shape, *rest, **options)

    monkeypatch.setattr(run, "make_inputs", too_large)
    rows = run_rows(tmp_path, "tl_attention", "naive", status=1)
    assert [row["status"] for row in rows] == ["failed", "failed", "ok", "ok"]
    assert rows[0]["reason"] == "OutOfMemoryError: CUDA out of memory"


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_stops_where_the_gpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def sticky() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def crash(*_: object, **_options: object) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", sticky)
        raise RuntimeError("the first")

    monkeypatch.setitem(run.PROVIDERS, "flex", like_naive(crash))
    rows = run_rows(tmp_path, "naive", "flex", "tl_attention", status=1)
    assert [row["reason"].partition(": ")[2] for row in rows] == [
        "CUDA error: an illegal memory access was encountered",
        "the first",
        "CUDA error: an illegal memory access was encountered",
    ]
    assert {row["status"] for row in rows} == {"failed"}
    assert f"Stopped at {SHAPE}: the GPU" in capsys.readouterr().out
    assert "FAILED" in (tmp_path / "fwd.md").read_text()


@pytest.mark.usefixtures("gpu_stub")
def test_bench_run_fails_where_ours_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.PROVIDERS, "tl_attention", run.PROVIDERS["fa4"])
    assert run.main(["--shapes", SHAPE, "--providers", "tl_attention", "--out", str(tmp_path)]) == 1


def test_bench_bad_arguments_end_with_a_message(capsys: pytest.CaptureFixture) -> None:
    for argv, words in (
        (["--shapes", "1,2,full"], "2 numbers"),
        (["--rounds", "0"], "at least 1"),
        (["--deterministic"], "expected --pass bwd or fwd_bwd"),
    ):
        with pytest.raises(SystemExit):
            run.main(argv)
        assert words in capsys.readouterr().err


@pytest.fixture
def no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "is_hopper", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.filterwarnings("ignore:tl_attention")
def test_bench_without_gpu_reports_kernels_and_checks_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(pairs: list[tuple]) -> Iterator[tuple]:
        return ((*pair, autotune.Failure("RuntimeError: nvcc refuses")) for pair in pairs)

    monkeypatch.setattr(autotune, "compile_all", refuse)
    monkeypatch.setattr("tl_attention.cubin.find_nvcc", lambda: (Path("nvcc"), "PATH"))
    assert run.main(["--quick"]) == 0
    text = capsys.readouterr().out
    assert "No Hopper GPU" in text
    assert "CTAs/SM" in text
    assert "RuntimeError: nvcc refuses" in text
    assert text.count("as scaled_dot_product_attention") == len(no_gpu.CPU_SHAPES)


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.filterwarnings("ignore:tl_attention")
def test_bench_without_nvcc_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("tl_attention.cubin.find_nvcc", lambda: None)
    assert run.main([]) == 0
    text = capsys.readouterr().out
    assert "nvcc is neither" in text
    assert text.count("as scaled_dot_product_attention") == len(no_gpu.CPU_SHAPES)


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("name", ["mha_fwd_interface", "mha_bwd_interface"])
def test_bench_cpu_check_sees_a_wrong_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tl_attention

    right = getattr(tl_attention, name)
    monkeypatch.setattr(
        tl_attention, name, lambda *given, **options: tuple(1.1 * x for x in right(*given, **options))
    )
    assert no_gpu.check_cpu(Console(quiet=True)) == 1


def empty(shape: Shape, direction: str) -> list[providers.Inputs]:
    """A copy of inputs that hold nothing."""
    return [tuple(torch.empty(0) for _ in ("q", "k", "v") + ("dout",) * ("bwd" in direction))]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("fa2", "1,1,1,8,8,192,128,full", "one head_dim"),
        ("cudnn", "1,1,1,16,8,64,causal", "top-left"),
        ("naive", "1,64,64,16384,16384,64,full", "would take 32 GiB"),
        ("naive", "1,1,1,16,8,64,causal", "NaN"),
    ],
)
def test_bench_provider_says_why_it_cannot(direction: str, name: str, shape: str, words: str) -> None:
    shape = Shape.parse(shape)
    with pytest.raises(providers.Unsupported, match=words):
        providers.prepare(providers.PROVIDERS[name], shape, direction, empty(shape, direction))


@pytest.mark.parametrize(
    ("name", "words"),
    [("fa3", "version to version"), ("triton", "forward only"), ("flex", "Tensor.backward alone")],
)
def test_bench_provider_says_why_it_has_no_backward(name: str, words: str) -> None:
    shape = Shape.parse(SHAPE)
    with pytest.raises(providers.Unsupported, match=words):
        providers.prepare(providers.PROVIDERS[name], shape, "bwd", empty(shape, "bwd"))


def test_bench_cudnn_has_no_deterministic_backward() -> None:
    with pytest.raises(providers.Unsupported, match="no deterministic mode"):
        providers.cudnn_backward(Shape.parse(SHAPE), True)


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
@pytest.mark.parametrize("shape", ["2,4,2,33,33,32,16,full", "1,2,1,20,47,64,causal"])
@pytest.mark.parametrize("name", ["tl_attention", "naive"])
def test_bench_provider_is_right(
    name: str, shape: str, direction: str, gpu_stub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, provider = Shape.parse(shape), providers.PROVIDERS[name]
    monkeypatch.setitem(run.PROVIDERS, name, provider)
    copies = run.make_copies(shape, torch.bfloat16, direction)
    transposed = [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in copies]
    ready, inputs = providers.prepare(provider, shape, direction, transposed)
    assert len(inputs) == len(copies) == 2
    for attend in (ready.call, ready.launch):
        for copy, own in zip(copies, inputs, strict=True):
            found = run.verify(name, shape, direction, attend(*own), copy)
            assert found["correct"], found["reason"]


def test_bench_cudnn_has_a_dense_bottom_right_bias(gpu_stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unequal lengths, and in the forward alone."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, *rest: object
    ) -> tuple:
        assert rest == (False, 0.0, bias is None)
        options = {"attn_mask": bias, "is_causal": bias is None, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options), None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attend)
    cudnn = providers.PROVIDERS["cudnn"]
    monkeypatch.setitem(run.PROVIDERS, "cudnn", cudnn)
    for text in ("2,4,2,20,47,64,causal", "1,2,2,33,33,32,causal"):
        shape = Shape.parse(text)
        ((q, k, v),) = run.make_copies(shape, torch.bfloat16, "fwd", warm=True)
        inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        ready, (given,) = providers.prepare(cudnn, shape, "fwd", [inputs])
        assert run.verify("cudnn", shape, "fwd", ready.launch(*given), (q, k, v))["correct"]


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
def test_bench_large_problems_are_checked_on_some_heads(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape.parse("3,8,4,24,40,32,16,causal")
    naive = run.PROVIDERS["naive"]
    (inputs, _) = run.make_copies(shape, torch.bfloat16, direction)
    ready, (given, _) = providers.prepare(
        naive, shape, direction, [tuple(x.transpose(1, 2).contiguous() for x in inputs)] * 2
    )
    result = ready.launch(*given)
    whole = run.verify("naive", shape, direction, result, inputs)
    heads = 8 if direction == "fwd" else 4
    assert run.checked_heads(shape, direction) is None
    monkeypatch.setattr(run, "MAX_CHECKED_SCORES", 5 * counts.visible_pairs(shape) // 3 * 8 // heads)
    chosen, of = run.checked_heads(shape, direction)
    assert (len(chosen), chosen[0], chosen[-1], of) == (5, 0, 3 * heads - 1, heads)
    seen = []
    monkeypatch.setattr(run, "check_fwd", spy(run.check_fwd, seen))
    monkeypatch.setattr(run, "check_bwd", spy(run.check_bwd, seen))
    some = run.verify("naive", shape, direction, result, inputs)
    assert some["correct"]
    assert some["max_err_ratio"] <= 2 * whole["max_err_ratio"]
    assert {len(x) for call in seen for x in call if isinstance(x, torch.Tensor)} == {5}

    for entry, head, reason in ((2, -1, "in 5 heads that were checked, "), (0, 1, "NaN or inf")):
        broken = [x if x is None else x.clone() for x in result]
        broken[-1 if direction != "fwd" else 0][entry, head, -1] = math.nan
        found = run.verify("naive", shape, direction, broken, inputs, "when timed, ")
        assert found["status"] == "wrong"
        assert found["reason"].startswith("when timed, in 5 heads")
        assert reason in found["reason"]


def spy(function: Callable, calls: list) -> Callable:
    def called(*args: object, **options: object) -> object:
        calls.append([y for x in args for y in (x if isinstance(x, tuple) else [x])])
        return function(*args, **options)

    return called


@pytest.mark.parametrize("heads", [8, 2])
def test_bench_heads_bring_what_belongs_to_them(heads: int) -> None:
    batch, heads_q, heads_kv = 3, 8, 2
    q = torch.arange(batch * heads_q).view(batch, 1, heads_q, 1)
    k = torch.arange(batch * heads_kv).view(batch, 1, heads_kv, 1)
    chosen = [0, 1, batch * heads - 1]
    assert run.take_heads(k, chosen, heads).flatten().tolist() == [i * heads_kv // heads for i in chosen]
    each = heads_q // heads
    expected = [[i * each + j for j in range(each)] for i in chosen]
    assert run.take_heads(q, chosen, heads).flatten(1).tolist() == expected
    assert run.take_heads(q.transpose(1, 2)[..., 0], chosen, heads)[..., 0].tolist() == expected
    assert run.take_heads(None, chosen, heads) is None


def test_bench_of_the_issue_is_checked_in_seconds() -> None:
    """No forward's check computes more than what MAX_CHECKED_SCORES or two heads have, in fp32 and again in bf16."""
    for name, shape in shapes.chosen_shapes(["*"]).items():
        chosen = run.checked_heads(shape, "fwd")
        heads = len(chosen[0]) if chosen else shape.batch * shape.heads_q
        flops = counts.fwd_flops(shape) / (shape.batch * shape.heads_q) * heads
        assert flops < 10e12, name  # 0.2 s at 50 TFLOPS


class Named(str):
    """Stands for a tensor by its name."""

    def transpose(self, *_: int) -> Named:
        return self


SYNONYMS = {"output": "out", "rng_state": "philox_seed", "unused": "philox_offset"}


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("fa2", "_scaled_dot_product_flash_attention"),
        ("cudnn", "_scaled_dot_product_cudnn_attention"),
    ],
)
def test_bench_sdpa_backward_gets_what_its_schema_asks_for(
    name: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = getattr(torch.ops.aten, f"{op}_backward").default._schema.arguments
    made = [Named(SYNONYMS.get(x.name, x.name)) for x in getattr(torch.ops.aten, op).default._schema.returns]
    given: list[object] = []

    def record(*arguments: object) -> tuple[Named, ...]:
        given[:] = arguments
        return (Named("dq"), Named("dk"), Named("dv"))

    monkeypatch.setattr(providers, "has_flash_attn", lambda: False)
    monkeypatch.setattr(torch.ops.aten, op, lambda *_: tuple(made))
    monkeypatch.setattr(torch.ops.aten, f"{op}_backward", record)
    inputs = tuple(map(Named, ("grad_out", "query", "key", "value")))
    ready, (call,) = providers.prepare(providers.PROVIDERS[name], Shape.parse(SHAPE), "bwd", [inputs])
    assert ready.launch(*call) == ("dq", "dk", "dv")
    constants = {"dropout_p": 0.0, "is_causal": True, "attn_bias": None}
    assert given == [constants.get(x.name, x.name) for x in backward if not x.kwarg_only]


def test_bench_sdpa_backward_is_deterministic_while_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*_: object) -> tuple[Named, ...]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        assert seen[-1] != torch.utils.deterministic.fill_uninitialized_memory
        return ()

    seen: list[bool] = []
    monkeypatch.setattr(providers, "has_flash_attn", lambda: False)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", record)
    for deterministic in (False, True):
        ready = providers.fa2_backward(Shape.parse(SHAPE), deterministic)
        ready.launch(*map(Named, ("dout", "q", "k", "v", "out", "lse")), *range(7))
    assert seen == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("deterministic", [False, True])
def test_bench_fa4_backward_is_called_by_keyword(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("dout", "q", "k", "v", "out", "lse")
    monkeypatch.setattr(providers, "import_function", lambda module, name: lambda **given: given)
    given = providers.fa4_backward(Shape.parse(SHAPE), deterministic).launch(*names)
    assert given == {name: name for name in names} | {"causal": True, "deterministic": deterministic}


def fake_process(command: list[str], **_: object) -> subprocess.CompletedProcess:
    """That prints what first_call.py does; the one of cudnn fails."""
    if "cudnn" in command:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no engine")
    return subprocess.CompletedProcess(command, 0, 'a warning\n{"import": 20.0, "call": 5.5}\n', "")


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.filterwarnings("ignore:tl_attention")
def test_bench_host_times_calls_and_first_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("calls", "cache_calls"):
        monkeypatch.setattr(host, name, partial(getattr(host, name), device="cpu"))
    monkeypatch.setattr(host.subprocess, "run", fake_process)
    assert run.main(["--host", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "host.json").read_text())
    ours, flash, *peers = stored["calls"]
    assert (ours["library"], flash["library"]) == ("mha_*_interface", "flash_attn_func")
    assert [ours[mode] for mode in host.MODES] == [5.0] * 4
    assert [flash[mode] for mode in host.MODES] == [5.0] * 3 + [None]
    assert {peer["provider"] for peer in peers} >= {"fa2", "cudnn"}
    assert all(peer["backward"] is None for peer in peers), "the ops take no CPU tensors"
    assert all(peer["reasons"]["backward"] for peer in peers)
    (cached,) = stored["cache_calls"]
    assert [cached[mode] for mode in host.CACHE_MODES] == [5.0] * 3 and not cached["reasons"]
    assert [row.get("total_ms") for row in stored["first_calls"]] == [25.5, 25.5, 25.5, None]
    text = (tmp_path / "host.md").read_text()
    assert "| backward alone | 5.0 | – | – |" in text
    assert "| lengths in a tensor, pages of 64 keys | 5.0 |" in text
    assert "| tl_attention, forward and backward | 20.0 | 5.5 | 25.5 |" in text
    assert "cudnn (torch sdpa), forward: RuntimeError: RuntimeError: no engine" in text
    assert "forward under autograd" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu_stub")
def test_bench_host_fails_where_ours_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("calls", "cache_calls"):
        monkeypatch.setattr(host, name, Stub.boom)
    monkeypatch.setattr(host.subprocess, "run", fake_process)
    assert run.main(["--host", "--out", str(tmp_path)]) == 1
    assert "RuntimeError: no kernel" in (tmp_path / "host.md").read_text()


@pytest.mark.usefixtures("no_hopper")
def test_bench_host_needs_a_gpu(capsys: pytest.CaptureFixture) -> None:
    assert run.main(["--host"]) == 2
    assert "--host: expected a Hopper GPU" in capsys.readouterr().out


def test_bench_environment_needs_no_gpu() -> None:
    facts = environment.facts("python run.py")
    assert facts["command"] == "python run.py"
    assert facts["torch"] == torch.__version__
    assert not math.isnan(len(facts["commit"]))
