// dS = P (dP - delta), where dP has taken the registers of P in fp32. P comes back from its 16-bit operand and 8 of the bits that
// rounding cut off; a word of `rest` holds these of four P. A P exactly between two 16-bit numbers that was rounded down comes back half a
// unit below the lower one, not above it.
// dtype: 0 bfloat16, 1 float16. is_signed: P may be negative, as it has the slope of the scores.
#pragma once

#include <tl_templates/cuda/common.h>
// Bits of |P| if not bfloat16, else of P: the upper half is its 16 bits but for their rounding, the second byte the rest. Times 2^-112 the
// exponent of fp32, also of denormal numbers, is that of float16, which has 3 bits less of it
template <int dtype>
TL_DEVICE uint32_t tl_attention_extended(float P) {
  if constexpr (dtype)
    asm("mul.f32 %0, %0, 0f07800000;" : "+f"(P));
  else  // of unknown origin, or nvcc makes the bits in the branches of a mask, and ptxas serializes all wgmma (C7514, nvcc 13.0.88)
    asm("" : "+f"(P));
  uint32_t bits = __float_as_uint(P);
  return dtype ? bits << 3 : bits;
}
template <int dtype, bool is_signed, int size>
TL_DEVICE void tl_attention_keep_rest(float const *P, uint32_t *rest) {
#pragma unroll
  for (int i = 0; i < size / 4; ++i) {
    uint32_t four[4], low, high;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      four[j] = tl_attention_extended<dtype>(P[4 * i + j]);
    if constexpr (is_signed) {
      low = __byte_perm(four[0], four[1], 0x0051) & 0xffffu;
      high = __byte_perm(four[2], four[3], 0x5100) & 0xffff0000u;
    } else {
      // b: the sign of a fourth byte, eight times, which is 0
      asm("prmt.b32 %0, %1, %2, 0xbb51;" : "=r"(low) : "r"(four[0]), "r"(four[1]));
      asm("prmt.b32 %0, %1, %2, 0x51bb;" : "=r"(high) : "r"(four[2]), "r"(four[3]));
    }
    rest[i] = low ^ high ^ 0x80808080u;
    // Not later: the next product overwrites P, which would be kept in other registers
    asm volatile("" : "+r"(rest[i]));
  }
}
template <int dtype, bool is_signed>
TL_DEVICE float tl_attention_with_rest(uint32_t pair, uint32_t rest, int place) {
  // The 16 bits, then the rest twice, so that 0 has the bits of the subtrahend
  uint32_t bits = __byte_perm(rest, pair, place * 0x11 | (place % 2 ? 0x7600 : 0x5400));
  if constexpr (!dtype)
    return __uint_as_float(bits - 0x8080u);
  uint32_t magnitude = is_signed ? bits & 0x7fffffffu : bits;
  // A P below the least number of float16 may be rounded to 0
  float P = __int_as_float(__viaddmax_s32(magnitude >> 3, -0x1010, 0));
  asm("mul.f32 %0, %0, 0f77800000;" : "+f"(P));
  return is_signed ? __uint_as_float(__float_as_uint(P) | (bits & 0x80000000u)) : P;
}
// dS may have the registers of the rounded P. A thread has two rows of an accumulator, of each eight columns two neighbours; delta: one per
// column, in shared memory
template <int dtype, bool is_signed, int size>
TL_DEVICE void tl_attention_softmax_backward(void const *P, uint32_t const *rest, float const *dP, void const *delta, void *dS) {
  uint32_t const *pairs = static_cast<uint32_t const *>(P);
  float2 const *deltas = static_cast<float2 const *>(delta) + threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < size / 2; ++i) {
    float2 delta_of = deltas[i / 2 * 4];
    float first = tl_attention_with_rest<dtype, is_signed>(pairs[i], rest[i / 2], i % 2 * 2) * (dP[2 * i] - delta_of.x);
    float second = tl_attention_with_rest<dtype, is_signed>(pairs[i], rest[i / 2], i % 2 * 2 + 1) * (dP[2 * i + 1] - delta_of.y);
    if constexpr (dtype)
      static_cast<__half2 *>(dS)[i] = __floats2half2_rn(first, second);
    else
      static_cast<__nv_bfloat162 *>(dS)[i] = __floats2bfloat162_rn(first, second);
  }
}
