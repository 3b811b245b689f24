"""Heuristics of splits, sharers and head groups on Hopper GPUs with other SM counts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

import pytest

from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import BwdPass
from tl_attention.launch.bwd_passes import (
    BwdSizes,
    KeyBuffers,
    causal_tiles,
    key_sharers,
)
from tl_attention.launch.splits import key_splits
from tl_attention.problem.attn_problem import MAX_SPLITS, AttnProblem

SM_COUNTS = (
    16,
    60,
    78,
    114,
    132,
    144,
)  # slices of a GPU (MIG); H20, H100 PCIe, H100 and H200; all of a GH100
COSTS = costs_of()
STEPS = (1, 2, 3, 5, 8, 16, 33, 64, 128, 257, 512, 1024, 4096)


def split_time(tiles: int, steps: int, sms: int, splits: int) -> float:
    """The cost model of key_splits, in steps."""
    costs = costs_of().forward
    combine = costs.launch + splits * costs.partial if splits > 1 else 0
    return -(-tiles * splits // sms) * (-(-steps // splits) + costs.tile) + combine


def end_of_last(tiles: Iterable[int], sms: int) -> int:
    """The end of the last of these tiles, in their order: each SM takes the next one when it has finished one."""
    ends = [0] * sms
    for tile in tiles:
        heapq.heapreplace(ends, ends[0] + tile)
    return max(ends)


def efficiency(tiles: int, steps: int, sms: int, splits: int) -> float:
    """Share of the SMs' time that is spent on key blocks, if all waves are as long as the longest CTA."""
    return tiles * steps / (-(-tiles * splits // sms) * sms * -(-steps // splits))


@pytest.mark.parametrize("sms", SM_COUNTS)
def test_key_splits_stay_sane(sms):
    for tiles in range(1, sms + 20):
        before = 1
        for steps in STEPS:
            splits = key_splits(tiles, steps, costs_of(sms=sms))
            assert before - 1 <= splits <= MAX_SPLITS, (
                "but for rounding, more key blocks never take fewer splits"
            )
            assert splits == 1 or steps // splits >= 2
            assert tiles * splits <= 8 * sms, "the workspace of partial outputs stays small"
            assert split_time(tiles, steps, sms, splits) <= split_time(tiles, steps, sms, 1)
            if splits > 1:
                assert efficiency(tiles, steps, sms, splits) > efficiency(tiles, steps, sms, 1)
            before = splits


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize(("least_steps", "bound"), [(128, 0.75), (512, 0.85)])
def test_key_splits_keep_the_sms_busy(sms, least_steps, bound):
    """Long keys and an eighth of a wave of tiles or more; up to the number of tiles from which none is split."""
    for tiles in range(max(sms // 8, 1), int(0.8 * sms)):
        for steps in (steps for steps in STEPS if steps >= least_steps):
            assert efficiency(tiles, steps, sms, key_splits(tiles, steps, costs_of(sms=sms))) >= bound, (
                tiles,
                steps,
            )


def test_more_sms_never_take_longer():
    for tiles in range(1, 200):
        for steps in STEPS:
            times = [
                split_time(tiles, steps, sms, key_splits(tiles, steps, costs_of(sms=sms)))
                for sms in SM_COUNTS
            ]
            assert all(fewer >= more / 1.04 for fewer, more in itertools.pairwise(times))


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 8, 48])
@pytest.mark.parametrize("triangular", [False, True])
def test_key_sharers_share_the_heads_only_where_tiles_are_few(sms, heads_per_kv, triangular):
    for tiles in (1, 2, 7, 32, 100, 512, 4096):
        for queries in (1, 100, 1024, 8192, 131072):
            sharers, per_sharer = key_sharers(tiles, heads_per_kv, queries, triangular, costs_of(sms=sms))
            assert (
                1 <= sharers <= heads_per_kv
                and (sharers - 1) * per_sharer < heads_per_kv <= sharers * per_sharer
            )
            assert sharers == 1 or tiles < 16 * sms
            assert sharers == heads_per_kv or queries < 1024 or 2 * tiles * sharers >= sms


@pytest.mark.parametrize("seqlen_k", [300, 700, 1023, 9000, 65536])
def test_work_under_a_causal_mask_follows_from_both_lengths(seqlen_k):
    sizes = BwdSizes(1, 8, 8, 700, seqlen_k, 256, 2, COSTS, 0, 700)
    queries, on_diagonal = causal_tiles(sizes.queries, sizes.seqlen_q, sizes.seqlen_k)
    seen = [min(700, seqlen_k - key) for key in range(seqlen_k)]
    assert queries == max(seen)
    assert queries * (1 - on_diagonal / 2) == pytest.approx(sum(seen) / seqlen_k, abs=1)
    assert (on_diagonal == 1) == (seqlen_k <= 700)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [
        (128, 2048),
        (512, 2048),
        (1024, 2048),
        (2048, 3000),
        (700, 9000),
        (4096, 9000),
        (2048, 16384),
        (4096, 65536),
    ],
)
@pytest.mark.parametrize(("heads_kv", "heads_per_kv"), [(8, 8), (8, 4), (32, 8), (4, 7), (1, 8), (2, 16)])
def test_key_sharers_suit_more_keys_than_queries(seqlen_q, seqlen_k, heads_kv, heads_per_kv):
    """Against a simulation of the tiles, the longest first."""
    counts = [min(seqlen_q, seqlen_k - first) for first in range(0, seqlen_k, 128)]  # queries per key block
    tiles = heads_kv * len(counts)

    def simulated(per_sharer: int) -> float:
        heads = [min(per_sharer, heads_per_kv - first) for first in range(0, heads_per_kv, per_sharer)]
        taken = [n * count + COSTS.backward.tile for count in counts for n in heads for _ in range(heads_kv)]
        sums = len(heads) * COSTS.backward.partial * tiles / 132 if len(heads) > 1 else 0
        return end_of_last(taken, 132) + sums

    sizes = BwdSizes(1, heads_kv * heads_per_kv, heads_kv, seqlen_q, seqlen_k, 256, 2, COSTS, 0, seqlen_q)
    _, chosen = key_sharers(
        tiles, heads_per_kv, *causal_tiles(sizes.queries, sizes.seqlen_q, sizes.seqlen_k), COSTS
    )
    assert simulated(chosen) <= 1.2 * min(simulated(n) for n in range(1, heads_per_kv + 1))


@pytest.mark.parametrize(
    ("heads", "keys", "causal"), [(32, 4096, True), (2, 8192, True), (34, 2049, False), (32, 4224, False)]
)
def test_partial_gradients_of_a_split_pass_have_room_for_all_tiles(heads, keys, causal):
    split = BwdPass("dq+dk+dv", 64, 128, schedule="stream-K", order="early-sums", reuse_registers=True)
    problem = AttnProblem("bfloat16", 128, 128, causal, ("partial",))
    buffers = KeyBuffers(split, problem, BwdSizes(1, heads, heads, keys, keys, 256, 2, COSTS, 0, keys))
    (rows, *_), *_ = buffers.workspace[1]
    assert buffers.whole == 0 and rows == buffers.sharers * heads * -(-keys // 128) * 8
