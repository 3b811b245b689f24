"""Query blocks that have to be computed for a tile of keys; mask.py has the key blocks of a tile of queries."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernels.scores.mask import Mask
from tl_attention.problem.program import MASK


@T.meta_class
class QueryBlocks:
    """Query blocks that see some of the block_N keys from first_key on, for one query head after another.

    There is at least one block per head: without a window the last query sees all keys; if a window hides them, or there is no query,
    P is 0.

    Args:
        split: the steps may be a share of the blocks, which may be empty.
    """

    listed = False
    # For a program: how the keys of a step are seen, whether some may be hidden, the key from which on all are hidden
    how, may_hide, stop_key = MASK, True, None

    def __init__(self, mask: Mask, block_M: int, block_N: int, split: bool = False, name: str = "blocks"):
        self.mask, self.block_M, self.block_N = mask, block_M, block_N
        self.first_query = T.alloc_var("int32", init=0)  # per head
        # With a window: one past the last query per head
        self.end_query = T.alloc_var("int32", init=0) if mask.window is not None else None
        self.start_query = T.alloc_var("int32", init=0) if split else None  # of the first step of a share
        self.num_steps = T.alloc_var("int32", init=0)
        # Position of the current step; stored, as dividing the step number would take registers of consumers
        self.current_query = T.alloc_var("int32", init=0)
        self.current_head = T.alloc_var("int32", init=0)

    @T.inline
    def start(self, first_key, first_head, heads):
        """Count the steps of `heads` query heads from first_head on, and go to the first."""
        if self.mask.window is not None:
            # Queries at which the windows of the first and of the last key end
            seen_from = T.max(first_key - self.mask.window[1] - self.mask.diagonal(0), 0)
            seen_to = first_key + self.block_N - 1 + self.mask.window[0] - self.mask.diagonal(0)
            self.end_query[0] = T.max(T.min(seen_to + 1, self.mask.seqlen_q), 1)
            self.first_query[0] = T.min(seen_from, self.end_query[0] - 1) // self.block_M * self.block_M
        elif self.mask.causal:
            seen_from = T.max(first_key + self.mask.seqlen_q - self.mask.seqlen_k, 0)
            self.first_query[0] = seen_from // self.block_M * self.block_M
        # From one lane, so that step counts live in uniform registers
        steps = T.ceildiv(self.stop - self.first_query[0], self.block_M)
        steps = heads * (T.max(steps, 1) if self.mask.may_be_empty else steps)
        self.num_steps[0] = T.shfl_sync(steps, 0)
        self.current_query[0] = self.first_query[0]
        self.current_head[0] = first_head

    def hidden_steps(self, first_key: Any) -> Any:
        """Number of leading steps whose queries see no key from first_key on; of one head, and never all. Causal, without a window."""
        seen_from = T.max(first_key + self.mask.seqlen_q - self.mask.seqlen_k, 0)
        last = T.ceildiv(self.stop - self.first_query[0], self.block_M) - 1
        return T.max(T.min((seen_from - self.first_query[0]) // self.block_M, last), 0)

    @T.inline
    def skip(self, steps):
        """Leave out leading steps of the first head."""
        self.current_query[0] += steps * self.block_M

    @T.inline
    def keep_share(self, share, shares):
        """Keep one of `shares` near-equal shares of the steps. It has none where there are fewer steps than shares."""
        per_head = T.max(T.ceildiv(self.stop - self.first_query[0], self.block_M), 1)
        skipped = T.truncdiv(share * self.num_steps[0], shares)
        self.num_steps[0] = T.shfl_sync(T.truncdiv((share + 1) * self.num_steps[0], shares) - skipped, 0)
        self.current_head[0] += T.truncdiv(skipped, per_head)
        self.start_query[0] = self.first_query[0] + T.truncmod(skipped, per_head) * self.block_M

    @property
    def counts(self) -> tuple:
        """Variables that start() sets and the steps need."""
        further = (number for number in (self.end_query, self.start_query) if number is not None)
        return self.num_steps, self.first_query, self.current_head, *further

    @T.inline
    def restart(self):
        """Go to the first step; the counts are those that start() set in another warp."""
        self.current_query[0] = self.first_query[0] if self.start_query is None else self.start_query[0]

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def stop(self) -> Any:
        return self.end_query[0] if self.mask.window is not None else self.mask.seqlen_q

    @property
    def query(self) -> Any:
        return self.current_query[0]

    @property
    def head(self) -> Any:
        return self.current_head[0]

    @property
    def next_query(self) -> Any:
        """First query of the next step."""
        following = self.current_query[0] + self.block_M
        return T.if_then_else(following >= self.stop, self.first_query[0], following)

    @property
    def next_head(self) -> Any:
        """Head of the next step."""
        return self.current_head[0] + T.cast(self.current_query[0] + self.block_M >= self.stop, "int32")

    @T.inline
    def advance(self):
        self.current_query[0] += self.block_M
        if self.current_query[0] >= self.stop:
            self.current_query[0] = self.first_query[0]
            self.current_head[0] += 1
