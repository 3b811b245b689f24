// A flag of any thread of a warpgroup, for all of its threads, which wait for each other.
#pragma once

static __device__ __forceinline__ int tl_attention_any_of_warpgroup(int barrier, int flag) {
  int any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.s32 p, %2, 0; bar.red.or.pred q, %1, 128, p; selp.s32 %0, 1, 0, q;}"
      : "=r"(any) : "r"(barrier), "r"(flag) : "memory");
  return any;
}
