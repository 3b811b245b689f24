"""Kernel that runs before every kernel for packed sequences: tables of the tiles of all sequences, the longest first.

So the last tiles of the attention kernel are short. One CTA per table counts blocks, sorts tiles by their number of steps (a
counting sort; the order of equals is arbitrary), and writes them. For a sequence_order.SequenceOrder it sorts sequences by their tiles.
Other CTAs clear the rows behind the last sequence, which are in no tile.
"""

from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import TileTable
from tl_attention.kernels.cuda import source
from tl_attention.kernels.sources.sequence_order import sequence_tiles
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}


def flash_tile_table(problem: AttnProblem, config: TileTable) -> T.PrimFunc:
    """Build the kernel that fills tile tables, and clears rows behind the last sequence. It is the same for all problems.

    A tile of the first table is TABLE_ROWS queries, and its kernel loops over blocks of step_rows keys. In the second table keys and
    queries change places.

    Kernel arguments, int32 but Lse:
        Cu_q, Cu_k: [batch + 1], first row of each sequence in the packed tensors.
        Used_q, Used_k: [batch], lengths of the sequences; read if use_q, use_k.
        Blocks: [tables, 2, batch + 1], workspace of each table: blocks of queries and of keys before each sequence. There are one or two
            tables.
        Table_q, Table_k: [entries, 8], see scheduler.Tile.read_table. Entries that are not needed get block -1. Table_k is not
            written where there is one table.
        Of_queries: [groups, total_q, words], O or dQ in words of 4 bytes. Rows from Cu_q[batch] on become 0.
        Of_keys, Of_values: [groups, total_k, words], dK and dV likewise, from Cu_k[batch] on. Written where there are two tables.
        Lse: fp32 [groups, total_q]; -inf from Cu_q[batch] on. Written where there is one table.
        use_q, use_k: 0 or 1.
        step_rows: rows per step.
        left, right: keys before and after the diagonal that a query sees.
        by_sequence: 0 or 1. 1: Table_k is that of a sequence_order.SequenceOrder; `Blocks` then has its tiles in place of blocks of keys.
        clearing_ctas: CTAs that clear rows; 0: rows stay.

    A sequence without queries has one query tile, so that its padded rows are written.
    """
    threads = config.threads
    batch, used_q, used_k = T.dynamic("batch, used_q, used_k")
    tables, entries_q, entries_k = T.dynamic("tables, entries_q, entries_k")
    total_q, total_k, lse_groups, lse_rows = T.dynamic("total_q, total_k, lse_groups, lse_rows")

    def row_words(operand: str, rows: Any) -> Any:
        return T.Tensor([T.dynamic(f"groups_{operand}"), rows, T.dynamic(f"words_{operand}")], "int32")

    def sum_before(number, sums):
        return T.call_extern("int32", "tl_attention_sum_before", number, T.address_of(sums[0]))

    @T.macro
    def make_table(
        of_keys, Cu_q, Cu_k, Used_q, Used_k, Blocks, Table_q, Table_k, use_q, use_k, step_rows, left, right, by_sequence
    ):  # fmt: skip
        tiles_of = T.alloc_shared([threads], "int32")  # tiles with n steps
        next_entry = T.alloc_shared([threads], "int32")  # entry of the next tile with n steps
        sums = T.alloc_shared([33], "int32")
        thread = T.get_thread_binding()
        blocks_q = T.alloc_var("int32", init=0)
        blocks_k = T.alloc_var("int32", init=0)
        count_q = T.alloc_var("int32", init=0)
        count_k = T.alloc_var("int32", init=0)
        before = T.alloc_var("int32", init=0)
        b = T.alloc_var("int32", init=0)
        low = T.alloc_var("int32", init=0)
        high = T.alloc_var("int32", init=0)
        block = T.alloc_var("int32", init=0)
        steps = T.alloc_var("int32", init=0)
        len_q = T.alloc_var("int32", init=0)
        len_k = T.alloc_var("int32", init=0)
        entries = T.if_then_else(of_keys != 0, entries_k, entries_q)

        # Count the blocks before each sequence
        if thread == 0:
            Blocks[of_keys, 0, 0] = 0
            Blocks[of_keys, 1, 0] = 0
        for chunk in T.serial(T.ceildiv(batch, threads)):
            b = chunk * threads + thread
            count_q = 0
            count_k = 0
            if b < batch:
                len_q = length(Cu_q, use_q, Used_q, b)
                len_k = length(Cu_k, use_k, Used_k, b)
                count_q = T.max((len_q + TABLE_ROWS - 1) // TABLE_ROWS, 1)
                count_k = (len_k + TABLE_ROWS - 1) // TABLE_ROWS
                if (of_keys != 0) & (by_sequence != 0):
                    count_k = sequence_tiles(len_q, len_k)
            before = sum_before(count_q, sums)
            if b < batch:
                Blocks[of_keys, 0, b + 1] = blocks_q + before + count_q
            blocks_q += sums[32]
            T.sync_threads()
            before = sum_before(count_k, sums)
            if b < batch:
                Blocks[of_keys, 1, b + 1] = blocks_k + before + count_k
            blocks_k += sums[32]
            T.sync_threads()
        tiles_of[thread] = 0
        T.sync_threads()

        if (of_keys != 0) & (by_sequence != 0):
            for chunk in T.serial(T.ceildiv(entries, threads)):
                number = chunk * threads + thread
                if number < entries:
                    Table_k[number, 1] = -1
            for sweep in T.serial(2):  # 0: count the tiles of sequences with n tiles, 1: write them
                for chunk in T.serial(T.ceildiv(batch, threads)):
                    b = chunk * threads + thread
                    if b < batch:
                        count_k = Blocks[of_keys, 1, b + 1] - Blocks[of_keys, 1, b]
                        steps = T.min(count_k, threads - 1)
                        if sweep == 0:
                            T.atomic_add(tiles_of[steps], count_k)
                        else:
                            len_q = length(Cu_q, use_q, Used_q, b)
                            len_k = length(Cu_k, use_k, Used_k, b)
                            low = T.atomic_add(next_entry[steps], count_k, return_prev=True)
                            # All of them or none: else other tiles would wait for those left out
                            if low + count_k <= entries:
                                for i in T.serial(count_k):
                                    write_entry(
                                        Table_k, low + i, b, i, Cu_q, len_q, Cu_k, len_k, Blocks, of_keys
                                    )
                T.sync_threads()
                if sweep == 0:
                    before = sum_before(tiles_of[thread], sums)
                    next_entry[thread] = sums[32] - before - tiles_of[thread]  # tiles of longer sequences
                    T.sync_threads()
        else:
            for sweep in T.serial(2):  # 0: count the tiles with n steps, 1: write them
                for chunk in T.serial(T.ceildiv(entries, threads)):
                    number = chunk * threads + thread
                    if number < T.min(T.if_then_else(of_keys != 0, blocks_k, blocks_q), entries):
                        # Find the sequence of tile `number`: the last with at most so many blocks before it
                        low = 0
                        high = batch - 1
                        while low < high:
                            b = (low + high + 1) // 2
                            if Blocks[of_keys, of_keys, b] <= number:
                                low = b
                            else:
                                high = b - 1
                        b = low
                        block = number - Blocks[of_keys, of_keys, b]
                        len_q = length(Cu_q, use_q, Used_q, b)
                        len_k = length(Cu_k, use_k, Used_k, b)
                        rows = T.if_then_else(of_keys != 0, len_k, len_q)
                        others = T.if_then_else(of_keys != 0, len_q, len_k)
                        behind = T.if_then_else(of_keys != 0, right, left)
                        ahead = T.if_then_else(of_keys != 0, left, right)
                        first = T.max(block * TABLE_ROWS + others - rows - behind, 0)
                        last = T.min(
                            T.min(block * TABLE_ROWS + TABLE_ROWS, rows) - 1 + others - rows + ahead,
                            others - 1,
                        )
                        steps = T.max(T.max(last, -step_rows) // step_rows - first // step_rows + 1, 0)
                        steps = T.min(steps, threads - 1)
                        if sweep == 0:
                            T.atomic_add(tiles_of[steps], 1)
                        else:
                            low = T.atomic_add(next_entry[steps], 1, return_prev=True)
                            if of_keys != 0:
                                write_entry(Table_k, low, b, block, Cu_q, len_q, Cu_k, len_k, Blocks, of_keys)
                            else:
                                write_entry(Table_q, low, b, block, Cu_q, len_q, Cu_k, len_k, Blocks, of_keys)
                    elif (sweep == 0) & (number < entries):
                        if of_keys != 0:
                            Table_k[number, 1] = -1
                        else:
                            Table_q[number, 1] = -1
                T.sync_threads()
                if sweep == 0:
                    before = sum_before(tiles_of[thread], sums)
                    next_entry[thread] = sums[32] - before - tiles_of[thread]  # tiles with more steps
                    T.sync_threads()

    @T.macro
    def clear_rows(tensor, first, warp, warps):
        """Set the rows from `first` on of each group of a tensor [groups, rows, words] to 0, a row per warp at a time."""
        groups, total, words = tensor.shape
        lane = T.get_thread_binding() % 32
        rows = T.alloc_var("int32", init=T.max(total - first, 0))
        for i in T.serial(T.ceildiv(T.max(groups * rows - warp, 0), warps)):
            row = T.alloc_var("int32", init=warp + i * warps)
            group = T.alloc_var("int32", init=T.truncdiv(row, rows))
            row = first + row - group * rows
            for n in T.serial(T.ceildiv(words - lane, 32)):
                tensor[T.cast(group, "int64"), T.cast(row, "int64"), n * 32 + lane] = 0

    @T.macro
    def clear_lse(Lse, first, cta, ctas):
        """Set the log-sum-exps from `first` on of each group to -inf, a group per CTA at a time."""
        groups, total = Lse.shape
        for i in T.serial(T.ceildiv(T.max(groups - cta, 0), ctas)):
            group = T.alloc_var("int32", init=cta + i * ctas)
            row = T.alloc_var("int32", init=first + T.get_thread_binding())
            for n in T.serial(T.ceildiv(T.max(total - row, 0), threads)):
                Lse[T.cast(group, "int64"), row + n * threads] = -T.infinity("float32")

    @T.prim_func
    def flash_tile_table_kernel(
        Cu_q: T.Tensor([batch + 1], "int32"),
        Cu_k: T.Tensor([batch + 1], "int32"),
        Used_q: T.Tensor([used_q], "int32"),
        Used_k: T.Tensor([used_k], "int32"),
        Blocks: T.Tensor([tables, 2, batch + 1], "int32"),
        Table_q: T.Tensor([entries_q, 8], "int32"),
        Table_k: T.Tensor([entries_k, 8], "int32"),
        Of_queries: row_words("q", total_q),
        Of_keys: row_words("k", total_k),
        Of_values: row_words("v", total_k),
        Lse: T.Tensor([lse_groups, lse_rows], "float32"),
        use_q: T.int32,
        use_k: T.int32,
        step_rows: T.int32,
        left: T.int32,
        right: T.int32,
        by_sequence: T.int32,
        clearing_ctas: T.int32,
    ):
        with T.Kernel(tables + clearing_ctas, threads=threads, prelude=source("sum_before")) as number:
            if number < tables:
                make_table(
                    number, Cu_q, Cu_k, Used_q, Used_k, Blocks, Table_q, Table_k,
                    use_q, use_k, step_rows, left, right, by_sequence,
                )  # fmt: skip
            else:
                cta = T.alloc_var("int32", init=number - tables)
                warp = T.alloc_var("int32", init=cta * (threads // 32) + T.get_thread_binding() // 32)
                warps = clearing_ctas * (threads // 32)
                clear_rows(Of_queries, Cu_q[batch], warp, warps)
                if tables == 1:
                    clear_lse(Lse, Cu_q[batch], cta, clearing_ctas)
                else:
                    clear_rows(Of_keys, Cu_k[batch], warp, warps)
                    clear_rows(Of_values, Cu_k[batch], warp, warps)

    return flash_tile_table_kernel


def length(cu_seqlens: Any, use: Any, used: Any, b: Any) -> Any:
    """Length of sequence b."""
    return T.if_then_else(use != 0, used[b], cu_seqlens[b + 1] - cu_seqlens[b])


@T.macro
def write_entry(table, entry, b, block, Cu_q, len_q, Cu_k, len_k, Blocks, of_keys):
    """Write an entry of a table: block `block` of sequence b."""
    table[entry, 0] = b
    table[entry, 1] = block
    table[entry, 2] = Cu_q[b] + len_q
    table[entry, 3] = len_q
    table[entry, 4] = Cu_k[b] + len_k
    table[entry, 5] = len_k
    table[entry, 6] = Blocks[of_keys, 0, b] * TABLE_ROWS
    table[entry, 7] = Blocks[of_keys, 1, b] * TABLE_ROWS
