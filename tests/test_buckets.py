"""Buckets: [buckets] of the grid is whole, and a call has the first one whose limits hold."""

from __future__ import annotations

import pytest

from tl_attention.config import configs
from tl_attention.config.buckets import Facts, bucket_of, bwd_bucket, option_buckets, window_bucket
from tl_attention.problem.attn_problem import BUCKETS, DIRECTIONS, FEW_BUCKET, OPTIONS, SPLIT_BUCKET


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_buckets_are_named_once_and_timed(direction):
    names = option_buckets(direction, OPTIONS)
    assert len({*names}) == len(names) and names[: len(BUCKETS)] == BUCKETS
    for line in configs.bucket_lines(direction):
        assert {*line.get("rows", ()), *line.get("of", ())} <= {*names}
        assert "window" in line or configs.tuning_shapes(line["name"])


@pytest.mark.parametrize(
    ("queries", "keys", "sharing", "bucket"),
    [
        (64, 64, SPLIT_BUCKET, "short"),
        (65, 64, SPLIT_BUCKET, "split"),
        (100, 1000, FEW_BUCKET, "few"),
        (100, 1000, None, "256"),
        (100, 1025, None, "4k"),
        (150, 1000, None, "fit-192"),
        (450, 1000, None, "1k"),
        (729, 1025, None, "4k"),
        (9000, 4097, None, "long"),
    ],
)
def test_bucket_of_a_forward(queries, keys, sharing, bucket):
    assert bucket_of("fwd", Facts(queries, keys, keys, sharing=sharing)) == bucket


@pytest.mark.parametrize(
    ("deterministic", "heads", "keys", "bucket"),
    [
        (False, 4, 128, "tile"),
        (True, 4, 128, "tile"),
        (False, 4, 129, "tile192"),
        (True, 4, 129, "shared"),
        (True, 1, 129, "tile192"),
        (False, 4, 193, "1k-shared"),
        (False, 4, 4096, "4k-shared"),
        (False, 4, 4097, "long-shared"),
        (True, 4, 9000, "shared"),
        (False, 1, 1025, "4k"),
    ],
)
def test_bucket_of_a_backward(deterministic, heads, keys, bucket):
    assert bwd_bucket(deterministic, heads, 1, keys) == bucket


def test_bucket_of_a_window_is_that_of_long_sequences():
    for bucket, keys, found in (
        ("4k", 129, "wide"),
        ("long", 256, "wide"),
        ("4k", 128, "4k"),
        ("1k", 500, "1k"),
    ):
        assert window_bucket(bucket, ("window",), keys) == found
    assert window_bucket("4k", ("window", "placed"), 500) == window_bucket("4k", (), 500) == "4k"
