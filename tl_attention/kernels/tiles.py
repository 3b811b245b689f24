"""Where the tiles of one head lie in global memory. A kernel for another memory path (varlen, paged) brings its own class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T


def strided(name: str, shape: list, dtype: str) -> Any:
    """A tensor argument with any strides but the last, which is 1; TMA wants the others to be multiples of 16 bytes."""
    strides = [T.dynamic(f"{name}_stride_{axis}", "int64") for axis in range(len(shape) - 1)]
    return T.StridedTensor(shape, [*strides, 1], dtype)


@dataclass(frozen=True)
class FragmentBlocks:
    """fp32 matrices of 16 * row_blocks rows, in blocks of 16 x 8, each laid out as a warp holds it after wgmma: a thread has 4 numbers of
    it side by side, and a warp all 512 bytes, so that one instruction a block adds or stores them.

    tensor: [matrices * row_blocks, cols / 8, 32, 4]. A place in it is the number of a row block: an int32, where an offset is none.
    """

    tensor: Any
    row_blocks: Any  # of a matrix

    @staticmethod
    def argument(total_row_blocks: Any, cols: int) -> Any:
        return T.Tensor([total_row_blocks, cols // 8, 32, 4], "float32")

    def row_block(self, matrix: Any, row: Any) -> Any:
        return matrix * self.row_blocks + row // 16

    @staticmethod
    def in_block(row: Any, col: Any) -> tuple:
        """Lane and number of an element."""
        return row % 8 * 4 + col % 8 // 2, row % 16 // 8 * 2 + col % 2

    @staticmethod
    def element(lane: Any, number: Any) -> tuple:
        """Row and column in its block."""
        return lane // 4 + number // 2 * 8, lane % 4 * 2 + number % 2

    @T.inline
    def add(self, acc, row_block, first_col):
        rows, cols = acc.shape
        for i, j in T.Parallel(rows, cols):
            place = (row_block + i // 16, first_col // 8 + j // 8, *self.in_block(i, j))
            T.atomic_add(self.tensor[place], acc[i, j])

    @T.inline
    def store(self, acc, row_block):
        rows, cols = acc.shape
        for i, j in T.Parallel(rows, cols):
            place = (row_block + i // 16, j // 8, *self.in_block(i, j))
            self.tensor[place] = acc[i, j]


@dataclass(frozen=True)
class DenseTiles:
    """Q, K, V, O: [batch, seqlen, heads, columns]; Lse: [batch, heads, seqlen_q].

    A tile is head_dim (Q, K) or head_dim_v (V, O) wide, whatever the tensors' columns: TMA reads 0 and writes nothing past
    either end.
    """

    Q: Any
    K: Any
    V: Any
    O: Any
    Lse: Any
    head_dim: int
    head_dim_v: int

    def q(self, tile: Any, start: Any, rows: int) -> Any:
        return self.Q[tile.batch, start : start + rows, tile.head, 0 : self.head_dim]

    def k(self, tile: Any, start: Any, rows: int) -> Any:
        return self.K[tile.batch, start : start + rows, tile.kv_head, 0 : self.head_dim]

    def v(self, tile: Any, start: Any, rows: int) -> Any:
        return self.V[tile.batch, start : start + rows, tile.kv_head, 0 : self.head_dim_v]

    def o(self, tile: Any, start: Any, rows: int) -> Any:
        return self.O[tile.batch, start : start + rows, tile.head, 0 : self.head_dim_v]

    def lse(self, tile: Any, start: Any, rows: int) -> Any:
        return self.Lse[tile.batch, tile.head, start : start + rows]


@dataclass(frozen=True)
class DensePartTiles(DenseTiles):
    """DenseTiles whose output is one of several parts: O [splits, batch, heads, seqlen_q, head_dim_v], Lse [splits, batch, ..]."""

    def o(self, tile: Any, start: Any, rows: int) -> Any:
        return self.O[tile.split, tile.batch, tile.head, start : start + rows, 0 : self.head_dim_v]

    def lse(self, tile: Any, start: Any, rows: int) -> Any:
        return self.Lse[tile.split, tile.batch, tile.head, start : start + rows]


@dataclass(frozen=True)
class SharedTiles:
    """What the roles of a CTA share: rings of tiles; O, where the output leaves from, if there is a tile for it; the box of tile plans."""

    Q: Any
    K: Any
    V: Any
    O: Any
    tile_box: Any


@dataclass(frozen=True)
class DenseGradTiles:
    """What a backward reads and writes, as DenseTiles; its queries may come from several heads.

    Lse_log2, Delta: [batch, heads, seqlen_q rounded up]; dQ_sum, dK_parts, dV_parts: FragmentBlocks.
    """

    Q: Any
    K: Any
    V: Any
    dO: Any
    Lse_log2: Any
    Delta: Any
    head_dim: int
    head_dim_v: int
    dQ: Any = None
    dQ_sum: Any = None
    dK: Any = None
    dV: Any = None
    dK_parts: Any = None
    dV_parts: Any = None

    def q(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Q[tile.batch, start : start + rows, head, 0 : self.head_dim]

    def do(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.dO[tile.batch, start : start + rows, head, 0 : self.head_dim_v]

    def lse_log2(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Lse_log2[tile.batch, head, start : start + rows]

    def delta(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Delta[tile.batch, head, start : start + rows]

    def dq(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.dQ[tile.batch, start : start + rows, head, 0 : self.head_dim]

    def k(self, tile: Any, start: Any, rows: int) -> Any:
        return self.K[tile.batch, start : start + rows, tile.kv_head, 0 : self.head_dim]

    def v(self, tile: Any, start: Any, rows: int) -> Any:
        return self.V[tile.batch, start : start + rows, tile.kv_head, 0 : self.head_dim_v]

    def dk(self, tile: Any, start: Any, rows: int) -> Any:
        return self.dK[tile.batch, start : start + rows, tile.kv_head, 0 : self.head_dim]

    def dv(self, tile: Any, start: Any, rows: int) -> Any:
        return self.dV[tile.batch, start : start + rows, tile.kv_head, 0 : self.head_dim_v]
