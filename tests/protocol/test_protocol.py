"""Today's kernels pass the check, and it finds faults that kernels had."""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path

import pytest
import tilelang.language as T
import torch

from tl_attention import kernels, launch
from tl_attention.compilation import compiler
from tl_attention.kernels.scores.mask import KeyBlocks

from . import externs
from .calls import Draw, call_of, kinds
from .check import Program, check
from .launches import Launch, recorded, recording
from .sample import NOT_CHECKED, check_kind

DENSE = "fwd bf16 d128 causal, 128x128 dynamic q2 ping-pong hold-max"
PACKED = "fwd bf16 d192-128 causal varlen, 128x96 dynamic ping-pong hold-max"
THREE_SLOTS = "fwd bf16 d256 causal varlen, 128x64 dynamic q1.5 hold-max"
RAGGED = (300, 300), (44, 44), (700, 700)
SAMPLE_SECONDS = 10.0  # of this process
# Kinds that together launch a kernel of every template
OF_TEMPLATES = (
    "fwd bf16 d64 causal, 128x128 grid split",
    "bwd bf16 d64 causal, dk+dv 96x128x2x2, dq",
    "bwd bf16 d64 full score_mod dense bias",
    "fwd fp32-high d64 causal, 128x128 dynamic q2 terms8",
    "fwd fp32-highest d256 full, 64x32 grid",
    "decode bf16 d64 full window, decode",
    "jvp bf16 d64 causal",
    "bwd_det bf16 d64 full score_mod dense bias",
    "bwd bf16 d64 causal varlen, dq+dk+dv 64x128x4x4 apart dynamic-late",
)


@T.inline
def stop_before_with_all_masked_steps(self, steps):
    """KeyBlocks.stop_before() as it was: it leaves out last steps, but keeps the number of masked ones."""
    self.num_steps[0] = T.shfl_sync(self.num_steps[0] - steps, 0)


def launch_of(name: str, draw: Draw) -> Launch:
    kind = next(kind for kind in kinds() if kind.name == name)
    return next(x for x in recorded(call_of(kind, draw), draw.sms) if x.config == kind.config)


def ends(found: Launch, program: Program) -> set[str | None]:
    """Ends of runs with findings."""
    return {run.end for run in check(found, program, stop=False)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "lengths"), [(DENSE, ((64, 800),)), (PACKED, RAGGED)], ids=["d128-64x800", "d192-128-packed"]
)
def test_masked_steps_beyond_a_warpgroups_steps_deadlock(name, lengths, monkeypatch):
    found = launch_of(name, Draw(lengths, heads=1))
    assert not check(found, Program(found.problem, found.config))
    monkeypatch.setattr(KeyBlocks, "stop_before", stop_before_with_all_masked_steps)
    assert "deadlock" in ends(found, Program(found.problem, found.config))


@pytest.mark.timeout(60)
def test_slot_of_three_that_is_waited_for_a_phase_early_is_found():
    found = launch_of(THREE_SLOTS, Draw(((14, 14),), heads=3, heads_kv=3, sms=1))
    program = Program(found.problem, found.config)
    assert not check(found, program)
    waits = [x for x in program.lines if "'wait', 'Q_empty'" in x and "attend" in x]
    assert waits
    program.use(
        "\n".join(
            "yield ('go',)".rjust(len(x) - len(x.lstrip()) + 13) if x in waits else x for x in program.lines
        )
    )
    kinds_of = {finding.kind for run in check(found, program, stop=False) for finding in run.findings}
    assert "passes early" in kinds_of


@pytest.mark.timeout(150)
def test_every_template_is_checked_but_those_of_the_list():
    chosen = kinds(False)
    passed, skipped = set(), set()
    for start in OF_TEMPLATES:
        kind = next(kind for kind in chosen if kind.name.startswith(start))
        result = check_kind(kind, range(4), orders=1)
        assert not result.faults
        passed |= result.templates
        skipped |= set(result.skipped.values())
    not_checked = {compiler.TEMPLATES[config].kind for config in NOT_CHECKED}
    assert passed == {template.kind for template in compiler.TEMPLATES.values()} - not_checked
    assert skipped == set(NOT_CHECKED.values())


@pytest.mark.timeout(150)
def test_rotating_sample_of_kernels_has_no_fault():
    chosen = kinds()
    today = datetime.date.today().toordinal()
    begin, number, faults = time.process_time(), 0, {}
    while time.process_time() - begin < SAMPLE_SECONDS:
        kind = chosen[(today * 997 + number * 1613) % len(chosen)]
        result = check_kind(kind, [today % 40, (today + 17) % 40], orders=2)
        faults |= result.faults
        assert not [reason for reason in result.skipped.values() if reason not in NOT_CHECKED.values()]
        number += 1
    assert not faults, "\n".join(f"{name}: {texts[0]}" for name, texts in faults.items())


def test_models_name_functions_of_kernels():
    folder = Path(kernels.__file__).parent
    paths = *folder.glob("**/*.py"), *folder.glob("cuda/*.cuh")
    text = "".join(path.read_text() for path in paths)
    for name in (*externs.PURE, *externs.MODELS):
        stem = re.escape(name.rstrip("#"))
        assert re.search(rf"\b(tl_attention_)?{stem}\w*\b|[\"']{stem}", text), name


def test_recording_restores_the_package():
    before = launch.common.compile_kernels, torch.Tensor.is_cuda, torch.cuda.current_device
    with recording() as launches:
        assert torch.zeros(1).is_cuda and not launches
    assert before == (launch.common.compile_kernels, torch.Tensor.is_cuda, torch.cuda.current_device)
    assert not torch.zeros(1).is_cuda


def test_function_without_a_model_is_refused(monkeypatch):
    found = launch_of(DENSE, Draw(((64, 64),)))
    monkeypatch.delitem(externs.MODELS, "store_fragment")
    with pytest.raises(NotImplementedError, match="store_fragment"):
        Program(found.problem, found.config)
