"""The tuner, with stand-ins for compiling, checking and timing."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fork_server import start_fork_server
from rich.console import Console

from tl_attention.compilation import cubin, manifest, sandbox
from tl_attention.compilation.sandbox import Failure, Sandbox, Sandboxes, time_left
from tl_attention.config import catalog, configs
from tl_attention.config.buckets import buckets
from tl_attention.config.kernel_configs import (
    BwdConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    Config,
    FwdConfig,
    KernelConfig,
)
from tl_attention.problem.attn_problem import BUCKETS, DIRECTIONS, AttnProblem
from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.shapes import Shape
from tl_attention.testing.timer import Timing
from tl_attention.tuning import autotune, progress, steps
from tl_attention.tuning.results import Attempt
from tl_attention.tuning.steps import Row, Steps

pytestmark = pytest.mark.usefixtures("fork_server")

SHAPE = Shape(4, 8, 8, 2048, 2048, 256, 256, True)
PROBLEM = AttnProblem("bfloat16", 256, 256, True)
GOOD = cubin.Report(168, 0, 1000, 100, 1, (), 8, 4, 1, 0, (400,), "SASS")


@pytest.fixture(scope="module")
def fork_server() -> None:
    """Subprocesses import this file; with its imports preloaded they start at once."""
    start_fork_server()


def nothing() -> None:
    pass


def double(x: int) -> int:
    return 2 * x


def misbehave(how: str) -> str:
    if how == "raise":
        raise ValueError("illegal memory access")
    if how == "hang":
        time.sleep(60)
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    return how


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "ValueError: illegal memory access"),
        ("hang", "no end within 0.2 s"),
        ("exit", "died: exit 3"),
        ("segfault", "died: SIGSEGV"),
    ],
)
def test_sandbox_survives_a_call_that_fails(how, text):
    sandbox = Sandbox(nothing)
    try:
        with pytest.raises(Failure, match=text):
            sandbox.call(misbehave, how, limit_s=0.2 if how == "hang" else 10)
        assert sandbox.call(double, 4, limit_s=10) == 8
    finally:
        sandbox.close()


def test_sandboxes_map_yields_results_and_failures():
    with Sandboxes(2, nothing) as sandboxes:
        calls = [("raise",), ("exit",), ("fine",)]
        results = {args[0]: result for args, result in sandboxes.map(misbehave, calls, 10)}
        assert results["fine"] == "fine"
        assert isinstance(results["raise"], Failure) and isinstance(results["exit"], Failure)
        assert list(sandboxes.map(misbehave, calls, 10, begin_by=time.monotonic() - 1)) == []


def test_progress_is_in_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    text = io.StringIO()
    assert list(progress.track(iter("abc"), 3, "compile", Console(file=text))) == ["a", "b", "c"]
    lines = text.getvalue().splitlines()
    assert lines == ["compile: 0/3", "compile: 1/3, 0 s", "compile: 2/3, 0 s", "compile: 3/3, 0 s"]


def test_progress_is_a_bar_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True)
    assert list(progress.track(iter("abc"), 3, "compile", console)) == ["a", "b", "c"]
    assert "compile: 0/3" not in console.file.getvalue()


def test_time_left_is_bounded_by_the_deadline():
    now = time.monotonic()
    assert time_left(300, now + 1000) == 300
    assert 90 < time_left(300, now + 100) <= 100
    assert time_left(300, now - 100) == sandbox.GRACE
    assert time_left(1, now - 100) == 1


DK, DV, DQ = BwdPass("dk", 64, 128, 2, 1), BwdPass("dv", 64, 128), BwdPass("dq", 128, 64, 2, 1)
SMALL_DK, SPILLING_DV, SMALL_DQ = (
    BwdPass("dk", 48, 128),
    BwdPass("dv", 80, 128),
    BwdPass("dq", 128, 48),
)
BWD_CANDIDATES = [
    BwdConfig(passes)
    for passes in ((DK, DV, DQ), (SMALL_DK, DV, DQ), (DK, SPILLING_DV, DQ), (DK, DV, SMALL_DQ))
]

CANDIDATES = [
    configs.default_config(PROBLEM),
    *(FwdConfig(64, block_N) for block_N in (16, 32, 48, 64, 80, 96)),
]
SPILLS, CRASHES, HANGS, RAISES, WRONG = CANDIDATES[1:6]
CANDIDATES_OF = {"fwd": CANDIDATES, "bwd": BWD_CANDIDATES, "bwd_det": BWD_CANDIDATES}


def fake_compile(problem: AttnProblem, config: KernelConfig) -> cubin.Report:
    return dataclasses.replace(GOOD, spill_bytes=432, warnings=("C7512",)) if config == SPILLS else GOOD


def find_right(row: Row, config: Config, shapes: Sequence[Shape]) -> str | None:
    return None


def find_bad_ones(row: Row, config: Config, shapes: Sequence[Shape]) -> str | None:
    bad = {CRASHES: "exit", HANGS: "hang", RAISES: "raise"}
    misbehave(bad.get(config, "fine"))
    return "out[0, 0, 0, 0] is nan" if config == WRONG else None


def fake_time(
    row: Row, candidates: Sequence[FwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[FwdConfig, tuple[float, ...]]:
    return {config: (100.0 + config.block_N, 400.0 + config.block_N)[: len(shapes)] for config in candidates}


def time_that_dies_with_the_first_candidate(
    row: Row, candidates: Sequence[FwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[FwdConfig, tuple[float, ...]]:
    if CANDIDATES[0] in candidates:
        os._exit(7)
    return fake_time(row, candidates, shapes, rounds)


@pytest.fixture
def run_tune(tmp_path, monkeypatch) -> Callable[..., tuple]:
    """tune() with stand-ins; returns the attempts by config, the table, the log and the printed text."""
    monkeypatch.setattr(configs, "candidates", lambda problem, bucket, direction: CANDIDATES_OF[direction])

    def run(
        budget_s: float = 120,
        shapes: Sequence[Shape] = (SHAPE, SHAPE),
        directions: Sequence[str] = ("fwd",),
        **replaced: Callable,
    ) -> tuple:
        stand_ins = Steps(
            nothing,
            nothing,
            **{"compile": fake_compile, "check": find_right, "time": fake_time, **replaced},
            check_limit_s=1,
        )
        printed = io.StringIO()
        results = autotune.tune(
            shapes,
            budget_s,
            directions=directions,
            gpu_name="Test GPU",
            path=tmp_path / "table.json",
            log=tmp_path / "log.jsonl",
            jobs=1,
            console=Console(file=printed, width=200),
            steps=stand_ins,
        )
        attempts = {attempt.config: attempt for group in results.values() for attempt in group}
        log = tmp_path / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return attempts, configs.read_tuned(tmp_path / "table.json"), lines, printed.getvalue()

    return run


def test_spills_of_a_kernel_that_ships_are_no_fault(monkeypatch):
    spilling = dataclasses.replace(GOOD, spill_bytes=432)
    monkeypatch.setitem(manifest.KNOWN_SPILLS, manifest.kernel_name(PROBLEM, SPILLS), 432)
    attempt = Attempt(SPILLS)
    attempt.add_reports({(PROBLEM, SPILLS): spilling})
    assert attempt.fate == "not reached" and not attempt.why
    attempt.add_reports({(PROBLEM, SPILLS): dataclasses.replace(spilling, spill_bytes=436)})
    assert (attempt.fate, attempt.why) == ("faulty", f"{PROBLEM} {SPILLS}: 436 bytes of spills")


def test_tune_survives_bad_candidates(run_tune):
    attempts, table, log, printed = run_tune(check=find_bad_ones)
    fates = {config: (attempt.fate, attempt.why) for config, attempt in attempts.items()}
    assert fates[SPILLS] == ("faulty", f"{PROBLEM} {SPILLS}: 432 bytes of spills, C7512")
    assert fates[CRASHES] == ("failed", "check: died: exit 3")
    assert fates[HANGS] == ("failed", "check: no end within 1 s")
    assert fates[RAISES] == ("failed", "check: ValueError: illegal memory access")
    assert fates[WRONG] == ("wrong", "out[0, 0, 0, 0] is nan")

    rest = [config for config in CANDIDATES if config not in (SPILLS, CRASHES, HANGS, RAISES, WRONG)]
    winner = next(config for config in rest if fates[config][0] == "winner")
    assert winner.block_N == max(config.block_N for config in rest)
    assert all(fates[config][0] in ("winner", "slower") for config in rest)

    (row,) = table["fwd"].values()
    assert configs.config_of_row(PROBLEM, row) == winner
    assert row["tflops"] == round(attempts[winner].final_score, 1)
    assert table["gpu"] == "Test GPU" and table["arch"] == "sm_90a" and table["commit"]
    assert {line["fate"] for line in log} >= {"winner", "faulty", "failed", "wrong"}
    assert log[0]["direction"] == "fwd" and log[0]["key"] == "bf16 d256 causal 4k"
    assert log[0]["reports"][f"{PROBLEM} {FwdConfig(**log[0]['config'])}"]["registers"] == 168
    assert "432 bytes of spills" in printed and "fwd bf16 d256 causal 4k" in printed


def test_tune_score_is_the_geometric_mean(run_tune):
    attempts, *_ = run_tune()
    best = max(attempts.values(), key=lambda attempt: attempt.score)
    assert best.score == pytest.approx((best.tflops[0] * best.tflops[1]) ** 0.5)


def test_tune_repeats_a_crashed_timing_one_by_one(run_tune):
    attempts, table, *_ = run_tune(time=time_that_dies_with_the_first_candidate)
    assert (attempts[CANDIDATES[0]].fate, attempts[CANDIDATES[0]].why) == ("failed", "timing: died: exit 7")
    assert len(table["fwd"]) == 1


def interrupt(tuner: int, row: Row, config: Config, shapes: Sequence[Shape]) -> str | None:
    if shapes[-1].seqlen_k > 4096:
        os.kill(tuner, signal.SIGINT)
        time.sleep(60)
    return None


def test_tune_interrupted_keeps_finished_rows(run_tune):
    later = dataclasses.replace(SHAPE, seqlen_q=16384, seqlen_k=16384)
    _, table, _, printed = run_tune(
        shapes=(SHAPE, SHAPE, later), check=functools.partial(interrupt, os.getpid())
    )
    assert list(table["fwd"]) == ["bf16 d256 causal 4k"]
    assert "bf16 d256 causal long" in printed


def time_that_dies_in_the_final_round(
    row: Row, candidates: Sequence[FwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[FwdConfig, tuple[float, ...]]:
    best = sorted(CANDIDATES, key=lambda config: config.block_N)[-2:]
    if rounds == autotune.FINAL_ROUNDS and set(best) & set(candidates):
        os._exit(7)
    return fake_time(row, candidates, shapes, rounds)


def test_tune_falls_back_to_the_next_best(run_tune):
    attempts, table, *_ = run_tune(time=time_that_dies_in_the_final_round)
    assert sorted(a.config.block_N for a in attempts.values() if a.fate == "failed") == [80, 96]
    (row,) = table["fwd"].values()
    assert row["config"]["block_N"] == 64


def hang(problem: AttnProblem, config: KernelConfig) -> cubin.Report:
    time.sleep(100)
    return GOOD


def test_tune_budget_ends_hanging_candidates(run_tune, monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE", 0.5)
    monkeypatch.setattr(autotune, "COMPILE_FLOOR", 0.5)
    begin = time.monotonic()
    attempts, table, *_ = run_tune(budget_s=2, compile=hang)
    assert time.monotonic() - begin < 60
    assert not table["fwd"]
    assert {attempt.fate for attempt in attempts.values()} == {"failed", "not reached"}


def hang_unless(one: FwdConfig, problem: AttnProblem, config: KernelConfig) -> cubin.Report:
    time.sleep(0 if config == one else 100)
    return GOOD


@pytest.mark.parametrize("reached", CANDIDATES[:2], ids=["what serves now", "another"])
def test_tune_needs_two_timed_candidates_for_a_winner(run_tune, monkeypatch, reached):
    monkeypatch.setattr(sandbox, "GRACE", 0.5)
    monkeypatch.setattr(autotune, "COMPILE_FLOOR", 2)
    attempts, table, *_ = run_tune(budget_s=4, compile=functools.partial(hang_unless, reached))
    assert not table["fwd"] and "winner" not in {attempt.fate for attempt in attempts.values()}


def test_tune_repeats_a_row_that_ran_out_of_time(run_tune, monkeypatch):
    """The first row compiles what others share, and may have no winner at the end of its share of a short budget."""
    later, reached = dataclasses.replace(SHAPE, seqlen_q=16384, seqlen_k=16384), []

    def run(search: autotune.Search, row: Row, *_: object) -> list[Attempt]:
        reached.append(row.bucket)
        fate = "not reached" if len(reached) == 1 else "winner"
        return [Attempt(CANDIDATES[0], fate, tflops=(1.0,), final_tflops=(1.0,))]

    monkeypatch.setattr(autotune.Search, "run", run)
    run_tune(shapes=(SHAPE, later))
    assert reached == ["4k", "long", "4k"]


def test_tune_tries_the_incumbent(run_tune, tmp_path):
    incumbent = FwdConfig(64, 48, schedule="persistent")
    rows = {"bf16 d256 causal 4k": {"config": dataclasses.asdict(incumbent)}}
    (tmp_path / "table.json").write_text(configs.format_tuned({"gpu": "Test GPU", "fwd": rows}))
    attempts, *_ = run_tune()
    assert attempts[incumbent].fate == "slower"


def compile_backward(problem: AttnProblem, config: KernelConfig) -> cubin.Report:
    with Path(os.environ["COMPILED"]).open("a") as file:
        file.write(f"{problem} {config}\n")
    if isinstance(config, BwdDelta | BwdSum):
        return dataclasses.replace(GOOD, hgmma=0, needs_wgmma=False)
    return dataclasses.replace(GOOD, spill_bytes=24) if config == SPILLING_DV else GOOD


def find_small_dk_wrong(row: Row, config: BwdConfig, shapes: Sequence[Shape]) -> str | None:
    return "dk[0, 0, 0, 0] is nan" if SMALL_DK in config.passes else None


def time_by_steps(
    row: Row, candidates: Sequence[BwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[BwdConfig, tuple[float, ...]]:
    base = {"bwd": 100.0, "bwd_det": 50.0}[row.direction]
    return {
        config: (base + sum(one.block_M * one.block_N for one in config.passes),) * len(shapes)
        for config in candidates
    }


def test_tune_searches_the_backward(run_tune, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILED", str(tmp_path / "compiled"))
    _, table, log, printed = run_tune(
        directions=("bwd", "bwd_det"), compile=compile_backward, check=find_small_dk_wrong, time=time_by_steps
    )
    default = BWD_CANDIDATES[0]
    assert table["fwd"] == {}
    for direction in ("bwd", "bwd_det"):
        (row,) = table[direction].values()
        assert configs.config_of_row(PROBLEM, row, direction) == default
        assert f"{direction} bf16 d256 causal 4k" in printed
    assert (
        table["bwd"]["bf16 d256 causal 4k"]["tflops"]
        == table["bwd_det"]["bf16 d256 causal 4k"]["tflops"] + 50
    )

    lines = {(line["direction"], BwdConfig.of(line["config"]["passes"])): line for line in log}
    assert len(lines) == len(log) == 2 * len(BWD_CANDIDATES)
    why = {config: lines["bwd", config]["why"] for config in BWD_CANDIDATES}
    fates = {config: lines["bwd", config]["fate"] for config in BWD_CANDIDATES}
    assert list(fates.values()) == ["winner", "wrong", "faulty", "slower"]
    assert why[BWD_CANDIDATES[1]] == "dk[0, 0, 0, 0] is nan"
    assert why[BWD_CANDIDATES[2]] == f"{PROBLEM} {SPILLING_DV}: 24 bytes of spills"
    kernels = [f"{problem} {config}" for problem, config in default.kernels(PROBLEM)]
    assert list(lines["bwd", default]["reports"]) == kernels

    compiled = (tmp_path / "compiled").read_text().splitlines()
    assert len(compiled) == len(set(compiled)) == len(kernels) + 3  # the others differ in a pass each


def fail_to_compile_dv(problem: AttnProblem, config: KernelConfig) -> cubin.Report:
    if config == SPILLING_DV:
        raise RuntimeError("nvcc refuses the kernel")
    return GOOD


def test_tune_names_the_kernel_that_does_not_compile(run_tune):
    attempts, *_ = run_tune(directions=("bwd",), compile=fail_to_compile_dv, time=time_by_steps)
    failed = attempts[BWD_CANDIDATES[2]]
    assert failed.fate == "failed"
    assert failed.why == f"{PROBLEM} {SPILLING_DV}: compile: RuntimeError: nvcc refuses the kernel"
    assert len(failed.reports) == len(BWD_CANDIDATES[2].kernels(PROBLEM)) - 1


@pytest.fixture
def cpu_steps(monkeypatch):
    """The reference instead of the kernels, on CPU tensors; returns the calls of the backward."""
    calls = []

    def fwd(q, k, v, softmax_scale, causal, lse_base2, config=None):
        out, lse = attention_reference(q, k, v, softmax_scale, causal, lse_base2=lse_base2)
        return out.to(q.dtype), lse

    def bwd(dout, q, k, v, out, lse, softmax_scale, causal, lse_base2, deterministic, config):
        calls.append((deterministic, config))
        grads = attention_backward_reference(dout, q, k, v, softmax_scale, causal)
        factor = 1.1 if len(calls) > 1 and config == BWD_CANDIDATES[1] else 1.0
        return {name: (factor * grad).to(q.dtype) for name, grad in zip("qkv", grads, strict=True)}

    monkeypatch.setattr("tl_attention.launch.forward", fwd)
    monkeypatch.setattr("tl_attention.launch.backward", bwd)
    monkeypatch.setattr(
        steps, "make_inputs", lambda shape, dtype, seed: make_inputs(shape, dtype, seed=seed, device="cpu")
    )
    return calls


SMALL = [Shape(1, 4, 2, 33, 40, 64, 64, True), Shape(2, 2, 2, 20, 9, 64, 64, True)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_check_candidate_compares_to_the_reference(direction, cpu_steps):
    row = Row(direction, AttnProblem("bfloat16", 64, 64, True), "1k")
    config = CANDIDATES_OF[direction][0]
    assert steps.check_candidate(row, config, SMALL) is None
    assert cpu_steps == ([] if direction == "fwd" else [(direction == "bwd_det", config)] * 2)


def test_check_candidate_says_what_is_wrong_with_gradients(cpu_steps):
    row = Row("bwd", AttnProblem("bfloat16", 64, 64, True), "1k")
    assert steps.check_candidate(row, BWD_CANDIDATES[1], SMALL).startswith(f"{SMALL[1]}: ")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_time_candidates_counts_the_flops_of_the_direction(direction, cpu_steps, monkeypatch):
    row = Row(direction, AttnProblem("bfloat16", 64, 64, True), "1k")
    seen = []

    def time_interleaved(calls, rounds):
        seen.extend(len(copies) for copies in calls.values())
        return {config: Timing((copies[0]() and 1e-3,), 1, "graph") for config, copies in calls.items()}

    monkeypatch.setattr(steps.timer, "time_interleaved", time_interleaved)
    monkeypatch.setattr(steps.timer, "rotation", lambda nbytes: 2)
    candidates = CANDIDATES_OF[direction][:2]
    tflops = steps.time_candidates(row, candidates, SMALL, 5)
    widths = {"fwd": 2 * 64}.get(direction, 5 * 64)
    pairs = (4 * 33 * (8 + 40) / 2, 4 * 9 * (1 + 9) / 2)  # visible to all heads
    expected = [2 * count * widths / 1e6 for count in pairs]  # in a microsecond
    assert list(tflops) == candidates and seen == [2] * 4
    assert all(values == pytest.approx(expected) for values in tflops.values())


def test_tune_reports_an_unwritable_table_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        autotune.tune([SHAPE], 1, gpu_name="Test GPU", path=tmp_path / "file" / "table.json")


def test_tune_names_rows_beyond_the_budget(run_tune):
    attempts, table, log, printed = run_tune(budget_s=0)
    assert not attempts and not table["fwd"] and not log
    assert "not reached, left as they were: fwd bf16 d256 causal 4k" in printed


def test_tune_keeps_other_rows_and_drops_unknown_ones(run_tune, tmp_path):
    rows = {key: {"tflops": 1.0} for key in ("fp16 d64 full 1k", "bf16 d64 full 3k", "bf16 d96-64 full 1k")}
    (tmp_path / "table.json").write_text(
        configs.format_tuned({"gpu": "Test GPU", "fwd": rows, "bwd": rows, "bwd_det": rows})
    )
    _, table, *_ = run_tune()
    assert list(table["fwd"]) == ["bf16 d256 causal 4k", "bf16 d96-64 full 1k", "fp16 d64 full 1k"]
    assert list(table["bwd"]) == list(table["bwd_det"]) == ["fp16 d64 full 1k"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_default_shapes_reach_every_class_and_bucket(direction):
    groups = steps.group_shapes(None, ["bfloat16"], [direction])
    problems = [problem for problem in catalog.problems(direction) if problem.dtype == "bfloat16"]
    missing = {(problem.width, problem.mask, bucket) for problem in problems for bucket in buckets(direction)}
    missing -= {(row.problem.width, row.problem.mask, row.bucket) for row in groups}
    # Where d32 full has few tiles they have 128 queries, and CTAs share them wherever they would split keys
    assert missing == ({("d32", "full", "split")} if direction == "fwd" else set())
    assert {row.problem for row in groups} <= set(catalog.problems(direction))
    for row, members in groups.items():
        assert len(members) > (
            1 if direction == "bwd_det" else 2
        )  # heads that share keys are a bucket of their own there
        widths = (row.problem.head_dim, row.problem.head_dim_v)
        assert {(shape.head_dim, shape.head_dim_v) for shape in members} == {widths}


def test_shapes_go_to_the_row_of_each_direction():
    rows = list(steps.group_shapes([dataclasses.replace(SHAPE, head_dim=96, head_dim_v=64)], ["float16"]))
    assert [str(row) for row in rows] == [
        "fwd fp16 d96-64 causal 4k",
        "bwd fp16 d96 causal 4k",
        "bwd_det fp16 d96 causal 4k",
    ]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_one_of_the_default_shapes_of_a_bucket_is_a_benchmark_shape(bucket):
    named = {Shape.parse(text) for text in configs.named_shapes().values()}
    groups = steps.group_shapes(None, ["bfloat16"])
    for direction, head_dim in itertools.product(DIRECTIONS, (64, 128, 256)):
        members = groups[Row(direction, AttnProblem("bfloat16", head_dim, head_dim, False), bucket)]
        assert [member in named for member in members] == [True] + [False] * (len(members) - 1)


def test_check_shapes_have_lengths_that_no_tile_divides():
    shapes = steps.check_shapes([SHAPE])
    assert SHAPE in shapes
    assert any(shape.seqlen_q % 16 and shape.seqlen_k % 16 for shape in shapes)
    assert any(shape.seqlen_q > shape.seqlen_k for shape in shapes)  # rows without a key, if causal
