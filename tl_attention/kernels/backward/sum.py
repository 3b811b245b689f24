"""Kernel after a backward: converts fp32 sums to a gradient in the input dtype, adding up the partials of several CTAs."""

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdSum
from tl_attention.kernels.seams.scheduler import Tile, TileOrder
from tl_attention.kernels.sources.tiles import FragmentBlocks, packed_rows, rows_argument
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True}


def flash_bwd_sum(problem: AttnProblem, config: BwdSum) -> T.PrimFunc:
    """Build the kernel that computes Gradient = scale * sum of the partials, added in a fixed order.

    Kernel arguments:
        Parts: partials, fp32 FragmentBlocks of the matrices [parts, batch, heads], width columns each.
        Gradient: [batch, seqlen, heads, columns <= width], any strides but the last, which is 1.
        scale: fp32.
        parts: int32, number of partials.
        row_blocks: int32, blocks of 16 rows per matrix; at least seqlen rounded up to config.rows.

    For packed sequences the matrices are [parts, heads] and hold every sequence padded to whole blocks:
        Gradient: as tiles.packed has it.
        of_keys: int32, 1 for the gradient of K or V, 0 for that of Q.
        Table: int32 [entries, 8], the tile table of blocks of TABLE_ROWS keys or queries.

    With config.shared the matrices are as tiles.StreamKGradTiles has them:
        n_blocks: int32, key tiles per head.
        whole: int32, number of the first shared tile.
    """
    dtype, width, rows = problem.dtype_of("dq"), problem.head_dim, config.rows
    varlen = problem.has("varlen")
    batch, heads, seqlen, columns, total_row_blocks = T.dynamic(
        "batch, heads, seqlen, columns, total_row_blocks"
    )
    entries = T.dynamic("entries")
    partials_view = FragmentBlocks.argument(total_row_blocks, width)
    gradient_view = rows_argument(problem, "gradient", batch, seqlen, heads, columns, operand="dq")
    of_keys_type = T.int32 if varlen else False  # False makes no argument
    table_view = T.Tensor([entries, 8], "int32") if varlen else False
    blocks_per_tile = TABLE_ROWS // rows
    blocks_per_head = entries * blocks_per_tile if varlen else T.ceildiv(seqlen, rows)
    shared_type = T.int32 if config.shared else False

    @T.macro
    def add_partials(blocks, part_row_block, parts, scale, Gradient_shared):
        """Gradient_shared [rows, width] = scale * sum over p of the rows from part_row_block(p) on."""
        total = T.alloc_fragment([rows // 16, width // 8, 32, 4], "float32")
        T.clear(total)
        for p in T.serial(parts):
            row_block = T.alloc_var("int32", init=part_row_block(p))
            for r, c, lane, number in T.Parallel(rows // 16, width // 8, 32, 4):
                total[r, c, lane, number] += blocks.tensor[row_block + r, c, lane, number]
        for r, c, lane, number in T.Parallel(rows // 16, width // 8, 32, 4):
            row, col = blocks.element(lane, number)
            Gradient_shared[r * 16 + row, c * 8 + col] = total[r, c, lane, number] * scale
        T.fence_proxy_async()
        T.sync_threads()

    @T.prim_func
    def flash_bwd_sum_kernel(
        Parts: partials_view,
        Gradient: gradient_view,
        scale: T.float32,
        parts: T.int32,
        row_blocks: T.int32,
        of_keys: of_keys_type,
        Table: table_view,
        n_blocks: shared_type,
        whole: shared_type,
    ):
        tiles, blocks_of_tile = total_row_blocks // (parts * row_blocks), row_blocks * 16 // rows
        # In one dimension, as the others of a grid end at 65,535
        ctas = tiles * blocks_of_tile if config.shared else blocks_per_head * heads * (1 if varlen else batch)
        with T.Kernel(ctas, threads=config.threads) as number:
            per_row = tiles if config.shared else blocks_per_head
            block = T.alloc_var("int32", init=T.truncmod(number, per_row))
            row = T.alloc_var("int32", init=T.truncdiv(number, per_row))
            Gradient_shared = T.alloc_shared([rows, width], dtype)
            blocks = FragmentBlocks(Parts, row_blocks)
            # Stores by TMA, which writes nothing past the last row
            if config.shared:
                tile = T.alloc_var("int32", init=whole + block)
                of_head = T.alloc_var("int32", init=T.truncdiv(whole + block, n_blocks))
                first = (n_blocks - 1 - T.truncmod(tile, n_blocks)) * (row_blocks * 16) + row * rows
                add_partials(
                    blocks,
                    lambda p: blocks.row_block(block * parts + p, row * rows),
                    parts,
                    scale,
                    Gradient_shared,
                )
                b, h = T.truncdiv(of_head, heads), T.truncmod(of_head, heads)
                T.copy(Gradient_shared, Gradient[b, first : first + rows, h, 0:width])
            elif varlen:
                tile = Tile(TileOrder(False, heads, heads, 1, entries, 1, table=Table))
                tile.read_table(block // blocks_per_tile)
                if tile.exists:
                    first = T.alloc_var("int32", init=0)
                    first = tile.m_block * TABLE_ROWS + block % blocks_per_tile * rows
                    end = T.if_then_else(of_keys != 0, tile.end_k[0], tile.end_q[0])
                    length = T.if_then_else(of_keys != 0, tile.len_k[0], tile.len_q[0])
                    padded = T.if_then_else(of_keys != 0, tile.padded_k[0], tile.padded_q[0])
                    if first < length:
                        add_partials(
                            blocks,
                            lambda p: blocks.row_block(row, padded + first) + p * (heads * row_blocks),
                            parts,
                            scale,
                            Gradient_shared,
                        )
                        T.copy(Gradient_shared, packed_rows(Gradient, end, length, first, rows, row, width))
            else:
                head = T.alloc_var("int32", init=T.truncmod(row, heads))
                b = T.alloc_var("int32", init=T.truncdiv(row, heads))
                first = T.alloc_var("int32", init=block * rows)
                add_partials(
                    blocks,
                    lambda p: blocks.row_block(p * (batch * heads) + row, first),
                    parts,
                    scale,
                    Gradient_shared,
                )
                T.copy(Gradient_shared, Gradient[b, first : first + rows, head, 0:width])

    return flash_bwd_sum_kernel
