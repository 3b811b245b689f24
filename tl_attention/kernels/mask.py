"""Which keys a query sees: all of them; if causal those up to its place, query + seqlen_k - seqlen_q (bottom-right); or a window
of so many before and after its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.options import Options
from tl_attention.problem import AttnProblem


@dataclass(frozen=True)
class Mask:
    causal: bool
    seqlen_q: Any
    seqlen_k: Any
    window: tuple[Any, Any] | None = None  # (left, right)
    may_be_empty: bool = False  # whether there may be no query

    @classmethod
    def of(
        cls, problem: AttnProblem, options: Options | None, tile: Any, seqlen_q: Any, seqlen_k: Any
    ) -> Mask:
        """That of a problem whose sequences have these lengths, or with varlen those of the tile's sequence."""
        window = options.window if problem.has("window") else None
        if problem.has("varlen"):
            return cls(problem.causal, tile.len_q[0], tile.len_k[0], window, may_be_empty=True)
        return cls(problem.causal, seqlen_q, seqlen_k, window)

    def place(self, query: Any) -> Any:
        """The key that the query stands at."""
        return query + self.seqlen_k - self.seqlen_q

    def first_key(self, query: Any) -> Any:
        """The first key the query sees, or less than 0; past the last one if it sees none."""
        return self.place(query) - self.window[0] if self.window is not None else 0

    def last_key(self, query: Any) -> Any:
        """The last key the query sees; less than 0 if it sees none."""
        if self.window is not None:
            return T.min(self.place(query) + self.window[1], self.seqlen_k - 1)
        return self.place(query) if self.causal else self.seqlen_k - 1

    def sees(self, query: Any, key: Any, past: bool = True, before: bool = True) -> Any:
        """past, before: whether the key may be past the last that the query sees, before the first; one of them at least."""
        if self.window is None or not before:
            return key <= self.last_key(query)
        if not past:
            return key >= self.first_key(query)
        return (key <= self.last_key(query)) & (key >= self.first_key(query))

    def hides_some(self, first_query: Any, queries: int, first_key: Any, keys: int) -> Any:
        """Whether some of these queries do not see some of these keys."""
        past = first_key + keys - 1 > self.last_key(first_query)
        return (
            past | (first_key < self.first_key(first_query + queries - 1))
            if self.window is not None
            else past
        )

    @T.inline
    def apply(self, acc_s, first_query, first_key, past=True, before=True):
        """Set the scores [rows, cols] of keys that their query does not see to -inf; past, before: as sees() has them."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            seen = self.sees(first_query + i, first_key + j, past, before)
            acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))

    @T.inline
    def clear(self, P, first_query, first_key):
        """Set the probabilities [queries, keys] of keys that their query does not see to 0."""
        queries, keys = P.shape
        if self.hides_some(first_query, queries, first_key, keys):
            for i, j in T.Parallel(queries, keys):
                P[i, j] = T.if_then_else(self.sees(first_query + i, first_key + j), P[i, j], 0.0)

    @T.inline
    def clear_transposed(self, P, first_key, first_query):
        """The same for probabilities [keys, queries]."""
        keys, queries = P.shape
        if self.hides_some(first_query, queries, first_key, keys):
            for i, j in T.Parallel(keys, queries):
                P[i, j] = T.if_then_else(self.sees(first_query + j, first_key + i), P[i, j], 0.0)

    @T.inline
    def hide_transposed(self, acc_s, first_key, first_query, scale):
        """Set the scores [keys, queries] of keys that their query does not see to what `scale` makes -inf."""
        keys, queries = acc_s.shape
        if self.hides_some(first_query, queries, first_key, keys):
            for i, j in T.Parallel(keys, queries):
                hidden = T.if_then_else(scale < 0, T.infinity("float32"), -T.infinity("float32"))
                seen = self.sees(first_query + j, first_key + i)
                acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], hidden)


@T.meta_class
class KeyBlocks:
    """The blocks of block_N keys that queries [first_query, first_query + block_M) need; step 0 is the last block.

    There is always one: queries that see no key get a wholly masked block, so that no role waits for another in vain. split: a
    walk may be over a share of the blocks. overlap: each query that sees a key has seen one before the steps that no mask touches.
    """

    def __init__(
        self,
        mask: Mask,
        block_M: int,
        block_N: int,
        split: bool = False,
        overlap: bool = False,
        name: str = "blocks",
    ):
        self.mask, self.block_M, self.block_N, self.overlap = mask, block_M, block_N, overlap
        # Variables, not expressions: TileLang 0.1.15 would copy those into every use
        self.num_steps = T.alloc_var("int32", init=0)
        self.num_masked = T.alloc_var("int32", init=0)  # steps that may hold keys past the last of some query
        # Of a window: the block of the first key seen, and the last steps, which may hold keys before the first of some query
        self.first, self.num_before = (
            T.alloc_var("int32", init=0) if mask.window is not None else None for _ in range(2)
        )
        # Of all blocks: those a share begins and ends with
        self.share_from, self.share_to = (T.alloc_var("int32", init=0) if split else None for _ in range(2))
        # Of step 0, where that is not the last of so many blocks from the first on
        self.last = T.alloc_var("int32", init=0) if split or mask.window is not None else None

    @T.inline
    def start(self, first_query):
        # Numbers of keys
        seen_by_some = T.min(self.mask.last_key(first_query + self.block_M - 1) + 1, self.mask.seqlen_k)
        # Or all but the last key of the first query, which then is in a block of step 0 or with a mask
        seen_by_all = T.max(self.mask.last_key(first_query) + (0 if self.overlap else 1), 0)
        # From one lane, so that what counts steps lives in uniform registers
        if self.mask.window is not None:
            seen_from = T.max(self.mask.first_key(first_query), 0)
            all_see_from = T.max(self.mask.first_key(first_query + self.block_M - 1), 0)
            self.first[0] = seen_from // self.block_N
            steps = T.ceildiv(T.max(seen_by_some, 0), self.block_N) - self.first[0]
            self.num_steps[0] = T.shfl_sync(T.max(steps, 1), 0)
            self.last[0] = T.shfl_sync(self.first[0] + self.num_steps[0] - 1, 0)
            masked = T.max(self.last[0] + 1 - seen_by_all // self.block_N, 1)
            self.num_masked[0] = T.shfl_sync(T.min(masked, self.num_steps[0]), 0)
            before = T.ceildiv(all_see_from, self.block_N) - self.first[0]
            self.num_before[0] = T.shfl_sync(T.min(before, self.num_steps[0] - self.num_masked[0]), 0)
        else:
            self.num_steps[0] = T.shfl_sync(T.max(T.ceildiv(seen_by_some, self.block_N), 1), 0)
            self.num_masked[0] = T.shfl_sync(T.max(self.num_steps[0] - seen_by_all // self.block_N, 1), 0)

    @T.inline
    def take_share(self, share, shares):
        """Keep one of the near-equal shares of the steps, in their order; if it is empty, a masked block past all keys."""
        self.share_from[0] = T.truncdiv(share * self.num_steps[0], shares)
        self.share_to[0] = T.truncdiv((share + 1) * self.num_steps[0], shares)
        none = T.ceildiv(self.mask.seqlen_k, self.block_N)
        if self.mask.window is not None:
            last = self.last[0] - self.share_from[0]
            self.num_before[0] = T.max(self.share_to[0] - self.num_steps[0] + self.num_before[0], 0)
        else:
            last = self.num_steps[0] - 1 - self.share_from[0]
        self.last[0] = T.shfl_sync(T.if_then_else(self.share_from[0] < self.share_to[0], last, none), 0)
        self.num_steps[0] = T.shfl_sync(T.max(self.share_to[0] - self.share_from[0], 1), 0)
        masked = T.max(self.num_masked[0] - self.share_from[0], 1)
        self.num_masked[0] = T.shfl_sync(T.min(masked, self.num_steps[0]), 0)
        if self.mask.window is not None:
            self.num_before[0] = T.shfl_sync(
                T.min(self.num_before[0], self.num_steps[0] - self.num_masked[0]), 0
            )

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def counts(self) -> tuple:
        """What start() sets and a walk needs."""
        of_window = () if self.mask.window is None else (self.num_before, self.last)
        return self.num_steps, self.num_masked, *of_window

    @property
    def sweeps(self) -> tuple:
        """(past, before, first step, number of steps) after step 0; past, before: whether they may hold a key past the last that a
        query sees, before the first.
        """
        if self.mask.window is not None:
            masked, before = self.num_masked[0] - 1, self.num_before[0]
            plain = self.num_steps[0] - self.num_masked[0] - before
            return (
                (True, True, 1, masked),
                (False, False, self.num_masked[0], plain),
                (False, True, self.num_steps[0] - before, before),
            )
        if self.mask.causal:
            masked, plain = self.num_masked[0] - 1, self.num_steps[0] - self.num_masked[0]
            return (True, False, 1, masked), (False, False, self.num_masked[0], plain)
        return ((False, False, 1, self.num_steps[0] - 1),)

    @T.inline
    def hide_in_last_block(self, acc_s, query):
        """Mask the scores of step 0, of 64 queries; before the first key they see only where that lies past the block's first."""
        if self.mask.window is None:
            self.mask.apply(acc_s, query, self.first_key(0))
        else:
            if self.first_key(0) < self.mask.first_key(query + 63):
                self.mask.apply(acc_s, query, self.first_key(0))
            else:
                self.mask.apply(acc_s, query, self.first_key(0), past=True, before=False)

    def first_key(self, step: Any) -> Any:
        last = self.num_steps[0] - 1 if self.last is None else self.last[0]
        return (last - step) * self.block_N


@T.meta_class
class QueryBlocks:
    """A walk over the blocks of block_M queries that see some of the block_N keys from first_key on, for one head after the other.

    There is always one a head: the last query sees all keys, or where a window hides them or there is no query, P is 0 all over.
    """

    def __init__(self, mask: Mask, block_M: int, block_N: int, name: str = "blocks"):
        self.mask, self.block_M, self.block_N = mask, block_M, block_N
        self.first = T.alloc_var("int32", init=0)  # query of each head
        self.end = (
            T.alloc_var("int32", init=0) if mask.window is not None else None
        )  # past the last query of each head
        self.num_steps = T.alloc_var("int32", init=0)
        # Where the walk is. Kept, as divisions of the step would take the registers of a consumer
        self.at_query = T.alloc_var("int32", init=0)
        self.at_head = T.alloc_var("int32", init=0)

    @T.inline
    def start(self, first_key, first_head, heads):
        if self.mask.window is not None:
            # The queries at whose places the first and the last key end a window
            seen_from = T.max(first_key - self.mask.window[1] - self.mask.place(0), 0)
            seen_to = first_key + self.block_N - 1 + self.mask.window[0] - self.mask.place(0)
            self.end[0] = T.max(T.min(seen_to + 1, self.mask.seqlen_q), 1)
            self.first[0] = T.min(seen_from, self.end[0] - 1) // self.block_M * self.block_M
        elif self.mask.causal:
            seen_from = T.max(first_key + self.mask.seqlen_q - self.mask.seqlen_k, 0)
            self.first[0] = seen_from // self.block_M * self.block_M
        # From one lane, so that what counts steps lives in uniform registers
        steps = T.ceildiv(self.stop - self.first[0], self.block_M)
        steps = heads * (T.max(steps, 1) if self.mask.may_be_empty else steps)
        self.num_steps[0] = T.shfl_sync(steps, 0)
        self.at_query[0] = self.first[0]
        self.at_head[0] = first_head

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def stop(self) -> Any:
        return self.end[0] if self.mask.window is not None else self.mask.seqlen_q

    @property
    def query(self) -> Any:
        return self.at_query[0]

    @property
    def head(self) -> Any:
        return self.at_head[0]

    @property
    def next_head(self) -> Any:
        """Of the step after this one."""
        return self.at_head[0] + T.cast(self.at_query[0] + self.block_M >= self.stop, "int32")

    @T.inline
    def advance(self):
        self.at_query[0] += self.block_M
        if self.at_query[0] >= self.stop:
            self.at_query[0] = self.first[0]
            self.at_head[0] += 1
