"""Rounding of dQ beside the backward of packed sequences, see bwd_round.py: one head of a sequence after another.

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

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels.bwd_round import DqRounding, RecycledBlocks, Rounding, RowMajorBlocks
from tl_attention.kernels.sequence_order import sequence_tiles
from tl_attention.problem import FAR, TABLE_ROWS, AttnProblem
from tl_attention.round_configs import ROUNDED_ROWS

BLOCKS_PER_TILE = TABLE_ROWS // ROUNDED_ROWS  # that warps draw, per query head

# Steps add to whole blocks, also behind the last query: 0, or NaN where a key is. The next sequence in the slot may have queries there
ALL_BLOCKS = "ROUNDED_ROWS / 16"
# progress: blocks of ROUNDED_ROWS rows drawn; then per tile, at the first tile of a head of a sequence for all of them, DQ_WARPS times the
# parts of tiles added; then per tile the blocks rounded. table: of a SequenceOrder
ROUND_PACKED_DQ = """\
TL_DEVICE void tl_attention_await_tiles(int const *rounded, int from, int to, int wanted) {
  int lane;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
#pragma unroll 1
  for (from = max(from, 0); from < to; from += 32) tl_attention_await_count(rounded + min(from + lane, to - 1), wanted);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds to the zeros
}
// query_heads: per key head. parts: CTAs that share a tile
template <int width, int stages>
TL_DEVICE void tl_attention_round_packed_dq(int *progress, float *sums, tl_attention_gradient dq, int const *table, int entries,
                                            int key_heads, int query_heads, int parts, int ring, float scale, void const *memory) {
  int drawn = tl_attention_draw_rows(progress);
#pragma unroll 1
  while (true) {
    int heads = key_heads, heads_per_kv = query_heads;
    asm volatile("" : "+r"(heads), "+r"(heads_per_kv));  // or nvcc keeps what follows from them in registers
    int number = __shfl_sync(0xffffffff, drawn, 0), n = number / (heads_per_kv * BLOCKS_PER_TILE);
    int const *entry = table + n / heads * 8;
    if (n >= entries * heads || entry[1] < 0) break;
    drawn = tl_attention_draw_rows(progress);
    int in_tile = number - n * heads_per_kv * BLOCKS_PER_TILE, len_q = entry[3], len_k = entry[5];
    int tiles = max(max(len_q, len_k) + TABLE_ROWS - 1, TABLE_ROWS) / TABLE_ROWS;
    int in_sequence = n - (n / heads - entry[1]) * heads, head = in_sequence / tiles, block = in_sequence - head * tiles;
    int *added = progress + 1 + n - block, *rounded = progress + 1 + entries * heads;
    tl_attention_await_count(added, (len_k + TABLE_ROWS - 1) / TABLE_ROWS * parts * DQ_WARPS);
    if (len_k == 0) tl_attention_await_tiles(rounded, n - ring, n - ring + 1, heads_per_kv * BLOCKS_PER_TILE);
    int first = block * TABLE_ROWS + in_tile % BLOCKS_PER_TILE * ROUNDED_ROWS;
    int64_t row = (int64_t(n % ring) * (heads_per_kv * BLOCKS_PER_TILE) + in_tile) * ROUNDED_ROWS;
    char *x = dq.x + (head * heads_per_kv + in_tile / BLOCKS_PER_TILE) * dq.per_head + (entry[2] - len_q + first) * dq.per_row;
    uint32_t warp;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(warp));
    uint32_t place = smem_ptr_to_uint(memory) + warp / 32 % WARPS * (stages * STAGE_BYTES);
    if (block * TABLE_ROWS < len_q)
      tl_attention_round_rows<width, stages>(sums + row * width, x, dq.per_row, len_q - first, dq.columns, scale, place);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds to the zeros
    __syncwarp();
    if (threadIdx.x % 32 == 0) tl_attention_count(rounded + n, 1);
  }
}
""".replace("BLOCKS_PER_TILE", str(BLOCKS_PER_TILE))


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
        progress: [1 + 2 * table entries * key heads], see ROUND_PACKED_DQ.
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
        return *table, self.heads_kv, self.counts.heads_per_kv, self.counts.parts, self.sums.ring


def rounding_of(
    problem: AttnProblem,
    config: BwdPass,
    dQ: Any,
    dQ_sum: Any,
    progress: Any,
    counts: Any,
    heads_kv: Any,
    slots: Any,
    rounded_q: Any,
    table: Any,
) -> Rounding:
    """Rounding of a pass, with its sums in dQ_sum.

    Args:
        slots: as DqRounding has them; with packed sequences those of the ring.
        rounded_q: rows of the sums of a head.
        table: tile table of keys with packed sequences, else None.
    """
    common = problem, config, dQ
    launch = progress, counts, heads_kv
    if table is None:
        sums = RecycledBlocks(dQ_sum, rounded_q // 16, slots * counts.heads_per_kv)
        return DqRounding(*common, sums, *launch, rounded_q, slots)
    return PackedRounding(*common, RingBlocks(dQ_sum, None, slots, counts.heads_per_kv), *launch, table)
