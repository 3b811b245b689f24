"""Kernel before attention in fp32: splits a tensor into bf16 parts, which products.py multiplies."""

import tilelang.language as T

from tl_attention.config.kernel_configs import PartsConfig
from tl_attention.kernels.seams.pipeline import ARRIVE
from tl_attention.kernels.seams.products import alloc_further_parts, split_parts
from tl_attention.kernels.sources.tiles import strided
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_parts(problem: AttnProblem, config: PartsConfig) -> T.PrimFunc:
    """Build the kernel that computes Parts of X: part p of column c is column p * width + c.

    Part 0 is X rounded to bf16; each later part is the rounded rest. Three parts represent exactly every fp32 number whose exponent is at
    least -110.

    Kernel arguments:
        X: fp32 [batch, seqlen, heads, columns <= width], any strides but the last, which is 1.
        Parts: bf16 [batch, seqlen, heads, parts * width]; 0 in the columns that X lacks.
    """
    width, parts, rows = problem.head_dim, problem.parts, config.rows
    batch, seqlen, heads, columns = T.dynamic("batch, seqlen, heads, columns")
    x_view = strided("X", [batch, seqlen, heads, columns], "float32")
    columns_of = tuple(slice(p * width, (p + 1) * width) for p in range(parts))
    parts_view = T.Tensor([batch, seqlen, heads, parts * width], "bfloat16")

    @T.prim_func
    def flash_parts_kernel(X: x_view, Parts: parts_view):
        # One grid dimension, as the others are limited to 2^16
        with T.Kernel(T.ceildiv(seqlen, rows) * heads * batch, threads=config.threads) as number:
            X_shared = T.alloc_shared([rows, width], "float32")
            Parts_shared = T.alloc_shared([parts, rows, width], "bfloat16")
            loaded = T.alloc_barrier([1])
            x = T.alloc_fragment([rows, width], "float32")
            part = T.alloc_fragment([rows, width], "bfloat16")
            x_parts = (part, *alloc_further_parts([rows, width], parts))
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
            split_parts(x, x_parts)
            for p, x_part in enumerate(x_parts):
                T.copy(x_part, Parts_shared[p, :, :])
            T.fence_proxy_async()
            T.sync_threads()
            for p, columns in enumerate(columns_of):
                T.copy(Parts_shared[p, :, :], Parts[b, first : first + rows, head, columns])

    return flash_parts_kernel
