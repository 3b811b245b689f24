// A zero that nvcc cannot fold, see TileRing.term.
#pragma once

static __device__ __forceinline__ int tl_attention_zero() {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}
