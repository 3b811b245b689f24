"""Tiles of a forward: every query once, no warpgroup with queries on both sides of 0, and the steps that warpgroups take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_attention.explain.tiles import forward_tiles, query_tiles
from tl_attention.kernel_configs import FwdConfig
from tl_attention.problem import AttnProblem
from tl_attention.query_tiles import ROWS, end_at_last_query, first_queries
from tl_attention.testing.counts import bounds
from tl_attention.testing.shapes import Shape


@given(st.sampled_from([64, 128, 192]), st.integers(1, 2000), st.booleans())
def test_tiles_hold_each_query_once(block_M, seqlen_q, from_end):
    firsts = first_queries(block_M, seqlen_q, from_end)
    assert len(firsts) == -(-seqlen_q // block_M)
    rows = [row for first in firsts for row in range(first, first + block_M)]
    assert [row for row in rows if 0 <= row < seqlen_q] == list(range(seqlen_q))
    assert all(first % ROWS == 0 for first in firsts)
    if from_end:
        assert -block_M < firsts[0] <= 0 and rows[-1] // ROWS == (seqlen_q - 1) // ROWS


@pytest.mark.parametrize(
    ("dtype", "causal", "options", "config", "from_end"),
    [
        ("bfloat16", True, (), FwdConfig(192, 128), True),
        ("float16", True, ("softcap", "sink"), FwdConfig(128, 96), True),
        ("bfloat16", False, ("window",), FwdConfig(192, 128), True),
        ("bfloat16", True, (), FwdConfig(192, 128, schedule="shared"), False),
        ("bfloat16", False, (), FwdConfig(192, 128), False),
        ("bfloat16", True, (), FwdConfig(128, 128), False),
        ("bfloat16", True, (), FwdConfig(192, 128, split=True), False),
        ("bfloat16", True, ("varlen",), FwdConfig(128, 96), False),
        ("bfloat16", True, ("varlen",), FwdConfig(128, 96, page_rows=16), False),
        ("bfloat16", True, ("added",), FwdConfig(192, 128), False),
        ("float32", True, (), FwdConfig(128, 96), False),
    ],
    ids=str,
)
def test_forwards_whose_tiles_end_at_the_last_query(dtype, causal, options, config, from_end):
    problem = AttnProblem(dtype, 64, 64, causal, options)
    assert end_at_last_query(problem, config) == from_end


def test_causal_tiles_of_192_queries_have_fewer_steps():
    for length, steps in ((2048, (101, 96)), (4096, (384, 363)), (8192, (1429, 1408))):
        shape = Shape.parse(f"1,1,1,{length},{length},64,causal")
        assert tuple(sum(query_tiles(shape, 192, 128, from_end)[0]) for from_end in (False, True)) == steps


@pytest.mark.parametrize(
    "text",
    [
        "1,1,1,600,600,64,causal",
        "1,1,1,700,300,64,causal",
        "1,1,1,300,900,64,causal,window=255",
        "1,1,1,500,600,64,full,window=90",
    ],
)
def test_steps_of_a_tile_are_the_mean_of_its_warpgroups(text):
    """Blocks of keys that a mask drawn pair by pair shows to 64 queries, also to those before query 0; at least one."""
    shape = Shape.parse(text)
    config, (left, right) = FwdConfig(192, 128), bounds(shape)
    q, k = shape.seqlen_q, shape.seqlen_k

    def steps(row):
        rows = range(row, row + ROWS)
        return max(len({j // 128 for i in rows for j in range(k) if -left <= j - i - (k - q) <= right}), 1)

    firsts = first_queries(192, q, from_end=True)
    expected = [sum(steps(row) for row in range(first, first + 192, ROWS)) / 3 for first in firsts]
    assert forward_tiles(shape, shape.problem("bfloat16", "fwd"), config) == [pytest.approx(expected)]


def test_warpgroups_without_queries_have_one_step():
    for mask, last in (("causal", (7 + 1) / 2), ("full", 7)):
        shape = Shape.parse(f"1,1,1,777,777,64,{mask}")
        *_, steps = forward_tiles(shape, shape.problem("bfloat16", "fwd"), FwdConfig(128, 128))[0]
        assert steps == last
