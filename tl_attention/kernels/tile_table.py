"""Kernel that runs before every kernel for packed sequences: a table of the tiles of all sequences, the longest first.

So the last tiles of the attention kernel are short. One CTA counts blocks, sorts tiles by their number of steps (a
counting sort; the order of equals is arbitrary), and writes them.
"""

import tilelang.language as T

from tl_attention.kernel_configs import TileTable
from tl_attention.problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}


def flash_tile_table(problem: AttnProblem, config: TileTable) -> T.PrimFunc:
    """Build the kernel that fills a tile table. It is the same for all problems.

    A tile is TABLE_ROWS queries, or keys if of_keys. Its kernel loops over blocks of step_rows rows of the other side.

    Kernel arguments, all int32:
        Cu_q, Cu_k: [batch + 1], first row of each sequence in the packed tensors.
        Used_q, Used_k: [batch], lengths of the sequences; read if use_q, use_k.
        Blocks: [2, batch + 1], workspace: blocks of queries and of keys before each sequence.
        Table: [entries, 8], see scheduler.Tile.read_table. Entries that are not needed get block -1.
        use_q, use_k, of_keys: 0 or 1.
        step_rows: rows per step.
        left, right: rows before and after the diagonal that a row sees, or from which it is seen.

    A sequence without queries has one query tile, so that its padded rows are written.
    """
    threads = config.threads
    batch, used_q, used_k, entries = T.dynamic("batch, used_q, used_k, entries")

    @T.prim_func
    def flash_tile_table_kernel(
        Cu_q: T.Tensor([batch + 1], "int32"),
        Cu_k: T.Tensor([batch + 1], "int32"),
        Used_q: T.Tensor([used_q], "int32"),
        Used_k: T.Tensor([used_k], "int32"),
        Blocks: T.Tensor([2, batch + 1], "int32"),
        Table: T.Tensor([entries, 8], "int32"),
        use_q: T.int32,
        use_k: T.int32,
        of_keys: T.int32,
        step_rows: T.int32,
        left: T.int32,
        right: T.int32,
    ):
        with T.Kernel(1, threads=threads) as _:
            count_q = T.alloc_shared([threads], "int32")
            count_k = T.alloc_shared([threads], "int32")
            tiles_from = T.alloc_shared([threads], "int32")  # tiles with n steps, then with n or more
            next_entry = T.alloc_shared([threads], "int32")  # entry of the next tile with n steps
            thread = T.get_thread_binding()
            blocks_q = T.alloc_var("int32", init=0)
            blocks_k = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            low = T.alloc_var("int32", init=0)
            high = T.alloc_var("int32", init=0)
            block = T.alloc_var("int32", init=0)
            steps = T.alloc_var("int32", init=0)
            len_q = T.alloc_var("int32", init=0)
            len_k = T.alloc_var("int32", init=0)

            # Count the blocks before each sequence
            if thread == 0:
                Blocks[0, 0] = 0
                Blocks[1, 0] = 0
            for chunk in T.serial(T.ceildiv(batch, threads)):
                b = chunk * threads + thread
                count_q[thread] = 0
                count_k[thread] = 0
                if b < batch:
                    len_q = Cu_q[b + 1] - Cu_q[b]
                    len_k = Cu_k[b + 1] - Cu_k[b]
                    if use_q != 0:
                        len_q = Used_q[b]
                    if use_k != 0:
                        len_k = Used_k[b]
                    count_q[thread] = T.max((len_q + TABLE_ROWS - 1) // TABLE_ROWS, 1)
                    count_k[thread] = (len_k + TABLE_ROWS - 1) // TABLE_ROWS
                T.sync_threads()
                T.cumsum(count_q)
                T.cumsum(count_k)
                T.sync_threads()
                if b < batch:
                    Blocks[0, b + 1] = blocks_q + count_q[thread]
                    Blocks[1, b + 1] = blocks_k + count_k[thread]
                blocks_q += count_q[threads - 1]
                blocks_k += count_k[threads - 1]
                T.sync_threads()
            tiles_from[thread] = 0
            T.sync_threads()

            for sweep in T.serial(2):  # 0: count the tiles with n steps, 1: write them
                for chunk in T.serial(T.ceildiv(entries, threads)):
                    number = chunk * threads + thread
                    if number < T.min(T.if_then_else(of_keys != 0, blocks_k, blocks_q), entries):
                        # Find the sequence of tile `number`: the last with at most so many blocks before it
                        low = 0
                        high = batch - 1
                        while low < high:
                            b = (low + high + 1) // 2
                            if Blocks[of_keys, b] <= number:
                                low = b
                            else:
                                high = b - 1
                        b = low
                        block = number - Blocks[of_keys, b]
                        len_q = Cu_q[b + 1] - Cu_q[b]
                        len_k = Cu_k[b + 1] - Cu_k[b]
                        if use_q != 0:
                            len_q = Used_q[b]
                        if use_k != 0:
                            len_k = Used_k[b]
                        rows = T.if_then_else(of_keys != 0, len_k, len_q)
                        others = T.if_then_else(of_keys != 0, len_q, len_k)
                        first = T.max(block * TABLE_ROWS + others - rows - left, 0)
                        last = T.min(
                            T.min(block * TABLE_ROWS + TABLE_ROWS, rows) - 1 + others - rows + right,
                            others - 1,
                        )
                        steps = T.max(T.max(last, -step_rows) // step_rows - first // step_rows + 1, 0)
                        steps = T.min(steps, threads - 1)
                        if sweep == 0:
                            T.atomic_add(tiles_from[steps], 1)
                        else:
                            low = T.atomic_add(next_entry[steps], 1, return_prev=True)
                            Table[low, 0] = b
                            Table[low, 1] = block
                            Table[low, 2] = Cu_q[b] + len_q
                            Table[low, 3] = len_q
                            Table[low, 4] = Cu_k[b] + len_k
                            Table[low, 5] = len_k
                            Table[low, 6] = Blocks[0, b] * TABLE_ROWS
                            Table[low, 7] = Blocks[1, b] * TABLE_ROWS
                    elif (sweep == 0) & (number < entries):
                        Table[number, 1] = -1
                T.sync_threads()
                if sweep == 0:
                    next_entry[thread] = tiles_from[thread]
                    T.sync_threads()
                    T.cumsum(tiles_from, reverse=True)
                    T.sync_threads()
                    next_entry[thread] = tiles_from[thread] - next_entry[thread]
                    T.sync_threads()

    return flash_tile_table_kernel
