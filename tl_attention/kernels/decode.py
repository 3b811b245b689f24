"""Attention of a few queries to a long cache of keys and values, for Hopper: bound by memory, so every byte of the cache is read once.

The queries of all heads that share a key head are the rows of one tile. CTAs, as many as run at once, divide the keys of all sequences
and key heads evenly (the fixed splits of Dao et al. 2023, Flash-Decoding, in the persistent order of FlashMLA): a CTA walks a range of
blocks that may begin in one sequence and end in another. Where several CTAs share a sequence, decode_combine.py merges their parts:
when the last of them to come did so, it was all in all 29.2 us instead of 26.2 (H200, 64/8 heads, 8 sequences of 2k keys, 2026-11-21).
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernel_configs import MERGE_FIELDS, MERGE_NUMBERS, DecodeConfig
from tl_attention.kernels import pipeline
from tl_attention.kernels.options import Scores
from tl_attention.kernels.pipeline import TileRing, sync_warpgroup
from tl_attention.kernels.roles import WARPGROUP, Roles
from tl_attention.kernels.softmax import LOG2E, LOWEST, SMALLEST_SCALE, OnlineSoftmax
from tl_attention.kernels.tiles import packed
from tl_attention.problem import FAR, AttnProblem

PASS_CONFIGS = {
    **pipeline.PASS_CONFIGS,
    "tl.disable_safe_memory_legalize": True,  # no index leaves its tensor, and guards would have each load wait for the one before
}


def rolled(steps: Any) -> Any:
    """A loop that nvcc leaves as it is: a CTA runs most code once, and its instructions come from the L2 or beyond."""
    return T.unroll(steps, unroll_factor=1)


# Of (producers, consumers), by consumer warpgroups; the sum as pipeline.VARLEN_REGISTERS has it
REGISTERS = {2: (72, 216)}
LEAST_KEYS = 256  # a CTA, or merging would take longer than what it divides


@dataclass(frozen=True)
class DecodeOptions:
    """Values of a launch, as options.Options has them."""

    left: Any
    right: Any
    softcap: Any
    Slopes: Any
    Sink: Any


@dataclass(frozen=True)
class Lengths:
    """Where the keys of a sequence lie: Seqlens, Leftpad, Caches: int32 [batch], those that `given` names; see flash_decode."""

    Seqlens: Any
    Leftpad: Any
    Caches: Any
    given: Any
    seqlen: Any
    appended: Any
    room: Any

    def keys_end(self, b: Any) -> Any:
        """At most where the room for them ends."""
        given = T.if_then_else(self.given & 1 != 0, self.Seqlens[b * (self.given & 1)], self.seqlen)
        return T.min(given + self.appended, self.room)

    def leftpad(self, b: Any) -> Any:
        return T.if_then_else(self.given & 2 != 0, self.Leftpad[b * (self.given >> 1 & 1)], 0)

    def cache(self, b: Any) -> Any:
        return T.if_then_else(self.given & 4 != 0, self.Caches[b * (self.given >> 2 & 1)], b)


@T.meta_class
class Walk:
    """The share of a CTA: segments, each some blocks of keys of one sequence, key head and tile of queries, an item.

    Items are numbered sequence by sequence, key head by key head. A sequence has `weight` units an item: blocks of keys, which
    CTAs divide evenly, or where fixed != 0 splits of a number of blocks that other sequences have no part in: fixed blocks, or with
    fixed < 0 what makes -fixed splits. CTAs have near-equal ranges of units.
    """

    def __init__(
        self,
        lengths: Lengths,
        block_N,
        batch,
        items_a_sequence,
        m_blocks,
        seqlen_q,
        left,
        fixed,
        ctas,
        name: str = "walk",
    ):
        self.lengths, self.block_N, self.batch, self.m_blocks = lengths, block_N, batch, m_blocks
        self.items_a_sequence, self.seqlen_q, self.left, self.fixed, self.ctas = (
            items_a_sequence,
            seqlen_q,
            left,
            fixed,
            ctas,
        )
        (
            self.b, self.before, self.weight, self.blocks, self.length, self.first_block, self.split_blocks,
            self.unit, self.end, self.base, self.longer, self.cta, self.total, self.up, self.inside,
            self.item, self.kv_head, self.m_block, self.start_block, self.steps, self.parts, self.part, self.first_slot,
            self.entry,
        ) = (T.alloc_var("int32", init=0) for _ in range(24))  # fmt: skip

    @T.inline
    def measure(self, b):
        """The keys, blocks and units of a sequence; 0 units past the last."""
        self.weight[0] = 0
        if b < self.batch:
            self.length[0] = self.lengths.keys_end(b) - self.lengths.leftpad(b)
            self.first_block[0] = T.max(self.length[0] - self.seqlen_q - self.left, 0) // self.block_N
            # A sequence of no key has a masked block, as it has an output
            self.blocks[0] = T.max(
                (self.length[0] + self.block_N - 1) // self.block_N - self.first_block[0], 1
            )
            self.weight[0] = self.blocks[0]
            if self.fixed != 0:
                self.split_blocks[0] = self.fixed
                if self.fixed < 0:
                    self.split_blocks[0] = T.truncdiv(self.blocks[0] - self.fixed - 1, -self.fixed)
                self.weight[0] = T.truncdiv(self.blocks[0] + self.split_blocks[0] - 1, self.split_blocks[0])

    @T.inline
    def begin(self, cta):
        """Find the first unit of the CTA, a lane a sequence."""
        lane = T.get_thread_binding() % 32
        self.cta[0] = cta
        for chunk in rolled(T.ceildiv(self.batch, 32)):
            self.measure(chunk * 32 + lane)
            self.total[0] += T.warp_reduce_sum(self.weight[0])
        self.total[0] *= self.items_a_sequence
        # CTAs that have work
        self.up[0] = T.max(
            T.min(
                T.if_then_else(self.fixed == 0, self.total[0] // (LEAST_KEYS // self.block_N), self.total[0]),
                self.ctas,
            ),
            1,
        )
        self.base[0] = T.truncdiv(self.total[0], self.up[0])
        self.longer[0] = self.total[0] - self.base[0] * self.up[0]
        if cta < self.up[0]:
            self.unit[0] = cta * self.base[0] + T.min(cta, self.longer[0])
            self.end[0] = self.unit[0] + self.base[0] + T.if_then_else(cta < self.longer[0], 1, 0)
            self.total[0] = 0
            for chunk in rolled(T.ceildiv(self.batch, 32)):
                if self.batch > 32:
                    self.measure(chunk * 32 + lane)
                self.inside[0] = self.weight[0]
                for distance in (1, 2, 4, 8, 16):
                    self.up[0] = T.shfl_up(self.inside[0], distance)
                    if lane >= distance:
                        self.inside[0] += self.up[0]
                self.up[0] = (self.total[0] + self.inside[0] - self.weight[0]) * self.items_a_sequence
                self.total[0] += T.shfl_sync(self.inside[0], 31)
                found = (self.up[0] <= self.unit[0]) & (
                    self.unit[0] < self.up[0] + self.weight[0] * self.items_a_sequence
                )
                self.b[0] = T.max(self.b[0], T.warp_reduce_max(T.if_then_else(found, chunk * 32 + lane, 0)))
                self.before[0] = T.max(
                    self.before[0], T.warp_reduce_max(T.if_then_else(found, self.up[0], 0))
                )
            self.measure(self.b[0])

    @property
    def goes_on(self) -> Any:
        return self.unit[0] < self.end[0]

    def cta_of(self, unit: Any) -> Any:
        is_longer = unit < self.longer[0] * (self.base[0] + 1)
        return T.truncdiv(
            unit - T.if_then_else(is_longer, 0, self.longer[0]),
            self.base[0] + T.if_then_else(is_longer, 1, 0),
        )

    @T.inline
    def take(self):
        """The segment at `unit`, and move on behind it."""
        while self.unit[0] >= self.before[0] + self.weight[0] * self.items_a_sequence:
            self.before[0] += self.weight[0] * self.items_a_sequence
            self.b[0] += 1
            self.measure(self.b[0])
        self.item[0] = T.truncdiv(self.unit[0] - self.before[0], self.weight[0])
        self.inside[0] = self.unit[0] - self.before[0] - self.item[0] * self.weight[0]
        self.up[0] = self.unit[0] - self.inside[0]  # of the item's first unit
        self.kv_head[0] = T.truncdiv(self.item[0], self.m_blocks)
        self.m_block[0] = self.item[0] - self.kv_head[0] * self.m_blocks
        self.item[0] += self.b[0] * self.items_a_sequence
        if self.fixed == 0:
            self.start_block[0] = self.first_block[0] + self.inside[0]
            self.steps[0] = T.min(self.weight[0] - self.inside[0], self.end[0] - self.unit[0])
            self.part[0] = self.cta_of(self.up[0])
            self.parts[0] = self.cta_of(self.up[0] + self.weight[0] - 1) - self.part[0] + 1
            # CTAs and items rise together, so that no two segments share their sum
            self.first_slot[0] = self.part[0] + self.item[0]
            self.part[0] = self.cta[0] - self.part[0]
            self.unit[0] += self.steps[0]
            self.entry[0] = T.if_then_else(self.parts[0] > 1, self.cta[0], -1)
        else:
            self.start_block[0] = self.first_block[0] + self.inside[0] * self.split_blocks[0]
            self.steps[0] = T.min(
                self.split_blocks[0], self.blocks[0] - self.inside[0] * self.split_blocks[0]
            )
            self.parts[0] = self.weight[0]
            self.part[0] = self.inside[0]
            self.first_slot[0] = self.up[0]
            self.unit[0] += 1
            self.entry[0] = self.item[0]
        if self.part[0] > 0:
            self.entry[0] = -1


@T.meta_class
class SegmentBox:
    """Where the producer leaves each segment for the consumers, which so neither divide nor count. One of 0 steps is the end.

    As in scheduler.TileBox, a sync_warp on either side of a barrier keeps the compiler from moving plain loads and stores across it.
    """

    FIELDS = (
        "steps", "b", "kv_head", "m_block", "start_block", "length", "parts", "part", "first_slot", "entry",
    )  # fmt: skip

    def __init__(self, consumer_warps: int, name: str = "segment_box"):
        self.plans = T.alloc_shared([2, len(self.FIELDS)], "int32")
        self.full = T.alloc_barrier([1, 1])
        self.empty = T.alloc_barrier([consumer_warps] * 2)

    @T.inline
    def post(self, turn, walk):
        T.mbarrier_wait_parity(self.empty[turn % 2], turn // 2 % 2 ^ 1)
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            for number, name in enumerate(self.FIELDS):
                self.plans[turn % 2, number] = getattr(walk, name)[0]
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.full[turn % 2])

    @T.inline
    def wait(self, turn):
        T.mbarrier_wait_parity(self.full[turn % 2], turn // 2 % 2)
        T.sync_warp()

    @T.inline
    def release(self, turn):
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[turn % 2])

    def read(self, turn: Any, field: str) -> Any:
        return self.plans[turn % 2, self.FIELDS.index(field)]


@T.meta_class
class Pages:
    """Where the pieces of a sequence's blocks of keys lie in a cache of pages, 32 pieces looked up at once, a lane each.

    A piece is page_rows keys of one page; without pages (0) a block, and a cache is a page.
    """

    def __init__(self, page_rows: int, name: str = "pages"):
        self.page_rows = page_rows
        self.page, self.row, self.from_end = (T.alloc_var("int32", init=0) for _ in range(3))

    @T.inline
    def look_up(self, Table, b, first_key, length, page_size, num_pages):
        key = first_key + T.get_thread_binding() % 32 * self.page_rows
        self.page[0] = -1
        if (key < length) & (T.truncdiv(key, page_size) < Table.shape[1]):
            self.page[0] = Table[b, T.truncdiv(key, page_size)]
            self.row[0] = key - T.truncdiv(key, page_size) * page_size
            self.from_end[0] = T.min(page_size - self.row[0], length - key)
        if (self.page[0] < 0) | (self.page[0] >= num_pages):  # never read
            self.page[0] = 0
            self.from_end[0] = 0


def flash_decode(problem: AttnProblem, config: DecodeConfig) -> T.PrimFunc:
    """Kernel(Q, K, V, O, Lse, Seqlens, Leftpad, Caches, Table, O_parts, Lse_parts, Merges, softmax_scale, lse_unit,
    heads_a_kv_head, m_blocks, given, seqlen, appended, room, page_size, num_pages, page_k, page_v, fixed, ctas, left, right,
    softcap, Slopes, Sink).

    Q, O: [batch, seqlen_q, heads, head_dim or head_dim_v], contiguous, of the tile's widths; Lse: [batch, heads, seqlen_q] fp32,
    in log2 / lse_unit. K, V: as tiles.packed has them, all rows of all caches or pages one after the other, page_k and page_v rows
    from one to the next. A sequence has the keys from Leftpad to before Seqlens + appended, room at most, of cache Caches: int32
    [batch]; given & 1, 2, 4 says which of Seqlens, Leftpad, Caches are, else seqlen, 0 and its own number are. config.page_rows: Table
    int32 [batch, pages] has the pages of page_size keys of each sequence; one outside [0, num_pages) reads as zeros. fixed: see Walk.
    O_parts: [slots, warpgroups, rows, columns], Lse_parts: [slots, warpgroups, rows] fp32; slots: ctas + items, or one a split.
    Merges: int32 [entries, MERGE_NUMBERS], of an item in MERGE_FIELDS what decode_combine.py needs: an entry a CTA, for the item
    whose first part it has, or with fixed != 0 an entry an item; parts is less than 2 where there is nothing to merge.
    left, right: the window, as options.Options has it; it is always on.
    """
    dtype, head_dim, head_dim_v = problem.dtype, problem.head_dim, problem.head_dim_v
    block_N, page_rows = config.block_N, config.page_rows
    consumer_warps = 4 * config.warpgroups
    columns = config.columns(problem)  # of O that a warpgroup has
    rows_a_tile = config.block_M
    # With one warpgroup the producer has no more than a warp
    roles = Roles(
        config.warpgroups,
        config.threads,
        REGISTERS.get(config.warpgroups),
        one_body=config.warpgroups > 1,
    )
    row_wise = T.GemmWarpPolicy.FullRow
    q_kt = {"transpose_B": True, "policy": row_wise, "clear_accum": True}
    v_in_k = config.v_in_k

    def own_columns(w: Any) -> slice:
        """Columns of O that a warpgroup computes."""
        first = config.first_column(problem, w)
        return slice(first, first + columns)

    # QK of a block beside PV of the one before. Where two CTAs share an SM, they do so for each other, in less code; two warpgroups
    # with 256 columns of O lack the registers
    overlaps = config.ctas_per_sm == 1 and not v_in_k and config.warpgroups * head_dim_v < 512
    chunk = (
        64 if head_dim % 64 == 0 and head_dim_v % 64 == 0 else 32
    )  # columns of a row of the swizzled layout
    # Columns of queries on their way at once; the places of rows of 192 or 576 would take registers throughout
    gathered = chunk if head_dim % 128 == 64 else head_dim
    pieces = tuple(range(block_N // page_rows)) if page_rows else ()

    batch, seqlen_q, heads, heads_kv = T.dynamic("batch, seqlen_q, heads, heads_kv")
    columns_qk, columns_v = T.dynamic("columns_qk, columns_v")
    seqlens_n, leftpad_n, caches_n, table_n, pages_n = T.dynamic(
        "seqlens_n, leftpad_n, caches_n, table_n, pages_n"
    )
    slots, part_rows, entries = T.dynamic("slots, part_rows, entries")
    slopes_batch, slopes_heads, sink_heads = T.dynamic("slopes_batch, slopes_heads, sink_heads")

    def meet(w: int) -> Any:
        """Of those that share a tile of queries."""
        return (
            pipeline.sync_consumers(WARPGROUP * config.warpgroups)
            if config.divides_columns
            else sync_warpgroup(w)
        )

    def of_row(shared: Any, held: Any, w: int, i: Any) -> Any:
        """Held in registers for the many stores of a row; with ALiBi they do not suffice."""
        return shared[w, i] if held is None else held[i]

    @T.macro
    def load(
        cta, ctas, lengths, K, V, Table, page_size, num_pages, page_k, page_v, items_a_sequence, m_blocks, left, fixed, segments,
        K_ring, V_ring,
    ):  # fmt: skip
        walk = Walk(lengths, block_N, batch, items_a_sequence, m_blocks, seqlen_q, left, fixed, ctas)
        walk.begin(cta)
        pages = Pages(page_rows)
        turn = T.alloc_var("int32", init=0)
        step = T.alloc_var("int32", init=0)
        cache = T.alloc_var("int32", init=0)
        leftpad = T.alloc_var("int32", init=0)
        end_k = T.alloc_var("int32", init=0)
        end_v = T.alloc_var("int32", init=0)
        row = T.alloc_var("int32", init=0)
        while walk.goes_on:
            walk.take()
            segments.post(turn, walk)
            turn += 1
            if not page_rows:
                cache = lengths.cache(walk.b[0])
                leftpad = lengths.leftpad(walk.b[0])
                end_k = cache * page_k + leftpad + walk.length[0]
                end_v = cache * page_v + leftpad + walk.length[0]
            for i in rolled(walk.steps[0]):
                first_key = (walk.start_block[0] + i) * block_N
                if page_rows:
                    if i * len(pieces) % 32 == 0:
                        pages.look_up(Table, walk.b[0], first_key, walk.length[0], page_size, num_pages)
                    K_ring.wait_empty(step)
                    if not v_in_k:
                        V_ring.wait_empty(step)
                    for piece in pieces:
                        lane = i * len(pieces) % 32 + piece
                        row = FAR - T.shfl_sync(pages.from_end[0], lane)
                        end_k = T.shfl_sync(pages.page[0], lane)
                        end_v = end_k * page_v + T.shfl_sync(pages.row[0], lane) + FAR - row
                        end_k = end_k * page_k + T.shfl_sync(pages.row[0], lane) + FAR - row
                        rows = slice(piece * page_rows, (piece + 1) * page_rows)
                        for c in range_of(head_dim, chunk):
                            T.tma_copy(
                                K[FAR, end_k, row : row + page_rows, walk.kv_head[0], c : c + chunk],
                                K_ring.tiles[step % K_ring.slots, rows, c : c + chunk],
                                barrier=K_ring.full[step % K_ring.slots],
                            )
                        if not v_in_k:
                            for c in range_of(head_dim_v, chunk):
                                T.tma_copy(
                                    V[FAR, end_v, row : row + page_rows, walk.kv_head[0], c : c + chunk],
                                    V_ring.tiles[step % V_ring.slots, rows, c : c + chunk],
                                    barrier=V_ring.full[step % V_ring.slots],
                                )
                    if T.get_thread_binding() % 32 == 0:
                        T.mbarrier_arrive(K_ring.full[step % K_ring.slots])
                        if not v_in_k:
                            T.mbarrier_arrive(V_ring.full[step % V_ring.slots])
                else:
                    row = FAR - walk.length[0] + first_key
                    K_ring.fill(step, K[FAR, end_k, row : row + block_N, walk.kv_head[0], 0:head_dim])
                    if not v_in_k:
                        V_ring.fill(step, V[FAR, end_v, row : row + block_N, walk.kv_head[0], 0:head_dim_v])
                step += 1
        walk.steps[0] = 0
        segments.post(turn, walk)

    @T.macro
    def weigh(acc_s, scores, softmax, places, slopes, w, first_key, length, softmax_scale, options):
        """Scores Q K^T to exponentials, as far as the keys are seen."""
        scores.cap(acc_s)
        if scores.biased:
            factor = options.softcap if scores.capped else softmax_scale
            for i, j in T.Parallel(64, block_N):
                distance = T.abs(T.cast(places[w, i] - first_key - j, "float32"))
                acc_s[i, j] = acc_s[i, j] * factor - slopes[w, i] * distance
        # Of the first and the last query of the sequence
        if (
            (first_key + block_N > length)
            | (first_key + block_N - 1 > length - seqlen_q + options.right)
            | (first_key < length - 1 - options.left)
        ):
            for i, j in T.Parallel(64, block_N):
                seen = (
                    (first_key + j <= places[w, i] + options.right)
                    & (first_key + j >= places[w, i] - options.left)
                    & (first_key + j < length)
                )
                acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))
        softmax.update(acc_s)

    @T.macro
    def consume(
        w, cta, segments, Q, O, Lse, O_parts, Lse_parts, Merges, Q_shared, K_ring, V_ring, rows_shared, softmax_scale, lse_unit,
        heads_a_kv_head, fixed, options,
    ):  # fmt: skip
        tokens, row_heads, places, slopes, sinks = rows_shared
        Q_rows = T.alloc_fragment([64, gathered], dtype)
        acc_s = T.alloc_fragment([64, block_N], "float32")  # scores, then their exponentials
        P = T.alloc_fragment([64, block_N], dtype)
        acc_o = T.alloc_fragment([64, columns], "float32")
        lse = T.alloc_fragment([64], "float32")
        row_token = None if problem.has("alibi") else T.alloc_fragment([64], "int32")
        row_head = None if problem.has("alibi") else T.alloc_fragment([64], "int32")
        sink_share = T.alloc_fragment([64], "float32")
        scores = Scores(problem, options, softmax_scale)
        raw_scale = T.max(T.abs(softmax_scale) * LOG2E, SMALLEST_SCALE)
        softmax = OnlineSoftmax(block_N, raw_scale if scores.raw else scores.scale_log2)
        sign = T.alloc_var("float32", init=1.0)
        step = T.alloc_var("int32", init=0)
        rows = T.alloc_var("int32", init=0)  # of queries that this warpgroup has
        first_row = T.alloc_var("int32", init=0)
        number = T.alloc_var("int32", init=0)
        first = T.alloc_var("int32", init=0)
        q_slot = 0 if config.divides_columns else w
        if scores.raw:  # the running maximum is one of raw scores, so -Q and |scale|
            if softmax_scale < 0:
                sign = -1.0

        turn = T.alloc_var("int32", init=0)
        b = T.alloc_var("int32", init=0)
        length = T.alloc_var("int32", init=0)
        steps = T.alloc_var("int32", init=0)
        start = T.alloc_var("int32", init=0)
        parts = T.alloc_var("int32", init=0)
        if w == 0:
            if (fixed == 0) & (T.get_thread_binding() == 0):
                Merges[cta, MERGE_FIELDS.index("parts")] = 0
        segments.wait(0)
        steps = T.shfl_sync(segments.read(0, "steps"), 0)
        while steps > 0:
            b = segments.read(turn, "b")
            length = segments.read(turn, "length")
            start = segments.read(turn, "start_block")
            first_row = segments.read(turn, "m_block") * rows_a_tile + (
                0 if config.divides_columns else 64 * w
            )
            rows = T.max(T.min(seqlen_q * heads_a_kv_head - first_row, 64), 0)

            # Rows past the last are the last again; nothing of theirs is written
            thread = T.get_thread_binding() % WARPGROUP
            meet(w)  # all are done with the queries before
            if thread < 64:
                number = T.min(first_row + thread, seqlen_q * heads_a_kv_head - 1)
                tokens[w, thread] = T.truncdiv(number, heads_a_kv_head)
                row_heads[w, thread] = segments.read(turn, "kv_head") * heads_a_kv_head + T.truncmod(
                    number, heads_a_kv_head
                )
                places[w, thread] = length - seqlen_q + tokens[w, thread]
            sync_warpgroup(w)
            if thread < 64:
                if problem.has("alibi"):
                    slopes[w, thread] = options.Slopes[b, row_heads[w, thread]]
                if problem.has("sink"):
                    sinks[w, thread] = options.Sink[row_heads[w, thread]] * LOG2E
            for c in T.serial(head_dim // gathered):
                # By way of registers: no load passes a store to shared memory, and each is a trip to memory
                for i, j in T.Parallel(64, gathered):
                    Q_rows[i, j] = Q[b, tokens[w, i], row_heads[w, i], c * gathered + j]
                for i, j in T.Parallel(64, gathered):
                    Q_shared[q_slot, i, c * gathered + j] = T.cast(
                        T.cast(Q_rows[i, j], "float32") * sign, dtype
                    )
            T.fence_proxy_async()
            meet(w)

            softmax.reset()
            if overlaps:
                K_ring.wait(step)
                T.wgmma_gemm(Q_shared[q_slot, :, :], K_ring[step], acc_s, **q_kt)
                T.wait_wgmma(0)
                K_ring.release(step)
                weigh(
                    acc_s, scores, softmax, places, slopes, w, start * block_N, length, softmax_scale, options
                )
                T.copy(acc_s, P)
                T.clear(acc_o)
                for i in rolled(steps - 1):
                    K_ring.wait(step + 1)
                    T.wgmma_gemm(Q_shared[q_slot, :, :], K_ring[step + 1], acc_s, **q_kt)
                    V_ring.wait(step)
                    T.wgmma_gemm(P, V_ring[step], acc_o, policy=row_wise)
                    T.wait_wgmma(1)  # S is there
                    K_ring.release(step + 1)
                    weigh(
                        acc_s,
                        scores,
                        softmax,
                        places,
                        slopes,
                        w,
                        (start + 1 + i) * block_N,
                        length,
                        softmax_scale,
                        options,
                    )
                    T.wait_wgmma(0)  # O is there, and P free
                    V_ring.release(step)
                    T.copy(acc_s, P)
                    softmax.rescale(acc_o)
                    step += 1
                V_ring.wait(step)
                T.wgmma_gemm(P, V_ring[step], acc_o, policy=row_wise)
                T.wait_wgmma(0)
                V_ring.release(step)
                step += 1
            else:
                T.clear(acc_o)
                for i in rolled(steps):
                    K_ring.wait(step)
                    T.wgmma_gemm(Q_shared[q_slot, :, :], K_ring[step], acc_s, **q_kt)
                    T.wait_wgmma(0)
                    if not v_in_k:
                        K_ring.release(step)
                    weigh(
                        acc_s,
                        scores,
                        softmax,
                        places,
                        slopes,
                        w,
                        (start + i) * block_N,
                        length,
                        softmax_scale,
                        options,
                    )
                    T.copy(acc_s, P)
                    softmax.rescale(acc_o)
                    if v_in_k:
                        T.wgmma_gemm(
                            P, K_ring.tiles[step % K_ring.slots, :, own_columns(w)], acc_o, policy=row_wise
                        )
                        T.wait_wgmma(0)
                        K_ring.release(step)
                    else:
                        V_ring.wait(step)
                        T.wgmma_gemm(P, V_ring[step], acc_o, policy=row_wise)
                        T.wait_wgmma(0)
                        V_ring.release(step)
                    step += 1

            softmax.finish(acc_o, lse, 1.0)
            parts = segments.read(turn, "parts")
            if parts == 1:
                if problem.has("sink"):
                    for i in T.Parallel(64):
                        sink_share[i] = T.max(T.max(lse[i], sinks[w, i]), LOWEST)
                        sink_share[i] += T.log2(
                            T.exp2(lse[i] - sink_share[i]) + T.exp2(sinks[w, i] - sink_share[i])
                        )
                    for i, j in T.Parallel(64, columns):
                        acc_o[i, j] *= T.exp2(lse[i] - T.max(sink_share[i], LOWEST))
                    T.copy(sink_share, lse)
                if row_token is not None:
                    T.copy(tokens[w, :], row_token)
                    T.copy(row_heads[w, :], row_head)
                for i in T.Parallel(64):
                    if i < rows:
                        Lse[b, of_row(row_heads, row_head, w, i), of_row(tokens, row_token, w, i)] = (
                            lse[i] * lse_unit
                        )
                for i, j in T.Parallel(64, columns):
                    if i < rows:
                        O[
                            b,
                            of_row(tokens, row_token, w, i),
                            of_row(row_heads, row_head, w, i),
                            config.first_column(problem, w) + j,
                        ] = acc_o[i, j]
            else:
                first = segments.read(turn, "first_slot") + segments.read(turn, "part")
                for i in T.Parallel(64):
                    if i < rows:
                        Lse_parts[first, w, i] = lse[i]
                for i, j in T.Parallel(64, columns):
                    if i < rows:
                        O_parts[first, w, i, j] = acc_o[i, j]
            if w == 0:
                if (segments.read(turn, "entry") >= 0) & (T.get_thread_binding() == 0):
                    for number, name in enumerate(MERGE_FIELDS):
                        Merges[segments.read(turn, "entry"), number] = segments.read(turn, name)
            segments.release(turn)
            turn += 1
            segments.wait(turn)
            steps = T.shfl_sync(segments.read(turn, "steps"), 0)

    @T.prim_func
    def flash_decode_kernel(
        Q: T.Tensor([batch, seqlen_q, heads, head_dim], dtype),
        K: packed("k", heads_kv, columns_qk, dtype),
        V: packed("v", heads_kv, columns_v, dtype),
        O: T.Tensor([batch, seqlen_q, heads, head_dim_v], dtype),
        Lse: T.Tensor([batch, heads, seqlen_q], "float32"),
        Seqlens: T.Tensor([seqlens_n], "int32"),
        Leftpad: T.Tensor([leftpad_n], "int32"),
        Caches: T.Tensor([caches_n], "int32"),
        Table: T.StridedTensor([table_n, pages_n], [T.dynamic("table_stride"), 1], "int32"),
        O_parts: T.Tensor([slots, config.warpgroups, part_rows, columns], "float32"),
        Lse_parts: T.Tensor([slots, config.warpgroups, part_rows], "float32"),
        Merges: T.Tensor([entries, MERGE_NUMBERS], "int32"),
        softmax_scale: T.float32,
        lse_unit: T.float32,
        heads_a_kv_head: T.int32,
        m_blocks: T.int32,
        given: T.int32,
        seqlen: T.int32,
        appended: T.int32,
        room: T.int32,
        page_size: T.int32,
        num_pages: T.int32,
        page_k: T.int32,
        page_v: T.int32,
        fixed: T.int32,
        ctas: T.int32,
        left: T.int32,
        right: T.int32,
        softcap: T.float32,
        Slopes: T.StridedTensor([slopes_batch, slopes_heads], [T.dynamic("slopes_stride"), 1], "float32"),
        Sink: T.Tensor([sink_heads], "float32"),
    ):
        with T.Kernel(ctas, threads=roles.block, prelude=roles.prelude) as cta:
            T.pdl_trigger()  # the launch of decode_combine.py, which waits for the end of this
            T.annotate_min_blocks_per_sm(config.ctas_per_sm)
            Q_shared = pipeline.alloc_swizzled(
                [1 if config.divides_columns else config.warpgroups, 64, head_dim], dtype
            )
            K_ring = TileRing([config.num_stages, block_N, head_dim], dtype, consumer_warps, name="K")
            V_ring = (
                None
                if v_in_k
                else TileRing([config.num_stages, block_N, head_dim_v], dtype, consumer_warps, name="V")
            )
            segments = SegmentBox(consumer_warps)
            tokens = T.alloc_shared([config.warpgroups, 64], "int32")
            row_heads = T.alloc_shared([config.warpgroups, 64], "int32")
            places = T.alloc_shared([config.warpgroups, 64], "int32")
            slopes = T.alloc_shared([config.warpgroups, 64], "float32") if problem.has("alibi") else None
            sinks = T.alloc_shared([config.warpgroups, 64], "float32") if problem.has("sink") else None
            rows_shared = tokens, row_heads, places, slopes, sinks
            lengths = Lengths(Seqlens, Leftpad, Caches, given, seqlen, appended, room)
            options = DecodeOptions(left, right, softcap, Slopes, Sink)

            roles.run(
                lambda: load(
                    cta, ctas, lengths, K, V, Table, page_size, num_pages, page_k, page_v, heads_kv * m_blocks, m_blocks, left, fixed,
                    segments, K_ring, V_ring,
                ),
                lambda w: consume(
                    w, cta, segments, Q, O, Lse, O_parts, Lse_parts, Merges, Q_shared, K_ring, V_ring, rows_shared,
                    softmax_scale, lse_unit, heads_a_kv_head, fixed, options,
                ),
            )  # fmt: skip

    return flash_decode_kernel


def range_of(columns: int, chunk: int) -> tuple[int, ...]:
    """Where chunks of columns begin; a tuple, as TileLang makes a loop of a range."""
    return tuple(range(0, columns, chunk))
