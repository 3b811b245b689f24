"""Lists of blocks for the kernels, made on the GPU from the blocks of a BlockMask, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tl_attention.launch.mask_bits import MaskBits, is_captured, mask_bits
from tl_attention.problem.program import (
    BLOCK_BITS,
    GROUP_ROWS,
    HIDE_ALL,
    HOW_BITS,
    LISTED_ROWS,
    MASK,
    PAST_ALL,
    SHOW_ALL,
    SHOW_TO_LAST,
    Call,
)

HIDDEN, PARTIAL, FULL = 0, 1, 2
MAX_ENTRIES = 2**31 - 1 - PAST_ALL  # positions in a list are int32
MAX_STATES = 2**31 - 1  # of FineBlocks, which kernels index in 32 bits
HIDDEN_RANK = 3  # past the ranks of listed blocks, which are at most FULL


class FineBlocks(NamedTuple):
    """Blocks of a mask of which some end inside a block of program.LISTED_ROWS.

    Args:
        states: as in BlockLists.
        size: queries and keys per block.
    """

    states: torch.Tensor
    size: tuple[int, int]


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Blocks of a mask: which pairs of a query block and a key block are hidden, partial or full.

    Args:
        states: int8 [1 or batch, 1 or heads, query blocks, key blocks]: HIDDEN, PARTIAL (mask_mod decides on each key) or FULL.
        block_size: queries and keys per block, multiples of program.LISTED_ROWS.
        lengths: seqlen_q, seqlen_k.
        shape: batch, heads of the call.
        bits: mask bits of the PARTIAL blocks; the other listed blocks are FULL. block_size is then program.LISTED_ROWS.
        made: lists by queries and by keys, without the bits.
        remade: the bits are not the first ones of these blocks.
        fine: blocks of the mask, where those of the lists are made from them: the mask of a call without bits has to include their states.
    """

    states: torch.Tensor
    block_size: tuple[int, int]
    lengths: tuple[int, int]
    shape: tuple[int, int]
    bits: MaskBits | None = None
    made: dict[Any, Any] = field(default_factory=dict)
    remade: bool = False
    fine: FineBlocks | None = None

    @classmethod
    def of(
        cls, states: torch.Tensor, size: tuple[int, int], lengths: tuple[int, int], shape: tuple[int, int]
    ) -> BlockLists:
        """Lists of blocks of any size, in the states of BlockLists."""
        if not any(n % LISTED_ROWS for n in size):
            return cls(states, size, lengths, shape)
        if states.numel() > MAX_STATES:
            raise NotImplementedError(
                f"block_mask: expected at most {MAX_STATES} blocks of {size} in all batch entries and heads that differ, got"
                f" {states.numel()}; make it with larger blocks, or with B=None or H=None"
            )
        of_rows = states_of_rows(states, -1, size[1], lengths[1])
        of_rows = states_of_rows(of_rows, -2, size[0], lengths[0])
        return cls(of_rows, (LISTED_ROWS, LISTED_ROWS), lengths, shape, fine=FineBlocks(states, size))

    def with_bits(self, call: Call) -> BlockLists | None:
        """The same lists with bits for the mask of a call; None if they would take too much memory. The host waits as in mask_bits()."""
        states = self._cut(self.states, LISTED_ROWS, LISTED_ROWS)
        full = states == FULL if call.program.mask is not None else states != HIDDEN
        partial = (states == PARTIAL) & ~full
        if self.lengths[1] % LISTED_ROWS:
            partial[..., -1] |= full[..., -1]
        bits = mask_bits(call, partial, full, self.lengths, self.shape)
        if bits is None:
            return None
        states = torch.where(partial, PARTIAL, full * FULL).to(torch.int8)
        states = states.expand(*bits.places.shape[:2], -1, -1)
        return BlockLists(states, (LISTED_ROWS, LISTED_ROWS), self.lengths, self.shape, bits)

    def with_bits_again(self, call: Call) -> BlockLists:
        """Lists that have bits, for a call of the same mask that captures other values: only the bits are made again.

        The host does not wait.
        """
        return replace(self, bits=self.bits.evaluated_again(call), remade=True)

    def by_queries(self, rows: int, step: int, held: bool = False) -> tuple[torch.Tensor, ...]:
        """(spans, entries) per tile of `rows` queries, in steps of `step` keys: int32 [batch, heads, tiles, 3] and flat.

        With bits (spans, entries, places, bits). kernels/sources/block_lists.py says what they hold. Blocks that may hide keys come first:
        partial ones, and one past the last key.

        Args:
            held: lists of a held row max, which begin with a block in which each query sees a key: a partial one, else a full one. It alone
                counts as one that may hide keys; full blocks follow, then partial ones. Where there is none, all blocks are partial and
                count. Spans then are [batch, heads, tiles, 4], the last number is that of the full blocks. Only with bits.
        """
        key = "queries", rows, step, held
        lists = self.made.get(key)
        if lists is None:
            states = self._cut(self.states, rows, step)
            places = [] if self.bits is None else [self._cut(self.bits.places, rows, step)]
            blocks = torch.arange(states.shape[-1], dtype=torch.int32, device=states.device)
            rank = torch.where(states == HIDDEN, HIDDEN_RANK, states)
            how = self._how(states, step, -1)
            rank -= (how == SHOW_TO_LAST).to(torch.int8)  # FULL becomes PARTIAL
            counts = [rank == PARTIAL]
            if held:
                rank = held_ranks(rank, self._covers(rows, step))
                counts = [rank == 0, rank == 1]
            entries = blocks << HOW_BITS | how
            past_all = states.shape[-1] << HOW_BITS | HIDE_ALL
            values = [(entries, past_all), *((x, self.bits.last) for x in places)]
            lists = self._keep(key, _lists(rank, counts, values, (*self.shape, -1, -1)))
        return lists if self.bits is None else (*lists, self.bits.by_queries)

    def by_keys(self, rows: int, step: int, heads_per_kv: int) -> tuple[torch.Tensor, ...]:
        """(spans, entries) per tile of `rows` keys, in steps of `step` queries of all heads of a key head: as by_queries().

        Where a step has half of a block or less, the bits say whether its part is hidden or full. Lists for bits that were made again do
        not depend on the bits: the next ones may differ.
        """
        by_bits = self.bits is not None and step <= GROUP_ROWS and not self.remade
        key = "keys", rows, step, heads_per_kv, by_bits
        lists = self.made.get(key)
        if lists is None:
            states, places = self._cut(self.states, step, rows), ()
            if self.bits is not None:
                places = (self._cut(self.bits.places, step, rows),)
            if by_bits:
                half = torch.arange(states.shape[-2], device=states.device) * step // GROUP_ROWS % 2
                some, whole = (x[places[0], half[:, None]] for x in self.bits.seen_of_halves())
                states = torch.where(states == PARTIAL, torch.where(whole, FULL, some * PARTIAL), states)
                places = (places[0].masked_fill(states == FULL, -1),)
            states = states.mT  # [.., key tiles, query blocks]
            of_blocks = [states.to(torch.int32), self._how(states, rows, -2), *(x.mT for x in places)]
            stacked = torch.stack(of_blocks)
            heads_kv = self.shape[1] // heads_per_kv
            if states.shape[1] == 1:
                stacked = stacked[:, :, :, None].expand(-1, -1, -1, heads_per_kv, -1, -1)
            else:
                stacked = stacked.unflatten(2, (heads_kv, heads_per_kv))
            # [batch, heads_kv, key tiles, heads, query blocks]
            states, how, *places = stacked.transpose(3, 4)
            heads, blocks = (
                torch.arange(n, dtype=torch.int32, device=states.device) for n in states.shape[-2:]
            )
            entries = heads[:, None] << HOW_BITS + BLOCK_BITS | blocks << HOW_BITS | how
            states = states.flatten(-2)
            values = [(entries.flatten(-2), HIDE_ALL), *((x.flatten(-2), self.bits.last) for x in places)]
            rank = torch.where(states == HIDDEN, HIDDEN_RANK, 0).to(torch.int8)
            shape = self.shape[0], heads_kv, -1, -1
            lists = self._keep(key, _lists(rank, [states == PARTIAL], values, shape))
        return lists if self.bits is None else (*lists, self.bits.by_keys)

    def _covers(self, rows: int, step: int) -> torch.Tensor:
        """True for pairs of a tile and a block of keys where each query sees a key of the block. Only with bits.

        Bits that are made again may differ: a query that then sees no key has its tile computed a second time.
        """
        states, places = (self._cut(x, GROUP_ROWS, step) for x in (self.states, self.bits.places))
        half, part = (torch.arange(n, device=states.device) for n in states.shape[-2:])
        covers = self.bits.covers(step)[places, half[:, None] % 2, part % (LISTED_ROWS // step)]
        groups = rows // GROUP_ROWS
        tiles = -(-len(half) // groups)
        group = torch.arange(tiles * groups, device=states.device).clamp(max=len(half) - 1)
        return (covers | (states == FULL))[..., group, :].unflatten(-2, (tiles, groups)).all(-2)

    def _keep(self, key: tuple, lists: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Keep lists, except those of a CUDA graph capture."""
        if not is_captured(self.states):
            self.made[key] = lists
        return lists

    def _cut(self, of_blocks: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
        """States or places of smaller blocks, whose sizes divide block_size, without blocks past the lengths."""
        for dim, (size, wanted, length) in enumerate(
            zip(self.block_size, (queries, keys), self.lengths, strict=True), -2
        ):
            of_blocks = of_blocks.repeat_interleave(size // wanted, dim=dim)
            of_blocks = of_blocks.narrow(dim, 0, -(-length // wanted))
        return of_blocks

    def _how(self, states: torch.Tensor, keys: int, key_dim: int) -> torch.Tensor:
        """Low bits of the entries of blocks of `keys` keys: program.MASK or another way in which keys are seen."""
        how = torch.where(states == FULL, SHOW_ALL, MASK).to(torch.int32)
        if self.lengths[1] % keys:
            last = how.select(key_dim, -1)
            last += (last == SHOW_ALL) * (SHOW_TO_LAST - SHOW_ALL)
        return how


def states_of_rows(states: torch.Tensor, dim: int, size: int, length: int) -> torch.Tensor:
    """States of blocks of LISTED_ROWS rows, from those of blocks of any size: PARTIAL where the blocks that one lies in differ.

    Args:
        dim: -2 for queries, -1 for keys. size: rows per block. length: number of rows.
    """
    tiles = -(-length // LISTED_ROWS)
    most = LISTED_ROWS // size if LISTED_ROWS % size == 0 else (LISTED_ROWS - 1) // size + 2
    first = torch.arange(tiles, device=states.device)[:, None] * LISTED_ROWS
    last = (first + (LISTED_ROWS - 1)).clamp(max=length - 1) // size
    blocks = (first // size + torch.arange(most, device=states.device)).minimum(last)
    of_tiles = states.index_select(dim, blocks.flatten()).unflatten(dim, (tiles, most))
    least, most = of_tiles.amin(dim), of_tiles.amax(dim)
    return torch.where(least == most, least, PARTIAL)


def held_ranks(rank: torch.Tensor, covers: torch.Tensor) -> torch.Tensor:
    """Ranks of blocks for by_queries() with `held`, 0 for the first ones, 1 for full ones, 2 for partial ones, from PARTIAL and FULL.

    Args:
        covers: each query of the tile sees a key of the block.
    """
    partial, full = rank == PARTIAL, rank == FULL
    # The last partial block that covers the tile, which is nearest to the diagonal, else the first full one
    last = (partial & covers).flip(-1)
    last = (last & (last.cumsum(-1) == 1)).flip(-1)
    first = full & (full.cumsum(-1) == 1) & ~last.any(-1, keepdim=True)
    leads = last | first
    leads |= partial & ~leads.any(-1, keepdim=True)
    return torch.where(leads, 0, torch.where(full, 1, torch.where(partial, 2, HIDDEN_RANK)))


def _lists(
    rank: torch.Tensor,
    counts: Sequence[torch.Tensor],
    values: Sequence[tuple[torch.Tensor, int]],
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, ...]:
    """(spans, entries[, places]) of rows of blocks: sorted by rank, without hidden ones.

    Args:
        counts: blocks whose number is in the spans: those that may hide keys, and with a held row max the full ones after them.
        values: (one value per block, the value for a row without blocks), of the entries and, with bits, of the places.
        shape: that of spans; sizes of 1 in the first two dimensions are expanded to it.
    """
    slots = rank.shape[-1]
    if rank.numel() > MAX_ENTRIES:
        raise NotImplementedError(
            f"block_mask: expected at most {MAX_ENTRIES} pairs of tiles in all batch entries and heads that differ, got"
            f" {rank.numel()}; make it with B=None or H=None, or call in parts"
        )
    order, sorted_values = rank.argsort(dim=-1, stable=True), []
    for of_blocks, of_none in values:
        of_blocks = of_blocks.expand(rank.shape).gather(-1, order).flatten()
        sorted_values.append(torch.cat([of_blocks, of_blocks.new_full((PAST_ALL,), of_none)]))
    masked, seen, *whole = (
        x.sum(-1, dtype=torch.int32) for x in (counts[0], rank != HIDDEN_RANK, *counts[1:])
    )
    first = torch.arange(seen.numel(), dtype=torch.int32, device=seen.device).view(seen.shape) * slots
    empty = seen == 0
    masked, seen = (x.masked_fill(empty, 1) for x in (masked, seen))
    first = first.masked_fill(empty, len(sorted_values[0]) - PAST_ALL)
    return torch.stack([masked, seen, first, *whole], -1).expand(*shape), *sorted_values


def block_states(
    num_blocks: torch.Tensor,
    indices: torch.Tensor,
    full_num_blocks: torch.Tensor | None,
    full_indices: torch.Tensor | None,
    key_blocks: int,
) -> torch.Tensor:
    """States of BlockLists from the lists of a BlockMask: [.., query blocks] numbers and [.., query blocks, entries] indices."""
    given = num_blocks, indices, full_num_blocks, full_indices
    # torch.broadcast_shapes would import sympy, which takes 0.3 s
    shapes = zip(*(x.shape[:2] for x in given if x is not None), strict=True)
    shape = [next((n for n in sizes if n != 1), 1) for sizes in shapes]
    given = tuple(None if x is None else x.expand(*shape, *x.shape[2:]) for x in given)
    # One entry of what all of them expand
    for dim in (0, 1):
        if all(x is None or x.stride(dim) == 0 for x in given):
            given = tuple(None if x is None else x.narrow(dim, 0, 1) for x in given)
    num_blocks, indices, full_num_blocks, full_indices = given
    states = torch.zeros((*num_blocks.shape, key_blocks + 1), dtype=torch.int8, device=num_blocks.device)
    for state, numbers, listed in ((PARTIAL, num_blocks, indices), (FULL, full_num_blocks, full_indices)):
        if numbers is None:
            continue
        position = torch.arange(listed.shape[-1], device=listed.device)
        # Entries past the number of a list, and blocks past the keys, go to a column of their own
        is_block = (position < numbers[..., None]) & (listed < key_blocks)
        blocks = torch.where(is_block, listed, key_blocks).long()
        states.scatter_(-1, blocks, state)
    return states[..., :-1]
