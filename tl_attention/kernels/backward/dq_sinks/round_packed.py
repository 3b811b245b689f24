"""Rounding of dQ beside the backward of packed sequences, see round.py: one head of a sequence after another.

The memory of the sums is a ring of slots. A slot holds 128 queries, of all query heads of a key head. Tiles are numbered sequence by
sequence, in it key head by key head, in it block by block, and CTAs draw them in about this order, see sequence_order.SequenceOrder. Tile n
owns the keys of its block. The sums of the queries of its block are in slot n % ring, and there they are rounded. A head of a sequence has
as many tiles as blocks of queries or of keys, whichever are more.

1. CTAs add dQ of their key tiles. The warps that add count each tile at its end, together for a head of a sequence.
2. When all tiles of a head of a sequence have been added, warps round its sums, write dQ, and leave zeros.
3. When the tiles that had the slots before are rounded, the tiles of a head of a sequence may add.

The ring has room for a head of the longest sequence, so a tile waits only for heads whose tiles have all been drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.backward.dq_sinks.round import (
    BLOCKS_PER_TILE,
    Rounding,
    RowMajorBlocks,
)
from tl_attention.kernels.sources.sequence_order import sequence_tiles
from tl_attention.problem.attn_problem import FAR, TABLE_ROWS

# Steps add to whole blocks, also behind the last query: 0, or NaN where a key is. The next sequence in the slot may have queries there
ALL_BLOCKS = "ROUNDED_ROWS / 16"


@dataclass(frozen=True)
class RingBlocks(RowMajorBlocks):
    """Sums of the tiles of `ring` successive numbers, of the query heads of a key head each."""

    ring: Any
    heads_per_kv: Any

    def packed_row_block(self, tile: Any, head: Any, query: Any) -> Any:
        slot = T.truncmod(tile.tiles_before[0] + query // TABLE_ROWS, self.ring)
        of_head = slot * self.heads_per_kv + head - tile.kv_head * self.heads_per_kv
        return (of_head * TABLE_ROWS + query % TABLE_ROWS) // 16


@dataclass(frozen=True)
class PackedRounding(Rounding):
    """Rounding of packed sequences in a SequenceOrder.

    Args:
        sums: RingBlocks.
        progress: [1 + 2 * table entries * key heads], see round_packed_dq.cuh.
        table: tile table of keys.
    """

    loop = "tl_attention_round_packed_dq"

    table: Any

    def counter(self, tile: Any) -> Any:
        return 1 + tile.tiles_before[0]

    def weight(self, tile: Any, tiles: Any) -> Any:
        return 1

    def await_slot(self, tile: Any) -> Any:
        # Not its own tiles, even if the sequence is longer than max_seqlen says: nothing waits for itself
        first, ring = tile.tiles_before[0], self.sums.ring
        end = first - T.max(ring - sequence_tiles(tile.len_q[0], tile.len_k[0]), 0)
        rounded = T.address_of(self.progress[1 + self.table.shape[0] * self.heads_kv])
        wanted = self.counts.heads_per_kv * BLOCKS_PER_TILE
        return T.evaluate(
            T.call_extern("handle", "tl_attention_await_tiles", rounded, first - ring, end, wanted)
        )

    def gradient(self) -> tuple:
        first, (rows, heads) = T.address_of(self.dQ[FAR, 0, FAR, 0, 0]), self.dQ.strides[2:4]
        return first, 0, rows, heads, 0, *self.dQ.shape[-2:]  # the table has the rows

    def loop_arguments(self) -> tuple:
        table = T.address_of(self.table[0, 0]), self.table.shape[0]
        return *table, self.heads_kv, self.counts.heads_per_kv, self.counts.sharers, self.sums.ring
