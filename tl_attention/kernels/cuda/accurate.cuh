// Functions of fp32 with errors of 2 ulp, and a sine and cosine, which accurate_code.py calls
#pragma once

extern "C" __device__ float __nv_expf(float);
extern "C" __device__ float __nv_expm1f(float);
extern "C" __device__ float __nv_logf(float);
extern "C" __device__ float __nv_log2f(float);
extern "C" __device__ float __nv_log1pf(float);
extern "C" __device__ float __nv_tanhf(float);
extern "C" __device__ float __nv_atanf(float);
extern "C" __device__ float __nv_erff(float);
extern "C" __device__ float __nv_powf(float, float);
// sin(x + quarter * pi / 2): x minus a multiple of pi / 2 in three parts, then polynomials fitted at Chebyshev nodes. Error 1e-7 up to
// |x| = 1e5. Without branches, for which ptxas serializes all wgmma
static __device__ __forceinline__ float tl_attention_sine(float x, int quarter) {
  float turns = rintf(x * 0.63661977236758138f);
  float y = __fmaf_rn(turns, -1.5707963705062866f, x);
  y = __fmaf_rn(turns, 4.371138828673793e-8f, y);
  y = __fmaf_rn(turns, 1.7151245100058819e-15f, y);
  float square = y * y, sine = 2.72438208e-6f, cosine = 2.45429223e-5f;
  sine = __fmaf_rn(sine, square, -1.98400392e-4f);
  sine = __fmaf_rn(sine, square, 8.33333179e-3f);
  sine = __fmaf_rn(sine, square, -1.66666667e-1f);
  sine = __fmaf_rn(y, square * sine, y);
  cosine = __fmaf_rn(cosine, square, -1.38882797e-3f);
  cosine = __fmaf_rn(cosine, square, 4.16666645e-2f);
  cosine = __fmaf_rn(square * square, cosine, __fmaf_rn(square, -.5f, 1.f));
  int quarters = (int)turns + quarter;
  float size = quarters & 1 ? cosine : sine;
  return quarters & 2 ? -size : size;
}
