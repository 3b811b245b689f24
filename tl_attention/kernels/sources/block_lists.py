"""Listed blocks: the blocks of keys, or of queries, that a block mask lists for a tile, one step each.

launch/block_lists.py makes the lists. A span [3] describes the list of a tile: number of first steps that may hide keys, number of steps
(at least one), and index of its first entry. For a held row max it has a fourth number, of the steps after these that hide no key; then
come others that may. An entry holds, from the lowest bit: how the keys of the block are seen, program.MASK or
another; the block's number; in lists by keys, the query head among those of its key head. The last three entries hide their block: a step
reads two entries ahead, and an empty list needs one entry. With Program.bits `places` has one number per entry, where the bits of the
block are: see launch/mask_bits.py.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernels.scores.mask import KeyBlock, KeyBlocks, Mask, NearFirstKeyBlocks, StepRange
from tl_attention.kernels.scores.options import OptionArguments
from tl_attention.kernels.sources.query_blocks import QueryBlocks
from tl_attention.kernels.sources.shared_tiles import SharedKeyBlocks
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.program import BLOCK_BITS, HOW_BITS, PAST_ALL, SHOW_ALL


def key_blocks(
    problem: AttnProblem,
    options: OptionArguments | None,
    mask: Mask,
    tile: Any,
    block_M: int,
    block_N: int,
    split: bool = False,
    held: bool = False,
    near_first: bool = False,
    shares: bool = False,
) -> KeyBlocks | ListedKeyBlocks:
    """Key blocks of the tiles of a kernel whose tiles are blocks of queries. held: for a held row max."""
    if shares:
        return SharedKeyBlocks(mask, block_M, block_N, name="blocks")
    if near_first:
        return NearFirstKeyBlocks(mask, block_M, block_N, name="blocks")
    if problem.is_listed:
        traced = options.traced
        return ListedKeyBlocks(
            mask, traced.spans, traced.entries, traced.places, tile, block_M, block_N, held, name="blocks"
        )
    return KeyBlocks(mask, block_M, block_N, split, held, name="blocks")


def query_blocks(
    problem: AttnProblem,
    options: OptionArguments | None,
    tile: Any,
    seqlen_q: Any,
    seqlen_k: Any,
    block_M: int,
    block_N: int,
    ahead: bool = True,
    with_places: bool = True,
) -> QueryBlocks | ListedQueryBlocks:
    """Query blocks of the tiles of a kernel whose tiles are blocks of keys.

    Args:
        ahead: read lists a step ahead, to hide memory latency. For the consumers: the other warps run ahead anyway, and have no registers.
        with_places: read the places of bits, too.
    """
    mask = Mask.of(problem, options, tile, seqlen_q, seqlen_k)
    if problem.is_listed:
        traced = options.traced
        return ListedQueryBlocks(
            mask,
            traced.spans,
            traced.entries,
            traced.places if with_places else None,
            block_M,
            block_N,
            ahead,
            name="blocks",
        )
    return QueryBlocks(mask, block_M, block_N, tile.stream_k, name="blocks")


def block_of(entry: Any) -> Any:
    """Number of the block of an entry."""
    return entry >> HOW_BITS & (1 << BLOCK_BITS) - 1


@T.meta_class
class ListedKeyBlocks:
    """Key blocks that are listed for the queries of a tile; those that may hide keys come first. See mask.KeyBlocks.

    held: the order is that of a held row max, see launch/block_lists.py.
    """

    listed = True

    def __init__(
        self,
        mask: Mask,
        spans: Any,
        entries: Any,
        places: Any,
        tile: Any,
        block_M: int,
        block_N: int,
        held: bool = False,
        name: str = "blocks",
    ):
        self.mask, self.spans, self.entries, self.places, self.tile = mask, spans, entries, places, tile
        self.block_M, self.block_N = block_M, block_N
        self.num_steps = T.alloc_var("int32", init=0)
        self.num_masked = T.alloc_var("int32", init=0)  # first steps, which may hide keys
        self.first_entry = T.alloc_var("int32", init=0)
        self.num_whole = T.alloc_var("int32", init=0) if held else None  # steps of full blocks after these
        self.place_ahead = T.alloc_var("int32", init=0) if held else None  # see read_ahead()
        # find() sets both for the step it is given: the first key, and how the keys are seen
        self.found_key = T.alloc_var("int32", init=0)
        self.found_how = T.alloc_var("int32", init=0)

    @T.inline
    def start(self, first_query):
        """Find the list of the queries from first_query on."""
        row = first_query // self.block_M
        # From one lane, so that step counts live in uniform registers
        self.num_masked[0] = T.shfl_sync(self.spans[self.tile.batch, self.tile.head, row, 0], 0)
        self.num_steps[0] = T.shfl_sync(self.spans[self.tile.batch, self.tile.head, row, 1], 0)
        self.first_entry[0] = T.shfl_sync(self.spans[self.tile.batch, self.tile.head, row, 2], 0)
        if self.num_whole is not None:
            self.num_whole[0] = T.shfl_sync(self.spans[self.tile.batch, self.tile.head, row, 3], 0)

    @T.inline
    def keep_share(self, share, shares):
        """Keep share number `share` of `shares` nearly equal shares of the steps. An empty share becomes one step past all keys."""
        first = T.alloc_var("int32", init=T.truncdiv(share * self.num_steps[0], shares))
        steps = T.alloc_var("int32", init=T.truncdiv((share + 1) * self.num_steps[0], shares) - first)
        entry = T.if_then_else(steps > 0, self.first_entry[0] + first, self.entries.shape[0] - PAST_ALL)
        self.first_entry[0] = T.shfl_sync(entry, 0)
        masked = T.if_then_else(steps > 0, T.max(T.min(self.num_masked[0] - first, steps), 0), 1)
        self.num_masked[0] = T.shfl_sync(masked, 0)
        self.num_steps[0] = T.shfl_sync(T.max(steps, 1), 0)

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def counts(self) -> tuple:
        """Variables that start() and keep_share() set and the steps need."""
        whole = () if self.num_whole is None else (self.num_whole,)
        return self.num_steps, self.num_masked, self.first_entry, *whole

    @property
    def ranges(self) -> tuple[StepRange, ...]:
        """Steps after step 0, those that may hide keys first; with a held row max also last."""
        masked = T.max(self.num_masked[0], 1)
        if self.num_whole is not None:
            whole = self.num_whole[0]
            return (
                StepRange(True, False, 1, masked - 1),
                StepRange(False, False, masked, whole),
                StepRange(False, True, masked + whole, self.num_steps[0] - masked - whole),
            )
        return (
            StepRange(True, False, 1, masked - 1),
            StepRange(False, False, masked, self.num_steps[0] - masked),
        )

    def first_key(self, step: Any) -> Any:
        return block_of(self.entries[self.first_entry[0] + step]) * self.block_N

    @T.inline
    def find(self, step):
        """Read the entry of a step, for key_at() and how_at()."""
        entry = T.alloc_var("int32", init=T.shfl_sync(self.entries[self.first_entry[0] + step], 0))
        self.found_key[0] = block_of(entry) * self.block_N
        self.found_how[0] = entry & (1 << HOW_BITS) - 1

    def place_at(self, step: Any) -> Any:
        """Place of the bits of a step."""
        return T.shfl_sync(self.places[self.first_entry[0] + step], 0)

    @T.inline
    def read_ahead(self, step):
        """Read place_at() of a step, without a wait, where lists are held; for ScoreMod.look_up()."""
        if self.place_ahead is not None:
            self.place_ahead[0] = self.places[self.first_entry[0] + step]

    def is_ahead(self, step_range: StepRange) -> bool:
        """True if the places of a range are read ahead: not in the masked range after step 0, which few tiles have."""
        return self.place_ahead is not None and (step_range.is_last_block or not step_range.check_right)

    def next_partial(self, step: Any, step_range: StepRange) -> Any:
        """Step whose place is read ahead at a step; there is an entry after the last one."""
        if step_range.is_last_block:
            return T.max(self.num_masked[0], 1) + self.num_whole[0]
        return step + 1

    def at(self, step: Any, step_range: StepRange) -> KeyBlock:
        return KeyBlock(self, step, step_range)

    def key_at(self, step: Any) -> Any:
        return self.found_key[0]

    def how_at(self, step: Any) -> Any:
        return self.found_how[0]

    def may_hide(self, step: Any) -> Any:
        return step < self.num_masked[0]

    @property
    def stop_key(self) -> Any:
        return self.mask.seqlen_k

    def diagonal(self, query: Any, step: Any) -> Any:
        """Column of the step's score tile that the diagonal of `query` crosses; it may lie outside the tile."""
        return self.mask.diagonal(query) - self.found_key[0]


@T.meta_class
class ListedQueryBlocks:
    """Query blocks, of all query heads of a key head, that are listed for the keys of a tile. See query_blocks.QueryBlocks.

    A share of a tile without blocks has one step, in which all keys are hidden.
    """

    listed = True

    def __init__(
        self,
        mask: Mask,
        spans: Any,
        entries: Any,
        places: Any,
        block_M: int,
        block_N: int,
        ahead: bool,
        name: str = "blocks",
    ):
        self.mask, self.spans, self.entries, self.places = mask, spans, entries, places
        self.block_M, self.block_N = block_M, block_N
        self.num_steps = T.alloc_var("int32", init=0)
        self.next_entry = T.alloc_var("int32", init=0)  # index of the next step's entry
        self.first_head = T.alloc_var("int32", init=0)  # of the key head
        # Entry and place of the current and the next step
        self.current = T.alloc_var("int32", init=0)
        self.ahead = T.alloc_var("int32", init=0) if ahead else None
        self.place_now = None if places is None else T.alloc_var("int32", init=0)
        self.place_ahead = T.alloc_var("int32", init=0) if ahead and places is not None else None

    @T.inline
    def start_list(self, batch, kv_head, heads_per_kv, first_key, part, parts):
        """Find the list of the keys from first_key on, and keep one of `parts` near-equal shares of it."""
        row = first_key // self.block_N
        steps = T.alloc_var("int32", init=self.spans[batch, kv_head, row, 1])
        first = T.alloc_var("int32", init=T.truncdiv(part * steps, parts))
        stop = T.alloc_var("int32", init=T.truncdiv((part + 1) * steps, parts))
        entry = T.if_then_else(
            first < stop, self.spans[batch, kv_head, row, 2] + first, self.entries.shape[0] - PAST_ALL
        )
        # From one lane, so that step counts live in uniform registers
        self.num_steps[0] = T.shfl_sync(T.max(stop - first, 1), 0)
        self.next_entry[0] = T.shfl_sync(entry, 0)
        self.first_head[0] = kv_head * heads_per_kv
        self.read_ahead()
        self.advance()

    @property
    def counts(self) -> tuple:
        """Variables that start_list() sets and the steps need."""
        place = () if self.place_now is None else (self.place_now,)
        return self.num_steps, self.next_entry, self.first_head, self.current, *place

    @T.inline
    def restart(self):
        """Go to the first step; the counts are those that start_list() set in another warp."""
        self.read_ahead()

    @property
    def steps(self) -> Any:
        return self.num_steps[0]

    @property
    def query(self) -> Any:
        return block_of(self.current[0]) * self.block_M

    @property
    def how(self) -> Any:
        """State of the keys of the step at hand: program.MASK or another."""
        return self.current[0] & (1 << HOW_BITS) - 1

    @property
    def may_hide(self) -> Any:
        return self.how != SHOW_ALL

    @property
    def stop_key(self) -> Any:
        return self.mask.seqlen_k

    @property
    def head(self) -> Any:
        return self.first_head[0] + (self.current[0] >> HOW_BITS + BLOCK_BITS)

    @property
    def next_head(self) -> Any:
        """Head of the next step; after the last step any."""
        return self.first_head[0] + (self.next_step >> HOW_BITS + BLOCK_BITS)

    @property
    def next_query(self) -> Any:
        """First query of the next step; after the last step any."""
        return block_of(self.next_step) * self.block_M

    @property
    def next_step(self) -> Any:
        """Entry of the next step; after the last step any."""
        return self.entries[self.next_entry[0]] if self.ahead is None else self.ahead[0]

    @property
    def place(self) -> Any:
        return self.place_now[0]

    @property
    def next_place(self) -> Any:
        return self.places[self.next_entry[0]] if self.place_ahead is None else self.place_ahead[0]

    @T.inline
    def read_ahead(self):
        if self.ahead is not None:
            self.ahead[0] = self.entries[self.next_entry[0]]
        if self.place_ahead is not None:
            self.place_ahead[0] = self.places[self.next_entry[0]]

    @T.inline
    def advance(self):
        self.current[0] = T.shfl_sync(self.next_step, 0)
        if self.places is not None:
            self.place_now[0] = T.shfl_sync(self.next_place, 0)
        self.next_entry[0] += 1
        self.read_ahead()
