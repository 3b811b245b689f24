// Loop of the warps that round dQ of packed sequences, see dq_sinks/round_packed.py. dq_sinks/round.py fills in the names in capitals.
// progress: blocks of ROUNDED_ROWS rows drawn; then per tile, at the first tile of a head of a sequence for all of them, DQ_WARPS times the
// parts of tiles added; then per tile the blocks rounded. table: of a SequenceOrder.
#pragma once
#include "round_rows.cuh"

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
    uint32_t place = smem_ptr_to_uint(memory) + warp / 32 % ROUNDING_WARPS * (stages * ROUND_STAGE_BYTES);
    if (block * TABLE_ROWS < len_q)
      tl_attention_round_rows<width, stages>(sums + row * width, x, dq.per_row, len_q - first, dq.columns, scale, place);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds to the zeros
    __syncwarp();
    if (threadIdx.x % 32 == 0) tl_attention_count(rounded + n, 1);
  }
}
