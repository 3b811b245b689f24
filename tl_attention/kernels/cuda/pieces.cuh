// Pieces of shared tiles, see shared_tiles.py, which fills in LOWEST.
// A warp writes its rows of a piece, O and log-sum-exps, for the same warp of another CTA, and sets its bit in `written`, which is 0 before
// the kernel. That warp waits for the bit, and clears it.
#pragma once

#include <tl_templates/cuda/common.h>
TL_DEVICE int tl_attention_warp_bit() { return 1 << (threadIdx.y * 4 + threadIdx.x / 32); }
template <int cols>
TL_DEVICE void tl_attention_store_piece(void *pieces, int *written, void const *fragment, void const *lse) {
  float4 const *numbers = reinterpret_cast<float4 const *>(fragment);
  float const *of_rows = reinterpret_cast<float const *>(lse);
  float4 *place = reinterpret_cast<float4 *>(pieces) + threadIdx.x / 32 * (cols / 8 + 1) * 32 + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < cols / 8; ++i)
    __stcg(place + i * 32, numbers[i]);
  __stcg(place + cols / 8 * 32, make_float4(of_rows[0], of_rows[1], 0.0f, 0.0f));
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("fence.acq_rel.gpu;\n red.relaxed.gpu.global.or.b32 [%0], %1;" :: "l"(written), "r"(tl_attention_warp_bit()) : "memory");
}
template <int cols>
TL_DEVICE void tl_attention_merge_piece(void const *pieces, int *written, void *fragment, void *lse) {
  int bit = tl_attention_warp_bit(), now;
  do {  // all lanes: where one waits alone nvcc takes the warp for diverged, and uses no uniform registers in the loop over keys
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(written) : "memory");
  } while (__all_sync(0xffffffff, !(now & bit)));
  if (threadIdx.x % 32 == 0)
    asm volatile("red.relaxed.gpu.global.and.b32 [%0], %1;" :: "l"(written), "r"(~bit) : "memory");
  __syncwarp();
  float4 *numbers = reinterpret_cast<float4 *>(fragment);
  float *of_rows = reinterpret_cast<float *>(lse);
  float4 const *place = reinterpret_cast<float4 const *>(pieces) + threadIdx.x / 32 * (cols / 8 + 1) * 32 + threadIdx.x % 32;
  float4 other = __ldcg(place + cols / 8 * 32);
  float of_piece[2] = {other.x, other.y}, weight[2], weight_piece[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float peak = fmaxf(fmaxf(of_rows[r], of_piece[r]), LOWEST);
    float mine = exp2f(of_rows[r] - peak), others = exp2f(of_piece[r] - peak), sum = mine + others;
    of_rows[r] = peak + log2f(sum);
    weight[r] = sum > 0.0f ? mine / sum : 0.0f;
    weight_piece[r] = sum > 0.0f ? others / sum : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < cols / 8; ++i) {
    float4 x = __ldcg(place + i * 32);
    numbers[i].x = numbers[i].x * weight[0] + x.x * weight_piece[0];
    numbers[i].y = numbers[i].y * weight[0] + x.y * weight_piece[0];
    numbers[i].z = numbers[i].z * weight[1] + x.z * weight_piece[1];
    numbers[i].w = numbers[i].w * weight[1] + x.w * weight_piece[1];
  }
}
