"""Schedule that finishes one packed sequence after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.seams.scheduler import Tile, TileOrder
from tl_attention.problem.attn_problem import TABLE_ROWS


@dataclass(frozen=True)
class SequenceOrder(TileOrder):
    """TileOrder of packed sequences one after another, the longest first, and in a sequence of one head after another.

    In the last sequences the last heads go side by side, as in TileOrder. Else the last head would begin its long tiles when other CTAs
    have no more tiles.

    In the table the entries of a sequence are adjacent, in the order of their blocks, and there are sequence_tiles() of them.

    Args:
        key_heads: without their sharers, which all_heads counts.
        side_tiles: at most so many tiles go side by side, if these are two heads.
        last_entries: a sequence with fewer entries behind it is one of the last.
    """

    key_heads: Any = None
    side_tiles: Any = None
    last_entries: Any = None


def sequence_tiles(len_q: Any, len_k: Any) -> Any:
    """Tiles per head of a sequence in a SequenceOrder: as many as it has blocks of queries or of keys, and at least one."""
    return T.max(T.max(len_q, len_k) + TABLE_ROWS - 1, TABLE_ROWS) // TABLE_ROWS


@T.meta_class
class SequenceTile(Tile):
    """Key tile of a SequenceOrder."""

    def __init__(self, order: SequenceOrder, name: str = "tile"):
        super().__init__(order, name)
        # Tiles of earlier sequences, and of earlier key heads of this one
        self.tiles_before = T.alloc_var("int32", init=0)

    @property
    def has_keys(self) -> Any:
        """False where the sequence has fewer blocks of keys than of queries."""
        return self.block[0] * TABLE_ROWS < self.len_k[0]

    @T.inline
    def locate(self, number):
        """Set the position of the tile with this number.

        Entry number // heads of the table belongs to the tile's sequence, as each of its tiles has one number per head.
        """
        order = self.order
        heads = order.all_heads
        self.read_table(T.truncdiv(number, heads))
        if self.block[0] >= 0:
            first_entry = T.alloc_var("int32", init=T.truncdiv(number, heads) - self.block[0])
            tiles = T.alloc_var("int32", init=sequence_tiles(self.len_q[0], self.len_k[0]))
            behind = T.min(first_entry + tiles + order.last_entries, order.m_blocks) - 1
            self.first_head[0] = heads - 1  # of those side by side
            if T.shfl_sync(order.table[behind, 1], 0) < 0:
                side_heads = T.max(T.truncdiv(order.side_tiles, tiles), 1)
                self.first_head[0] = T.max(heads - side_heads, 0)
            self.number_in_group[0] = number - first_entry * heads - self.first_head[0] * tiles
            if self.number_in_group[0] < 0:
                self.head_idx[0] = T.truncdiv(number - first_entry * heads, tiles)
                self.block[0] = number - first_entry * heads - self.head_idx[0] * tiles
            else:
                self.block[0] = T.truncdiv(self.number_in_group[0], heads - self.first_head[0])
                self.head_idx[0] = self.first_head[0] + (
                    self.number_in_group[0] - self.block[0] * (heads - self.first_head[0])
                )
            self.find_kv_head()
            self.tiles_before[0] = first_entry * order.key_heads + self.kv_head_idx[0] * tiles
