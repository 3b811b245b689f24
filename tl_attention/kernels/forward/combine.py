"""Kernel after a split forward: merges the partials of O and Lse, always in the same order.

Lse = log2 of the sum over s of 2^lse_s, and O = sum over s of 2^(lse_s - Lse) * O_s, for splits s of the keys.
"""

import tilelang.language as T

from tl_attention.config.kernel_configs import FwdCombine
from tl_attention.kernels.seams.pipeline import alloc_fragments
from tl_attention.kernels.seams.softmax import LOWEST
from tl_attention.kernels.sources.tiles import strided
from tl_attention.problem.attn_problem import MAX_SPLITS, AttnProblem

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_safe_memory_legalize": True,  # bounds checks would make each load wait for the previous one
}
AT_ONCE = 8  # partials in flight together


def flash_fwd_combine(problem: AttnProblem, config: FwdCombine) -> T.PrimFunc:
    """Build the kernel that merges the splits of a forward.

    Kernel arguments:
        O_parts: fp32 [splits, batch, heads, seqlen_q, width], splits <= MAX_SPLITS.
        Lse_parts: fp32 [splits, batch, heads, seqlen_q], base 2.
        O: [batch, seqlen_q, heads, columns <= width], any strides but the last, which is 1.
        Lse: fp32 [batch, heads, seqlen_q], lse_unit * log2(sum of exponentials).
        lse_unit: fp32.

    A row whose partials are all -inf gets O = 0 and Lse = -inf.
    """
    dtype, width, rows = problem.dtype_of("o"), problem.head_dim, config.rows
    splits, batch, heads, seqlen_q, columns = T.dynamic("splits, batch, heads, seqlen_q, columns")
    o_partials_view = T.Tensor([splits, batch, heads, seqlen_q, width], "float32")
    lse_partials_view = T.Tensor([splits, batch, heads, seqlen_q], "float32")
    o_view = strided("o", [batch, seqlen_q, heads, columns], dtype)
    lse_view = T.Tensor([batch, heads, seqlen_q], "float32")

    at_once = tuple(range(AT_ONCE))

    @T.prim_func
    def flash_fwd_combine_kernel(
        O_parts: o_partials_view, Lse_parts: lse_partials_view, O: o_view, Lse: lse_view, lse_unit: T.float32
    ):
        # One grid dimension, as the others are limited to 2^16
        with T.Kernel(T.ceildiv(seqlen_q, rows) * heads * batch, threads=config.threads) as number:
            weights = T.alloc_fragment([rows, MAX_SPLITS], "float32")  # Lse_parts, then 2^(lse_s - row_max)
            weights_shared = T.alloc_shared([rows, MAX_SPLITS], "float32")  # 2^(lse_s - Lse)
            row_max = T.alloc_fragment([rows], "float32")
            row_sum = T.alloc_fragment([rows], "float32")
            acc_o = T.alloc_fragment([rows, width], "float32")
            parts = alloc_fragments([[rows, width]] * AT_ONCE, "float32")
            O_shared = T.alloc_shared([rows, width], dtype)
            # Variables: TileLang 0.1.15 copies an expression into every use
            first = T.alloc_var("int32", init=T.truncmod(number, T.ceildiv(seqlen_q, rows)) * rows)
            head = T.alloc_var("int32", init=T.truncdiv(number, T.ceildiv(seqlen_q, rows)))
            b = T.alloc_var("int32", init=T.truncdiv(head, heads))
            head = T.truncmod(head, heads)

            # Indices of rows and splits are clamped to the last, so that no load depends on a condition
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

            T.clear(acc_o)
            for s in T.serial(T.ceildiv(splits, AT_ONCE)):
                for u in at_once:
                    for i, j in T.Parallel(rows, width):
                        parts[u][i, j] = O_parts[
                            T.min(AT_ONCE * s + u, splits - 1), b, head, T.min(first + i, seqlen_q - 1), j
                        ]
                for u in at_once:
                    if AT_ONCE * s + u < splits:
                        for i, j in T.Parallel(rows, width):
                            acc_o[i, j] += weights_shared[i, AT_ONCE * s + u] * parts[u][i, j]
            for i, j in T.Parallel(rows, width):
                O_shared[i, j] = acc_o[i, j]
            T.fence_proxy_async()
            T.sync_threads()
            # Stored by TMA, which writes nothing past seqlen_q
            T.copy(O_shared, O[b, first : first + rows, head, 0:width])

    return flash_fwd_combine_kernel
