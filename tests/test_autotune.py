"""The tuner, with steps that stand in for compiling, checking and timing: what a bad candidate costs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import time
from collections.abc import Callable, Sequence

import pytest
from rich.console import Console

from tl_attention import autotune, configs, cubin, sandbox
from tl_attention.autotune import Trial
from tl_attention.problem import BUCKETS, AttnProblem, FwdConfig
from tl_attention.sandbox import Failure, Sandbox, Sandboxes, time_left
from tl_attention.testing.bench import Shape

SHAPE = Shape(1, 8, 8, 2048, 2048, 256, 256, True)
PROBLEM = AttnProblem("bfloat16", 256, 256, True)
GOOD = cubin.Report(168, 0, 1000, 100, 1, (), 8, 4, 1, (400,), "SASS")


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
def test_sandbox_call_that_fails_costs_only_itself(how, text):
    sandbox = Sandbox(nothing)
    try:
        with pytest.raises(Failure, match=text):
            sandbox.call(misbehave, how, limit_s=0.2 if how == "hang" else 10)
        assert sandbox.call(double, 4, limit_s=10) == 8
    finally:
        sandbox.close()


def test_sandboxes_map_gives_results_and_failures():
    with Sandboxes(2, nothing) as sandboxes:
        calls = [("raise",), ("exit",), ("fine",)]
        results = {args[0]: result for args, result in sandboxes.map(misbehave, calls, 10)}
        assert results["fine"] == "fine"
        assert isinstance(results["raise"], Failure) and isinstance(results["exit"], Failure)
        assert list(sandboxes.map(misbehave, calls, 10, begin_by=time.monotonic() - 1)) == []


def test_time_left_is_bounded_by_the_deadline():
    now = time.monotonic()
    assert time_left(300, now + 1000) == 300
    assert 90 < time_left(300, now + 100) <= 100
    assert time_left(300, now - 100) == sandbox.GRACE
    assert time_left(1, now - 100) == 1


CANDIDATES = [
    configs.default_config(PROBLEM),
    *(FwdConfig(64, block_N) for block_N in (16, 32, 48, 64, 80, 96)),
]
SPILLS, CRASHES, HANGS, RAISES, WRONG = CANDIDATES[1:6]


def fake_compile(problem: AttnProblem, config: FwdConfig) -> cubin.Report:
    return dataclasses.replace(GOOD, spill_bytes=432, warnings=("C7512",)) if config == SPILLS else GOOD


def find_right(problem: AttnProblem, config: FwdConfig, shapes: Sequence[Shape]) -> str | None:
    return None


def find_bad_ones(problem: AttnProblem, config: FwdConfig, shapes: Sequence[Shape]) -> str | None:
    bad = {CRASHES: "exit", HANGS: "hang", RAISES: "raise"}
    misbehave(bad.get(config, "fine"))
    return "out[0, 0, 0, 0] is nan" if config == WRONG else None


def fake_time(
    problem: AttnProblem, candidates: Sequence[FwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[FwdConfig, tuple[float, ...]]:
    return {config: (100.0 + config.block_N, 400.0 + config.block_N)[: len(shapes)] for config in candidates}


def time_that_dies_of_a_candidate(
    problem: AttnProblem, candidates: Sequence[FwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[FwdConfig, tuple[float, ...]]:
    if CANDIDATES[0] in candidates:
        os._exit(7)
    return fake_time(problem, candidates, shapes, rounds)


@pytest.fixture
def run_tune(tmp_path, monkeypatch) -> Callable[..., tuple]:
    """tune() with stand-ins; returns the attempts by config, the table, the log and what was printed."""
    monkeypatch.setattr(configs, "candidates", lambda problem, bucket: CANDIDATES)

    def run(budget_s: float = 120, shapes: Sequence[Shape] = (SHAPE, SHAPE), **steps: Callable) -> tuple:
        trial = Trial(
            nothing,
            nothing,
            **{"compile": fake_compile, "check": find_right, "time": fake_time, **steps},
            check_limit_s=1,
        )
        printed = io.StringIO()
        results = autotune.tune(
            shapes,
            budget_s,
            gpu_name="Test GPU",
            path=tmp_path / "table.json",
            log=tmp_path / "log.jsonl",
            jobs=1,
            console=Console(file=printed, width=200),
            trial=trial,
        )
        attempts = {attempt.config: attempt for group in results.values() for attempt in group}
        log = tmp_path / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return attempts, configs.read_tuned(tmp_path / "table.json"), lines, printed.getvalue()

    return run


def test_tune_bad_candidates_cost_only_themselves(run_tune):
    attempts, table, log, printed = run_tune(check=find_bad_ones)
    fates = {config: (attempt.fate, attempt.why) for config, attempt in attempts.items()}
    assert fates[SPILLS] == ("faulty", "432 bytes of spills, C7512")
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
    assert row["tflops"] == round(attempts[winner].score_again, 1)
    assert table["gpu"] == "Test GPU" and table["arch"] == "sm_90a" and table["commit"]
    assert {line["fate"] for line in log} >= {"winner", "faulty", "failed", "wrong"}
    assert log[0]["report"]["registers"] == 168
    assert "432 bytes of spills" in printed and "bf16 d256 causal 4k" in printed


def test_tune_score_is_the_geometric_mean(run_tune):
    attempts, *_ = run_tune()
    best = max(attempts.values(), key=lambda attempt: attempt.score)
    assert best.score == pytest.approx((best.tflops[0] * best.tflops[1]) ** 0.5)


def test_tune_timing_that_dies_is_repeated_one_by_one(run_tune):
    attempts, table, *_ = run_tune(time=time_that_dies_of_a_candidate)
    assert (attempts[CANDIDATES[0]].fate, attempts[CANDIDATES[0]].why) == ("failed", "timing: died: exit 7")
    assert len(table["fwd"]) == 1


def interrupt(problem: AttnProblem, config: FwdConfig, shapes: Sequence[Shape]) -> str | None:
    if shapes[-1].seqlen_k > 4096:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    return None


def test_tune_interrupted_keeps_what_is_done(run_tune):
    later = dataclasses.replace(SHAPE, seqlen_q=16384, seqlen_k=16384)
    _, table, _, printed = run_tune(shapes=(SHAPE, SHAPE, later), check=interrupt)
    assert list(table["fwd"]) == ["bf16 d256 causal 4k"]
    assert "bf16 d256 causal long" in printed


def time_that_dies_of_the_best_again(
    problem: AttnProblem, candidates: Sequence[FwdConfig], shapes: Sequence[Shape], rounds: int
) -> dict[FwdConfig, tuple[float, ...]]:
    best = sorted(CANDIDATES, key=lambda config: config.block_N)[-2:]
    if rounds == autotune.FINAL_ROUNDS and set(best) & set(candidates):
        os._exit(7)
    return fake_time(problem, candidates, shapes, rounds)


def test_tune_falls_back_to_the_next_best(run_tune):
    attempts, table, *_ = run_tune(time=time_that_dies_of_the_best_again)
    assert sorted(a.config.block_N for a in attempts.values() if a.fate == "failed") == [80, 96]
    (row,) = table["fwd"].values()
    assert row["config"]["block_N"] == 64


def hang(problem: AttnProblem, config: FwdConfig) -> cubin.Report:
    time.sleep(100)
    return GOOD


def test_tune_budget_cuts_what_hangs(run_tune, monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE", 0.5)
    monkeypatch.setattr(autotune, "COMPILE_FLOOR", 0.5)
    begin = time.monotonic()
    attempts, table, *_ = run_tune(budget_s=2, compile=hang)
    assert time.monotonic() - begin < 60  # to start a process takes most of it
    assert not table["fwd"]
    assert {attempt.fate for attempt in attempts.values()} == {"failed", "not reached"}


def hang_unless_first(problem: AttnProblem, config: FwdConfig) -> cubin.Report:
    time.sleep(0 if config == CANDIDATES[1] else 100)
    return GOOD


def test_tune_names_no_winner_without_what_serves_now(run_tune, monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE", 0.5)
    monkeypatch.setattr(autotune, "COMPILE_FLOOR", 5)
    attempts, table, *_ = run_tune(budget_s=8, compile=hang_unless_first)
    assert not table["fwd"] and "winner" not in {attempt.fate for attempt in attempts.values()}


def test_tune_tries_what_its_table_has_first(run_tune, tmp_path):
    incumbent = FwdConfig(64, 48, num_stages=3)
    rows = {"bf16 d256 causal 4k": {"config": dataclasses.asdict(incumbent)}}
    (tmp_path / "table.json").write_text(configs.format_tuned({"gpu": "Test GPU", "fwd": rows}))
    attempts, *_ = run_tune()
    assert attempts[incumbent].fate == "slower"


def test_tune_says_at_once_that_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        autotune.tune([SHAPE], 1, gpu_name="Test GPU", path=tmp_path / "file" / "table.json")


def test_tune_says_what_the_budget_did_not_reach(run_tune):
    attempts, table, log, printed = run_tune(budget_s=0)
    assert not attempts and not table["fwd"] and not log
    assert "not reached, left as they were: bf16 d256 causal 4k" in printed


def test_tune_keeps_other_rows_of_the_table_that_a_problem_has(run_tune, tmp_path):
    rows = {key: {"tflops": 1.0} for key in ("fp16 d64 full 1k", "bf16 d64 full 3k")}
    (tmp_path / "table.json").write_text(configs.format_tuned({"gpu": "Test GPU", "fwd": rows}))
    _, table, *_ = run_tune()
    assert list(table["fwd"]) == ["bf16 d256 causal 4k", "fp16 d64 full 1k"]


def test_default_shapes_reach_every_class_and_bucket():
    groups = autotune.group_shapes(autotune.default_shapes(), ["bfloat16"])
    assert len(groups) == 3 * len(configs.problems()) // 2
    assert all(len(members) > 2 for members in groups.values())


@pytest.mark.parametrize("bucket", BUCKETS)
def test_one_of_the_default_shapes_of_a_bucket_is_a_benchmark_shape(bucket):
    named = {Shape.parse(text) for text in configs.named_shapes().values()}
    groups = autotune.group_shapes(autotune.default_shapes(), ["bfloat16"])
    for head_dim in (64, 128, 256):
        members = groups[AttnProblem.of("bfloat16", head_dim, head_dim, False), bucket]
        assert [member in named for member in members] == [True] + [False] * (len(members) - 1)


def test_check_shapes_have_lengths_that_no_tile_divides():
    shapes = autotune.check_shapes([SHAPE])
    assert SHAPE in shapes
    assert any(shape.seqlen_q % 16 and shape.seqlen_k % 16 for shape in shapes)
    assert any(shape.seqlen_q > shape.seqlen_k for shape in shapes)  # rows without a key, if causal
