"""Kernel before attention in fp32: splits a tensor into bf16 terms, which products.py multiplies."""

import tilelang.language as T

from tl_attention.config.kernel_configs import TermsConfig
from tl_attention.kernels.seams.pipeline import ARRIVE
from tl_attention.kernels.seams.products import alloc_further_terms, split_terms
from tl_attention.kernels.sources.tiles import strided
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_terms(problem: AttnProblem, config: TermsConfig) -> T.PrimFunc:
    """Build the kernel that computes Parts, the bf16 terms of X: term p of column c is column p * width + c.

    Term 0 is X rounded to bf16; each later term is the rounded rest. Three terms represent exactly every fp32 number whose exponent is at
    least -110.

    Kernel arguments:
        X: fp32 [batch, seqlen, heads, columns <= width], any strides but the last, which is 1.
        Parts: bf16 [batch, seqlen, heads, terms * width]; 0 in the columns that X lacks.
    """
    width, terms, rows = problem.head_dim, problem.terms, config.rows
    batch, seqlen, heads, columns = T.dynamic("batch, seqlen, heads, columns")
    x_view = strided("X", [batch, seqlen, heads, columns], "float32")
    columns_of = tuple(slice(p * width, (p + 1) * width) for p in range(terms))
    terms_view = T.Tensor([batch, seqlen, heads, terms * width], "bfloat16")

    @T.prim_func
    def flash_parts_kernel(X: x_view, Parts: terms_view):
        # One grid dimension, as the others are limited to 2^16
        with T.Kernel(T.ceildiv(seqlen, rows) * heads * batch, threads=config.threads) as number:
            X_shared = T.alloc_shared([rows, width], "float32")
            Parts_shared = T.alloc_shared([terms, rows, width], "bfloat16")
            loaded = T.alloc_barrier([1])
            x = T.alloc_fragment([rows, width], "float32")
            part = T.alloc_fragment([rows, width], "bfloat16")
            x_terms = (part, *alloc_further_terms([rows, width], terms))
            # Variables: TileLang 0.1.15 copies an expression into every use
            first = T.alloc_var("int32", init=T.truncmod(number, T.ceildiv(seqlen, rows)) * rows)
            head = T.alloc_var("int32", init=T.truncdiv(number, T.ceildiv(seqlen, rows)))
            b = T.alloc_var("int32", init=T.truncdiv(head, heads))
            head = T.truncmod(head, heads)

            # By TMA, which reads 0 and writes nothing past the end of a dimension
            T.tma_copy(
                X[b, first : first + rows, head, 0:width], X_shared, barrier=loaded, annotations=ARRIVE
            )
            T.mbarrier_wait_parity(loaded, 0)
            T.copy(X_shared, x)
            split_terms(x, x_terms)
            for p, x_part in enumerate(x_terms):
                T.copy(x_part, Parts_shared[p, :, :])
            T.fence_proxy_async()
            T.sync_threads()
            for p, columns in enumerate(columns_of):
                T.copy(Parts_shared[p, :, :], Parts[b, first : first + rows, head, columns])

    return flash_parts_kernel
