"""Tiles of one head in global memory. Each memory path (dense, varlen, split, pages) is a class with the same methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.config.kernel_configs import BwdPass
from tl_attention.kernels.seams.pipeline import HALVES, indices
from tl_attention.kernels.seams.products import CHUNK, add_transposed
from tl_attention.kernels.seams.row_stores import store_rows, store_to_tensor, store_vector
from tl_attention.kernels.sources.pages import PagedLoads
from tl_attention.problem.attn_problem import FAR, AttnProblem


def strided(name: str, shape: list, dtype: str) -> Any:
    """Tensor argument whose last stride is 1 and whose others are runtime values; TMA wants multiples of 16 bytes."""
    strides = [T.dynamic(f"{name}_stride_{axis}", "int64") for axis in range(len(shape) - 1)]
    return T.StridedTensor(shape, [*strides, 1], dtype)


@dataclass(frozen=True)
class FragmentBlocks:
    """fp32 matrices of 16 * row_blocks rows in blocks of 16 x 8, each in the order in which a warp holds it after wgmma.

    A thread holds 4 adjacent numbers of a block and a warp all 512 bytes, so one instruction per block adds or stores them.

    Args:
        tensor: [matrices * row_blocks, cols / 8, 32, 4]. The first index, a row block, fits an int32 where an offset does not.
        row_blocks: row blocks per matrix.
    """

    tensor: Any
    row_blocks: Any

    @staticmethod
    def argument(total_row_blocks: Any, cols: int) -> Any:
        return T.Tensor([total_row_blocks, cols // 8, 32, 4], "float32")

    def row_block(self, matrix: Any, row: Any) -> Any:
        return matrix * self.row_blocks + row // 16

    def packed_row_block(self, tile: Any, head: Any, query: Any) -> Any:
        """Row block of a query of a tile's sequence, in the matrix of a query head."""
        return self.row_block(head, tile.padded_q[0] + query)

    @staticmethod
    def in_block(row: Any, col: Any) -> tuple:
        """(lane, index among its 4 numbers) of an element of a block."""
        return row % 8 * 4 + col % 8 // 2, row % 16 // 8 * 2 + col % 2

    @staticmethod
    def element(lane: Any, number: Any) -> tuple:
        """(row, column) in the block."""
        return lane // 4 + number // 2 * 8, lane % 4 * 2 + number % 2

    @T.inline
    def add(self, acc, row_block, first_col):
        rows, cols = acc.shape
        for i, j in T.Parallel(rows, cols):
            place = (row_block + i // 16, first_col // 8 + j // 8, *self.in_block(i, j))
            T.atomic_add(self.tensor[place], acc[i, j])

    @T.inline
    def store(self, accs, row_block):
        """Store tiles side by side."""
        for n in indices(accs):
            rows, cols = accs[n].shape
            for i, j in T.Parallel(rows, cols):
                place = (row_block + i // 16, n * cols // 8 + j // 8, *self.in_block(i, j))
                self.tensor[place] = accs[n][i, j]


@dataclass(frozen=True)
class DenseTiles:
    """Tiles of dense tensors: Q, K, V, O [batch, seqlen, heads, columns], Lse [batch, heads, seqlen_q] fp32.

    A tile is head_dim (Q, K) or head_dim_v (V, O) wide, even if the tensors have fewer columns: TMA reads 0 and writes nothing past the
    end of a dimension.
    """

    Q: Any
    K: Any
    V: Any
    O: Any
    Lse: Any
    head_dim: int
    head_dim_v: int
    terms: int = 1  # terms of K and V, side by side in a tile: see products.py

    @property
    def q_columns(self) -> int:
        """Columns of a tile of Q; in fp32 two per number, see split_tile.py."""
        return self.head_dim * (HALVES if self.terms > 1 else 1)

    def first_query(self, tile: Any, block_M: int) -> Any:
        """First query of a tile of the forward."""
        return tile.m_block * block_M

    def may_store(self, start: Any) -> Any:
        """True if TMA may store O of the queries of a warpgroup from `start` on; it leaves out those past the last one."""
        return True

    def q(self, tile: Any, start: Any, rows: int) -> Any:
        return self.Q[tile.batch, start : start + rows, tile.head, 0 : self.q_columns]

    def k(self, tile: Any, start: Any, rows: int) -> Any:
        return self.K[tile.batch, start : start + rows, tile.kv_head, 0 : self.terms * self.head_dim]

    def v(self, tile: Any, start: Any, rows: int) -> Any:
        return self.V[tile.batch, start : start + rows, tile.kv_head, 0 : self.terms * self.head_dim_v]

    def o(self, tile: Any, start: Any, rows: int) -> Any:
        return self.O[tile.batch, start : start + rows, tile.head, 0 : self.head_dim_v]

    def load_k(self, ring: Any, ring_step: Any, tile: Any, blocks: Any, step: Any) -> None:
        """Load the keys of a step of KeyBlocks to a step of the ring; call it for step 0 first."""
        ring.fill(ring_step, self.k(tile, blocks.first_key(step), blocks.block_N))

    def load_v(self, ring: Any, ring_step: Any, tile: Any, blocks: Any, step: Any) -> None:
        """load_k for values."""
        ring.fill(ring_step, self.v(tile, blocks.first_key(step), blocks.block_N))

    def lse_place(self, tile: Any, row: Any) -> tuple:
        return tile.batch, tile.head, row

    @T.inline
    def store_lse(self, lse, tile, start):
        store_vector(lse, self.Lse, self.lse_place(tile, start), self.Lse.shape[-1] - start)

    @T.inline
    def store_result(self, accs, lse, tile, start):
        """Store O, tiles side by side, from registers. lse: log-sum-exp of the same rows."""
        for n in indices(accs):
            self.store_o(accs[n], tile, start, n * CHUNK)

    @T.inline
    def store_o(self, acc_o, tile, start, first_col=0):
        """Store columns of an fp32 O from registers."""
        store_to_tensor(self.O, tile.batch, start, self.O.shape[1] - start, tile.head, acc_o, first_col)


def packed(name: str, heads: Any, columns: Any, dtype: str) -> Any:
    """Tensor argument [total, heads, columns] of packed sequences of any lengths, viewed so that TMA stops at the end of each.

    The view is [planes, ends, rows, heads, columns] with rows = FAR. Ends and rows both step by one row; FAR planes step back FAR rows,
    modulo 2^64 bytes. So [FAR, end, FAR - length + i] is row i of the sequence of this length whose last row is end - 1. TMA reads 0
    and writes nothing past the end of `rows`, which is the end of the sequence.
    """
    planes, ends, rows = T.dynamic(f"{name}_planes, {name}_ends, {name}_rows")
    return strided(name, [planes, ends, rows, heads, columns], dtype)


def rows_argument(
    problem: AttnProblem,
    name: str,
    batch: Any,
    seqlen: Any,
    heads: Any,
    columns: Any,
    operand: str | None = None,
) -> Any:
    """Tensor argument [batch, seqlen, heads, columns] with any strides; with varlen the view of packed().

    operand: one of problem.OPERANDS, which determines the dtype; default: `name`.
    """
    dtype = problem.dtype_of(operand or name)
    if problem.has("varlen"):
        return packed(name, heads, columns, dtype)
    return strided(name, [batch, seqlen, heads, columns], dtype)


def input_arguments(
    problem: AttnProblem,
    batch: Any,
    seqlen_q: Any,
    heads: Any,
    seqlen_k: Any,
    heads_kv: Any,
    columns_qk: Any,
    columns_v: Any,
    raw_fp32: tuple[str, ...] = (),
) -> tuple:
    """Tensor arguments Q, K, V and dO, as rows_argument.

    raw_fp32: names of those that split_tile.py splits in fp32. They have two columns per number, not one per term.
    """
    of_queries, of_keys = (batch, seqlen_q, heads), (batch, seqlen_k, heads_kv)
    rows = {"q": of_queries, "k": of_keys, "v": of_keys, "do": of_queries}
    columns = {"q": columns_qk, "k": columns_qk, "v": columns_v, "do": columns_v}
    if problem.is_fp32:
        columns |= {name: T.dynamic(f"columns_{name}") for name in raw_fp32}
    return tuple(rows_argument(problem, name, *rows[name], columns[name]) for name in rows)


def result_argument(
    problem: AttnProblem, name: str, batch: Any, seqlen: Any, heads: Any, columns: Any
) -> Any:
    """Tensor argument of O or dQ, as rows_argument; in fp32 [batch, seqlen, heads, columns <= width] or [1, total, heads, columns]."""
    if problem.dtype_of(name) == "float32":
        # Stored from registers, which needs no view for TMA. Q and V have the columns of all their terms
        return strided(name, [batch, seqlen, heads, T.dynamic(f"columns_{name}")], "float32")
    return rows_argument(problem, name, batch, seqlen, heads, columns)


def dq_sum_argument(
    problem: AttnProblem, config: BwdPass, batch: Any, seqlen: Any, heads: Any, columns: Any, blocks: Any
) -> Any:
    """Tensor argument that a pass by keys adds dQ to: FragmentBlocks; dQ itself in fp32 and where one tile has all keys of a head."""
    if config.makes_all and problem.is_fp32:
        return result_argument(problem, "dq", batch, seqlen, heads, columns)
    if config.one_tile:
        return rows_argument(problem, "dq", batch, seqlen, heads, columns)
    return FragmentBlocks.argument(blocks, problem.head_dim)


def packed_rows(tensor: Any, end: Any, length: Any, start: Any, rows: int, head: Any, cols: int) -> Any:
    """`rows` rows from `start` on of the sequence of this length and end, in the view of packed()."""
    row = FAR - length + start
    return tensor[FAR, end, row : row + rows, head, 0:cols]


@dataclass(frozen=True)
class PackedTiles(DenseTiles):
    """Tiles of packed sequences: Q, K, V, O in the view of packed(), Lse [heads, total_q] fp32."""

    def q(self, tile: Any, start: Any, rows: int) -> Any:
        return packed_rows(self.Q, tile.end_q[0], tile.len_q[0], start, rows, tile.head, self.q_columns)

    def k(self, tile: Any, start: Any, rows: int) -> Any:
        cols = self.terms * self.head_dim
        return packed_rows(self.K, tile.end_k[0], tile.len_k[0], start, rows, tile.kv_head, cols)

    def v(self, tile: Any, start: Any, rows: int) -> Any:
        cols = self.terms * self.head_dim_v
        return packed_rows(self.V, tile.end_k[0], tile.len_k[0], start, rows, tile.kv_head, cols)

    def o(self, tile: Any, start: Any, rows: int) -> Any:
        return packed_rows(self.O, tile.end_q[0], tile.len_q[0], start, rows, tile.head, self.head_dim_v)

    def lse_place(self, tile: Any, row: Any) -> tuple:
        return tile.head, row

    @T.inline
    def store_o(self, acc_o, tile, start, first_col=0):
        """Store columns of O [1, total_q, heads, columns] from registers, where it is fp32."""
        row = tile.end_q[0] - tile.len_q[0] + start
        store_to_tensor(self.O, 0, row, tile.len_q[0] - start, tile.head, acc_o, first_col)

    @T.inline
    def store_lse(self, lse, tile, start):
        # Variables: as expressions they kept the layout inference of TileLang 0.1.15 busy for half a minute
        row = T.alloc_var("int32", init=tile.end_q[0] - tile.len_q[0] + start)
        rows_left = T.alloc_var("int32", init=tile.len_q[0] - start)
        store_vector(lse, self.Lse, self.lse_place(tile, row), rows_left)


@dataclass(frozen=True)
class DenseSplitTiles(DenseTiles):
    """DenseTiles of a split: O [splits, batch, heads, seqlen_q, head_dim_v] and Lse [splits, batch, heads, seqlen_q], fp32."""

    def lse_place(self, tile: Any, row: Any) -> tuple:
        return tile.split, tile.batch, tile.head, row

    @T.inline
    def store_o(self, acc_o, tile, start, first_col=0):
        place = tile.split, tile.batch, tile.head, start, first_col
        store_rows(acc_o, self.O, place, self.O.shape[4], self.O.shape[3] - start)


@dataclass(frozen=True)
class PackedSplitTiles(PackedTiles):
    """PackedTiles of a split: O [splits, 1, heads, total_q, head_dim_v] and Lse [splits, 1, heads, total_q], fp32.

    Rows of no tile are not written: tile_table.py clears those behind the last sequence.
    """

    def lse_place(self, tile: Any, row: Any) -> tuple:
        return tile.split, 0, tile.head, row

    @T.inline
    def store_o(self, acc_o, tile, start, first_col=0):
        row = T.alloc_var("int32", init=tile.end_q[0] - tile.len_q[0] + start)
        rows_left = T.alloc_var("int32", init=tile.len_q[0] - start)
        store_rows(acc_o, self.O, (tile.split, 0, tile.head, row, first_col), self.O.shape[4], rows_left)


@dataclass(frozen=True)
class PagedKeys(PackedTiles):
    """Tiles of packed queries with keys in pages: K, V hold the rows of all pages one after the other, in the view of packed()."""

    k_loads: PagedLoads | None = None
    v_loads: PagedLoads | None = None

    def load_k(self, ring: Any, ring_step: Any, tile: Any, blocks: Any, step: Any) -> None:
        self.k_loads.load(ring, ring_step, tile, blocks, step)

    def load_v(self, ring: Any, ring_step: Any, tile: Any, blocks: Any, step: Any) -> None:
        self.v_loads.load(ring, ring_step, tile, blocks, step)


@dataclass(frozen=True)
class PagedTiles(PagedKeys):
    """PackedTiles whose keys are in pages."""


@dataclass(frozen=True)
class PagedSplitTiles(PagedKeys, PackedSplitTiles):
    """PackedSplitTiles whose keys are in pages."""


@dataclass(frozen=True)
class SmemTiles:
    """Shared memory through which the roles of a CTA communicate; None for what a kernel does not have.

    Q, K, V, dO are TileRings; dS is an Exchange. O, P, dV are tiles [warpgroups, 64, columns], or one per warpgroup.
    """

    Q: Any
    K: Any
    V: Any = None
    O: Any = None
    dO: Any = None
    P: Any = None
    dS: Any = None
    dK: Any = None
    dV: Any = None
    tile_box: Any = None  # scheduler.TileBox or key_tiles.KeyTileBox
    dq: Any = None  # dq_sinks.sink.DqSink
    overflows: Any = None  # scheduler.Overflows
    bias_columns: Any = None  # linear_bias.alloc_bias_columns
    staged: Any = None  # staged.StagedTiles
    pieces: Any = None  # shared_tiles.SharedPieces, in global memory
    inputs: Any = None  # input_terms.InputTerms, in global memory


@dataclass(frozen=True)
class DenseGradTiles:
    """Tiles of a backward pass, as in DenseTiles; methods for rows of queries take the query head as an argument.

    Lse_log2, Delta: fp32 [batch, heads, seqlen_q rounded up]; dK_partials, dV_partials: FragmentBlocks.
    """

    Q: Any
    K: Any
    V: Any
    dO: Any
    Lse_log2: Any
    Delta: Any
    head_dim: int
    head_dim_v: int
    terms: int = 1  # of Q, K, V and dO, as in DenseTiles
    splits_keys: bool = False  # K and V are fp32, see split_tile.py
    K_terms: Any = None  # where the pass stores their terms
    V_terms: Any = None
    dQ: Any = None
    dK: Any = None
    dV: Any = None
    dK_partials: Any = None
    dV_partials: Any = None

    def q(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Q[tile.batch, start : start + rows, head, 0 : self.terms * self.head_dim]

    def do(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.dO[tile.batch, start : start + rows, head, 0 : self.terms * self.head_dim_v]

    def lse_log2(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Lse_log2[tile.batch, head, start : start + rows]

    def delta(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Delta[tile.batch, head, start : start + rows]

    def dq(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.dQ[tile.batch, start : start + rows, head, 0 : self.head_dim]

    def dq_piece(self, tile: Any, head: Any, start: Any, rows: slice, cols: slice) -> Any:
        return self.dQ[tile.batch, start + rows.start : start + rows.stop, head, cols]

    @T.inline
    def store_dq(self, acc_dq, tile, start, first_col=0):
        """Store columns of an fp32 dQ from registers."""
        store_to_tensor(self.dQ, tile.batch, start, self.dQ.shape[1] - start, tile.head, acc_dq, first_col)

    @T.inline
    def add_dq(self, acc_dq, tile, head, start, first_col, factor):
        """Add factor * columns of dQ' [columns, queries] to an fp32 dQ."""
        add_transposed(self.dQ, tile.batch, start, head, first_col, factor, acc_dq)

    def key_rows(self, tensor: Any, tile: Any, start: Any, rows: int, cols: int) -> Any:
        """Rows of a tensor of keys."""
        return tensor[tile.batch, start : start + rows, tile.kv_head, 0:cols]

    def k(self, tile: Any, start: Any, rows: int) -> Any:
        columns = (HALVES if self.splits_keys else self.terms) * self.head_dim
        return self.key_rows(self.K, tile, start, rows, columns)

    def v(self, tile: Any, start: Any, rows: int) -> Any:
        columns = (HALVES if self.splits_keys else self.terms) * self.head_dim_v
        return self.key_rows(self.V, tile, start, rows, columns)

    def k_terms(self, tile: Any, start: Any, rows: int) -> Any:
        return self._key_terms(self.K_terms, tile, start, rows, self.head_dim)

    def v_terms(self, tile: Any, start: Any, rows: int) -> Any:
        return self._key_terms(self.V_terms, tile, start, rows, self.head_dim_v)

    def _key_terms(self, tensor: Any, tile: Any, start: Any, rows: int, width: int) -> Any:
        return None if tensor is None else self.key_rows(tensor, tile, start, rows, self.terms * width)

    def dk(self, tile: Any, start: Any, rows: int) -> Any:
        return self.key_rows(self.dK, tile, start, rows, self.head_dim)

    def dv(self, tile: Any, start: Any, rows: int) -> Any:
        return self.key_rows(self.dV, tile, start, rows, self.head_dim_v)

    def dq_row_block(self, sums: FragmentBlocks, tile: Any, head: Any, start: Any) -> Any:
        """Row block in the sums of dQ."""
        return sums.row_block(tile.batch * self.Q.shape[2] + head, start)

    def dk_row_block(self, partials: FragmentBlocks, tile: Any, start: Any) -> Any:
        """Row block in dK_partials or dV_partials."""
        batch, _, heads_kv, _ = self.K.shape
        return partials.row_block((tile.sharer * batch + tile.batch) * heads_kv + tile.kv_head, start)


@dataclass(frozen=True)
class StreamKGradTiles(DenseGradTiles):
    """Tiles of a backward pass in which several CTAs share some key tiles.

    dK_partials and dV_partials: matrices [shared tiles, sharers] of the keys of a tile. Shared tiles are in the order of the heads of all
    batch entries, those of a head from its last keys to its first. So are the numbers of a StreamKOrder without head groups. With them,
    under a causal mask, all tiles are shared or none: launch.bwd_passes.pass_sharers.

    Args:
        counts: key_tiles.KeyTileCounts.
        block_N: keys per tile.
    """

    counts: Any = None
    block_N: int = 0

    def shared_number(self, tile: Any) -> Any:
        """Number of a tile among the shared ones; negative if it is not shared."""
        head, blocks = tile.batch * self.K.shape[2] + tile.kv_head, self.counts.n_blocks
        return (head + 1) * blocks - 1 - tile.first_key // self.block_N - self.counts.whole

    def dk_row_block(self, partials: FragmentBlocks, tile: Any, start: Any) -> Any:
        matrix = self.shared_number(tile) * self.counts.sharers + tile.sharer
        return partials.row_block(matrix, start - tile.first_key)


@dataclass(frozen=True)
class PackedGradTiles(DenseGradTiles):
    """Tiles of a backward pass over packed sequences: Q, K, V, dO, dQ, dK, dV in the view of packed().

    Lse_log2, Delta: fp32 [1, heads, padded rows]. In these, in sums of dQ, dK_partials and dV_partials a sequence starts at its padded_q or
    padded_k.
    """

    def q(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        cols = self.terms * self.head_dim
        return packed_rows(self.Q, tile.end_q[0], tile.len_q[0], start, rows, head, cols)

    def do(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        cols = self.terms * self.head_dim_v
        return packed_rows(self.dO, tile.end_q[0], tile.len_q[0], start, rows, head, cols)

    def lse_log2(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Lse_log2[0, head, tile.padded_q[0] + start : tile.padded_q[0] + start + rows]

    def delta(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return self.Delta[0, head, tile.padded_q[0] + start : tile.padded_q[0] + start + rows]

    def dq(self, tile: Any, head: Any, start: Any, rows: int) -> Any:
        return packed_rows(self.dQ, tile.end_q[0], tile.len_q[0], start, rows, head, self.head_dim)

    @T.inline
    def store_dq(self, acc_dq, tile, start, first_col=0):
        """Store columns of dQ [1, total_q, heads, columns] from registers, where it is fp32."""
        row = tile.end_q[0] - tile.len_q[0] + start
        store_to_tensor(self.dQ, 0, row, tile.len_q[0] - start, tile.head, acc_dq, first_col)

    def key_rows(self, tensor: Any, tile: Any, start: Any, rows: int, cols: int) -> Any:
        return packed_rows(tensor, tile.end_k[0], tile.len_k[0], start, rows, tile.kv_head, cols)

    def dq_row_block(self, sums: FragmentBlocks, tile: Any, head: Any, start: Any) -> Any:
        return sums.packed_row_block(tile, head, start)

    def dk_row_block(self, partials: FragmentBlocks, tile: Any, start: Any) -> Any:
        return partials.row_block(tile.sharer * self.K.shape[3] + tile.kv_head, tile.padded_k[0] + start)
