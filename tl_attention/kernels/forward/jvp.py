"""FlashAttention forward and its derivative along a direction (forward mode) for Hopper, in one pass over the keys.

tQ, tK and tV are the tangents of Q, K and V. Each product of the forward has a tangent of two products:

    S = scale Q Kᵀ    tS = scale (tQ Kᵀ + Q tKᵀ)    H = P * tS    O = P V    tO = P tV + H V - rowsum(H) O    tLse = rowsum(H)

The softmax is online: O, tO and rowsum(H) are rescaled when a row max grows, so nothing of the size of S is stored. Schedule: one
producer warp and consumer warpgroups of 64 queries, as in kernel.py. The products of tS run beside the softmax, P V and P tV beside H.
"""

from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import KV_STAGES, JvpConfig
from tl_attention.kernels.scores.mask import KeyBlocks, Mask
from tl_attention.kernels.seams import pipeline
from tl_attention.kernels.seams.pipeline import PingPong, TileRing, sync_warpgroup, wait_for_stores
from tl_attention.kernels.seams.roles import Roles
from tl_attention.kernels.seams.scheduler import Tile, TileCounts, TileOrder
from tl_attention.kernels.seams.softmax import (
    LAZY_GROWTH,
    LOG2E,
    SMALLEST_SCALE,
    OnlineSoftmax,
    TangentSums,
    rows_layout,
)
from tl_attention.kernels.sources.tiles import DenseTiles, SmemTiles, strided
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = pipeline.PASS_CONFIGS


@T.macro
def store_per_row(vector, tiles, tile, query):
    """Store one number per row, of 64 rows from `query` on, in Lse."""
    T.copy(vector, tiles.Lse[tile.batch, tile.head, query : query + 64], loop_layout=rows_layout())


def flash_fwd_jvp(problem: AttnProblem, config: JvpConfig) -> T.PrimFunc:
    """Kernel(Q, K, V, tQ, tK, tV, O, Lse, tO, tLse, softmax_scale, lse_unit, heads_per_kv, m_blocks, group_heads, ctas).

    Args of the kernel:
        Q, K, V, O, Lse, and the numbers: as in kernel.flash_fwd.
        tQ, tK, tV, tO: t_tiles, like Q, K, V, O with strides of their own.
        tLse: fp32 [batch, heads, seqlen_q], the tangent of Lse in its unit. A row without keys has tO = 0, tLse = 0.
    """
    dtype, head_dim, head_dim_v = problem.dtype, problem.head_dim, problem.head_dim_v
    block_M, block_N = config.block_M, config.block_N
    warpgroups = tuple(range(config.warpgroups))
    consumer_warps = 4 * config.warpgroups
    row_wise = T.GemmWarpPolicy.FullRow
    q_kt = {"transpose_B": True, "policy": row_wise}
    registers = pipeline.registers(problem, config.warpgroups)
    roles = Roles(config.warpgroups, config.threads, registers, one_body=True)
    ping_pong = PingPong(config.warpgroups, config.ping_pong)

    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    columns_qk, columns_v = T.dynamic("columns_qk, columns_v")

    def rows(name: str, seqlen: Any, heads: Any, columns: Any) -> Any:
        return strided(name, [batch, seqlen, heads, columns], dtype)

    q_view, tq_view = (rows(name, seqlen_q, heads, columns_qk) for name in ("q", "tq"))
    k_view, tk_view = (rows(name, seqlen_k, heads_kv, columns_qk) for name in ("k", "tk"))
    v_view, tv_view = (rows(name, seqlen_k, heads_kv, columns_v) for name in ("v", "tv"))
    o_view, to_view = (rows(name, seqlen_q, heads, columns_v) for name in ("o", "to"))
    lse_view, tlse_view = (T.Tensor([batch, heads, seqlen_q], "float32") for _ in range(2))

    @T.macro
    def produce(number, order, tiles, t_tiles, smem, t_smem):
        tile = Tile(order)
        blocks = KeyBlocks(Mask.of(problem, None, tile, seqlen_q, seqlen_k), block_M, block_N)
        tile.locate(number)
        query = tile.m_block * block_M
        blocks.start(query)
        for w in warpgroups:
            smem.Q.fill(w, tiles.q(tile, query + 64 * w, 64))
            t_smem.Q.fill(w, t_tiles.q(tile, query + 64 * w, 64))
        for step in T.serial(blocks.steps):
            key = blocks.first_key(step)
            smem.K.fill(step, tiles.k(tile, key, block_N))
            t_smem.K.fill(step, t_tiles.k(tile, key, block_N))
            smem.V.fill(step, tiles.v(tile, key, block_N))
            t_smem.V.fill(step, t_tiles.v(tile, key, block_N))

    @T.macro
    def store(w, acc_o, O_shared, tiles, tile, query):
        """Store 64 rows of an output through shared memory."""
        T.copy(acc_o, O_shared)
        T.fence_proxy_async()
        sync_warpgroup(w)
        T.tma_copy(O_shared, tiles.o(tile, query, 64))

    @T.macro
    def attend(w, number, order, tiles, t_tiles, smem, t_smem, softmax_scale, lse_unit):
        tile = Tile(order)
        blocks = KeyBlocks(Mask.of(problem, None, tile, seqlen_q, seqlen_k), block_M, block_N)
        acc_s = T.alloc_fragment([64, block_N], "float32")  # S, then P
        acc_ts = T.alloc_fragment([64, block_N], "float32")  # tS, then H
        P = T.alloc_fragment([64, block_N], dtype)
        H = T.alloc_fragment([64, block_N], dtype)
        acc_o = T.alloc_fragment([64, head_dim_v], "float32")
        acc_to = T.alloc_fragment([64, head_dim_v], "float32")
        lse = T.alloc_fragment([64], "float32")
        scale = T.alloc_var("float32", init=T.abs(softmax_scale))
        growth = LAZY_GROWTH if dtype == "bfloat16" else 0.0  # in fp16 H has no range to spare
        softmax = OnlineSoftmax(block_N, T.max(scale * LOG2E, SMALLEST_SCALE), growth)
        sums = TangentSums(softmax, scale)
        ping_pong.start(w)
        tile.locate(number)
        blocks.start(tile.m_block * block_M)
        query = tile.m_block * block_M + 64 * w
        softmax.reset()
        sums.reset()

        smem.Q.wait(w)
        t_smem.Q.wait(w)
        if softmax_scale < 0:  # -Q, -tQ and |scale|: the row max is a maximum of raw scores
            smem.Q.negate(w)
            t_smem.Q.negate(w)
            T.fence_proxy_async()
            sync_warpgroup(w)
        T.clear(acc_o)
        T.clear(acc_to)

        for step in T.serial(blocks.steps):
            # S = Q Kᵀ and tS = tQ Kᵀ + Q tKᵀ
            smem.K.wait(step)
            ping_pong.wait(w)
            T.wgmma_gemm(smem.Q[w], smem.K[step], acc_s, clear_accum=True, **q_kt)
            t_smem.K.wait(step)
            T.wgmma_gemm(t_smem.Q[w], smem.K[step], acc_ts, clear_accum=True, **q_kt)
            T.wgmma_gemm(smem.Q[w], t_smem.K[step], acc_ts, **q_kt)
            ping_pong.pass_on(w)

            # Softmax, beside tS
            T.wait_wgmma(2)
            blocks.hide_if_needed(acc_s, query, step)
            softmax.update(acc_s)
            T.copy(acc_s, P)
            softmax.rescale((acc_o,))
            softmax.rescale((acc_to,))
            T.wait_wgmma(0)
            smem.K.release(step)
            t_smem.K.release(step)

            # O += P V and tO += P tV, beside H
            smem.V.wait(step)
            T.wgmma_gemm(P, smem.V[step], acc_o, policy=row_wise)
            t_smem.V.wait(step)
            T.wgmma_gemm(P, t_smem.V[step], acc_to, policy=row_wise)
            if step == 0:
                sums.find_center(acc_s, acc_ts)
            sums.update(acc_s, acc_ts)
            T.copy(acc_ts, H)
            T.wgmma_gemm(H, smem.V[step], acc_to, policy=row_wise)
            T.wait_wgmma(0)
            smem.V.release(step)
            t_smem.V.release(step)

        tile.locate(number)  # again, instead of held in registers
        query = tile.m_block * block_M + 64 * w
        softmax.finish(lse, lse_unit)
        softmax.scale_rows((acc_o,))
        sums.finish(acc_to, acc_o, lse_unit)
        store_per_row(lse, tiles, tile, query)
        store_per_row(sums.mean, t_tiles, tile, query)
        store(w, acc_o, smem.Q[w], tiles, tile, query)
        store(w, acc_to, t_smem.Q[w], t_tiles, tile, query)
        wait_for_stores()

    def rings(tangent: str = "") -> SmemTiles:
        """Shared memory for Q, K and V, or for their tangents: Q for one tile, K and V for KV_STAGES steps."""
        return SmemTiles(
            Q=TileRing([config.warpgroups, 64, head_dim], dtype, 4, name=f"{tangent}Q"),
            K=TileRing([KV_STAGES, block_N, head_dim], dtype, consumer_warps, name=f"{tangent}K"),
            V=TileRing([KV_STAGES, block_N, head_dim_v], dtype, consumer_warps, name=f"{tangent}V"),
        )

    @T.prim_func
    def flash_fwd_jvp_kernel(
        Q: q_view,
        K: k_view,
        V: v_view,
        tQ: tq_view,
        tK: tk_view,
        tV: tv_view,
        O: o_view,
        Lse: lse_view,
        tO: to_view,
        tLse: tlse_view,
        softmax_scale: T.float32,
        lse_unit: T.float32,
        heads_per_kv: T.int32,
        m_blocks: T.int32,
        group_heads: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=roles.block, prelude=roles.prelude) as number:
            smem, t_smem = rings(), rings("t")
            tiles = DenseTiles(Q, K, V, O, Lse, head_dim, head_dim_v)
            t_tiles = DenseTiles(tQ, tK, tV, tO, tLse, head_dim, head_dim_v)
            counts = TileCounts(heads_per_kv, m_blocks, group_heads, ctas)
            order = TileOrder.of_queries(counts, problem.causal, heads, heads * batch)
            work = number, order, tiles, t_tiles, smem, t_smem
            roles.run(lambda: produce(*work), lambda w: attend(w, *work, softmax_scale, lse_unit))

    return flash_fwd_jvp_kernel
