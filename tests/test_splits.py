"""Number of splits of a forward, and the merge of partial outputs."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention.config.costs import costs_of
from tl_attention.launch.splits import Sharing, fwd_bucket, key_splits, packed_splits, sharing
from tl_attention.problem.attn_problem import MAX_SPLITS, AttnProblem
from tl_attention.problem.options import Options

COSTS = costs_of()
SMS = COSTS.sms


def test_key_splits_are_few_with_two_blocks_each_and_save_time():
    for tiles in range(1, 200):
        for steps in (1, 2, 3, 5, 8, 13, 100, 1000, 10**5):
            splits = key_splits(tiles, steps, COSTS)
            assert 1 <= splits <= MAX_SPLITS
            assert splits == 1 or steps // splits >= 2
            if splits > 1:  # all waves together take less than an unsplit tile
                assert math.ceil(tiles * splits / SMS) * math.ceil(steps / splits) < steps
                assert tiles * splits <= 12 * SMS  # the partial outputs take less than 105 MB at d128


def test_fwd_bucket_follows_from_the_shape():
    assert fwd_bucket(1, 8, 128, 16384, COSTS) == "split"
    assert fwd_bucket(1, 8, 1, 16384, COSTS) == "split"
    assert fwd_bucket(1, 8, 401, 512, COSTS) == "1k"
    assert fwd_bucket(8, 16, 59, 64, COSTS) == "short"
    for seqlen_q in (65, 128, 193, 256):
        assert fwd_bucket(8, 16, seqlen_q, 64, COSTS) == fwd_bucket(8, 16, seqlen_q, 1024, COSTS) == "256"
        assert fwd_bucket(8, 16, seqlen_q, 1025, COSTS) == "4k"
    for seqlen_q in (64, 401, 512, 577, 640, 881, 896, 961, 1024):
        assert fwd_bucket(8, 16, seqlen_q, 65, COSTS) == "1k"
    for seqlen_q in (129, 192, 257, 400, 513, 576, 641, 880, 897, 960):
        assert fwd_bucket(8, 16, seqlen_q, 65, COSTS) == fwd_bucket(8, 16, seqlen_q, 1024, COSTS) == "fit-192"
        assert fwd_bucket(8, 16, seqlen_q, 1025, COSTS) == "4k"
    assert fwd_bucket(4, 16, 4096, 4096, COSTS) == "4k"
    assert fwd_bucket(1, 128, 128, 16384, COSTS) == "long"
    assert fwd_bucket(1, 128, 128, 16384, costs_of(sms=2 * SMS)) == "split"


@pytest.mark.parametrize(
    ("sizes", "bucket"),
    [
        # batch, heads, seqlen_q, seqlen_k; without a mask, and with a causal one
        (
            (1, 12, 2048, 2048),
            ("few", "4k"),
        ),  # 60 tiles are left; 1.45 waves of causal tiles, the longest first
        ((1, 5, 4096, 4096), ("few", "few")),
        ((1, 4, 4096, 4096), ("4k", "few")),  # 128 tiles
        ((1, 8, 2048, 2048), ("4k", "few")),
        ((1, 16, 2048, 2048), ("4k", "4k")),
        ((1, 24, 1500, 1500), ("few", "4k")),
        ((1, 40, 1024, 1024), ("few", "1k")),
        ((1, 33, 3000, 3000), ("4k", "4k")),  # six tiles per SM
        ((1, 16, 700, 700), ("fit-192", "fit-192")),  # too short
        ((1, 20, 1024, 8192), ("few", "few")),  # a chunk of a prompt
        ((1, 1, 8192, 8192), ("few", "few")),
        ((1, 8, 128, 16384), ("split", "split")),  # 16 pieces per tile take a CTA long to merge
        ((64, 16, 4096, 4096), ("4k", "4k")),
        ((8, 16, 59, 64), ("short", "short")),
    ],
)
def test_few_tiles_are_shared_where_it_saves_time(sizes, bucket):
    assert tuple(fwd_bucket(*sizes, COSTS, Sharing(128, 128, causal)) for causal in (False, True)) == bucket
    assert fwd_bucket(*sizes, COSTS) != "few"


def test_tiles_are_shared_without_options():
    plain = AttnProblem("bfloat16", 64, 64, False)
    assert sharing(plain, "NVIDIA H200") == Sharing(192, 128, False)
    assert sharing(AttnProblem("float16", 128, 128, True), "NVIDIA H200") == Sharing(128, 128, True)
    for problem in (
        AttnProblem("float32-high", 64, 64, False),
        AttnProblem("bfloat16", 64, 64, False, ("window",)),
    ):
        assert sharing(problem, "NVIDIA H200") is None


@pytest.mark.parametrize(
    ("batch", "total_q", "total_k", "heads", "changes", "splits"),
    [
        (1, 128, 16384, 8, {"max_seqlen_q": 128}, 16),  # one tile per head, like a dense problem
        (1, 128, 16384, 8, {"max_seqlen_q": 128, "num_splits": 3}, 3),
        (1, 128, 16384, 8, {"max_seqlen_q": 128, "num_splits": 1}, 1),
        (64, 64 * 128, 64 * 512, 32, {"max_seqlen_q": 128, "num_splits": 1000}, MAX_SPLITS),
        (64, 64 * 128, 64 * 512, 32, {"max_seqlen_q": 128}, 1),  # enough tiles
        (8, 8, 8 * 16384, 1, {"max_seqlen_q": 1}, 16),  # one query per sequence
        (2, 300, 16384, 1, {"max_seqlen_k": 100}, 1),
        (1, 128, 16384, 8, {}, 16),  # bounds above the number of rows: the rows decide
        (1, 128, 16384, 8, {"window": (100, 0)}, 1),
        (1, 128, 16384, 8, {"window": (-1, 0)}, 16),
        (2, 128, 16384, 8, {"max_seqlen_q": 0, "max_seqlen_k": 0}, 1),
        (0, 128, 16384, 8, {}, 1),
    ],
)
def test_packed_splits_follow_from_upper_bounds_of_lengths(batch, total_q, total_k, heads, changes, splits):
    starts = torch.zeros(batch + 1, dtype=torch.int32, device="meta")  # never read
    bounds = {"max_seqlen_q": 2**40, "max_seqlen_k": 2**40}
    options = Options(cu_seqlens_q=starts, cu_seqlens_k=starts, **bounds | changes)
    assert packed_splits(options, total_q, total_k, heads, COSTS) == splits


def test_merged_splits_equal_attention_to_all_keys():
    """Formula of kernels/forward/combine.py, with a split without keys and a row that sees no key."""
    scores, v = torch.randn(5, 12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    scores[1] = -math.inf
    scores[2, :8] = -math.inf
    shares = [slice(0, 4), slice(4, 4), slice(4, 12)]
    lse = torch.stack([scores[:, share].logsumexp(1) for share in shares])
    out = torch.stack([scores[:, share].softmax(1).nan_to_num() @ v[share] for share in shares])
    row_max = lse.amax(0).clamp(min=-1e20)
    weights = (lse - row_max).exp()
    total = weights.sum(0)
    combined = (weights[..., None] * out).sum(0) / total.where(total != 0, 1)[:, None]
    torch.testing.assert_close(combined, scores.softmax(1).nan_to_num() @ v)
    torch.testing.assert_close(total.log() + row_max, scores.logsumexp(1))
