"""FlashAttention forward for Hopper: O = softmax(scale * Q K^T + mask) V and its log-sum-exp, in one pass over the keys.

Dao 2023 (FlashAttention-2, alg. 1) in the schedule of Shah et al. 2024 (FlashAttention-3): one warp feeds rings of K and V
tiles by TMA; each consumer warpgroup owns 64 queries and keeps S = Q K^T of a block and O += P V of the block before in flight.
"""

import tilelang.language as T

from tl_attention.kernels.mask import KeyBlocks, Mask
from tl_attention.kernels.pipeline import WARPGROUP, TileRing, Turns, alloc_swizzled, sync_warpgroup, wait_for_stores
from tl_attention.kernels.scheduler import Tile, TileBox, TileNumbers, TileOrder
from tl_attention.kernels.softmax import LOG2E, SMALLEST_SCALE, OnlineSoftmax
from tl_attention.kernels.tiles import DenseTiles, strided
from tl_attention.problem import AttnProblem, FwdConfig

PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True}


def registers(config: FwdConfig) -> tuple[int, int] | None:
    """Registers a thread of (producer, consumers); one consumer warpgroup needs no redistribution."""
    if config.schedule == "grid":
        return {2: (24, 240), 3: (32, 160)}.get(config.warpgroups)
    return {2: (40, 232), 3: (32, 160)}.get(config.warpgroups)


def flash_fwd(problem: AttnProblem, config: FwdConfig) -> T.PrimFunc:
    """Kernel(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, m_blocks, group_heads, ctas).

    Q, K, V, O are views [batch, seqlen, heads, columns] with no more columns than the problem's tile widths; Lse is
    [batch, heads, seqlen_q] fp32, in units of log2 / lse_unit. Tickets: int32 [2], zeros, the kernel's own while it runs.
    A row with no key gives O = 0, Lse = -inf. Empty tensors are for the caller: TMA takes none.
    """
    dtype, head_dim, head_dim_v = problem.dtype, problem.head_dim, problem.head_dim_v
    block_M, block_N, num_stages, q_stages = config.block_M, config.block_N, config.num_stages, config.q_stages
    warpgroups = tuple(range(config.warpgroups))
    consumer_warps = 4 * config.warpgroups
    row_wise = T.GemmWarpPolicy.FullRow
    persistent = config.schedule != "grid"

    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    columns_qk, columns_v = T.dynamic("columns_qk, columns_v")
    q_view = strided("q", [batch, seqlen_q, heads, columns_qk], dtype)
    k_view = strided("k", [batch, seqlen_k, heads_kv, columns_qk], dtype)
    v_view = strided("v", [batch, seqlen_k, heads_kv, columns_v], dtype)
    o_view = strided("o", [batch, seqlen_q, heads, columns_v], dtype)
    lse_view = T.Tensor([batch, heads, seqlen_q], "float32")
    tickets_view = T.Tensor([2], "int32")
    mask = Mask(problem.causal, seqlen_q, seqlen_k)
    turns = Turns(config.warpgroups, config.ping_pong)

    @T.macro
    def load(tile, turn, first_step, blocks, tiles, Q_shared, K_shared, V_shared, tile_box, tile_numbers):
        first_query = tile.m_block * block_M
        blocks.start(first_query)
        K_shared.fill(first_step, tiles.k(tile, blocks.first_key(0), block_N))
        for w in warpgroups:
            Q_shared.fill(turn * config.warpgroups + w, tiles.q(tile, first_query + 64 * w, 64))
        if persistent:
            tile_box.post(turn, tile, first_step, blocks)
        for step in T.serial(1, blocks.steps):
            K_shared.fill(first_step + step, tiles.k(tile, blocks.first_key(step), block_N))
            V_shared.fill(first_step + step - 1, tiles.v(tile, blocks.first_key(step - 1), block_N))
        if persistent:
            tile_numbers.draw()
        V_shared.fill(first_step + blocks.steps - 1, tiles.v(tile, blocks.first_key(blocks.steps - 1), block_N))

    @T.macro
    def produce(first_tile, order, ctas, tiles, Q_shared, K_shared, V_shared, tile_box, tickets):
        blocks = KeyBlocks(mask, block_M, block_N)
        tile = Tile(order)
        if persistent:
            tile_numbers = TileNumbers(config.schedule, first_tile, ctas, tickets)
            turn = T.alloc_var("int32", init=0)
            first_step = T.alloc_var("int32", init=0)  # of the tile, in rings that go on from tile to tile
            while tile_numbers.current[0] < order.num_tiles:
                tile.locate(tile_numbers.current[0])
                load(tile, turn, first_step, blocks, tiles, Q_shared, K_shared, V_shared, tile_box, tile_numbers)
                tile_numbers.advance()
                turn += 1
                first_step += blocks.steps
            for w in warpgroups:
                Q_shared.wait_empty(turn * config.warpgroups + w)
            tile_box.close(turn)
            tile_numbers.close()
        else:
            tile.locate(first_tile)
            load(tile, 0, 0, blocks, tiles, Q_shared, K_shared, V_shared, None, None)

    @T.macro
    def negate(w, query_tile, Q_shared):
        for i, j in T.Parallel(64, head_dim):
            Q_shared.tiles[query_tile % Q_shared.slots, i, j] = -Q_shared.tiles[query_tile % Q_shared.slots, i, j]
        T.fence_proxy_async()
        sync_warpgroup(w)

    @T.macro
    def attend(w, turn, first_step, tile, blocks, softmax, acc_s, P, acc_o, lse, tiles, Q_shared, K_shared, V_shared, O_shared, tile_box, softmax_scale, lse_unit):
        query = tile.m_block * block_M + 64 * w
        query_tile = turn * config.warpgroups + w
        softmax.reset()

        Q_shared.wait(query_tile)
        if softmax_scale < 0:  # -Q and |scale|, as the running maximum is one of raw scores
            negate(w, query_tile, Q_shared)

        # S = Q K^T, softmax of the last block of keys
        K_shared.wait(first_step)
        turns.take(w)
        T.wgmma_gemm(Q_shared[query_tile], K_shared[first_step], acc_s, transpose_B=True, policy=row_wise, clear_accum=True)
        turns.give(w)
        T.wait_wgmma(0)
        K_shared.release(first_step)
        if q_stages > 1:  # O of the tile before has left its slot by now
            if turn > 0:
                wait_for_stores()
                Q_shared.release(query_tile - config.warpgroups)
        mask.apply(acc_s, query, blocks.first_key(0))
        softmax.update(acc_s)
        T.copy(acc_s, P)

        # S = Q K^T, softmax of each block before it, beside O += P V of the last
        T.clear(acc_o)
        for masked, start, count in blocks.sweeps:
            for i in T.serial(count):  # from 0, so that the ring index stays in uniform registers: 32 R2UR less a step
                K_shared.wait(first_step + start + i)
                turns.take(w)
                T.wgmma_gemm(Q_shared[query_tile], K_shared[first_step + start + i], acc_s, transpose_B=True, policy=row_wise, clear_accum=True)
                V_shared.wait(first_step + start + i - 1)
                T.wgmma_gemm(P, V_shared[first_step + start + i - 1], acc_o, policy=row_wise)
                turns.give(w)
                T.wait_wgmma(1)  # S is there
                K_shared.release(first_step + start + i)
                if masked:
                    mask.apply(acc_s, query, blocks.first_key(start + i))
                softmax.update(acc_s)
                T.wait_wgmma(0)  # O is there, and P free
                V_shared.release(first_step + start + i - 1)
                T.copy(acc_s, P)
                softmax.rescale(acc_o)

        # O += P V of the first block of keys, O /= row sums
        V_shared.wait(first_step + blocks.steps - 1)
        T.wgmma_gemm(P, V_shared[first_step + blocks.steps - 1], acc_o, policy=row_wise)
        T.wait_wgmma(0)
        V_shared.release(first_step + blocks.steps - 1)
        softmax.finish(acc_o, lse, lse_unit)

        if persistent:  # read again, rather than held in registers all the way
            tile_box.read_tile(turn, tile)
        query = tile.m_block * block_M + 64 * w
        O_tile = query_tile % Q_shared.slots if head_dim == head_dim_v else w
        if head_dim != head_dim_v:
            if q_stages == 1:
                Q_shared.release(query_tile)
            wait_for_stores()
            sync_warpgroup(w)
        T.copy(acc_o, O_shared[O_tile, :, :])
        T.fence_proxy_async()
        sync_warpgroup(w)
        T.tma_copy(O_shared[O_tile, :, :], tiles.o(tile, query, 64))
        if head_dim == head_dim_v and q_stages == 1:
            wait_for_stores()
            Q_shared.release(query_tile)
        T.copy(lse, tiles.lse(tile, query, 64))

    @T.macro
    def consume(w, first_tile, order, tiles, Q_shared, K_shared, V_shared, O_shared, tile_box, softmax_scale, lse_unit):
        acc_s = T.alloc_fragment([64, block_N], "float32")  # scores, then their exponentials
        P = T.alloc_fragment([64, block_N], dtype)
        acc_o = T.alloc_fragment([64, head_dim_v], "float32")
        lse = T.alloc_fragment([64], "float32")
        softmax = OnlineSoftmax(block_N, T.max(T.abs(softmax_scale) * LOG2E, SMALLEST_SCALE))
        blocks = KeyBlocks(mask, block_M, block_N)
        tile = Tile(order)
        turns.start(w)
        tile = Tile(order)
        if persistent:
            turn = T.alloc_var("int32", init=0)
            tile_box.wait(0)
            while not tile_box.at_end(turn):
                tile_box.read_tile(turn, tile)
                tile_box.read_blocks(turn, blocks)
                first_step = tile_box.first_step(turn)
                attend(w, turn, first_step, tile, blocks, softmax, acc_s, P, acc_o, lse, tiles, Q_shared, K_shared, V_shared, O_shared, tile_box, softmax_scale, lse_unit)
                turn += 1
                tile_box.wait(turn)
        else:
            tile.locate(first_tile)
            blocks.start(tile.m_block * block_M)
            attend(w, 0, 0, tile, blocks, softmax, acc_s, P, acc_o, lse, tiles, Q_shared, K_shared, V_shared, O_shared, None, softmax_scale, lse_unit)
        wait_for_stores()

    @T.prim_func
    def flash_fwd_dense(
        Q: q_view, K: k_view, V: v_view, O: o_view, Lse: lse_view, Tickets: tickets_view,
        softmax_scale: T.float32, lse_unit: T.float32, m_blocks: T.int32, group_heads: T.int32, ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=config.threads) as first_tile:
            order = TileOrder(problem.causal, heads, heads_kv, heads * batch, m_blocks, group_heads)
            Q_shared = TileRing([q_stages * config.warpgroups, 64, head_dim], dtype, 4, name="Q")
            K_shared = TileRing([num_stages, block_N, head_dim], dtype, consumer_warps, name="K")
            V_shared = TileRing([num_stages, block_N, head_dim_v], dtype, consumer_warps, name="V")
            O_shared = Q_shared.tiles if head_dim == head_dim_v else alloc_swizzled([config.warpgroups, 64, head_dim_v], dtype)
            tile_box = TileBox() if persistent else None
            tiles = DenseTiles(Q, K, V, O, Lse, head_dim, head_dim_v)

            thread = T.get_thread_binding()
            if thread >= WARPGROUP * config.warpgroups:
                if registers(config) is not None:
                    T.dec_max_nreg(registers(config)[0])
                if thread < WARPGROUP * config.warpgroups + 32:
                    produce(first_tile, order, ctas, tiles, Q_shared, K_shared, V_shared, tile_box, Tickets)
            for w in warpgroups:
                with T.ws(w):
                    if registers(config) is not None:
                        T.inc_max_nreg(registers(config)[1])
                    consume(w, first_tile, order, tiles, Q_shared, K_shared, V_shared, O_shared, tile_box, softmax_scale, lse_unit)

    return flash_fwd_dense
