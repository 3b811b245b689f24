"""After the backward: a gradient in the dtype of the inputs, from fp32 sums and the parts that CTAs made of it."""

import tilelang.language as T

from tl_attention.kernels.tiles import strided
from tl_attention.problem import AttnProblem, BwdSum

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_bwd_sum(problem: AttnProblem, config: BwdSum) -> T.PrimFunc:
    """Kernel(Parts, Gradient, scale): Gradient = scale * sum of Parts over its first dimension, always in the same order.

    Parts: fp32 [parts, batch, heads, rows, width], rows at least seqlen rounded up to config.rows; Gradient: a view
    [batch, seqlen, heads, columns], no more columns than width.
    """
    dtype, width, rows = problem.dtype, problem.head_dim, config.rows
    batch, heads, seqlen, columns, padded, parts = T.dynamic("batch, heads, seqlen, columns, padded, parts")
    part_strides = [T.dynamic(f"part_stride_{axis}", "int64") for axis in range(4)]
    parts_view = T.StridedTensor([parts, batch, heads, padded, width], [*part_strides, 1], "float32")
    gradient_view = strided("gradient", [batch, seqlen, heads, columns], dtype)

    @T.prim_func
    def flash_bwd_sum_dense(Parts: parts_view, Gradient: gradient_view, scale: T.float32):
        with T.Kernel(T.ceildiv(seqlen, rows), heads, batch, threads=config.threads) as (block, head, b):
            total = T.alloc_fragment([rows, width], "float32")
            Gradient_shared = T.alloc_shared([rows, width], dtype)
            first = block * rows

            T.clear(total)
            for p in T.serial(parts):
                for i, j in T.Parallel(rows, width):
                    total[i, j] += Parts[p, b, head, first + i, j]
            for i, j in T.Parallel(rows, width):
                Gradient_shared[i, j] = total[i, j] * scale
            T.fence_proxy_async()
            T.sync_threads()
            # By TMA, which writes nothing past seqlen
            T.copy(Gradient_shared, Gradient[b, first : first + rows, head, 0:width])

    return flash_bwd_sum_dense
