"""FlashAttention backward for Hopper, by keys: dK, dV of a block of keys, and its share of dQ, in one pass over the queries.

Dao 2023 (FlashAttention-2, alg. 2) in the schedule of Shah et al. 2024 (FlashAttention-3). Everything is transposed, S' = K Q',
so that P' and dS' leave the tensor cores in the registers where dV += P' dO and dK += dS' Q want them; each consumer warpgroup
owns 64 keys. One warp feeds rings of Q and dO tiles by TMA; dQ is added to sums in global memory from the registers.
bwd_delta.py makes Lse_log2 and Delta before it; bwd_sum.py makes dQ of dQ_sum after it. Where the registers do not hold dK and
dV at once, or dQ is to be the same from run to run, a pass makes one or two of the three, and S is computed in each.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass
from tl_attention.kernels import pipeline
from tl_attention.kernels.mask import Mask, QueryBlocks
from tl_attention.kernels.options import (
    Dropout,
    Options,
    Scores,
    alloc_bias_columns,
    fill_bias_columns,
    option_views,
    prelude,
)
from tl_attention.kernels.pipeline import (
    Exchange,
    TileRing,
    alloc_each,
    alloc_fragments,
    alloc_swizzled,
    sync_consumers,
    sync_warpgroup,
)
from tl_attention.kernels.roles import WARPGROUP, Roles
from tl_attention.kernels.scheduler import Tile, TileOrder
from tl_attention.kernels.softmax import LOG2E, SMALLEST_SCALE, probabilities, softmax_backward
from tl_attention.kernels.tiles import DenseGradTiles, FragmentBlocks, PackedGradTiles, rows_argument
from tl_attention.problem import AttnProblem

PASS_CONFIGS = {
    **pipeline.PASS_CONFIGS,
    "tl.disable_safe_memory_legalize": True,  # what TMA does not reach, the caller pads to whole tiles
}


@dataclass(frozen=True)
class SharedTiles:
    """What the roles of a CTA share; None what the pass does not need. P: as dropout leaves it; dV: where dV leaves from."""

    Q: Any
    dO: Any
    K: Any
    V: Any
    P: Any
    dV: Any
    dS: Any
    bias_columns: Any  # options.alloc_bias_columns


Piece = tuple[slice, slice]  # rows (queries), columns


def dq_pieces(block_M: int, head_dim: int, warpgroups: int) -> list[list[Piece]]:
    """What each warpgroup computes of a dQ tile: 64 of its rows if there are so many, else columns of all.

    No piece crosses a chunk of the swizzled layout of K, whose columns it reads.
    """
    if block_M == 64 * warpgroups:
        return [[(slice(64 * w, 64 * w + 64), slice(0, head_dim))] for w in range(warpgroups)]
    share, pieces = head_dim // warpgroups, []
    chunk = 64 if head_dim % 64 == 0 else 32
    for w in range(warpgroups):
        ends = [c for c in range(0, head_dim, chunk) if w * share < c < (w + 1) * share]
        cuts = [w * share, *ends, (w + 1) * share]
        pieces.append([(slice(0, block_M), slice(start, stop)) for start, stop in pairwise(cuts)])
    return pieces


def sizes(piece: Piece) -> list[int]:
    return [part.stop - part.start for part in piece]


@dataclass(frozen=True)
class Launch:
    """What dispatch works out of a launch: a CTA has a block of keys of a key head, and one of `parts` of the query heads that read it."""

    heads_a_kv_head: Any
    heads_a_part: Any
    parts: Any
    n_blocks: Any
    group_heads: Any
    ctas: Any


@T.meta_class
class KeyTile:
    """What a CTA computes: a block of keys of a key head, for some of the query heads that read it."""

    def __init__(self, order: TileOrder, block_N: int, name: str = "key_tile"):
        self.tile, self.block_N = Tile(order), block_N
        self.first = T.alloc_var("int32", init=0)
        self.part_idx = T.alloc_var("int32", init=0)
        self.end_q, self.len_q, self.padded_q = self.tile.end_q, self.tile.len_q, self.tile.padded_q
        self.end_k, self.len_k, self.padded_k = self.tile.end_k, self.tile.len_k, self.tile.padded_k

    @T.inline
    def start(self, number, launch, blocks):
        """Causal, the first keys have the most queries, so they come first where Tile has its last block."""
        order = self.tile.order
        self.tile.locate(number)
        if order.table is not None:
            self.first[0] = self.tile.m_block * self.block_N
        else:
            self.first[0] = (order.m_blocks - 1 - self.tile.m_block) * self.block_N
        self.part_idx[0] = self.tile.head - self.tile.kv_head * order.heads_a_kv_head
        first_head = self.tile.kv_head * launch.heads_a_kv_head + self.part_idx[0] * launch.heads_a_part
        heads = T.min(launch.heads_a_part, launch.heads_a_kv_head - self.part_idx[0] * launch.heads_a_part)
        blocks.start(self.first[0], first_head, heads)

    @property
    def there(self) -> Any:
        return self.tile.there

    @property
    def batch(self) -> Any:
        return self.tile.batch

    @property
    def kv_head(self) -> Any:
        return self.tile.kv_head

    @property
    def part(self) -> Any:
        return self.part_idx[0]

    @property
    def first_key(self) -> Any:
        return self.first[0]


def flash_bwd(problem: AttnProblem, config: BwdPass) -> T.PrimFunc:
    """Kernel(Q, K, V, dO, Lse_log2, Delta, dQ_sum, dK, dV, dK_parts, dV_parts, softmax_scale, heads_a_kv_head, heads_a_part,
    parts, n_blocks, group_heads, ctas), the last six from dispatch.

    Q, K, V, dO, dK, dV are views [batch, seqlen, heads, columns] with no more columns than the problem's tile widths; Lse_log2,
    Delta and dQ_sum are as DenseGradTiles has them. A CTA walks heads_a_part of the heads_a_kv_head query heads of its key head;
    with 1 part it writes dK and dV, with more its share of them in fp32 to dK_parts and dV_parts. What the pass does not make
    is left alone. problem.options: the values of options.Options come after ctas; with varlen tensors are as PackedGradTiles has them.
    """
    dtype, head_dim, head_dim_v = problem.dtype, problem.head_dim, problem.head_dim_v
    block_M, block_N, reuse_registers = config.block_M, config.block_N, config.reuse_registers
    with_dq, with_dk, with_dv = (grad in config.makes for grad in ("dq", "dk", "dv"))
    warpgroups = tuple(range(config.warpgroups))
    consumers = WARPGROUP * config.warpgroups
    registers = pipeline.registers(problem, config.warpgroups, full=with_dq)
    roles = Roles(config.warpgroups, config.threads, registers, one_body=False)
    row_wise = T.GemmWarpPolicy.FullRow
    # Of the GEMMs S' = K Q', dP' = V dO'
    v_dot = {"transpose_B": True, "policy": row_wise, "clear_accum": True}
    k_qt = {**v_dot, "clear_accum": not problem.bias_is_linear}
    pieces = dq_pieces(block_M, head_dim, config.warpgroups)
    capped = problem.has("softcap")
    # The log-sum-exps are asked for before S is waited for: shared memory, busy with the GEMMs, answers late. Full d64 at 4k
    # 435 -> 479 TFLOPS, d128 509 -> 525 (H200, 2026-11-21); dk+dv and ALiBi spill with them, and dv of d256 was slower
    lse_early = (with_dq or not with_dv) and not problem.has("alibi")
    # Before the exponential, which is then in one block of code with what follows: full d64 455 -> 474, d256 dv 833 -> 781 us;
    # dk+dv of 192/128 spills. With a softcap dk+dv must, as dV's P is made there, too, and dk alone spills
    mask_scores = with_dq or (with_dk and with_dv) == capped
    # As dS is made in the registers of P, of what is dropped, too; with a softcap it also has the slope of that
    P_in_shared = reuse_registers and with_dv and problem.has("dropout")
    apart = P_in_shared or (reuse_registers and with_dv and capped)

    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    columns_qk, columns_v = T.dynamic("columns_qk, columns_v")
    varlen = problem.has("varlen")
    batch_rows = T.dynamic("batch_rows") if varlen else batch
    rounded_q, dq_blocks, dk_blocks, dv_blocks = T.dynamic("rounded_q, dq_blocks, dk_blocks, dv_blocks")

    q_view = rows_argument(problem, "q", batch, seqlen_q, heads, columns_qk)
    k_view = rows_argument(problem, "k", batch, seqlen_k, heads_kv, columns_qk)
    v_view = rows_argument(problem, "v", batch, seqlen_k, heads_kv, columns_v)
    do_view = rows_argument(problem, "do", batch, seqlen_q, heads, columns_v)
    lse_view = T.Tensor([batch_rows, heads, rounded_q], "float32")
    delta_view = T.Tensor([batch_rows, heads, rounded_q], "float32")  # one object for both would alias them
    dq_sum_view = FragmentBlocks.argument(dq_blocks, head_dim)
    dk_view = rows_argument(problem, "dk", batch, seqlen_k, heads_kv, columns_qk)
    dv_view = rows_argument(problem, "dv", batch, seqlen_k, heads_kv, columns_v)
    dk_parts_view = FragmentBlocks.argument(dk_blocks, head_dim)
    dv_parts_view = FragmentBlocks.argument(dv_blocks, head_dim_v)

    @T.macro
    def load(tile, blocks, tiles, shared):
        for w in warpgroups:
            shared.K.fill(w, tiles.k(tile, tile.first_key + 64 * w, 64))
        for step in T.serial(blocks.steps):
            head, query = blocks.head, blocks.query
            lse_log2 = tiles.lse_log2(tile, head, query, block_M)
            delta = tiles.delta(tile, head, query, block_M)
            row_values = (lse_log2, delta) if with_dk else (lse_log2,)
            shared.Q.fill(step, tiles.q(tile, head, query, block_M), row_values)
            if with_dk:
                if step == 0:
                    for w in warpgroups:
                        shared.V.fill(w, tiles.v(tile, tile.first_key + 64 * w, 64))
            shared.dO.fill(step, tiles.do(tile, head, query, block_M))
            blocks.advance()

    @T.macro
    def multiply_dq(w, shared, acc_dq):
        for i, (rows, cols) in enumerate(pieces[w]):
            for other in warpgroups:
                T.wgmma_gemm(
                    shared.dS[other][:, rows],
                    shared.K.tiles[other, :, cols],
                    acc_dq[i],
                    transpose_A=True,
                    policy=row_wise,
                    clear_accum=other == 0,
                )

    @T.macro
    def add_dq(w, row_block, tiles, shared, acc_dq):
        shared.dS.release()
        for i, (rows, cols) in enumerate(pieces[w]):
            tiles.dQ_sum.add(acc_dq[i], row_block + rows.start // 16, cols.start)

    @T.macro
    def differentiate(w, number, launch, tile, blocks, tiles, shared, softmax_scale, options):
        key = tile.first_key + 64 * w
        scores, dropout, mask = (
            Scores(problem, options, softmax_scale, rows_are_keys=True),
            Dropout(problem, options, block_M, rows_are_keys=True),
            blocks.mask,
        )
        # Of packed sequences, keys count from this block's first and a step's place comes from one lane: the lengths live in no registers
        if with_dq and varlen:
            keys_left = T.alloc_var("int32", init=mask.seqlen_k - key)
            first_place = T.alloc_var("int32", init=mask.place(0) - key)
            mask_of_step = replace(mask, seqlen_q=keys_left, seqlen_k=keys_left)
        raw_scale = T.if_then_else(softmax_scale == 0, SMALLEST_SCALE, softmax_scale * LOG2E)
        scale_log2 = scores.not_too_small(raw_scale) if scores.raw else scores.scale_log2
        if not with_dq:  # from one lane, so in a uniform register; with dq there are none to spare
            scale_log2 = T.shfl_sync(scale_log2, 0)
        last_operand = shared.Q if with_dk else shared.dO  # of the last GEMM of a step
        acc_s = T.alloc_fragment([64, block_M], "float32")  # scores, then probabilities
        P = T.alloc_fragment([64, block_M], dtype)
        acc_dp = acc_s if reuse_registers else T.alloc_fragment([64, block_M], "float32")
        dS = P if reuse_registers else T.alloc_fragment([64, block_M], dtype)
        P_of_dv = T.alloc_fragment([64, block_M], dtype) if apart else P
        acc_dk = T.alloc_fragment([64, head_dim], "float32")
        acc_dv = T.alloc_fragment([64, head_dim_v], "float32")
        acc_dq = alloc_fragments([sizes(piece) for piece in pieces[w]], "float32")
        lse_log2 = T.alloc_fragment([block_M], "float32")
        dq_row_block = T.alloc_var("int32", init=0)  # of the step before

        for other in warpgroups if with_dq else (w,):
            shared.K.wait(other)
        shared.Q.wait(0)
        scores.start(tile.batch, blocks.head, scale_log2)
        scores.begin(acc_s, shared.bias_columns)
        T.wgmma_gemm(shared.K[w], shared.Q[0], acc_s, **k_qt)
        T.wait_wgmma(0)  # with a GEMM in flight here, ptxas serializes all
        if with_dk:
            shared.V.wait(w)
            T.clear(acc_dk)
        if with_dv:
            T.clear(acc_dv)
        for step in T.serial(blocks.steps):
            # P' = softmax(S'), and beside it dP' = V dO' or, if reuse_registers, dQ = dS K of the step before, of no use in the first.
            # ptxas serializes all wgmma if S is read while a GEMM is in flight that was issued in the step before
            if lse_early:
                shared.Q.read_row_values(step, 0, lse_log2)
            dropout.start()
            dropout.draw(tile.batch * heads + blocks.head, blocks.query, key)
            T.wait_wgmma(0)  # S is there, and the last GEMM of the step before
            if step > 0:
                last_operand.release(step - 1)
            if with_dq:
                if step > 0:
                    shared.dS.wait(step - 1)
                multiply_dq(w, shared, acc_dq)
            if with_dk and not reuse_registers:
                shared.dO.wait(step)
                T.wgmma_gemm(shared.V[w], shared.dO[step], acc_dp, **v_dot)
            ahead = mask.place(blocks.query) - key
            scores.prepare(acc_s, ahead)
            if mask_scores:
                scale_of_scores = softmax_scale if scores.raw else 1.0
                if with_dq and varlen:
                    place = T.shfl_sync(first_place + blocks.query, 0)
                    mask_of_step.hide_transposed(acc_s, 0, place, scale_of_scores)
                else:
                    mask.hide_transposed(acc_s, key, blocks.query, scale_of_scores)
            probabilities(
                acc_s,
                lambda score, i, j: scores.exponent(
                    score,
                    i,
                    j,
                    ahead,
                    scale_log2,
                    lse_log2[j] if lse_early else shared.Q.row_value(step, 0, j),
                ),
                P=P_of_dv if capped and with_dk and with_dv else None,
                slope=scores.slope if capped and with_dk else None,
            )
            if not mask_scores:
                mask.clear_transposed(acc_s, key, blocks.query)
            if with_dv and not (capped and with_dk):
                T.copy(acc_s, P_of_dv)
            if reuse_registers and (apart or not with_dv):
                T.copy(acc_s, P)
            if with_dv:
                dropout.drop(P_of_dv)
                if P_in_shared:
                    sync_warpgroup(w)  # dV of the step before is there for all warps
                    T.copy(P_of_dv, shared.P[w])
                    T.fence_proxy_async()
                    sync_warpgroup(w)

            # dV += P' dO, and dS' = P' * (dP' - Delta)
            if with_dk:
                if reuse_registers:
                    shared.dO.wait(step)
                    T.wgmma_gemm(shared.V[w], shared.dO[step], acc_dp, **v_dot)
                else:
                    T.wait_wgmma(0)  # dP is there
                if with_dv:
                    T.wgmma_gemm(
                        shared.P[w] if P_in_shared else P_of_dv, shared.dO[step], acc_dv, policy=row_wise
                    )
                if with_dq:
                    T.wait_wgmma(2)  # dQ is there
                    if step > 0:
                        add_dq(w, dq_row_block, tiles, shared, acc_dq)
                if reuse_registers:
                    T.wait_wgmma(0)  # dP is there, and P has served
                if reuse_registers or not with_dv:
                    shared.dO.release(step)
                probability = P if reuse_registers else acc_s
                dropout.drop(acc_dp)
                dropout.scale_kept(acc_dp)
                softmax_backward(probability, acc_dp, lambda i, j: shared.Q.row_value(step, 1, j), dS)
            if with_dq:
                shared.dS.wait_empty(step)
                T.copy(dS, shared.dS[w])
                shared.dS.announce()

            # dK += dS' Q, or without dK dV += P' dO; behind it S' of the next step, of no use after the last
            if with_dk:
                T.wgmma_gemm(dS, shared.Q[step], acc_dk, policy=row_wise)
            else:
                shared.dO.wait(step)
                T.wgmma_gemm(P, shared.dO[step], acc_dv, policy=row_wise)
                # Once P has gone to a GEMM every lane has its log-sum-exps. An arrival overtakes reads that are on their way: before
                # the GEMM, causal dv of d192 and d256 read those of a later step now and then (H200, 2026-11-21)
                shared.Q.release(step)
            if step + 1 < blocks.steps:
                shared.Q.wait(step + 1)
            scores.start(tile.batch, T.min(blocks.next_head, heads - 1), scale_log2)
            scores.begin(acc_s, shared.bias_columns)
            T.wgmma_gemm(shared.K[w], shared.Q[step + 1], acc_s, **k_qt)
            if with_dk and with_dv and not reuse_registers:
                T.wait_wgmma(2 + problem.bias_is_linear)  # dV is there
                shared.dO.release(step)
            if with_dq:
                dq_row_block = tiles.dq_row_block(tile, blocks.head, blocks.query)
            blocks.advance()

        T.wait_wgmma(0)
        if with_dq:
            shared.dS.wait(blocks.steps - 1)
            multiply_dq(w, shared, acc_dq)
            T.wait_wgmma(0)
            add_dq(w, dq_row_block, tiles, shared, acc_dq)
            sync_consumers(consumers)
        # K and V have served, for all warpgroups: dK and dV leave through their tiles. Where to is worked out anew, rather than
        # held in registers all the way
        tile.start(T.shfl_sync(number, 0), launch, blocks)
        key = tile.first_key + 64 * w
        if with_dk:
            for i, j in T.Parallel(64, head_dim):
                acc_dk[i, j] *= softmax_scale
        if with_dv:
            dropout.scale_kept(acc_dv)
        if launch.parts > 1:
            if with_dk:
                tiles.dK_parts.store(acc_dk, tiles.dk_row_block(tiles.dK_parts, tile, key))
            if with_dv:
                tiles.dV_parts.store(acc_dv, tiles.dk_row_block(tiles.dV_parts, tile, key))
        else:
            if with_dk:
                T.copy(acc_dk, shared.K.tiles[w, :, :])
            if with_dv:
                T.copy(acc_dv, shared.dV[w, :, :])
            T.fence_proxy_async()
            sync_warpgroup(w)
            if with_dk:
                T.copy(shared.K.tiles[w, :, :], tiles.dk(tile, key, 64))
            if with_dv:
                T.copy(shared.dV[w, :, :], tiles.dv(tile, key, 64))

    @T.macro
    def produce(number, order, launch, tiles, shared, options):
        tile = KeyTile(order, block_N)
        blocks = QueryBlocks(Mask.of(problem, options, tile, seqlen_q, seqlen_k), block_M, block_N)
        tile.start(number, launch, blocks)
        if tile.there:
            load(tile, blocks, tiles, shared)

    @T.macro
    def consume(w, number, order, launch, tiles, shared, softmax_scale, options):
        tile = KeyTile(order, block_N)
        blocks = QueryBlocks(Mask.of(problem, options, tile, seqlen_q, seqlen_k), block_M, block_N)
        tile.start(number, launch, blocks)
        fill_bias_columns(w, shared.bias_columns, consumers)
        if tile.there:
            differentiate(w, number, launch, tile, blocks, tiles, shared, softmax_scale, options)

    @T.macro
    def run(Q, K, V, dO, Lse_log2, Delta, dQ_sum, dK, dV, dK_parts, dV_parts, softmax_scale, launch, options):
        with T.Kernel(launch.ctas, threads=roles.block, prelude=prelude(problem, roles)) as number:
            K_shared = TileRing([config.warpgroups, 64, head_dim], dtype, 4, name="K")
            V_shared = TileRing([config.warpgroups, 64, head_dim_v], dtype, 4, name="V") if with_dk else None
            if with_dk:
                dV_shared = V_shared.tiles
            elif head_dim == head_dim_v:
                dV_shared = K_shared.tiles
            else:
                dV_shared = alloc_swizzled([config.warpgroups, 64, head_dim_v], dtype)
            shared = SharedTiles(
                Q=TileRing(
                    [config.num_stages, block_M, head_dim],
                    dtype,
                    consumers // 32,
                    "Q",
                    row_values=1 + with_dk,
                ),
                dO=TileRing([config.num_stages_do, block_M, head_dim_v], dtype, consumers // 32, "dO"),
                K=K_shared,
                V=V_shared,
                P=alloc_each(config.warpgroups, [64, block_M], dtype, "P") if P_in_shared else None,
                dV=dV_shared,
                dS=Exchange(config.warpgroups, [64, block_M], dtype, "dS") if with_dq else None,
                bias_columns=alloc_bias_columns(problem, block_M),
            )
            one_part = heads_kv * launch.parts
            all_heads, table = (one_part, options.Table) if varlen else (one_part * batch, None)
            of_launch = launch.parts, launch.n_blocks, launch.group_heads
            order = TileOrder(problem.causal, one_part, all_heads, *of_launch, table=table)
            Tiles = PackedGradTiles if varlen else DenseGradTiles
            tiles = Tiles(
                Q,
                K,
                V,
                dO,
                Lse_log2,
                Delta,
                head_dim,
                head_dim_v,
                dQ_sum=FragmentBlocks(dQ_sum, rounded_q // 16),
                dK=dK,
                dV=dV,
                dK_parts=FragmentBlocks(dK_parts, launch.n_blocks * (block_N // 16)),
                dV_parts=FragmentBlocks(dV_parts, launch.n_blocks * (block_N // 16)),
            )

            roles.run(
                lambda: produce(number, order, launch, tiles, shared, options),
                lambda w: consume(w, number, order, launch, tiles, shared, softmax_scale, options),
            )

    if not problem.options:

        @T.prim_func
        def flash_bwd_dense(
            Q: q_view,
            K: k_view,
            V: v_view,
            dO: do_view,
            Lse_log2: lse_view,
            Delta: delta_view,
            dQ_sum: dq_sum_view,
            dK: dk_view,
            dV: dv_view,
            dK_parts: dk_parts_view,
            dV_parts: dv_parts_view,
            softmax_scale: T.float32,
            heads_a_kv_head: T.int32,
            heads_a_part: T.int32,
            parts: T.int32,
            n_blocks: T.int32,
            group_heads: T.int32,
            ctas: T.int32,
        ):
            launch = Launch(heads_a_kv_head, heads_a_part, parts, n_blocks, group_heads, ctas)
            run(Q, K, V, dO, Lse_log2, Delta, dQ_sum, dK, dV, dK_parts, dV_parts, softmax_scale, launch, None)

        return flash_bwd_dense

    slopes_view, sink_view, rng_view, table_view = option_views()

    @T.prim_func
    def flash_bwd_options(
        Q: q_view,
        K: k_view,
        V: v_view,
        dO: do_view,
        Lse_log2: lse_view,
        Delta: delta_view,
        dQ_sum: dq_sum_view,
        dK: dk_view,
        dV: dv_view,
        dK_parts: dk_parts_view,
        dV_parts: dv_parts_view,
        softmax_scale: T.float32,
        heads_a_kv_head: T.int32,
        heads_a_part: T.int32,
        parts: T.int32,
        n_blocks: T.int32,
        group_heads: T.int32,
        ctas: T.int32,
        left: T.int32,
        right: T.int32,
        softcap: T.float32,
        Slopes: slopes_view,
        Sink: sink_view,
        Rng: rng_view,
        drop_below: T.int32,
        Table: table_view,
    ):
        options = Options(left, right, softcap, Slopes, Sink, Rng, drop_below, Table)
        launch = Launch(heads_a_kv_head, heads_a_part, parts, n_blocks, group_heads, ctas)
        run(Q, K, V, dO, Lse_log2, Delta, dQ_sum, dK, dV, dK_parts, dV_parts, softmax_scale, launch, options)

    return flash_bwd_options
