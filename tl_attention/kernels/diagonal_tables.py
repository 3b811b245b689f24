"""Tables of the values that a score_mod adds per diagonal of a tile, which warps beside the producer compute for all consumers.

A tile of block_M queries and block_N keys crosses block_M + block_N - 1 diagonals. Slot u of its table is that of the elements whose
column minus row is u - (block_M - 1). A table has two copies, as in diagonals.py, so that a pair of slots is aligned in one of both.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.kernels.diagonals import place
from tl_attention.kernels.roles import WARPGROUP
from tl_attention.kernels.staged import SharedBytes
from tl_attention.program import FLOAT, INT, TABLES, table_slots

TABLE_WARPS = 3  # all warps beside the producer

# The table of a step, and its slot of the warp's first row and first column. 16 floats between both copies put them in different banks
READ_TABLE = """
template <int slots, int tables, int rows>
static __device__ __forceinline__ float tl_attention_table_value(const void* shared, unsigned step, int place) {
  int thread = threadIdx.x + threadIdx.y * blockDim.x, first = 7 + thread % 4 * 2 - thread % 32 / 4;
  const float* of_warp = (const float*)shared + step % tables * (2 * slots + 16) + (rows - 16 - thread / 32 * 16);
  unsigned long long pair = *(const unsigned long long*)(of_warp + (first & 1 ? slots + 15 + first : first) + place / 2 * 8);
  return __uint_as_float(place % 2 ? pair >> 32 : pair);
}
template <int slots, int tables>
static __device__ __forceinline__ void tl_attention_set_table(void* shared, unsigned step, int slot, float value) {
  float* first = (float*)shared + step % tables * (2 * slots + 16) + slot;
  first[0] = first[slots + 15] = value;
}
"""


@T.meta_class
class DiagonalTables:
    """Ring of tables in shared memory, one per step of a CTA. Needs READ_TABLE."""

    def __init__(self, block_M: int, block_N: int, consumer_warps: int, name: str = "tables"):
        self.block_M, self.slots = block_M, table_slots(block_M, block_N)
        self.ring = SharedBytes(4 * TABLES * (2 * self.slots + 16), name="tables").bytes
        # Values of a table that one lane computes
        self.values = T.alloc_local([-(-self.slots // (32 * TABLE_WARPS))], FLOAT)
        self.full = T.alloc_barrier([TABLE_WARPS] * TABLES)  # the table has been computed
        self.empty = T.alloc_barrier([consumer_warps] * TABLES)  # every consumer warp is done with it

    @T.inline
    def fill(self, traced, step, query, key, factor):
        """Compute the table of a step, times factor; called by TABLE_WARPS warps. query, key: the first ones of the tile."""
        lane = T.get_thread_binding() % WARPGROUP - 32
        # All loads are in flight during the wait: a relative bias of d64 takes 1.132 ms, 1.144 with loads after it (H200, 2026-11-27)
        for n in T.unroll(self.values.shape[0]):
            slot = lane + 32 * TABLE_WARPS * n
            self.values[n] = traced.of_diagonal(query - key - (slot - (self.block_M - 1))) * factor
        T.mbarrier_wait_parity(self.empty[step % TABLES], step // TABLES % 2 ^ 1)
        for n in T.unroll(self.values.shape[0]):
            slot = lane + 32 * TABLE_WARPS * n
            if slot < self.slots:
                T.evaluate(
                    T.call_extern(
                        "handle",
                        f"tl_attention_set_table<{self.slots}, {TABLES}>",
                        self.ring.access_ptr("r"),  # see staged.SharedBytes
                        step,
                        slot,
                        self.values[n],
                    )
                )
        T.sync_warp()
        if lane % 32 == 0:
            T.mbarrier_arrive(self.full[step % TABLES])

    # An mbarrier does not keep the compiler from moving plain loads across it; a sync_warp does
    @T.inline
    def wait(self, step):
        T.mbarrier_wait_parity(self.full[step % TABLES], step // TABLES % 2)
        T.sync_warp()

    @T.inline
    def release(self, step):
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.mbarrier_arrive(self.empty[step % TABLES])

    def value(self, step: Any, i: Any, j: Any) -> Any:
        """Value of the diagonal of element (i, j) of a consumer warpgroup's 64 rows."""
        name = f"tl_attention_table_value<{self.slots}, {TABLES}, {self.block_M}>"
        return T.call_extern(FLOAT, name, self.ring.access_ptr("r"), T.cast(step, INT), place(i, j))
