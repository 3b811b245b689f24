"""Products of tiles whose elements are sums of terms: fp32 on tensor cores that multiply bf16.

Let x = x0 + x1 + x2, where each term is the bf16 number nearest to the rest. A product x y is computed as the sum of the products of
terms that problem.PRODUCTS lists, in one fp32 accumulator. A tile of one term is multiplied directly.
"""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.seams.pipeline import alloc_fragments, indices


def alloc_further_terms(shape: list[int], terms: int) -> tuple:
    """Fragments for the terms of a tile after the first one."""
    return alloc_fragments([shape] * (terms - 1), "bfloat16")


@T.macro
def split_terms(acc, tiles):
    """Split an fp32 tile into the terms of `tiles`, the largest first. acc then holds the rest after the last term."""
    T.copy(acc, tiles[0])
    for before, tile in itertools.pairwise(tiles):
        subtract(acc, before)
        T.copy(acc, tile)


@T.macro
def split_kept(acc, tiles):
    """Like split_terms, but acc keeps its values."""
    rows, cols = acc.shape
    T.copy(acc, tiles[0])
    for number, tile in enumerate(tiles[1:], 1):
        for i, j in T.Parallel(rows, cols):
            tile[i, j] = acc[i, j] - whole(tiles[:number], i, j)


@T.macro
def round_P(acc, tiles, dropout):
    """Round probabilities to 16 bits, or to the terms of a tile, and drop those that dropout does not keep."""
    if len(tiles) > 1:
        dropout.drop(acc)
        split_terms(acc, tiles)
    else:
        T.copy(acc, tiles[0])
        dropout.drop(tiles[0])


def whole(tiles: tuple, i: Any, j: Any) -> Any:
    """Sum of the terms of an element, exact in fp32."""
    return functools.reduce(operator.add, (T.cast(tile[i, j], "float32") for tile in tiles))


@T.macro
def subtract(acc, term):
    """acc -= term, which is exact where the term is acc rounded."""
    rows, cols = acc.shape
    for i, j in T.Parallel(rows, cols):
        acc[i, j] -= T.cast(term[i, j], "float32")


@T.macro
def multiply(products, left, right, acc, clear_accum=False, transpose_A=False, transpose_B=False):
    """Issue acc += left right, or acc = left right; one group of wgmma per product of terms.

    left, right: functions of a term that return its tile.
    """
    for number, (i, j) in enumerate(products):
        T.wgmma_gemm(
            left(i),
            right(j),
            acc,
            transpose_A=transpose_A,
            transpose_B=transpose_B,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=clear_accum and number == 0,
        )


@T.macro
def replace_dp(P, acc_dp, delta):
    """Replace dP' by dS' = P' * (dP' - Delta), all in fp32. P: tiles whose sum it is; delta: function of j."""
    rows, cols = acc_dp.shape
    for i, j in T.Parallel(rows, cols):
        acc_dp[i, j] = whole(P, i, j) * (acc_dp[i, j] - delta(j))


CHUNK = 64  # columns of the accumulator of one block
MOST_GROUPS = 7  # most groups that T.wait_wgmma can leave in flight


@T.macro
def clear(accs):
    """Set tiles to 0."""
    for n in indices(accs):
        T.clear(accs[n])


@T.macro
def scale(accs, softmax_scale):
    """Multiply tiles by a number."""
    for n in indices(accs):
        rows, cols = accs[n].shape
        for i, j in T.Parallel(rows, cols):
            accs[n][i, j] *= softmax_scale


@T.macro
def add(acc, chunk):
    """acc += chunk, in registers of the same layout."""
    rows, cols = chunk.shape
    for i, j in T.Parallel(rows, cols):
        acc[i, j] += chunk[i, j]


@T.macro
def add_transposed(tensor, batch, first_row, head, first_col, factor, acc):
    """tensor += factor * acc', except for rows and columns that the tensor lacks. Needs add_transposed.cuh.

    Args:
        tensor: fp32 [batch, seqlen, heads, columns].
        acc: [64 columns from first_col on, rows from first_row on].
    """
    _, seqlen, _, columns = tensor.shape
    T.evaluate(
        T.call_extern(
            "handle",
            f"tl_attention_add_transposed<{acc.shape[1]}>",
            T.address_of(tensor[batch, first_row, head, first_col]),
            tensor.strides[1],
            seqlen - first_row,
            columns - first_col,
            factor,
            acc.data,
        )
    )


@T.macro
def add_product(products, left, right, accs, chunk):
    """Finish accs += left right, whose first chunk of columns has been issued into `chunk`.

    wgmma rounds its sums towards 0, so the error of one long sum grows with its length: 5e-5, relative, over 8192 keys in three terms
    (H200, 2026-11-22). `chunk` sums one block, smallest products first; blocks are added in registers, rounding to nearest.

    In two terms a sum of 1024 rows has an error of 4e-6, below that of the terms: passes with one_sum have one accumulator for it.

    Args:
        right: function of (term, first column) that returns a tile of CHUNK columns.
        accs: fp32 tiles [64, CHUNK].
    """
    T.wait_wgmma(0)
    add(accs[0], chunk)
    for n in tuple(range(1, len(accs))):
        multiply(products, left, lambda term: right(term, n * CHUNK), chunk, clear_accum=True)
        T.wait_wgmma(0)
        add(accs[n], chunk)


@dataclass(frozen=True)
class Job:
    """One chunk of a sum += left right, as add_product computes it; the operands are functions of a term."""

    add: Any  # adds the accumulator of one block to the sum
    left: Any
    right: Any
    transpose_A: bool = False  # of left


def jobs(accs: tuple, left: tuple, ring: Any, step: Any) -> tuple[Job, ...]:
    """Jobs of a sum. accs: fp32 tiles side by side. left: tiles of the terms. ring: TileRing of the right factor."""
    width = accs[0].shape[1]
    rights = (functools.partial(ring.term, step, first_col=n * width, cols=width) for n in indices(accs))
    return tuple(
        Job(functools.partial(add, acc), left.__getitem__, right)
        for acc, right in zip(accs, rights, strict=True)
    )


def transposed_jobs(width: int, ring: Any, w: int, right: tuple, add_columns: Any) -> tuple[Job, ...]:
    """Jobs of dQ' = K' dS', CHUNK columns of dQ each, for the keys of warpgroup w.

    Args:
        width: columns of dQ.
        ring: TileRing of K.
        right: smem tiles [keys, queries] of the terms of dS'.
        add_columns: function of (dQ' [CHUNK, queries], first column).
    """
    return tuple(
        Job(
            functools.partial(add_columns, first_col=first),
            functools.partial(ring.term, w, first_col=first, cols=CHUNK),
            right.__getitem__,
            transpose_A=True,
        )
        for first in range(0, width, CHUNK)
    )


@T.macro
def issue(products, job, acc):
    """Issue a job into an accumulator."""
    multiply(products, job.left, job.right, acc, clear_accum=True, transpose_A=job.transpose_A)


@T.macro
def start_jobs(products, jobs, sums):
    """Issue the first two jobs, into one of the two accumulators `sums` each."""
    for n in tuple(range(min(len(jobs), 2))):
        issue(products, jobs[n], sums[n])


@T.macro
def continue_jobs(products, jobs, sums, started):
    """Issue all jobs but the first `started`, which are in flight, and add all but the last two."""
    for n in tuple(range(started, len(jobs))):
        if n >= 2:
            T.wait_wgmma(min(len(products), MOST_GROUPS))
            jobs[n - 2].add(sums[n % 2])
        issue(products, jobs[n], sums[n % 2])


@T.macro
def finish_jobs(products, jobs, sums, beside):
    """Add the last two jobs. beside: groups of wgmma issued after them."""
    for n in tuple(range(max(len(jobs) - 2, 0), len(jobs))):
        T.wait_wgmma(min((len(jobs) - 1 - n) * len(products) + beside, MOST_GROUPS))
        jobs[n].add(sums[n % 2])


@dataclass(frozen=True)
class OutputTiles:
    """O of 64 queries in registers: tiles side by side, and the products of a key block, which with terms are summed apart.

    Args:
        chunks: fp32 [64, columns] each.
        block: accumulator of a block's product; without terms chunks[0] itself.
    """

    products: tuple
    chunks: tuple
    block: Any

    @T.inline
    def clear(self):
        for n in indices(self.chunks):
            T.clear(self.chunks[n])

    @T.inline
    def start(self, P, V, step):
        """Issue O += P V of a step; with terms the product of the first columns."""
        multiply(
            self.products,
            P.__getitem__,
            lambda right: V.term(step, right, 0, CHUNK),
            self.block,
            clear_accum=len(P) > 1,
        )

    @T.inline
    def finish(self, P, V, step):
        """Issue what start() has left of the product, the further columns of terms, and wait until O is complete."""
        if len(P) > 1:
            add_product(
                self.products,
                P.__getitem__,
                lambda right, col: V.term(step, right, col, CHUNK),
                self.chunks,
                self.block,
            )
        else:
            T.wait_wgmma(0)
