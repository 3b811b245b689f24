"""Heuristics of splits, sharers and head groups on Hopper GPUs with other SM counts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tl_attention.config.costs import costs_of
from tl_attention.config.kernel_configs import BwdPass
from tl_attention.launch.bwd_passes import (
    BwdSizes,
    KeyBuffers,
    causal_tiles,
    key_sharers,
    pass_sharers,
)
from tl_attention.launch.common import head_group
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
    ("heads", "heads_kv", "keys", "causal", "sharers"),
    [
        (2, 2, 8192, True, 2),  # 0.67 of the time by one CTA (H200, d128)
        (4, 4, 3000, True, 2),  # 0.78
        (1, 1, 20000, True, 3),  # 0.74
        (8, 1, 1500, True, 16),  # 0.92 of that by heads
        (8, 8, 4096, True, 1),  # 1.33 in two
        (64, 64, 4096, True, 1),
        (128, 16, 8192, True, 2),  # 0.94
        (512, 64, 2048, True, 2),  # 0.89
        (64, 16, 8192, True, 1),  # 1.03 in two
        (64, 8, 32768, True, 2),  # as fast as in four
        (32, 8, 32768, True, 1),  # 1.01 in two
    ],
)
def test_split_passes_share_the_queries_only_where_that_is_faster(heads, heads_kv, keys, causal, sharers):
    split = BwdPass("dq+dk+dv", 64, 128, schedule="stream-K", order="early-dK", reuse_registers=True)
    tiles, per_kv = heads_kv * -(-keys // 128), heads // heads_kv
    whole = tiles if sharers == 1 else 0
    assert pass_sharers(split, tiles, per_kv, keys, causal, COSTS, row_bytes=1024) == (sharers, per_kv, whole)


@pytest.mark.parametrize(
    ("grads", "row_bytes", "batch", "heads", "heads_kv", "keys", "sharers"),
    [
        ("dk", 1024, 1, 32, 2, 32768, 8),  # d256: 0.96 of the time in three
        ("dk", 1024, 1, 32, 2, 16384, 4),  # 0.99 of that in eight
        ("dk", 1024, 2, 32, 2, 8192, 4),  # 0.97 of that in three, 0.98 of that in eight
        ("dk", 1024, 2, 64, 8, 8192, 1),  # 0.98 of that in two
        ("dk", 1024, 8, 32, 2, 2048, 2),  # as fast as in four
        ("dk", 1024, 1, 32, 2, 131072, 8),  # two heads per CTA
        ("dk", 1024, 1, 2, 2, 131072, 1),
        ("dk+dv", 640, 2, 64, 8, 8192, 1),  # d192-128: 0.99 of that in two
        ("dk+dv", 640, 1, 64, 8, 32768, 2),  # 0.99 of that in one
        ("dk+dv", 512, 1, 64, 8, 32768, 2),  # d128, deterministic: 0.99 of that in one
        ("dq+dk+dv", 512, 2, 64, 8, 8192, 1),  # d64: 0.99 of the time in two
        ("dq+dk+dv", 512, 1, 64, 8, 32768, 1),  # as fast as in two or four
    ],
)
def test_cta_reads_as_many_heads_as_the_l2_holds(grads, row_bytes, batch, heads, heads_kv, keys, sharers):
    one = BwdPass(grads, 64, 128, schedule="stream-K" if grads == "dq+dk+dv" else "grid")
    tiles = batch * heads_kv * -(-keys // 128)
    assert pass_sharers(one, tiles, heads // heads_kv, keys, 1, COSTS, row_bytes)[0] == sharers


@pytest.mark.parametrize(
    ("tiles", "queries", "sharers", "whole"),
    [
        (2048, 16384, 5, 1980),  # 0.98 in 7 of the time of whole tiles (H200, d128)
        (2048, 4096, 3, 1980),  # 0.99
        (2048, 2048, 1, 2048),
        (157, 20000, 5, 132),  # 0.63
        (280, 6001, 8, 264),  # 0.77 (d64)
        (264, 4200, 1, 264),
        (128, 8192, 1, 128),
        (64, 1024, 1, 64),  # 1.04 in two
    ],
)
def test_split_passes_share_the_last_tiles_of_equal_length(tiles, queries, sharers, whole):
    split = BwdPass("dq+dk+dv", 64, 128, schedule="stream-K", order="early-dK", reuse_registers=True)
    assert pass_sharers(split, tiles, 1, queries, False, COSTS) == (sharers, 1, whole)
    drawn = whole + (tiles - whole) * sharers
    assert sharers == 1 or -(-drawn // 132) * 132 - drawn < 132


@pytest.mark.parametrize(("tiles", "sharers", "whole"), [(280, 1, 280), (132, 1, 132), (40, 3, 0)])
def test_windows_share_tiles_only_where_there_are_fewer_than_sms(tiles, sharers, whole):
    split = BwdPass("dq+dk+dv", 64, 128, schedule="stream-K", order="apart", reuse_registers=True)
    assert pass_sharers(split, tiles, 1, 6001, False, COSTS, shares_last=False) == (sharers, 1, whole)


@pytest.mark.parametrize(
    ("heads", "keys", "causal"), [(32, 4096, True), (2, 8192, True), (34, 2049, False), (32, 4224, False)]
)
def test_partial_gradients_of_a_split_pass_have_room_for_all_tiles(heads, keys, causal):
    split = BwdPass("dq+dk+dv", 64, 128, schedule="stream-K", order="early-dK", reuse_registers=True)
    problem = AttnProblem("bfloat16", 128, 128, causal, ("partial",))
    buffers = KeyBuffers(split, problem, BwdSizes(1, heads, heads, keys, keys, 256, 2, COSTS, 0, keys))
    (rows, *_), *_ = buffers.empty[1]
    assert buffers.whole == 0 and rows == buffers.sharers * heads * -(-keys // 128) * 8


def group_of(heads: int, heads_sharing: int, shared_bytes: int, blocks: int) -> int:
    """Heads per group with the bytes and the tiles per SM of an H200."""
    return head_group(
        heads, heads_sharing, shared_bytes, blocks, COSTS.groups.bytes, COSTS.groups.tiles * 132
    )


def test_packed_sequences_of_unequal_lengths_have_larger_head_groups():
    def group(sequences: int, mean: int, longest: int) -> int:
        tiles, rows = (sequences * mean // 128,) * 2, sequences * mean
        sizes = BwdSizes(1, 16, 16, rows, rows, 256, 2, COSTS, 0, mean, tiles, longest)
        read = rows * (2 * 256 + 4 * 128)
        return group_of(16, 1, read, sizes.long_tiles(128))

    # 16,384 and 65,536 tokens, 16 heads: the fastest groups of an H200 are 4 and 1
    assert group(16, 1024, 0) == group(16, 1024, 1024) == 2
    assert group(16, 1024, 3672) == 4
    assert group(32, 2048, 8004) == 1


def test_head_groups_are_full_and_fill_the_sms():
    assert group_of(64, 1, 4 << 20, 32) == 8, "as many as fit the L2"
    assert group_of(16, 1, 64 << 20, 64) == 4, "1.5 tiles per SM"
    assert group_of(16, 1, 10 << 20, 128) == 4, "not 5 groups of 3 and one of 1"
    assert group_of(6, 1, 64 << 20, 64) == 6
    assert group_of(64, 8, 64 << 20, 8) == 32, "whole key heads"
    assert head_group(64, 8, 64 << 20, 8, 32 << 20, 0) == 8


def group_of_keys(pass_: BwdPass, keys: int, heads: int, heads_kv: int, batch: int = 1, **packed) -> int:
    sizes = BwdSizes(batch, heads, heads_kv, keys, keys, 256, 2, COSTS, 0, keys, **packed)
    return KeyBuffers(pass_, AttnProblem("bfloat16", 128, 128, True), sizes).counts[1]


def test_head_groups_of_a_backward_leave_their_queries_in_the_l2():
    """A query row of d128 takes 1 KB in a pass that adds to dq."""
    dynamic = BwdPass("dq+dk+dv", 64, 128, schedule="dynamic", order="early-dK", reuse_registers=True)
    grid = replace(dynamic, schedule="grid")
    assert 25 <= group_of_keys(dynamic, 512, 16, 16, batch=32) <= 48, "12 to 24 MB"
    assert 13 <= group_of_keys(dynamic, 1000, 64, 16, batch=16) <= 25, (
        "0.75 tiles per SM, though 52 MB with four query heads each"
    )
    assert group_of_keys(grid, 512, 16, 16, batch=32) >= 64, "CTAs of one tile each fill 32 MB"
    assert group_of_keys(dynamic, 1025, 16, 16, batch=16) >= 32, "as do heads of more than 8 tiles"


def test_head_groups_of_packed_sequences_count_all_query_heads():
    packed = {"tiles": (128, 128), "longest": 16384}
    dynamic = BwdPass("dq+dk+dv", 64, 128, schedule="dynamic-late", order="early-dK", reuse_registers=True)
    assert group_of_keys(dynamic, 16384, 32, 8, **packed) == 2, "a tile per SM"
    assert group_of_keys(dynamic, 16384, 8, 8, **packed) == 2, "16 MB per head"
