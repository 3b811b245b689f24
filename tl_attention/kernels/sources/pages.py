"""Keys and values in pages: where a sequence's keys are, and TMA copies of runs of adjacent keys to a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.seams.pipeline import ARRIVE
from tl_attention.problem.attn_problem import FAR, AttnProblem

LANES = 32  # lanes of a producer warp
# TMA instructions that one thread issues without a shuffle between them. With 6, some with a window spill 4 bytes
AT_ONCE = 4


@dataclass(frozen=True)
class CachePages:
    """Pages of a cache, or whole caches where there are no pages.

    Args:
        Table: int32 [batch, pages per sequence], page numbers; not read without pages.
        page_size, num_pages: keys per page, pages of the cache.
        stride_k, stride_v: rows of K, of V from the start of a page or cache to the next.
    """

    Table: Any
    page_size: Any
    num_pages: Any
    stride_k: Any
    stride_v: Any


def page_arguments(paged: bool) -> CachePages:
    """Types of the arguments of a kernel with pages; without pages False, for which TileLang makes no argument."""
    if not paged:
        return CachePages(False, False, False, False, False)
    table_n, pages_n, stride = T.dynamic("table_n, pages_n, table_stride")
    return CachePages(T.StridedTensor([table_n, pages_n], [stride, 1], "int32"), *[T.int32] * 4)


@T.meta_class
class PagedLoads:
    """TMA loads of key blocks of K or V to a ring, by a producer warp; a block takes several copies of adjacent keys of one page.

    Each lane looks up one copy, so a lookup serves `blocks` key blocks, those with equal block // blocks. Page numbers are read from the
    table one lookup ahead.

    Args:
        tensor: rows of all pages one after the other, in the view of tiles.packed.
        stride: rows of the tensor from the start of a page to the next.
        columns: width of a tile.
        page_rows: number that divides the page size.
        block_N: keys per block.
    """

    def __init__(
        self,
        tensor: Any,
        pages: CachePages,
        stride: Any,
        columns: int,
        page_rows: int,
        block_N: int,
        name: str = "paged_loads",
    ):
        self.tensor, self.pages, self.stride = tensor, pages, stride
        self.chunk = 64 if columns % 64 == 0 else 32  # columns per row of the swizzled layout
        self.chunks = tuple(range(0, columns, self.chunk))  # a tuple: TileLang makes a loop of a range
        self.rows, self.block_N = math.gcd(page_rows, block_N), block_N
        self.copies = tuple(range(block_N // self.rows))
        self.blocks = LANES // len(self.copies)
        self.at_once = max(AT_ONCE // len(self.chunks), 1)  # copies
        self.end = T.alloc_var("int32", init=0)  # row of the tensor after the keys of this lane's copy
        self.ends = T.alloc_local([self.at_once], "int32")  # of the copies of the block at hand
        # The copy whose page read_page() has read: its first key, its page, and the position of the key in the page
        self.key = T.alloc_var("int32", init=0)
        self.page = T.alloc_var("int32", init=0)
        self.start_in_page = T.alloc_var("int32", init=0)

    @T.inline
    def look_up(self, b, block, length, is_first):
        """Set each lane's copy; those of a warp hold the blocks that share a lookup with `block` of sequence b, which has `length` keys.

        A page outside [0, num_pages) is never read: its copies end at -1, so TMA fills them with zeros, as past the last key.
        """
        first_key = block // self.blocks * self.blocks * self.block_N
        if is_first:
            self.read_page(b, first_key, length)
        self.end[0] = -1
        if (self.page[0] >= 0) & (self.page[0] < self.pages.num_pages):
            self.end[0] = self.page[0] * self.stride + self.start_in_page[0]
            self.end[0] += T.min(length - self.key[0], self.rows)
        self.read_page(b, first_key - self.blocks * self.block_N, length)

    @T.inline
    def read_page(self, b, first_key, length):
        """Read the page of each lane's copy, -1 for none. first_key: of lane 0."""
        self.key[0] = first_key + T.get_thread_binding() % LANES * self.rows
        # First the number of the page within the sequence. A variable, as TileLang 0.1.15 would divide in 64 bits
        self.start_in_page[0] = T.truncdiv(self.key[0], self.pages.page_size)
        self.page[0] = -1
        if (self.key[0] >= 0) & (self.key[0] < length) & (self.start_in_page[0] < self.pages.Table.shape[1]):
            self.page[0] = self.pages.Table[b, self.start_in_page[0]]
        self.start_in_page[0] = self.key[0] - self.start_in_page[0] * self.pages.page_size

    @T.inline
    def load(self, ring, ring_step, tile, blocks, step):
        """Load the block of a step of KeyBlocks to a step of the ring; step 0 comes first, and blocks descend."""
        block = blocks.block(step)
        if (step == 0) | (block % self.blocks == self.blocks - 1):
            self.look_up(tile.batch, block, tile.len_k[0], step == 0)
        # First shuffles before the wait, so that the slot is empty for as short a time as possible
        self.spread(block, self.copies[: self.at_once])
        ring.wait_empty(ring_step)
        self.start(ring, ring_step, tile, block, self.copies[: self.at_once])
        for first in self.copies[self.at_once :: self.at_once]:
            self.spread(block, self.copies[first : first + self.at_once])
            self.start(ring, ring_step, tile, block, self.copies[first : first + self.at_once])

    @T.inline
    def spread(self, block, copies):
        """Set `ends` of some copies of a block."""
        for copy in copies:
            self.ends[copy % self.at_once] = T.shfl_sync(
                self.end[0], block % self.blocks * len(self.copies) + copy
            )

    @T.inline
    def start(self, ring, ring_step, tile, block, copies):
        """Start the copies that spread() was called for. No variable between them: TileLang then has one thread start them all."""
        for copy in copies:
            for c in self.chunks:
                T.tma_copy(
                    self.source(tile, block, copy, c),
                    ring.tiles[
                        ring_step % ring.slots,
                        copy * self.rows : (copy + 1) * self.rows,
                        c : c + self.chunk,
                    ],
                    barrier=ring.full[ring_step % ring.slots],
                    annotations=ARRIVE if (copy, c) == (self.copies[-1], self.chunks[-1]) else None,
                )

    def source(self, tile: Any, block: Any, copy: int, c: int) -> Any:
        """Keys of a copy, which ends at the sequence's last key, in the columns from c on."""
        row = FAR - T.min(tile.len_k[0] - block * self.block_N - copy * self.rows, self.rows)
        return self.tensor[
            FAR, self.ends[copy % self.at_once], row : row + self.rows, tile.kv_head, c : c + self.chunk
        ]


def paged_loads(
    problem: AttnProblem, config: FwdConfig, K: Any, V: Any, pages: CachePages
) -> tuple[PagedLoads, ...]:
    """Loads of K and of V; none without pages."""
    if not config.page_rows:
        return ()
    sizes = config.page_rows, config.block_N
    return (
        PagedLoads(K, pages, pages.stride_k, problem.head_dim, *sizes, name="k_loads"),
        PagedLoads(V, pages, pages.stride_v, problem.head_dim_v, *sizes, name="v_loads"),
    )
