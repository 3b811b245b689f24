"""Launch arguments of a program: captured tensors, numbers, and the gradients of captured tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.problem.options import as_stored
from tl_attention.problem.program import Call, Program, stored_dtype

# Exact sums: 15 integers per element, number i in units of 2 ** (8 i - 87) for addends from 2 ** (8 i - 64) on, and a count of larger ones
SLOTS = 16
FIRST_UNIT, SLOT_EXPONENTS = -87, 8


@functools.lru_cache(maxsize=1024)
def _interned(program: Program) -> Program:
    """The first of equal programs."""
    return program


@functools.lru_cache(maxsize=1024)
def forward_program(program: Program) -> Program:
    """The program of a forward. Equal ones are one object, as comparing others in the keys of plans takes time."""
    return _interned(program.forward)


def traced_arguments(call: Call) -> tuple:
    """Captured tensors and numbers, in the order of kernels/scores/traced.py."""
    dense = call.program.dense
    tensors = [
        _argument(aligned(x) if i in dense else x)
        for i, x in enumerate(as_stored(tensor.detach()) for tensor in call.tensors)
    ]
    return *tensors, *call.numbers


def backward_call(call: Call | None, deterministic: bool) -> Call | None:
    """The call that a backward computes: with exact sums where its gradients must not depend on the order of additions."""
    if call is None or not deterministic or call.program.as_exact is call.program:
        return call
    return replace(call, program=call.program.as_exact)


@functools.lru_cache(maxsize=1024)
def _learned(program: Program) -> tuple[tuple[int, int | None], ...]:
    """Tensors of program.learned, each with the number of its gradient where that is stored, else None."""
    stored = {program.gradients[number].tensor: number for number in program.stored}
    return tuple((i, stored.get(i)) for i in program.learned)


_outer_dims = functools.lru_cache(maxsize=1024)(Program.outer_dims)


class Gradients:
    """Gradients of the captured tensors of program.learned, for one backward.

    Attributes:
        arguments: contiguous tensors that the kernels write. For gradients of program.stored: [batch, heads, seqlen_q, seqlen_k rounded up]
            in stored_dtype, or transposed [batch, heads, seqlen_k, seqlen_q rounded up]. Others are sums that start at 0: fp32 [elements],
            with program.exact int64 [elements * SLOTS].
    """

    def __init__(self, call: Call, batch: int, heads: int, queries: int, keys: int, transposed: bool = False):
        self.call, self.transposed = call, transposed
        rows, self.columns = (keys, queries) if transposed else (queries, keys)
        program = call.program
        self.arguments = []
        for i, number in _learned(program):
            x, on = call.tensors[i], {"device": call.tensors[i].device}
            if number is not None:  # blocks that no list names are not written
                make = torch.zeros if program.listed else torch.empty
                dtype = getattr(torch, stored_dtype(program.tensors[i]))
                shape = batch, heads, rows, -(-self.columns // 8) * 8  # rows are multiples of 16 bytes
                self.arguments.append(make(shape, dtype=dtype, **on))
            elif program.exact:
                self.arguments.append(torch.zeros(x.numel() * SLOTS, dtype=torch.int64, **on))
            else:
                self.arguments.append(torch.zeros(x.numel(), dtype=torch.float32, **on))

    def results(self, reduce: Mapping[int, Kernel]) -> dict[int, torch.Tensor]:
        """Gradients by the number of their tensor, in its shape, in fp32, or as stored where none are summed; after the kernels.

        reduce: of kernel_configs.reduce_kernels(); PyTorch sums those that have no kernel.
        """
        learned = _learned(self.call.program)
        return {
            i: self._result(i, number, x, reduce)
            for (i, number), x in zip(learned, self.arguments, strict=True)
        }

    def _result(
        self, i: int, number: int | None, x: torch.Tensor, reduce: Mapping[int, Kernel]
    ) -> torch.Tensor:
        shape = self.call.tensors[i].shape
        if number is not None:
            return self._placed(number, self._summed(number, x, reduce.get(number)), shape)
        if x.dtype != torch.int64:
            return x.view(shape)
        sums, end = x.view(-1, SLOTS), FIRST_UNIT + (SLOTS - 1) * SLOT_EXPONENTS
        units = torch.arange(FIRST_UNIT, end, SLOT_EXPONENTS, device=x.device, dtype=torch.float64).exp2_()
        total = units.mul(sums[:, :-1]).sum(-1).float()
        return total.masked_fill_(sums[:, -1] != 0, torch.nan).view(shape)

    def _summed(self, number: int, x: torch.Tensor, kernel: Kernel | None) -> torch.Tensor:
        """Sum of a stored gradient over the dimensions that its tensor is broadcast over: [kept dimensions, seqlen_q, seqlen_k].

        It is added in fp32, and rounded once to the dtype of x.
        """
        _, dropped = _outer_dims(self.call.program, number)
        batch, heads, *matrix = x.shape
        if dropped and kernel is None:
            x = x.sum(dropped)
        elif dropped:
            addends = math.prod(x.shape[dim] for dim in dropped)
            outer, elements = batch * heads // addends if dropped == [1] else 1, 16 // x.element_size()
            kept = [size for dim, size in enumerate((batch, heads)) if dim not in dropped]
            if addends > 1:
                vectors = x.numel() // (outer * addends * elements)
                total = torch.empty((*kept, *matrix), dtype=x.dtype, device=x.device)
                kernel(x.view(outer, addends, vectors, elements), total.view(outer, vectors, elements))
                x = total
            x = x.view(*kept, *matrix)
        if x.shape[-1] != self.columns:
            x = x[..., : self.columns]
        return x.mT if self.transposed else x

    def _placed(self, number: int, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A summed gradient in a tensor of its shape. x: [batch, heads, seqlen_q, seqlen_k], less the dimensions that are summed."""
        program, numbers = self.call.program, self.call.numbers
        gradient = program.gradients[number]
        kept, _ = _outer_dims(program, number)
        if kept == [1, 0]:
            x = x.transpose(0, 1)
        if x.shape == shape:
            return x
        if x.numel() == shape.numel():
            return x.reshape(shape)
        sizes, places = iter(x.shape), []
        for value in (program.values[i] for i in gradient.index[:-2]):
            if value.op in ("batch", "head"):
                places.append(slice(0, next(sizes)))
            else:
                i = numbers[value.data] if value.op == "number" else value.data
                size = shape[len(places)]
                places.append(min(max(i + size if i < 0 else i, 0), size - 1))  # as the kernels read it
        places += [slice(0, size) for size in sizes]
        result = torch.zeros(shape, dtype=x.dtype, device=x.device)
        result[tuple(places)] = x
        return result


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows begin and end at multiples of 16 bytes: itself, or a copy with rows of that length. x needs no gradient."""
    elements = 16 // x.element_size()
    if _has_aligned_rows(x.shape, x.stride(), elements) and not x.data_ptr() % 16:
        return x
    entry = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]
    copy = entry.new_zeros((*entry.shape[:-1], -(-x.shape[-1] // elements) * elements))[..., : x.shape[-1]]
    return copy.copy_(entry).expand(x.shape)


@functools.lru_cache(maxsize=1024)
def _has_aligned_rows(shape: Sequence[int], strides: Sequence[int], elements: int) -> bool:
    """True if rows begin and end at multiples of `elements` from the first."""
    lengths = [stride for stride, size in zip(strides[:-1], shape, strict=False) if size > 1]
    return strides[-1] == 1 and not any(n % elements for n in (*lengths, shape[-1]))


def _argument(x: torch.Tensor) -> torch.Tensor:
    """A captured tensor as an argument: at least one dimension, no bool. x needs no gradient."""
    if not x.ndim:
        x = x.view(1)
    return x.view(torch.uint8) if x.dtype == torch.bool else x
