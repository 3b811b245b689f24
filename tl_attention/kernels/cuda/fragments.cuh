// Stores of a wgmma fragment [64, cols] of 16-bit elements to a tile with 128-byte swizzle by stmatrix. TileLang 0.1.15 uses stmatrix
// only for copies to whole buffers, so not to a runtime slot, and first moves every four registers to others.
#pragma once

#include <tl_templates/cuda/common.h>
TL_DEVICE int tl_attention_fragment_address(void const *tile) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  return smem_ptr_to_uint(tile) + row * 128 + ((lane / 16) ^ (row % 8)) * 16;
}
template <int cols>
TL_DEVICE void tl_attention_store_fragment(int address, void const *fragment) {
  uint32_t const *pairs = reinterpret_cast<uint32_t const *>(fragment);
#pragma unroll
  for (int i = 0; i < cols / 16; ++i)
    asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"((address ^ (i % 4 * 32)) + i / 4 * 8192), "r"(pairs[4 * i]), "r"(pairs[4 * i + 1]),
                 "r"(pairs[4 * i + 2]), "r"(pairs[4 * i + 3]) : "memory");
}
