// Functions of a Program with gradients of captured tensors.
#pragma once

// 0 where the probability is 0, whatever the factor of a hidden score, and past the last query, whose lse_log2 is inf
static __device__ __forceinline__ float tl_attention_gradient(float P, float dP, float delta, float lse_log2, float factor) {
  return P != 0.f & lse_log2 != __int_as_float(0x7f800000) ? P * (dP - delta) * factor : 0.f;
}
static __device__ __forceinline__ float tl_attention_before(bool is_before, float x) { return is_before ? x : 0.f; }
static __device__ __forceinline__ void tl_attention_add(void* sums, int offset, float x) {
  // A predicate, not a branch, for which ptxas serializes all wgmma (C7514). A NaN is not equal to 0: it is added
  asm volatile("{ .reg .pred p; setp.neu.f32 p, %1, 0f00000000; @p red.global.add.f32 [%0], %1; }" ::"l"((float*)sums + offset), "f"(x)
               : "memory");
}
// Adds x to the exact sum of an element: 15 integers for 8 exponents each, from 2^-64 on, and a count of what is too large for them
static __device__ __forceinline__ void tl_attention_add_exactly(void* sums, int offset, float x) {
  int bits = __float_as_int(x), exponent = (bits >> 23 & 255) - 127 + 64;
  bool is_large = exponent >= 15 * 8;
  int slot = is_large ? 15 : max(exponent, 0) >> 3;
  long long digits = (long long)(bits & 0x7fffff | 0x800000) << (exponent & 7);
  digits = is_large ? 1 : exponent < 0 ? 0 : bits < 0 ? -digits : digits;
  asm volatile("{ .reg .pred p; setp.ne.s64 p, %1, 0; @p red.global.add.u64 [%0], %1; }" ::"l"(
                   (long long*)sums + (offset * 16ll + slot)),
               "l"(digits)
               : "memory");
}
