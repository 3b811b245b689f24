"""Synchronization of roles: rings of smem tiles between producer and consumers, turns at the tensor cores, named barriers."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.layout import (
    make_half_bank_swizzled_layout,
    make_quarter_bank_swizzled_layout,
    make_swizzled_layout,
)

from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.seams.roles import WARPGROUP
from tl_attention.problem.attn_problem import AttnProblem

# First of the named barriers of this module: TileLang 0.1.15 uses 0 to 2, and its ThreadSync pass takes 3, 4, ..
# From it on: 4 for the turns of warpgroups at the tensor cores, 3 for the threads of a warpgroup each, 1 for all consumers
FIRST_BARRIER = 8
# Registers per thread of (the producer, the consumers), by the number of consumer warpgroups
REGISTERS = {2: (24, 240), 3: (32, 160)}
# A producer that looks up sequences needs more: with 24 it spilled, except in the one-pass backward. So does one that reads block lists
# at d64, where consumers have registers to spare. The sum must not exceed what the threads have at launch, 168 each with two consumer
# warpgroups, or the increase waits forever
VARLEN_REGISTERS = {2: (40, 232), 3: (32, 160)}
# Registers per thread of (the producer, the consumers), of the forward; a producer that also locates tiles needs more
PERSISTENT_REGISTERS = {2: (40, 232), 3: (32, 160)}
# Registers per thread of (the producer, the consumers, the warpgroup that computes dQ), with the order "apart" of a backward
APART_REGISTERS = (24, 208, 72)
# The same where all warps beside the producer have work: they round dQ, or keep its order
FOUR_WARPS_REGISTERS = (32, 208, 64)
PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # roles synchronize at barriers of their own
    "tl.disable_shared_memory_reuse": True,  # TileLang 0.1.15 assumes that the roles run one after the other
}
HALVES = 2  # columns of 16 bits per fp32 number, as split_tile.py gets it
ARRIVE = {"emit_arrive": 1}  # the TMA copy also arrives at its barrier


def registers(
    problem: AttnProblem, warpgroups: int, makes_terms: bool = False, full: bool = False
) -> tuple[int, int] | None:
    """Registers per thread of (the producer, the consumers); None: as at launch.

    Args:
        makes_terms: warps beside the producer make terms, see input_terms.py.
        full: consumers need REGISTERS also with varlen.
    """
    wide = not full if problem.has("varlen") else problem.has_bits and problem.head_dim <= 64
    return (VARLEN_REGISTERS if wide or makes_terms else REGISTERS).get(warpgroups)


def forward_registers(problem: AttnProblem, config: FwdConfig) -> tuple[int, int] | None:
    """registers() of a forward."""
    if config.schedule != "grid":
        return PERSISTENT_REGISTERS.get(config.warpgroups)
    return registers(problem, config.warpgroups, config.makes_terms)


def alloc_swizzled(shape: list[int], dtype: str, chunk: int = 64):
    """Shared memory in the swizzled layout that TMA writes and wgmma reads.

    chunk: columns of 16 bits per chunk, 64, 32 or 16. Chunks of 64 are narrower where the columns are no multiple of it.
    """
    tiles = T.alloc_shared(shape, dtype)
    layouts = {
        64: make_swizzled_layout,
        32: make_half_bank_swizzled_layout,
        16: make_quarter_bank_swizzled_layout,
    }
    T.annotate_layout({tiles: layouts[chunk](tiles)})
    return tiles


def indices(values: tuple) -> tuple[int, ...]:
    """Indices that unroll a loop in a kernel; a loop over buffers or variables themselves would lose their names (TileLang 0.1.15)."""
    return tuple(range(len(values)))


def alloc_fragments(shapes: list[list[int]], dtype: str):
    """Tiles in registers, one per shape."""
    return tuple(T.alloc_fragment(shape, dtype) for shape in shapes)


@T.meta_class
class TileRing:
    """Ring of smem tiles [rows, cols] that TMA fills and consumer warps release, each side at its own pace.

    Step i uses slot i % slots for the (i // slots)-th time; the parity of that count is the phase to wait for at the slot's barrier.
    A wait for a parity passes at once if the barrier is two phases behind. So whoever waits for a phase must know that the phase before it
    has ended: it has waited for that phase, or for something that happens after it.

    Args:
        shape: [slots, rows, cols].
        row_values: number of fp32 vectors [rows] that are loaded with each tile.
        terms: tiles [rows, cols / terms] side by side, see products.py.
        chunk: as in alloc_swizzled.
        loaded: columns that TMA fills; None: all. split_tile.py makes the tile of fewer.
    """

    def __init__(
        self,
        shape: list[int],
        dtype: str,
        consumer_warps: int,
        name: str,
        row_values: int = 0,
        terms: int = 1,
        chunk: int = 64,
        loaded: int | None = None,
    ):
        self.slots, self.terms, self.loaded = shape[0], terms, loaded
        self.tiles = alloc_swizzled(shape, dtype, chunk)  # [slots, rows, cols]
        self.row_values = (
            T.alloc_shared([self.slots, row_values, shape[1]], "float32") if row_values else None
        )
        self.full = T.alloc_barrier([1] * self.slots)  # the tile has been loaded
        self.empty = T.alloc_barrier([consumer_warps] * self.slots)  # every consumer warp is done with it

    def __getitem__(self, step):
        return self.tiles[step % self.slots, :, :]

    def term(self, step: Any, i: int, first_col: int = 0, cols: int | None = None) -> Any:
        """The i-th of the terms of a tile, or `cols` columns of it from first_col on."""
        if self.terms == 1:
            return self[step]
        # With a known position nvcc keeps the wgmma descriptors of all terms in registers through all steps: it spilled 244 bytes in
        # the causal forward of d128 in three terms
        width = self.tiles.shape[2] // self.terms
        first = (T.call_extern("int32", "tl_attention_zero") + i) * width + first_col
        return self.tiles[step % self.slots, :, first : first + (cols or width)]

    def terms_of(self, step: Any) -> Any:
        """Function of i that returns term i of the tile of a step."""
        return lambda i: self.term(step, i)

    def row_value(self, step: Any, vector: int, row: Any) -> Any:
        return self.row_values[step % self.slots, vector, row]

    @T.inline
    def read_row_values(self, step, vector, values):
        T.copy(self.row_values[step % self.slots, vector, :], values)

    def wait(self, step):
        return T.mbarrier_wait_parity(self.full[step % self.slots], step // self.slots % 2)

    @T.inline
    def negate(self, step):
        _, rows, cols = self.tiles.shape
        for i, j in T.Parallel(rows, cols):
            self.tiles[step % self.slots, i, j] = -self.tiles[step % self.slots, i, j]

    @T.inline
    def release(self, step):
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[step % self.slots])

    def wait_empty(self, step: Any) -> Any:
        return T.mbarrier_wait_parity(self.empty[step % self.slots], step // self.slots % 2 ^ 1)

    def target(self, step: Any) -> Any:
        """Columns of a tile that TMA fills."""
        return self[step] if self.loaded is None else self.tiles[step % self.slots, :, 0 : self.loaded]

    @T.inline
    def fill(self, step, source, row_sources=(), policy=None):
        """Load a tile when its slot is free. policy: L2 eviction policy, see T.tma_copy; None: the default."""
        slot = step % self.slots
        self.wait_empty(step)
        for i, row_source in enumerate(row_sources):
            T.tma_copy(row_source, self.row_values[slot, i, :], barrier=self.full[slot])
        T.tma_copy(
            source, self.target(step), barrier=self.full[slot], annotations=ARRIVE, eviction_policy=policy
        )


def input_ring(
    problem: AttnProblem,
    name: str,
    shape: list[int],
    width: int,
    consumer_warps: int,
    raw_fp32: bool = False,
    chunk: int = 64,
) -> TileRing:
    """TileRing of Q, K, V or dO, with all terms of its columns side by side.

    Args:
        name: Q, K, V or dO.
        shape: [slots, rows].
        width: columns of one term.
        raw_fp32: fp32 is loaded as it is, and split_tile.py makes the terms; else TMA loads the terms. Of no effect in 16 bits.
        chunk: as in alloc_swizzled.
    """
    columns, dtype = problem.terms * width, problem.dtype_of(name.lower())
    loaded = HALVES * width if raw_fp32 and problem.is_fp32 else None
    numbers = {"terms": problem.terms, "chunk": chunk, "loaded": loaded}
    return TileRing([*shape, columns], dtype, consumer_warps, name=name, **numbers)


@T.meta_class
class SharedTile:
    """Swizzled buffer with a name of its own: TileLang 0.1.15 places buffers of one name in an order that varies between processes."""

    def __init__(self, shape: list[int], dtype: str, name: str):
        self.tile = alloc_swizzled(shape, dtype)


def alloc_each(warpgroups: int, shape: list[int], dtype: str, name: str):
    """One buffer per warpgroup, as only a copy to a whole 2-D buffer becomes stmatrix (TileLang 0.1.15)."""
    return tuple(SharedTile(shape, dtype, name=f"{name}_{w}").tile for w in range(warpgroups))


def alloc_terms(warpgroups: int, terms: int, shape: list[int], dtype: str, name: str):
    """alloc_each for every warpgroup: a buffer per term."""
    return tuple(alloc_each(terms, shape, dtype, f"{name}_{w}") for w in range(warpgroups))


@T.meta_class
class WrittenTiles:
    """Shared tiles that warps write and wgmma or TMA reads, once per step.

    A subclass has `full`, one barrier per slot, at which each warp arrives when it has written its share.
    """

    def slot(self, step: Any) -> Any:
        return 0

    @T.inline
    def announce(self, step):
        """Make the share that this warp has written visible to wgmma and TMA, and arrive."""
        T.fence_proxy_async()
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.full[self.slot(step)])


@T.meta_class
class Exchange(WrittenTiles):
    """One smem tile per warpgroup, which the warpgroup writes and all read, once per step."""

    def __init__(self, warpgroups: int, shape: list[int], dtype: str, name: str):
        self.tiles = alloc_each(warpgroups, shape, dtype, name)
        self.full = T.alloc_barrier([4 * warpgroups])  # every warp has written its share
        self.empty = T.alloc_barrier([4 * warpgroups])  # every warp is done with all tiles

    def columns(self, step: Any, w: int, cols: slice) -> Any:
        """Columns `cols` of the tile that warpgroup w wrote in a step."""
        return self.tiles[w][:, cols]

    def tile(self, step: Any, w: int) -> Any:
        """The whole tile that warpgroup w wrote in a step."""
        return self.tiles[w][:, :]

    def wait(self, step):
        return T.mbarrier_wait_parity(self.full[0], step % 2)

    def wait_empty(self, step):
        return T.mbarrier_wait_parity(self.empty[0], step % 2 ^ 1)

    @T.inline
    def write(self, w, address, step, fragment):
        """Write the tile of warpgroup w. address: not read; ExchangeRing.write() needs it."""
        T.copy(fragment, self.tiles[w])

    @T.inline
    def release(self, step):
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[0])


def fragment_address(first: Any) -> Any:
    """Address of this thread's elements in the tile that begins with element `first`."""
    return T.call_extern("int32", "tl_attention_fragment_address", T.address_of(first))


def store_fragment(fragment: Any, address: Any) -> Any:
    """Write a wgmma fragment [64, columns] to the tile of fragment_address()."""
    name = f"tl_attention_store_fragment<{fragment.shape[1]}>"
    return T.call_extern("handle", name, address, fragment.data)


@T.meta_class
class ExchangeRing(WrittenTiles):
    """Exchange of tiles [64, cols], 16 bits per element, with two slots. Needs fragments.cuh.

    A warpgroup may write the tile of a step while others still read that of the step before.

    Args:
        readers: warps that read the tiles; None: those that write them.
    """

    def __init__(self, warpgroups: int, cols: int, dtype: str, name: str, readers: int | None = None):
        self.warpgroups, self.cols = warpgroups, cols
        self.tiles = SharedTile([2 * warpgroups, 64, cols], dtype, name=f"{name}_tiles").tile
        self.full = T.alloc_barrier([4 * warpgroups] * 2)  # every warp has written its share
        self.empty = T.alloc_barrier([readers or 4 * warpgroups] * 2)  # every reader is done with all tiles

    def slot(self, step: Any) -> Any:
        return step % 2

    def columns(self, step: Any, w: int, cols: slice) -> Any:
        """Columns `cols` of the tile that warpgroup w wrote in a step."""
        return self.tiles[step % 2 * self.warpgroups + w, :, cols]

    def tile(self, step: Any, w: int) -> Any:
        """The whole tile that warpgroup w wrote in a step."""
        return self.tiles[step % 2 * self.warpgroups + w, :, :]

    def wait(self, step):
        return T.mbarrier_wait_parity(self.full[step % 2], step // 2 % 2)

    def wait_empty(self, step):
        return T.mbarrier_wait_parity(self.empty[step % 2], step // 2 % 2 ^ 1)

    def address(self, w: int) -> Any:
        """Address in shared memory of this thread's elements in the first slot of warpgroup w."""
        return fragment_address(self.tiles[w, 0, 0])

    @T.inline
    def write(self, w, address, step, fragment):
        """Write the tile of warpgroup w in a step. address: that of address(w)."""
        slot = address + step % 2 * (self.warpgroups * 64 * self.cols * 2)
        T.evaluate(store_fragment(fragment, slot))

    @T.inline
    def release(self, step):
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[step % 2])


def alloc_exchange(
    two_slots: bool, warpgroups: int, cols: int, dtype: str, name: str, readers: int | None = None
) -> Exchange | ExchangeRing:
    """Tiles [64, cols] in shared memory that each warpgroup writes and all read; see the two classes."""
    if two_slots:
        return ExchangeRing(warpgroups, cols, dtype, name, readers)
    return Exchange(warpgroups, [64, cols], dtype, name)


@T.meta_class
class PingPong:
    """Warpgroups issue their GEMMs in turn, so that the softmax of one overlaps with the GEMMs of another."""

    def __init__(self, warpgroups: int, on: bool, name: str = "ping_pong"):
        self.warpgroups, self.on = warpgroups, on and warpgroups > 1

    @T.inline
    def start(self, w):
        """Let warpgroup 0 begin: the last warpgroup passes the turn to it."""
        if self.on:
            if w == self.warpgroups - 1:
                self.pass_on(w)

    def wait(self, w: int):
        return T.sync_threads(FIRST_BARRIER + w, 2 * WARPGROUP) if self.on else None

    def pass_on(self, w: int):
        return (
            T.named_barrier_arrive(FIRST_BARRIER + (w + 1) % self.warpgroups, 2 * WARPGROUP)
            if self.on
            else None
        )


def sync_warpgroup(w: int):
    return T.sync_threads(FIRST_BARRIER + 4 + w, WARPGROUP)


def any_of_warpgroup(w: int, flag: Any) -> Any:
    """1 if flag, an int, is not 0 in any thread of a warpgroup, else 0; its threads wait for each other. Needs any_of_warpgroup.cuh."""
    return T.call_extern("int32", "tl_attention_any_of_warpgroup", FIRST_BARRIER + 4 + w, flag)


def sync_consumers(threads: int):
    return T.sync_threads(FIRST_BARRIER + 7, threads)


@T.macro
def wait_for_stores(read=True):
    """Wait until TMA has read what this warpgroup stores; with read=False until it has also written it."""
    if T.shuffle_elect(WARPGROUP):
        T.tma_store_wait(0, read)
    T.sync_warp()


@T.macro
def share(w, fragments, tiles):
    """Copy operands of warpgroup w to its smem tiles, once per step."""
    sync_warpgroup(w)  # all warps have the product of the previous step
    for n in indices(tiles):
        T.copy(fragments[n], tiles[n])
    T.fence_proxy_async()
    sync_warpgroup(w)
