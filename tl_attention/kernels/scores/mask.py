"""Masks, and the blocks of keys or queries that have to be computed under them.

The diagonal of a query is the key query + seqlen_k - seqlen_q (bottom-right alignment); in a placed problem it is the key at the
position of the query. A query sees: without a mask, all keys; causal, the keys up to its diagonal; with a window (left, right), the keys
from diagonal - left to diagonal + right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.scores.options import OptionArguments
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.program import MASK


@dataclass(frozen=True)
class Mask:
    """Mask of one sequence: the keys that each query sees.

    Args:
        window: (left, right), runtime values; None without a window.
        may_be_empty: a sequence may have no query.
        place: (key on the diagonal of the first query, number of first keys that no query sees), runtime values; None: bottom-right
            alignment.
    """

    causal: bool
    seqlen_q: Any
    seqlen_k: Any
    window: tuple[Any, Any] | None = None
    may_be_empty: bool = False
    place: tuple[Any, Any] | None = None

    @classmethod
    def of(
        cls, problem: AttnProblem, options: OptionArguments | None, tile: Any, seqlen_q: Any, seqlen_k: Any
    ) -> Mask:
        """Mask of a problem for sequences of these lengths; with varlen, for the sequence of the tile."""
        window = options.window if problem.has("window") else None
        if problem.has("varlen"):
            return cls(problem.causal, tile.len_q[0], tile.len_k[0], window, may_be_empty=True)
        place = None
        if problem.has("placed"):
            diagonal = T.alloc_var("int32", init=options.Table[0, 0] - options.Table[0, 1])
            hidden = T.alloc_var("int32", init=options.Table[0, 2])
            place = diagonal[0], hidden[0]
        return cls(problem.causal, seqlen_q, seqlen_k, window, place=place)

    def diagonal(self, query: Any) -> Any:
        """Key on the diagonal of the query; it may lie outside the sequence."""
        return query + self.place[0] if self.place is not None else query + self.seqlen_k - self.seqlen_q

    def first_key(self, query: Any) -> Any:
        """First key that the query sees; may be less than 0, and is past the last key if it sees none."""
        if self.window is None:
            return 0
        first = self.diagonal(query) - self.window[0]
        return first if self.place is None else T.max(first, self.place[1])

    def last_key(self, query: Any) -> Any:
        """Last key that the query sees; may be past the last key, and is less than 0 if it sees none."""
        if self.window is not None:
            return T.min(self.diagonal(query) + self.window[1], self.seqlen_k - 1)
        return self.diagonal(query) if self.causal else self.seqlen_k - 1

    def sees(self, query: Any, key: Any, check_right: bool = True, check_left: bool = True) -> Any:
        """True if the query sees the key.

        check_right, check_left: compare the key with the last, and with the first key that the query sees. At least one of them is True; a
        bound that all keys of a block meet need not be checked.
        """
        if self.window is None or not check_left:
            return key <= self.last_key(query)
        if not check_right:
            return key >= self.first_key(query)
        return (key <= self.last_key(query)) & (key >= self.first_key(query))

    def hides_some(self, first_query: Any, queries: int, first_key: Any, keys: int) -> Any:
        """True if some of these queries does not see all of these keys."""
        right = first_key + keys - 1 > self.last_key(first_query)
        return (
            right | (first_key < self.first_key(first_query + queries - 1))
            if self.window is not None
            else right
        )

    @T.inline
    def apply(self, acc_s, first_query, first_key, check_right=True, check_left=True):
        """Set scores [queries, keys] of unseen keys to -inf. check_right, check_left: see sees()."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            seen = self.sees(first_query + i, first_key + j, check_right, check_left)
            acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))

    @T.inline
    def clear(self, P, first_query, first_key):
        """Set probabilities [queries, keys] of unseen keys to 0."""
        queries, keys = P.shape
        if self.hides_some(first_query, queries, first_key, keys):
            for i, j in T.Parallel(queries, keys):
                P[i, j] = T.if_then_else(self.sees(first_query + i, first_key + j), P[i, j], 0.0)

    @T.inline
    def clear_transposed(self, P, first_key, first_query):
        """Set probabilities [keys, queries] of unseen keys to 0."""
        keys, queries = P.shape
        if self.hides_some(first_query, queries, first_key, keys):
            for i, j in T.Parallel(keys, queries):
                P[i, j] = T.if_then_else(self.sees(first_query + j, first_key + i), P[i, j], 0.0)

    @T.inline
    def hide_transposed(self, acc_s, first_key, first_query, scale):
        """Set scores [keys, queries] of unseen keys to the infinity whose product with `scale` is -inf."""
        keys, queries = acc_s.shape
        if self.hides_some(first_query, queries, first_key, keys):
            for i, j in T.Parallel(keys, queries):
                hidden = T.if_then_else(scale < 0, T.infinity("float32"), -T.infinity("float32"))
                seen = self.sees(first_query + j, first_key + i)
                acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], hidden)


@dataclass(frozen=True)
class StepRange:
    """Consecutive steps over key blocks that need the same masking.

    Args:
        check_right, check_left: bounds of Mask.sees() that keys of these blocks may violate.
        first, count: the first step, the number of steps.
        is_last_block: the range is only step 0, the last key block.
    """

    check_right: bool
    check_left: bool
    first: Any
    count: Any
    is_last_block: bool = False

    @property
    def masked(self) -> bool:
        return self.check_right or self.check_left


@dataclass(frozen=True)
class KeyBlock:
    """Key block of a step.

    Args:
        blocks: KeyBlocks of the tile.
        step: number of the step.
        step_range: the range that the step is in.
        is_right: of NearFirstKeyBlocks: 1 in an unmasked step whose keys are all right of the diagonals, else 0.
    """

    blocks: Any
    step: Any
    step_range: StepRange
    is_right: Any = 0

    @property
    def first_key(self) -> Any:
        return self.blocks.first_key(self.step)

    def diagonal(self, query: Any) -> Any:
        """Column of the score tile that the diagonal of `query` crosses; it may lie outside the tile."""
        return self.blocks.diagonal(query, self.step)


LAST_BLOCK = StepRange(True, True, 0, 1, is_last_block=True)
NEAR = 64  # more than the key blocks that the diagonals of a tile cross


@T.meta_class
class KeyBlocks:
    """Key blocks that the queries [first_query, first_query + block_M) need; steps go from the last block to the first.

    There is at least one step: for queries that see no key a fully masked block, so that producer and consumers stay in step. A loop
    over `ranges` has exactly the steps from 1 to steps - 1, so each method keeps 1 <= num_right, 0 <= num_left and
    num_right + num_left <= num_steps.

    Args:
        split: several CTAs share the blocks, see keep_share().
        overlap: ensures that each query that sees keys has seen one in step 0 or in a step with check_right. A held row max needs this.
    """

    listed = False
    stop_key = None  # a program hides the keys from here on

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
        # Variables, as TileLang 0.1.15 would copy expressions into every use
        self.num_steps = T.alloc_var("int32", init=0)
        # First steps, whose keys may lie right of a query's last
        self.num_right = T.alloc_var("int32", init=0)
        # With a window: first block that is seen; last steps, whose keys may lie left of a query's first
        self.first_block, self.num_left = (
            T.alloc_var("int32", init=0) if mask.window is not None else None for _ in range(2)
        )
        # Steps of all blocks that a share begins and ends with
        self.share_from, self.share_to = (T.alloc_var("int32", init=0) if split else None for _ in range(2))
        # Block of step 0, where that is not num_steps - 1
        self.last_block = T.alloc_var("int32", init=0) if split or mask.window is not None else None

    @T.inline
    def start(self, first_query):
        """Count the steps of the queries from first_query on."""
        # Numbers of keys
        seen_by_some = T.min(self.mask.last_key(first_query + self.block_M - 1) + 1, self.mask.seqlen_k)
        # With overlap less the last key of the first query, which is then in step 0 or a masked step
        seen_by_all = T.max(self.mask.last_key(first_query) + (0 if self.overlap else 1), 0)
        # From one lane, so that step counts live in uniform registers
        if self.mask.window is not None:
            seen_from = T.max(self.mask.first_key(first_query), 0)
            all_see_from = T.max(self.mask.first_key(first_query + self.block_M - 1), 0)
            self.first_block[0] = seen_from // self.block_N
            steps = T.ceildiv(T.max(seen_by_some, 0), self.block_N) - self.first_block[0]
            self.num_steps[0] = T.shfl_sync(T.max(steps, 1), 0)
            self.last_block[0] = T.shfl_sync(self.first_block[0] + self.num_steps[0] - 1, 0)
            right = T.max(self.last_block[0] + 1 - seen_by_all // self.block_N, 1)
            self.num_right[0] = T.shfl_sync(T.min(right, self.num_steps[0]), 0)
            left = T.ceildiv(all_see_from, self.block_N) - self.first_block[0]
            self.num_left[0] = T.shfl_sync(T.min(left, self.num_steps[0] - self.num_right[0]), 0)
        else:
            self.num_steps[0] = T.shfl_sync(T.max(T.ceildiv(seen_by_some, self.block_N), 1), 0)
            self.num_right[0] = T.shfl_sync(T.max(self.num_steps[0] - seen_by_all // self.block_N, 1), 0)

    @T.inline
    def keep_share(self, share, shares):
        """Keep share number `share` of `shares` nearly equal shares of the steps. An empty share becomes one masked block past all keys."""
        self.share_from[0] = T.truncdiv(share * self.num_steps[0], shares)
        self.share_to[0] = T.truncdiv((share + 1) * self.num_steps[0], shares)
        past_all_keys = T.ceildiv(self.mask.seqlen_k, self.block_N)
        if self.mask.window is not None:
            last_block = self.last_block[0] - self.share_from[0]
            self.num_left[0] = T.max(self.share_to[0] - self.num_steps[0] + self.num_left[0], 0)
        else:
            last_block = self.num_steps[0] - 1 - self.share_from[0]
        self.last_block[0] = T.shfl_sync(
            T.if_then_else(self.share_from[0] < self.share_to[0], last_block, past_all_keys), 0
        )
        self.num_steps[0] = T.shfl_sync(T.max(self.share_to[0] - self.share_from[0], 1), 0)
        right = T.max(self.num_right[0] - self.share_from[0], 1)
        self.num_right[0] = T.shfl_sync(T.min(right, self.num_steps[0]), 0)
        if self.mask.window is not None:
            self.num_left[0] = T.shfl_sync(T.min(self.num_left[0], self.num_steps[0] - self.num_right[0]), 0)

    def hidden_steps(self, last_query: Any) -> Any:
        """Number of leading steps whose keys are hidden from last_query and all before it; never all steps. Under a mask."""
        hidden = self.block(0) - T.max(self.mask.last_key(last_query), 0) // self.block_N
        return T.max(T.min(hidden, self.num_steps[0] - 1), 0)

    @T.inline
    def skip(self, steps):
        """Leave out leading steps: the next one becomes step 0. With a window keep_queries() follows."""
        self.num_steps[0] = T.shfl_sync(self.num_steps[0] - steps, 0)
        self.num_right[0] = T.shfl_sync(T.max(self.num_right[0] - steps, 1), 0)
        if self.mask.window is not None:
            self.last_block[0] = T.shfl_sync(self.last_block[0] - steps, 0)

    def hidden_last_steps(self, first_query: Any) -> Any:
        """Number of last steps whose keys are hidden from first_query and all after it; never all steps."""
        if self.mask.window is None:
            return T.if_then_else(first_query < self.mask.seqlen_q, 0, self.num_steps[0] - 1)
        first_block = self.last_block[0] + 1 - self.num_steps[0]
        hidden = T.max(self.mask.first_key(first_query), 0) // self.block_N - first_block
        return T.max(T.min(hidden, self.num_steps[0] - 1), 0)

    @T.inline
    def stop_before(self, steps):
        """Leave out last steps. With a window keep_queries() follows, which counts num_right and num_left again."""
        self.num_steps[0] = T.shfl_sync(self.num_steps[0] - steps, 0)
        if self.mask.causal:
            self.num_right[0] = T.shfl_sync(T.min(self.num_right[0], self.num_steps[0]), 0)

    @T.inline
    def keep_queries(self, first_query):
        """Count the steps that mask scores for the 64 queries from first_query on, after steps were left out for these.

        With a window this is necessary. Else the counts of the tile serve, too, but mask more steps: causal d64 in tiles of 192 queries
        takes 1 % more time with them, with a softcap 2 % (H200, 2026-11-27). Where products bound a kernel they take no more time.
        """
        seen_by_all = T.max(self.mask.last_key(first_query) + (0 if self.overlap else 1), 0)
        right = T.max(self.block(0) + 1 - seen_by_all // self.block_N, 1)
        self.num_right[0] = T.shfl_sync(T.min(right, self.num_steps[0]), 0)
        if self.mask.window is not None:
            all_see_from = T.max(self.mask.first_key(first_query + 63), 0)
            left = T.ceildiv(all_see_from, self.block_N) - (self.block(0) + 1 - self.num_steps[0])
            self.num_left[0] = T.shfl_sync(T.max(T.min(left, self.num_steps[0] - self.num_right[0]), 0), 0)

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def counts(self) -> tuple:
        """Variables that start() and keep_share() set and the steps need."""
        of_window = () if self.mask.window is None else (self.num_left, self.last_block)
        return self.num_steps, self.num_right, *of_window

    @property
    def ranges(self) -> tuple[StepRange, ...]:
        """StepRanges after step 0, by the masking that they need."""
        if self.mask.window is not None:
            right, left = self.num_right[0] - 1, self.num_left[0]
            unmasked = self.num_steps[0] - self.num_right[0] - left
            return (
                StepRange(True, True, 1, right),
                StepRange(False, False, self.num_right[0], unmasked),
                StepRange(False, True, self.num_steps[0] - left, left),
            )
        if self.mask.causal:
            right, unmasked = self.num_right[0] - 1, self.num_steps[0] - self.num_right[0]
            return StepRange(True, False, 1, right), StepRange(False, False, self.num_right[0], unmasked)
        return (StepRange(False, False, 1, self.num_steps[0] - 1),)

    def at(self, step: Any, step_range: StepRange) -> KeyBlock:
        """Key block of a step of a range."""
        return KeyBlock(self, step, step_range)

    def key_at(self, step: Any) -> Any:
        """First key of a step, for a program."""
        return self.first_key(step)

    def how_at(self, step: Any) -> Any:
        """State of the keys of a step, for a program: program.MASK or another."""
        return MASK

    def may_hide(self, step: Any) -> Any:
        """True if a program may hide keys of a step."""
        return True

    @T.inline
    def hide(self, acc_s, query, step, step_range):
        """Mask the scores [64, block_N] of the queries from `query` on, in a step of a StepRange."""
        if step_range.is_last_block and self.mask.window is not None:
            if self.first_key(step) < self.mask.first_key(query + 63):
                self.mask.apply(acc_s, query, self.first_key(step))
            else:
                self.mask.apply(acc_s, query, self.first_key(step), check_right=True, check_left=False)
        elif step_range.is_last_block and not self.mask.causal:
            if self.mask.hides_some(query, 64, self.first_key(step), self.block_N):
                self.mask.apply(acc_s, query, self.first_key(step))
        elif step_range.masked:
            self.mask.apply(acc_s, query, self.first_key(step), step_range.check_right, step_range.check_left)

    @T.inline
    def hide_if_needed(self, acc_s, query, step):
        """Mask the scores of a step, in a loop over all steps; without a window."""
        if step < self.num_right[0]:
            self.mask.apply(acc_s, query, self.first_key(step))

    def block(self, step: Any) -> Any:
        """Number of the step's key block in the sequence."""
        last_block = self.num_steps[0] - 1 if self.last_block is None else self.last_block[0]
        return last_block - step

    def first_key(self, step: Any) -> Any:
        return self.block(step) * self.block_N

    def diagonal(self, query: Any, step: Any) -> Any:
        """Column of the step's score tile that the diagonal of `query` crosses; it may lie outside the tile."""
        return self.mask.diagonal(query) - self.first_key(step)


@T.meta_class
class NearFirstKeyBlocks(KeyBlocks):
    """Key blocks without a mask: the last block, then those that the diagonals of the queries cross, then the others, from last to first.

    So the row max of scores that fall with the distance of a key is found early. With two blocks or more, some steps after step 0 have
    check_right, which says here that a row max is not held yet: they hide nothing.
    """

    def __init__(self, mask: Mask, block_M: int, block_N: int, name: str = "blocks"):
        self.mask, self.block_M, self.block_N = mask, block_M, block_N
        self.num_steps = T.alloc_var("int32", init=0)
        # NEAR * the last block that the diagonals cross + the number of these blocks; one variable, as producers have few registers
        self.crossed = T.alloc_var("int32", init=0)

    @T.inline
    def start(self, first_query):
        """Count the steps of the queries from first_query on."""
        self.num_steps[0] = T.shfl_sync(T.max(T.ceildiv(self.mask.seqlen_k, self.block_N), 1), 0)
        first = T.max(self.mask.diagonal(first_query), 0) // self.block_N
        crossed = T.max(self.mask.diagonal(first_query + self.block_M - 1), 0) // self.block_N
        last = T.min(crossed, self.num_steps[0] - 2)
        count = T.if_then_else(self.num_steps[0] > 1, last - T.min(first, last) + 1, 0)
        self.crossed[0] = T.shfl_sync(last * NEAR + count, 0)

    @property
    def last_near(self) -> Any:
        """Last of the blocks that the diagonals cross, not counting the last block of all."""
        return self.crossed[0] >> NEAR.bit_length() - 1

    @property
    def near(self) -> Any:
        """Number of blocks that the diagonals cross, not counting the last block of all."""
        return self.crossed[0] & NEAR - 1

    @property
    def counts(self) -> tuple:
        return self.num_steps, self.crossed

    @property
    def ranges(self) -> tuple[StepRange, ...]:
        others = self.num_steps[0] - self.near - 1
        return StepRange(True, False, 1, self.near), StepRange(False, False, self.near + 1, others)

    @T.inline
    def hide(self, acc_s, query, step, step_range):
        if step_range.is_last_block:
            self.mask.apply(acc_s, query, self.first_key(step))

    def block(self, step: Any) -> Any:
        from_last = self.num_steps[0] - 1 - step
        other = from_last + T.if_then_else(from_last + self.near <= self.last_near, 0, self.near)
        is_near = (step > 0) & (step <= self.near)
        return T.if_then_else(is_near, self.last_near + 1 - step, T.if_then_else(step == 0, from_last, other))

    def is_right(self, step: Any) -> Any:
        """1 for a step whose keys lie right of the diagonals, 0 for one left of them; not for the first steps."""
        return T.cast(self.block(step) > self.last_near, "int32")

    @T.inline
    def at(self, step, step_range):
        is_right = 0 if step_range.masked else self.is_right(step)
        return KeyBlock(self, step, step_range, is_right)
