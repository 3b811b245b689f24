"""FlashAttention backward for Hopper, by keys: dK, dV of a key block and its share of dQ, in one loop over the query blocks.

Dao 2023 (FlashAttention-2, algorithm 2), in the schedule of Shah et al. 2024 (FlashAttention-3). Scores are transposed, S' = K Q': P'
and dS' are then in registers as operands of dV += P' dO and dK += dS' Q. Each consumer warpgroup owns 64 keys.
The producer warp fills rings of Q and dO tiles by TMA. dQ is added from registers to sums in global memory.

bwd_delta.py computes Lse_log2 and Delta first; bwd_sum.py converts dQ_sum to dQ at the end, or warps of the pass do (bwd_round.py). In fp32
dQ' = K' dS' is added to dQ itself. Where one tile has all keys of a head, dQ of a step is whole and is stored (bwd_one_tile.py).
A pass computes one or two of the gradients if registers do not hold dK and dV together, or if dQ must be reproducible. Each computes S'.
"""

import functools

import tilelang.language as T

from tl_attention.kernel_configs import BwdPass, sum_columns
from tl_attention.kernels import bwd_scores, bwd_tiles, pipeline
from tl_attention.kernels import products as fp32
from tl_attention.kernels.block_lists import query_blocks
from tl_attention.kernels.bwd_arguments import KeyPassArguments
from tl_attention.kernels.bwd_load import KeyTileProducer, key_step
from tl_attention.kernels.bwd_order import OrderedBlocks
from tl_attention.kernels.bwd_round_packed import rounding_of
from tl_attention.kernels.bwd_shared import alloc_dv, alloc_key_rings, alloc_shared_tiles, stages_P
from tl_attention.kernels.bwd_store import BiasGradient, store_gradients
from tl_attention.kernels.bwd_warps import cuda_code, dq_warpgroup, further_warps, pass_roles
from tl_attention.kernels.dropout import Dropout
from tl_attention.kernels.input_parts import InputArguments, InputParts
from tl_attention.kernels.linear_bias import fill_bias_columns
from tl_attention.kernels.options import OptionArguments, option_arguments
from tl_attention.kernels.pipeline import alloc_fragments, share, sync_consumers, wait_for_stores
from tl_attention.kernels.roles import WARPGROUP
from tl_attention.kernels.softmax import LOG2E, SMALLEST_SCALE, indices, softmax_backward
from tl_attention.kernels.split_tile import split_tile
from tl_attention.kernels.tiles import DenseGradTiles, FragmentBlocks, PackedGradTiles, SplitGradTiles
from tl_attention.kernels.traced_arguments import traced_arguments
from tl_attention.part_configs import splits_keys, stores_key_parts
from tl_attention.problem import AttnProblem

PASS_CONFIGS = {
    **pipeline.PASS_CONFIGS,
    # Bounds checks are off: only Lse_log2, Delta, dQ_sum and the parts are accessed without TMA, and the caller pads them to whole tiles
    "tl.disable_safe_memory_legalize": True,
}


def flash_bwd(problem: AttnProblem, config: BwdPass) -> T.PrimFunc:
    """Build the kernel of a pass that computes dq+dk+dv, dk+dv, dk or dv. It does not write the other gradients.

    Kernel arguments (dtype: the problem's; packed sequences: layouts of tiles.PackedGradTiles):
        Q, dQ: [batch, seqlen_q, heads, columns <= head_dim], any strides but the last, which is 1.
        K, dK, V, dV: [batch, seqlen_k, heads_kv, columns <= head_dim or head_dim_v].
        dO: [batch, seqlen_q, heads, columns <= head_dim_v].
        Lse_log2, Delta: fp32 [batch, heads, seqlen_q rounded up], from bwd_delta.py.
        dQ_sum: fp32 FragmentBlocks of the matrices [batch, heads], width head_dim. The kernel adds to it.
            In fp32 dQ itself, if the pass computes it; 0 before the kernel. With one_tile dQ, which the kernel stores.
        dK_parts, dV_parts: fp32 FragmentBlocks of the matrices [parts, batch, heads_kv], widths head_dim and head_dim_v.
            Written instead of dK and dV if parts > 1, for packed sequences in fp32, and with the option `partial`.
            With the schedule split as tiles.SplitGradTiles has them.
        softmax_scale: fp32. heads_per_kv, .., ctas: int32, see KeyTileCounts.
        Tickets: int32 [2], zeros before and after the kernel. Not with the schedule grid.
        dQ, Progress_dq, sum_slots: see bwd_round_packed.rounding_of. Only where the pass rounds dQ.
        Turns: int32, one per row block of dQ_sum, 0 before. With the schedule ordered alone. whole: of KeyTileCounts, with split alone.
        K_parts, V_parts: bf16 parts of fp32 K and V, [batch, seqlen_k, heads_kv, parts * width]. The first of several passes writes them,
            and the others have them in the place of K and V. K and V of the first one are as in split_tile.py.
        left, .., Table: see options.OptionArguments. Only where the problem has options.
    """
    dtype_of, head_dim, head_dim_v = problem.dtype_of, problem.head_dim, problem.head_dim_v
    block_M, block_N, reuse = config.block_M, config.block_N, config.reuse_registers
    dS_in_P = reuse and config.order != "separate-dS"  # dS' takes the registers of P'
    early_dK, late_sums = config.order in ("early-dK", "apart"), config.order == "late-sums"
    two_slots, apart = config.order != "", config.dq_apart  # two slots of dS' in shared memory
    # Sums of diagonals, beside the next S'. In steps of 64 queries 6.26 ms, else 5.81 (d128, H200, 2026-11-23)
    adds_late = block_M == 128
    makes_dq, makes_dk, makes_dv = (grad in config.makes for grad in ("dq", "dk", "dv"))
    # fp32: each warpgroup adds dQ' = K' dS' of its keys to dQ itself, in the step that makes dS'
    makes_dq, makes_dqt = makes_dq and not problem.is_fp32, makes_dq and problem.is_fp32
    sums_dq = makes_dq and not apart  # the consumers compute dQ
    warpgroups, consumers = tuple(range(config.warpgroups)), WARPGROUP * config.warpgroups
    roles, rounds = pass_roles(problem, config), config.rounds(problem)
    row_wise, x_parts, products = T.GemmWarpPolicy.FullRow, problem.parts, problem.products
    dynamic, ordered, one_tile = config.is_dynamic, config.is_ordered, config.one_tile
    frees_V = config.has_dv_tile(problem) or problem.is_fp32  # dV leaves by another way than the tile of V
    dV_beside_dS = makes_dv and (config.one_sum or not dS_in_P)
    by_block = x_parts > 1 and not config.one_sum  # products are summed by block, see products.py
    scores_first, linear_bias = bwd_tiles.scores_come_first(problem, config), config.has_linear_bias(problem)
    v_dot = {"transpose_B": True, "clear_accum": True}  # dP' = V dO'
    k_qt = {**v_dot, "clear_accum": not linear_bias}  # S' = K Q'
    pieces = bwd_tiles.dq_pieces(block_M, head_dim, config.warpgroups)
    pass_dq_on = functools.partial(bwd_tiles.pass_dq_on, one_tile, pieces)
    sloped, varlen = problem.is_sloped, problem.has("varlen")
    prefetch_lse = bwd_scores.prefetches_lse(problem, config)
    # dV needs a P' of its own if dS' is made in registers of P' from another P': dV's has dropout, dS's the softcap's slope
    stage_P = stages_P(problem, config)
    separate_P = stage_P or (reuse and makes_dv and sloped)

    args = KeyPassArguments.of(problem, config)
    batch, heads, heads_kv, seqlen_q, seqlen_k = args.sizes
    extra = option_arguments(problem)
    fp32_inputs = InputArguments.of(batch, seqlen_q, heads, config.makes_parts)
    splits, stores_parts = splits_keys(problem, config.makes), stores_key_parts(problem, config.makes)
    Sums = OrderedBlocks if ordered else FragmentBlocks
    sum_cols = sum_columns(problem, config)
    dk_cols, dv_cols = (sum_cols if by_block else width for width in (head_dim, head_dim_v))  # per fragment

    def after_first(step, first, dq_row_block):  # step of a tile
        return dq_row_block >= 0 if dynamic and makes_dq else step > first

    @T.macro
    def compute_scores(w, step, head, scores, scale_log2, tile, shared, acc_s):
        """Issue S' = K Q', accumulated on the linear bias if there is one."""
        scores.start(tile.batch, head, scale_log2)
        scores.begin(acc_s, shared.bias_columns)
        fp32.multiply(products, shared.K.parts_of(w), shared.Q.parts_of(step), acc_s, **k_qt)

    @T.macro
    def compute_dp(w, step, shared, acc_dp):
        """Issue dP' = V dO'."""
        shared.dO.wait(step)
        fp32.multiply(products, shared.V.parts_of(w), shared.dO.parts_of(step), acc_dp, **v_dot)

    @T.macro
    def differentiate(w, number, turn, first, counts, tile, blocks, tiles, shared, softmax_scale, options):
        """Compute dK and dV of 64 keys, and their share of dQ of all query blocks that see the key tile."""
        key = tile.first_key + 64 * w
        scores = bwd_scores.scores_of(problem, config, options, softmax_scale, shared.staged)
        dropout = Dropout(problem, options, block_M, rows_are_keys=True)
        mask = bwd_tiles.KeyRowsMask(blocks.mask, key, relative=makes_dq and (varlen or apart))
        raw_scale = T.if_then_else(softmax_scale == 0, SMALLEST_SCALE, softmax_scale * LOG2E)
        scale_log2 = scores.not_too_small(raw_scale) if scores.raw else scores.scale_log2
        if not makes_dq:  # from one lane, so in a uniform register; with dq there are none to spare
            scale_log2 = T.shfl_sync(scale_log2, 0)
        last_read = shared.Q if makes_dk else shared.dO  # ring that the last GEMM of a step reads

        acc_s = T.alloc_fragment([64, block_M], "float32")  # S' [keys, queries], then P'
        P = T.alloc_fragment([64, block_M], dtype_of("p"))  # P' [keys, queries]
        P_for_dv = T.alloc_fragment([64, block_M], dtype_of("p")) if separate_P else P
        acc_dp = acc_s if reuse else T.alloc_fragment([64, block_M], "float32")  # dP' [keys, queries]
        dS = P if dS_in_P else T.alloc_fragment([64, block_M], dtype_of("ds"))  # dS' [keys, queries]
        P_parts = (P_for_dv, *fp32.alloc_further_parts([64, block_M], x_parts))
        dS_parts = (dS, *(P_parts[1:] if reuse else fp32.alloc_further_parts([64, block_M], x_parts)))
        acc_dk = T.alloc_fragment([64, dk_cols], "float32")
        acc_dv = T.alloc_fragment([64, dv_cols], "float32")
        dk_chunks = (acc_dk, *alloc_fragments([[64, dk_cols]] * (head_dim // dk_cols - 1), "float32"))
        dv_chunks = (acc_dv, *alloc_fragments([[64, dv_cols]] * (head_dim_v // dv_cols - 1), "float32"))
        sums = alloc_fragments([[64, sum_cols]] * (2 if sum_cols else 0), "float32")
        # dQ of the step before
        acc_dq = alloc_fragments([bwd_tiles.piece_shape(x) for x in pieces[w] if not apart], "float32")
        # dQ of the last step. In acc_dq, nvcc 13.0.88 serializes all wgmma of d64 that computes several tiles
        last_dq = alloc_fragments([x.shape for x in acc_dq], "float32") if dynamic else acc_dq
        lse_log2 = T.alloc_fragment([block_M], "float32")
        dq_row_block = T.alloc_var("int32", init=-1 if dynamic else 0)  # where in dQ_sum it goes
        before = 0 if problem.program is None else first  # steps of other tiles
        dbias = BiasGradient(makes_dq and problem.sends_dS, scores.traced, shared.dS, w, key, name="dbias")
        delta = T.alloc_fragment([block_M], "float32") if early_dK else None
        dS_place = T.alloc_var("int32", init=shared.dS.address(w)) if two_slots else w  # of this thread's dS'

        if dynamic:  # or nvcc keeps them from tile to tile: d128 causal spilled 16 bytes (nvcc 13.0.88)
            fp32.clear((*(acc_dq if sums_dq else ()), acc_s))
        for other in warpgroups if sums_dq else (w,):
            shared.K.wait(key_step(config, turn, other))
        if splits:
            split_tile(problem, w, shared.K, key_step(config, turn, w), tiles.k_parts(tile, key, 64))
        begin = first
        if w > 0 and bwd_tiles.skips_steps(problem, config):
            skipped = T.alloc_var("int32", init=T.shfl_sync(blocks.hidden_steps(key), 0))
            bwd_tiles.skip_steps(shared.Q, shared.dO, first, skipped, block_M)
            blocks.skip(skipped)
            begin = first + skipped
        if not scores_first:
            shared.Q.wait(begin)
            compute_scores(w, begin, blocks.head, scores, scale_log2, tile, shared, acc_s)
        scores.start_transposed(mask, blocks)
        T.wait_wgmma(0)  # with a GEMM in flight here, ptxas serializes all
        if makes_dk:
            if splits or not (dynamic and reuse):
                shared.V.wait(key_step(config, turn, w))
            if splits:
                split_tile(problem, w, shared.V, key_step(config, turn, w), tiles.v_parts(tile, key, 64))
            fp32.clear(dk_chunks)
        if makes_dv:
            fp32.clear(dv_chunks)

        for step in T.serial(begin, first + blocks.steps):
            if scores_first:  # S' = K Q'
                shared.Q.wait(step)
                compute_scores(w, step, blocks.head, scores, scale_log2, tile, shared, acc_s)
                if not dS_in_P:
                    T.wait_wgmma(2 * len(products))  # dV of the step before; dK and S' go on
                    if step > begin:
                        shared.dO.release(step - 1)
            if prefetch_lse:
                shared.Q.read_row_values(step, 0, lse_log2)
            dropout.start()
            dropout.draw(tile.batch * heads + blocks.head, blocks.query, key)
            # ptxas serializes all wgmma if S' is read while a GEMM is in flight that was issued in the step before
            T.wait_wgmma(0)  # S', and the last GEMM of the step before
            if after_first(step, begin, dq_row_block):
                last_read.release(step - 1)

            # Beside the exponential: dQ = dS K of the step before (of no use in step 0), or dP' = V dO'
            if sums_dq:
                if after_first(step, first, dq_row_block):
                    shared.dS.wait(step - 1)
                    dbias.store(step - 1)
                # step + 1 has the slot of step - 1
                bwd_tiles.multiply_pieces(pieces[w], warpgroups, step + 1, shared, acc_dq)
            if makes_dk and not reuse:
                compute_dp(w, step, shared, acc_dp)

            # P' = exp2(S' - lse)
            bwd_scores.exponentiate(
                problem,
                config,
                step - before,
                acc_s,
                P_for_dv,
                lambda j: lse_log2[j] if prefetch_lse else shared.Q.row_value(step, 0, j),
                blocks,
                mask,
                scores,
                scale_log2,
                softmax_scale,
            )
            if x_parts > 1:
                fp32.split_kept(acc_s, P_parts)
            else:
                if makes_dv and not (sloped and makes_dk):
                    T.copy(acc_s, P_for_dv)
                if reuse and (separate_P or not makes_dv):
                    T.copy(acc_s, P)
            if makes_dv:
                for n in indices(P_parts):
                    dropout.drop(P_parts[n])
                if stage_P:
                    share(w, (P_for_dv,), (shared.P[w],))

            # dP' = V dO', in the registers that S' had
            if dynamic and reuse and not splits:
                if dq_row_block < 0:
                    shared.V.wait(key_step(config, turn, w))
            if makes_dk and reuse:
                compute_dp(w, step, shared, acc_dp)
            elif makes_dk:
                T.wait_wgmma(0)  # dP'

            # dV += P' dO
            if makes_dv:
                if not makes_dk:
                    shared.dO.wait(step)
                if by_block:
                    dv_jobs = fp32.jobs(dv_chunks, P_parts, shared.dO, step)
                    fp32.start_jobs(products, dv_jobs, sums)
                    if dS_in_P:
                        fp32.continue_jobs(products, dv_jobs, sums, 2)
                        fp32.finish_jobs(products, dv_jobs, sums, 0)
                else:
                    P_operands = (shared.P[w],) if stage_P else P_parts
                    fp32.multiply(products, P_operands.__getitem__, shared.dO.parts_of(step), acc_dv)
            if not makes_dk:
                # Only after the GEMM of P', when every lane has read its log-sum-exps: an arrival overtakes reads in flight. Released
                # before, causal dv of d192 and d256 sometimes read those of a later step (H200, 2026-11-21)
                shared.Q.release(step)

            if early_dK:
                shared.Q.read_row_values(step, 1, delta)
            if sums_dq:
                T.wait_wgmma(2 if makes_dv else 1)  # dQ of the step before
                if after_first(step, first, dq_row_block):
                    dbias.wait()
                    shared.dS.release(step - 1)
                    if not late_sums:
                        shared.adding.wait(step - 1)
                        pass_dq_on(w, tiles, shared, dq_row_block, acc_dq, softmax_scale)
                        shared.adding.announce(step - 1)

            # dS' = P' * (dP' - Delta)
            if makes_dk:
                if reuse:  # dP'; and dV, whose P' gives its registers to dS'
                    T.wait_wgmma(len(products) if dV_beside_dS else 0)
                if not dV_beside_dS:
                    shared.dO.release(step)
                dropout.drop(acc_dp)
                dropout.scale_kept(acc_dp)
                if x_parts > 1:
                    P_whole = P_parts if reuse else (acc_s,)
                    fp32.replace_dp(P_whole, acc_dp, lambda j: shared.Q.row_value(step, 1, j))
                    if makes_dqt:
                        scores.learn_dS(acc_dp, blocks, True)
                    if dV_beside_dS and dS_in_P:
                        T.wait_wgmma(0)  # dV
                        shared.dO.release(step)
                    fp32.split_parts(acc_dp, dS_parts)
                else:
                    softmax_backward(
                        P if reuse else acc_s,
                        acc_dp,
                        lambda i, j: delta[j] if early_dK else shared.Q.row_value(step, 1, j),
                        dS,
                    )

            scores.fetch_next(mask, blocks, step - before)
            # dK += dS' Q, before or after dS' is shared
            if early_dK:
                T.wgmma_gemm(dS, shared.Q[step], acc_dk, policy=row_wise)
            if makes_dq:
                shared.dS.wait_empty(step)
                shared.dS.write(dS_place, step, dS)
                shared.dS.announce(step)
                scores.learn_dS(dS, blocks, not adds_late)
            if makes_dk and not early_dK and not by_block:
                fp32.multiply(products, dS_parts.__getitem__, shared.Q.parts_of(step), acc_dk)
            if x_parts > 1:
                started = dv_jobs if by_block and dV_beside_dS else ()
                dk_jobs = fp32.jobs(dk_chunks, dS_parts, shared.Q, step) if by_block and makes_dk else ()
                jobs = (*started, *dk_jobs)
                if makes_dqt:
                    share(w, dS_parts, shared.dS[w])
                    place = {"tile": tile, "head": blocks.head, "start": blocks.query}
                    add_dq = functools.partial(tiles.add_dq, **place, factor=softmax_scale)
                    jobs += fp32.transposed_jobs(head_dim, shared.K, w, shared.dS[w], add_dq)
                fp32.continue_jobs(products, jobs, sums, min(len(started), 2))

            # S' = K Q' of the next step. After the last one it may read a slot that is empty or being filled: nothing reads this S'
            if not scores_first:
                if step + 1 < first + blocks.steps:
                    shared.Q.wait(step + 1)
                next_head = T.min(blocks.next_head, heads - 1)
                compute_scores(w, step + 1, next_head, scores, scale_log2, tile, shared, acc_s)
            if adds_late:
                scores.add_learned(blocks)
            if x_parts > 1:
                fp32.finish_jobs(products, jobs, sums, len(products))
            if makes_dk and makes_dv and not dS_in_P and not scores_first:
                if not by_block:
                    T.wait_wgmma(3 if linear_bias else 2 * len(products))  # dV
                shared.dO.release(step)
            if late_sums:
                if after_first(step, first, dq_row_block):
                    shared.adding.wait(step - 1)
                    pass_dq_on(w, tiles, shared, dq_row_block, acc_dq, softmax_scale)
                    shared.adding.announce(step - 1)
            if makes_dq:
                dq_row_block = 0 if one_tile or apart else tiles.dq_row_block(tile, blocks.head, blocks.query)
            dbias.locate(blocks)
            scores.advance(mask, blocks)

        T.wait_wgmma(0)
        if stores_parts:
            wait_for_stores()
        if dynamic:
            last_read.release(first + blocks.steps - 1)
            if scores_first and not dS_in_P:
                shared.dO.release(first + blocks.steps - 1)
            if frees_V:
                shared.V.release(key_step(config, turn, w))
        if apart or (dynamic and problem.is_fp32):
            shared.K.release(key_step(config, turn, w))
        if sums_dq:
            shared.dS.wait(first + blocks.steps - 1)
            # Before the GEMM: after it nvcc 13.0.88 spills 150 bytes at d128
            shared.adding.wait(first + blocks.steps - 1)
            bwd_tiles.multiply_pieces(pieces[w], warpgroups, first + blocks.steps - 1, shared, last_dq)
            dbias.store(first + blocks.steps - 1)
            T.wait_wgmma(0)
            dbias.wait()
            shared.dS.release(first + blocks.steps - 1)
            if dynamic:
                for other in warpgroups:
                    shared.K.release(key_step(config, turn, other))
            pass_dq_on(w, tiles, shared, dq_row_block, last_dq, softmax_scale)
            shared.adding.announce(first + blocks.steps - 1)
            if not dynamic:
                sync_consumers(consumers)  # all warpgroups have read K
        # Locate the tile again, so that its position takes no registers during the loop
        if dynamic:
            shared.tile_box.read_tile(turn, tile)
            shared.tile_box.release(turn)
        else:
            tile.start(T.shfl_sync(number, 0), counts, blocks)
        key = tile.first_key + 64 * w
        store_gradients(
            problem, config, w, key, counts, tile, tiles, shared, softmax_scale, dropout, dk_chunks, dv_chunks
        )
        if dynamic and not frees_V:
            wait_for_stores()  # costs nothing: the next keys have not arrived either
            shared.V.release(key_step(config, turn, w))

    @T.macro
    def consume(w, number, order, counts, tiles, shared, softmax_scale, options):
        tile = bwd_tiles.KeyTile(order, block_N, split=config.is_split)
        blocks = query_blocks(problem, options, tile, seqlen_q, seqlen_k, block_M, block_N)
        if dynamic:
            fill_bias_columns(w, shared.bias_columns, consumers)
            turn = T.alloc_var("int32", init=0)
            first_step = T.alloc_var("int32", init=0)  # of the tile: ring steps continue from tile to tile
            shared.tile_box.wait(0)
            while not shared.tile_box.at_end(turn):
                shared.tile_box.read_tile(turn, tile)
                shared.tile_box.read_blocks(turn, blocks)
                differentiate(
                    w, number, turn, first_step, counts, tile, blocks, tiles, shared, softmax_scale, options
                )
                first_step += blocks.steps
                turn += 1
                shared.tile_box.wait(turn)
            if config.has_dv_tile(problem):
                wait_for_stores()  # shared memory must stay until TMA has read the last tile's dK and dV
        else:
            tile.start(number, counts, blocks)
            fill_bias_columns(w, shared.bias_columns, consumers)
            if tile.exists:
                differentiate(w, number, 0, 0, counts, tile, blocks, tiles, shared, softmax_scale, options)

    @T.prim_func
    def flash_bwd_kernel(
        Q: args.Q,
        K: args.K,
        V: args.V,
        dO: args.dO,
        Lse_log2: args.Lse_log2,
        Delta: args.Delta,
        dQ_sum: args.dQ_sum,
        dK: args.dK,
        dV: args.dV,
        dK_parts: args.dK_parts,
        dV_parts: args.dV_parts,
        softmax_scale: T.float32,
        heads_per_kv: T.int32,
        heads_per_part: T.int32,
        parts: T.int32,
        n_blocks: T.int32,
        group_heads: T.int32,
        ctas: T.int32,
        Tickets: args.Tickets,
        Turns: args.Turns,
        whole: T.int32 if config.is_split else False,
        dQ: args.dQ,
        Progress_dq: args.Progress_dq,
        sum_slots: T.int32 if rounds else False,
        K_parts: args.K_parts,
        V_parts: args.V_parts,
        left: extra.left,
        right: extra.right,
        softcap: extra.softcap,
        Slopes: extra.Slopes,
        Sink: extra.Sink,
        Rng: extra.Rng,
        drop_below: extra.drop_below,
        Table: extra.Table,
        Q_input: fp32_inputs.first,
        dO_input: fp32_inputs.second,
        Progress: fp32_inputs.Progress,
        tiles_ahead: fp32_inputs.tiles_ahead,
    ):
        traced = traced_arguments(problem)
        options = OptionArguments(left, right, softcap, Slopes, Sink, Rng, drop_below, Table, traced)
        counts = bwd_tiles.KeyTileCounts(
            heads_per_kv, heads_per_part, parts, n_blocks, group_heads, ctas, whole
        )
        with T.Kernel(ctas, threads=roles.block, prelude=cuda_code(problem, config, roles)) as number:
            K_shared, V_shared = alloc_key_rings(problem, config)
            # TileLang 0.1.15 names the tile of V after this variable
            dV_shared = alloc_dv(problem, config, K_shared, V_shared)
            inputs = InputParts(
                problem, (Q_input, Q), (dO_input, dO), Progress, config.part_stages, tiles_ahead
            )
            rounding, dq_sums = None, Sums(dQ_sum, args.rounded_q // 16)
            if rounds:
                sums = dQ_sum, Progress_dq, counts, heads_kv, sum_slots, args.rounded_q
                rounding = rounding_of(problem, config, dQ, *sums, Table if varlen else None)
                dq_sums = rounding.sums
            shared = alloc_shared_tiles(problem, config, K_shared, V_shared, dV_shared, inputs, rounding)
            order_heads = heads_kv * bwd_tiles.order_parts(config, counts)
            all_heads, table = (order_heads, Table) if varlen else (order_heads * batch, None)
            order = bwd_tiles.key_order(problem, config, counts, heads_kv, order_heads, all_heads, table)
            Tiles = PackedGradTiles if varlen else DenseGradTiles
            if config.is_split:
                Tiles = functools.partial(SplitGradTiles, counts=counts, block_N=block_N)
            tiles = Tiles(
                *(Q, K, V, dO, Lse_log2, Delta, head_dim, head_dim_v, x_parts, splits),
                *((K_parts, V_parts) if stores_parts else ()),
                dQ=dQ_sum if makes_dqt or one_tile else None,
                dQ_sum=None if one_tile else dq_sums,
                dK=dK,
                dV=dV,
                dK_parts=FragmentBlocks(dK_parts, bwd_tiles.part_blocks(config, counts)),
                dV_parts=FragmentBlocks(dV_parts, bwd_tiles.part_blocks(config, counts)),
            )
            producer = KeyTileProducer(
                problem, config, order, counts, (seqlen_q, seqlen_k), tiles, shared, options, Tickets
            )
            roles.run(
                lambda: producer.produce(number),
                lambda w: consume(w, number, order, counts, tiles, shared, softmax_scale, options),
                apart=dq_warpgroup(producer),
                **further_warps(producer, number, Turns, softmax_scale),
            )

    return flash_bwd_kernel
