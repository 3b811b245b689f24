"""Loads of key blocks by the producer warp of a decode, from a cache with or without pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import DecodeConfig
from tl_attention.kernels.decode.work import KeyRanges, block_of_step, int_var
from tl_attention.kernels.seams.pipeline import TileRing
from tl_attention.kernels.sources.pages import CachePages
from tl_attention.problem.attn_problem import FAR, AttnProblem


@T.meta_class
class PageLookup:
    """Positions of 32 TMA copies in a cache with pages, one per lane; a copy is page_rows adjacent keys of one page."""

    def __init__(self, pages: CachePages, page_rows: int, name: str = "lookup"):
        self.pages, self.page_rows = pages, page_rows
        self.page = int_var()
        self.row = int_var()  # first row of the copy in its page
        self.rows_left = int_var()  # from there to the end of the page or of the sequence

    @T.inline
    def read(self, b, first_key, length):
        """Set this lane's copy. The copies of a warp start at first_key of sequence b, which has `length` keys.

        A page outside [0, num_pages) is never read: its copy has no rows left, so TMA fills it with zeros.
        """
        page_size = self.pages.page_size
        key = first_key + T.get_thread_binding() % 32 * self.page_rows
        self.page[0] = -1
        if (key < length) & (T.truncdiv(key, page_size) < self.pages.Table.shape[1]):
            self.page[0] = self.pages.Table[b, T.truncdiv(key, page_size)]
            self.row[0] = key - T.truncdiv(key, page_size) * page_size
            self.rows_left[0] = T.min(page_size - self.row[0], length - key)
        if (self.page[0] < 0) | (self.page[0] >= self.pages.num_pages):
            self.page[0] = 0
            self.rows_left[0] = 0


def chunk_columns(problem: AttnProblem) -> int:
    """Columns of a row of the swizzled layout of K and V tiles."""
    return 64 if problem.head_dim % 64 == 0 and problem.head_dim_v % 64 == 0 else 32


@dataclass(frozen=True)
class KeySource:
    """K or V in the cache, and the ring to load its key blocks to.

    Args:
        tensor: dtype, rows of all caches or pages one after the other, in the view of tiles.packed.
        stride: rows from the start of a page or cache to the next.
        width: columns of a tile of the ring.
        end: variable: row of the tensor after the last key of a sequence or page. In the view of tiles.packed, [FAR, end, FAR - n + i] is
            row i of the n rows before `end`, and TMA reads 0 from `end` on.
    """

    tensor: Any
    ring: TileRing
    stride: Any
    width: int
    end: Any


@T.meta_class
class KeyLoader:
    """TMA loads of key blocks of K and V to their rings, by the producer warp, with or without pages.

    With pages a block takes several copies of page_rows keys, without pages (page_rows 0) one. TMA reads zeros past the last key of a page
    or sequence.
    """

    def __init__(
        self,
        problem: AttnProblem,
        config: DecodeConfig,
        ranges: KeyRanges,
        pages: CachePages,
        lookup: PageLookup | None,
        K: Any,
        V: Any,
        K_ring: TileRing,
        V_ring: TileRing | None,
        name: str = "loader",
    ):
        self.config, self.ranges, self.lookup = config, ranges, lookup
        self.chunk = chunk_columns(problem)
        self.step = int_var()  # key blocks so far
        self.cache = int_var()
        self.leftpad = int_var()
        k_source = KeySource(K, K_ring, pages.stride_k, problem.head_dim, int_var())
        self.sources = (k_source,)
        if V_ring is not None:
            v_source = KeySource(V, V_ring, pages.stride_v, problem.head_dim_v, int_var())
            self.sources = (k_source, v_source)
        self.row = int_var()  # first row of a copy in the view of tiles.packed

    @T.inline
    def start_segment(self, work):
        """Set the ends of the sources, which without pages are the same for all key blocks of a segment."""
        if not self.config.page_rows:
            self.cache[0] = self.ranges.cache(work.b[0])
            self.leftpad[0] = self.ranges.leftpad(work.b[0])
            for source in self.sources:
                source.end[0] = self.cache[0] * source.stride + self.leftpad[0] + work.length[0]

    @T.inline
    def load(self, i, work):
        """Load the key block of step i of the segment, the next of the CTA."""
        i = block_of_step(self.config, work.steps[0], i)
        first_key = (work.start_block[0] + i) * self.config.block_N
        if self.config.page_rows:
            self.load_from_pages(i, first_key, work)
        else:
            self.row[0] = FAR - work.length[0] + first_key
            for source in self.sources:
                rows = slice(self.row[0], self.row[0] + self.config.block_N)
                source.ring.fill(
                    self.step[0],
                    source.tensor[FAR, source.end[0], rows, work.kv_head[0], 0 : source.width],
                )
        self.step[0] += 1

    @T.inline
    def load_from_pages(self, i, first_key, work):
        """Load key block i of the segment by copies of page_rows keys. A lookup serves the blocks whose copies fit 32 lanes."""
        page_rows = self.config.page_rows
        copies = tuple(range(self.config.block_N // page_rows))
        # Whole blocks per lookup, as 5 or 6 copies of a block do not divide 32
        blocks_per_lookup = 32 // len(copies)
        block = i % blocks_per_lookup
        first_lane = block * len(copies)
        is_first = block == 0
        if self.config.batch_invariant:  # blocks come from the last to the first
            is_first = (block == blocks_per_lookup - 1) | (i == work.steps[0] - 1)
        if is_first:
            self.lookup.read(work.b[0], first_key - block * self.config.block_N, work.length[0])
        for source in self.sources:
            source.ring.wait_empty(self.step[0])
            for copy in copies:
                lane = first_lane + copy
                first_row = T.shfl_sync(self.lookup.page[0], lane) * source.stride + T.shfl_sync(
                    self.lookup.row[0], lane
                )
                self.row[0] = FAR - T.shfl_sync(self.lookup.rows_left[0], lane)
                source.end[0] = first_row + FAR - self.row[0]
                self.copy_rows(source, copy, work)
            T.sync_warp()  # lane 0 arrives only after the elected thread has announced the bytes of its copies
            if T.get_thread_binding() % 32 == 0:
                T.mbarrier_arrive(source.ring.full[self.step[0] % source.ring.slots])

    @T.inline
    def copy_rows(self, source, copy, work):
        """Load copy number `copy` of a block, one chunk of columns at a time."""
        page_rows = self.config.page_rows
        for c in range_of(source.width, self.chunk):
            T.tma_copy(
                source.tensor[
                    FAR,
                    source.end[0],
                    self.row[0] : self.row[0] + page_rows,
                    work.kv_head[0],
                    c : c + self.chunk,
                ],
                source.ring.tiles[
                    self.step[0] % source.ring.slots,
                    copy * page_rows : (copy + 1) * page_rows,
                    c : c + self.chunk,
                ],
                barrier=source.ring.full[self.step[0] % source.ring.slots],
            )


def range_of(columns: int, chunk: int) -> tuple[int, ...]:
    """First column of each chunk: a tuple, since TileLang makes a loop of a range."""
    return tuple(range(0, columns, chunk))
