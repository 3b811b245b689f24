"""Before the backward: Delta = rowsum(dO * O), and the log-sum-exp in base 2, both padded to whole blocks of queries."""

import tilelang.language as T

from tl_attention.kernels.pipeline import ARRIVE
from tl_attention.kernels.tiles import strided
from tl_attention.problem import AttnProblem, BwdDelta

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_bwd_delta(problem: AttnProblem, config: BwdDelta) -> T.PrimFunc:
    """Kernel(O, dO, Lse, Lse_log2, Delta, lse_to_log2).

    O, dO: views [batch, seqlen_q, heads, columns], no more columns than the problem's tile width; Lse [batch, heads, seqlen_q],
    fp32, in log2 / lse_to_log2; Lse_log2, Delta [batch, heads, seqlen_q rounded up to the blocks of the passes]. Queries that
    see no key (Lse = -inf) or do not exist get Lse_log2 = +inf, so that their probabilities are 0, and the latter Delta = 0.
    """
    dtype, width, rows = problem.dtype, problem.head_dim, config.rows
    batch, heads, seqlen_q, columns, rounded_q = T.dynamic("batch, heads, seqlen_q, columns, rounded_q")
    o_view = strided("o", [batch, seqlen_q, heads, columns], dtype)
    do_view = strided("do", [batch, seqlen_q, heads, columns], dtype)
    lse_view = T.Tensor([batch, heads, seqlen_q], "float32")
    lse_log2_view = T.Tensor([batch, heads, rounded_q], "float32")
    delta_view = T.Tensor([batch, heads, rounded_q], "float32")  # one object for both would alias them

    @T.prim_func
    def flash_bwd_delta_dense(
        O: o_view,
        dO: do_view,
        Lse: lse_view,
        Lse_log2: lse_log2_view,
        Delta: delta_view,
        lse_to_log2: T.float32,
    ):
        with T.Kernel(T.ceildiv(rounded_q, rows), heads, batch, threads=config.threads) as (block, head, b):
            O_shared = T.alloc_shared([rows, width], dtype)
            dO_shared = T.alloc_shared([rows, width], dtype)
            landed = T.alloc_barrier([1])
            products = T.alloc_fragment([rows, width], "float32")
            delta = T.alloc_fragment([rows], "float32")
            first = block * rows

            T.tma_copy(O[b, first : first + rows, head, 0:width], O_shared, barrier=landed)
            T.tma_copy(
                dO[b, first : first + rows, head, 0:width], dO_shared, barrier=landed, annotations=ARRIVE
            )
            for i in T.Parallel(rows):
                lse = T.if_then_else(first + i < seqlen_q, Lse[b, head, first + i], -T.infinity("float32"))
                Lse_log2[b, head, first + i] = T.if_then_else(
                    lse == -T.infinity("float32"), T.infinity("float32"), lse * lse_to_log2
                )
            T.mbarrier_wait_parity(landed, 0)
            for i, j in T.Parallel(rows, width):  # 0 past seqlen_q
                products[i, j] = T.cast(O_shared[i, j], "float32") * T.cast(dO_shared[i, j], "float32")
            T.reduce_sum(products, delta, dim=1)
            T.copy(delta, Delta[b, head, first : first + rows])

    return flash_bwd_delta_dense
