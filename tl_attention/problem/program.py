"""Programs: score_mod and mask_mod of a call as scalar operations that a kernel evaluates per score.

tracing/trace.py makes them from Python functions, kernels/scores/traced.py turns them into TileLang, reference/flex.py evaluates them in
PyTorch. A program is part of the key of a kernel: tensors and most numbers that the functions capture are arguments of a launch, so that
kernels do not depend on their values.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

FLOAT, INT, LONG, BOOL = "float32", "int32", "int64", "bool"
LISTED_ROWS = 128  # queries, and keys, per block of the lists of kernels, whose tiles divide it
GROUP_ROWS = 64  # queries per warpgroup of a forward
# How the keys of a listed block are seen: by mask_mod, all, none, or all up to the last key, which lies inside the block.
# Bits of a list's entry for this, and for the block's number
MASK, SHOW_ALL, HIDE_ALL, SHOW_TO_LAST = 0, 1, 2, 3
HOW_BITS, BLOCK_BITS = 2, 19
PAST_ALL = 3  # entries after those of all tiles; they hide their block
# Leaves, the arguments of the functions: the scaled score, and which batch entry, query head, query and key it belongs to
LEAVES = {"score": FLOAT, "batch": INT, "head": INT, "query": INT, "key": INT}
# Dtypes of captured tensors; a program computes in fp32, whatever the float dtype
CAPTURED_DTYPES = {
    "float32": FLOAT,
    "bfloat16": FLOAT,
    "float16": FLOAT,
    "int64": LONG,
    "int32": INT,
    "int16": INT,
    "int8": INT,
    "uint8": INT,
    "bool": BOOL,
}
BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
MAX_DIAGONALS = 2  # values per diagonal that a kernel keeps in shared memory
# Most operations that each score computes faster than it reads their result from shared memory. ALiBi has 3: forward of d128 1.83 ms,
# read 1.99; a relative bias, which is a load, 2.49 and 1.90 (batch 2, 16 heads, 8192, H200, 2026-11-23)
MAX_REPEATED = 4
MAX_STAGED = 4  # most bytes per score for tiles of captured tensors in shared memory

# Operations without a finite result for some finite operands -> the operand that decides
DECIDING_OPERAND = {
    "log": 0,
    "log2": 0,
    "log1p": 0,
    "sqrt": 0,
    "rsqrt": 0,
    "pow": 0,
    "exp": 0,
    "expm1": 0,
} | dict.fromkeys(("div", "floor_divide", "remainder", "fmod"), 1)
# See Program._positions: leaves, and signs of the operands of sums
POSITIONS = {"query": (1, 0), "key": (0, 1)}
LINES: dict[str, tuple[int, ...]] = {"add": (1, 1), "sub": (1, -1), "neg": (-1,), "cast": (1,)}
FUNCTION = (0, 0, 0)


@dataclass(frozen=True)
class Value:
    """Result of one operation.

    Args:
        op: a leaf; "constant", whose data is its value; "number" and "load", whose data is the index of a number or tensor of the
            call; or an operation of trace.OPS.
        dtype: FLOAT, INT, LONG or BOOL. Operands have been cast: both operands of a comparison have one dtype.
        args: operands, as indices of earlier values; of a load the index per dimension.
    """

    op: str
    dtype: str
    args: tuple[int, ...] = ()
    data: float | int | bool | None = None


@dataclass(frozen=True)
class Captured:
    """Tensor that a function captures. Its sizes and strides are launch arguments."""

    dtype: str
    ndim: int


def diagonal_slots(cols: int) -> int:
    """Diagonals of 16 rows and so many columns, rounded up to a multiple of the lanes of a warp."""
    return -(-(cols + 15) // 32) * 32


def stored_dtype(captured: Captured) -> str:
    """Dtype in which a backward stores a dense gradient, per batch entry and head; fp16 has too small a range."""
    return "bfloat16" if captured.dtype == "bfloat16" else FLOAT


@dataclass(frozen=True)
class TensorGradient:
    """Gradient of one load of a captured tensor: factor * gradient of the new score."""

    tensor: int  # index in Program.tensors
    index: tuple[int, ...]  # values, one per dimension
    factor: int  # value


@dataclass(frozen=True)
class Program:
    """Functions of a call as a list of values, each computed from earlier ones.

    Args:
        score: value of the new score; None: the score is not changed.
        mask: value that is true where the query sees the key; None: it sees all.
        slope: derivative of the new score with respect to the score; None: 1.
        tensors, numbers: dtypes of the launch arguments that loads and numbers refer to.
        gradients: of captured tensors.
        listed: a block mask lists the blocks to compute, and says how their keys are seen.
        bits: the mask of partial blocks is given as a bit per element; see launch/mask_bits.py. Only with `listed`.
        band: the mask shows a range of distances, as a window does. Set for a backward with bits and no score, whose config depends on it.
        exact: gradients of captured tensors are exact sums, which do not depend on the order of the additions.
        by_score: values that are the same along a diagonal are computed for each score, which takes no shared memory.
    """

    values: tuple[Value, ...]
    score: int | None = None
    mask: int | None = None
    slope: int | None = None
    tensors: tuple[Captured, ...] = ()
    numbers: tuple[str, ...] = ()
    gradients: tuple[TensorGradient, ...] = ()
    listed: bool = False
    exact: bool = False
    bits: bool = False
    band: bool = False
    by_score: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, x.name) for x in fields(self)))

    def __reduce__(self) -> tuple[Any, ...]:  # without the cached hash, which differs between processes
        return Program, tuple(getattr(self, x.name) for x in fields(self))

    @functools.cached_property
    def as_listed(self) -> Program:
        """The program under a block mask."""
        return replace(self, listed=True)

    @functools.cached_property
    def with_bits(self) -> tuple[Program, tuple[int, ...], tuple[int, ...]]:
        """(program under a block mask with bits for its mask, indices of the tensors and of the numbers that it keeps)."""
        kept = replace(self, mask=None, listed=True, bits=True).pruned()
        tensors, numbers = kept.used("load"), kept.used("number")
        places = {
            op: {old: new for new, old in enumerate(used)}
            for op, used in (("load", tensors), ("number", numbers))
        }
        program = replace(
            kept,
            values=tuple(replace(x, data=places[x.op][x.data]) if x.op in places else x for x in kept.values),
            tensors=tuple(self.tensors[i] for i in tensors),
            numbers=tuple(self.numbers[i] for i in numbers),
            gradients=tuple(replace(x, tensor=places["load"][x.tensor]) for x in kept.gradients),
        )
        return program, tensors, numbers

    @functools.cached_property
    def mask_alone(self) -> Program:
        """The program without its score."""
        return replace(self, score=None, slope=None, gradients=()).pruned()

    def used(self, op: str) -> tuple[int, ...]:
        """Tensors that the values need, for "load", or numbers, for "number"."""
        return tuple(sorted({x.data for x in self.values if x.op == op}))

    @functools.cached_property
    def as_exact(self) -> Program:
        """The program of deterministic gradients: with exact sums, where sums are needed."""
        found = replace(self, band=False) if self.band else self
        return found if len(self.stored) == len(self.gradients) else replace(found, exact=True)

    @functools.cached_property
    def forward(self) -> Program:
        """The program without its derivatives."""
        return replace(self, slope=None, gradients=(), exact=False, band=False).pruned()

    @property
    def hides(self) -> bool:
        """True if keys of listed blocks may be hidden."""
        return self.mask is not None or self.listed

    @property
    def learned(self) -> tuple[int, ...]:
        """Tensors that get a gradient, in order."""
        return tuple(sorted({gradient.tensor for gradient in self.gradients}))

    def staged_bytes(self, queries: int, keys: int, rows_are_keys: bool = False) -> list[int]:
        """Shared memory of a warp for a tile of each of dense_loads; see kernels/cuda/dense.cuh."""
        dtypes = [self.tensors[self.values[i].data].dtype for i in self.dense_loads]
        padding = [0 if rows_are_keys and BYTES[dtype] == 2 else 16 for dtype in dtypes]
        return [queries * (keys * BYTES[dtype] + more) for dtype, more in zip(dtypes, padding, strict=True)]

    def diagonal_bytes(self, cols: int) -> list[int]:
        """Shared memory of a warp for the values of the diagonals of 16 rows; see kernels/scores/diagonals.py."""
        return [4 * (2 * diagonal_slots(cols) + 16) for _ in self.diagonals]

    def stored_bytes(self, queries: int, keys: int) -> list[int]:
        """Shared memory of a warp for a tile of each gradient of `stored`."""
        dtypes = [stored_dtype(self.tensors[self.gradients[i].tensor]) for i in self.stored]
        return [queries * (keys * BYTES[dtype] + 16) for dtype in dtypes]

    @functools.cached_property
    def is_staged(self) -> bool:
        """True if tiles of all dense loads fit into shared memory beside those of narrow heads."""
        total = sum(BYTES[self.tensors[self.values[i].data].dtype] for i in self.dense_loads)
        return 0 < total <= MAX_STAGED

    def is_dense(self, index: tuple[int, ...]) -> bool:
        """True for an index [.., q_idx, kv_idx] of a captured tensor, whose neighbours in memory are neighbours in a tile."""
        return [self.values[i].op for i in index[-2:]] == ["query", "key"]

    @functools.cached_property
    def dense_loads(self) -> tuple[int, ...]:
        """Values that are loads by a dense index."""
        return tuple(i for i, x in enumerate(self.values) if x.op == "load" and self.is_dense(x.args))

    @functools.cached_property
    def dense(self) -> frozenset[int]:
        """Tensors with a load by a dense index."""
        return frozenset(self.values[i].data for i in self.dense_loads)

    @functools.cached_property
    def _positions(self) -> tuple[tuple[int, int] | None, ...]:
        """(a, b) per value that is a * q_idx + b * kv_idx and what batch entry and head determine; for another function of q_idx - kv_idx
        FUNCTION; None for others. Sums of integers alone are such lines.
        """
        found: list[tuple[int, int] | None] = []
        for value in self.values:
            args = [found[i] for i in value.args]
            signs = LINES.get(value.op) if value.dtype in (INT, LONG) else None
            if value.op in POSITIONS:
                found.append(POSITIONS[value.op])
            elif None in args or value.op == "score":
                found.append(None)
            elif signs and FUNCTION not in args:
                found.append(tuple(sum(s * x[i] for s, x in zip(signs, args, strict=True)) for i in (0, 1)))
            elif any(x != FUNCTION and sum(x) for x in args):
                found.append(None)
            else:
                found.append(FUNCTION if any(x != (0, 0) for x in args) else (0, 0))
        return tuple(found)

    def is_diagonal(self, i: int) -> bool:
        """True for a value that q_idx - kv_idx, the batch entry and the head determine: one per diagonal of a tile."""
        position = self._positions[i]
        return position == FUNCTION or (position is not None and not sum(position))

    def _varies(self, i: int) -> bool:
        """True for a value that is not the same for all scores of a head."""
        return self._positions[i] != (0, 0)

    def _is_dear(self, i: int) -> bool:
        """True for a value that takes loads, or more than MAX_REPEATED operations, per score."""
        operations = [self.values[j].op for j in self.needed([i]) if self._varies(j) and self.values[j].args]
        return "load" in operations or len(operations) > MAX_REPEATED

    @functools.cached_property
    def diagonals(self) -> tuple[int, ...]:
        """Floats that are the same along a diagonal of a tile, with which a value that is not is computed, unless they are cheap."""
        if not self.values or self.by_score:
            return ()
        outputs = [self.score, self.slope, *(x.factor for x in self.gradients)]
        others = {i for i, x in enumerate(self.values) if not self.is_diagonal(i)}
        used = {arg for i in others for arg in self.values[i].args} | {x for x in outputs if x is not None}

        def is_one(i: int, value: Value) -> bool:
            is_float = value.dtype == FLOAT and value.op != "cast"
            return is_float and i in used and self._varies(i) and self.is_diagonal(i) and self._is_dear(i)

        return tuple(i for i, x in enumerate(self.values) if is_one(i, x))[:MAX_DIAGONALS]

    @functools.cached_property
    def adds_diagonal(self) -> bool:
        """True if the new score is the score plus the value of a diagonal."""
        if self.score is None or len(self.diagonals) != 1:
            return False
        value = self.values[self.score]
        terms = {i if i in self.diagonals else self.values[i].op for i in value.args}
        return value.op == "add" and terms == {"score", *self.diagonals}

    @functools.cached_property
    def diagonal_gradients(self) -> tuple[int, ...]:
        """Gradients that all scores of a diagonal add to one element."""
        return tuple(
            n
            for n, x in enumerate(self.gradients)
            if all(map(self.is_diagonal, x.index)) and any(map(self._varies, x.index))
        )

    def shares_targets(self, number: int) -> bool:
        """True if diagonals may add to the same element: no index of gradient number `number` is a line in q_idx - kv_idx."""
        lines = ({*map(abs, self._positions[i])} == {1} for i in self.gradients[number].index)
        return not any(lines)

    @functools.cached_property
    def stored(self) -> tuple[int, ...]:
        """Gradients with an element per score of a head: the only one of its tensor, indexed by b, h, constants, then q_idx, kv_idx."""

        def is_stored(gradient: TensorGradient) -> bool:
            outer = [self.values[i].op for i in gradient.index[:-2]]
            is_only = sum(other.tensor == gradient.tensor for other in self.gradients) == 1
            places = {"batch", "head", "constant", "number"}.issuperset(outer)
            return is_only and places and max(map(outer.count, ("batch", "head"))) <= 1

        return tuple(i for i, x in enumerate(self.gradients) if self.is_dense(x.index) and is_stored(x))

    @functools.cached_property
    def is_bias(self) -> bool:
        """True if the program adds a dense captured tensor to the score, and does nothing else."""
        if self.score is None or self.hides or len(self.dense_loads) != 1:
            return False
        total = self.values[self.score]
        return total.op == "add" and {self.values[i].op for i in total.args} == {"score", "load"}

    def outer_dims(self, number: int) -> tuple[list[int], list[int]]:
        """Dimensions of gradient number of `stored`, 0 and 1 of [batch, heads, ..], that its tensor has, in its order; and those summed."""
        dims = {"batch": 0, "head": 1}
        outer = [self.values[i].op for i in self.gradients[number].index[:-2]]
        kept = [dims[op] for op in outer if op in dims]
        return kept, [dim for dim in (0, 1) if dim not in kept]

    @functools.cached_property
    def learns_dS(self) -> bool:
        """True if the only gradient is that of a bias added to the score: it is dS, which is stored, or sums of it."""
        if self.slope is not None or len(self.gradients) != 1:
            return False
        (gradient,) = self.gradients
        if self.values[gradient.factor] != Value("constant", FLOAT, data=1.0):
            return False
        return self.stored == (0,) or self.diagonal_gradients == (0,)

    @functools.cached_property
    def learns_bf16_dS(self) -> bool:
        """learns_dS for a dS in bf16: a stored gradient must be bf16; sums may be of any dtype."""
        stored = [stored_dtype(self.tensors[self.gradients[number].tensor]) for number in self.stored]
        return self.learns_dS and {*stored} <= {"bfloat16"}

    @property
    def learns_from_scores(self) -> bool:
        """True if gradients of captured tensors need the scores, not only the probabilities."""
        return bool(self.gradients) and (
            self.slope is not None or any(self.depends_on(x.factor, ("score",)) for x in self.gradients)
        )

    @functools.cached_property
    def grows_with_positions(self) -> bool:
        """True if the new score is computed from q_idx or kv_idx as a number, not only as an index or in a comparison."""
        return self._is_computed_by(POSITIONS)

    @functools.cached_property
    def chooses_scores(self) -> bool:
        """True if the new score is a choice of where(), as it is where a score_mod hides keys by -inf or a large negative number."""
        return self._is_computed_by(("where",))

    def _is_computed_by(self, ops: Collection[str]) -> bool:
        """True if the new score comes from a number that one of these operations makes, not only from an index or a condition."""
        found: list[bool] = []
        for x in self.values:
            is_number = x.op != "load" and x.dtype != BOOL
            found.append(is_number and (x.op in ops or any(found[i] for i in x.args)))
        return self.score is not None and found[self.score]

    @property
    def features(self) -> frozenset[str]:
        """Properties that a config of the backward depends on: slope, gradients, scores."""
        has = {
            "slope": self.slope is not None,
            "gradients": bool(self.gradients),
            "scores": self.learns_from_scores,
        }
        return frozenset(name for name, it_has in has.items() if it_has)

    def pruned(self) -> Program:
        """The program without values that nothing needs. Launch arguments stay, as calls refer to them by position."""
        outputs = (self.score, self.mask, self.slope)
        roots = [value for value in outputs if value is not None]
        for gradient in self.gradients:
            roots += [*gradient.index, gradient.factor]
        kept = sorted(self.needed(roots))
        new = {old: position for position, old in enumerate(kept)}
        values = tuple(
            replace(self.values[old], args=tuple(new[arg] for arg in self.values[old].args)) for old in kept
        )
        score, mask, slope = (None if output is None else new[output] for output in outputs)
        gradients = tuple(
            TensorGradient(x.tensor, tuple(new[i] for i in x.index), new[x.factor]) for x in self.gradients
        )
        return replace(self, values=values, score=score, mask=mask, slope=slope, gradients=gradients)

    def needed(self, roots: Iterable[int]) -> set[int]:
        """Values that these values are computed from, themselves included."""
        found, open_values = set(), [*roots]
        while open_values:
            value = open_values.pop()
            if value not in found:
                found.add(value)
                open_values += self.values[value].args
        return found

    def depends_on(self, value: int, leaves: Iterable[str]) -> bool:
        """True if a value is computed from one of these leaves."""
        return not {*leaves}.isdisjoint(self.values[i].op for i in self.needed([value]))

    @functools.cached_property
    def may_be_undefined(self) -> bool:
        """True if the score may be NaN or inf at a query past the last one, though it is finite at all others.

        Not seen are exponentials, sums and products that overflow there alone.
        """
        open_values = [] if self.score is None else [self.score]
        while open_values:
            value = self.values[open_values.pop()]
            if value.dtype != FLOAT or value.op == "load":
                continue
            deciding = None if self._is_whole_power(value) else DECIDING_OPERAND.get(value.op)
            if deciding is not None and self.depends_on(value.args[deciding], ("score", "query")):
                return True
            open_values += value.args
        return False

    def _is_whole_power(self, value: Value) -> bool:
        """True for x ** n with a constant n of 0, 1, 2, .."""
        if value.op != "pow":
            return False
        exponent = self.values[value.args[1]]
        return exponent.op == "constant" and exponent.data in range(2**24)

    def __str__(self) -> str:
        """The words score_mod, mask_mod, blocks, bits, band, as far as they apply."""
        words = [
            word for word, value in (("score_mod", self.score), ("mask_mod", self.mask)) if value is not None
        ]
        properties = ("blocks", self.listed), ("bits", self.bits), ("band", self.band)
        return " ".join([*words, *(word for word, it_has in properties if it_has)])

    def text(self) -> str:
        """One line per value and output, for people."""

        def operands(value: Value) -> str:
            return ", ".join(
                [*map(str, () if value.data is None else (value.data,)), *(f"%{i}" for i in value.args)]
            )

        lines = [f"%{i}: {x.dtype} = {x.op}({operands(x)})" for i, x in enumerate(self.values)]
        outputs = {"score": self.score, "mask": self.mask, "slope": self.slope}
        lines += [f"{name} = %{value}" for name, value in outputs.items() if value is not None]
        for x in self.gradients:
            index = ", ".join(f"%{i}" for i in x.index)
            lines.append(f"gradient of tensor {x.tensor}[{index}] += %{x.factor}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Call:
    """Program of one call with the values of its launch arguments.

    Args:
        tensors: captured tensors, in the order of program.tensors.
        numbers: captured numbers, in the order of program.numbers.
        blocks: BlockLists of a listed program.
    """

    program: Program
    tensors: tuple[Any, ...] = ()
    numbers: tuple[float | int, ...] = ()
    blocks: Any = None
