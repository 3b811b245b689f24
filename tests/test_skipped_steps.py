"""Steps of a causal forward that no query of a warpgroup needs: their number, and on a GPU results without them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fwd import run

from tl_attention.kernel_configs import FwdConfig
from tl_attention.kernels.mask import hides_steps
from tl_attention.problem import AttnProblem
from tl_attention.testing.shapes import Shape


def causal_steps(first_query, block_M, block_N, seqlen_q, seqlen_k):
    """mask.KeyBlocks.start() in Python."""
    last_key = first_query + block_M - 1 + seqlen_k - seqlen_q
    return max(-(-min(last_key + 1, seqlen_k) // block_N), 1)


@given(
    st.sampled_from([(128, 64), (128, 80), (128, 96), (128, 112), (128, 160), (192, 128), (192, 80)]),
    st.integers(1, 900),
    st.integers(1, 900),
)
def test_skipped_steps_hold_no_key_that_a_warpgroup_sees(blocks, seqlen_q, seqlen_k):
    block_M, block_N = blocks
    for first_query in range(0, seqlen_q, block_M):
        steps = causal_steps(first_query, *blocks, seqlen_q, seqlen_k)
        for query in range(first_query, first_query + block_M, 64):
            last_seen = query + 63 + seqlen_k - seqlen_q
            hidden = steps - 1 - max(last_seen, 0) // block_N  # mask.KeyBlocks.hidden_steps()
            skipped = max(min(hidden, steps - 1), 0)
            assert skipped < steps
            if skipped:
                assert (steps - skipped) * block_N > last_seen
                assert steps - skipped == 1 or (steps - skipped - 1) * block_N <= last_seen


@pytest.mark.parametrize(
    ("block_M", "block_N", "hides"),
    [
        (128, 64, True),
        (128, 112, True),
        (128, 160, True),
        (192, 128, True),
        (192, 32, False),
        (128, 128, False),
        (64, 64, False),
    ],
)
def test_tiles_that_skip_steps(block_M, block_N, hides):
    assert hides_steps(AttnProblem("bfloat16", 64, 64, True), block_M, block_N, 2) == hides
    assert not hides_steps(AttnProblem("bfloat16", 64, 64, False), block_M, block_N, 2)
    assert not hides_steps(AttnProblem("bfloat16", 64, 64, False, ("window",)), block_M, block_N, 2)


CONFIGS = [
    FwdConfig(128, 64),
    FwdConfig(128, 64, schedule="persistent"),
    FwdConfig(128, 64, schedule="dynamic", q_stages=1.5),
    FwdConfig(128, 64, schedule="dynamic", q_stages=2, hold_max=True, ping_pong=True),
    FwdConfig(128, 64, schedule="dynamic", q_stages=1.5, hold_max=True, ping_pong=True),
    FwdConfig(128, 80, schedule="dynamic", q_stages=2, ping_pong=True),
    FwdConfig(128, 160, schedule="dynamic", q_stages=2, hold_max=True, ping_pong=True),
    FwdConfig(192, 128, schedule="dynamic", q_stages=2, hold_max=True, ping_pong=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "lengths", ["1000,1000", "129,700", "700,129", "1,1000", "64,64", "4096,4096", "321,385"]
)
def test_causal_forwards_match_the_reference(config, lengths):
    run(Shape.parse(f"3,40,40,{lengths},64,causal"), torch.bfloat16, config=config)
