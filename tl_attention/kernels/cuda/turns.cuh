// Turns of CTAs that add to the same rows of dQ, and additions of a fragment [64, cols].
// tl_attention_pass_turn: the fence covers the additions of all consumers, which arrived at a barrier that this thread has waited for.
#pragma once

#include <tl_templates/cuda/common.h>
TL_DEVICE void tl_attention_await_turn(int const *turn, int rank) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now != rank);
}
TL_DEVICE void tl_attention_pass_turn(int *turn, int rank) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" :: "l"(turn), "r"(rank) : "memory");
}
template <int cols, int width_blocks>
TL_DEVICE void tl_attention_add_fragment(void *first_block, void const *fragment) {
  float const *numbers = reinterpret_cast<float const *>(fragment);
  float *place = reinterpret_cast<float *>(first_block) + threadIdx.x / 32 % 4 * width_blocks * 128 + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < cols / 8; ++i)
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(place + i * 128), "f"(numbers[4 * i]), "f"(numbers[4 * i + 1]), "f"(numbers[4 * i + 2]),
                 "f"(numbers[4 * i + 3]) : "memory");
}
