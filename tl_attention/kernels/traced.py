"""score_mod and mask_mod inside the kernels: a problem's Program as expressions of TileLang, and gradients of captured tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tilelang.language.eager.builder import Builder

from tl_attention.kernels.softmax import LOG2E
from tl_attention.problem import AttnProblem
from tl_attention.program import BOOL, FLOAT, INT, Captured, Program

tirx = tvm.tirx
# Loads and additions as functions, because TileLang 0.1.15 compares each index with the sizes, in 64 bits, and puts a load into a branch
PRELUDE = """
template <typename Stored, typename T>
static __device__ __forceinline__ T tl_attention_captured(const void* tensor, int offset) {
  return T(__ldg((const Stored*)tensor + offset));
}
// Both values are computed: a branch would make ptxas serialize all wgmma (C7511)
template <typename T>
static __device__ __forceinline__ T tl_attention_select(bool condition, T x, T y) {
  return condition ? x : y;
}
static __device__ __forceinline__ int tl_attention_index(int i, int size) {
  return min(max(i < 0 ? i + size : i, 0), size - 1);
}
static __device__ __forceinline__ void tl_attention_add(void* sums, int offset, float x) {
  // A predicate, not a branch, for which ptxas serializes all wgmma (C7514)
  asm volatile("{ .reg .pred p; setp.ne.f32 p, %1, 0f00000000; @p red.global.add.f32 [%0], %1; }" ::"l"((float*)sums + offset), "f"(x)
               : "memory");
}
"""
# Dtype of a captured tensor -> its type in CUDA
CUDA_TYPES = {
    "float32": "float",
    "bfloat16": "__nv_bfloat16",
    "float16": "__half",
    "int64": "long long",
    "int32": "int",
    "int16": "short",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
}
MAX_CHAIN = 16  # integer exponent up to which a power is a chain of products


@dataclass(frozen=True)
class TracedArguments:
    """Arguments of a kernel with a program, after all others."""

    tensors: tuple[Any, ...]  # captured tensors
    numbers: tuple[Any, ...]  # captured numbers
    gradients: dict[int, Any]  # fp32 sums of the gradients of program.learned, by tensor


def traced_arguments(problem: AttnProblem) -> TracedArguments | None:
    """Declare the arguments of a problem's program, at the begin of the body of a prim_func; None without a program.

    Order: captured tensors, numbers, gradients. A 0-d tensor has one dimension of size 1; bool tensors are uint8.
    """
    program = problem.program
    if program is None:
        return None
    builder = Builder.current()

    def tensor(name: str, captured: Captured, dtype: str) -> Any:
        dims = range(max(captured.ndim, 1))
        sizes = [tirx.Var(f"{name}_size{dim}", INT) for dim in dims]
        strides = [tirx.Var(f"{name}_stride{dim}", INT) for dim in dims]
        return builder.arg(name, T.StridedTensor(sizes, strides, dtype))

    tensors = tuple(
        tensor(f"Captured{i}", captured, "uint8" if captured.dtype == BOOL else captured.dtype)
        for i, captured in enumerate(program.tensors)
    )
    numbers = tuple(
        builder.arg(f"number{i}", tirx.Var(f"number{i}", dtype)) for i, dtype in enumerate(program.numbers)
    )
    gradients = {i: tensor(f"dCaptured{i}", program.tensors[i], FLOAT) for i in program.learned}
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

    def at(self, score: Any, i: Any, j: Any, is_scaled: bool = False) -> _Element:
        """The program at an element of the tile, whose score is given, raw or scaled."""
        query, key = (j, i) if self.rows_are_keys else (i, j)
        leaves = {
            "score": score if is_scaled else score * self.softmax_scale,
            "batch": self.batch[0],
            "head": self.head[0],
            "query": self.first_query + query,
            "key": self.first_key + key,
        }
        column, first = ("query", self.first_query) if self.rows_are_keys else ("key", self.first_key)
        return _Element(self.program, self.arguments, leaves, column, (first, j))

    def score(self, raw_score: Any, i: Any, j: Any) -> Any:
        """New score; -inf where the query does not see the key."""
        return self.at(raw_score, i, j).new_score()

    def sloped(self, P: Any, raw_score: Any, i: Any, j: Any) -> Any:
        """Probability times the slope of its score; 0 where the probability is, whatever the slope of a hidden score."""
        slope = self.at(raw_score, i, j)[self.program.slope]
        return _select(P > 0.0, P * slope, 0.0)

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
        weight = T.exp2(self.at(scores[i, j], i, j, is_scaled=True).new_score() * LOG2E - lse_log2[i])
        return _select(self.first_key + j < seqlen_k, weight, 0.0)

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
        factor = self.at(score, i, j, is_scaled=True)[self.program.gradients[number].factor]
        return _select(weight > 0.0, weight * (acc_dp[i, j] - delta[i]) * factor, 0.0)

    def target(self, number: int, i: Any, j: Any) -> Any:
        """Offset of the element of the sums that gradient number `number` is added to."""
        gradient = self.program.gradients[number]
        sums = self.arguments.gradients[gradient.tensor]
        return self.at(0.0, i, j).offset(sums, gradient.index)

    @T.inline
    def add_gradients(self, scores, P, acc_dp, lse_log2, delta, seqlen_k):
        """Add the gradients of captured tensors of a tile [queries, keys]. scores: of keep_scores(); P: probabilities."""
        rows, cols = acc_dp.shape
        for number in self.summed:
            for i, j in T.Parallel(rows, cols):
                self.sums[number][0] += self.passed_on(
                    number, scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k
                )
        for number in self.scattered:
            for i, j in T.Parallel(rows, cols):
                self.add(
                    number, i, j, self.passed_on(number, scores, P, acc_dp, i, j, lse_log2, delta, seqlen_k)
                )

    @T.inline
    def add(self, number, i, j, x):
        """Add x to the element that gradient number `number` belongs to."""
        sums = self.arguments.gradients[self.program.gradients[number].tensor]
        T.evaluate(
            T.call_extern("handle", "tl_attention_add", sums.access_ptr("rw"), self.target(number, i, j), x)
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
        for number in self.summed:
            self.sums[number][0] = T.warp_reduce_sum(self.sums[number][0])
            if T.get_thread_binding() % 32 == 0:
                self.add(number, 0, 0, self.sums[number][0])


class _Element:
    """Expressions of a program's values at one element of a tile."""

    def __init__(
        self,
        program: Program,
        arguments: TracedArguments,
        leaves: dict[str, Any],
        column: str,
        column_parts: tuple[Any, Any],
    ):
        self.program, self.arguments, self.leaves = program, arguments, leaves
        self.column, self.column_parts = (
            column,
            column_parts,
        )  # leaf that runs along columns: its first value, the column
        self.found: dict[int, Any] = {}

    def new_score(self) -> Any:
        score = self.leaves["score"] if self.program.score is None else self[self.program.score]
        if self.program.mask is None:
            return score
        return _select(self[self.program.mask], score, -T.infinity(FLOAT))

    def __getitem__(self, i: int) -> Any:
        if i not in self.found:
            self.found[i] = self._value(i)
        return self.found[i]

    def _value(self, i: int) -> Any:
        value = self.program.values[i]
        if value.op in self.leaves:
            return self.leaves[value.op]
        if value.op == "constant":
            if value.dtype == FLOAT and math.isinf(value.data):
                return T.infinity(FLOAT) if value.data > 0 else -T.infinity(FLOAT)
            return tirx.const(value.data, value.dtype)
        if value.op == "number":
            return self.arguments.numbers[value.data]
        if value.op == "load":
            buffer, dtype = self.arguments.tensors[value.data], self.program.tensors[value.data].dtype
            stored = CUDA_TYPES["uint8" if dtype == BOOL else dtype]
            result = INT if value.dtype == BOOL else value.dtype
            load = f"tl_attention_captured<{stored}, {CUDA_TYPES[result]}>"
            loaded = T.call_extern(
                result,
                load,
                buffer.data,
                self.offset(buffer, value.args),
            )
            return tirx.NE(loaded, tirx.const(0, INT)) if value.dtype == BOOL else loaded
        if value.op == "cast":
            return self._cast(value.args[0], value.dtype)
        if value.op == "div" and self._is_uniform(value.args[1]):
            # A product by a reciprocal that does not change from score to score
            return self[value.args[0]] * (tirx.const(1.0, FLOAT) / self[value.args[1]])
        if value.op == "pow" and (power := self._constant_power(*value.args)) is not None:
            return power
        return EXPRESSIONS[value.op](value.dtype, *(self[arg] for arg in value.args))

    def _is_uniform(self, i: int) -> bool:
        return self.program.values[i].op in ("constant", "number")

    def offset(self, buffer: Any, index: tuple[int, ...]) -> Any:
        """Offset of an element, within the sizes of the buffer. Negative indices count from the end.

        A direct index by q_idx or kv_idx is compared with the size by the host; rows of a tile past the last one read the last.
        """
        offset = tirx.const(0, INT)
        for i, size, stride in zip(index, buffer.shape, buffer.strides, strict=False):
            expression, op = T.cast(self[i], INT), self.program.values[i].op
            if op not in ("batch", "head"):
                if self._never_negative(i):
                    expression = T.min(expression, size - 1)
                else:
                    expression = T.call_extern(INT, "tl_attention_index", expression, size)
            offset = offset + expression * stride
        return offset

    def _never_negative(self, i: int) -> bool:
        value = self.program.values[i]
        if value.op in ("batch", "head", "query", "key"):
            return True
        if value.op == "constant":
            return value.data >= 0
        if value.op in ("add", "mul", "minimum", "and", "floor_divide"):
            return all(self._never_negative(arg) for arg in value.args)
        if value.op == "maximum":
            return any(self._never_negative(arg) for arg in value.args)
        if value.op == "remainder":
            return self._never_negative(value.args[1])
        return value.op == "cast" and self._never_negative(value.args[0])

    def _cast(self, i: int, dtype: str) -> Any:
        if dtype == FLOAT and (converted := self._position_as_float(i)) is not None:
            return converted
        if self.program.values[i].dtype == BOOL:
            return _select(self[i], tirx.const(1, dtype), tirx.const(0, dtype))
        return T.cast(self[i], dtype)

    def _position_as_float(self, i: int) -> Any:
        """A sum of positions and numbers as a float, exact below 2**24; None for other values.

        Only the first 8 columns, of which a thread has 2 per row, convert an int to a float, which takes four times as long as the
        addition that makes the other columns from them.
        """
        value = self.program.values[i]
        if value.dtype != INT:
            return None
        if value.op == self.column:
            first, column = self.column_parts
            return T.cast(first + column % 8, FLOAT) + T.cast(column // 8 * 8, FLOAT)
        if value.op in ("query", "key", "batch", "head", "number", "constant"):
            return T.cast(self[i], FLOAT)
        if value.op in ("add", "sub"):
            x, y = (self._position_as_float(arg) for arg in value.args)
            if x is None or y is None:
                return None
            return x + y if value.op == "add" else x - y
        return None

    def _constant_power(self, base: int, exponent: int) -> Any:
        """A power with a small integer or half as exponent; None for others."""
        value = self.program.values[exponent]
        if value.op != "constant":
            return None
        power, x = value.data, self[base]
        if power == 0.5:
            return T.sqrt(x)
        if power == -0.5:
            return T.rsqrt(x)
        if power != int(power) or not 1 <= abs(power) <= MAX_CHAIN:
            return None
        product, factor, left = None, x, int(abs(power))
        while left:
            if left % 2:
                product = factor if product is None else product * factor
            factor, left = factor * factor, left // 2
        return product if power > 0 else tirx.const(1.0, FLOAT) / product


def _select(condition: Any, x: Any, y: Any) -> Any:
    x, y = (tirx.const(value, FLOAT) if isinstance(value, float) else value for value in (x, y))
    return T.call_extern(x.dtype, f"tl_attention_select<{CUDA_TYPES[str(x.dtype)]}>", condition, x, y)


def _floor_divide(dtype: str, x: Any, y: Any) -> Any:
    return T.floor(x / y) if dtype == FLOAT else tirx.floordiv(x, y)


def _remainder(dtype: str, x: Any, y: Any) -> Any:
    return x - T.floor(x / y) * y if dtype == FLOAT else tirx.floormod(x, y)


def _fmod(dtype: str, x: Any, y: Any) -> Any:
    return x - T.trunc(x / y) * y if dtype == FLOAT else tirx.truncmod(x, y)


def _sign(dtype: str, x: Any) -> Any:
    zero, one = tirx.const(0, dtype), tirx.const(1, dtype)
    return _select(x > zero, one, _select(x < zero, zero - one, x))


def _power(dtype: str, x: Any, y: Any) -> Any:
    """powf of fast math takes no negative base: the sign is that of an odd integer exponent."""
    size = T.pow(T.abs(x), y)
    is_odd = T.floor(y * 0.5) * 2.0 != y
    signed = _select(
        T.floor(y) != y, _select(x < 0.0, 0.0 * (1.0 / (x - x)), size), _select(is_odd, -size, size)
    )
    return _select(x < 0.0, signed, size)


def _within_pi(x: Any) -> Any:
    """x minus a multiple of 2 pi, in two parts: the sine of fast math is exact near 0 only."""
    turns = T.nearbyint(x * (0.5 / math.pi))
    return (x - turns * 6.28125) - turns * (2 * math.pi - 6.28125)


def _logical(of_bools: Callable, of_ints: Callable) -> Callable:
    return lambda dtype, x, y: of_bools(x, y) if dtype == BOOL else of_ints(x, y)


# Operations of trace.OPS: (dtype of the result, operands) -> expression
EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "add": lambda dtype, x, y: x + y,
    "sub": lambda dtype, x, y: x - y,
    "mul": lambda dtype, x, y: x * y,
    "div": lambda dtype, x, y: x / y,
    "maximum": lambda dtype, x, y: T.max(x, y),
    "minimum": lambda dtype, x, y: T.min(x, y),
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "fmod": _fmod,
    "pow": _power,
    "abs": lambda dtype, x: T.abs(x),
    "neg": lambda dtype, x: -x,
    "sign": _sign,
    "detach": lambda dtype, x: x,
    "where": lambda dtype, condition, x, y: _select(condition, x, y),
    "eq": lambda dtype, x, y: tirx.EQ(x, y),
    "ne": lambda dtype, x, y: tirx.NE(x, y),
    "lt": lambda dtype, x, y: x < y,
    "le": lambda dtype, x, y: x <= y,
    "gt": lambda dtype, x, y: x > y,
    "ge": lambda dtype, x, y: x >= y,
    "and": _logical(tirx.And, lambda x, y: x & y),
    "or": _logical(tirx.Or, lambda x, y: x | y),
    "xor": _logical(lambda x, y: tirx.NE(T.cast(x, INT), T.cast(y, INT)), lambda x, y: x ^ y),
    "not": lambda dtype, x: tirx.Not(x) if dtype == BOOL else ~x,
    "shift_left": lambda dtype, x, y: x << y,
    "shift_right": lambda dtype, x, y: x >> y,
    "exp": lambda dtype, x: T.exp(x),
    "exp2": lambda dtype, x: T.exp2(x),
    "expm1": lambda dtype, x: T.call_extern(FLOAT, "expm1f", x),
    "log": lambda dtype, x: T.log(x),
    "log2": lambda dtype, x: T.log2(x),
    "log1p": lambda dtype, x: T.call_extern(FLOAT, "log1pf", x),
    "sqrt": lambda dtype, x: T.sqrt(x),
    "rsqrt": lambda dtype, x: T.rsqrt(x),
    "tanh": lambda dtype, x: T.tanh(x),
    "sigmoid": lambda dtype, x: tirx.const(1.0, FLOAT) / (tirx.const(1.0, FLOAT) + T.exp(-x)),
    "sin": lambda dtype, x: T.sin(_within_pi(x)),
    "cos": lambda dtype, x: T.cos(_within_pi(x)),
    "atan": lambda dtype, x: T.call_extern(FLOAT, "atanf", x),
    "erf": lambda dtype, x: T.erf(x),
    "floor": lambda dtype, x: T.floor(x),
    "ceil": lambda dtype, x: T.ceil(x),
    "round": lambda dtype, x: T.nearbyint(x),
    "trunc": lambda dtype, x: T.trunc(x),
}
