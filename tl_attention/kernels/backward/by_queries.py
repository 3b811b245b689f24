"""FlashAttention backward for Hopper, by queries: dQ of a query block in one loop over the key blocks; bitwise reproducible.

S = Q K^T and dP = dO V^T as in the forward, dS = P * (dP - Delta) in registers, dQ += dS K: no sums in global memory. Each
consumer warpgroup owns 64 queries. The producer warp fills rings of K and V tiles by TMA. delta.py computes Lse_log2 and
Delta first.
"""

from dataclasses import replace

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass, sum_columns
from tl_attention.kernels.backward.key_tiles import scores_come_first, skip_steps, skips_steps
from tl_attention.kernels.cuda import source
from tl_attention.kernels.scores.dropout import Dropout
from tl_attention.kernels.scores.linear_bias import alloc_bias_columns, fill_bias_columns
from tl_attention.kernels.scores.mask import Mask
from tl_attention.kernels.scores.options import Scores, option_arguments, prelude
from tl_attention.kernels.scores.staged import alloc_staged
from tl_attention.kernels.scores.traced_arguments import traced_arguments
from tl_attention.kernels.seams import pipeline
from tl_attention.kernels.seams.arguments import declare
from tl_attention.kernels.seams.pipeline import alloc_fragments, indices, input_ring, sync_warpgroup
from tl_attention.kernels.seams.products import (
    alloc_further_terms,
    clear,
    continue_jobs,
    finish_jobs,
    jobs,
    multiply,
    scale,
    split_terms,
)
from tl_attention.kernels.seams.roles import WARPGROUP, Roles
from tl_attention.kernels.seams.scheduler import Tile, TileCounts, TileOrder
from tl_attention.kernels.seams.softmax import LOG2E, probabilities, softmax_backward
from tl_attention.kernels.sources.block_lists import key_blocks
from tl_attention.kernels.sources.tiles import (
    DenseGradTiles,
    PackedGradTiles,
    SmemTiles,
    input_arguments,
    result_argument,
)
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = pipeline.PASS_CONFIGS


def flash_bwd_dq(problem: AttnProblem, config: BwdPass) -> T.PrimFunc:
    """Build the kernel of the pass that computes dq alone.

    Kernel arguments: as in by_keys.flash_bwd, with dQ instead of its outputs, and after softmax_scale:
        heads_per_kv, m_blocks, group_heads, ctas: int32, see scheduler.TileCounts.
    """
    dtype_of, head_dim, head_dim_v = problem.dtype_of, problem.head_dim, problem.head_dim_v
    block_M, block_N = config.block_M, config.block_N
    warpgroups = tuple(range(config.warpgroups))
    consumers = WARPGROUP * config.warpgroups
    registers = pipeline.registers(problem, config.warpgroups)
    roles = Roles(config.warpgroups, config.threads, registers, one_body=False)
    terms, products = problem.terms, problem.products
    by_block = terms > 1 and not config.one_sum  # products are summed by block, see products.py
    scores_first = scores_come_first(problem, config)
    dq_cols = sum_columns(problem, config) or head_dim  # columns per tile of dQ in registers
    do_vt = {"transpose_B": True, "clear_accum": True}  # dP = dO V^T
    q_kt = {**do_vt, "clear_accum": not problem.bias_is_linear}  # S = Q K^T

    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    columns_qk, columns_v, rounded_q = T.dynamic("columns_qk, columns_v, rounded_q")
    varlen = problem.has("varlen")
    batch_rows = T.dynamic("batch_rows") if varlen else batch

    lengths, columns = (seqlen_q, heads, seqlen_k, heads_kv), (columns_qk, columns_v)
    q_view, k_view, v_view, do_view = input_arguments(problem, batch, *lengths, *columns)
    lse_view = T.Tensor([batch_rows, heads, rounded_q], "float32")
    # Not the same object: one object for both arguments would alias them
    delta_view = T.Tensor([batch_rows, heads, rounded_q], "float32")
    dq_view = result_argument(problem, "dq", batch, seqlen_q, heads, columns_qk)
    option_types = option_arguments(problem)

    @T.macro
    def load(tile, blocks, tiles, smem):
        """Load Q and dO once, and K and V of each key block."""
        query = tile.m_block * block_M
        blocks.start(query)
        for w in warpgroups:
            smem.Q.fill(w, tiles.q(tile, tile.head, query + 64 * w, 64))
        for step in T.serial(blocks.steps):
            smem.K.fill(step, tiles.k(tile, blocks.first_key(step), block_N))
            if step == 0:
                for w in warpgroups:
                    smem.dO.fill(w, tiles.do(tile, tile.head, query + 64 * w, 64))
            smem.V.fill(step, tiles.v(tile, blocks.first_key(step), block_N))

    @T.macro
    def compute_scores(w, step, scores, smem, acc_s):
        """Issue S = Q K^T, accumulated on the linear bias if there is one."""
        scores.begin(acc_s, smem.bias_columns)
        multiply(products, lambda i: smem.Q.term(w, i), lambda j: smem.K.term(step, j), acc_s, **q_kt)

    @T.macro
    def exponentiate(acc_s, lse_log2, query, step, blocks, scores, scale_log2):
        """Replace S in acc_s by the masked P = exp2(S * scale_log2 - lse_log2), times the slope if scores have one."""
        diagonal = blocks.diagonal(query, step)
        scores.locate(query, blocks, step)
        scores.prepare(acc_s, diagonal)
        probabilities(
            acc_s,
            lambda score, i, j: scores.exponent(score, i, j, diagonal, scale_log2, lse_log2[i]),
            sloped=scores.sloped if problem.is_sloped else None,
        )
        scores.clear(acc_s, blocks, query, step)

    @T.macro
    def store(w, query, tile, tiles, smem, softmax_scale, dq_chunks):
        """Scale dQ, and store it through the smem tile of Q; fp32 from registers."""
        scale(dq_chunks, softmax_scale)
        if problem.dtype_of("dq") == "float32":
            for n in indices(dq_chunks):
                tiles.store_dq(dq_chunks[n], tile, query, n * dq_cols)
        else:
            T.copy(dq_chunks[0], smem.Q.tiles[w, :, :])
            T.fence_proxy_async()
            sync_warpgroup(w)
            T.copy(smem.Q.tiles[w, :, :], tiles.dq(tile, tile.head, query, 64))

    @T.macro
    def differentiate(w, tile, blocks, tiles, smem, softmax_scale, options):
        """Compute dQ of 64 queries."""
        scores = Scores(problem, options, softmax_scale, block_N, staged=smem.staged)
        dropout = Dropout(problem, options, block_N)
        acc_s = T.alloc_fragment([64, block_N], "float32")  # S [queries, keys], then P
        acc_dp = T.alloc_fragment([64, block_N], "float32")  # dP [queries, keys]
        dS = T.alloc_fragment([64, block_N], dtype_of("ds"))  # dS [queries, keys]
        dS_terms = (dS, *alloc_further_terms([64, block_N], terms))
        acc_dq = T.alloc_fragment([64, dq_cols], "float32")
        dq_chunks = (acc_dq, *alloc_fragments([[64, dq_cols]] * (head_dim // dq_cols - 1), "float32"))
        # Products of one step, see products.Job
        sums = alloc_fragments([[64, dq_cols]] * (2 if by_block else 0), "float32")
        lse_log2 = T.alloc_fragment([64], "float32")
        delta = T.alloc_fragment([64], "float32")
        kept_scores, gradient_tiles = None, ()
        scale_log2 = scores.not_too_small(softmax_scale * LOG2E) if scores.raw else scores.scale_log2
        if problem.learns and problem.program.learns_from_scores:
            kept_scores = T.alloc_fragment([64, block_N], "float32")
        if problem.learns:
            gradient_tiles = alloc_fragments([[64, block_N]] * len(problem.program.stored), "float32")

        query = tile.m_block * block_M + 64 * w
        blocks.start(tile.m_block * block_M)
        T.copy(tiles.lse_log2(tile, tile.head, query, 64), lse_log2)
        T.copy(tiles.delta(tile, tile.head, query, 64), delta)
        scores.start(tile.batch, tile.head, scale_log2)
        dropout.start()
        scores.prefetch(query, blocks, 0)
        smem.Q.wait(w)
        begin = 0
        if w == 0 and skips_steps(problem, config):
            skipped = T.alloc_var("int32", init=T.shfl_sync(blocks.hidden_steps(query + 63), 0))
            skip_steps(smem.K, smem.V, 0, skipped, block_N)
            begin = skipped
        if not scores_first:
            smem.K.wait(begin)
            compute_scores(w, begin, scores, smem, acc_s)
            T.wait_wgmma(0)  # with a GEMM in flight here, ptxas serializes all
        smem.dO.wait(w)
        clear(dq_chunks)

        for step in T.serial(begin, blocks.steps):
            dropout.draw(tile.batch * heads + tile.head, query, blocks.first_key(step))
            if blocks.listed:
                blocks.find(step)
            if scores_first:  # S = Q K^T
                smem.K.wait(step)
                compute_scores(w, step, scores, smem, acc_s)
            T.wait_wgmma(0)  # S, and dQ of the previous step
            if step > begin:
                smem.K.release(step - 1)

            if problem.learns:
                scores.traced.keep_scores(acc_s, kept_scores)

            # dP = dO V^T
            smem.V.wait(step)
            multiply(products, lambda i: smem.dO.term(w, i), lambda j: smem.V.term(step, j), acc_dp, **do_vt)

            # P = exp2(S - lse), beside that GEMM
            exponentiate(acc_s, lse_log2, query, step, blocks, scores, scale_log2)
            T.wait_wgmma(0)  # dP
            smem.V.release(step)

            if problem.learns:
                scores.traced.add_gradients(
                    kept_scores, acc_s, acc_dp, lse_log2, delta, seqlen_k, gradient_tiles
                )

            # dS = P * (dP - Delta)
            dropout.drop(acc_dp)
            dropout.scale_kept(acc_dp)
            if terms > 1:
                softmax_backward(acc_s, acc_dp, lambda i, j: delta[i], acc_s)
                split_terms(acc_s, dS_terms)
            else:
                softmax_backward(acc_s, acc_dp, lambda i, j: delta[i], dS)

            # dQ += dS K
            if by_block:
                dq_jobs = jobs(dq_chunks, dS_terms, smem.K, step)
                continue_jobs(products, dq_jobs, sums, 0)
            else:
                multiply(products, lambda i: dS_terms[i], lambda j: smem.K.term(step, j), acc_dq)

            # S = Q K^T of the next step. After the last one it may read a slot that is empty or being filled: nothing reads this S
            if not scores_first:
                if step + 1 < blocks.steps:
                    smem.K.wait(step + 1)
                compute_scores(w, step + 1, scores, smem, acc_s)
            if by_block:
                finish_jobs(products, dq_jobs, sums, len(products))

        T.wait_wgmma(0)
        if problem.learns:
            scores.traced.finish_gradients()
        store(w, query, tile, tiles, smem, softmax_scale, dq_chunks)

    @T.macro
    def produce(number, order, tiles, smem, options):
        tile = Tile(order)
        mask = Mask.of(problem, options, tile, seqlen_q, seqlen_k)
        blocks = key_blocks(problem, options, mask, tile, block_M, block_N)
        tile.locate(number)
        if tile.exists:
            load(tile, blocks, tiles, smem)

    @T.macro
    def consume(w, number, order, tiles, smem, softmax_scale, options):
        tile = Tile(order)
        mask = Mask.of(problem, options, tile, seqlen_q, seqlen_k)
        blocks = key_blocks(problem, options, mask, tile, block_M, block_N)
        tile.locate(number)
        fill_bias_columns(w, smem.bias_columns, consumers)
        if tile.exists:
            differentiate(w, tile, blocks, tiles, smem, softmax_scale, options)

    @T.prim_func
    def flash_bwd_dq_kernel(
        Q: q_view,
        K: k_view,
        V: v_view,
        dO: do_view,
        Lse_log2: lse_view,
        Delta: delta_view,
        dQ: dq_view,
        softmax_scale: T.float32,
        heads_per_kv: T.int32,
        m_blocks: T.int32,
        group_heads: T.int32,
        ctas: T.int32,
    ):
        options = replace(declare(option_types), traced=traced_arguments(problem))
        counts = TileCounts(heads_per_kv, m_blocks, group_heads, ctas)
        code = prelude(problem, roles, source("rows") if problem.dtype_of("dq") == "float32" else "")
        with T.Kernel(ctas, threads=roles.block, prelude=code) as number:
            smem = SmemTiles(
                bias_columns=alloc_bias_columns(problem, block_N),
                staged=alloc_staged(problem, consumers // 32, block_N),
                Q=input_ring(problem, "Q", [config.warpgroups, 64], head_dim, 4),
                dO=input_ring(problem, "dO", [config.warpgroups, 64], head_dim_v, 4),
                K=input_ring(problem, "K", [config.num_stages, block_N], head_dim, consumers // 32),
                V=input_ring(problem, "V", [config.num_stages_do, block_N], head_dim_v, consumers // 32),
            )
            all_heads, table = (heads, options.Table) if varlen else (heads * batch, None)
            order = TileOrder.of_queries(
                counts, problem.is_uneven, heads, all_heads, None, table, TABLE_ROWS // block_M
            )
            Tiles = PackedGradTiles if varlen else DenseGradTiles
            tiles = Tiles(Q, K, V, dO, Lse_log2, Delta, head_dim, head_dim_v, terms, dQ=dQ)
            roles.run(
                lambda: produce(number, order, tiles, smem, options),
                lambda w: consume(w, number, order, tiles, smem, softmax_scale, options),
            )

    return flash_bwd_dq_kernel
