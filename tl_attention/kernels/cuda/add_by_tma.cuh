// Additions of a fragment [64, cols] to dQ in global memory by TMA, through shared memory.
// tile: 4 KB of shared memory per warp, in the order of FragmentBlocks, where the blocks of 16 rows are contiguous; by_rows: in that of
// RowMajorBlocks.
#pragma once

#include <tl_templates/cuda/copy_sm90.h>
template <int cols, int width_blocks, bool by_rows = false>
TL_DEVICE void tl_attention_add_by_tma(float const *first_block, float *tile, void const *fragment) {
  float4 const *numbers = reinterpret_cast<float4 const *>(fragment);
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float4 *share = reinterpret_cast<float4 *>(tile) + warp * (cols / 8 * 32);
  tl::tma_store_wait<0, true>();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < cols / 8; ++i) {
    if constexpr (by_rows) {
      float2 *block = reinterpret_cast<float2 *>(share + i * 32);
      block[lane] = make_float2(numbers[i].x, numbers[i].y);
      block[32 + lane] = make_float2(numbers[i].z, numbers[i].w);
    } else {
      share[i * 32 + lane] = numbers[i];
    }
  }
  tl::fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    float *place = const_cast<float *>(first_block) + warp * (width_blocks * 128);
    if constexpr (by_rows)  // rounded soon, from the L2
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;"
                   :: "l"(place), "r"(smem_ptr_to_uint(share)), "r"(cols * 64), "l"(tl::CacheHintSm90::EVICT_LAST) : "memory");
    else
      tl::tma_store_add(reinterpret_cast<float *>(share), place, cols * 64);
    tl::tma_store_arrive();
  }
}
