"""After the backward: a gradient in the dtype of the inputs, from fp32 sums and the parts that CTAs made of it."""

import tilelang.language as T

from tl_attention.kernel_configs import BwdSum
from tl_attention.kernels.scheduler import Tile, TileOrder
from tl_attention.kernels.tiles import FragmentBlocks, packed, packed_rows, strided
from tl_attention.problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True}


def flash_bwd_sum(problem: AttnProblem, config: BwdSum) -> T.PrimFunc:
    """Kernel(Parts, Gradient, scale, parts, row_blocks): Gradient = scale * the sum of its parts, always in the same order.

    Parts: FragmentBlocks of the matrices [parts, batch, heads] of row_blocks * 16 rows, at least seqlen rounded up to
    config.rows, and width columns; Gradient: a view [batch, seqlen, heads, columns], no more columns than width.

    varlen: Kernel(.., row_blocks, of_keys, Table), where Gradient is as tiles.PackedTiles has tensors, Table [entries, 8] that of blocks of
    TABLE_ROWS queries or, if of_keys, keys, and the matrices [parts, heads] hold the sequences padded.
    """
    dtype, width, rows = problem.dtype, problem.head_dim, config.rows
    batch, heads, seqlen, columns, total_row_blocks = T.dynamic(
        "batch, heads, seqlen, columns, total_row_blocks"
    )
    gradient_view = strided("gradient", [batch, seqlen, heads, columns], dtype)
    parts_view = FragmentBlocks.argument(total_row_blocks, width)

    @T.macro
    def add_parts(matrix_blocks, place, parts, a_part, scale, Gradient_shared):
        """a_part: row blocks from a part to the next."""
        total = T.alloc_fragment([rows // 16, width // 8, 32, 4], "float32")
        T.clear(total)
        for p in T.serial(parts):
            row_block = T.alloc_var("int32", init=place + p * a_part)
            for r, c, lane, number in T.Parallel(rows // 16, width // 8, 32, 4):
                total[r, c, lane, number] += matrix_blocks.tensor[row_block + r, c, lane, number]
        for r, c, lane, number in T.Parallel(rows // 16, width // 8, 32, 4):
            row, col = matrix_blocks.element(lane, number)
            Gradient_shared[r * 16 + row, c * 8 + col] = total[r, c, lane, number] * scale
        T.fence_proxy_async()
        T.sync_threads()

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

    if not problem.has("varlen"):
        return flash_bwd_sum_dense

    entries = T.dynamic("entries")
    packed_view = packed("gradient", heads, columns, dtype)
    table_view = T.Tensor([entries, 8], "int32")

    @T.prim_func
    def flash_bwd_sum_packed(
        Parts: parts_view,
        Gradient: packed_view,
        scale: T.float32,
        parts: T.int32,
        row_blocks: T.int32,
        of_keys: T.int32,
        Table: table_view,
    ):
        with T.Kernel(entries * (TABLE_ROWS // rows), heads, threads=config.threads) as (block, head):
            Gradient_shared = T.alloc_shared([rows, width], dtype)
            blocks = FragmentBlocks(Parts, row_blocks)
            tile = Tile(TileOrder(False, heads, heads, 1, entries, 1, table=Table))
            tile.look_up(block // (TABLE_ROWS // rows))
            if tile.there:
                first = T.alloc_var("int32", init=0)
                first = tile.m_block * TABLE_ROWS + block % (TABLE_ROWS // rows) * rows
                end = T.if_then_else(of_keys != 0, tile.end_k[0], tile.end_q[0])
                length = T.if_then_else(of_keys != 0, tile.len_k[0], tile.len_q[0])
                padded = T.if_then_else(of_keys != 0, tile.padded_k[0], tile.padded_q[0])
                if first < length:
                    place = blocks.row_block(head, padded + first)
                    add_parts(blocks, place, parts, heads * row_blocks, scale, Gradient_shared)
                    T.copy(Gradient_shared, packed_rows(Gradient, end, length, first, rows, head, width))

    return flash_bwd_sum_packed
