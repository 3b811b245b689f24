"""FlashAttention backward for Hopper, by keys: dK, dV of a key block and its share of dQ, in one loop over the query blocks.

Dao 2023 (FlashAttention-2, algorithm 2), in the schedule of Shah et al. 2024 (FlashAttention-3). A prime is a transpose. Scores are
computed as S' = K Q': P' and dS' are then in registers as operands of dV += P' dO and dK += dS' Q. Each consumer warpgroup owns 64 keys.
The producer warp fills rings of Q and dO tiles by TMA. differentiate() has the algorithm, and product_orders.py the steps of its loop.

dQ of a step takes dS' of all warpgroups, from shared memory. With order "apart" a warpgroup without keys computes it, and TMA adds it to
sums in global memory (dq_sinks/apart.py); else the consumers compute it in the next step, and add it from registers (dq_before.py).
delta.py computes Lse_log2 and Delta first; sum.py converts dQ_sum to dQ at the end, or warps of the pass do (dq_sinks/round.py). In fp32
each warpgroup adds dQ' = K' dS' of its keys to dQ itself. Where one tile has all keys of a head, dQ of a step is whole and is stored
(dq_sinks/one_tile.py).

One pass makes all gradients where registers hold dK and dV together, and dQ may be added in any order or in that of the schedule ordered.
Else there are several passes, each for one or two gradients. Each pass computes S'.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.config.term_configs import MAKERS, splits_keys, stores_key_terms
from tl_attention.kernels.backward import key_tiles
from tl_attention.kernels.backward.dq_sinks.apart import add_dq
from tl_attention.kernels.backward.dq_sinks.round import BLOCKS_WITH_ROWS, rounding_code
from tl_attention.kernels.backward.dq_sinks.round_packed import ALL_BLOCKS
from tl_attention.kernels.backward.dq_sinks.sink import alloc_dq_sink, rounding_of
from tl_attention.kernels.backward.load import KeyTileProducer
from tl_attention.kernels.backward.passes import KeyPass
from tl_attention.kernels.backward.product_orders import step_body_of
from tl_attention.kernels.backward.smem import alloc_dv, alloc_key_rings, alloc_smem_tiles
from tl_attention.kernels.backward.step import Cta, Elements, KeyStep
from tl_attention.kernels.backward.store import store_gradients
from tl_attention.kernels.cuda import source
from tl_attention.kernels.fp32.input_terms import MAKE_TERMS, InputArguments, InputTerms
from tl_attention.kernels.scores.dropout import Dropout
from tl_attention.kernels.scores.linear_bias import fill_bias_columns
from tl_attention.kernels.scores.options import option_arguments, prelude
from tl_attention.kernels.scores.traced_arguments import traced_arguments
from tl_attention.kernels.seams import pipeline
from tl_attention.kernels.seams.arguments import declare
from tl_attention.kernels.seams.pipeline import APART_REGISTERS, FOUR_WARPS_REGISTERS, wait_for_stores
from tl_attention.kernels.seams.roles import WARPGROUP, Roles
from tl_attention.kernels.seams.softmax import LOG2E, SMALLEST_SCALE
from tl_attention.kernels.sources.block_lists import query_blocks
from tl_attention.kernels.sources.tiles import (
    DenseGradTiles,
    FragmentBlocks,
    PackedGradTiles,
    StreamKGradTiles,
    dq_sum_argument,
    input_arguments,
    rows_argument,
)
from tl_attention.problem.attn_problem import AttnProblem

PASS_CONFIGS = {
    **pipeline.PASS_CONFIGS,
    # Bounds checks are off: only Lse_log2, Delta, dQ_sum and the terms are accessed without TMA, and the caller pads them to whole tiles
    "tl.disable_safe_memory_legalize": True,
}


def flash_bwd(problem: AttnProblem, config: BwdPass) -> T.PrimFunc:
    """Build the kernel of a pass that computes dq+dk+dv, dk+dv, dk or dv. It does not write the other gradients.

    Kernel arguments (dtype: the problem's; packed sequences: layouts of tiles.PackedGradTiles):
        Q: [batch, seqlen_q, heads, columns <= head_dim], any strides but the last, which is 1.
        K, V: [batch, seqlen_k, heads_kv, columns <= head_dim or head_dim_v].
            fp32: as in split_tile.py in the first pass, which has dk; bf16 terms in the passes after it.
        dO: [batch, seqlen_q, heads, columns <= head_dim_v].
        Lse_log2, Delta: fp32 [batch, heads, seqlen_q rounded up], from delta.py.
        dQ_sum: fp32 FragmentBlocks of the matrices [batch, heads], width head_dim. The kernel adds to it.
            In fp32 dQ itself, if the pass computes it; 0 before the kernel. With one_tile dQ, which the kernel stores.
        dK, dV: [batch, seqlen_k, heads_kv, columns <= head_dim or head_dim_v].
        dK_parts, dV_parts: partials, fp32 FragmentBlocks of the matrices [parts, batch, heads_kv], widths head_dim and head_dim_v.
            Written instead of dK and dV if parts > 1, for packed sequences in fp32, and with the option `partial`.
            With the schedule stream-K as tiles.StreamKGradTiles has them.
        softmax_scale: fp32.
        heads_per_kv, heads_per_part, parts, n_blocks, group_heads, ctas: int32, see KeyTileCounts; parts: CTAs that share a tile.
    The others are False in a kernel that lacks them:
        Tickets: int32 [2], zeros before and after the kernel. With every schedule but grid.
        Turns: whose turn it is to add to dQ. int32, one per row block of dQ_sum, 0 before, see dq_sinks/order.py. Only with the schedule
            ordered.
        whole: int32, of KeyTileCounts. Only with the schedule stream-K.
        dQ, Progress_dq, sum_slots: see sink.rounding_of. Only where the pass rounds dQ.
        K_parts, V_parts: bf16 terms, not partials, of fp32 K and V, [batch, seqlen_k, heads_kv, terms * width]. The first of several
            passes writes them.
    Then the fields of
        options.OptionArguments: of options.
        input_terms.InputArguments: config.makes_terms.
        traced_arguments.TracedArguments: of a traced score_mod or mask_mod.
    """
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    block_M, block_N = config.block_M, config.block_N
    persistent = config.is_persistent  # a CTA computes several tiles
    key_pass, varlen = KeyPass(problem, config), problem.has("varlen")
    consumers = WARPGROUP * config.warpgroups
    roles, rounds = pass_roles(problem, config), config.rounds(problem)
    scores_first, step_body = key_tiles.scores_come_first(problem, config), step_body_of(key_pass)

    args = KeyPassArguments.of(problem, config)
    batch, heads, heads_kv, seqlen_q, seqlen_k = args.sizes
    option_types = option_arguments(problem)
    input_types = InputArguments.of(batch, seqlen_q, heads, config.makes_terms)

    @T.macro
    def differentiate(w, number, turn, first_step, tile, blocks, cta):
        """Compute dK and dV of 64 keys, and their share of dQ of all query blocks that see the key tile.

        number: of the tile, if it is the CTA's only one. turn: number of the tile in its CTA. first_step: its first step, as steps are
            counted through all tiles of a CTA.
        """
        smem, softmax_scale = cta.smem, cta.softmax_scale
        key = tile.first_key + 64 * w
        scores = key_pass.scores(cta.options, softmax_scale, smem.staged)
        dropout = Dropout(problem, cta.options, block_M, rows_are_keys=True)
        relative = key_pass.shares_dS and (varlen or config.dq_apart)
        mask = key_tiles.KeyRowsMask(blocks.mask, key, relative=relative)
        # softmax_scale * log2(e). A scale of 0 is replaced, as -inf * 0 is NaN
        raw_scale = T.if_then_else(softmax_scale == 0, SMALLEST_SCALE, softmax_scale * LOG2E)
        scale_log2 = scores.not_too_small(raw_scale) if scores.raw else scores.scale_log2
        if not key_pass.shares_dS:  # into a uniform register, of which passes with dQ have none to spare
            scale_log2 = T.shfl_sync(scale_log2, 0)
        elements = Elements(scores, dropout, mask, scale_log2)
        step = KeyStep(key_pass, w, key, turn, first_step, tile, blocks, elements, cta, name="step")

        step.wait_for_keys()
        begin = first_step  # first step of this warpgroup: a causal mask may hide its 64 keys from the first queries
        if w > 0 and key_tiles.skips_steps(problem, config):
            skipped = T.alloc_var("int32", init=T.shfl_sync(blocks.hidden_steps(key), 0))
            key_tiles.skip_steps(smem.Q, smem.dO, first_step, skipped, block_M)
            blocks.skip(skipped)
            begin = first_step + skipped
        if not scores_first:  # issue S' of the first step; each step issues that of the next one
            smem.Q.wait(begin)
            step.start_scores(begin, blocks.head)
        scores.start_transposed(mask, blocks)
        T.wait_wgmma(0)  # with a GEMM in flight here, ptxas serializes all
        step.wait_for_values()  # and clear dK and dV

        # For example, order "apart" at d128: compute P', issue dP' and dV, compute dS', issue the next S' and dK. See product_orders.py
        for i in T.serial(begin, first_step + blocks.steps):
            step_body(step, i, begin)

        step.finish(first_step + blocks.steps - 1)
        # Locate the tile again, so that its position takes no registers during the loop
        if persistent:
            smem.tile_box.read_tile(turn, tile)
            smem.tile_box.release(turn)
        else:
            tile.start(T.shfl_sync(number, 0), cta.counts, blocks)
        key = tile.first_key + 64 * w
        store_gradients(key_pass, w, key, tile, cta, dropout, step.dk_chunks, step.dv_chunks)
        if persistent and not key_pass.frees_V_early:
            # dV leaves through the tile of V. The wait costs nothing, as the next keys arrive later
            wait_for_stores()
            smem.V.release(step.key_step)

    @T.macro
    def consume(w, number, tile_order, cta):
        """Compute the tiles of a CTA, in warpgroup w: 64 keys of each."""
        smem = cta.smem
        tile = key_tiles.KeyTile(tile_order, block_N, stream_k=config.is_stream_k)
        blocks = query_blocks(problem, cta.options, tile, seqlen_q, seqlen_k, block_M, block_N)
        if persistent:
            fill_bias_columns(w, smem.bias_columns, consumers)
            smem.tile_box.each_posted(
                tile,
                blocks,
                lambda turn, first_step: differentiate(w, number, turn, first_step, tile, blocks, cta),
            )
            if config.has_dv_tile(problem):
                wait_for_stores()  # shared memory must stay until TMA has read the last tile's dK and dV
        else:
            tile.start(number, cta.counts, blocks)
            fill_bias_columns(w, smem.bias_columns, consumers)
            if tile.exists:
                differentiate(w, number, 0, 0, tile, blocks, cta)

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
        dK_parts: args.dK_partials,
        dV_parts: args.dV_partials,
        softmax_scale: T.float32,
        heads_per_kv: T.int32,
        heads_per_part: T.int32,
        parts: T.int32,
        n_blocks: T.int32,
        group_heads: T.int32,
        ctas: T.int32,
        Tickets: args.Tickets,
        Turns: args.Turns,
        whole: T.int32 if config.is_stream_k else False,
        dQ: args.dQ,
        Progress_dq: args.Progress_dq,
        sum_slots: T.int32 if rounds else False,
        K_parts: args.K_terms,
        V_parts: args.V_terms,
    ):
        options = declare(option_types)
        fp32_inputs = declare(input_types, first="Q_input", second="dO_input")
        options = replace(options, traced=traced_arguments(problem))
        counts = key_tiles.KeyTileCounts(
            heads_per_kv, heads_per_part, parts, n_blocks, group_heads, ctas, whole
        )
        with T.Kernel(ctas, threads=roles.block, prelude=cuda_code(problem, config, roles)) as number:
            K_shared, V_shared = alloc_key_rings(problem, config)
            # Not to be renamed: TileLang 0.1.15 names the tile of V after this variable, and the hash of the kernel has the name
            dV_shared = alloc_dv(problem, config, K_shared, V_shared)
            inputs = InputTerms.of(problem, fp32_inputs, (Q, dO), config.term_stages)
            dq_tensors, table = (dQ, dQ_sum, Progress_dq), options.Table if varlen else None
            rounding = rounding_of(
                problem, config, dq_tensors, counts, heads_kv, sum_slots, args.rounded_q, table
            )
            alloc_dq = functools.partial(alloc_dq_sink, problem, config, rounding, Turns, softmax_scale)
            smem = alloc_smem_tiles(problem, config, K_shared, V_shared, dV_shared, inputs, alloc_dq)
            order_heads = heads_kv * key_tiles.order_sharers(config, counts)
            all_heads = order_heads if varlen else order_heads * batch  # the table has all sequences
            tile_order = key_tiles.key_order(problem, config, counts, heads_kv, order_heads, all_heads, table)
            stores_terms = stores_key_terms(problem, config.makes)
            Tiles = PackedGradTiles if varlen else DenseGradTiles
            if config.is_stream_k:
                Tiles = functools.partial(StreamKGradTiles, counts=counts, block_N=block_N)
            tiles = Tiles(
                *(Q, K, V, dO, Lse_log2, Delta, head_dim, head_dim_v, problem.terms),
                splits_keys=splits_keys(problem, config.makes),
                K_terms=K_parts if stores_terms else None,
                V_terms=V_parts if stores_terms else None,
                # dQ_sum is dQ itself
                dQ=dQ_sum if key_pass.adds_own_dq or config.one_tile else None,
                dK=dK,
                dV=dV,
                dK_partials=FragmentBlocks(dK_parts, key_tiles.partial_blocks(config, counts)),
                dV_partials=FragmentBlocks(dV_parts, key_tiles.partial_blocks(config, counts)),
            )
            cta = Cta(counts, tiles, smem, options, softmax_scale, heads)
            producer = KeyTileProducer(
                problem, config, tile_order, counts, (seqlen_q, seqlen_k), tiles, smem, options, Tickets
            )
            roles.run(
                lambda: producer.produce(number),
                lambda w: consume(w, number, tile_order, cta),
                apart=lambda: add_dq(producer),
                **further_warps(producer, number),
            )

    return flash_bwd_kernel


@dataclass(frozen=True)
class KeyPassArguments:
    """Types of the tensor arguments of flash_bwd(); False for one that the kernel lacks.

    Args:
        sizes: (batch, heads, heads_kv, seqlen_q, seqlen_k).
        rounded_q: rows of Lse_log2 and Delta per head.
    """

    sizes: tuple[Any, ...]
    rounded_q: Any
    Q: Any
    K: Any
    V: Any
    dO: Any
    Lse_log2: Any
    Delta: Any
    dQ_sum: Any
    dK: Any
    dV: Any
    dK_partials: Any
    dV_partials: Any
    Tickets: Any
    Turns: Any
    dQ: Any
    Progress_dq: Any
    K_terms: Any = False
    V_terms: Any = False

    @classmethod
    def of(cls, problem: AttnProblem, config: BwdPass) -> "KeyPassArguments":
        sizes = batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic(
            "batch, heads, heads_kv, seqlen_q, seqlen_k"
        )
        columns_qk, columns_v = columns = T.dynamic("columns_qk, columns_v")
        rounded_q, dq_blocks, dk_blocks, dv_blocks = T.dynamic("rounded_q, dq_blocks, dk_blocks, dv_blocks")
        batch_rows = T.dynamic("batch_rows") if problem.has("varlen") else batch
        of_keys, lengths = (batch, seqlen_k, heads_kv), (seqlen_q, heads, seqlen_k, heads_kv)
        key_terms = {}
        if stores_key_terms(problem, config.makes):
            key_terms = {
                "K_terms": rows_argument(problem, "k", *of_keys, columns_qk),
                "V_terms": rows_argument(problem, "v", *of_keys, columns_v),
            }
        # fp32: the inputs have columns of terms, or two per number
        cols_dk, cols_dv = T.dynamic("columns_dk, columns_dv") if problem.is_fp32 else columns
        rounds = config.rounds(problem)
        raw_fp32 = ("k", "v") if splits_keys(problem, config.makes) else ()
        Q, K, V, dO = input_arguments(problem, batch, *lengths, *columns, raw_fp32=raw_fp32)
        return cls(
            sizes,
            rounded_q,
            Q=Q,
            K=K,
            V=V,
            dO=dO,
            Lse_log2=T.Tensor([batch_rows, heads, rounded_q], "float32"),
            Delta=T.Tensor([batch_rows, heads, rounded_q], "float32"),
            dQ_sum=dq_sum_argument(problem, config, batch, seqlen_q, heads, columns_qk, dq_blocks),
            dK=rows_argument(problem, "dk", *of_keys, cols_dk),
            dV=rows_argument(problem, "dv", *of_keys, cols_dv),
            dK_partials=FragmentBlocks.argument(dk_blocks, problem.head_dim),
            dV_partials=FragmentBlocks.argument(dv_blocks, problem.head_dim_v),
            Tickets=T.Tensor([2], "int32") if config.is_persistent else False,
            Turns=T.Tensor([dq_blocks], "int32") if config.is_ordered else False,
            dQ=rows_argument(problem, "dq", batch, seqlen_q, heads, columns_qk) if rounds else False,
            Progress_dq=T.Tensor([T.dynamic("progress_dq")], "int32") if rounds else False,
            **key_terms,
        )


def pass_roles(problem: AttnProblem, config: BwdPass) -> Roles:
    """Roles of a pass by keys."""
    makes_dq = "dq" in config.makes and not problem.is_fp32
    registers = pipeline.registers(problem, config.warpgroups, config.makes_terms, full=makes_dq)
    if config.dq_apart:
        registers = FOUR_WARPS_REGISTERS if config.is_ordered or config.rounds(problem) else APART_REGISTERS
    return Roles(
        config.warpgroups,
        config.threads,
        registers,
        one_body=False,
        apart=config.dq_apart,
    )


def cuda_code(problem: AttnProblem, config: BwdPass, roles: Roles) -> str | None:
    """CUDA in front of the kernel; None: none."""
    code = prelude(problem, roles) or ""
    if problem.has_bits and config.makes_all:
        code += source("prefetch_bits")
    if KeyPass(problem, config).keeps_rest:
        code += source("rest")
    if config.order:
        code += source("fragments")
    if problem.is_fp32 and not problem.has("varlen"):
        code += source("rows")
    if config.adds_dq and problem.is_fp32:
        code += source("add_transposed")
    if config.is_ordered:
        code += source("turns")
    if config.dq_apart:
        code += source("add_by_tma") + source("fence_additions") * config.is_ordered
    if config.rounds(problem):
        packed = problem.has("varlen")
        loop = (ALL_BLOCKS, "round_packed_dq") if packed else (BLOCKS_WITH_ROWS, "round_dq")
        code += rounding_code(problem, *loop)
    if config.is_persistent and problem.has("varlen"):
        code += source("zero")
    if config.makes_terms:
        code += MAKE_TERMS
    if splits_keys(problem, config.makes):
        code += source("split_tile")
    return code or None


def further_warps(producer: KeyTileProducer, number: Any) -> dict[str, Any]:
    """Arguments of Roles.run() for the warps beside the producer."""
    if producer.config.makes_terms:
        ctas = producer.counts.ctas
        make = functools.partial(producer.smem.inputs.make_share, number, ctas)
        if not producer.persistent:
            return {"assist": make, "assist_warps": MAKERS}
        return {"assist": lambda: producer.schedule(number), "more": (make,), "more_warps": MAKERS - 1}
    dq = producer.smem.dq
    return {
        "assist": (lambda: producer.schedule(number)) if producer.persistent else None,
        "more": dq.further_warps(producer),
        "more_warps": dq.rounding.warps,
    }
