"""Attention of a few queries per sequence to a long cache of keys and values, for Hopper.

The kernel is bound by memory: it reads each byte of the cache once. The queries of all heads that share a key head are the rows of its
tiles (packed GQA). The keys are split over CTAs as in Flash-Decoding (Dao et al. 2023), and CTAs are persistent as in FlashMLA: work.py
divides the work of all sequences and key heads evenly among them. A producer warp loads key blocks by TMA, with or without pages. Each
consumer warpgroup computes 64 rows by online softmax. With v_in_k (multi-head latent attention: V is the first columns of K) all
warpgroups compute S of the same 64 rows, and each its own columns of O.

An item is the query rows of one sequence and key head, block_M at most. If several CTAs share an item, each writes a partial, O and lse in
fp32, and combine.py merges the partials. Merging in the last CTA that finishes took 29.2 us in total, against 26.2 (H200, 64/8 heads,
8 sequences of 2k keys, 2026-11-21).
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import MERGE_FIELDS, MERGE_NUMBERS, DecodeConfig
from tl_attention.kernels.decode.load import KeyLoader, PageLookup, chunk_columns
from tl_attention.kernels.decode.work import (
    KeyRanges,
    RowTables,
    Segment,
    SegmentBox,
    WorkShare,
    WorkSizes,
    block_of_step,
    rolled,
)
from tl_attention.kernels.scores.options import OptionArguments, Scores, argument_types
from tl_attention.kernels.seams import pipeline
from tl_attention.kernels.seams.arguments import declare
from tl_attention.kernels.seams.pipeline import TileRing, sync_warpgroup
from tl_attention.kernels.seams.roles import WARPGROUP, Roles
from tl_attention.kernels.seams.softmax import LAZY_GROWTH, LOG2E, LOWEST, SMALLEST_SCALE, OnlineSoftmax
from tl_attention.kernels.sources.pages import CachePages
from tl_attention.kernels.sources.tiles import packed
from tl_attention.problem.attn_problem import AttnProblem, decode_arguments

PASS_CONFIGS = {
    **pipeline.PASS_CONFIGS,
    # No index leaves its tensor, and bounds checks would make each load wait for the previous one
    "tl.disable_safe_memory_legalize": True,
}
# Registers per thread of (the producer, the consumers), by consumer warpgroups. 72 + 2 * 216 is 3 * 168, which the three warpgroups have at
# launch; see pipeline.VARLEN_REGISTERS
REGISTERS = {2: (72, 216)}


@dataclass(frozen=True)
class DecodeArguments:
    """Kernel arguments that the consumers use; see flash_decode."""

    Q: Any
    O: Any
    Lse: Any
    O_parts: Any
    Lse_parts: Any
    Merges: Any
    softmax_scale: Any
    lse_unit: Any
    heads_per_kv: Any
    entry_per_cta: Any  # as in WorkSizes
    options: OptionArguments


@dataclass(frozen=True)
class DecodeTiles:
    """Shared memory of a CTA.

    Args:
        Q: dtype [query tiles, 64, head_dim], swizzled; one query tile per warpgroup, or one for all if they divide columns.
        K, V: rings of tiles [block_N, head_dim], [block_N, head_dim_v]; V is None if it is in K.
    """

    Q: Any
    K: TileRing
    V: TileRing | None
    segments: SegmentBox
    rows: RowTables


@dataclass(frozen=True)
class Consumer:
    """State of a consumer warpgroup in registers.

    Args:
        w: number of the warpgroup, from 0.
        segment: the segment that it processes.
        acc_s: float32 [64, block_N], scores, then their exponentials.
        P: dtype [64, block_N], the exponentials as operand of PV.
        acc_o: float32 [64, columns].
    """

    w: Any
    segment: Segment
    acc_s: Any
    P: Any
    acc_o: Any
    scores: Scores
    softmax: OnlineSoftmax


def flash_decode(problem: AttnProblem, config: DecodeConfig) -> T.PrimFunc:
    """Kernel of a decode with the arguments of flash_decode_kernel.

    Args:
        Q, O: dtype [batch, seqlen_q, heads, head_dim or head_dim_v], contiguous, of the tile's widths.
        Lse: float32 [batch, heads, seqlen_q], lse_unit * log2(sum of exponentials).
        K, V: the rows of all caches or pages one after the other, in the view of tiles.packed.
        Seqlens, Leftpad, CacheIndex, present, seqlen, appended, capacity: see KeyRanges.
        Table, page_size, num_pages, stride_k, stride_v: see CachePages. config.page_rows is 0 without pages.
        O_parts: partial O, float32 [slots, warpgroups, rows, columns], rows = min(seqlen_q * heads_per_kv, 64). Slots: CTAs + items, or
            with split_rule != 0 all splits. With v_in_k warpgroups are slices of columns, and each writes the same lse.
        Lse_parts: partial Lse, float32 [slots, warpgroups, rows], base 2.
        Merges: int32 [entries, MERGE_NUMBERS], an item's MERGE_FIELDS for combine.py. One entry per item, or, if split_rule is 0 and
            items are more than CTAs, one per CTA, for the item whose first partial it computes. Field parts < 2: nothing to merge.
        heads_per_kv, m_blocks: query heads per key head, query blocks of block_M rows per key head.
        softmax_scale, lse_unit: float32; ln 2 makes Lse natural.
        split_rule, ctas: see work.py; CTAs of the grid.
        left, .., Sink, Tree: attn_problem.decode_arguments(). The window is always on.
    """
    dtype_of, head_dim, head_dim_v = problem.dtype_of, problem.head_dim, problem.head_dim_v
    block_N, v_in_k = config.block_N, config.v_in_k
    consumer_warps = 4 * config.warpgroups
    columns = config.columns(problem)  # of O per warpgroup
    # With one warpgroup the producer is one warp, not a warpgroup: neither a change of registers nor one body (roles.py) is possible
    roles = Roles(
        config.warpgroups,
        config.threads,
        REGISTERS.get(config.warpgroups),
        one_body=config.warpgroups > 1,
    )
    row_wise = T.GemmWarpPolicy.FullRow

    # S of a key block overlaps with PV of the block before. Not if two CTAs share an SM: they overlap with each other, in less code. Not
    # with v_in_k, where a slot holds K and V. Not if two warpgroups have 256 columns of O each: no registers are left
    overlaps = config.ctas_per_sm == 1 and not v_in_k and config.warpgroups * head_dim_v < 512
    # Columns of queries that are loaded at once; the addresses of rows of 192 or 576 columns would take registers throughout
    gathered = chunk_columns(problem) if head_dim % 128 == 64 else head_dim

    batch, seqlen_q, heads, heads_kv = T.dynamic("batch, seqlen_q, heads, heads_kv")
    columns_qk, columns_v = T.dynamic("columns_qk, columns_v")
    seqlens_n, leftpad_n, caches_n, table_n, pages_n = T.dynamic(
        "seqlens_n, leftpad_n, caches_n, table_n, pages_n"
    )
    slots, part_rows, entries = T.dynamic("slots, part_rows, entries")
    option_types = argument_types(decode_arguments(problem.options))

    def query_tile(w: Any) -> Any:
        """Number of the query tile of a warpgroup in shared memory."""
        return 0 if config.divides_columns else w

    def sync_query_tile(w: Any) -> Any:
        """Barrier of the warpgroups that share a query tile."""
        if config.divides_columns:
            return pipeline.sync_consumers(WARPGROUP * config.warpgroups)
        return sync_warpgroup(w)

    def block_start(segment: Segment, i: Any) -> Any:
        """First key of the key block of step i of a segment."""
        return (segment.start_block[0] + block_of_step(config, segment.steps[0], i)) * block_N

    def own_columns(w: Any) -> slice:
        """Columns of O that a warpgroup computes."""
        first = config.first_column(problem, w)
        return slice(first, first + columns)

    @T.macro
    def load(cta, K, V, ranges, pages, sizes, smem):
        """Post the segments of this CTA and load their key blocks, in the producer warp."""
        work = WorkShare(ranges, sizes)
        work.start(cta)
        lookup = PageLookup(pages, config.page_rows) if config.page_rows else None
        turn = T.alloc_var("int32", init=0)  # segments so far
        loader = KeyLoader(problem, config, ranges, pages, lookup, K, V, smem.K, smem.V)
        while work.has_next:
            work.next_segment()
            if work.steps[0] > 0:
                smem.segments.post(turn, work)
                turn += 1
                loader.start_segment(work)
                for i in rolled(work.steps[0]):
                    loader.load(i, work)
        work.steps[0] = 0  # ends the work
        smem.segments.post(turn, work)

    @T.macro
    def gather_queries(w, Q, b, sign, smem):
        """Load the rows of the query tile from their heads, times sign, to shared memory."""
        rows = smem.rows
        Q_rows = T.alloc_fragment([64, gathered], dtype_of("q"))
        for c in T.serial(head_dim // gathered):
            # All loads go to registers first: a load cannot move ahead of a store to shared memory, and each has the latency of memory
            for i, j in T.Parallel(64, gathered):
                Q_rows[i, j] = Q[b, rows.queries[w, i], rows.heads[w, i], c * gathered + j]
            for i, j in T.Parallel(64, gathered):
                smem.Q[query_tile(w), i, c * gathered + j] = T.cast(
                    T.cast(Q_rows[i, j], "float32") * sign, dtype_of("q")
                )
        T.fence_proxy_async()

    @T.macro
    def start_qk(me, smem, ahead=0):
        """S = Q K^T of the key block `ahead` of the current one, asynchronously."""
        # No variable for step + ahead: nvcc makes more instructions with one
        smem.K.wait(me.segment.step[0] + ahead)
        T.wgmma_gemm(
            smem.Q[query_tile(me.w), :, :],
            smem.K[me.segment.step[0] + ahead],
            me.acc_s,
            transpose_B=True,
            policy=row_wise,
            clear_accum=True,
        )

    @T.macro
    def start_pv(me, smem):
        """O += P V of the current key block, asynchronously."""
        if v_in_k:
            K_slot = me.segment.step[0] % smem.K.slots
            T.wgmma_gemm(me.P, smem.K.tiles[K_slot, :, own_columns(me.w)], me.acc_o, policy=row_wise)
        else:
            smem.V.wait(me.segment.step[0])
            T.wgmma_gemm(me.P, smem.V[me.segment.step[0]], me.acc_o, policy=row_wise)

    def hides_keys(first_key: Any, length: Any, options: OptionArguments) -> Any:
        """True if keys of a block may be hidden: past the end, right of the first query's window, left of the last one's, in the tree."""
        hides = (
            (first_key + block_N > length)
            | (first_key + block_N - 1 > length - seqlen_q + options.right)
            | (first_key < length - 1 - options.left)
        )
        return hides | (first_key + block_N > length - seqlen_q) if problem.has("tree") else hides

    def sees_key(w: Any, i: Any, key: Any, length: Any, rows: RowTables, options: OptionArguments) -> Any:
        """True where row i sees a key. Node j of the tree is key length - seqlen_q + j."""
        sees = (
            (key <= rows.diagonals[w, i] + options.right)
            & (key >= rows.diagonals[w, i] - options.left)
            & (key < length)
        )
        return sees & rows.sees_node(w, i, key - (length - seqlen_q)) if problem.has("tree") else sees

    @T.macro
    def weigh(me, first_key, length, rows, arguments):
        """Turn scores S into exponentials: softcap, ALiBi, mask and online softmax.

        Mask and Scores.bias are not used: they assume that row i is query first_query + i and that a tile has one slope. Here
        several rows share a query, and diagonals and slopes come from the row tables.
        """
        acc_s, scores, options = me.acc_s, me.scores, arguments.options
        scores.cap(acc_s)
        if scores.biased:
            for i, j in T.Parallel(64, block_N):
                distance = T.abs(T.cast(rows.diagonals[me.w, i] - first_key - j, "float32"))
                acc_s[i, j] = (
                    acc_s[i, j] * (options.softcap if scores.capped else arguments.softmax_scale)
                    - rows.slopes[me.w, i] * distance
                )
        if hides_keys(first_key, length, options):
            for i, j in T.Parallel(64, block_N):
                seen = sees_key(me.w, i, first_key + j, length, rows, options)
                acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))
        me.softmax.update(acc_s)

    @T.macro
    def attend_overlapped(me, smem, arguments):
        """Compute O, row max and row sum of a segment, with S of each key block beside PV of the block before."""
        segment = me.segment
        start_qk(me, smem)
        T.wait_wgmma(0)
        smem.K.release(segment.step[0])
        weigh(me, block_start(segment, 0), segment.length[0], smem.rows, arguments)
        T.copy(me.acc_s, me.P)
        T.clear(me.acc_o)
        for i in rolled(segment.steps[0] - 1):  # PV of the block of segment.step
            start_qk(me, smem, ahead=1)
            start_pv(me, smem)
            T.wait_wgmma(1)  # S is complete
            smem.K.release(segment.step[0] + 1)
            weigh(me, block_start(segment, 1 + i), segment.length[0], smem.rows, arguments)
            T.wait_wgmma(0)  # O is complete, and P free
            smem.V.release(segment.step[0])
            T.copy(me.acc_s, me.P)
            me.softmax.rescale((me.acc_o,))
            segment.step[0] += 1
        start_pv(me, smem)
        T.wait_wgmma(0)
        smem.V.release(segment.step[0])
        segment.step[0] += 1

    @T.macro
    def attend(me, smem, arguments):
        """Compute O, row max and row sum of a segment."""
        segment = me.segment
        T.clear(me.acc_o)
        for i in rolled(segment.steps[0]):
            start_qk(me, smem)
            T.wait_wgmma(0)
            if not v_in_k:
                smem.K.release(segment.step[0])
            weigh(me, block_start(segment, i), segment.length[0], smem.rows, arguments)
            T.copy(me.acc_s, me.P)
            me.softmax.rescale((me.acc_o,))
            start_pv(me, smem)
            T.wait_wgmma(0)
            if v_in_k:
                smem.K.release(segment.step[0])
            else:
                smem.V.release(segment.step[0])
            segment.step[0] += 1

    @T.macro
    def add_sink(me, lse, sink_lse, sinks):
        """Add the sink to the row sum: lse = log2(2^lse + 2^sink), and scale O accordingly.

        Only for whole items: a partial must not contain the sink. sinks: base 2. sink_lse: scratch for the new lse.
        """
        # lse and sink may both be -inf, and -inf - -inf is NaN
        for i in T.Parallel(64):
            sink_lse[i] = T.max(T.max(lse[i], sinks[me.w, i]), LOWEST)
            sink_lse[i] += T.log2(T.exp2(lse[i] - sink_lse[i]) + T.exp2(sinks[me.w, i] - sink_lse[i]))
        for i, j in T.Parallel(64, columns):
            me.acc_o[i, j] *= T.exp2(lse[i] - T.max(sink_lse[i], LOWEST))
        T.copy(sink_lse, lse)

    def row_value(table: Any, registers: Any, w: Any, i: Any) -> Any:
        """A row's query or head, from registers if it is kept there."""
        return table[w, i] if registers is None else registers[i]

    @T.macro
    def store_result(me, lse, rows, arguments):
        """Write O and Lse of a segment that is a whole item."""
        segment = me.segment
        # Kept in registers for the many stores of a row; with ALiBi there are too few
        row_query = None if problem.has("alibi") else T.alloc_fragment([64], "int32")
        row_head = None if problem.has("alibi") else T.alloc_fragment([64], "int32")
        if row_query is not None:
            T.copy(rows.queries[me.w, :], row_query)
            T.copy(rows.heads[me.w, :], row_head)
        for i in T.Parallel(64):
            if i < segment.rows[0]:
                head = row_value(rows.heads, row_head, me.w, i)
                query = row_value(rows.queries, row_query, me.w, i)
                arguments.Lse[segment.b[0], head, query] = lse[i] * arguments.lse_unit
        for i, j in T.Parallel(64, columns):
            if i < segment.rows[0]:
                head = row_value(rows.heads, row_head, me.w, i)
                query = row_value(rows.queries, row_query, me.w, i)
                column = config.first_column(problem, me.w) + j
                arguments.O[segment.b[0], query, head, column] = me.acc_o[i, j]

    @T.macro
    def store_partial(me, lse, arguments):
        """Write a partial, for combine.py."""
        segment = me.segment
        slot = T.alloc_var("int32", init=segment.field("first_slot") + segment.field("part"))
        for i in T.Parallel(64):
            if i < segment.rows[0]:
                arguments.Lse_parts[slot, me.w, i] = lse[i]
        for i, j in T.Parallel(64, columns):
            if i < segment.rows[0]:
                arguments.O_parts[slot, me.w, i, j] = me.acc_o[i, j]

    @T.macro
    def consume(w, cta, smem, arguments):
        """For each segment gather the query rows, attend to its key blocks, and store the item or a partial of it, in warpgroup w."""
        acc_s = T.alloc_fragment([64, block_N], "float32")
        P = T.alloc_fragment([64, block_N], dtype_of("p"))
        acc_o = T.alloc_fragment([64, columns], "float32")
        lse = T.alloc_fragment([64], "float32")  # base 2
        sink_lse = T.alloc_fragment([64], "float32")
        rows = smem.rows
        scores = Scores(problem, arguments.options, arguments.softmax_scale)
        raw_scale = T.max(T.abs(arguments.softmax_scale) * LOG2E, SMALLEST_SCALE)
        # growth 0: the largest exponential of a row is 1, which P holds exactly; batch_invariant takes the growth of a forward
        growth = LAZY_GROWTH if config.batch_invariant else 0.0
        scale_log2 = raw_scale if scores.raw else scores.scale_log2
        softmax = OnlineSoftmax(block_N, scale_log2, growth, rounds_alike=config.batch_invariant)
        segment = Segment(smem.segments)
        me = Consumer(w, segment, acc_s, P, acc_o, scores, softmax)
        # batch_invariant has whole items alone: finish() adds the sink, in natural units, as in a forward. Else add_sink() adds it, in
        # base 2, to whole items, and combine.py to merged ones
        sink_of_row = rows.sink_of(w) if config.batch_invariant and problem.has("sink") else None
        sign = T.alloc_var("float32", init=1.0)
        if scores.raw:  # the row max is a maximum of raw scores, so a negative scale becomes -Q and |scale|
            if arguments.softmax_scale < 0:
                sign = -1.0
        # The entry of a CTA merges nothing unless one of its segments fills it. An entry of an item is always filled, by its first segment
        if w == 0:
            if arguments.entry_per_cta & (T.get_thread_binding() == 0):
                arguments.Merges[cta, MERGE_FIELDS.index("parts")] = 0

        segment.wait()
        while segment.steps[0] > 0:
            segment.read(query_tile(w), config.block_M, seqlen_q * arguments.heads_per_kv)
            sync_query_tile(w)  # all have read the previous query tile and row tables
            rows.fill(w, segment, seqlen_q, arguments.heads_per_kv, arguments.options)
            gather_queries(w, arguments.Q, segment.b[0], sign, smem)
            sync_query_tile(w)

            softmax.reset()
            if overlaps:
                attend_overlapped(me, smem, arguments)
            else:
                attend(me, smem, arguments)
            softmax.finish(lse, 1.0, sink_of_row)
            softmax.scale_rows((acc_o,))

            if segment.field("parts") == 1:
                if problem.has("sink") and not config.batch_invariant:
                    add_sink(me, lse, sink_lse, rows.sinks)
                store_result(me, lse, rows, arguments)
            else:
                store_partial(me, lse, arguments)
            # Only the first segment of an item has an entry
            if w == 0:
                if (segment.field("entry") >= 0) & (T.get_thread_binding() == 0):
                    for number, name in enumerate(MERGE_FIELDS):
                        arguments.Merges[segment.field("entry"), number] = segment.field(name)
            segment.finish()
            segment.wait()

    @T.prim_func
    def flash_decode_kernel(
        # Tensors
        Q: T.Tensor([batch, seqlen_q, heads, head_dim], dtype_of("q")),
        K: packed("k", heads_kv, columns_qk, dtype_of("k")),
        V: packed("v", heads_kv, columns_v, dtype_of("v")),
        O: T.Tensor([batch, seqlen_q, heads, head_dim_v], dtype_of("o")),
        Lse: T.Tensor([batch, heads, seqlen_q], "float32"),
        # Lengths and positions of the sequences in the cache, each [batch] or absent; the page table
        Seqlens: T.Tensor([seqlens_n], "int32"),
        Leftpad: T.Tensor([leftpad_n], "int32"),
        CacheIndex: T.Tensor([caches_n], "int32"),
        Table: T.StridedTensor([table_n, pages_n], [T.dynamic("table_stride"), 1], "int32"),
        # Workspace, read by combine.py
        O_parts: T.Tensor([slots, config.warpgroups, part_rows, columns], "float32"),
        Lse_parts: T.Tensor([slots, config.warpgroups, part_rows], "float32"),
        Merges: T.Tensor([entries, MERGE_NUMBERS], "int32"),
        # Numbers of the problem
        softmax_scale: T.float32,
        lse_unit: T.float32,
        heads_per_kv: T.int32,
        m_blocks: T.int32,
        # Numbers of the cache
        present: T.int32,
        seqlen: T.int32,
        appended: T.int32,
        capacity: T.int32,
        page_size: T.int32,
        num_pages: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
        # Division of the work
        split_rule: T.int32,
        ctas: T.int32,
    ):
        options = declare(option_types)
        with T.Kernel(ctas, threads=roles.block, prelude=roles.prelude) as cta:
            T.pdl_trigger()  # the next kernel, combine.py, may launch; it waits for the end of this one
            T.pdl_sync()  # the kernel before this one has ended
            T.annotate_min_blocks_per_sm(config.ctas_per_sm)
            query_tiles = 1 if config.divides_columns else config.warpgroups
            Q_shared = pipeline.alloc_swizzled([query_tiles, 64, head_dim], dtype_of("q"))
            K_ring = TileRing([config.num_stages, block_N, head_dim], dtype_of("k"), consumer_warps, name="K")
            V_ring = (
                None
                if v_in_k
                else TileRing(
                    [config.num_stages, block_N, head_dim_v], dtype_of("v"), consumer_warps, name="V"
                )
            )
            segments = SegmentBox(consumer_warps)
            rows = RowTables(problem, config.warpgroups, sink_unit=1.0 if config.batch_invariant else LOG2E)
            smem = DecodeTiles(Q_shared, K_ring, V_ring, segments, rows)
            ranges = KeyRanges(Seqlens, Leftpad, CacheIndex, present, seqlen, appended, capacity)
            pages = CachePages(Table, page_size, num_pages, stride_k, stride_v)
            items_per_sequence = heads_kv * m_blocks
            entry_per_cta = (split_rule == 0) & (batch * items_per_sequence > ctas)
            sizes = WorkSizes(
                block_N,
                config.item_blocks(problem),
                batch,
                seqlen_q,
                items_per_sequence,
                m_blocks,
                options.left,
                split_rule,
                ctas,
                entry_per_cta,
            )
            arguments = DecodeArguments(
                Q, O, Lse, O_parts, Lse_parts, Merges, softmax_scale, lse_unit, heads_per_kv, entry_per_cta, options
            )  # fmt: skip
            roles.run(
                lambda: load(cta, K, V, ranges, pages, sizes, smem),
                lambda w: consume(w, cta, smem, arguments),
            )

    return flash_decode_kernel
