"""Kernel arguments of a problem's Program: captured tensors, numbers, gradients, and the lists of a block mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tilelang.language.eager.builder import Builder

from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.program import BOOL, FLOAT, INT, LONG, Captured, stored_dtype

tirx = tvm.tirx


@dataclass(frozen=True)
class TracedArguments:
    """Arguments of a kernel with a program, after all others."""

    tensors: tuple[Any, ...]  # captured tensors
    numbers: tuple[Any, ...]  # captured numbers
    gradients: dict[int, Any]  # of program.learned, contiguous, by tensor: see launch/traced.py
    # With a block mask: see block_lists.py
    spans: Any = None  # int32 [batch, heads, tiles, 3], with a held row max 4
    entries: Any = None  # int32 [entries]
    places: Any = None  # int32 [entries] or [entries, groups], with Program.bits
    bits: Any = None  # int32 [words], with Program.bits: see launch/mask_bits.py

    @property
    def flat(self) -> tuple[Any, ...]:
        """Arguments of the functions of program_code: address, and size and stride per dimension, of each tensor; numbers."""
        found = []
        for tensor in self.tensors:
            found.append(tensor.data)
            for size, stride in zip(tensor.shape, tensor.strides, strict=True):
                found += [size, stride]
        return *found, *self.numbers


def traced_arguments(problem: AttnProblem, held: bool = False) -> TracedArguments | None:
    """Declare the arguments of a problem's program, at the start of the body of a prim_func; None without a program.

    Order: captured tensors, numbers, gradients, spans, entries, places and bits. A 0-d tensor has one dimension of size 1; bool tensors
    are uint8.

    Args:
        held: lists by queries are those of a held row max.
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

    stored = {program.gradients[number].tensor for number in program.stored}

    def gradient(i: int) -> Any:
        name = f"dCaptured{i}_size"
        if i in stored:
            sizes = [tirx.Var(f"{name}{dim}", INT) for dim in range(4)]
            return T.Tensor(sizes, stored_dtype(program.tensors[i]))
        return T.Tensor([tirx.Var(name, INT)], LONG if program.exact else FLOAT)

    tensors = tuple(tensor(f"Captured{i}", captured) for i, captured in enumerate(program.tensors))
    numbers = tuple(
        builder.arg(f"number{i}", tirx.Var(f"number{i}", dtype)) for i, dtype in enumerate(program.numbers)
    )
    gradients = {i: builder.arg(f"dCaptured{i}", gradient(i)) for i in program.learned}
    if not program.listed:
        return TracedArguments(tensors, numbers, gradients)
    sizes, strides = (
        [tirx.Var(f"spans_{word}{dim}", INT) for dim in range(3)] for word in ("size", "stride")
    )
    spans = builder.arg("Spans", T.StridedTensor([*sizes, 4 if held else 3], [*strides, 1], INT))
    entries = builder.arg("Entries", T.Tensor([tirx.Var("num_entries", INT)], INT))
    if not program.bits:
        return TracedArguments(tensors, numbers, gradients, spans, entries)
    places = builder.arg("Places", T.Tensor([entries.shape[0]], INT))
    bits = builder.arg("Bits", T.Tensor([tirx.Var("num_words", INT)], INT))
    return TracedArguments(tensors, numbers, gradients, spans, entries, places, bits)
