"""Shapes, FLOP and byte formulas, the timer and the environment of the benchmark, without a GPU."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import itertools
import math
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_attention.config import configs
from tl_attention.problem.attn_problem import DIRECTIONS
from tl_attention.testing import counts, environment, shapes, timer
from tl_attention.testing.shapes import Shape
from tl_attention.testing.timer import Timing
from tl_attention.tuning import steps

pytest.importorskip("rich", reason="the benchmark needs rich")
import run

SHAPE = "1,2,2,48,48,32,32,causal"

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


def test_bench_rounds_have_orders_of_their_own_and_slow_calls_sit_some_out() -> None:
    costs = {"a": 10, "b": 10, "slow": 100, "naive": 5000}
    orders = timer.round_order(costs, rounds=15, cap_ms=500)
    assert orders == timer.round_order(costs, rounds=15, cap_ms=500)
    assert len(orders) == 15
    assert set(orders[0]) == {"a", "b", "slow", "naive"}
    counts = {name: sum(name in order for order in orders) for name in orders[0]}
    assert counts == {"a": 15, "b": 15, "slow": 5, "naive": timer.MIN_SAMPLES}
    assert {order[0] for order in orders} >= {"a", "b"}
    behind = {(a, b) for order in orders for a, b in itertools.pairwise(order)}
    assert behind >= set(itertools.permutations(("a", "b", "slow"), 2))


def test_bench_speedup_is_the_median_of_the_rounds_ratios() -> None:
    ours, theirs = Timing((1.0, 2.0, 4.0, 8.0), 1, "graph"), Timing((2.0, None, 4.0, 24.0), 1, "graph")
    assert timer.speedup(ours, theirs) == timer.Quartiles(1.5, 2.0, 2.5)
    assert ours.median_ms == 3.0
    assert theirs.median_ms == 4.0


class FakeEvent:
    """CUDA event whose time is a counter that `work` advances."""

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
    """CUDA graph whose replays take 10 ms and call `work`."""

    work = staticmethod(lambda: None)

    def replay(self) -> None:
        FakeEvent.clock += 10
        FakeGraph.work()


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

    monkeypatch.setattr(FakeGraph, "work", staticmethod(lambda: first.fill_(2)))
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
    sizes = {
        set_name: [len(shapes.chosen_shapes(by_pass[name])) for name in ("fwd", "bwd", "fwd_bwd")]
        for set_name, by_pass in run.SHAPES.items()
    }
    assert sizes == {
        "main": [37, 39, 39],
        "more": [54] * 3,
        "options": [14] * 3,
        "fp32": [16] * 3,
        "flex": [39] * 3,
    }
    warm = [name for name in named for pattern in run.WARM if fnmatch.fnmatch(name, pattern)]
    assert len(warm) == 10


def test_bench_untuned_shapes_are_not_those_of_the_tuner() -> None:
    untuned = set(shapes.chosen_shapes(["untuned-*"]).values())
    assert len(untuned) == 22
    tuned = {shape for direction in DIRECTIONS for shape in steps.default_shapes(direction)}
    for path in configs.data_dir().glob("tuned/*.json"):
        table = configs.read_tuned(path)
        tuned |= {
            Shape.parse(text)
            for name in DIRECTIONS
            for row in table[name].values()
            for text in row.get("shapes", ())
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
    with pytest.raises(
        ValueError,
        match=r"'nonsense': not in .*, which has paper-\*, article, .*, flex-\*; or write it as B,Hq,",
    ):
        shapes.chosen_shapes(["nonsense"])
    with pytest.raises(ValueError, match=r"'articel': not in .*; did you mean article\?$"):
        shapes.chosen_shapes(["articel"])


def test_bench_environment_needs_no_gpu() -> None:
    facts = environment.facts("python run.py")
    assert facts["command"] == "python run.py"
    assert facts["torch"] == importlib.metadata.version("torch")
    assert facts["commit"]
