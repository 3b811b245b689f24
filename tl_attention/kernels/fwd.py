"""FlashAttention forward for Hopper: O = softmax(scale * Q K^T + mask) V and its log-sum-exp, in one pass over the keys.

Dao 2023 (FlashAttention-2, alg. 1) in the schedule of Shah et al. 2024 (FlashAttention-3): one warp feeds rings of K and V
tiles by TMA; each consumer warpgroup owns 64 queries and keeps S = Q K^T of a block and O += P V of the block before in flight.
"""

from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import KV_STAGES, FwdConfig
from tl_attention.kernels import pipeline
from tl_attention.kernels.mask import KeyBlocks, Mask
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
    TileRing,
    Turns,
    alloc_swizzled,
    sync_warpgroup,
    wait_for_stores,
)
from tl_attention.kernels.roles import WARPGROUP, Roles
from tl_attention.kernels.scheduler import Launch, SecondWalk, Tile, TileBox, TileNumbers, TileOrder, Verdicts
from tl_attention.kernels.softmax import LOG2E, SMALLEST_SCALE, OnlineSoftmax
from tl_attention.kernels.tiles import (
    DensePartTiles,
    DenseTiles,
    PackedPartTiles,
    PackedTiles,
    SharedTiles,
    rows_argument,
)
from tl_attention.problem import AttnProblem

PASS_CONFIGS = pipeline.PASS_CONFIGS
# As pipeline.REGISTERS; a producer that places tiles, too, needs some more
PERSISTENT_REGISTERS = {2: (40, 232), 3: (32, 160)}


def flash_fwd(problem: AttnProblem, config: FwdConfig) -> T.PrimFunc:
    """Kernel(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, heads_a_kv_head, m_blocks,
    group_heads, ctas), the last four from dispatch.plan.

    Q, K, V, O are views [batch, seqlen, heads, columns] with no more columns than the problem's tile widths; Lse is
    [batch, heads, seqlen_q] fp32, in units of log2 / lse_unit. Tickets: int32 [2], zeros, the kernel's own while it runs.
    A row with no key gives O = 0, Lse = -inf. Empty tensors are for the caller: TMA takes none.

    problem.options: the values of options.Options come after ctas; with varlen Q, K, V, O, Lse are as PackedTiles has them.

    config.split: O and Lse are parts, [splits, batch, heads, seqlen_q, head_dim_v] and [splits, batch, heads, seqlen_q] in
    fp32, for fwd_combine.py; `splits` CTAs have a tile, each a share of its blocks of keys, and each writes what attention
    to its share alone is: O = 0, Lse = -inf if that is empty. With varlen they are as PackedPartTiles has them.
    """
    dtype, head_dim, head_dim_v = problem.dtype, problem.head_dim, problem.head_dim_v
    block_M, block_N = config.block_M, config.block_N
    q_stages = config.q_stages
    warpgroups = tuple(range(config.warpgroups))
    consumer_warps = 4 * config.warpgroups
    row_wise = T.GemmWarpPolicy.FullRow
    # Of the GEMM S = Q K^T
    q_kt = {"transpose_B": True, "policy": row_wise, "clear_accum": not problem.bias_is_linear}
    persistent = config.schedule != "grid"
    registers = pipeline.registers(problem, config.warpgroups)
    if persistent:
        registers = PERSISTENT_REGISTERS.get(config.warpgroups)
    roles = Roles(config.warpgroups, config.threads, registers, one_body=not problem.has("dropout"))
    split = config.split
    varlen = problem.has("varlen")
    O_in_Q = head_dim == head_dim_v and not split  # O leaves through the shared memory of its queries

    batch, heads, heads_kv, seqlen_q, seqlen_k = T.dynamic("batch, heads, heads_kv, seqlen_q, seqlen_k")
    columns_qk, columns_v = T.dynamic("columns_qk, columns_v")

    q_view = rows_argument(problem, "q", batch, seqlen_q, heads, columns_qk)
    k_view = rows_argument(problem, "k", batch, seqlen_k, heads_kv, columns_qk)
    v_view = rows_argument(problem, "v", batch, seqlen_k, heads_kv, columns_v)
    if split:
        splits = T.dynamic("splits")
        o_view = T.Tensor([splits, batch, heads, seqlen_q, head_dim_v], "float32")
        lse_view = T.Tensor([splits, batch, heads, seqlen_q], "float32")
    else:
        splits = None
        o_view = rows_argument(problem, "o", batch, seqlen_q, heads, columns_v)
        lse_view = T.Tensor([heads, seqlen_q] if varlen else [batch, heads, seqlen_q], "float32")
    tickets_view = T.Tensor([2], "int32")
    turns = Turns(config.warpgroups, config.ping_pong)
    whole, parts = (PackedTiles, PackedPartTiles) if varlen else (DenseTiles, DensePartTiles)
    Tiles = parts if split else whole

    def sink_of(tile: Tile, options: Options | None) -> Any:
        if not problem.has("sink"):
            return None
        sink = options.Sink[tile.head]
        return T.if_then_else(tile.split == 0, sink, -T.infinity("float32")) if split else sink

    def walk(sweeps: tuple, again: Any) -> tuple:
        """Sweeps of KeyBlocks, with whether the maxima are followed: in a second walk always, else until all queries have seen a key."""
        walked = []
        for past, before, start, count in sweeps:
            if past or not config.hold_max:
                walked.append((past, before, True, start, count))
            else:  # in two loops: a branch in one, around what a second walk does, costs more than half of the gain
                walked.append((past, before, False, start, T.if_then_else(again == 0, count, 0)))
                walked.append((past, before, True, start, T.if_then_else(again == 0, 0, count)))
        return tuple(walked)

    def steps_to_load(steps: Any) -> Any:
        """Past the first. nvcc unrolls such a loop by 4, but a producer that may load a tile twice has no registers for that."""
        if config.hold_max:
            return T.unroll(1, steps, annotations={"pragma_unroll_factor": 1})
        return T.serial(1, steps)

    def is_first_walk(turn: Any, shared: SharedTiles) -> Any:
        """Of a turn that is posted: read again, as a producer has no register for it."""
        return shared.verdicts.again(turn) == 0 if config.hold_max else True

    @T.macro
    def load(tile, turn, first_step, blocks, tiles, shared, tile_numbers, again):
        first_query = tile.m_block * block_M
        blocks.start(first_query)
        if split:
            blocks.take_share(tile.split, splits)
        shared.K.fill(first_step, tiles.k(tile, blocks.first_key(0), block_N))
        for w in warpgroups:
            shared.Q.fill(turn * config.warpgroups + w, tiles.q(tile, first_query + 64 * w, 64))
        if config.hold_max:
            shared.verdicts.open(turn, again)
        if persistent:
            shared.tile_box.post(turn, tile, first_step, blocks)
        for step in steps_to_load(blocks.steps):
            shared.K.fill(first_step + step, tiles.k(tile, blocks.first_key(step), block_N))
            shared.V.fill(first_step + step - 1, tiles.v(tile, blocks.first_key(step - 1), block_N))
        if tile_numbers is not None:
            if is_first_walk(turn, shared):
                tile_numbers.draw()
        last = blocks.steps - 1
        shared.V.fill(first_step + last, tiles.v(tile, blocks.first_key(last), block_N))

    @T.macro
    def produce(first_tile, order, ctas, tickets, tiles, shared, options):
        tile = Tile(order)
        mask = Mask.of(problem, options, tile, seqlen_q, seqlen_k)
        blocks = KeyBlocks(mask, block_M, block_N, split, overlap=config.hold_max)
        if persistent:
            tile_numbers = TileNumbers(config.schedule, first_tile, ctas, tickets)
            turn = T.alloc_var("int32", init=0)
            first_step = T.alloc_var("int32", init=0)  # of the tile, in rings that go on from tile to tile
            if config.hold_max:
                second_walk = SecondWalk(shared.verdicts)
                while (tile_numbers.current[0] < order.num_tiles) | (second_walk.ago > 0):
                    if second_walk.ago > 0:
                        shared.tile_box.read_tile(turn - second_walk.ago, tile)
                        tile.find_kv_head()
                    else:
                        tile.locate(tile_numbers.current[0])
                    if tile.there:
                        load(tile, turn, first_step, blocks, tiles, shared, tile_numbers, second_walk.ago)
                        if is_first_walk(turn, shared):
                            tile_numbers.advance()
                        turn += 1
                        first_step += blocks.steps
                    else:
                        tile_numbers.skip(tile.group_end)
                    second_walk.look(turn, tile_numbers.current[0] >= order.num_tiles)
            else:
                while tile_numbers.current[0] < order.num_tiles:
                    tile.locate(tile_numbers.current[0])
                    if tile.there:
                        load(tile, turn, first_step, blocks, tiles, shared, tile_numbers, 0)
                        tile_numbers.advance()
                        turn += 1
                        first_step += blocks.steps
                    else:
                        tile_numbers.skip(tile.group_end)
            for w in warpgroups:
                shared.Q.wait_empty(turn * config.warpgroups + w)
            shared.tile_box.close(turn)
            tile_numbers.close()
        else:
            tile.locate(first_tile)
            if tile.there:
                load(tile, 0, 0, blocks, tiles, shared, None, 0)

    @T.macro
    def attend(w, tile, turn, first_step, blocks, tiles, shared, again, softmax_scale, lse_unit, options):
        acc_s = T.alloc_fragment([64, block_N], "float32")  # scores, then their exponentials
        P = T.alloc_fragment([64, block_N], dtype)
        acc_o = T.alloc_fragment([64, head_dim_v], "float32")
        lse = T.alloc_fragment([64], "float32")
        scores, dropout, mask = (
            Scores(problem, options, softmax_scale),
            Dropout(problem, options, block_N),
            blocks.mask,
        )
        raw_scale = scores.not_too_small(T.max(T.abs(softmax_scale) * LOG2E, SMALLEST_SCALE))
        scale_log2 = raw_scale if scores.raw else scores.scale_log2
        softmax = OnlineSoftmax(block_N, scale_log2)
        query = tile.m_block * block_M + 64 * w
        q_step = turn * config.warpgroups + w
        softmax.reset()
        scores.start(tile.batch, tile.head, scale_log2)
        dropout.start()

        shared.Q.wait(q_step)
        if scores.raw:
            if softmax_scale < 0:  # -Q and |scale|, as the running maximum is one of raw scores
                shared.Q.negate(q_step)
                T.fence_proxy_async()
                sync_warpgroup(w)

        # S = Q K^T, softmax of the last block of keys
        shared.K.wait(first_step)
        turns.take(w)
        scores.begin(acc_s, shared.bias_columns)
        T.wgmma_gemm(shared.Q[q_step], shared.K[first_step], acc_s, **q_kt)
        turns.give(w)
        dropout.draw(tile.batch * heads + tile.head, query, blocks.first_key(0))
        T.wait_wgmma(0)
        shared.K.release(first_step)
        if O_in_Q and q_stages > 1:  # O of the tile before has left its slot by now
            if turn > 0:
                wait_for_stores()
                shared.Q.release(q_step - config.warpgroups)
        scores.cap(acc_s)
        scores.bias(acc_s, mask.place(query) - blocks.first_key(0))
        blocks.hide_in_last_block(acc_s, query)
        softmax.update(acc_s, scores.shift(mask.place(query) - blocks.first_key(0)))
        T.copy(acc_s, P)
        dropout.drop(P)

        # S = Q K^T, softmax of each block before it, beside O += P V of the last
        T.clear(acc_o)
        for past, before, follow, start, count in walk(blocks.sweeps, again):
            # From 0: a start in a variable would keep the ring index out of uniform registers, 32 R2UR a step at d128
            for i in T.serial(count):
                shared.K.wait(first_step + start + i)
                turns.take(w)
                scores.begin(acc_s, shared.bias_columns)
                T.wgmma_gemm(shared.Q[q_step], shared.K[first_step + start + i], acc_s, **q_kt)
                shared.V.wait(first_step + start + i - 1)
                T.wgmma_gemm(P, shared.V[first_step + start + i - 1], acc_o, policy=row_wise)
                turns.give(w)
                dropout.draw(tile.batch * heads + tile.head, query, blocks.first_key(start + i))
                T.wait_wgmma(1)  # S is there
                shared.K.release(first_step + start + i)
                scores.cap(acc_s)
                scores.bias(acc_s, mask.place(query) - blocks.first_key(start + i))
                if past or before:
                    mask.apply(acc_s, query, blocks.first_key(start + i), past, before)
                softmax.update(acc_s, scores.shift(mask.place(query) - blocks.first_key(start + i)), follow)
                T.wait_wgmma(0)  # O is there, and P free
                shared.V.release(first_step + start + i - 1)
                T.copy(acc_s, P)
                dropout.drop(P)
                if follow:
                    softmax.rescale(acc_o)

        # O += P V of the first block of keys, O /= row sums
        # Read again, rather than held in registers all the way, and before the box may be filled anew
        if persistent:
            shared.tile_box.read_tile(turn, tile)
        if not O_in_Q:
            shared.Q.release(q_step)
        last = blocks.steps - 1
        shared.V.wait(first_step + last)
        T.wgmma_gemm(P, shared.V[first_step + last], acc_o, policy=row_wise)
        T.wait_wgmma(0)
        shared.V.release(first_step + last)
        if config.hold_max:
            if again == 0:  # once: where scores are beyond all bounds no maximum helps
                softmax.check_sums()
                if softmax.overflowed():
                    shared.verdicts.fail(turn)
            shared.verdicts.give(turn)
        softmax.finish(acc_o, lse, lse_unit, sink_of(tile, options))
        dropout.scale_kept(acc_o)

        if config.hold_max:
            if again != 0:  # or the first walk's output might come after this one's
                wait_for_stores(read=False)
        query = tile.m_block * block_M + 64 * w
        if split:
            tiles.store_o(acc_o, tile, query)
        elif O_in_Q:
            T.copy(acc_o, shared.Q[q_step])
            T.fence_proxy_async()
            sync_warpgroup(w)
            T.tma_copy(shared.Q[q_step], tiles.o(tile, query, 64))
            if q_stages == 1:
                wait_for_stores()
                shared.Q.release(q_step)
        else:
            wait_for_stores()  # of the tile before
            sync_warpgroup(w)
            T.copy(acc_o, shared.O[w, :, :])
            T.fence_proxy_async()
            sync_warpgroup(w)
            T.tma_copy(shared.O[w, :, :], tiles.o(tile, query, 64))
        tiles.store_lse(lse, tile, query)

    @T.macro
    def consume(w, first_tile, order, tiles, shared, softmax_scale, lse_unit, options):
        tile = Tile(order)
        mask = Mask.of(problem, options, tile, seqlen_q, seqlen_k)
        blocks = KeyBlocks(mask, block_M, block_N, split, overlap=config.hold_max)
        turns.start(w)
        fill_bias_columns(w, shared.bias_columns, WARPGROUP * config.warpgroups)
        if persistent:
            turn = T.alloc_var("int32", init=0)
            shared.tile_box.wait(0)
            while not shared.tile_box.at_end(turn):
                shared.tile_box.read_tile(turn, tile)
                shared.tile_box.read_blocks(turn, blocks)
                first_step = shared.tile_box.first_step(turn)
                again = shared.verdicts.again(turn) if config.hold_max else None
                attend(
                    w, tile, turn, first_step, blocks, tiles, shared, again, softmax_scale, lse_unit, options
                )
                turn += 1
                shared.tile_box.wait(turn)
        else:
            tile.locate(first_tile)
            if tile.there:
                blocks.start(tile.m_block * block_M)
                if split:
                    blocks.take_share(tile.split, splits)
                attend(w, tile, 0, 0, blocks, tiles, shared, None, softmax_scale, lse_unit, options)
        wait_for_stores()

    @T.macro
    def run(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, launch, options):
        with T.Kernel(launch.ctas, threads=roles.block, prelude=prelude(problem, roles)) as first_tile:
            shared = SharedTiles(
                Q=TileRing([q_stages * config.warpgroups, 64, head_dim], dtype, 4, name="Q"),
                K=TileRing([KV_STAGES, block_N, head_dim], dtype, consumer_warps, name="K"),
                V=TileRing([KV_STAGES, block_N, head_dim_v], dtype, consumer_warps, name="V"),
                O=None if O_in_Q or split else alloc_swizzled([config.warpgroups, 64, head_dim_v], dtype),
                tile_box=TileBox(varlen) if persistent else None,
                bias_columns=alloc_bias_columns(problem, block_N),
                verdicts=Verdicts(consumer_warps) if config.hold_max else None,
            )
            all_heads, table = (heads, options.Table) if varlen else (heads * batch, None)
            # A window that lets some queries see more keys than others mostly ends at their place, as a causal mask does
            last_first = problem.causal or problem.has("window")
            order = TileOrder.of(launch, last_first, heads, all_heads, splits, table)
            tiles = Tiles(Q, K, V, O, Lse, head_dim, head_dim_v)

            roles.run(
                lambda: produce(first_tile, order, launch.ctas, Tickets, tiles, shared, options),
                lambda w: consume(w, first_tile, order, tiles, shared, softmax_scale, lse_unit, options),
            )

    if not problem.options:

        @T.prim_func
        def flash_fwd_dense(
            Q: q_view,
            K: k_view,
            V: v_view,
            O: o_view,
            Lse: lse_view,
            Tickets: tickets_view,
            softmax_scale: T.float32,
            lse_unit: T.float32,
            heads_a_kv_head: T.int32,
            m_blocks: T.int32,
            group_heads: T.int32,
            ctas: T.int32,
        ):
            launch = Launch(heads_a_kv_head, m_blocks, group_heads, ctas)
            run(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, launch, None)

        return flash_fwd_dense

    slopes_view, sink_view, rng_view, table_view = option_views()

    @T.prim_func
    def flash_fwd_options(
        Q: q_view,
        K: k_view,
        V: v_view,
        O: o_view,
        Lse: lse_view,
        Tickets: tickets_view,
        softmax_scale: T.float32,
        lse_unit: T.float32,
        heads_a_kv_head: T.int32,
        m_blocks: T.int32,
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
        launch = Launch(heads_a_kv_head, m_blocks, group_heads, ctas)
        run(Q, K, V, O, Lse, Tickets, softmax_scale, lse_unit, launch, options)

    return flash_fwd_options
