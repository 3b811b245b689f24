"""Order of key blocks with those near the diagonal first, by the expressions of the kernel."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")


def blocks_of(seqlen_q: int, seqlen_k: int, first_query: int, block_M: int, block_N: int):
    """NearFirstKeyBlocks of a tile, with the numbers that start() computes, found here from all pairs."""
    from tl_attention.kernels.scores.mask import NEAR, Mask, NearFirstKeyBlocks

    blocks = NearFirstKeyBlocks.__new__(NearFirstKeyBlocks)
    blocks.mask, blocks.block_M, blocks.block_N = Mask(False, seqlen_q, seqlen_k), block_M, block_N
    count = max(-(-seqlen_k // block_N), 1)
    diagonals = [q + seqlen_k - seqlen_q for q in range(first_query, first_query + block_M)]
    crossed = {min(max(x, 0) // block_N, count - 2) for x in diagonals} if count > 1 else set()
    last = max(crossed, default=-1)
    blocks.num_steps, blocks.crossed = [count], [last * NEAR + len(crossed)]
    return blocks, diagonals


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (600, 600), (777, 901), (700, 333), (129, 40), (260, 1500), (300, 128), (50, 0)],
)
@pytest.mark.parametrize(("block_M", "block_N"), [(128, 128), (192, 112), (128, 176), (128, 32)])
def test_near_blocks_come_first_and_each_block_once(seqlen_q, seqlen_k, block_M, block_N):
    from tilelang import tvm

    simplify = tvm.arith.Analyzer().simplify
    for first_query in range(0, seqlen_q, block_M):
        blocks, diagonals = blocks_of(seqlen_q, seqlen_k, first_query, block_M, block_N)
        near, steps = int(simplify(blocks.near)), range(blocks.num_steps[0])
        order = [int(simplify(blocks.block(step))) for step in steps]
        assert sorted(order) == [*steps]
        assert order[0] == steps[-1]  # the one with keys past the end
        first, *others = blocks.ranges
        assert int(simplify(first.count)) == near and int(simplify(others[0].count)) == len(steps) - 1 - near
        for step in steps[near + 1 :]:
            first_key = order[step] * block_N
            if int(simplify(blocks.is_right(step))):
                assert first_key > diagonals[-1]
            else:
                assert first_key + block_N - 1 <= diagonals[0]
