"""After a decode: one output and log-sum-exp of the parts that several CTAs made of an item.

O = sum over s of 2^(lse_s - lse) O_s with lse = log2 of the sum of 2^lse_s, and of the sink, always in the same order.
"""

import tilelang.language as T

from tl_attention.kernel_configs import MERGE_FIELDS, MERGE_NUMBERS, DecodeCombine
from tl_attention.kernels.pipeline import alloc_fragments
from tl_attention.kernels.softmax import LOG2E, LOWEST
from tl_attention.problem import AttnProblem

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_safe_memory_legalize": True,  # its guards would have each load wait for the one before
}


def flash_decode_combine(problem: AttnProblem, config: DecodeCombine) -> T.PrimFunc:
    """Kernel(O_parts, Lse_parts, Merges, O, Lse, lse_unit, heads_a_kv_head, Sink), after decode.py, whose arguments these are.

    problem.head_dim_v: the columns of a part; its options: sink or none. Of an entry of Merges that has less than two parts nothing
    is read or written.
    """
    dtype, columns, rows = problem.dtype, problem.head_dim_v, config.rows
    divides = config.divides_columns
    entries, slots, warpgroups, part_rows = T.dynamic("entries, slots, warpgroups, part_rows")
    batch, seqlen_q, heads, columns_o, sink_heads = T.dynamic("batch, seqlen_q, heads, columns_o, sink_heads")
    at_once = config.at_once
    each = tuple(range(at_once))
    field = MERGE_FIELDS.index

    @T.prim_func
    def flash_decode_combine_kernel(
        O_parts: T.Tensor([slots, warpgroups, part_rows, columns], "float32"),
        Lse_parts: T.Tensor([slots, warpgroups, part_rows], "float32"),
        Merges: T.Tensor([entries, MERGE_NUMBERS], "int32"),
        O: T.Tensor([batch, seqlen_q, heads, columns_o], dtype),
        Lse: T.Tensor([batch, heads, seqlen_q], "float32"),
        lse_unit: T.float32,
        heads_a_kv_head: T.int32,
        Sink: T.Tensor([sink_heads], "float32"),
    ):
        with T.Kernel(entries * warpgroups * T.ceildiv(part_rows, rows), threads=config.threads) as number:
            T.pdl_sync()  # until all of the decode is written
            weights = T.alloc_fragment([rows, at_once], "float32")
            weights_shared = T.alloc_shared([rows, at_once], "float32")
            row_max = T.alloc_fragment([rows], "float32")
            row_max_prev = T.alloc_fragment([rows], "float32")
            row_sum = T.alloc_fragment([rows], "float32")
            block_sum = T.alloc_fragment([rows], "float32")
            scales_shared = T.alloc_shared([rows], "float32")
            total = T.alloc_fragment([rows, columns], "float32")
            loaded = alloc_fragments([[rows, columns]] * at_once, "float32")
            tokens = T.alloc_shared([rows], "int32")
            row_heads = T.alloc_shared([rows], "int32")

            # Variables, not expressions: TileLang 0.1.15 would copy those into every use
            first = T.alloc_var("int32", init=T.truncmod(number, T.ceildiv(part_rows, rows)) * rows)
            entry = T.alloc_var("int32", init=T.truncdiv(number, T.ceildiv(part_rows, rows)))
            w = T.alloc_var("int32", init=T.truncmod(entry, warpgroups))
            entry = T.truncdiv(entry, warpgroups)
            parts = T.alloc_var("int32", init=Merges[entry, field("parts")])
            slot = T.alloc_var("int32", init=Merges[entry, field("first_slot")])
            b = T.alloc_var("int32", init=Merges[entry, field("b")])
            tile = T.alloc_var("int32", init=Merges[entry, field("m_block")])  # of 64 rows
            if not divides:
                tile = tile * warpgroups + w
            rows_before = T.alloc_var("int32", init=tile * 64)
            rows_left = T.alloc_var(
                "int32", init=T.min(seqlen_q * heads_a_kv_head - rows_before, part_rows) - first
            )
            if (parts > 1) & (rows_left > 0):
                thread = T.get_thread_binding()
                if thread < rows:
                    tokens[thread] = T.truncdiv(rows_before + first + thread, heads_a_kv_head)
                    row_heads[thread] = Merges[entry, field("kv_head")] * heads_a_kv_head + T.truncmod(
                        rows_before + first + thread, heads_a_kv_head
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
                    # Parts past the last and rows past the last are read as the last, so that no load hangs on a condition
                    for u in each:
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
                    T.sync_threads()  # those of the parts before have been read
                    T.copy(weights, weights_shared)
                    T.copy(row_max_prev, scales_shared)
                    T.sync_threads()
                    for i, j in T.Parallel(rows, columns):
                        total[i, j] *= scales_shared[i]
                    for u in each:
                        for i, j in T.Parallel(rows, columns):
                            total[i, j] += weights_shared[i, u] * loaded[u][i, j]
                for i in T.Parallel(rows):
                    if (i < rows_left) & (not divides or w == 0):
                        Lse[b, row_heads[i], tokens[i]] = (T.log2(row_sum[i]) + row_max[i]) * lse_unit
                    row_max_prev[i] = T.if_then_else(row_sum[i] != 0, 1 / row_sum[i], 0)
                T.sync_threads()
                T.copy(row_max_prev, scales_shared)
                T.sync_threads()
                for i, j in T.Parallel(rows, columns):
                    if i < rows_left:
                        O[b, tokens[i], row_heads[i], (w * columns if divides else 0) + j] = (
                            total[i, j] * scales_shared[i]
                        )

    return flash_decode_combine_kernel
