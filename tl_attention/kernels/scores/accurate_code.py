"""CUDA of the functions of a Program with errors at the level of fp32, for fp32 problems.

Kernels are compiled with --use_fast_math, whose tanhf, expf, logf, sinf and powf have larger errors: 2^-11, relative, for tanhf. Those of
libdevice, which are called by their own names here, have at most 2 ulp. Sums, products, square roots, 1 / x and exp2f stay those of fast
math, which have 1 to 2 ulp.
"""

from __future__ import annotations

LIBDEVICE = ("exp", "expm1", "log", "log2", "log1p", "tanh", "atan", "erf")
# Operations of program_code.EXPRESSIONS on floats
ACCURATE_EXPRESSIONS: dict[str, str] = {name: f"__nv_{name}f({{0}})" for name in LIBDEVICE} | {
    "pow": "__nv_powf({0}, {1})",
    "sigmoid": "1.f / (1.f + __nv_expf(-{0}))",
    "sin": "tl_attention_sine({0}, 0)",
    "cos": "tl_attention_sine({0}, 1)",
}
