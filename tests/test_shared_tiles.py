"""The schedule stream-K of a forward: CTAs share the last tiles by their keys."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from tl_attention.config import configs, legality
from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.launch import common, fwd, tickets
from tl_attention.launch.splits import (
    Sharing,
    causal_shares,
    causal_steps,
    share_arguments,
    shared_tiles,
)
from tl_attention.problem.attn_problem import BUCKETS, FEW_BUCKET, AttnProblem

# (width, causal) -> config of its shapes with few tiles per SM
CONFIGS = {
    (128, False): FwdConfig(128, 128, ping_pong=True, schedule="stream-K", q_stages=2, hold_max=True),
    (256, False): FwdConfig(128, 64, schedule="stream-K", q_stages=1.5, hold_max=True),
    (64, True): FwdConfig(192, 128, ping_pong=True, schedule="stream-K", q_stages=2),
    (128, True): FwdConfig(128, 128, schedule="stream-K", q_stages=2),
}


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
        whole, sharers = shared_tiles(tiles, steps, costs_of(sms=sms))
        assert whole % sms == 0 if sharers else whole == tiles
        of_ctas = [pieces(cta, tiles, steps, whole, sharers) for cta in range(sharers)]
        assert all(len(of_cta) in (1, 2) for of_cta in of_ctas)
        check_pieces(of_ctas, dict.fromkeys(range(whole, tiles), steps) if sharers else {})


def causal_pieces(
    cta: int, steps: list[int], heads: int, sharers: int, tile_cost: int
) -> list[tuple[int, int, int, int]]:
    """(tile, first step, stop, partners) of the pieces of a CTA, in its order: shared_tiles.CausalSharingStream in Python."""
    costs = [tile_cost + n for n in steps] * heads
    total, found = sum(costs), []
    begin, end = (x * total // sharers for x in (cta, cta + 1))
    for tile in reversed(range(len(costs))):
        before = sum(costs[:tile])
        first, stop = (
            max(begin - before - tile_cost, 0),
            min(end - before - tile_cost, steps[tile % len(steps)]),
        )
        if before + costs[tile] > begin and stop > 0:
            lowest = ((before + tile_cost + 1) * sharers - 1) // total
            found.append((tile, first, stop, -1 if stop < steps[tile % len(steps)] else cta - lowest))
    return found


def check_pieces(of_ctas: list[list[tuple[int, int, int, int]]], steps: dict[int, int]) -> None:
    """Check that the pieces of all CTAs hold each step once, and that those that a CTA merges come before its tile's own one.

    Args:
        steps: of each shared tile.
    """
    held = [(tile, step) for x in of_ctas for tile, first, stop, _ in x for step in range(first, stop)]
    assert sorted(held) == [(tile, step) for tile, n in steps.items() for step in range(n)]
    written = {cta: piece for cta, x in enumerate(of_ctas) for piece in x if piece[3] < 0}
    for cta, of_cta in enumerate(of_ctas):
        # The piece that other CTAs wait for comes first, and is the only such one
        assert all(piece[3] >= 0 for piece in of_cta[1:])
        for tile, first, _, partners in of_cta:
            for other in range(cta - 1, cta - 1 - partners, -1):
                assert written[other][::2] == (tile, first)
                first = written.pop(other)[1]
            assert first == 0 or partners < 0
    assert not written


def test_causal_pieces_hold_each_step_once_and_meet_at_their_partners():
    rng = random.Random(1)
    for _ in range(200):
        heads, seqlen_q, seqlen_k = rng.randint(1, 9), rng.randint(1, 3000), rng.randint(1, 5000)
        blocks = rng.choice([(128, 128), (192, 128), (128, 112), (128, 64)])
        sms = rng.choice([7, 78, 114, 132])
        steps = causal_steps(seqlen_q, seqlen_k, *blocks)
        head_cost, sharers, tile_cost = causal_shares(heads, seqlen_q, seqlen_k, *blocks, costs_of(sms=sms))
        assert head_cost == sum(tile_cost + n for n in steps) and 1 <= sharers <= sms
        of_ctas = [causal_pieces(cta, steps, heads, sharers, tile_cost) for cta in range(sharers)]
        assert all(of_ctas)
        check_pieces(of_ctas, dict(enumerate(steps * heads)))


def test_causal_steps_are_those_of_the_mask():
    for seqlen_q, seqlen_k in ((300, 300), (300, 1000), (1000, 300), (1, 77)):
        keys = [max(min(i + 1 + seqlen_k - seqlen_q, seqlen_k), 0) for i in range(seqlen_q)]
        for block_M, block_N in ((128, 128), (192, 80)):
            tiles = [keys[first : first + block_M] for first in range(0, seqlen_q, block_M)]
            expected = [max(math.ceil(max(tile) / block_N), 1) for tile in tiles]
            found = causal_steps(seqlen_q, seqlen_k, block_M, block_N)
            assert found[:-1] == expected[:-1] and found[-1] == max(math.ceil(seqlen_k / block_N), 1)


def test_a_tile_has_not_too_many_pieces():
    _, sharers = shared_tiles(133, 128, costs_of())
    assert 1 < sharers * costs_of().stream_k.partial < 128 // 4


@pytest.mark.parametrize(
    ("dtype", "causal", "options", "legal"),
    [
        ("bfloat16", False, (), True),
        ("float16", False, (), True),
        ("bfloat16", True, (), True),
        ("bfloat16", False, ("window",), False),
        ("float32-high", False, (), False),
    ],
)
def test_shared_is_legal_without_options(dtype, causal, options, legal):
    config = FwdConfig(128, 80, schedule="stream-K")
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


def test_shared_holds_no_row_max_under_a_causal_mask():
    config = FwdConfig(128, 128, ping_pong=True, schedule="stream-K", hold_max=True)
    assert "hold_max" in legality.fault(AttnProblem("bfloat16", 128, 128, True), config)


@pytest.mark.parametrize("causal", [False, True])
def test_few_tiles_have_one_plan_and_memory_for_pieces(causal, monkeypatch):
    keys, calls = [], []
    problem = AttnProblem("bfloat16", 128, 128, causal)
    config = configs.default_config(problem, bucket=FEW_BUCKET)
    found = fwd.FwdKernels(lambda *args: calls.append(args), config, 132, None, problem, None, None)
    monkeypatch.setattr(fwd, "_find_kernels", lambda key, *args: keys.append(key) or found)
    monkeypatch.setattr(fwd, "_kernels", {})
    monkeypatch.setattr(fwd, "plan_cache", common.PlanCache())
    monkeypatch.setattr(fwd, "device_costs", lambda device: costs_of())
    monkeypatch.setattr(fwd, "stream_tickets", lambda device, drawn, numbers: (drawn, numbers))
    monkeypatch.setattr(fwd, "empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    q, k, v = (torch.zeros(1, 4500, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for _ in range(2):
        fwd.forward(q, k, v, 0.1, causal, False)
    (key,) = keys
    assert key[-2] == FEW_BUCKET
    for args in calls:
        drawn, _, _, heads_per_kv, m_blocks, _, ctas, pieces, *shares = args[5:]
        assert drawn == (True, tickets.TICKETS + 132) and (heads_per_kv, m_blocks, ctas) == (2, 36, 132)
        expected = (
            causal_shares(4, 4500, 4500, 128, 128, costs_of())
            if causal
            else shared_tiles(4 * 36, 36, costs_of())
        )
        assert tuple(shares) == expected
        assert pieces.shape == (shares[1] * 128 // 16, (128 + 8) // 8, 32, 4)
        assert pieces.dtype == torch.float32


def test_no_tile_is_shared_where_one_split_is_asked_for():
    full = AttnProblem("bfloat16", 128, 128, False)
    shares = Sharing(128, 128, causal=False)
    ctas, (whole, sharers) = share_arguments(shares, 16, 16384, 16384, costs_of())
    assert (ctas, whole) == (132, 1980) and sharers
    assert share_arguments(shares, 16, 16384, 16384, costs_of(), num_splits=1) == (132, (2048, 0))
    assert configs.pick_config(full, "long", "NVIDIA H200")[0].schedule == "stream-K"
    # Under a causal mask, where CTAs share all tiles, num_splits=1 finds no row with this schedule
    for gpu in configs.shipped_tables():
        for problem, bucket in ((replace(full, causal=True), name) for name in BUCKETS):
            assert configs.pick_config(problem, bucket, gpu)[0].schedule != "stream-K"


def formula(q, k, v, scale, causal=False):
    """Output and log-sum-exp in fp64, of [batch, rows, heads, columns]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores.masked_fill_(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def config_of(width, causal, dtype=torch.bfloat16):
    config = CONFIGS[width, causal]
    return config if dtype == torch.bfloat16 else config.without_hold_max()


def randn(*sizes, dtype=torch.bfloat16):
    return torch.randn(*sizes, device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "causal", "dtype"),
    [
        (128, False, torch.bfloat16),
        (128, False, torch.float16),
        (256, False, torch.bfloat16),
        (128, True, torch.bfloat16),
        (128, True, torch.float16),
        (64, True, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [(1, 7, 7, 2432, 3001), (1, 12, 4, 2000, 2777), (2, 5, 5, 1400, 5003), (1, 33, 33, 385, 8011)],
    ids=str,
)
def test_shared_tiles_match_the_formula(sizes, width, causal, dtype):
    """One row of scores is so large that its tile runs twice with a held row max."""
    batch, heads, heads_kv, n, m = sizes
    q = randn(batch, n, heads, width, dtype=dtype)
    k, v = (randn(batch, m, heads_kv, width, dtype=dtype) for _ in range(2))
    q[0, n - 1, heads - 1] *= 30
    config, scale = config_of(width, causal, dtype), 1 / math.sqrt(width)
    out, lse = fwd.forward(q, k, v, scale, causal, False, config=config)
    expected, expected_lse = formula(q, k, v, scale, causal)
    error = (out.double() - expected).pow(2).mean((1, 3)).sqrt() / expected.pow(2).mean((1, 3)).sqrt()
    assert error.max() < 7e-3
    assert (lse.double() - expected_lse).abs().max() < 5e-2
    again = fwd.forward(q, k, v, scale, causal, False, config=config)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 3, 3000, 900), (2, 4, 40, 70), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_shared_causal_tiles_of_queries_without_keys_and_of_short_sequences(sizes, width):
    batch, heads, n, m = sizes
    q, (k, v) = randn(batch, n, heads, width), (randn(batch, m, heads, width) for _ in range(2))
    out, lse = fwd.forward(q, k, v, 0.1, True, False, config=config_of(width, True))
    expected, expected_lse = formula(q, k, v, 0.1, True)
    unseen = max(n - m, 0)
    assert not out[:, :unseen].any() and (lse[..., :unseen] == -math.inf).all()
    torch.testing.assert_close(out[:, unseen:].double(), expected[:, unseen:], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[..., unseen:].double(), expected_lse[..., unseen:], rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_shared_tiles_in_a_cuda_graph(causal):
    q, k, v = (randn(1, 2000, 12, 128) for _ in range(3))
    config = config_of(128, causal)
    expected = fwd.forward(q, k, v, 0.1, causal, False, config=config)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fwd.forward(q, k, v, 0.1, causal, False, config=config)[0]
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_shared_tiles_on_two_streams_at_once(causal):
    inputs = [[randn(1, 2100, heads, 128) for _ in range(3)] for heads in (9, 14)]
    config = config_of(128, causal)
    expected = [fwd.forward(*x, 0.1, causal, False, config=config)[0] for x in inputs]
    streams, found = [torch.cuda.Stream() for _ in inputs], [[], []]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, x, outs in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(fwd.forward(*x, 0.1, causal, False, config=config)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, one) for one, outs in zip(expected, found, strict=True) for out in outs)
