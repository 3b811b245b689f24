"""score_mod and mask_mod inside the kernels: calls of the functions of a problem's Program, and gradients of captured tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tilelang.language.eager.builder import Builder

from tl_attention.kernels.softmax import LOG2E
from tl_attention.problem import AttnProblem
from tl_attention.program import BOOL, FLOAT, INT, Captured, Program

tirx = tvm.tirx


@dataclass(frozen=True)
class TracedArguments:
    """Arguments of a kernel with a program, after all others."""

    tensors: tuple[Any, ...]  # captured tensors
    numbers: tuple[Any, ...]  # captured numbers
    gradients: dict[int, Any]  # fp32 sums of the gradients of program.learned, contiguous, by tensor

    @property
    def flat(self) -> tuple[Any, ...]:
        """Arguments of the functions of program_code: address, and size and stride per dimension, of each tensor; numbers."""
        found = []
        for tensor in self.tensors:
            found.append(tensor.data)
            for size, stride in zip(tensor.shape, tensor.strides, strict=True):
                found += [size, stride]
        return *found, *self.numbers


def traced_arguments(problem: AttnProblem) -> TracedArguments | None:
    """Declare the arguments of a problem's program, at the begin of the body of a prim_func; None without a program.

    Order: captured tensors, numbers, gradients. A 0-d tensor has one dimension of size 1; bool tensors are uint8.
    """
    program = problem.program
    if program is None:
        return None
    builder = Builder.current()

    def tensor(name: str, captured: Captured) -> Any:
        dims = range(max(captured.ndim, 1))
        sizes = [tirx.Var(f"{name}_size{dim}", INT) for dim in dims]
        strides = [tirx.Var(f"{name}_stride{dim}", INT) for dim in dims]
        dtype = "uint8" if captured.dtype == BOOL else captured.dtype
        return builder.arg(name, T.StridedTensor(sizes, strides, dtype))

    tensors = tuple(tensor(f"Captured{i}", captured) for i, captured in enumerate(program.tensors))
    numbers = tuple(
        builder.arg(f"number{i}", tirx.Var(f"number{i}", dtype)) for i, dtype in enumerate(program.numbers)
    )
    gradients = {
        i: builder.arg(f"dCaptured{i}", T.Tensor([tirx.Var(f"dCaptured{i}_size", INT)], FLOAT))
        for i in program.learned
    }
    return TracedArguments(tensors, numbers, gradients)


@T.meta_class
class Traced:
    """Program of a tile of 64 rows: new scores, their slopes, and gradients of captured tensors.

    start() says which batch entry and head the scores belong to, locate() which queries and keys.
    """

    def __init__(
        self,
        program: Program,
        arguments: TracedArguments,
        softmax_scale: Any,
        rows_are_keys: bool = False,
        name: str = "traced",
    ):
        self.program, self.arguments, self.softmax_scale = program, arguments, softmax_scale
        self.rows_are_keys = rows_are_keys
        self.batch = T.alloc_var(INT, init=0)
        self.head = T.alloc_var(INT, init=0)
        # Gradients whose index is the same for all scores of a tile are summed per thread
        self.sums = [
            T.alloc_var(FLOAT, init=0.0) if self.is_uniform(gradient.index) else None
            for gradient in program.gradients
        ]
        self.first_query = self.first_key = 0

    def is_uniform(self, index: tuple[int, ...]) -> bool:
        return not any(self.program.depends_on(i, ("score", "query", "key")) for i in index)

    @T.inline
    def start(self, batch, head):
        """Set the batch entry and the query head of the scores."""
        self.batch[0] = batch
        self.head[0] = head

    def locate(self, first_query: Any, first_key: Any) -> None:
        """Set the query and the key of the first element of the tile."""
        self.first_query, self.first_key = first_query, first_key

    def call(self, function: str, dtype: str, score: Any, i: Any, j: Any) -> Any:
        """A function of program_code at an element of the tile, whose scaled score is given.

        Only the first 8 columns, of which a thread has 2 per row, convert an int to a float, which takes four times as long as the
        addition that makes the other columns from them.
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
            score,
            self.batch[0],
            self.head[0],
            *positions,
            *self.arguments.flat,
        )

    def score(self, raw_score: Any, i: Any, j: Any) -> Any:
        """New score; -inf where the query does not see the key."""
        return self.call("new_score", FLOAT, raw_score * self.softmax_scale, i, j)

    def sloped(self, P: Any, raw_score: Any, i: Any, j: Any) -> Any:
        """Probability times the slope of its score."""
        slope = self.call("slope", FLOAT, raw_score * self.softmax_scale, i, j)
        return T.call_extern(FLOAT, "tl_attention_sloped", P, slope)

    @T.inline
    def apply(self, acc_s):
        """Replace raw scores by new ones."""
        rows, cols = acc_s.shape
        for i, j in T.Parallel(rows, cols):
            acc_s[i, j] = self.score(acc_s[i, j], i, j)

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
        return T.call_extern(FLOAT, "tl_attention_before", self.first_key + j < seqlen_k, weight)

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
        return T.call_extern(FLOAT, "tl_attention_gradient", weight, acc_dp[i, j], delta[i], factor)

    @T.inline
    def add_gradients(self, scores, P, acc_dp, lse_log2, delta, seqlen_k):
        """Add the gradients of captured tensors of a tile [queries, keys]. scores: of keep_scores(); P: probabilities."""
        rows, cols = acc_dp.shape
        for i, j in T.Parallel(rows, cols):  # one loop, so that nvcc computes common parts once
            for number in self.summed:
                self.sums[number][0] += self.passed_on(
                    number, scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k
                )
            for number in self.scattered:
                self.add(
                    number, i, j, self.passed_on(number, scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k)
                )

    @T.inline
    def add(self, number, i, j, x):
        """Add x to the element that gradient number `number` belongs to."""
        sums = self.arguments.gradients[self.program.gradients[number].tensor]
        T.evaluate(
            T.call_extern(
                "handle",
                "tl_attention_add",
                sums.access_ptr("rw"),
                self.call(f"target{number}", INT, 0.0, i, j),
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
        return tuple(i for i, total in enumerate(self.sums) if total is None)

    @T.inline
    def finish_gradients(self):
        """Add the sums of the threads to global memory, one addition per warp."""
        self.locate(0, 0)  # their index is that of every score
        for number in self.summed:
            self.sums[number][0] = T.warp_reduce_sum(self.sums[number][0])
            if T.get_thread_binding() % 32 == 0:
                self.add(number, 0, 0, self.sums[number][0])
