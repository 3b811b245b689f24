"""Programs: the functions score_mod and mask_mod of a call, as operations on scalars that a kernel evaluates per score.

trace.py makes them from Python functions, kernels/traced.py turns them into TileLang, reference_flex.py evaluates them in PyTorch. A
program is part of the key of a kernel: tensors and most numbers that the functions capture are arguments of a launch, so that kernels
do not depend on their values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

FLOAT, INT, LONG, BOOL = "float32", "int32", "int64", "bool"
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
    """Tensor that a function captures. Sizes and strides are arguments of a launch."""

    dtype: str
    ndim: int


@dataclass(frozen=True)
class TensorGradient:
    """Gradient that one load of a captured tensor passes on: factor * gradient of the new score."""

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
    """

    values: tuple[Value, ...]
    score: int | None = None
    mask: int | None = None
    slope: int | None = None
    tensors: tuple[Captured, ...] = ()
    numbers: tuple[str, ...] = ()
    gradients: tuple[TensorGradient, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, x.name) for x in fields(self)))

    def __reduce__(self) -> tuple:  # without the hash, which differs from process to process
        return Program, tuple(getattr(self, x.name) for x in fields(self))

    @functools.cached_property
    def forward(self) -> Program:
        """The program without its derivatives."""
        return replace(self, slope=None, gradients=()).pruned()

    @property
    def learned(self) -> tuple[int, ...]:
        """Tensors that get a gradient, in order."""
        return tuple(sorted({gradient.tensor for gradient in self.gradients}))

    @property
    def learns_from_scores(self) -> bool:
        """True where gradients of captured tensors need the scores, beside the probabilities that they became."""
        return bool(self.gradients) and (
            self.slope is not None or any(self.depends_on(x.factor, ("score",)) for x in self.gradients)
        )

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
        return Program(values, score, mask, slope, self.tensors, self.numbers, gradients)

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

    def __str__(self) -> str:
        """score_mod mask_mod, as far as they are there."""
        words = [
            word for word, value in (("score_mod", self.score), ("mask_mod", self.mask)) if value is not None
        ]
        return " ".join(words)

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
    """

    program: Program
    tensors: tuple[Any, ...] = ()
    numbers: tuple[float | int, ...] = ()
