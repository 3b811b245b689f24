// Split of an fp32 tile into its bf16 terms, in shared memory.
// Columns lie in chunks of 128 bytes with 128-byte swizzle: 32 fp32 numbers, or 64 of a term. A warp reads and writes the same bytes, those
// of its own rows, four at a time. Eight lanes access 128 bytes of different banks: four those of row r, four those of row r ^ 5.
#pragma once

#include <tl_templates/cuda/common.h>
template <int width, int parts>
TL_DEVICE void tl_attention_split_tile(void *tiles, int slot) {
  constexpr int chunk = 64 * 128, chunks = width / 64;
  int lane = threadIdx.x % 32, row = (lane / 16) ^ (lane / 4 % 2 * 5), half = lane / 8 % 2, column = lane % 4;
  uint32_t rows = smem_ptr_to_uint(tiles) + slot * (parts * chunks * chunk) + threadIdx.x / 32 % 4 * (16 * 128) + row * 128;
  uint32_t source = rows + half * chunk + ((2 * column) ^ row) * 16, target = rows + ((4 * half + column) ^ row) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int further = i / 2 * (8 * 128) + i % 2 * (2 * 128);  // rows
    float numbers[chunks][8];
#pragma unroll
    for (int c = 0; c < chunks; ++c)
#pragma unroll
      for (int n = 0; n < 8; n += 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(numbers[c][n]), "=f"(numbers[c][n + 1]), "=f"(numbers[c][n + 2]), "=f"(numbers[c][n + 3])
                     : "r"((source ^ (i % 2 * 32 + n * 4)) + further + 2 * c * chunk) : "memory");
    __syncwarp();
#pragma unroll
    for (int c = 0; c < chunks; ++c)
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        uint32_t pairs[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[n]) : "f"(numbers[c][2 * n + 1]), "f"(numbers[c][2 * n]));
          numbers[c][2 * n] -= __uint_as_float(pairs[n] << 16);
          numbers[c][2 * n + 1] -= __uint_as_float(pairs[n] & 0xffff0000u);
        }
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "r"((target ^ (i % 2 * 32)) + further + (part * chunks + c) * chunk), "r"(pairs[0]), "r"(pairs[1]),
                        "r"(pairs[2]), "r"(pairs[3]) : "memory");
      }
  }
}
