"""Steps of a forward under a mask that no query of a warpgroup needs: their number, and on a GPU results without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fwd import run
from test_options import Case, check

from tl_attention.config import configs
from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.config.query_tiles import first_queries, first_row, hides_last_steps, hides_steps
from tl_attention.launch import fwd
from tl_attention.problem.attn_problem import SPLIT_BUCKET, AttnProblem
from tl_attention.problem.options import Options
from tl_attention.testing.shapes import Shape


def causal_steps(first_query, block_M, block_N, seqlen_q, seqlen_k):
    """mask.KeyBlocks.start() in Python."""
    last_key = first_query + block_M - 1 + seqlen_k - seqlen_q
    return max(-(-min(last_key + 1, seqlen_k) // block_N), 1)


@given(
    st.sampled_from([(128, 64), (128, 80), (128, 96), (128, 112), (128, 160), (192, 128), (192, 80)]),
    st.integers(1, 900),
    st.integers(1, 900),
    st.booleans(),
)
def test_skipped_steps_hold_no_key_that_a_warpgroup_sees(blocks, seqlen_q, seqlen_k, from_end):
    block_M, block_N = blocks
    for first_query in first_queries(block_M, seqlen_q, from_end):
        steps = causal_steps(first_query, *blocks, seqlen_q, seqlen_k)
        for query in range(first_query, first_query + block_M, 64):
            last_seen = query + 63 + seqlen_k - seqlen_q
            hidden = steps - 1 - max(last_seen, 0) // block_N  # mask.KeyBlocks.hidden_steps()
            skipped = max(min(hidden, steps - 1), 0)
            assert skipped < steps
            kept = steps - skipped
            masked = min(
                max(kept - max(last_seen - 62, 0) // block_N, 1), kept
            )  # keep_queries(), without overlap
            assert kept == masked or (kept - masked) * block_N - 1 <= last_seen - 63
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
    config = FwdConfig(block_M, block_N)
    assert hides_steps(AttnProblem("bfloat16", 64, 64, True), config) == hides
    assert not hides_steps(AttnProblem("bfloat16", 64, 64, False), config)
    window = AttnProblem("bfloat16", 64, 64, False, ("window",))
    assert hides_steps(window, config) == (block_M == 192 and block_N > 32)


@pytest.mark.parametrize(
    ("causal", "options", "config", "hides"),
    [
        (True, (), FwdConfig(128, 128), True),
        (True, ("varlen",), FwdConfig(128, 96), True),
        (False, ("varlen",), FwdConfig(128, 128), True),
        (True, ("varlen",), FwdConfig(128, 96, page_rows=16), False),
        (True, ("softcap",), FwdConfig(128, 128), False),
        (False, ("window",), FwdConfig(192, 128), True),
        (False, ("window",), FwdConfig(128, 128), False),
        (True, (), FwdConfig(192, 128), False),
        (False, (), FwdConfig(128, 128), False),
        (True, (), FwdConfig(64, 64), False),
        (False, ("alibi",), FwdConfig(128, 128), False),
        (True, (), FwdConfig(128, 128, schedule="stream-K"), False),
        (True, (), FwdConfig(128, 128, split=True), False),
    ],
    ids=str,
)
def test_tiles_that_skip_their_last_steps(causal, options, config, hides):
    assert hides_last_steps(AttnProblem("bfloat16", 64, 64, causal, options), config) == hides


@given(
    st.tuples(st.integers(-50, 900), st.integers(-50, 900)),
    st.integers(1, 900),
    st.integers(1, 900),
    st.booleans(),
)
def test_steps_that_a_warpgroup_skips_under_a_window_hold_no_key_that_it_sees(
    window, seqlen_q, seqlen_k, from_end
):
    """mask.KeyBlocks in Python, for tiles of 192 queries and 128 keys."""
    left, right = window
    block_M, block_N, offset = 192, 128, seqlen_k - seqlen_q

    def last_key(query):
        return min(query + offset + right, seqlen_k - 1)

    for first_query in first_queries(block_M, seqlen_q, from_end):
        first_block = max(first_query + offset - left, 0) // block_N
        steps = max(-(-max(last_key(first_query + block_M - 1) + 1, 0) // block_N) - first_block, 1)
        last_block = first_block + steps - 1
        for query in range(first_query, first_query + block_M, 64):
            hidden = max(min(last_block - max(last_key(query + 63), 0) // block_N, steps - 1), 0)
            left_over = steps - hidden
            last = max(min(max(query + offset - left, 0) // block_N - first_block, left_over - 1), 0)
            first, step_0 = first_block + last, last_block - hidden  # blocks
            kept = step_0 + 1 - first
            assert kept > 0
            masked_right = min(max(step_0 + 1 - max(last_key(query), 0) // block_N, 1), kept)
            masked_left = -(-max(query + 63 + offset - left, 0) // block_N) - first
            masked_left = max(min(masked_left, kept - masked_right), 0)
            for row in range(query, min(query + 64, seqlen_q)):
                seen = max(row + offset - left, 0), last_key(row)
                if seen[0] > seen[1]:
                    continue
                assert first * block_N <= seen[0] and seen[1] < (step_0 + 1) * block_N
                assert kept == masked_right or (step_0 + 1 - masked_right) * block_N - 1 <= seen[1]
                assert kept == masked_right + masked_left or (first + masked_left) * block_N >= seen[0]


@pytest.mark.parametrize(
    ("causal", "options", "config", "rows"),
    [
        (False, ("window",), FwdConfig(192, 128), [128, 64, 0]),
        (False, ("window",), FwdConfig(128, 128), [0, 64]),
        (True, (), FwdConfig(192, 128), [128, 64, 0]),
    ],
    ids=str,
)
def test_warpgroup_0_has_the_last_queries_where_steps_are_skipped(causal, options, config, rows):
    problem = AttnProblem("bfloat16", 64, 64, causal, options)
    assert [first_row(problem, config, warpgroup) for warpgroup in range(config.warpgroups)] == rows


def test_wide_windows_have_tiles_of_three_warpgroups():
    for options in (("window",), ("window", "sink"), ("window", "softcap")):
        problem = AttnProblem("bfloat16", 64, 64, False, options)
        assert configs.pick_config(problem, "wide", "NVIDIA H200")[0].block_M == 192
        assert configs.pick_config(problem, "long", "NVIDIA H200")[0].block_M == 128
    others = (
        ("float16", 64, ("window",)),
        ("bfloat16", 64, ("window", "alibi")),
        ("bfloat16", 128, ("window",)),
    )
    for dtype, width, options in others:
        problem = AttnProblem(dtype, width, width, False, options)
        wide, long = (configs.pick_config(problem, bucket, "NVIDIA H200")[0] for bucket in ("wide", "long"))
        assert wide == long


@pytest.mark.parametrize(
    ("batch", "length", "window", "bucket"),
    [
        (8, 4500, (127, 0), "long"),
        (8, 4500, (128, 0), "wide"),
        (8, 4500, (64, 64), "wide"),
        (8, 4500, (-1, 100), "wide"),
        (8, 2000, (512, 0), "wide"),
        (32, 1024, (512, 0), "1k"),
        (1, 4500, (2000, 0), SPLIT_BUCKET),
    ],
)
def test_buckets_of_windows(batch, length, window, bucket):
    sizes = fwd.FwdSizes(batch, 1 if bucket == SPLIT_BUCKET else 16, 1, length, length, 64, 64)
    for num_splits in (0, 1):
        options = Options(window=window, num_splits=num_splits)
        found = fwd._splits_and_bucket(sizes, options, costs_of(), False)[1]
        assert found == bucket or (num_splits == 1 and bucket == SPLIT_BUCKET and found == "wide")


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

WHOLE = [
    FwdConfig(128, 128, schedule="persistent", q_stages=2, hold_max=True, ping_pong=True),
    FwdConfig(128, 128),
    FwdConfig(192, 128, schedule="persistent", q_stages=2, hold_max=True, ping_pong=True),
    FwdConfig(192, 128, schedule="persistent", q_stages=2, ping_pong=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "lengths", ["1000,1000", "129,700", "700,129", "1,1000", "64,64", "4096,4096", "321,385"]
)
def test_causal_forwards_match_the_reference(config, lengths):
    run(Shape.parse(f"3,40,40,{lengths},64,causal"), torch.bfloat16, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("config", WHOLE, ids=str)
@pytest.mark.parametrize(
    "lengths", ["1000,1000", "129,700", "700,129", "1,1000", "64,64", "4097,4097", "321,385"]
)
def test_forwards_whose_last_tile_has_few_queries(lengths, config, causal):
    if config.schedule == "persistent" and causal:
        config = replace(config, schedule="dynamic")
    run(Shape.parse(f"3,40,40,{lengths},64,{'causal' if causal else 'full'}"), torch.bfloat16, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "window",
    [(100, 30), (0, 0), (700, 0), (63, 64), (600, 1500), (0, 300), (3000, 3000), (511, 0), (64, 128)],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths", [(1024, 1024), (1000, 1000), (129, 700), (700, 129), (1, 1000), (2300, 2500)], ids=str
)
@pytest.mark.parametrize("names", ["window", "window sink", "window softcap"])
def test_windows_match_the_reference(names, lengths, window):
    """More tiles than SMs, which CTAs compute one after another."""
    seqlen_q, seqlen_k = lengths
    options = {"heads": 16, "heads_kv": 4, "batch": 3, "window": window}
    case = Case(64, 64, False, tuple(names.split()), seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options)
    config = FwdConfig(192, 128, schedule="dynamic", q_stages=2, hold_max=True, ping_pong=True)
    check(case, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(1023, 0), (600, 500)], ids=str)
@pytest.mark.parametrize("names", ["window", "window softcap"])
def test_windows_of_tiles_that_are_recomputed(names, window):
    """Scores that outgrow the maximum of step 0 by far more than a held row max allows."""
    case = Case(
        64, 64, False, tuple(names.split()), heads=16, seqlen_q=2100, seqlen_k=2100, window=window, softcap=500.0, scale=5.0
    )  # fmt: skip
    check(case, config=FwdConfig(192, 128, schedule="dynamic", q_stages=2, hold_max=True, ping_pong=True))
