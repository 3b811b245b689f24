"""Division of a decode's work among CTAs, computed on the GPU, since the host does not know the lengths of the sequences.

Work item: one sequence, one key head and one query block of block_M rows. Items are numbered by sequence, then key head, then query block.
Work unit: what CTAs divide. All items of a sequence have the same number of work units, by the split rule:
    0: first `item_blocks` units for the time that an item takes beside its keys, to begin and to store its result; then one per key block.
        CTAs share all units evenly, and the range of a CTA may begin and end inside an item. Where whole items or n equal splits per item
        are about as even, as with sequences of equal lengths, CTAs have those instead: this leaves fewer partials, or none.
    n > 0: one unit per split of n key blocks, so that the splits of a sequence do not depend on other sequences.
    -n < 0: n splits of equal size, one unit each; fewer where a sequence has fewer key blocks.
Segment: the key blocks of one item that one CTA processes without a break. An item of several segments is merged by
combine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import (
    KEYS_OF_A_MERGE,
    MANY_PARTIALS,
    MIN_BLOCKS_PER_CTA,
    MORE_KEYS,
    DecodeConfig,
)
from tl_attention.kernels.seams.pipeline import sync_warpgroup
from tl_attention.kernels.seams.roles import WARPGROUP
from tl_attention.problem.attn_problem import AttnProblem

# Bits of the kernel argument `present`: which optional tensors a launch has
HAS_SEQLENS, HAS_LEFTPAD, HAS_CACHE_INDEX = 1, 2, 4


def rolled(steps: Any) -> Any:
    """Loop that nvcc does not unroll. Each instruction is fetched from L2 or memory once, so less code is faster."""
    return T.unroll(steps, unroll_factor=1)


def block_of_step(config: DecodeConfig, steps: Any, i: Any) -> Any:
    """Key block of step i of a segment of so many steps: with batch_invariant from the last one on, as in a forward."""
    return steps - 1 - i if config.batch_invariant else i


def int_var() -> Any:
    """int32 variable of a thread, 0 at first."""
    return T.alloc_var("int32", init=0)


@dataclass(frozen=True)
class KeyRanges:
    """Position of each sequence's keys in the cache. Keys, and key blocks, are numbered from the first row after the padding.

    Args:
        Seqlens: int32 [batch], rows in use before the appended ones, left padding included; absent: `seqlen` for all sequences.
        Leftpad: int32 [batch], cache rows before the first key; absent: 0.
        CacheIndex: int32 [batch], cache of each sequence; absent: its own number.
        present: bits HAS_SEQLENS, HAS_LEFTPAD, HAS_CACHE_INDEX. An absent tensor may have any length of at least 1.
        seqlen, appended: rows in use, left padding included; rows appended since.
        capacity: rows that a cache, or the pages of a sequence, can hold.
    """

    Seqlens: Any
    Leftpad: Any
    CacheIndex: Any
    present: Any
    seqlen: Any
    appended: Any
    capacity: Any

    def value(self, tensor: Any, flag: int, b: Any, default: Any) -> Any:
        """tensor[b], or default if the tensor is absent."""
        bit = self.present >> flag.bit_length() - 1 & 1
        # The index is 0 in an absent tensor, so that a load moved ahead of the condition stays inside
        return T.if_then_else(bit != 0, tensor[b * bit], default)

    def keys_end(self, b: Any) -> Any:
        """Row after the last key of sequence b, counted from the start of its cache."""
        seqlen = self.value(self.Seqlens, HAS_SEQLENS, b, self.seqlen)
        return T.min(seqlen + self.appended, self.capacity)

    def leftpad(self, b: Any) -> Any:
        return self.value(self.Leftpad, HAS_LEFTPAD, b, 0)

    def cache(self, b: Any) -> Any:
        return self.value(self.CacheIndex, HAS_CACHE_INDEX, b, b)


@dataclass(frozen=True)
class WorkSizes:
    """Sizes that determine the division of the work: two constants, int32 kernel arguments, and a condition on them."""

    block_N: int  # keys per key block
    item_blocks: int  # key blocks that take as long as an item takes beside its keys
    batch: Any
    seqlen_q: Any
    items_per_sequence: Any
    m_blocks: Any  # query blocks per key head
    left: Any  # keys that a query sees before its diagonal
    split_rule: Any  # see the top of this file
    ctas: Any
    entry_per_cta: Any  # Merges has an entry per CTA, not one per item


@T.meta_class
class WorkShare:
    """Work units of one CTA, read segment by segment by the producer warp.

    All lanes hold the same values, except in count_units() and find_sequence(), where each has a sequence of its own. CTAs that have work
    have equal numbers of work units, up to one.
    """

    def __init__(self, ranges: KeyRanges, sizes: WorkSizes, name: str = "work"):
        self.ranges, self.sizes = ranges, sizes
        # The sequence of work unit `unit`
        self.b = int_var()
        self.units_before = int_var()  # work units of all sequences before
        self.units_per_item = int_var()
        self.num_blocks = int_var()  # key blocks from first_block on
        self.length = int_var()  # keys
        self.first_block = int_var()  # first key block that a query sees
        self.blocks_per_split = int_var()
        self.split_rule = int_var()  # of the launch, or what choose_equal_splits() chose
        # The range of this CTA
        self.unit = int_var()  # first work unit of the next segment
        self.end_unit = int_var()
        self.units_per_cta = int_var()
        self.longer_ctas = int_var()  # number of CTAs, the first ones, with one unit more
        self.cta = int_var()
        self.total_units = int_var()
        self.longest = int_var()  # work units of the longest item
        self.splits = int_var()  # of an item
        self.units_per_sequence = int_var()  # of all sequences; 0: they differ
        self.busy_ctas = int_var()  # CTAs that have work
        # Scan over 32 sequences, one per lane. These count the units of one item per sequence, except for lane_units_before
        self.scanned_units = int_var()  # of the chunks of 32 before
        # A shuffled value, then the units of all items of all sequences before this lane's
        self.lane_units_before = int_var()
        self.units_to_lane = int_var()  # up to this lane's sequence, included
        # The segment
        self.item_unit = int_var()  # first work unit of the item
        self.unit_in_item = int_var()
        self.item = int_var()
        self.kv_head = int_var()
        self.m_block = int_var()  # query block
        self.start_block = int_var()
        self.steps = int_var()  # key blocks of the segment
        self.parts = int_var()  # segments of the item, each with a partial
        self.part = int_var()  # number of the segment in the item
        self.first_slot = int_var()  # slot in O_parts and Lse_parts of the item's first partial
        self.entry = int_var()  # entry in Merges that this segment writes; -1: none

    @T.inline
    def read_sequence(self, b):
        """Set the length, key blocks and work units of sequence b; no work units past the last sequence."""
        sizes = self.sizes
        self.units_per_item[0] = 0
        if b < sizes.batch:
            self.length[0] = self.ranges.keys_end(b) - self.ranges.leftpad(b)
            self.first_block[0] = T.max(self.length[0] - sizes.seqlen_q - sizes.left, 0) // sizes.block_N
            # A sequence without keys has one masked block, since it has an output
            self.num_blocks[0] = T.max(
                (self.length[0] + sizes.block_N - 1) // sizes.block_N - self.first_block[0], 1
            )
            self.units_per_item[0] = self.num_blocks[0] + sizes.item_blocks
            if self.split_rule[0] != 0:
                self.blocks_per_split[0] = self.split_rule[0]
                if self.split_rule[0] < 0:  # num_blocks / -split_rule, rounded up
                    self.blocks_per_split[0] = T.truncdiv(
                        self.num_blocks[0] - self.split_rule[0] - 1, -self.split_rule[0]
                    )
                self.units_per_item[0] = T.truncdiv(
                    self.num_blocks[0] + self.blocks_per_split[0] - 1, self.blocks_per_split[0]
                )

    @T.inline
    def start(self, cta):
        """Set the range of work units of this CTA, and find the sequence of the first."""
        sizes = self.sizes
        self.cta[0], self.split_rule[0] = cta, sizes.split_rule
        self.count_units()
        if sizes.split_rule == 0:
            self.choose_equal_splits()
        enough = T.if_then_else(
            self.split_rule[0] == 0, self.total_units[0] // MIN_BLOCKS_PER_CTA, self.total_units[0]
        )
        self.busy_ctas[0] = T.max(T.min(enough, sizes.ctas), 1)
        self.units_per_cta[0] = T.truncdiv(self.total_units[0], self.busy_ctas[0])
        self.longer_ctas[0] = self.total_units[0] - self.units_per_cta[0] * self.busy_ctas[0]
        # The condition reads a variable that its body sets; else TileLang 0.1.15 would make an `if` of each statement
        self.unit[0] = cta
        if self.unit[0] < self.busy_ctas[0]:
            self.unit[0] = cta * self.units_per_cta[0] + T.min(cta, self.longer_ctas[0])
            self.end_unit[0] = (
                self.unit[0] + self.units_per_cta[0] + T.if_then_else(cta < self.longer_ctas[0], 1, 0)
            )
            if self.units_per_sequence[0] > 0:
                self.b[0] = T.truncdiv(self.unit[0], self.units_per_sequence[0])
                self.units_before[0] = self.b[0] * self.units_per_sequence[0]
            else:
                self.find_sequence()
            self.read_sequence(self.b[0])
        else:
            self.unit[0] = 0  # no work: end_unit is 0, too

    @T.inline
    def choose_equal_splits(self):
        """Replace split rule 0 by n splits of each item, at most one per CTA, or by whole items, if that is about as even.

        Splits need lengths that are equal up to a key block; whole items do not.
        """
        sizes = self.sizes
        items, longest_blocks = sizes.batch * sizes.items_per_sequence, self.longest[0] - sizes.item_blocks
        # Above MANY_PARTIALS splits have twice as many key blocks at least, as merging takes longer
        most_splits = T.max(
            T.min(longest_blocks // MIN_BLOCKS_PER_CTA, MANY_PARTIALS),
            longest_blocks // (2 * MIN_BLOCKS_PER_CTA),
        )
        self.splits[0] = T.max(T.min(T.truncdiv(sizes.ctas, items), most_splits), 1)
        self.blocks_per_split[0] = T.truncdiv(longest_blocks + self.splits[0] - 1, self.splits[0])
        are_equal = (self.splits[0] == 1) | (self.total_units[0] == items * self.longest[0])
        # Key blocks of a CTA: the most, the mean, and how many more than the mean merging is worth
        most = T.truncdiv(items + sizes.ctas - 1, sizes.ctas) * self.blocks_per_split[0]
        all_blocks = self.total_units[0] - items * sizes.item_blocks
        mean = T.max(T.truncdiv(all_blocks, sizes.ctas), MIN_BLOCKS_PER_CTA)
        more = KEYS_OF_A_MERGE // sizes.block_N + T.min(mean // 16, MORE_KEYS // sizes.block_N)
        if are_equal & (most <= mean + more):
            self.split_rule[0] = -self.splits[0]
            # What read_sequence() finds by this rule for each sequence, as rounding up to key blocks may leave fewer splits
            self.splits[0] = T.truncdiv(
                longest_blocks + self.blocks_per_split[0] - 1, self.blocks_per_split[0]
            )
            self.units_per_sequence[0] = self.splits[0] * sizes.items_per_sequence
            self.total_units[0] = sizes.batch * self.units_per_sequence[0]

    @T.inline
    def count_units(self):
        """Set total_units and longest, with one sequence per lane."""
        lane = T.get_thread_binding() % 32
        for chunk in rolled(T.ceildiv(self.sizes.batch, 32)):
            self.read_sequence(chunk * 32 + lane)
            self.total_units[0] += T.warp_reduce_sum(self.units_per_item[0])
            self.longest[0] = T.max(self.longest[0], T.warp_reduce_max(self.units_per_item[0]))
        self.total_units[0] *= self.sizes.items_per_sequence

    @T.inline
    def find_sequence(self):
        """Set b to the sequence of `unit`, and units_before, by a prefix sum with one sequence per lane."""
        sizes = self.sizes
        lane = T.get_thread_binding() % 32
        for chunk in rolled(T.ceildiv(sizes.batch, 32)):
            if sizes.batch > 32:  # else the lanes still hold the sequences of count_units()
                self.read_sequence(chunk * 32 + lane)
            self.units_to_lane[0] = self.units_per_item[0]
            for distance in (1, 2, 4, 8, 16):
                self.lane_units_before[0] = T.shfl_up(self.units_to_lane[0], distance)
                if lane >= distance:
                    self.units_to_lane[0] += self.lane_units_before[0]
            self.lane_units_before[0] = (
                self.scanned_units[0] + self.units_to_lane[0] - self.units_per_item[0]
            ) * sizes.items_per_sequence
            self.scanned_units[0] += T.shfl_sync(self.units_to_lane[0], 31)
            found = (self.lane_units_before[0] <= self.unit[0]) & (
                self.unit[0] < self.lane_units_before[0] + self.units_per_item[0] * sizes.items_per_sequence
            )
            self.b[0] = T.max(self.b[0], T.warp_reduce_max(T.if_then_else(found, chunk * 32 + lane, 0)))
            self.units_before[0] = T.max(
                self.units_before[0],
                T.warp_reduce_max(T.if_then_else(found, self.lane_units_before[0], 0)),
            )

    @property
    def has_next(self) -> Any:
        return self.unit[0] < self.end_unit[0]

    def cta_of(self, unit: Any) -> Any:
        """CTA that has a work unit."""
        is_longer = unit < self.longer_ctas[0] * (self.units_per_cta[0] + 1)
        return T.truncdiv(
            unit - T.if_then_else(is_longer, 0, self.longer_ctas[0]),
            self.units_per_cta[0] + T.if_then_else(is_longer, 1, 0),
        )

    @T.inline
    def next_segment(self):
        """Set the segment that starts at `unit`, and move `unit` past it. It has no steps if the CTA ends before the item's key blocks."""
        sizes = self.sizes
        while self.unit[0] >= self.units_before[0] + self.units_per_item[0] * sizes.items_per_sequence:
            self.units_before[0] += self.units_per_item[0] * sizes.items_per_sequence
            self.b[0] += 1
            self.read_sequence(self.b[0])
        self.item[0] = T.truncdiv(self.unit[0] - self.units_before[0], self.units_per_item[0])
        self.unit_in_item[0] = self.unit[0] - self.units_before[0] - self.item[0] * self.units_per_item[0]
        self.item_unit[0] = self.unit[0] - self.unit_in_item[0]
        self.kv_head[0] = T.truncdiv(self.item[0], sizes.m_blocks)
        self.m_block[0] = self.item[0] - self.kv_head[0] * sizes.m_blocks
        self.item[0] += self.b[0] * sizes.items_per_sequence
        if self.split_rule[0] == 0:
            first_key_unit = self.item_unit[0] + sizes.item_blocks
            self.unit[0] = T.max(self.unit[0], first_key_unit)
            self.start_block[0] = self.first_block[0] + self.unit[0] - first_key_unit
            self.steps[0] = T.max(
                T.min(self.item_unit[0] + self.units_per_item[0], self.end_unit[0]) - self.unit[0], 0
            )
            # The first CTA that has key blocks of the item, until its number in the item is known
            self.part[0] = self.cta_of(first_key_unit)
            self.parts[0] = self.cta_of(self.item_unit[0] + self.units_per_item[0] - 1) - self.part[0] + 1
            # Slot of a segment: CTA + item, here as first_slot + part. One of them grows from a segment to the next, so no two share one
            self.first_slot[0] = self.part[0] + self.item[0]
            self.part[0] = self.cta[0] - self.part[0]
            self.unit[0] += self.steps[0]
        else:
            self.start_block[0] = self.first_block[0] + self.unit_in_item[0] * self.blocks_per_split[0]
            self.steps[0] = T.min(
                self.blocks_per_split[0],
                self.num_blocks[0] - self.unit_in_item[0] * self.blocks_per_split[0],
            )
            self.parts[0] = self.units_per_item[0]
            self.part[0] = self.unit_in_item[0]
            self.first_slot[0] = self.item_unit[0]
            self.unit[0] += 1
        self.entry[0] = T.if_then_else(sizes.entry_per_cta, self.cta[0], self.item[0])
        # -1: only the first segment of an item has an entry, and that of a CTA says already that a whole item needs no merging
        if (self.part[0] > 0) | (sizes.entry_per_cta & (self.parts[0] == 1)):
            self.entry[0] = -1


@T.meta_class
class SegmentBox:
    """Mailbox in shared memory with two slots, in which the producer describes segments to the consumers, which then need no division.

    A segment of 0 steps ends the work. An mbarrier does not keep the compiler from moving plain loads and stores across it;
    a sync_warp on either side does.
    """

    FIELDS = (
        "steps", "b", "kv_head", "m_block", "start_block", "length", "parts", "part", "first_slot", "entry",
    )  # fmt: skip

    def __init__(self, consumer_warps: int, name: str = "segment_box"):
        self.values = T.alloc_shared([2, len(self.FIELDS)], "int32")
        self.full = T.alloc_barrier([1, 1])
        self.empty = T.alloc_barrier([consumer_warps] * 2)

    @T.inline
    def post(self, turn, work):
        """Write the segment of a WorkShare as the turn-th of this CTA."""
        T.mbarrier_wait_parity(self.empty[turn % 2], turn // 2 % 2 ^ 1)
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            for number, name in enumerate(self.FIELDS):
                self.values[turn % 2, number] = getattr(work, name)[0]
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
        return self.values[turn % 2, self.FIELDS.index(field)]


@T.meta_class
class Segment:
    """The segment that a consumer warpgroup processes, in registers."""

    def __init__(self, box: SegmentBox, name: str = "segment"):
        self.box = box
        self.step = int_var()  # ring step: key blocks before the current one, in all segments of this CTA
        self.rows = int_var()  # rows of this warpgroup that exist
        self.first_row = int_var()  # first row of this warpgroup among all query rows of the key head
        self.turn = int_var()  # segments before this
        self.b = int_var()  # sequence
        self.length = int_var()  # keys of the sequence
        self.steps = int_var()  # key blocks
        self.start_block = int_var()

    @T.inline
    def wait(self):
        """Wait for a segment, and set `steps`; 0: there are no more segments."""
        self.box.wait(self.turn[0])
        self.steps[0] = T.shfl_sync(self.field("steps"), 0)

    @T.inline
    def read(self, query_tile, block_M, total_rows):
        """Set the other fields, for the warpgroup of this query tile of 64 rows among the block_M of the CTA."""
        self.b[0] = self.field("b")
        self.length[0] = self.field("length")
        self.start_block[0] = self.field("start_block")
        self.first_row[0] = self.field("m_block") * block_M + 64 * query_tile
        self.rows[0] = T.max(T.min(total_rows - self.first_row[0], 64), 0)

    @T.inline
    def finish(self):
        """Release the segment: no field() of it can be read after this."""
        self.box.release(self.turn[0])
        self.turn[0] += 1

    def field(self, name: str) -> Any:
        """A field of SegmentBox, from shared memory."""
        return self.box.read(self.turn[0], name)


@T.meta_class
class RowTables:
    """Tables [warpgroups, 64] in shared memory of the rows of a query tile. A row is one query of one head; adjacent rows share a query."""

    def __init__(self, problem: AttnProblem, warpgroups: int, sink_unit: float, name: str = "rows"):
        self.sink_unit = sink_unit  # 1 for natural sinks, log2(e) for base 2
        self.queries = T.alloc_shared([warpgroups, 64], "int32")
        self.heads = T.alloc_shared([warpgroups, 64], "int32")
        self.diagonals = T.alloc_shared([warpgroups, 64], "int32")  # last key under a causal mask
        self.slopes = T.alloc_shared([warpgroups, 64], "float32") if problem.has("alibi") else None
        self.sinks = T.alloc_shared([warpgroups, 64], "float32") if problem.has("sink") else None
        # Bits 0 to 31 and 32 to 63 of the tree
        self.low_bits = T.alloc_shared([warpgroups, 64], "int32") if problem.has("tree") else None
        self.high_bits = T.alloc_shared([warpgroups, 64], "int32") if problem.has("tree") else None

    @T.inline
    def fill(self, w, segment, seqlen_q, heads_per_kv, options):
        """Set the rows of warpgroup w. Rows past the last repeat the last one; their results are not written."""
        thread = T.get_thread_binding() % WARPGROUP
        number = T.alloc_var("int32", init=0)
        if thread < 64:
            number = T.min(segment.first_row[0] + thread, seqlen_q * heads_per_kv - 1)
            self.queries[w, thread] = T.truncdiv(number, heads_per_kv)
            first_head = segment.field("kv_head") * heads_per_kv
            self.heads[w, thread] = first_head + T.truncmod(number, heads_per_kv)
            self.diagonals[w, thread] = segment.length[0] - seqlen_q + self.queries[w, thread]
        # gather_queries() reads queries and heads of other threads; slopes, sinks and bits are ready at the barrier after it
        sync_warpgroup(w)
        if thread < 64:
            if self.slopes is not None:
                self.slopes[w, thread] = options.Slopes[segment.b[0], self.heads[w, thread]]
            if self.sinks is not None:
                self.sinks[w, thread] = options.Sink[self.heads[w, thread]] * self.sink_unit
            if self.low_bits is not None:
                bits = options.Tree[segment.b[0], self.queries[w, thread]]
                self.low_bits[w, thread] = T.cast(bits, "int32")
                self.high_bits[w, thread] = T.cast(bits >> 32, "int32")

    def sees_node(self, w: Any, i: Any, node: Any) -> Any:
        """True where row i sees a node of the tree, by its number; True for the negative numbers of the keys before the tree."""
        bits = T.if_then_else(node < 32, self.low_bits[w, i], self.high_bits[w, i])
        return (node < 0) | ((bits >> (node & 31) & 1) != 0)

    def sink_of(self, w: Any) -> Callable[[Any], Any]:
        """Function from a row of warpgroup w to its sink."""
        return lambda i: self.sinks[w, i]
