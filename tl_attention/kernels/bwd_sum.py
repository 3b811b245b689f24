"""After the backward: a gradient in the dtype of the inputs, from fp32 sums and the parts that CTAs made of it."""

import tilelang.language as T

from tl_attention.kernels.tiles import FragmentBlocks, strided
from tl_attention.problem import AttnProblem, BwdSum

PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True}


def flash_bwd_sum(problem: AttnProblem, config: BwdSum) -> T.PrimFunc:
    """Kernel(Parts, Gradient, scale, parts, row_blocks): Gradient = scale * the sum of its parts, always in the same order.

    Parts: FragmentBlocks of the matrices [parts, batch, heads] of row_blocks * 16 rows, at least seqlen rounded up to
    config.rows, and width columns; Gradient: a view [batch, seqlen, heads, columns], no more columns than width.
    """
    dtype, width, rows = problem.dtype, problem.head_dim, config.rows
    batch, heads, seqlen, columns, total_row_blocks = T.dynamic(
        "batch, heads, seqlen, columns, total_row_blocks"
    )
    gradient_view = strided("gradient", [batch, seqlen, heads, columns], dtype)
    parts_view = FragmentBlocks.argument(total_row_blocks, width)

    @T.prim_func
    def flash_bwd_sum_dense(
        Parts: parts_view, Gradient: gradient_view, scale: T.float32, parts: T.int32, row_blocks: T.int32
    ):
        with T.Kernel(T.ceildiv(seqlen, rows), heads, batch, threads=config.threads) as (block, head, b):
            total = T.alloc_fragment([rows // 16, width // 8, 32, 4], "float32")
            Gradient_shared = T.alloc_shared([rows, width], dtype)
            blocks = FragmentBlocks(Parts, row_blocks)
            first = block * rows

            T.clear(total)
            for p in T.serial(parts):
                place = T.alloc_var("int32", init=blocks.row_block((p * batch + b) * heads + head, first))
                for r, c, lane, number in T.Parallel(rows // 16, width // 8, 32, 4):
                    total[r, c, lane, number] += Parts[place + r, c, lane, number]
            for r, c, lane, number in T.Parallel(rows // 16, width // 8, 32, 4):
                row, col = blocks.element(lane, number)
                Gradient_shared[r * 16 + row, c * 8 + col] = total[r, c, lane, number] * scale
            T.fence_proxy_async()
            T.sync_threads()
            # By TMA, which writes nothing past seqlen
            T.copy(Gradient_shared, Gradient[b, first : first + rows, head, 0:width])

    return flash_bwd_sum_dense
