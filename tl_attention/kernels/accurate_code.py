"""CUDA of the functions of a Program with errors at the level of fp32, for fp32 problems.

Kernels are compiled with --use_fast_math, whose tanhf, expf, logf, sinf and powf have larger errors: 2^-11, relative, for tanhf. Those of
libdevice, which are called by their own names here, have at most 2 ulp. Sums, products, square roots, 1 / x and exp2f stay those of fast
math, which have 1 to 2 ulp.
"""

from __future__ import annotations

LIBDEVICE = ("exp", "expm1", "log", "log2", "log1p", "tanh", "atan", "erf")
ACCURATE = (
    "".join(f'extern "C" __device__ float __nv_{name}f(float);\n' for name in LIBDEVICE)
    + """extern "C" __device__ float __nv_powf(float, float);
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
"""
)
# Operations of program_code.EXPRESSIONS on floats
ACCURATE_EXPRESSIONS: dict[str, str] = {name: f"__nv_{name}f({{0}})" for name in LIBDEVICE} | {
    "pow": "__nv_powf({0}, {1})",
    "sigmoid": "1.f / (1.f + __nv_expf(-{0}))",
    "sin": "tl_attention_sine({0}, 0)",
    "cos": "tl_attention_sine({0}, 1)",
}
