"""Buckets: which problems of a class share a tuned row or a default. [buckets] of the grid names them and has their limits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tl_attention.config import configs
from tl_attention.problem.attn_problem import (
    BUCKET_ENDS,
    BUCKETS,
    FAR,
    FEW_BUCKET,
    INVARIANT_BUCKET,
    SPLIT_BUCKET,
    length_bucket,
)

SHARING = {
    SPLIT_BUCKET: "too few tiles for the SMs: several CTAs split the keys of one",
    FEW_BUCKET: "few tiles per SM: CTAs share the last ones",
}


@dataclass(frozen=True)
class Bucket:
    """A line of [buckets] in the grid; None: no limit."""

    name: str
    queries: Sequence[Sequence[int]] | None = None  # ranges [first, last]
    keys: int | None = None  # most
    length: int | None = None  # longest one that selects a length bucket
    shared_heads: bool = False  # more query heads than key heads
    sharing: bool = False  # CTAs share tiles by the method with the name of the bucket
    window: int | None = None  # least keys of a window
    of: Sequence[str] = ()  # buckets of which those with such a window have this one
    rows: Sequence[str] = BUCKETS  # buckets whose rows serve where it has none, in this order

    def holds(self, facts: Facts) -> bool:
        return (
            self.window is None
            and (self.queries is None or any(first <= facts.queries <= last for first, last in self.queries))
            and (self.keys is None or facts.keys <= self.keys)
            and (self.length is None or facts.length <= self.length)
            and (facts.shared_heads or not self.shared_heads)
            and (not self.sharing or facts.sharing == self.name)
        )

    @property
    def calls(self) -> str:
        """The calls that it holds, in words."""
        found = [SHARING[self.name]] if self.sharing else []
        if self.queries is not None:
            found.append(" or ".join(f"{first} to {last}" for first, last in self.queries) + " queries")
        if self.keys is not None:
            found.append(f"at most {self.keys} keys")
        if self.shared_heads:
            found.append("more query heads than key heads")
        if self.length is not None:
            found.append(f"sequences of at most {self.length}")
        if self.window is not None:
            found.append(f"of {' and '.join(self.of)}, those with a window of at least {self.window} keys")
        return ", ".join(found)


class Facts(NamedTuple):
    """What the bucket of a call depends on. sharing: SPLIT_BUCKET or FEW_BUCKET if CTAs share its tiles so."""

    queries: int
    keys: int
    length: int
    shared_heads: bool = False
    sharing: str | None = None


@functools.cache
def _lines(direction: str) -> tuple[Bucket, ...]:
    return tuple(Bucket(**line) for line in configs.bucket_lines(direction))


def bucket_of(direction: str, facts: Facts) -> str:
    """The first bucket of a direction whose limits hold, else that of the length."""
    names = (bucket.name for bucket in _lines(direction) if bucket.holds(facts))
    return next(names, None) or length_bucket(facts.length)


def window_bucket(bucket: str, options: Iterable[str], window_keys: int) -> str:
    """Bucket of a forward with a window, whose lengths have `bucket`. Parts of longer sequences (`placed`) keep it: they were not measured.

    Args:
        window_keys: number of keys in the window, which may be rounded up to a power of 2.
    """
    if "window" in options and "placed" not in options:
        for wide in _lines("fwd"):
            if wide.window is not None and bucket in wide.of and window_keys >= wide.window:
                return wide.name
    return bucket


def bwd_bucket(
    deterministic: bool, heads_q: int, heads_kv: int, seqlen_k: int, partial: bool = False, seqlen_q: int = 0
) -> str:
    """Bucket of a backward in the tuned table.

    Args:
        partial: as the option, whose dq is fp32: no tile has all keys of a head.
        seqlen_q: of an fp32 problem, else 0. Configs of short sequences have one_sum, whose errors grow with the queries, too.
    """
    facts = Facts(seqlen_q, FAR if partial else seqlen_k, max(seqlen_q, seqlen_k), heads_q > heads_kv)
    return bucket_of("bwd_det" if deterministic else "bwd", facts)


def buckets(direction: str) -> tuple[str, ...]:
    """The buckets of a problem in one of DIRECTIONS: one tuned row each."""
    return *BUCKETS, *(bucket.name for bucket in _lines(direction) if bucket.window is None)


def option_buckets(direction: str, options: Iterable[str]) -> tuple[str, ...]:
    """The buckets of a problem with options: with a window also those that a window has."""
    of_window = [bucket.name for bucket in _lines(direction) if bucket.window is not None]
    return *buckets(direction), *(of_window if "window" in options else [])


def calls_of(direction: str, bucket: str) -> str:
    """The calls of a bucket of a direction, in words."""
    if bucket == INVARIANT_BUCKET:
        return "all with batch_invariant"
    if bucket not in BUCKETS:
        return next(line for line in _lines(direction) if line.name == bucket).calls
    number = BUCKETS.index(bucket)
    least = f"more than {BUCKET_ENDS[number - 1]} keys" if number else ""
    most = f"at most {BUCKET_ENDS[number]} keys" if number < len(BUCKET_ENDS) else ""
    return most or least
