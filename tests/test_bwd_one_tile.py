"""Backward where one tile has all keys of a head: its bucket and configs, and on a GPU its gradients, whose dq is stored without sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_bwd import both_modes, run

from tl_attention import launch
from tl_attention.checks.common import check_one_tile
from tl_attention.config import catalog, configs
from tl_attention.config.buckets import buckets, bwd_bucket
from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import BwdConfig
from tl_attention.config.legality import fault
from tl_attention.kernels.backward.key_tiles import dq_pieces
from tl_attention.launch.bwd_passes import BwdSizes, KeyBuffers
from tl_attention.problem.attn_problem import (
    AttnProblem,
)
from tl_attention.problem.target import DEFAULT_GPU
from tl_attention.testing.inputs import LAYOUTS, make_dout, make_inputs
from tl_attention.testing.shapes import Shape

D64 = AttnProblem("bfloat16", 64, 64, False)
WIDTHS = 32, 64, 96, 128


def tile_config(problem: AttnProblem, direction: str = "bwd", bucket: str = "tile") -> BwdConfig:
    return configs.pick_config(problem, bucket, DEFAULT_GPU, direction)[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_bucket_holds_the_keys_of_a_tile(deterministic):
    assert bwd_bucket(deterministic, 8, 2, 128) == "tile"
    assert bwd_bucket(deterministic, 8, 8, 129) == "tile192"
    assert bwd_bucket(deterministic, 8, 8, 192) == "tile192"
    assert bwd_bucket(deterministic, 8, 8, 193) == "1k"
    assert bwd_bucket(deterministic, 8, 8, 128, partial=True) == "1k"  # fp32 gradients
    assert bwd_bucket(deterministic, 8, 8, 192, partial=True) == "1k"


@pytest.mark.parametrize("direction", ["bwd", "bwd_det"])
def test_configs_of_the_bucket_alone_have_one_tile(direction):
    for problem in catalog.problems(direction):
        has_kernel = not problem.is_fp32 and problem.width in {f"d{width}" for width in WIDTHS}
        config = tile_config(problem, direction)
        assert config.deterministic or direction == "bwd"
        assert any(one.one_tile for one in config.passes) == has_kernel
        wide = tile_config(problem, direction, "tile192")
        assert any(one.one_tile for one in wide.passes) == (
            problem.width in ("d32", "d64") and not problem.is_fp32
        )
        for bucket in set(buckets(direction)) - {"tile", "tile192"}:
            found = [config for config in configs.candidates(problem, bucket, direction)]
            found.append(configs.pick_config(problem, bucket, DEFAULT_GPU, direction)[0])
            assert not any(one.one_tile for config in found for one in config.passes)


def test_other_widths_take_the_rows_of_other_lengths():
    problem = AttnProblem("bfloat16", 256, 256, False)
    assert tile_config(problem) == configs.pick_config(problem, "1k", DEFAULT_GPU, "bwd")[0]


def test_third_warpgroup_computes_nothing_of_dq():
    pieces = dq_pieces(64, 64, 3)
    assert pieces[:2] == dq_pieces(64, 64, 2) and pieces[2] == []
    (one,) = tile_config(D64, bucket="tile192").passes
    for changes in ({"one_tile": False}, {"block_M": 128}):
        assert "block_N: expected 128" in fault(D64, BwdConfig((replace(one, **changes),)))


@pytest.mark.parametrize("changes", [{"schedule": "grid"}, {"schedule": "ordered"}, {"schedule": "dynamic"}])
def test_one_tile_needs_its_schedules(changes):
    config = tile_config(D64)
    (one,) = config.passes
    assert fault(D64, config) is None
    assert "one_tile: expected False" in fault(D64, replace(config, passes=(replace(one, **changes),)))
    late = replace(config, passes=(replace(one, schedule="dynamic-late"),))
    assert fault(D64, late) is None
    assert "one_tile: expected False" in fault(replace(D64, options=("window",)), late)


def test_longer_keys_are_refused():
    check_one_tile(128, 128)
    check_one_tile(192, 192)
    with pytest.raises(ValueError, match="expected at most 128 keys with one_tile, got 129"):
        check_one_tile(128, 129)


def sizes(seqlen_q: int, seqlen_k: int, batch: int = 8, heads: int = 16, heads_kv: int = 4) -> BwdSizes:
    return BwdSizes(batch, heads, heads_kv, seqlen_q, seqlen_k, 128, 2, costs_of(), 0, seqlen_q)


def test_no_sums_of_dq_and_sharers_by_visited_queries():
    (one,) = tile_config(D64).passes
    assert sizes(500, 120).unseen_queries(one, True) == 256  # 380 see no key
    assert sizes(500, 120).unseen_queries(one, False) == sizes(77, 120).unseen_queries(one, True) == 0
    causal = replace(D64, causal=True)
    for problem in (D64, causal):
        buffers = KeyBuffers(one, problem, sizes(500, 120))
        (dq_rows, *_), *_ = buffers.workspace[0]
        assert buffers.writes_dq and dq_rows == 0 and buffers.sharers > 1
    alone = KeyBuffers(one, causal, sizes(128, 128, batch=64, heads_kv=16))
    assert alone.sharers == 1 and all(shape[0] == 0 for shape, *_ in alone.workspace)


@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "width"),
    [(64, 48, 3, 125, 100, 128), (16, 64, 8, 129, 129, 64), (128, 8, 2, 180, 180, 64)],
)
def test_causal_pass_shares_all_tiles_or_none(batch, heads, heads_kv, seqlen_q, seqlen_k, width):
    """More key tiles than SMs, with query heads that would be shared in the last ones. Such calls ended in an AssertionError."""
    bucket = bwd_bucket(False, heads, heads_kv, seqlen_k)
    problem = AttnProblem("bfloat16", width, width, True)
    (one,) = tile_config(problem, bucket=bucket).passes
    many = BwdSizes(
        batch, heads, heads_kv, seqlen_q, seqlen_k, 2 * width, 2, costs_of(), 0, min(seqlen_q, seqlen_k)
    )
    buffers = KeyBuffers(one, problem, many)
    assert one.one_tile and (buffers.sharers, buffers.whole) == (1, batch * heads_kv)


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize(
    "shape",
    [
        "4,16,16,3000,77,64,64,full",
        "8,16,16,59,59,64,64,full",
        "8,16,16,59,59,64,64,causal",
        "64,16,16,128,128,128,128,causal",
        "8,16,4,500,120,128,128,causal",  # more queries than keys: the first see none
        "8,16,4,500,120,64,64,full",
        "2,8,8,1000,90,64,64,causal",
        "3,5,5,77,128,96,96,causal",
        "2,3,3,333,1,96,80,full",
        "1,4,2,129,100,40,40,full",
        "20,10,10,4096,77,128,120,full",
        "200,8,8,150,150,64,64,causal",
        "16,12,12,190,190,64,64,full",
        "8,16,4,1000,144,64,64,full",
        "2,6,2,500,129,64,48,causal",
        "1,4,4,77,192,40,40,causal",
    ],
)
def test_gradients_match_the_reference(shape, deterministic):
    run(Shape.parse(shape), deterministic=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen_k", [100, 160])
def test_gradients_match_in_each_layout_and_dtype(layout, dtype, seqlen_k):
    shape = Shape.parse(f"3,12,4,400,{seqlen_k},64,64,causal")
    run(shape, dtype, layout, scale=0.3, lse_base2=True, with_dlse=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", ["8,16,4,500,120,128,128,causal", "4,16,16,3000,77,64,64,full", "8,16,16,150,150,64,64,causal"]
)
def test_gradients_are_equal_bit_by_bit(shape):
    shape = Shape.parse(shape)
    q, k, v = make_inputs(shape, torch.bfloat16)
    dout = make_dout(shape, torch.bfloat16)
    out, lse = launch.forward(q, k, v, 0.1, shape.causal, False)
    backward = partial(launch.backward, dout, q, k, v, out, lse, 0.1, shape.causal, False)
    expected = backward()
    for _ in range(20):
        assert all(map(torch.equal, backward().values(), expected.values()))
