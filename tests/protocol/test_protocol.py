"""The check passes today's kernels and finds faults that they had."""

from __future__ import annotations

import pytest
import tilelang.language as T

from tl_attention.kernels.mask import KeyBlocks

from .calls import Draw, Kind, call_of, kinds
from .check import Program, check
from .launches import recorded

DENSE = "fwd bf16 d128 causal, 128x128 dynamic q2 ping-pong hold-max"


@T.inline
def stop_before_of_faulty_kernels(self, steps):
    """Leave out last steps, but keep the number of masked ones."""
    self.num_steps[0] = T.shfl_sync(self.num_steps[0] - steps, 0)


def kind_of(name: str) -> Kind:
    return next(kind for kind in kinds(False) if kind.name == name)


def runs_of(kind: Kind, draw: Draw) -> list:
    return [
        run
        for launch in recorded(call_of(kind, draw), draw.sms)
        if (launch.problem, launch.config) == (kind.problem, kind.config)
        for run in check(launch, Program(launch.problem, launch.config))
    ]


@pytest.mark.timeout(60)
def test_forward_of_few_queries_and_many_keys_ends():
    assert not runs_of(kind_of(DENSE), Draw(((64, 800),)))


@pytest.mark.timeout(60)
def test_forward_that_keeps_its_masked_steps_deadlocks(monkeypatch):
    monkeypatch.setattr(KeyBlocks, "stop_before", stop_before_of_faulty_kernels)
    assert any(run.end == "deadlock" for run in runs_of(kind_of(DENSE), Draw(((64, 800),))))
