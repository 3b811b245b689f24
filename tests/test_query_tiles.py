"""Tiles of a forward: every query once, no warpgroup with queries on both sides of 0, and fewer steps from the last query."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.config.query_tiles import ROWS, end_at_last_query, first_queries
from tl_attention.problem.attn_problem import AttnProblem


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
        ("bfloat16", True, (), FwdConfig(192, 128, schedule="stream-K"), False),
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
    def steps(length: int, from_end: bool) -> int:
        """Blocks of 128 keys that tiles of 192 queries see."""
        return sum(-(-min(first + 192, length) // 128) for first in first_queries(192, length, from_end))

    for length, expected in ((2048, (101, 96)), (4096, (384, 363)), (8192, (1429, 1408))):
        assert (steps(length, False), steps(length, True)) == expected
