"""Kernel before a backward: Delta = rowsum(dO * O), and the log-sum-exps in base 2, both padded to whole query blocks."""

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdDelta
from tl_attention.kernels.seams.pipeline import ARRIVE
from tl_attention.kernels.seams.scheduler import Tile, TileOrder
from tl_attention.kernels.sources.tiles import packed_rows, rows_argument
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True}


def flash_bwd_delta(problem: AttnProblem, config: BwdDelta) -> T.PrimFunc:
    """Build the kernel that computes Lse_log2 and Delta from a forward's O and Lse.

    Kernel arguments:
        O, dO: [batch, seqlen_q, heads, columns <= width], any strides but the last, which is 1.
        Lse: fp32 [batch, heads, seqlen_q]; Lse * lse_to_log2 is in base 2.
        Lse_log2, Delta: fp32 [batch, heads, seqlen_q rounded up to whole query blocks].
        lse_to_log2: fp32, 1 if Lse is in base 2, log2(e) if it is natural.

    For packed sequences:
        O, dO: as tiles.packed has them.
        Lse, dLse: fp32 [heads, total_q].
        Lse_log2, Delta: fp32 [1, heads, padded rows]. Delta = rowsum(dO * O) - dLse * dlse_factor.
        dlse_factor: fp32.
        Table: int32 [entries, 8], the tile table of blocks of TABLE_ROWS queries.

    A query that sees no key (Lse = -inf) and a row of padding get Lse_log2 = +inf, so that their probabilities are 0. Delta of padding
    is 0.
    """
    dtype, width, rows = problem.dtype_of("o"), problem.head_dim, config.rows
    varlen = problem.has("varlen")
    batch, heads, seqlen_q, columns, rounded_q = T.dynamic("batch, heads, seqlen_q, columns, rounded_q")
    total_q, entries = T.dynamic("total_q, entries")
    batch_rows = 1 if varlen else batch
    lse_shape = [heads, total_q] if varlen else [batch, heads, seqlen_q]
    o_view = rows_argument(problem, "o", batch, seqlen_q, heads, columns)
    do_view = rows_argument(problem, "do", batch, seqlen_q, heads, columns, operand="o")
    lse_view = T.Tensor(lse_shape, "float32")
    dlse_view = T.Tensor(lse_shape, "float32") if varlen else False  # False makes no argument
    lse_log2_view = T.Tensor([batch_rows, heads, rounded_q], "float32")
    # Not the same object: one object for both arguments would alias them
    delta_view = T.Tensor([batch_rows, heads, rounded_q], "float32")
    dlse_factor_type = T.float32 if varlen else False
    table_view = T.Tensor([entries, 8], "int32") if varlen else False
    blocks_per_tile = TABLE_ROWS // rows
    row_blocks = entries * blocks_per_tile if varlen else T.ceildiv(rounded_q, rows)

    def log2_or_inf(lse, lse_to_log2):
        return T.if_then_else(lse == -T.infinity("float32"), T.infinity("float32"), lse * lse_to_log2)

    @T.macro
    def load_rows(o_rows, do_rows, O_shared, dO_shared, loaded):
        """Issue the loads of O and dO; rows past the end read as 0."""
        T.tma_copy(o_rows, O_shared, barrier=loaded)
        T.tma_copy(do_rows, dO_shared, barrier=loaded, annotations=ARRIVE)

    @T.macro
    def dot_rows(O_shared, dO_shared, loaded, products, delta):
        """delta[i] = sum over j of O[i, j] * dO[i, j]"""
        T.mbarrier_wait_parity(loaded, 0)
        for i, j in T.Parallel(rows, width):
            products[i, j] = T.cast(O_shared[i, j], "float32") * T.cast(dO_shared[i, j], "float32")
        T.reduce_sum(products, delta, dim=1)

    @T.prim_func
    def flash_bwd_delta_kernel(
        O: o_view,
        dO: do_view,
        Lse: lse_view,
        dLse: dlse_view,
        Lse_log2: lse_log2_view,
        Delta: delta_view,
        lse_to_log2: T.float32,
        dlse_factor: dlse_factor_type,
        Table: table_view,
    ):
        # In one dimension, as the others of a grid end at 65,535
        with T.Kernel(row_blocks * heads * batch_rows, threads=config.threads) as number:
            block = T.alloc_var("int32", init=T.truncmod(number, row_blocks))
            head = T.alloc_var("int32", init=T.truncmod(T.truncdiv(number, row_blocks), heads))
            O_shared = T.alloc_shared([rows, width], dtype)
            dO_shared = T.alloc_shared([rows, width], dtype)
            loaded = T.alloc_barrier([1])
            products = T.alloc_fragment([rows, width], "float32")
            delta = T.alloc_fragment([rows], "float32")
            if varlen:
                tile = Tile(TileOrder(False, heads, heads, 1, entries, 1, table=Table))
                tile.read_table(block // blocks_per_tile)
                if tile.exists:
                    row_in_tile = block % blocks_per_tile * rows
                    first = T.alloc_var("int32", init=tile.m_block * TABLE_ROWS + row_in_tile)
                    end, length = tile.end_q[0], tile.len_q[0]
                    load_rows(
                        packed_rows(O, end, length, first, rows, head, width),
                        packed_rows(dO, end, length, first, rows, head, width),
                        O_shared,
                        dO_shared,
                        loaded,
                    )
                    dot_rows(O_shared, dO_shared, loaded, products, delta)
                    for i in T.Parallel(rows):
                        row = tile.end_q[0] - tile.len_q[0] + first + i
                        exists = first + i < tile.len_q[0]
                        lse = T.if_then_else(exists, Lse[head, row], -T.infinity("float32"))
                        sees_none = lse == -T.infinity("float32")
                        dlse = T.if_then_else(sees_none, 0.0, T.if_then_else(exists, dLse[head, row], 0.0))
                        Lse_log2[0, head, tile.padded_q[0] + first + i] = log2_or_inf(lse, lse_to_log2)
                        Delta[0, head, tile.padded_q[0] + first + i] = delta[i] - dlse * dlse_factor
            else:
                b = T.alloc_var("int32", init=T.truncdiv(number, row_blocks * heads))
                first = T.alloc_var("int32", init=block * rows)
                load_rows(
                    O[b, first : first + rows, head, 0:width],
                    dO[b, first : first + rows, head, 0:width],
                    O_shared,
                    dO_shared,
                    loaded,
                )
                for i in T.Parallel(rows):  # beside the loads
                    lse = T.if_then_else(
                        first + i < seqlen_q, Lse[b, head, first + i], -T.infinity("float32")
                    )
                    Lse_log2[b, head, first + i] = log2_or_inf(lse, lse_to_log2)
                dot_rows(O_shared, dO_shared, loaded, products, delta)
                T.copy(delta, Delta[b, head, first : first + rows])

    return flash_bwd_delta_kernel
