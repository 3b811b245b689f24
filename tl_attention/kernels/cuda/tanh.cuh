// tanh with an error of 2e-7; that of --use_fast_math has 2^-11. Below 0.55 a polynomial, fitted at Chebyshev nodes.
#pragma once

static __device__ __forceinline__ float tl_attention_tanh(float x) {
  float square = x * x, power = exp2f(-2.885390082f * fabsf(x));
  float sum = -6.615746300667524e-3f;
  sum = fmaf(sum, square, 2.1312739700078964e-2f);
  sum = fmaf(sum, square, -5.3910065442323685e-2f);
  sum = fmaf(sum, square, 1.3333117961883545e-1f);
  sum = fmaf(sum, square, -3.333333134651184e-1f);
  float small = fmaf(x, square * sum, x), large = copysignf(__fdividef(1.0f - power, 1.0f + power), x);
  return fabsf(x) < 0.55f ? small : large;
}
