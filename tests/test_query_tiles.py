"""Tiles of a forward: every query once, and no warpgroup with queries on both sides of 0."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tl_attention.config.query_tiles import ROWS, first_queries


@given(st.sampled_from([64, 128, 192]), st.integers(1, 2000), st.booleans())
def test_tiles_hold_each_query_once(block_M, seqlen_q, from_end):
    firsts = first_queries(block_M, seqlen_q, from_end)
    assert len(firsts) == -(-seqlen_q // block_M)
    rows = [row for first in firsts for row in range(first, first + block_M)]
    assert [row for row in rows if 0 <= row < seqlen_q] == list(range(seqlen_q))
    assert all(first % ROWS == 0 for first in firsts)
    if from_end:
        assert -block_M < firsts[0] <= 0 and rows[-1] // ROWS == (seqlen_q - 1) // ROWS
