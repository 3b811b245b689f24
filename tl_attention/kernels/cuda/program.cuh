// Functions that the expressions of a Program call, see program_code.py.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
template <typename Stored, typename T>
static __device__ __forceinline__ T tl_attention_captured(const void* tensor, int offset) {
  return T(__ldg((const Stored*)tensor + offset));
}
static __device__ __forceinline__ int tl_attention_index(long long i, int size) {
  return (int)min(max(i < 0 ? i + size : i, 0ll), size - 1ll);
}
static __device__ __forceinline__ int tl_attention_index(int i, int size) {
  // i + size where i is negative, as it is the smaller unsigned number then
  return max(min((int)min((unsigned)i + (unsigned)size, (unsigned)i), size - 1), 0);
}
template <typename T>
static __device__ __forceinline__ T tl_attention_floor_divide(T x, T y) {
  T quotient = x / y;
  return quotient - (quotient * y != x && (x < 0) != (y < 0));
}
template <typename T>
static __device__ __forceinline__ T tl_attention_remainder(T x, T y) {
  T rest = x % y;
  return rest + (rest != 0 && (rest < 0) != (y < 0) ? y : 0);
}
// powf of fast math takes no negative base: the sign is that of an odd integer exponent
static __device__ __forceinline__ float tl_attention_power(float x, float y) {
  float size = powf(fabsf(x), y);
  float of_negative = floorf(y) != y ? __int_as_float(0x7fffffff) : floorf(y * .5f) * 2.f != y ? -size : size;
  return x < 0.f ? of_negative : size;
}
// x minus a multiple of 2 pi, in two parts: the sine of fast math is exact near 0 only
static __device__ __forceinline__ float tl_attention_within_pi(float x) {
  float turns = rintf(x * 0.15915494309189535f);
  return __fmaf_rn(turns, -1.9353071795864769e-3f, __fmaf_rn(turns, -6.28125f, x));
}
// 0 where the probability is, whatever the slope of a hidden score
static __device__ __forceinline__ float tl_attention_sloped(float P, float slope) { return P > 0.f ? P * slope : 0.f; }
