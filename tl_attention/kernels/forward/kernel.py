"""FlashAttention forward for Hopper: O = softmax(scale * Q Kᵀ + mask) V and its log-sum-exp, in one pass over the keys.

Dao 2023 (FlashAttention-2, alg. 1) in the schedule of Shah et al. 2024 (FlashAttention-3). One producer warp feeds rings of K and V
tiles by TMA. Each consumer warpgroup owns 64 queries and keeps two products in flight: S = Q Kᵀ of one key block beside O += P V of
the step before. Steps go from the last key block to the first. See mask.NearFirstKeyBlocks and block_lists.py for other orders.

attend() has the algorithm; load() is the producer's side.

hold_max: once each row has seen a key, its row max is held, which saves the search for it and the rescale of O. A tile whose row sums then
overflow is computed a second time, with an updated row max: RowMax.check() reports it, and TileStream.find_overflow() of the producer puts
it back in the stream of tiles.

    step        from 0, the last key block, to the first key block that a tile needs
    share       the key blocks of one CTA of a split
    piece       the key blocks of one CTA of a tile that the schedule stream-K shares
    turn        number of a tile in its CTA
    first_step  first step of a tile in the rings of K and V, whose steps are counted through all tiles of a CTA
    q_step      step of the ring of Q: one per tile and warpgroup
    query       the first of 64 queries
"""

from dataclasses import dataclass, replace
from typing import Any

import tilelang.language as T

from tl_attention.config import query_tiles
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.config.term_configs import MAKERS
from tl_attention.kernels.cuda import source
from tl_attention.kernels.forward import assist_warp
from tl_attention.kernels.forward.hidden_steps import FirstSteps, LastSteps, NoSteps
from tl_attention.kernels.forward.results import MaxArguments, Results, results_of, store_code
from tl_attention.kernels.forward.row_max import RowMax
from tl_attention.kernels.fp32.input_terms import MAKE_TERMS, InputArguments, InputTerms
from tl_attention.kernels.scores.dropout import Dropout
from tl_attention.kernels.scores.linear_bias import alloc_bias_columns, fill_bias_columns
from tl_attention.kernels.scores.mask import LAST_BLOCK, Mask
from tl_attention.kernels.scores.options import OptionArguments, option_arguments, prelude
from tl_attention.kernels.scores.score_mod import ForwardScores, has_two_sides, near_keys_first
from tl_attention.kernels.scores.softcap import PolynomialCap
from tl_attention.kernels.scores.staged import alloc_staged
from tl_attention.kernels.scores.traced_arguments import traced_arguments
from tl_attention.kernels.seams import pipeline
from tl_attention.kernels.seams.arguments import declare
from tl_attention.kernels.seams.pipeline import (
    PingPong,
    alloc_fragments,
    indices,
    input_ring,
    wait_for_stores,
)
from tl_attention.kernels.seams.products import CHUNK, OutputTiles, alloc_further_terms, multiply, round_P
from tl_attention.kernels.seams.roles import WARPGROUP, Roles
from tl_attention.kernels.seams.scheduler import OneTile, Overflows, Tile, TileBox, TileCounts, TileOrder
from tl_attention.kernels.seams.softmax import LAZY_GROWTH, OnlineSoftmax
from tl_attention.kernels.sources.block_lists import key_blocks
from tl_attention.kernels.sources.pages import page_arguments, paged_loads
from tl_attention.kernels.sources.shared_tiles import PIECES, PieceArguments, SharedPieces, stream_of
from tl_attention.kernels.sources.tiles import DenseTiles, SmemTiles, input_arguments
from tl_attention.problem.attn_problem import TABLE_ROWS, AttnProblem

PASS_CONFIGS = pipeline.PASS_CONFIGS


@dataclass(frozen=True)
class Cta:
    """Arguments and shared memory of a CTA, for all its tiles.

    lse_unit: ln 2 for a natural lse, 1 for base 2.
    max_tiles: `tiles` with MaxLogits in place of Lse, so that store_lse() stores the largest scores; None where they are not stored.
    """

    tiles: DenseTiles
    smem: SmemTiles
    options: OptionArguments
    softmax_scale: Any
    lse_unit: Any
    max_tiles: DenseTiles | None = None


def flash_fwd(problem: AttnProblem, config: FwdConfig) -> T.PrimFunc:
    """Forward kernel(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, heads_per_kv, m_blocks, group_heads, ctas).

    Args of the kernel:
        Q, K, V, O: views [batch, seqlen, heads, columns] with at most as many columns as the problem's tile widths, and not empty, as
            TMA takes no empty tensor. varlen: see tiles.PackedTiles.
            fp32: K, V are bf16 terms, [batch, seqlen, heads, terms * width], from terms.py; Q as in split_tile.py; O is fp32.
        Lse: fp32 [batch, heads, seqlen_q], lse_unit * log2(sum of exponentials). A row without keys has O = 0, Lse = -inf.
        Tickets: int32 [2], tiles drawn and CTAs done, zeros before and after the kernel; with the schedule stream-K [sms], 2 + ctas or
            more, see shared_tiles.py.
        heads_per_kv, m_blocks, group_heads, ctas: see scheduler.TileCounts.
    Then, each group where the problem or the config asks for it, the fields of
        options.OptionArguments: of options.
        pages.CachePages: config.page_rows, keys are in pages whose size is a multiple of it, see tiles.PagedKeys.
        shared_tiles.PieceArguments: schedule stream-K.
        input_terms.InputArguments: config.makes_terms. K and V already hold the bf16 terms of the first heads; the kernel makes the others.
        traced_arguments.TracedArguments: of a traced score_mod or mask_mod.
        results.MaxArguments: config.max_logits. MaxLogits, in the shape of Lse, gets the largest score of each query, natural, -inf without
            keys.
    config.split: `splits` CTAs share a tile; each attends to its share of the key blocks and writes partial O and Lse, which
        combine.py merges: O [splits, batch, heads, seqlen_q, head_dim_v], Lse [splits, batch, heads, seqlen_q], fp32 and base 2;
        varlen: see tiles.PackedSplitTiles. An empty share has O = 0, Lse = -inf.
    option `added`: O (fp32) and Lse hold the result of other keys, and the kernel merges its own into it: see results.add_stored.
    """
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    block_M, block_N, q_stages = config.block_M, config.block_N, config.q_stages
    hold_max, split, varlen = config.hold_max, config.split, problem.has("varlen")
    consumer_warps = 4 * config.warpgroups
    # fp32: bf16 terms of a number, and the pairs of terms that are multiplied, a wgmma group each. In 16 bits: one term and one pair
    terms, products, makes_terms = problem.terms, problem.products, config.makes_terms
    persistent = config.schedule != "grid"  # any other schedule: a CTA computes several tiles
    shares_tiles = config.schedule == "stream-K"  # and CTAs share some of them, see shared_tiles.py
    registers = pipeline.forward_registers(problem, config)
    roles = Roles(config.warpgroups, config.threads, registers, one_body=not problem.has("dropout"))
    two_producers = config.page_rows > 0  # one warp cannot issue all instructions of the loads in time
    o_cols = CHUNK if terms > 1 else head_dim_v  # columns per tile of O in registers, see OutputTiles
    ping_pong = PingPong(config.warpgroups, config.ping_pong)
    skips_first_steps = query_tiles.hides_steps(problem, config)
    skips_last_steps = query_tiles.hides_last_steps(problem, config)
    # Whether a warpgroup that skips steps counts its own masked steps: see KeyBlocks.keep_queries()
    gains_by_count = problem.has("window") or (head_dim <= 64 and config.warpgroups == 3)
    counts_own_steps = skips_first_steps and gains_by_count

    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    columns_qk, columns_v = T.dynamic("columns_qk, columns_v")
    lengths, columns = (seqlen_q, heads, seqlen_k, heads_kv), (columns_qk, columns_v)
    q_view, k_view, v_view, _do_view = input_arguments(problem, batch, *lengths, *columns, raw_fp32=("q",))
    results = results_of(problem, config, batch, heads, seqlen_q, columns_v)
    slots, splits, o_view, lse_view = results.slots, results.splits, results.O, results.Lse
    tickets_view = T.Tensor([T.dynamic("sms") if shares_tiles else 2], "int32")
    option_types, page_types = option_arguments(problem), page_arguments(config.page_rows > 0)
    piece_types = PieceArguments.of(problem, config)
    input_types = InputArguments.of(batch, seqlen_k, heads_kv, makes_terms)

    def blocks_of(options: OptionArguments, mask: Mask, tile: Tile) -> Any:
        """Key blocks of a tile."""
        arguments = problem, options, mask, tile, block_M, block_N
        near_first = near_keys_first(problem, config)
        return key_blocks(*arguments, split=split, held=hold_max, shares=shares_tiles, near_first=near_first)

    @T.macro
    def load(tile, turn, first_step, blocks, tiles, smem, stream):
        """Load Q of a tile, and K and V of its steps: K of a step, then V of the one before, as the consumers need them."""
        first_query = tiles.first_query(tile, block_M)
        blocks.start(first_query)
        if split:
            blocks.keep_share(tile.split, splits)
        if shares_tiles:
            stream.keep_piece(blocks)
        if makes_terms:
            smem.inputs.wait(tile.batch, tile.kv_head)
        tiles.load_k(smem.K, first_step, tile, blocks, 0)
        slots.load(turn, tile, first_query, tiles, smem.Q)
        if hold_max:
            smem.overflows.begin(turn, stream.recomputes)
        if persistent:
            # Once Q has a slot: then consumers have freed Q of an earlier turn, and before that read the box of two turns before
            smem.tile_box.post(turn, tile, first_step, blocks)
        if two_producers:  # assist_warp.produce_values() loads V
            stream.draw_near_end(turn, 0, blocks.steps)
            for step in assist_warp.loop_over(config, 1, blocks.steps):
                stream.draw_near_end(turn, step, blocks.steps)
                tiles.load_k(smem.K, first_step + step, tile, blocks, step)
        else:
            for step in assist_warp.loop_over(config, 1, blocks.steps):
                tiles.load_k(smem.K, first_step + step, tile, blocks, step)
                tiles.load_v(smem.V, first_step + step - 1, tile, blocks, step - 1)
                # q_stages 1.5: Q of warpgroup 1 goes into the slot that warpgroup 0 frees once it has begun this tile, so it comes after
                # K of step 1 and V of step 0, or after K of step 0 where that is the only step
                slots.load_late(step == 1, turn, tile, first_query, tiles, smem.Q)
            slots.load_late(blocks.steps == 1, turn, tile, first_query, tiles, smem.Q)
            stream.draw(turn)  # the number of the next tile, which is there when advance() needs it
            last = blocks.steps - 1
            tiles.load_v(smem.V, first_step + last, tile, blocks, last)

    def assist(first_tile, ctas, order, cta):
        """Function that the warps beside the producer run; None: they have no work."""
        followed = assist_warp.Followed(problem, config, (seqlen_q, seqlen_k), splits, first_tile, order, cta)
        if two_producers:
            return lambda: assist_warp.produce_values(followed)
        if makes_terms:
            return lambda: cta.smem.inputs.make_share(first_tile, ctas)
        return None

    @T.macro
    def produce(first_tile, order, ctas, tickets, cta):
        """Load the tiles of a CTA, in the producer warp."""
        tiles, smem = cta.tiles, cta.smem
        tile = Tile(order, loads_keys=True)
        mask = Mask.of(problem, cta.options, tile, seqlen_q, seqlen_k)
        blocks = blocks_of(cta.options, mask, tile)
        if persistent:
            stream = stream_of(config, smem, first_tile, order, ctas, tickets, seqlen_k, blocks)
            if shares_tiles:
                stream.start()
            turn = T.alloc_var("int32", init=0)
            first_step = T.alloc_var("int32", init=0)
            while stream.has_next:
                stream.locate(turn, tile)
                if tile.exists:
                    load(tile, turn, first_step, blocks, tiles, smem, stream)
                    stream.advance(turn)
                    turn += 1
                    first_step += blocks.steps
                else:  # packed sequences: the launch counts more tiles than the table has, and the missing ones end a group of heads
                    stream.skip_to(tile.group_end)
                stream.find_overflow(turn)
            slots.wait_until_read(turn, smem.Q)  # then the box has a free slot
            smem.tile_box.close(turn)
            stream.close()
        else:
            tile.locate(first_tile)
            if tile.exists:
                load(tile, 0, 0, blocks, tiles, smem, OneTile())

    @T.macro
    def start_scores(w, q_step, step, block, smem, scores, acc_s):
        """Issue S = Q Kᵀ of a key block."""
        smem.K.wait(step)
        ping_pong.wait(w)
        scores.begin(acc_s, block)
        q_kt = {"transpose_B": True, "clear_accum": scores.clears}
        multiply(products, smem.Q.terms_of(q_step), smem.K.terms_of(step), acc_s, **q_kt)

    @T.macro
    def attend(w, tile, turn, first_step, blocks, cta):
        """Compute O and Lse of 64 queries of a tile, and store them."""
        tiles, smem, softmax_scale = cta.tiles, cta.smem, cta.softmax_scale
        # Not 0: the row max is updated in each step, as the tile is computed a second time or is a piece
        recomputes = smem.overflows.recomputes(turn) if hold_max else None
        acc_s = T.alloc_fragment([64, block_N], "float32")  # scores, then their exponentials
        P = T.alloc_fragment([64, block_N], problem.dtype_of("p"))
        P_terms = (P, *alloc_further_terms([64, block_N], terms))
        acc_o = T.alloc_fragment([64, o_cols], "float32")
        O_chunks = (acc_o, *alloc_fragments([[64, o_cols]] * (head_dim_v // o_cols - 1), "float32"))
        # fp32: P V of one key block. In 16 bits it is O itself
        acc_pv = alloc_fragments([[64, o_cols]], "float32") if terms > 1 else (acc_o,)
        output = OutputTiles(products, O_chunks, acc_pv[0])
        lse = T.alloc_fragment([64], "float32")
        scores = ForwardScores(problem, config, cta.options, softmax_scale, smem)
        dropout = Dropout(problem, cta.options, block_N)
        scale_log2 = scores.scale_log2
        # Steps that hold the row max add P to the sums of all steps, without a sum of the block. Causal d64 at 4k 517 -> 505 us; d128 is
        # not faster with it (bf16, H200, 2026-11-27)
        sums_directly = head_dim <= 64 and terms == 1
        softmax = OnlineSoftmax(
            block_N,
            scale_log2,
            LAZY_GROWTH,
            may_hold_zero=scores.may_hold_zero,
            sums_directly=sums_directly,
            rounds_alike=config.batch_invariant,
            keeps_largest=config.max_logits,
        )
        row_max = RowMax(softmax, hold_max, scores.polynomial_cap(blocks), smem.overflows, recomputes)
        query = tiles.first_query(tile, block_M) + slots.first_row(w)
        q_step = turn * config.warpgroups + w
        softmax.reset()
        scores.start(tile, query, blocks, scale_log2)
        dropout.start()
        # Steps whose keys none of the 64 queries sees. They are left out of first_step and blocks
        hidden_first = FirstSteps(blocks.hidden_steps(query + 63)) if skips_first_steps else NoSteps()
        hidden_first.skip(w, smem.K, ping_pong, first_step, blocks)
        first_step = hidden_first.after(first_step)
        hidden_last = LastSteps(blocks.hidden_last_steps(query)) if skips_last_steps else NoSteps()
        hidden_last.skip(blocks)
        if counts_own_steps:
            blocks.keep_queries(query)
        slots.wait_for_queries(problem, w, q_step, smem.Q, softmax_scale, scores.raw)

        # S = Q Kᵀ and softmax of step 0
        block = blocks.at(0, LAST_BLOCK)
        start_scores(w, q_step, first_step, block, smem, scores, acc_s)
        ping_pong.pass_on(w)
        dropout.draw(tile.batch * heads + tile.head, query, block.first_key)
        scores.look_up(query, block)
        slots.free_previous(turn, q_step, smem.Q)  # O of the tile before has left its slot
        output.clear()
        T.wait_wgmma(0)
        smem.K.release(first_step)
        slots.free_after_scores(blocks.steps == 1, q_step, smem.Q)
        scores.apply(acc_s, query, block)
        softmax.update(acc_s, scores.shift(query, block))  # O is 0, so it needs no rescale
        row_max.after_first_step(w, acc_s, blocks.steps)
        round_P(acc_s, P_terms, dropout)

        # Not before S of step 0: the producer loads V of the last hidden step after K of step 0
        hidden_first.release_values(smem.V, first_step)

        # S = Q Kᵀ and softmax of each further step, beside O += P V of the step before it
        # One loop per kind of masking, with the row max updated or held
        for loop in row_max.ranges(blocks):
            # From 0: a start in a variable would keep the ring index out of uniform registers, 32 R2UR per step at d128
            for i in T.serial(loop.count):
                step = loop.step_range.first + i
                block = blocks.at(step, loop.step_range)
                start_scores(w, q_step, first_step + step, block, smem, scores, acc_s)
                smem.V.wait(first_step + step - 1)
                output.start(P_terms, smem.V, first_step + step - 1)
                ping_pong.pass_on(w)
                dropout.draw(tile.batch * heads + tile.head, query, block.first_key)
                scores.look_up(query, block)
                T.wait_wgmma(len(products))  # S is complete; the groups of O += P V stay in flight
                smem.K.release(first_step + step)
                slots.free_after_scores(step == blocks.steps - 1, q_step, smem.Q)
                scores.apply(acc_s, query, block, at_zero=loop.at_zero)
                softmax.update(acc_s, scores.shift(query, block), loop.update, loop.at_zero)
                output.finish(P_terms, smem.V, first_step + step - 1)  # O is complete, and P free
                smem.V.release(first_step + step - 1)
                round_P(acc_s, P_terms, dropout)
                # O, with the P V just added, is relative to the row max before this step
                if loop.update:
                    softmax.rescale(output.chunks)

        # O += P V of the last step beside the row sums
        last = blocks.steps - 1
        smem.V.wait(first_step + last)
        output.start(P_terms, smem.V, first_step + last)
        # Read the tile's position again, so that it takes no registers in the loop. Once Q is freed the box may be refilled
        if persistent:
            smem.tile_box.read_tile(turn, tile)
        if shares_tiles:
            blocks.read_partners(turn, smem.tile_box)
        slots.free_after_steps(q_step, smem.Q)
        row_max.check(turn)
        # Lse of a piece is in base 2: SharedPieces.merge() applies the unit
        softmax.finish(lse, 1.0 if shares_tiles else cta.lse_unit, scores.sink(tile))
        query = tiles.first_query(tile, block_M) + slots.first_row(w)
        if results.lse_is_final:
            tiles.store_lse(lse, tile, query)
        if config.max_logits:
            softmax.finish_largest()
            cta.max_tiles.store_lse(softmax.largest, tile, query)
        output.finish(P_terms, smem.V, first_step + last)
        smem.V.release(first_step + last)
        hidden_last.release(w, smem.K, smem.V, ping_pong, first_step + blocks.steps)
        softmax.scale_rows(output.chunks)  # O /= row sums
        for n in indices(output.chunks):
            dropout.scale_kept(output.chunks[n])

        row_max.wait_for_first_result()
        results.store(w, q_step, tile, query, blocks, cta, output.chunks, lse)

    @T.macro
    def consume(w, first_tile, order, cta):
        """Compute the tiles of a CTA, in warpgroup w: 64 queries of each."""
        tiles, smem = cta.tiles, cta.smem
        tile = Tile(order)
        mask = Mask.of(problem, cta.options, tile, seqlen_q, seqlen_k)
        blocks = blocks_of(cta.options, mask, tile)
        ping_pong.start(w)
        fill_bias_columns(w, smem.bias_columns, WARPGROUP * config.warpgroups)
        if persistent:
            smem.tile_box.each_posted(
                tile, blocks, lambda turn, first_step: attend(w, tile, turn, first_step, blocks, cta)
            )
        else:
            tile.locate(first_tile)
            if tile.exists:
                # Count the blocks as load() does
                blocks.start(tiles.first_query(tile, block_M))
                if split:
                    blocks.keep_share(tile.split, splits)
                attend(w, tile, 0, 0, blocks, cta)
        wait_for_stores()

    @T.prim_func
    def flash_fwd_kernel(
        Q: q_view,
        K: k_view,
        V: v_view,
        O: o_view,
        Lse: lse_view,
        Tickets: tickets_view,
        softmax_scale: T.float32,
        lse_unit: T.float32,
        heads_per_kv: T.int32,
        m_blocks: T.int32,
        group_heads: T.int32,
        ctas: T.int32,
    ):
        options = declare(option_types)
        pages = declare(page_types, Table="PageTable", stride_k="page_stride_k", stride_v="page_stride_v")
        pieces = declare(piece_types)
        inputs = declare(input_types, first="K_input", second="V_input")
        options = replace(options, traced=traced_arguments(problem, hold_max))
        maxima = declare(MaxArguments(results.MaxLogits))
        code = prelude(problem, roles, cuda_code(problem, config, results))
        with T.Kernel(ctas, threads=roles.block, prelude=code) as first_tile:
            # [slots, queries]: 1.5 stages of two warpgroups are 3 slots. The 4 warps of a warpgroup read a slot
            q_shape = [int(q_stages * config.warpgroups), 64]
            smem = SmemTiles(
                Q=input_ring(problem, "Q", q_shape, head_dim, 4, raw_fp32=True),
                K=input_ring(problem, "K", [config.kv_stages, block_N], head_dim, consumer_warps),
                V=input_ring(problem, "V", [config.kv_stages, block_N], head_dim_v, consumer_warps),
                O=None
                if slots.holds_output or results.from_registers
                else pipeline.alloc_swizzled([config.warpgroups, 64, head_dim_v], problem.dtype_of("o")),
                # padded: space for a fifth step count, which causal stream-K posts
                tile_box=TileBox(varlen, padded=shares_tiles and problem.causal) if persistent else None,
                bias_columns=alloc_bias_columns(problem, block_N, has_two_sides(problem, config)),
                overflows=Overflows(consumer_warps) if hold_max else None,
                staged=alloc_staged(problem, consumer_warps, block_N),
                pieces=SharedPieces.of(config, pieces, Tickets) if shares_tiles else None,
                inputs=InputTerms.of(problem, inputs, (K, V), config.term_stages) if makes_terms else None,
            )
            counts = TileCounts(heads_per_kv, m_blocks, group_heads, ctas)
            # Sliding windows are usually causal, so their tiles are scheduled like causal ones. Stream-K numbers tiles by queries
            longest_first = (problem.is_uneven or problem.has("window")) and not shares_tiles
            all_heads, table = (heads, options.Table) if varlen else (heads * batch, None)
            order = TileOrder.of_queries(
                counts, longest_first, heads, all_heads, splits, table, TABLE_ROWS // block_M
            )
            loads = paged_loads(problem, config, K, V, pages)
            tiles = results.Tiles(Q, K, V, O, Lse, head_dim, head_dim_v, terms, *loads)
            max_tiles = replace(tiles, Lse=maxima.MaxLogits) if config.max_logits else None
            cta = Cta(tiles, smem, options, softmax_scale, lse_unit, max_tiles)
            roles.run(
                lambda: produce(first_tile, order, ctas, Tickets, cta),
                lambda w: consume(w, first_tile, order, cta),
                assist(first_tile, ctas, order, cta),
                assist_warps=MAKERS if makes_terms else 1,
            )

    return flash_fwd_kernel


def cuda_code(problem: AttnProblem, config: FwdConfig, results: Results) -> str:
    """CUDA that the parts of a forward need."""
    code = PIECES if config.schedule == "stream-K" else MAKE_TERMS if config.makes_terms else ""
    if PolynomialCap.serves(problem, config):
        code += source("any_of_warpgroup")
    code += store_code(problem.head_dim_v, results.from_registers)
    return code + source("split_tile") if problem.terms > 1 else code
