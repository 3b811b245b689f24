"""The matrix on a Hopper GPU in parts; on any machine its classes, draws, watchdog and report."""

from __future__ import annotations

import datetime
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tl_attention.compilation import manifest
from tl_attention.config import configs
from tl_attention.problem.attn_problem import DECODE

from . import command, parent, report
from .classes import pack_classes, shipped_classes
from .draws import DRAWS, WARP_ROWS, draws, residues
from .memory import Arena
from .parent import FAILED, NOT_RUN, PASSED, Result, Results, Settings, run
from .worker import faults_of_draw

CLASSES = shipped_classes()
PARTS = sorted({one.part for one in CLASSES})
SHIPPED = manifest.shipped()
RECORDED = 24  # classes whose launches are recorded, other ones each day
HASHED = 5  # kernels of the report whose texts are hashed, other ones each day
COMMAND = "python -m tests.matrix --report"
needs_tilelang = pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")


@pytest.mark.gpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_on_drawn_lengths(part):
    classes = command.kinds_in_turn([one for one in CLASSES if one.part == part])
    results = run(classes, Settings(jobs=command.default_jobs()))
    assert all(result.state == PASSED for result in results.classes.values()), command.table(results, classes)


def test_classes_launch_the_kernels_of_the_manifest_and_of_the_pack():
    for classes, kernels in ((CLASSES, SHIPPED), (pack_classes(), manifest.pack_kernels())):
        launched = {name: kernel for one in classes for name, kernel in one.kernels.items()}
        assert launched == kernels
        assert len({one.id for one in classes}) == len({one.name for one in classes}) == len(classes)


def _today() -> int:
    return datetime.date.today().toordinal()


@needs_tilelang
@pytest.mark.timeout(1800)
def test_calls_launch_the_kernels_of_their_classes(request):
    """Recorded launches of a rotating sample of classes; with --all-kernels of all, which reach every kernel of the manifest."""
    whole = request.config.getoption("--all-kernels")
    step = len(CLASSES) // RECORDED
    chosen = CLASSES if whole else CLASSES[_today() % step :: step]
    program = (
        "import json, sys; from matrix.classes import shipped_classes; from matrix.recording import launched\n"
        "ids = json.load(sys.stdin)\n"
        "print(json.dumps(launched([one for one in shipped_classes() if one.id in ids], 40 if len(ids) > 99 else 12)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([one.id for one in chosen]),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert found.returncode == 0, found.stderr[-2000:]
    launches = json.loads(found.stdout.splitlines()[-1])
    for one in chosen:
        own = {
            manifest.kernel_name(one.problem.compiled_as, x)
            for x in getattr(one.config, "passes", [one.config])
        }
        assert own <= launches[one.name].keys() <= one.kernels.keys(), one.name
    if whole:
        reached = {name for launched in launches.values() for name in launched}
        assert reached | report.GRACE.keys() >= SHIPPED.keys()


@pytest.mark.parametrize("one", CLASSES[_today() % 7 :: 7], ids=lambda one: one.id)
def test_draws_are_those_of_the_class(one):
    found = draws(one)
    assert found == draws(one) != draws(one, seed=1) and [draw.index for draw in found] == [*range(DRAWS)]
    most = min((x.block_N for x in getattr(one.config, "passes", ()) if x.one_tile), default=10**9)
    for draw in found:
        assert all(q >= 0 and k >= 0 for q, k in draw.lengths) and max(k for _, k in draw.lengths) <= most
        if one.kind == DECODE:
            rows = draw.lengths[0][0] * draw.group
            plain = configs.decode_config(one.problem, rows, one.config.page_rows)
            assert plain.warpgroups == one.config.warpgroups
            assert draw.batch_invariant or not one.config.batch_invariant
            assert all(draw.new <= k for _, k in draw.lengths)
    if one.kind != DECODE:
        assert any(q > k for draw in found for q, k in draw.lengths)
        assert most < 10**9 or any(q < k for draw in found for q, k in draw.lengths)


@pytest.mark.parametrize("block", [64, 128, 192])
def test_residues_end_in_each_group_of_rows(block):
    import random

    found = residues(block, random.Random(0), DRAWS)
    assert len(found) == DRAWS and {-(-n // WARP_ROWS) for n in found if n} == {
        *range(1, block // WARP_ROWS + 1)
    }
    edges = {n + more for n in range(64, block, 64) for more in (-1, 0, 1)}
    assert {0, 1, block - 1} | edges <= {*found}


class FakeTrial:
    """A call whose output is right, but for the memory that it writes and bits that it changes."""

    def __init__(self, arena: Arena, beside: int = 0, changes: bool = False):
        self.arena, self.beside, self.changes, self.runs = arena, beside, changes, 0

    def run(self) -> tuple[torch.Tensor, ...]:
        self.runs += 1
        out = self.arena.empty((3, 5), (5, 1), torch.bfloat16)
        assert out.isnan().all() and out.data_ptr() % 16 == 0
        memory = out.as_strided((15 + abs(self.beside),), (1,), out.storage_offset() + min(self.beside, 0))
        memory[:] = 1 + (self.changes and self.runs == 5) / 128
        return (out,)

    def repeats(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return outputs

    def faults(self, outputs: tuple[torch.Tensor, ...]) -> list[str]:
        return []


def test_draw_finds_other_bits_and_writes_beside_an_output():
    arena = Arena("cpu")
    for _ in range(2):
        assert faults_of_draw(FakeTrial(arena), arena) == []
        for beside in (-1, 1):
            assert "memory beside" in faults_of_draw(FakeTrial(arena, beside), arena)[0]
        assert "bits change" in faults_of_draw(FakeTrial(arena, changes=True), arena)[0]


WORKER = """
import json, os, sys, time
def say(**event): print(json.dumps(event), flush=True)
acts = json.loads({acts!r})
say(kind="ready", gpu="none")
for line in sys.stdin:
    one = json.loads(line)["id"]
    say(kind="at", draw=7, text="draw 7: 3 x 5")
    act = acts.get(one)
    if act == "hang":
        time.sleep(1000)
    if act == "die":
        sys.exit("no such luck")
    wrong = [[7, "draw 7: 3 x 5", "out is wrong"]] if act == "fail" else []
    say(kind="end", failures=wrong, draws=40, launches={{"a": 40}}, seconds=0.5)
"""


def _settings(tmp_path: Path, acts: dict[str, str], **changes) -> Settings:
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format(acts=json.dumps(acts)))
    return Settings(**{"jobs": 3, "hang_limit": 0.5, "worker": (sys.executable, str(path))} | changes)


@pytest.fixture
def built(monkeypatch):
    """All kernels are in the store."""
    monkeypatch.setattr(parent.store, "find", lambda *kernel: Path("kernel.so"))


def test_hang_of_a_class_costs_only_itself(tmp_path, built):
    classes = CLASSES[:9]
    acts = dict(zip((one.id for one in classes), ("hang", "", "die", "", "fail", "hang"), strict=False))
    results = run(classes, _settings(tmp_path, acts))
    states = [results.classes[one.name].state for one in classes]
    assert states == [FAILED, PASSED, FAILED, PASSED, FAILED, FAILED, PASSED, PASSED, PASSED]
    texts = [results.classes[one.name].failures for one in classes]
    assert texts[0][0][:2] == (7, "draw 7: 3 x 5") and texts[0][0][2].startswith("stopped the GPU")
    assert "exit status 1" in texts[2][0][2] and "no such luck" in texts[2][0][2]
    assert texts[4] == [(7, "draw 7: 3 x 5", "out is wrong")]
    lines = command.table(results, classes)
    assert f"python -m tests.matrix --class {classes[0].id} --seed 0 --draw 7" in lines


def test_classes_that_a_time_limit_leaves_are_not_run(tmp_path, built):
    results = run(CLASSES[:5], _settings(tmp_path, {}, time_limit=0.0))
    assert {result.state for result in results.classes.values()} == {
        NOT_RUN
    } and "time limit" in results.why_ended


def test_workers_that_do_not_start_end_the_run(tmp_path, built):
    settings = _settings(tmp_path, {}, worker=(sys.executable, "-c", "raise SystemExit(3)"))
    results = run(CLASSES[:5], settings)
    assert {result.state for result in results.classes.values()} == {NOT_RUN} and "GPU" in results.why_ended


def test_classes_wait_for_their_kernels_while_others_run(tmp_path, monkeypatch):
    """The builder makes the kernels of all classes but one, which fails with its error."""
    classes = [one for one in CLASSES if one.part == "bf16 jvp"][:3]
    names = {kernel: name for one in classes for name, kernel in one.kernels.items()}
    path_of = lambda *kernel: tmp_path / f"{names[kernel].replace('/', ' ')}.so"  # noqa: E731
    path_of(*next(iter(classes[0].kernels.values()))).touch()
    monkeypatch.setattr(parent.store, "kernel_path", path_of)
    monkeypatch.setattr(parent.store, "find", lambda *k: path_of(*k) if path_of(*k).exists() else None)
    program = (
        "import json, pathlib, sys, time\n"
        f"first, second = json.load(sys.stdin); time.sleep(1); pathlib.Path({str(tmp_path)!r}, first + '.so').touch()\n"
        "print(json.dumps({second: 'no registers'}))"
    )
    settings = _settings(tmp_path, {}, builder=(sys.executable, "-c", program))
    results = run(classes, settings)
    assert [results.classes[one.name].state for one in classes] == [PASSED, PASSED, FAILED]
    assert "no registers" in results.classes[classes[2].name].failures[0][2]


def _results(states: dict[str, str], draws_of: int = 40) -> Results:
    by_name = {one.name: one for one in CLASSES}
    found = {
        name: Result(
            state, 40, [(0, "", "wrong")] * (state == FAILED), dict.fromkeys(by_name[name].kernels, draws_of)
        )
        for name, state in states.items()
    }
    return Results("NVIDIA H200", 1.0, found)


def test_report_has_the_kernels_of_classes_that_passed(tmp_path):
    path = tmp_path / "report.json"
    first, second, *_ = (one for one in CLASSES if one.kind == "jvp")
    trace = lambda kernels, jobs: dict.fromkeys(kernels, "abc")  # noqa: E731
    run_of = report.raw(_results({first.name: PASSED, second.name: PASSED}), [first, second])
    run_of = json.loads(json.dumps(run_of))
    assert report.merge(path, [run_of], CLASSES, trace=trace) == (2, 0)
    rows = report.read(path)
    (name,) = first.kernels
    assert rows.keys() == {*first.kernels, *second.kernels} and path.read_text() == report.formatted(rows)
    assert rows[name] == {
        "text": "abc",
        "date": datetime.date.today().isoformat(),
        "gpu": "NVIDIA H200",
        "draws": 40,
    }

    failed = report.raw(_results({first.name: FAILED}), [first])
    assert report.merge(path, [failed], CLASSES, trace=trace) == (0, 1)
    assert report.read(path).keys() == {*second.kernels}


def test_report_leaves_out_kernels_of_other_sources_and_of_few_draws(tmp_path):
    one = next(one for one in CLASSES if one.kind == "jvp")
    run_of = report.raw(_results({one.name: PASSED}), [one])
    assert report.passed([run_of], CLASSES)
    changed = {**run_of, "files": dict.fromkeys(run_of["files"], "another.so")}
    few = report.raw(_results({one.name: PASSED}, report.LEAST_DRAWS - 1), [one])
    assert not report.passed([changed], CLASSES) and not report.passed([few], CLASSES)


def test_kernels_passed_the_matrix():
    """Each shipped kernel has a pass of its present text."""
    rows, kernels = report.read(), manifest.Manifest.read().kernels
    missing = [
        name
        for name, entry in kernels.items()
        if rows.get(name, {}).get("text") != entry["text"] and name not in report.GRACE
    ]
    assert not missing, (
        f"{len(missing)} of {len(kernels)} kernels have no pass of their present text in {report.PATH.name}; run `{COMMAND}` "
        f"on a Hopper GPU, or for these alone with words of their names: {'; '.join(missing[:20])}"
    )


def test_grace_is_of_shipped_kernels_with_reasons():
    assert report.GRACE.keys() <= SHIPPED.keys() and all(report.GRACE.values())


@needs_tilelang
def test_report_has_todays_texts_of_kernels_of_the_pack():
    """A rotating sample of kernels that the manifest does not have."""
    rows, kernels = report.read(), manifest.pack_kernels()
    others = sorted(rows.keys() & kernels.keys() - SHIPPED.keys())
    for name in [others[(_today() * HASHED + i) % len(others)] for i in range(HASHED)] if others else ():
        assert manifest.text_hash(*kernels[name]) == rows[name]["text"], (
            f"{name}: run `{COMMAND} --all` with its words"
        )


def test_report_is_formatted():
    rows = report.read()
    assert not rows or report.PATH.read_text() == report.formatted(rows)
