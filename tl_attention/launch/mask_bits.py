"""Masks as bits, for the partial blocks of a block mask: the mask_mod is evaluated once per mask, not by each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tl_attention.problem.program import LISTED_ROWS, Call
from tl_attention.tracing.program_values import program_values

MAX_BLOCKS = 2**14  # whose bits take 32 MB in each direction
# Blocks of a mask that all get bits, partial or not: to evaluate their 2**22 elements takes about as long as to launch the kernels for it
MAX_UNCOUNTED = 2**8
CHUNK = 2**24  # elements of a mask that are evaluated at once
# Dimensions of a block's rows (half, warp, upper or lower 8, row) and columns (half, group of 8, pair, column in the pair), in the order
# of the bits: those of a wgmma thread follow one another, in the order of its registers
SIZES = 2, 4, 2, 8, 2, 8, 4, 2
ORDER = 0, 1, 3, 6, 4, 5, 2, 7
BACK = tuple(ORDER.index(dim) for dim in range(len(ORDER)))
ROW_BITS = 0x3333  # bits of a word: the upper one of a thread's two rows, the first 32 columns


@dataclass(frozen=True, eq=False)
class MaskBits:
    """Bits of blocks of 128 queries and 128 keys.

    Args:
        places: int32 [1 or batch, 1 or heads, query blocks, key blocks], index into `blocks` of a block; -1: it needs no bits.
        blocks: int32 [number + 1, 2, 128, 2]: by halves of the rows, threads of a warpgroup, and halves of the columns, a bit per element
            that the thread has of a tile [64, 64]. Rows are queries. The last block hides all.
        found: int32 [number, 4], batch entry, head, row and column of the others.
        whole: bool [number], those that are full, up to the lengths.
        lengths: seqlen_q, seqlen_k.
    """

    places: torch.Tensor
    blocks: torch.Tensor
    found: torch.Tensor
    whole: torch.Tensor
    lengths: tuple[int, int]
    transposed: list[torch.Tensor] = field(default_factory=list)

    def evaluated_again(self, call: Call) -> MaskBits:
        """Bits of the same blocks for another call of the mask. The host does not wait."""
        blocks = _evaluated(call, self.found, self.whole, self.lengths)
        return MaskBits(self.places, blocks, self.found, self.whole, self.lengths)

    @property
    def last(self) -> int:
        """Index of the last block, which is hidden."""
        return len(self.blocks) - 1

    @property
    def by_queries(self) -> torch.Tensor:
        return self.blocks.view(-1)

    def covers(self, columns: int) -> torch.Tensor:
        """bool [number + 1, 2, 128 / columns]: each row of a half of a block's rows sees one of these columns."""
        parts = self.blocks.split(CHUNK // LISTED_ROWS**2)
        return torch.cat([_covers(part, columns) for part in parts])

    def seen_of_halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two bool [number + 1, 2]: some element of a half of a block's rows is seen, and all are."""
        words = self.blocks.flatten(2)
        return (words != 0).any(-1), (words == -1).all(-1)

    @property
    def by_keys(self) -> torch.Tensor:
        """The blocks with keys as rows."""
        if self.transposed:
            return self.transposed[0].view(-1)
        parts = self.blocks.split(CHUNK // LISTED_ROWS**2)
        blocks = torch.cat([packed(unpacked(part).mT) for part in parts])
        if not is_captured(blocks):
            self.transposed.append(blocks)
        return blocks.view(-1)


def is_captured(x: torch.Tensor) -> bool:
    """True for a tensor made in a CUDA graph capture: it is empty until the graph is replayed, so nothing may keep it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def mask_bits(
    call: Call, partial: torch.Tensor, full: torch.Tensor, lengths: Sequence[int], shape: Sequence[int]
) -> MaskBits | None:
    """Bits of the mask of a call; None where they would take too much memory. The host waits for their number, unless all blocks are few.

    Args:
        partial: bool [1 or batch, 1 or heads, query blocks, key blocks]: the blocks that need bits.
        full: likewise, the full blocks: every key up to the last one is seen.
        lengths: seqlen_q, seqlen_k. shape: batch, heads.
    """
    mask, program = call.program.mask, call.program
    if mask is not None:
        leaves = zip(("batch", "head"), shape, partial.shape, strict=False)
        sizes = (size if program.depends_on(mask, (leaf,)) else given for leaf, size, given in leaves)
        partial = partial.expand(*sizes, -1, -1)
    device = partial.device
    if partial.numel() <= min(MAX_UNCOUNTED, MAX_BLOCKS):
        axes = [torch.arange(n, device=device) for n in partial.shape]
        found = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    else:
        found = partial.nonzero()
        if len(found) > MAX_BLOCKS:
            return None
    numbers = torch.arange(len(found), dtype=torch.int32, device=device)
    places = torch.full(partial.shape, -1, dtype=torch.int32, device=device)
    places[found.unbind(1)] = torch.where(partial[found.unbind(1)], numbers, -1)
    whole = full.expand(partial.shape)[found.unbind(1)]
    found = found.to(torch.int32)
    return MaskBits(places, _evaluated(call, found, whole, lengths), found, whole, tuple(lengths))


def _evaluated(call: Call, found: torch.Tensor, whole: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """MaskBits.blocks, a part of them at a time."""
    chunk = CHUNK // LISTED_ROWS**2
    parts = zip(found.split(chunk), whole.split(chunk), strict=True)
    blocks = [packed(_shown(call, *part, lengths)) for part in parts]
    blocks.append(torch.zeros(1, 2, 128, 2, dtype=torch.int32, device=found.device))
    return torch.cat(blocks)


def _shown(call: Call, found: torch.Tensor, whole: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Mask of blocks, bool [blocks, 128, 128], False past the last key and like the last query past it.

    Args:
        found: int32 [blocks, 4], batch entry, head, row and column. whole: bool [blocks], seen up to the lengths.
    """
    offsets = torch.arange(LISTED_ROWS, dtype=torch.int32, device=found.device)
    batch, head, row, column = found[:, :, None, None].unbind(1)
    query, key = row * LISTED_ROWS + offsets[:, None], column * LISTED_ROWS + offsets
    there = key < lengths[1]
    if call.program.mask is None:
        return there.expand(-1, LISTED_ROWS, -1)
    query, key = query.clamp(max=lengths[0] - 1), key.clamp(max=lengths[1] - 1)
    leaves = {"batch": batch, "head": head, "query": query, "key": key}
    # A dimension is 1 where the mask does not depend on it
    (mask,) = program_values(call, [call.program.mask], leaves)
    return ((mask | whole[:, None, None]) & there).expand(-1, LISTED_ROWS, -1)


def _covers(blocks: torch.Tensor, columns: int) -> torch.Tensor:
    """MaskBits.covers of some blocks."""
    words = blocks.view(-1, 2, 32, 4, 2, 1, 1)  # block, half of the rows, row, pair, half of the columns
    two = torch.arange(2, dtype=torch.int32, device=blocks.device)
    # [.., upper or lower row, quarter of the columns]
    seen = (words >> two[:, None] * 2 + two * 16 & ROW_BITS != 0).any(3)
    seen = seen.transpose(3, 4).flatten(4).unflatten(4, (LISTED_ROWS // columns, columns // 32)).any(-1)
    return seen.all(3).all(2)


def packed(shown: torch.Tensor) -> torch.Tensor:
    """bool [blocks, 128, 128] as bits, int32 [blocks, 2, 128, 2]; see MaskBits."""
    bits = shown.reshape(-1, *SIZES).permute(0, *(dim + 1 for dim in ORDER)).reshape(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=shown.device)
    words = (bits * weights).sum(-1, dtype=torch.uint8).view(torch.int32)
    return words.view(-1, 2, 128, 2)


def unpacked(blocks: torch.Tensor) -> torch.Tensor:
    """bool [blocks, 128, 128] of the bits of packed()."""
    bytes_of = blocks.view(-1).view(torch.uint8)[:, None]
    bits = (bytes_of >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1).bool()
    ordered = bits.view(-1, *(SIZES[dim] for dim in ORDER))
    return ordered.permute(0, *(dim + 1 for dim in BACK)).reshape(-1, LISTED_ROWS, LISTED_ROWS)
