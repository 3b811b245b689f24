"""score_mod and mask_mod inside the kernels: calls of the functions of a problem's Program, and gradients of captured tensors."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang import tvm

from tl_attention.kernels.scores.diagonals import Diagonals
from tl_attention.kernels.scores.program_code import STORED, fetched_type
from tl_attention.kernels.scores.staged import StagedTiles
from tl_attention.kernels.scores.traced_arguments import TracedArguments
from tl_attention.kernels.seams.softmax import LOG2E
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.program import BOOL, BYTES, FLOAT, INT, MASK, Captured

tirx = tvm.tirx
MAX_SCORE = 1e30


@T.meta_class
class Traced:
    """Program of a tile of 64 rows: new scores, their slopes, and gradients of captured tensors.

    start() says which batch entry and head the scores belong to, locate() which queries and keys.

    sums_pairs: sums of dS along diagonals begin with pairs of bf16, but for fp32.
    """

    def __init__(
        self,
        problem: AttnProblem,
        arguments: TracedArguments,
        softmax_scale: Any,
        cols: int,
        rows_are_keys: bool = False,
        staged: StagedTiles | None = None,
        sums_pairs: bool = False,
        name: str = "traced",
    ):
        program, self.cols, self.staged = problem.program, cols, staged
        self.is_staged, self.staged_bytes = problem.stages, problem.staged_bytes(cols, rows_are_keys)
        self.program, self.arguments, self.softmax_scale = program, arguments, softmax_scale
        self.rows_are_keys = rows_are_keys
        self.batch = T.alloc_var(INT, init=0)
        self.head = T.alloc_var(INT, init=0)
        # Gradients whose index is the same for all scores of a tile are summed per thread
        self.sums = [
            T.alloc_var(FLOAT, init=0.0) if self.is_uniform(gradient.index) else None
            for gradient in program.gradients
        ]
        # Elements of program.dense_loads for the tile, as they are in memory
        self.tiles = [
            T.alloc_local([cols // 2 * BYTES[self.captured(i).dtype] // 4], "uint32")
            for i in program.dense_loads
        ]
        self.diagonals = None
        if program.diagonals or program.diagonal_gradients:
            paired = sums_pairs and not problem.is_fp32
            self.diagonals = Diagonals(program, cols, rows_are_keys, paired, name="diagonals")
        self.bits = T.alloc_local([-(-cols // 64)], "uint32") if program.bits else None  # of the tile
        self.first_query = self.first_key = 0
        self.how = MASK

    @property
    def needs_key(self) -> bool:
        """True where a new score depends on its key."""
        return self.program.score is not None and self.program.depends_on(self.program.score, ("key",))

    def is_uniform(self, index: tuple[int, ...]) -> bool:
        return not any(self.program.depends_on(i, ("score", "query", "key")) for i in index)

    @T.inline
    def start(self, batch, head):
        """Set the batch entry and the query head of the scores."""
        self.batch[0] = batch
        self.head[0] = head

    def locate(self, first_query: Any, first_key: Any, how: Any) -> None:
        """Set the query and the key of the tile's first element, and how its keys are seen: program.MASK or another."""
        self.first_query, self.first_key, self.how = first_query, first_key, how

    def call(self, function: str, dtype: str, score: Any, i: Any, j: Any, *first: Any) -> Any:
        """A function of program_code at an element of the tile, whose scaled score is given.

        Only in the first 8 columns, of which a thread has 2 per row, is an int converted to a float. Other columns are computed from
        these by an addition, which takes a quarter of the time.
        """
        row, column = (
            (self.first_key, self.first_query) if self.rows_are_keys else (self.first_query, self.first_key)
        )
        row_position = T.cast(row + i, FLOAT)
        column_position = T.cast(column + j % 8, FLOAT) + T.cast(j // 8 * 8, FLOAT)
        positions = [row + i, column + j, row_position, column_position]
        if self.rows_are_keys:
            positions = [column + j, row + i, column_position, row_position]
        return T.call_extern(
            dtype,
            f"tl_attention_{function}",
            *first,
            score,
            self.batch[0],
            self.head[0],
            *positions,
            *self.arguments.flat,
            *self.all_fetched(function, i, j),
        )

    def all_fetched(self, function: str, i: Any, j: Any) -> tuple[Any, ...]:
        """Fetched values of an element, which program_code declares after all other arguments of a function."""
        if function in [f"target{number}" for number in self.program.diagonal_gradients]:
            return ()
        dense = (self.fetched(n, i, j) for n in range(len(self.tiles)))
        return *dense, *(self.diagonals.value(x, i, j) for x in self.staged.diagonals)

    def at_distance(self, function: str, dtype: str, head: Any, distance: Any) -> Any:
        """A function of program_code at a diagonal, which the difference of query and key says."""
        leaves = 0.0, self.batch[0], head, distance, 0, T.cast(distance, FLOAT), 0.0
        return T.call_extern(dtype, f"tl_attention_{function}", *leaves, *self.arguments.flat)

    @T.inline
    def fetch_diagonals(self, head, query, key, is_needed):
        """Compute the values of the diagonals of a tile with this head, first query and first key.

        A tile that is not needed may have a head past the last one.
        """
        head = T.if_then_else(is_needed, head, self.head[0])
        for n in tuple(range(len(self.program.diagonals))):
            for k in T.unroll(self.diagonals.slots // 32):
                distance = self.diagonals.distance(query, key, self.diagonals.of_lane(k))
                self.diagonals.values[n][k] = self.at_distance(
                    f"diagonal{self.program.diagonals[n]}", FLOAT, head, distance
                )

    @T.inline
    def keep_diagonals(self, added_to_hidden=False):
        """Store these values where the scores of the tile read them.

        added_to_hidden: their sum with -inf has to be -inf, although those of keys past the end may be NaN.
        """
        if added_to_hidden:
            for k in T.unroll(self.diagonals.slots // 32):
                value = self.diagonals.values[0][k]
                self.diagonals.values[0][k] = T.call_extern(FLOAT, "fminf", value, MAX_SCORE)
        for n in tuple(range(len(self.program.diagonals))):
            self.diagonals.keep(n, self.staged.diagonals[n])

    def captured(self, load: int) -> Captured:
        return self.program.tensors[self.program.values[load].data]

    def fetched(self, n: int, i: Any, j: Any) -> Any:
        """Element of a fetched tile, at the place that wgmma gives to row i and column j in the registers of their thread."""
        load = self.program.dense_loads[n]
        types = f"{STORED[self.captured(load).dtype]}, {fetched_type(self.program, load)}"
        place = j // 8 * 4 + i // 8 % 2 * 2 + j % 2
        dtype = self.program.values[load].dtype
        return T.call_extern(dtype, f"tl_attention_fetched<{types}>", self.tiles[n].data, place)

    @T.inline
    def fetch(self):
        """Fetch the tiles of captured tensors; after locate(). Those that are staged have been prefetched."""
        if self.is_staged:
            T.evaluate(T.call_extern("handle", "tl_attention_wait_for_prefetch"))
        for n in tuple(range(len(self.tiles))):
            if self.is_staged:
                T.evaluate(
                    T.call_extern(
                        "handle",
                        f"tl_attention_fetch_shared<{self.tile_types(n)}>",
                        self.tiles[n].data,
                        self.staged.tiles[n].access_ptr("r"),
                        self.staged_bytes[n],
                    )
                )
            else:
                T.evaluate(
                    T.call_extern(
                        "handle",
                        f"tl_attention_fetch<{self.tile_types(n)}>",
                        self.tiles[n].data,
                        *self.place(n, self.head[0], self.first_query, self.first_key),
                    )
                )

    @T.inline
    def prefetch(self, head, query, key, is_needed):
        """Start to copy tiles of captured tensors to shared memory, if is_needed; every lane has fetched the tiles before."""
        T.sync_warp()
        for n in tuple(range(len(self.tiles))):
            T.evaluate(
                T.call_extern(
                    "handle",
                    f"tl_attention_prefetch<{self.tile_types(n)}>",
                    self.staged.tiles[n].access_ptr("r"),
                    self.staged_bytes[n],
                    *self.place(n, head, query, key),
                    is_needed,
                )
            )

    def tile_types(self, n: int) -> str:
        """Template arguments of the functions of dense.cuh."""
        stored = STORED[self.captured(self.program.dense_loads[n]).dtype]
        return f"{stored}, {str(self.rows_are_keys).lower()}, {self.cols}"

    def place(self, n: int, head: Any, query: Any, key: Any) -> tuple[Any, ...]:
        """Arguments of the functions of dense.cuh: matrix of a captured tensor, and position of the tile in it."""
        load = self.program.dense_loads[n]
        tensor = self.arguments.tensors[self.program.values[load].data]
        leaves = 0.0, self.batch[0], head, 0, 0, 0.0, 0.0
        base = T.call_extern(INT, f"tl_attention_base{load}", *leaves, *self.arguments.flat)
        return tensor.data, base, tensor.strides[-2], *tensor.shape[-2:], query, key

    def score(self, raw_score: Any, i: Any, j: Any) -> Any:
        """New score, whether the query sees the key or not."""
        score = self.call("new_score", FLOAT, raw_score * self.softmax_scale, i, j)
        if self.rows_are_keys and self.program.may_be_undefined:
            # Past the last query lse is inf, and the probability 0 of any score but NaN and inf. A NaN elsewhere is in lse, too
            return T.call_extern(FLOAT, "fminf", score, MAX_SCORE)
        return score

    @T.inline
    def fetch_bits(self, place, row, column, ahead=False):
        """Fetch the bits of the tile whose first row and column these are; all 1 where a step has no place.

        ahead: nothing waits for the bits before they are used, which is only where a step has a place.
        """
        T.evaluate(
            T.call_extern(
                "handle",
                f"tl_attention_{'prefetch' if ahead else 'fetch'}_bits<{self.cols}>",
                self.bits.data,
                self.arguments.bits.data,
                place,
                row,
                column,
            )
        )

    def sees(self, i: Any, j: Any) -> Any:
        """True if the query sees the key."""
        if self.program.bits:
            place = j // 8 * 4 + i // 8 % 2 * 2 + j % 2  # as in fetched()
            return T.call_extern(BOOL, "tl_attention_bit", self.bits.data, place)
        return self.call("seen", BOOL, 0.0, i, j, self.how)

    def sloped(self, P: Any, raw_score: Any, i: Any, j: Any) -> Any:
        """Probability times the slope of its score."""
        slope = self.call("slope", FLOAT, raw_score * self.softmax_scale, i, j)
        return T.call_extern(FLOAT, "tl_attention_sloped", P, slope)

    @T.inline
    def apply(self, acc_s):
        """Replace raw scores by new ones."""
        if self.program.score is not None:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                acc_s[i, j] = self.score(acc_s[i, j], i, j)

    @T.inline
    def hide_step(self, acc_s, hidden, blocks, may_hide):
        """Set elements of a step that a query does not see to `hidden`. may_hide: False if all of the step is seen."""
        if self.program.hides:
            if may_hide:
                self.hide(acc_s, hidden, blocks.stop_key)

    @T.inline
    def hide(self, acc_s, hidden, stop):
        """Set elements of keys that a query does not see, and of keys from `stop` on, to `hidden`. stop None: there are no such keys."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            acc_s[i, j] = T.if_then_else(
                self.sees_before(i, j, stop), acc_s[i, j], T.cast(hidden, acc_s.dtype)
            )

    def sees_before(self, i: Any, j: Any, stop: Any) -> Any:
        """True if the query sees the key and the key is below `stop`; None: no limit."""
        if stop is None or self.program.bits:  # which are 0 from `stop` on
            return self.sees(i, j)
        return self.sees(i, j) & (self.first_key + (i if self.rows_are_keys else j) < stop)

    @T.inline
    def keep_scores(self, acc_s, scores):
        """Copy scaled scores; scores is None where gradients do not need them."""
        if self.program.learns_from_scores:
            rows, cols = acc_s.shape
            for i, j in T.Parallel(rows, cols):
                scores[i, j] = acc_s[i, j] * self.softmax_scale

    def weight(self, scores: Any, P: Any, i: Any, j: Any, lse_log2: Any, seqlen_k: Any) -> Any:
        """Probability of a [query, key] element without the slope of its score; 0 past the last key."""
        if not self.program.learns_from_scores:
            return P[i, j]
        weight = T.exp2(self.call("new_score", FLOAT, scores[i, j], i, j) * LOG2E - lse_log2[i])
        seen = self.first_key + j < seqlen_k
        if self.program.hides:
            seen = seen & self.sees(i, j)
        return T.call_extern(FLOAT, "tl_attention_before", seen, weight)

    def passed_on(
        self,
        number: int,
        scores: Any,
        P: Any,
        acc_dp: Any,
        i: Any,
        j: Any,
        lse_log2: Any,
        delta: Any,
        seqlen_k: Any,
    ) -> Any:
        """Gradient number `number` of an element: factor * weight * (dP - delta)."""
        weight = self.weight(scores, P, i, j, lse_log2, seqlen_k)
        score = scores[i, j] if self.program.learns_from_scores else 0.0
        factor = self.call(f"factor{number}", FLOAT, score, i, j)
        return T.call_extern(
            FLOAT, "tl_attention_gradient", weight, acc_dp[i, j], delta[i], lse_log2[i], factor
        )

    @T.inline
    def add_gradients(self, scores, P, acc_dp, lse_log2, delta, seqlen_k, tiles):
        """Add, or store, the gradients of captured tensors of a tile [queries, keys].

        Args:
            scores: of keep_scores(). P: probabilities.
            tiles: fragments [64, block_N] of fp32, one per gradient of program.stored.
        """
        rows, cols = acc_dp.shape
        if self.diagonals is not None:
            self.diagonals.clear()
        for i, j in T.Parallel(rows, cols):  # one loop, so that nvcc computes common parts once
            for number in self.summed:
                self.sums[number][0] += self.passed_on(
                    number, scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k
                )
            for number in self.scattered:
                self.add(
                    number,
                    self.call(f"target{number}", INT, 0.0, i, j),
                    self.passed_on(number, scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k),
                )
            for n in tuple(range(len(self.program.diagonal_gradients))):
                number = self.program.diagonal_gradients[n]
                x = self.passed_on(number, scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k)
                self.diagonals.add(n, i, j, x)
            for n in tuple(range(len(self.program.stored))):
                tiles[n][i, j] = self.passed_on(
                    self.program.stored[n], scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k
                )
        for n in tuple(range(len(self.program.stored))):
            self.store(n, tiles[n], self.first_query, self.first_key, seqlen_k)
        self.add_diagonals()

    @T.inline
    def add_diagonals(self, head=None):
        """Add the sums of the diagonals of a tile to gradients of captured tensors. head: of the tile; None: that of start()."""
        for n in tuple(range(len(self.program.diagonal_gradients))):
            self.diagonals.sum(n)
            number = self.program.diagonal_gradients[n]
            for k in T.unroll(self.diagonals.sums[n].shape[0]):
                distance = self.diagonals.distance(self.first_query, self.first_key, self.diagonals.summed(k))
                self.diagonals.targets[n][k] = self.at_distance(
                    f"target{number}", INT, self.head[0] if head is None else head, distance
                )
            function = "tl_attention_add" if head is None else "tl_attention_add_sum"
            if self.program.shares_targets(number):
                self.diagonals.merge(n)
                function = "tl_attention_add"  # most sums are 0
            for k in T.unroll(self.diagonals.sums[n].shape[0]):
                self.add(number, self.diagonals.targets[n][k], self.diagonals.sums[n][k], function)

    @T.inline
    def learn_dS(self, dS, seqlen_q, seqlen_k):
        """Store a tile dS' [keys, queries] as the gradient of program.learns_dS, whose matrices are transposed, or sum it per thread."""
        if len(self.program.stored) > 0:
            self.store(0, dS, self.first_key, self.first_query, seqlen_q)
        else:
            self.diagonals.add_tile(0, dS, seqlen_k - self.first_key)

    @T.inline
    def send_dS(self, tile, head, query, key):
        """Store an smem tile dS' [64 keys, queries] by TMA, as learn_dS() does from registers."""
        out = self.arguments.gradients[self.program.gradients[0].tensor]
        T.tma_copy(tile, out[self.batch[0], head, key : key + 64, query : query + self.cols])

    @T.inline
    def store(self, n, tile, row, column, columns):
        """Store the n-th of the gradients of program.stored for a tile from `row` and `column` on, as far as there are columns."""
        out = self.arguments.gradients[self.program.gradients[self.program.stored[n]].tensor]
        T.evaluate(
            T.call_extern(
                "handle",
                f"tl_attention_store_tile<{STORED[out.dtype]}, {STORED[tile.dtype]}, {tile.shape[1]}>",
                out.access_ptr("rw"),
                tile.data,
                self.staged.gradients[n].access_ptr("r"),
                self.program.stored_bytes(16, self.cols)[n],
                self.batch[0],
                self.head[0],
                row,
                column,
                *out.shape[1:],
                columns,
            )
        )

    @T.inline
    def add(self, number, target, x, function="tl_attention_add"):
        """Add x to element `target` of the tensor that gradient number `number` belongs to."""
        sums = self.arguments.gradients[self.program.gradients[number].tensor]
        T.evaluate(
            T.call_extern(
                "handle",
                "tl_attention_add_exactly" if self.program.exact else function,
                sums.access_ptr("rw"),
                target,
                x,
            )
        )

    @property
    def summed(self) -> tuple[int, ...]:
        """Gradients that are summed per thread."""
        return tuple(i for i, total in enumerate(self.sums) if total is not None)

    @property
    def scattered(self) -> tuple[int, ...]:
        """Gradients that each element adds to."""
        others = *self.program.stored, *self.program.diagonal_gradients
        return tuple(i for i, x in enumerate(self.sums) if x is None and i not in others)

    @T.inline
    def finish_gradients(self):
        """Add the sums of the threads to global memory, one addition per warp."""
        self.locate(0, 0, MASK)  # their index is that of every score
        for number in self.summed:
            self.sums[number][0] = T.warp_reduce_sum(self.sums[number][0])
            if T.get_thread_binding() % 32 == 0:
                self.add(number, self.call(f"target{number}", INT, 0.0, 0, 0), self.sums[number][0])
