"""Merge of the partials of a work item, one per segment (Flash-Decoding, Dao et al. 2023).

O = sum over partials s of 2^(lse_s - lse) O_s with lse = log2(sum over s of 2^lse_s + 2^sink), lse and sink in base 2. The order of the
partials is fixed, so the result is deterministic. An online softmax over the partials reads each of them once.
"""

import tilelang.language as T

from tl_attention.config.kernel_configs import MERGE_FIELDS, MERGE_NUMBERS, DecodeCombine
from tl_attention.kernels.seams.pipeline import alloc_fragments
from tl_attention.kernels.seams.softmax import LOG2E, LOWEST
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_safe_memory_legalize": True,  # bounds checks would make each load wait for the previous one
}


def flash_decode_combine(problem: AttnProblem, config: DecodeCombine) -> T.PrimFunc:
    """Kernel that runs after kernel.py and merges its partials; its arguments are those of flash_decode with the same names.

    Nothing is written for an entry of Merges with fewer than two partials. A CTA merges `config.rows` rows of one warpgroup's 64. The grid
    has entries x warpgroups x groups of rows. Sink: float32 [heads], natural.

    Args:
        problem: its head_dim_v is the number of columns of a partial; its options are a sink or none.
    """
    dtype, columns, rows = problem.dtype, problem.head_dim_v, config.rows
    divides_columns = config.divides_columns
    entries, slots, warpgroups, part_rows = T.dynamic("entries, slots, warpgroups, part_rows")
    batch, seqlen_q, heads, columns_o, sink_heads = T.dynamic("batch, seqlen_q, heads, columns_o, sink_heads")
    at_once = config.at_once
    loads = tuple(range(at_once))
    field = MERGE_FIELDS.index

    @T.prim_func
    def flash_decode_combine_kernel(
        O_parts: T.Tensor([slots, warpgroups, part_rows, columns], "float32"),
        Lse_parts: T.Tensor([slots, warpgroups, part_rows], "float32"),
        Merges: T.Tensor([entries, MERGE_NUMBERS], "int32"),
        O: T.Tensor([batch, seqlen_q, heads, columns_o], dtype),
        Lse: T.Tensor([batch, heads, seqlen_q], "float32"),
        lse_unit: T.float32,
        heads_per_kv: T.int32,
        Sink: T.Tensor([sink_heads], "float32"),
    ):
        with T.Kernel(entries * warpgroups * T.ceildiv(part_rows, rows), threads=config.threads) as number:
            T.pdl_trigger()  # the next decode may launch; it waits for the end of this kernel
            T.pdl_sync()  # all results of the decode are written
            # lse of at_once partials, then 2^(lse - row_max)
            weights = T.alloc_fragment([rows, at_once], "float32")
            weights_shared = T.alloc_shared([rows, at_once], "float32")
            row_max = T.alloc_fragment([rows], "float32")  # of the lse of partials and of the sink, base 2
            # The row max before, then the factor of the sums so far, at the end 1 / row sum
            row_max_prev = T.alloc_fragment([rows], "float32")
            row_sum = T.alloc_fragment([rows], "float32")
            block_sum = T.alloc_fragment([rows], "float32")
            scales_shared = T.alloc_shared([rows], "float32")
            total = T.alloc_fragment([rows, columns], "float32")  # sum of weighted partials, not yet divided
            loaded = alloc_fragments([[rows, columns]] * at_once, "float32")  # O of at_once partials
            row_queries = T.alloc_shared([rows], "int32")
            row_heads = T.alloc_shared([rows], "int32")

            # Variables, not expressions, which TileLang 0.1.15 would copy into every use
            first = T.alloc_var("int32", init=T.truncmod(number, T.ceildiv(part_rows, rows)) * rows)
            entry = T.alloc_var("int32", init=T.truncdiv(number, T.ceildiv(part_rows, rows)))
            w = T.alloc_var("int32", init=T.truncmod(entry, warpgroups))
            entry = T.truncdiv(entry, warpgroups)
            parts = T.alloc_var("int32", init=Merges[entry, field("parts")])
            slot = T.alloc_var("int32", init=Merges[entry, field("first_slot")])
            b = T.alloc_var("int32", init=Merges[entry, field("b")])
            tile = T.alloc_var("int32", init=Merges[entry, field("m_block")])  # number of the tile of 64 rows
            if not divides_columns:
                tile = tile * warpgroups + w
            tile_row = T.alloc_var("int32", init=tile * 64)
            rows_left = T.alloc_var(
                "int32", init=T.min(seqlen_q * heads_per_kv - tile_row, part_rows) - first
            )
            if (parts > 1) & (rows_left > 0):
                thread = T.get_thread_binding()
                if thread < rows:
                    row_queries[thread] = T.truncdiv(tile_row + first + thread, heads_per_kv)
                    row_heads[thread] = Merges[entry, field("kv_head")] * heads_per_kv + T.truncmod(
                        tile_row + first + thread, heads_per_kv
                    )
                T.sync_threads()
                T.fill(row_max, LOWEST)
                T.clear(row_sum)
                T.clear(total)
                if problem.has("sink"):
                    for i in T.Parallel(rows):
                        row_max[i] = T.max(Sink[T.min(row_heads[i], sink_heads - 1)] * LOG2E, LOWEST)
                        row_sum[i] = T.exp2(Sink[T.min(row_heads[i], sink_heads - 1)] * LOG2E - row_max[i])
                for s in T.serial(T.ceildiv(parts, at_once)):
                    # Indices of partials and rows are clamped to the last, so that no load depends on a condition
                    for u in loads:
                        for i, j in T.Parallel(rows, columns):
                            loaded[u][i, j] = O_parts[
                                slot + T.min(at_once * s + u, parts - 1),
                                w,
                                first + T.min(i, rows_left - 1),
                                j,
                            ]
                    for i, u in T.Parallel(rows, at_once):
                        weights[i, u] = Lse_parts[
                            slot + T.min(at_once * s + u, parts - 1), w, first + T.min(i, rows_left - 1)
                        ]
                    for i, u in T.Parallel(rows, at_once):
                        weights[i, u] = T.if_then_else(
                            at_once * s + u < parts, weights[i, u], -T.infinity("float32")
                        )
                    T.copy(row_max, row_max_prev)
                    T.reduce_max(weights, row_max, dim=1, clear=False)
                    for i, u in T.Parallel(rows, at_once):
                        weights[i, u] = T.exp2(weights[i, u] - row_max[i])
                    T.reduce_sum(weights, block_sum, dim=1)
                    for i in T.Parallel(rows):
                        row_max_prev[i] = T.exp2(row_max_prev[i] - row_max[i])
                        row_sum[i] = row_sum[i] * row_max_prev[i] + block_sum[i]
                    T.sync_threads()  # the previous weights have been read
                    T.copy(weights, weights_shared)
                    T.copy(row_max_prev, scales_shared)
                    T.sync_threads()
                    for i, j in T.Parallel(rows, columns):
                        total[i, j] *= scales_shared[i]
                    for u in loads:
                        for i, j in T.Parallel(rows, columns):
                            total[i, j] += weights_shared[i, u] * loaded[u][i, j]
                for i in T.Parallel(rows):
                    if (i < rows_left) & (not divides_columns or w == 0):
                        Lse[b, row_heads[i], row_queries[i]] = (T.log2(row_sum[i]) + row_max[i]) * lse_unit
                    row_max_prev[i] = T.if_then_else(row_sum[i] != 0, 1 / row_sum[i], 0)
                T.sync_threads()
                T.copy(row_max_prev, scales_shared)
                T.sync_threads()
                for i, j in T.Parallel(rows, columns):
                    if i < rows_left:
                        O[b, row_queries[i], row_heads[i], (w * columns if divides_columns else 0) + j] = (
                            total[i, j] * scales_shared[i]
                        )

    return flash_decode_combine_kernel
