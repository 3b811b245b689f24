// tl_attention_fetch_bits of bits.cuh, ahead of use.
#pragma once

// The same for 64 or 128 columns, any words for a negative place: nothing waits for them before they are used
template <int columns>
static __device__ __forceinline__ void tl_attention_prefetch_bits(void* to, const void* bits, int place, int row, int column) {
  const unsigned* from = (const unsigned*)bits + (max(place, 0) * 2 + row / 64 % 2) * 256 + threadIdx.x % 128 * 2;
  if (columns == 128)
    *(uint2*)to = __ldg((const uint2*)from);
  else
    *(unsigned*)to = __ldg(from + column / 64 % 2);
}
