"""Which keys a query sees: all of them, or if causal those with key <= query + seqlen_k - seqlen_q (bottom-right)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T


@dataclass(frozen=True)
class Mask:
    causal: bool
    seqlen_q: Any
    seqlen_k: Any

    def last_key(self, query: Any) -> Any:
        """The last key the query sees; less than 0 if it sees none."""
        return query + self.seqlen_k - self.seqlen_q if self.causal else self.seqlen_k - 1

    @T.inline
    def apply(self, acc_s, first_query, first_key):
        """Set the scores [rows, cols] of keys that their query does not see to -inf."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            seen = first_key + j <= self.last_key(first_query + i)
            acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))

    @T.inline
    def clear(self, P, first_query, first_key):
        """Set the probabilities [queries, keys] of keys that their query does not see to 0."""
        queries, keys = P.shape
        if first_key + keys - 1 > self.last_key(first_query):
            for i, j in T.Parallel(queries, keys):
                P[i, j] = T.if_then_else(first_key + j <= self.last_key(first_query + i), P[i, j], 0.0)

    @T.inline
    def clear_transposed(self, P, first_key, first_query):
        """The same for probabilities [keys, queries]."""
        keys, queries = P.shape
        if first_key + keys - 1 > self.last_key(first_query):
            for i, j in T.Parallel(keys, queries):
                P[i, j] = T.if_then_else(first_key + i <= self.last_key(first_query + j), P[i, j], 0.0)

    @T.inline
    def hide_transposed(self, acc_s, first_key, first_query, scale):
        """Set the scores [keys, queries] of keys that their query does not see to what `scale` makes -inf."""
        keys, queries = acc_s.shape
        if first_key + keys - 1 > self.last_key(first_query):
            for i, j in T.Parallel(keys, queries):
                hidden = T.if_then_else(scale < 0, T.infinity("float32"), -T.infinity("float32"))
                seen = first_key + i <= self.last_key(first_query + j)
                acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], hidden)


@T.meta_class
class KeyBlocks:
    """The blocks of block_N keys that queries [first_query, first_query + block_M) need; step 0 is the last block.

    There is always one: queries that see no key get a wholly masked block, so that no role waits for another in vain. split: a
    walk may be over a share of the blocks.
    """

    def __init__(self, mask: Mask, block_M: int, block_N: int, split: bool = False, name: str = "blocks"):
        self.mask, self.block_M, self.block_N = mask, block_M, block_N
        # Variables, not expressions: TileLang 0.1.15 would copy those into every use
        self.num_steps = T.alloc_var("int32", init=0)
        self.num_masked = T.alloc_var("int32", init=0)
        # Of all blocks: those a share begins and ends with, and the one that its step 0 has
        self.share_from, self.share_to, self.share_last = (
            T.alloc_var("int32", init=0) if split else None for _ in range(3)
        )

    @T.inline
    def start(self, first_query):
        # Numbers of keys
        seen_by_some = T.min(self.mask.last_key(first_query + self.block_M - 1) + 1, self.mask.seqlen_k)
        seen_by_all = T.max(self.mask.last_key(first_query) + 1, 0)
        # From one lane, so that what counts steps lives in uniform registers
        self.num_steps[0] = T.shfl_sync(T.max(T.ceildiv(seen_by_some, self.block_N), 1), 0)
        self.num_masked[0] = T.shfl_sync(T.max(self.num_steps[0] - seen_by_all // self.block_N, 1), 0)

    @T.inline
    def take_share(self, share, shares):
        """Keep one of the near-equal shares of the steps, in their order; if it is empty, a masked block past all keys."""
        self.share_from[0] = T.truncdiv(share * self.num_steps[0], shares)
        self.share_to[0] = T.truncdiv((share + 1) * self.num_steps[0], shares)
        none = T.ceildiv(self.mask.seqlen_k, self.block_N)
        last = self.num_steps[0] - 1 - self.share_from[0]
        self.share_last[0] = T.shfl_sync(T.if_then_else(self.share_from[0] < self.share_to[0], last, none), 0)
        self.num_steps[0] = T.shfl_sync(T.max(self.share_to[0] - self.share_from[0], 1), 0)
        masked = T.max(self.num_masked[0] - self.share_from[0], 1)
        self.num_masked[0] = T.shfl_sync(T.min(masked, self.num_steps[0]), 0)

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def sweeps(self) -> tuple:
        """(masked, first step, number of steps) after step 0: those that may hold a masked key, then the others."""
        if self.mask.causal:
            masked, plain = self.num_masked[0] - 1, self.num_steps[0] - self.num_masked[0]
            return (True, 1, masked), (False, self.num_masked[0], plain)
        return ((False, 1, self.num_steps[0] - 1),)

    def first_key(self, step: Any) -> Any:
        last = self.num_steps[0] - 1 if self.share_last is None else self.share_last[0]
        return (last - step) * self.block_N


@T.meta_class
class QueryBlocks:
    """A walk over the blocks of block_M queries that see some of the keys from first_key on, for one head after the other.

    There is always one a head: the last query sees all keys.
    """

    def __init__(self, mask: Mask, block_M: int, name: str = "blocks"):
        self.mask, self.block_M = mask, block_M
        self.first = T.alloc_var("int32", init=0)  # query of each head
        self.num_steps = T.alloc_var("int32", init=0)
        # Where the walk is. Kept, as divisions of the step would take the registers of a consumer
        self.at_query = T.alloc_var("int32", init=0)
        self.at_head = T.alloc_var("int32", init=0)

    @T.inline
    def start(self, first_key, first_head, heads):
        if self.mask.causal:
            seen_from = T.max(first_key + self.mask.seqlen_q - self.mask.seqlen_k, 0)
            self.first[0] = seen_from // self.block_M * self.block_M
        # From one lane, so that what counts steps lives in uniform registers
        steps = heads * T.ceildiv(self.mask.seqlen_q - self.first[0], self.block_M)
        self.num_steps[0] = T.shfl_sync(steps, 0)
        self.at_query[0] = self.first[0]
        self.at_head[0] = first_head

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def query(self) -> Any:
        return self.at_query[0]

    @property
    def head(self) -> Any:
        return self.at_head[0]

    @T.inline
    def advance(self):
        self.at_query[0] += self.block_M
        if self.at_query[0] >= self.mask.seqlen_q:
            self.at_query[0] = self.first[0]
            self.at_head[0] += 1
