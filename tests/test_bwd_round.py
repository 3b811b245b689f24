"""Rounding of dq beside the backward: what it needs, and on a GPU gradients whose sums take the memory of earlier ones."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bwd import run
from test_bwd_apart import apart

from tl_attention import launch
from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import BwdConfig, BwdPass
from tl_attention.config.legality import fault
from tl_attention.kernels.seams.pipeline import FOUR_WARPS_REGISTERS
from tl_attention.kernels.seams.roles import WARPGROUP
from tl_attention.launch import bwd_workspace_bytes
from tl_attention.launch.bwd_passes import BwdSizes, KeyBuffers
from tl_attention.launch.rounding import slots_of
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.options import Options
from tl_attention.problem.target import REGISTERS
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import check_bwd
from tl_attention.testing.shapes import Shape

BF16 = "bfloat16"


def rounding(width: int) -> BwdConfig:
    return apart("stream-K", width, rounds_dq=True)


def config_of(shape: Shape) -> BwdConfig:
    return rounding(64 if shape.head_dim <= 64 else 128)


@pytest.mark.parametrize("width", [64, 128])
def test_warps_that_round_fit(width):
    producer, consumers, third = FOUR_WARPS_REGISTERS
    assert WARPGROUP * (producer + 2 * consumers + third) <= REGISTERS
    for causal in (False, True):
        assert fault(AttnProblem(BF16, width, width, causal), rounding(width)) is None


def test_rounding_needs_the_order_apart_and_the_schedule_stream_k():
    problem = AttnProblem(BF16, 128, 128, True)
    early = BwdConfig((BwdPass("dq+dk+dv", 64, 128, 2, 2, True, "early-sums", "stream-K", rounds_dq=True),))
    for config in (apart("dynamic", rounds_dq=True), apart("dynamic-late", rounds_dq=True), early):
        assert "rounds_dq: expected False" in fault(problem, config)


def test_partial_gradients_are_not_rounded():
    (one,) = rounding(128).passes
    assert one.rounds(AttnProblem(BF16, 128, 128, True))
    assert not one.rounds(AttnProblem(BF16, 128, 128, True, ("partial",)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiles", [1, 4, 8, 33, 200, 2000])
@pytest.mark.parametrize("units", [1, 7, 500])
def test_a_group_fits_the_slots(units, tiles, causal):
    """Tiles of a group may be drawn in any order: with fewer slots one could wait for another that no CTA has drawn."""
    group, slots = slots_of(units, tiles, costs_of(), causal)
    assert min(group, units) <= slots <= units
    assert slots >= min(2, units)
    assert group * tiles >= 132 / 2


def draws_of(buffers: KeyBuffers, units: int, causal: bool) -> list[tuple[int, int]]:
    """(unit, count) of each tile in the order in which CTAs draw them: key_tiles.StreamKOrder and scheduler.Tile in Python."""
    n_blocks, group, _ = buffers.counts
    tiles = units * n_blocks
    numbers = [(n, buffers.sharers) for n in range(buffers.whole)]
    numbers += [(n, 1) for n in range(buffers.whole, tiles) for _ in range(buffers.sharers)]

    def unit(number: int) -> int:
        if not causal:
            return number // n_blocks
        first = number // (group * n_blocks) * group
        return first + (number - first * n_blocks) % min(group, units - first)

    return [(unit(n), count) for n, count in numbers]


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 40),
    heads_kv=st.integers(1, 20),
    heads_per_kv=st.sampled_from([1, 1, 2, 7]),
    seqlen_q=st.integers(1, 5000),
    seqlen_k=st.integers(129, 5000),
    width=st.sampled_from([64, 128]),
    mask=st.sampled_from(["full", "causal", "window"]),
    window_keys=st.integers(1, 3000),
    sms=st.sampled_from([132, 114, 78, 16]),
    running=st.integers(1, 132),
    seed=st.integers(0, 2**32),
)
def test_nothing_waits_forever_and_no_memory_has_two_heads(
    batch, heads_kv, heads_per_kv, seqlen_q, seqlen_k, width, mask, window_keys, sms, running, seed
):
    """CTAs, of which only some run, and warps that round go on in a random order, until each waits or all is done."""
    causal, options = mask == "causal", ("window",) if mask == "window" else ()
    problem, (one,) = AttnProblem(BF16, width, width, causal, options), rounding(width).passes
    queries = min(seqlen_q, window_keys + 128) if options else seqlen_q
    sizes = BwdSizes(
        batch,
        heads_kv * heads_per_kv,
        heads_kv,
        seqlen_q,
        seqlen_k,
        2 * width,
        2,
        costs_of(sms=sms),
        0,
        queries,
    )
    buffers, units, rng = KeyBuffers(one, problem, sizes), batch * heads_kv, random.Random(seed)
    wanted, slots = buffers.counts[0] * buffers.sharers, buffers.slots
    draws = iter(draws_of(buffers, units, causal))
    tiles = {cta: next(draws, None) for cta in range(running)}
    added, rounded = [0] * units, 0
    while rounded < units:
        free = [cta for cta, tile in tiles.items() if tile and tile[0] < slots + rounded]
        ready = added[rounded] == wanted
        assert free or ready, "every CTA waits"
        if ready and (not free or rng.random() < 0.5):
            rounded += 1
        else:
            cta = rng.choice(free)
            unit, count = tiles[cta]
            assert rounded <= unit and all(not added[other] for other in range(unit + slots, units, slots))
            added[unit] += count
            tiles[cta] = next(draws, None)
    assert not any(tiles.values()) and next(draws, None) is None


def test_workspace_does_not_grow_with_the_batch():
    problem = AttnProblem(BF16, 128, 128, True)

    def workspace(batch: int, config: BwdConfig) -> int:
        return bwd_workspace_bytes(batch, 16, 16, 512, 512, problem, config, costs_of())

    rows = 2 * 4 * 512 * 16  # lse and delta of a batch entry
    assert workspace(64, rounding(128)) - workspace(32, rounding(128)) < 32 * (rows + 16 * 2 * 4) + 8192
    assert workspace(64, apart("stream-K")) - workspace(32, apart("stream-K")) > 32 * 512 * 16 * 128 * 4


def after_forward(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """The positional arguments of launch.backward, with out and lse of a forward of scale 0.1."""
    out, lse = launch.forward(q, k, v, 0.1, shape.causal, False)
    return make_dout(shape, q.dtype), q, k, v, out, lse, 0.1, shape.causal, False


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        "2,3,3,1000,1000,128,128,causal",  # several CTAs per tile
        "2,3,3,1000,1000,128,128,full",
        "1,6,2,900,1031,128,128,causal",
        "1,6,2,1031,900,128,120,full",
        "3,4,4,77,333,104,128,causal",  # shares without queries
        "1,1,1,1,1,128,128,full",
        "33,16,16,511,511,128,128,causal",  # sums take the memory of earlier ones
        "16,16,16,1030,1030,128,128,full",
        "40,16,4,300,300,128,128,causal",
        "4,16,16,2000,700,128,128,causal",  # queries without keys
        "33,16,16,130,130,120,120,causal",
        "2,3,3,1000,1000,64,64,causal",
        "1,6,2,1031,900,64,56,full",
        "3,4,4,77,333,48,64,causal",
        "1,1,1,1,1,64,64,full",
        "40,32,32,300,300,64,64,full",
        "65,16,16,511,511,64,64,causal",
        "40,32,8,300,300,64,64,causal",
        "2,8,8,300,4100,64,64,causal",
    ],
)
def test_gradients_match_the_reference(shape):
    parsed = Shape.parse(shape)
    run(parsed, config=config_of(parsed))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_match_in_each_layout_and_dtype(layout, dtype, width):
    shape = Shape.parse(f"30,16,16,270,290,{width},{width},causal")
    run(shape, dtype, layout, scale=0.3, lse_base2=True, with_dlse=layout != "packed", config=rounding(width))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [rounding, functools.partial(apart, "stream-K")], ids=["rounds", "sums"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ("9,16,16,700,900", (100, 30)),
        ("40,16,16,300,300", (1, 0)),
        ("2,16,4,1500,1500", (50, 50)),
        ("1,2,1,140,6000", (3000, 0)),  # CTAs share tiles, and some have no query
        ("3,8,2,900,333", (200, 0)),
        ("1,3,3,36000,36000", (34000, 0)),  # sums of a head are more than those of three tiles per SM
    ],
)
def test_windows_match_the_reference(sizes, window, width, config):
    shape, options = Shape.parse(f"{sizes},{width},{width},full"), Options(window=window)
    q, k, v = make_inputs(shape, torch.bfloat16)
    dout, launched = make_dout(shape, torch.bfloat16), {"options": options}
    out, lse = launch.forward(q, k, v, 0.1, False, False, **launched)
    grads = tuple(
        launch.backward(
            dout, q, k, v, out, lse, 0.1, False, False, config=config(width=width), **launched
        ).values()
    )
    verdict = check_bwd(grads, dout, q, k, v, softmax_scale=0.1, causal=False, window=window)
    assert verdict.ok, verdict.text


@pytest.mark.gpu
def test_not_a_number_stays_in_its_head():
    """Sums of a head with NaN leave zeros behind for the next head."""
    shape = Shape.parse("33,16,16,256,256,128,128,causal")
    q, k, v = make_inputs(shape, torch.bfloat16)
    q[0, :, 3] = math.nan
    arguments = after_forward(shape, q, k, v)
    dq = launch.backward(*arguments, config=rounding(128))["q"]
    assert dq[0, :, 3].isnan().all()
    dq[0, :, 3] = 0
    assert dq.isfinite().all()


@pytest.mark.gpu
def test_streams_at_once():
    """Each kernel has SMs for some of its CTAs only, and all go on."""
    shape = Shape.parse("64,16,16,512,512,128,128,causal")
    arguments = after_forward(shape, *make_inputs(shape, torch.bfloat16))
    expected = tuple(launch.backward(*arguments, config=apart("stream-K")).values())
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(tuple(launch.backward(*arguments, config=rounding(128)).values()))
    torch.cuda.synchronize()
    for result in results:
        for grad, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_dq_in_a_slice_of_a_tensor():
    shape = Shape.parse("5,8,8,400,400,128,128,full")
    arguments = after_forward(shape, *make_inputs(shape, torch.bfloat16))
    expected = launch.backward(*arguments, config=apart("stream-K"))["q"]
    packed = torch.full((5, 400, 3, 8, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    launch.backward(*arguments, dq=packed[:, :, 1], config=rounding(128))
    torch.testing.assert_close(packed[:, :, 1], expected, rtol=0.02, atol=0.02)
    assert packed[:, :, 0].isnan().all() and packed[:, :, 2].isnan().all()
