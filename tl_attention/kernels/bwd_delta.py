"""Before the backward: Delta = rowsum(dO * O), and the log-sum-exp in base 2, both padded to whole blocks of queries."""

import tilelang.language as T

from tl_attention.kernel_configs import BwdDelta
from tl_attention.kernels.pipeline import ARRIVE
from tl_attention.kernels.scheduler import Tile, TileOrder
from tl_attention.kernels.tiles import packed, packed_rows, strided
from tl_attention.problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_bwd_delta(problem: AttnProblem, config: BwdDelta) -> T.PrimFunc:
    """Kernel(O, dO, Lse, Lse_log2, Delta, lse_to_log2).

    O, dO: views [batch, seqlen_q, heads, columns], no more columns than the problem's tile width; Lse [batch, heads, seqlen_q],
    fp32, in log2 / lse_to_log2; Lse_log2, Delta [batch, heads, seqlen_q rounded up to the blocks of the passes]. Queries that
    see no key (Lse = -inf) or do not exist get Lse_log2 = +inf, so that their probabilities are 0, and the latter Delta = 0.

    varlen: Kernel(O, dO, Lse, dLse, Lse_log2, Delta, lse_to_log2, dlse_factor, Table), where Delta is less dLse * dlse_factor.
    O, dO are as tiles.PackedTiles has them, Lse and dLse [heads, total_q], Lse_log2 and Delta [1, heads, padded rows], and Table
    [entries, 8] is that of blocks of TABLE_ROWS queries.
    """
    dtype, width, rows = problem.dtype, problem.head_dim, config.rows
    batch, heads, seqlen_q, columns, rounded_q = T.dynamic("batch, heads, seqlen_q, columns, rounded_q")
    o_view = strided("o", [batch, seqlen_q, heads, columns], dtype)
    do_view = strided("do", [batch, seqlen_q, heads, columns], dtype)
    lse_view = T.Tensor([batch, heads, seqlen_q], "float32")
    lse_log2_view = T.Tensor([batch, heads, rounded_q], "float32")
    delta_view = T.Tensor([batch, heads, rounded_q], "float32")  # one object for both would alias them

    @T.macro
    def dot_rows(o_rows, do_rows, delta):
        O_shared = T.alloc_shared([rows, width], dtype)
        dO_shared = T.alloc_shared([rows, width], dtype)
        landed = T.alloc_barrier([1])
        products = T.alloc_fragment([rows, width], "float32")
        T.tma_copy(o_rows, O_shared, barrier=landed)
        T.tma_copy(do_rows, dO_shared, barrier=landed, annotations=ARRIVE)
        T.mbarrier_wait_parity(landed, 0)
        for i, j in T.Parallel(rows, width):  # 0 past the last row
            products[i, j] = T.cast(O_shared[i, j], "float32") * T.cast(dO_shared[i, j], "float32")
        T.reduce_sum(products, delta, dim=1)

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

    if not problem.has("varlen"):
        return flash_bwd_delta_dense

    total_q, entries = T.dynamic("total_q, entries")
    packed_o_view = packed("o", heads, columns, dtype)
    packed_do_view = packed("do", heads, columns, dtype)
    packed_lse_view = T.Tensor([heads, total_q], "float32")
    packed_dlse_view = T.Tensor([heads, total_q], "float32")
    padded_lse_view = T.Tensor([1, heads, rounded_q], "float32")
    padded_delta_view = T.Tensor([1, heads, rounded_q], "float32")
    table_view = T.Tensor([entries, 8], "int32")

    @T.prim_func
    def flash_bwd_delta_packed(
        O: packed_o_view,
        dO: packed_do_view,
        Lse: packed_lse_view,
        dLse: packed_dlse_view,
        Lse_log2: padded_lse_view,
        Delta: padded_delta_view,
        lse_to_log2: T.float32,
        dlse_factor: T.float32,
        Table: table_view,
    ):
        with T.Kernel(entries * (TABLE_ROWS // rows), heads, threads=config.threads) as (block, head):
            delta = T.alloc_fragment([rows], "float32")
            tile = Tile(TileOrder(False, heads, heads, 1, entries, 1, table=Table))
            tile.look_up(block // (TABLE_ROWS // rows))
            if tile.there:
                first = T.alloc_var("int32", init=0)
                first = tile.m_block * TABLE_ROWS + block % (TABLE_ROWS // rows) * rows
                end, length = tile.end_q[0], tile.len_q[0]
                dot_rows(
                    packed_rows(O, end, length, first, rows, head, width),
                    packed_rows(dO, end, length, first, rows, head, width),
                    delta,
                )
                for i in T.Parallel(rows):
                    row = tile.end_q[0] - tile.len_q[0] + first + i
                    exists = first + i < tile.len_q[0]
                    lse = T.if_then_else(exists, Lse[head, row], -T.infinity("float32"))
                    sees_none = lse == -T.infinity("float32")
                    dlse = T.if_then_else(sees_none, 0.0, T.if_then_else(exists, dLse[head, row], 0.0))
                    Lse_log2[0, head, tile.padded_q[0] + first + i] = T.if_then_else(
                        sees_none, T.infinity("float32"), lse * lse_to_log2
                    )
                    Delta[0, head, tile.padded_q[0] + first + i] = delta[i] - dlse * dlse_factor

    return flash_bwd_delta_packed
