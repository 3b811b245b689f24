"""Diagonals of a tile: values of a program that q_idx - kv_idx determines, and gradients that all scores of a diagonal add to one element.

The elements of a diagonal have a slot per warp: see cuda/diagonals.cuh.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from tl_attention.problem.program import FLOAT, INT, Program, diagonal_slots


def sums_per_lane(cols: int) -> int:
    """Length of the result of tl_attention_sum_diagonals."""
    return -(-(cols // 8 + 2) // 4)


def place(i: Any, j: Any) -> Any:
    """Place of an element among the slots of its thread."""
    return (j // 8 - i // 8 % 2 + 1) * 2 + j % 2


@T.meta_class
class Diagonals:
    """Values and sums of the diagonals of a tile of 64 rows.

    Args:
        paired: sums per thread are pairs of bf16, see add_tile(); else fp32.
    """

    def __init__(
        self, program: Program, cols: int, rows_are_keys: bool, paired: bool, name: str = "diagonals"
    ):
        self.paired = paired
        self.cols, self.rows_are_keys, self.slots = cols, rows_are_keys, diagonal_slots(cols)
        # Values of the slots of this lane in the next tile
        self.values = [T.alloc_local([self.slots // 32], FLOAT) for _ in program.diagonals]
        # Sums of this thread, and of the slots that it adds to memory
        shape, dtype = ([cols // 8 + 1], "uint32") if paired else ([cols // 4 + 2], FLOAT)
        self.by_place = [T.alloc_local(shape, dtype) for _ in program.diagonal_gradients]
        self.sums = [T.alloc_local([sums_per_lane(cols)], FLOAT) for _ in program.diagonal_gradients]
        self.targets = [T.alloc_local([sums_per_lane(cols)], INT) for _ in program.diagonal_gradients]

    def of_lane(self, i: Any) -> Any:
        """Slot of value number i of this lane."""
        return T.call_extern(INT, "tl_attention_slot_of_lane", i)

    def summed(self, i: Any) -> Any:
        """Slot of sum number i of this lane."""
        return T.call_extern(INT, "tl_attention_summed_slot", i)

    def distance(self, query: Any, key: Any, slot: Any) -> Any:
        """q_idx - kv_idx of a slot, in the tile whose first query and key these are."""
        name = f"tl_attention_distance<{str(self.rows_are_keys).lower()}>"
        return T.call_extern(INT, name, query, key, slot)

    @T.inline
    def keep(self, n, shared):
        """Store the values of this lane in shared memory of its warp."""
        T.evaluate(
            T.call_extern(
                "handle",
                f"tl_attention_keep_diagonals<{self.slots}>",
                shared.access_ptr("r"),  # see staged.SmemBytes
                self.values[n].data,
            )
        )

    def value(self, shared: Any, i: Any, j: Any) -> Any:
        """Value of an element, from shared memory."""
        return T.call_extern(
            FLOAT, f"tl_attention_diagonal<{self.slots}>", shared.access_ptr("r"), place(i, j)
        )

    @T.inline
    def clear(self):
        """Set the sums of this thread to 0."""
        for n in tuple(range(len(self.by_place))):
            for k in T.unroll(self.by_place[n].shape[0]):
                self.by_place[n][k] = 0.0

    @T.inline
    def add(self, n, i, j, x):
        """Add x to the sum of the diagonal of an element, in this thread."""
        T.evaluate(
            T.call_extern("handle", "tl_attention_add_to_place", self.by_place[n].data, place(i, j), x)
        )

    @T.inline
    def add_tile(self, n, tile, rows):
        """Set the sums of this thread to those of a tile of bf16 or fp32; where they are not pairs, without its rows from `rows` on."""
        if self.paired:
            T.evaluate(
                T.call_extern(
                    "handle", f"tl_attention_add_tile<{self.cols}>", self.by_place[n].data, tile.data
                )
            )
        else:
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_add_{'fp32_tile' if tile.dtype == FLOAT else 'rows'}<{self.cols}>",
                    self.by_place[n].data,
                    tile.data,
                    rows,
                )
            )

    @T.inline
    def merge(self, n):
        """Make one sum of those of a warp if all have the same target."""
        T.evaluate(
            T.call_extern(
                "handle",
                f"tl_attention_merge_sums<{sums_per_lane(self.cols)}>",
                self.sums[n].data,
                self.targets[n].data,
            )
        )

    @T.inline
    def sum(self, n):
        """Sum over the lanes of a warp."""
        T.evaluate(
            T.call_extern(
                "handle",
                f"tl_attention_sum_{'pairs' if self.paired else 'diagonals'}<{self.cols}>",
                self.sums[n].data,
                self.by_place[n].data,
            )
        )
