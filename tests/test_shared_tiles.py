"""The schedule shared of a forward: CTAs share the last tiles by their keys."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tl_attention import legality
from tl_attention.kernel_configs import FwdConfig
from tl_attention.launch import fwd, tickets
from tl_attention.launch.splits import MERGE_STEPS, shared_tiles
from tl_attention.problem import AttnProblem

# Configs of the tuned rows of d128 and d256
SHARED = FwdConfig(128, 128, ping_pong=True, schedule="shared", q_stages=2, hold_max=True)
WIDE = FwdConfig(128, 64, schedule="shared", hold_max=True)


def pieces(cta: int, tiles: int, steps: int, whole: int, sharers: int) -> list[tuple[int, int, int, int]]:
    """(tile, first step, stop, partners) of the pieces of a CTA, in its order: shared_tiles.SharingStream in Python."""
    shared_steps = (tiles - whole) * steps
    begin, end = (x * shared_steps // sharers for x in (cta, cta + 1))
    found = []
    for tile in sorted({(end - 1) // steps, begin // steps}, reverse=True):
        first, stop = max(begin - tile * steps, 0), min(end - tile * steps, steps)
        lowest = ((tile * steps + 1) * sharers - 1) // shared_steps
        found.append((whole + tile, first, stop, -1 if stop < steps else cta - lowest))
    return found


def test_pieces_hold_each_step_once_and_meet_at_their_partners():
    rng = random.Random(0)
    for _ in range(300):
        sms, steps = rng.choice([7, 78, 114, 132]), rng.randint(1, 200)
        tiles = rng.randint(1, 4 * sms)
        whole, sharers = shared_tiles(tiles, steps, sms)
        assert whole % sms == 0 if sharers else whole == tiles
        of_ctas = [pieces(cta, tiles, steps, whole, sharers) for cta in range(sharers)]
        held = [(tile, step) for x in of_ctas for tile, first, stop, _ in x for step in range(first, stop)]
        assert sorted(held) == [(tile, step) for tile in range(whole, tiles) for step in range(steps)]
        written = {cta: piece for cta, x in enumerate(of_ctas) for piece in x if piece[3] < 0}
        for cta, of_cta in enumerate(of_ctas):
            # The piece that other CTAs wait for comes first, and is the only such one
            assert [piece[3] < 0 for piece in of_cta] in ([True], [False], [True, False], [False, False])
            for tile, first, _, partners in of_cta:
                for other in range(cta - 1, cta - 1 - partners, -1):
                    assert written[other][::2] == (tile, first)
                    first = written.pop(other)[1]
                assert first == 0 or partners < 0
        assert not written


@pytest.mark.parametrize(
    ("tiles", "steps", "expected"),
    [
        (2048, 128, (1980, 132)),  # 68 tiles are left
        (192, 32, (132, 120)),  # 60 are left, each for two CTAs
        (110, 64, (0, 132)),
        (264, 64, (264, 0)),  # none is left
        (131, 64, (131, 0)),  # 131 are left
        (2048, 4, (2048, 0)),  # too short
        (133, 2**24, (133, 0)),  # numbers of steps past int32
    ],
)
def test_tiles_are_shared_where_it_is_faster(tiles, steps, expected):
    assert shared_tiles(tiles, steps, 132) == expected


def test_a_tile_has_not_too_many_pieces():
    _, sharers = shared_tiles(133, 128, 132)
    assert 1 < sharers * MERGE_STEPS < 128 // 4


@pytest.mark.parametrize(
    ("dtype", "causal", "options", "legal"),
    [
        ("bfloat16", False, (), True),
        ("float16", False, (), True),
        ("bfloat16", True, (), False),
        ("bfloat16", False, ("window",), False),
        ("float32-high", False, (), False),
    ],
)
def test_shared_is_legal_without_a_mask(dtype, causal, options, legal):
    config = FwdConfig(128, 80, schedule="shared")
    fault = legality.fault(AttnProblem(dtype, 128, 128, causal, options), config)
    assert (fault is None) == legal or "schedule" not in fault


def test_rows_of_flags_are_zeros_of_their_own(monkeypatch):
    monkeypatch.setattr(tickets.TicketCounters, "_allocate", lambda self, device, numbers: setattr(
        self, "rows", torch.zeros(self.length, numbers, dtype=torch.int32)
    ))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(tickets, "_counters", {})
    counter, flags = tickets.stream_tickets(0, True), tickets.stream_tickets(0, True, 132)
    assert counter.shape == (2,) and flags.shape == (132,)
    assert tickets.stream_tickets(0, True, 132).data_ptr() == flags.data_ptr()


def formula(q, k, v, scale):
    """Output and log-sum-exp in fp64, of [batch, rows, heads, columns]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "dtype"), [(128, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)]
)
@pytest.mark.parametrize(
    "sizes",
    [(1, 7, 7, 2432, 3001), (1, 12, 4, 2000, 2777), (2, 5, 5, 1400, 5003), (1, 33, 33, 385, 8011)],
    ids=str,
)
def test_shared_tiles_match_the_formula(sizes, width, dtype):
    """One row of scores is so large that its tile runs twice with a held row max."""
    batch, heads, heads_kv, n, m = sizes
    q = torch.randn(batch, n, heads, width, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, m, heads_kv, width, device="cuda", dtype=dtype) for _ in range(2))
    q[0, n - 1, heads - 1] *= 30
    config = SHARED if width == 128 else WIDE
    config = config if dtype == torch.bfloat16 else config.without_hold_max()
    scale = 1 / math.sqrt(width)
    out, lse = fwd.forward(q, k, v, scale, False, False, config=config)
    expected, expected_lse = formula(q, k, v, scale)
    error = (out.double() - expected).pow(2).mean((1, 3)).sqrt() / expected.pow(2).mean((1, 3)).sqrt()
    assert error.max() < 7e-3
    assert (lse.double() - expected_lse).abs().max() < 5e-2
    again = fwd.forward(q, k, v, scale, False, False, config=config)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
def test_shared_tiles_in_a_cuda_graph():
    q, k, v = (torch.randn(1, 2000, 12, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = fwd.forward(q, k, v, 0.1, False, False, config=SHARED)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fwd.forward(q, k, v, 0.1, False, False, config=SHARED)[0]
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
