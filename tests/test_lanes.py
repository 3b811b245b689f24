"""Launches side by side on two streams: their order, what waits for what, and their results."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch

from tl_attention import flash_attn_func
from tl_attention.distributed import lanes


@pytest.fixture
def events(monkeypatch):
    """Events of streams that stand in for those of a GPU: (stream, what it does)."""
    found, streams = [], []

    class Stream:
        def __init__(self, device):
            self.device, self.number = device, len(streams)
            streams.append(self)

        def wait_stream(self, other):
            found.append((self.number, f"wait {other.number}"))

    @contextlib.contextmanager
    def stream(one):
        streams.append(one)
        yield
        streams.pop()

    current = Stream("gpu")
    monkeypatch.setattr(lanes, "_beside", lanes.Beside())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)

    def launch(number, error=None):
        found.append((streams[-1].number, f"launch {number}"))
        if error is not None:
            raise error
        record = functools.partial(
            lambda number, stream: found.append((stream.number, f"record {number}")), number
        )
        return SimpleNamespace(record_stream=record), None

    return found, launch


GPU = torch.device("cuda", 0)


def test_side_by_side_takes_turns_on_two_streams(events):
    found, launch = events
    results = lanes.side_by_side([functools.partial(launch, number) for number in range(3)], GPU)
    assert len(results) == 3
    assert found == [(1, "wait 0"), (0, "launch 0"), (1, "launch 1"), (0, "launch 2"), (0, "wait 1"), (0, "record 1")]  # fmt: skip
    found.clear()
    lanes.side_by_side([functools.partial(launch, number) for number in range(2)], GPU)
    assert {stream for stream, _ in found} == {0, 1}  # the same stream beside


def test_side_by_side_waits_for_launches_before_an_error(events):
    found, launch = events
    with pytest.raises(ValueError, match="of the second"):
        lanes.side_by_side([lambda: launch(0), lambda: launch(1, ValueError("of the second"))], GPU)
    assert found[-1] == (0, "wait 1")


@pytest.mark.parametrize(("device", "count"), [(torch.device("cpu"), 2), (GPU, 1), (GPU, 0)], ids=str)
def test_side_by_side_of_one_launch_or_on_the_cpu_needs_no_stream(events, device, count):
    found, launch = events
    lanes.side_by_side([functools.partial(launch, number) for number in range(count)], device)
    assert found == [(0, f"launch {number}") for number in range(count)]


@pytest.mark.gpu
def test_side_by_side_results_equal_those_one_after_another():
    on = {"device": "cuda", "dtype": torch.bfloat16}
    problems = [[torch.randn(1, rows, 8, 64, **on) for _ in range(3)] for rows in (1500, 700, 333)]
    launches = [functools.partial(_attended, *qkv) for qkv in problems]
    expected = [launch() for launch in launches]
    for _ in range(8):
        poison = torch.full((1 << 24,), float("nan"), device="cuda")
        del poison
        found = lanes.side_by_side(launches, problems[0][0].device)
        # Memory of the stream beside that is free again is not written before the current stream has read it
        sums = [x + 0 for results in found for x in results]
        del found
        lanes.side_by_side(launches, problems[0][0].device)
        assert all(torch.equal(x, y) for x, y in zip(sums, sum(expected, ()), strict=True))


def _attended(q, k, v):
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    return out, lse
