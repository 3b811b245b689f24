"""After a split forward: O = sum over s of 2^(lse_s - lse) O_s with lse = log2 of the sum of 2^lse_s, always in the same order."""

import tilelang.language as T

from tl_attention.kernel_configs import FwdCombine
from tl_attention.kernels.pipeline import alloc_fragments
from tl_attention.kernels.softmax import LOWEST
from tl_attention.kernels.tiles import strided
from tl_attention.problem import MAX_SPLITS, AttnProblem

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_safe_memory_legalize": True,  # its guards would have each load wait for the one before
}
AT_ONCE = 8  # parts that are on their way together


def flash_fwd_combine(problem: AttnProblem, config: FwdCombine) -> T.PrimFunc:
    """Kernel(O_parts, Lse_parts, O, Lse, lse_unit).

    O_parts: fp32 [splits, batch, heads, seqlen_q, width], at most MAX_SPLITS; Lse_parts: [splits, batch, heads, seqlen_q], base 2.
    O: a view [batch, seqlen_q, heads, columns], no more columns than width; Lse: [batch, heads, seqlen_q] fp32, in units
    of log2 / lse_unit. A row whose parts are all -inf gives O = 0, Lse = -inf.
    """
    dtype, width, rows = problem.dtype, problem.head_dim, config.rows
    splits, batch, heads, seqlen_q, columns = T.dynamic("splits, batch, heads, seqlen_q, columns")
    o_parts_view = T.Tensor([splits, batch, heads, seqlen_q, width], "float32")
    lse_parts_view = T.Tensor([splits, batch, heads, seqlen_q], "float32")
    o_view = strided("o", [batch, seqlen_q, heads, columns], dtype)
    lse_view = T.Tensor([batch, heads, seqlen_q], "float32")

    at_once = tuple(range(AT_ONCE))

    @T.prim_func
    def flash_fwd_combine_dense(
        O_parts: o_parts_view, Lse_parts: lse_parts_view, O: o_view, Lse: lse_view, lse_unit: T.float32
    ):
        # In one dimension, as the others of a grid end at 2^16
        with T.Kernel(T.ceildiv(seqlen_q, rows) * heads * batch, threads=config.threads) as number:
            weights = T.alloc_fragment([rows, MAX_SPLITS], "float32")
            weights_shared = T.alloc_shared([rows, MAX_SPLITS], "float32")
            row_max = T.alloc_fragment([rows], "float32")
            row_sum = T.alloc_fragment([rows], "float32")
            total = T.alloc_fragment([rows, width], "float32")
            parts = alloc_fragments([[rows, width]] * AT_ONCE, "float32")
            O_shared = T.alloc_shared([rows, width], dtype)
            # Variables, not expressions: TileLang 0.1.15 would copy those into every use
            first = T.alloc_var("int32", init=T.truncmod(number, T.ceildiv(seqlen_q, rows)) * rows)
            head = T.alloc_var("int32", init=T.truncdiv(number, T.ceildiv(seqlen_q, rows)))
            b = T.alloc_var("int32", init=T.truncdiv(head, heads))
            head = T.truncmod(head, heads)

            # Rows past seqlen_q and parts past the last are read as the last one, so that no load hangs on a condition
            for i, s in T.Parallel(rows, MAX_SPLITS):
                weights[i, s] = Lse_parts[T.min(s, splits - 1), b, head, T.min(first + i, seqlen_q - 1)]
            for i, s in T.Parallel(rows, MAX_SPLITS):
                weights[i, s] = T.if_then_else(s < splits, weights[i, s], -T.infinity("float32"))
            T.fill(row_max, LOWEST)
            T.reduce_max(weights, row_max, dim=1, clear=False)
            for i, s in T.Parallel(rows, MAX_SPLITS):
                weights[i, s] = T.exp2(weights[i, s] - row_max[i])
            T.reduce_sum(weights, row_sum, dim=1)
            for i in T.Parallel(rows):
                if first + i < seqlen_q:
                    Lse[b, head, first + i] = (T.log2(row_sum[i]) + row_max[i]) * lse_unit
            for i, s in T.Parallel(rows, MAX_SPLITS):
                weights_shared[i, s] = weights[i, s] * T.if_then_else(row_sum[i] != 0, 1 / row_sum[i], 0)

            T.clear(total)
            for s in T.serial(T.ceildiv(splits, AT_ONCE)):
                for u in at_once:
                    for i, j in T.Parallel(rows, width):
                        parts[u][i, j] = O_parts[
                            T.min(AT_ONCE * s + u, splits - 1), b, head, T.min(first + i, seqlen_q - 1), j
                        ]
                for u in at_once:
                    if AT_ONCE * s + u < splits:
                        for i, j in T.Parallel(rows, width):
                            total[i, j] += weights_shared[i, AT_ONCE * s + u] * parts[u][i, j]
            for i, j in T.Parallel(rows, width):
                O_shared[i, j] = total[i, j]
            T.fence_proxy_async()
            T.sync_threads()
            # By TMA, which writes nothing past seqlen_q
            T.copy(O_shared, O[b, first : first + rows, head, 0:width])

    return flash_fwd_combine_dense
