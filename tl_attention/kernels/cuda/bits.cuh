// Bits of a mask, a word per thread and tile.
#pragma once

// Words of this thread for a tile of 64 rows, as launch/mask_bits.py lays them out; all ones for a negative place
template <int columns>
static __device__ __forceinline__ void tl_attention_fetch_bits(void* to, const void* bits, int place, int row, int column) {
  const unsigned* from = (const unsigned*)bits + (max(place, 0) * 2 + row / 64 % 2) * 256 + threadIdx.x % 128 * 2;
  if (columns == 128) {
    uint2 words = __ldg((const uint2*)from);
    ((unsigned*)to)[0] = place < 0 ? ~0u : words.x;
    ((unsigned*)to)[columns / 128] = place < 0 ? ~0u : words.y;
  } else {
    unsigned word = __ldg(from + column / 64 % 2) >> column % 64 / 32 * 16;
    *(unsigned*)to = place < 0 ? ~0u : word;
  }
}
static __device__ __forceinline__ bool tl_attention_bit(const void* bits, int place) {
  return ((const unsigned*)bits)[place / 32] >> place % 32 & 1;
}
