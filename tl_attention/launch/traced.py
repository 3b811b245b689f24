"""Launch arguments of a program: captured tensors, numbers, and the gradients of captured tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from tl_attention.program import Call, stored_dtype

# Exact sums: 15 integers per element, number i in units of 2 ** (8 i - 87) for addends from 2 ** (8 i - 64) on, and a count of larger ones
SLOTS = 16
FIRST_UNIT, SLOT_EXPONENTS = -87, 8


def traced_arguments(call: Call) -> tuple:
    """Captured tensors and numbers, in the order of kernels/traced.py."""
    tensors = (_argument(aligned(x) if i in call.program.dense else x) for i, x in enumerate(call.tensors))
    return *tensors, *call.numbers


def backward_call(call: Call | None, deterministic: bool) -> Call | None:
    """The call that a backward computes: with exact sums where its gradients must not depend on the order of additions."""
    if call is None or not deterministic:
        return call
    return replace(call, program=call.program.as_exact)


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
        self.stored = {program.gradients[number].tensor: number for number in program.stored}
        self.arguments = []
        for i in program.learned:
            x, on = call.tensors[i], {"device": call.tensors[i].device}
            if i in self.stored:  # blocks that no list names are not written
                make = torch.zeros if program.listed else torch.empty
                dtype = getattr(torch, stored_dtype(program.tensors[i]))
                shape = batch, heads, rows, -(-self.columns // 8) * 8  # rows are multiples of 16 bytes
                self.arguments.append(make(shape, dtype=dtype, **on))
            elif program.exact:
                self.arguments.append(torch.zeros(x.numel() * SLOTS, dtype=torch.int64, **on))
            else:
                self.arguments.append(torch.zeros(x.numel(), dtype=torch.float32, **on))

    def results(self) -> tuple[torch.Tensor, ...]:
        """Gradients shaped as their tensors, in fp32, or as stored where none are summed; after the kernels."""
        return tuple(
            self._result(i, x) for i, x in zip(self.call.program.learned, self.arguments, strict=True)
        )

    def _result(self, i: int, x: torch.Tensor) -> torch.Tensor:
        shape = self.call.tensors[i].shape
        if i in self.stored:
            return self._reduced(self.stored[i], x[..., : self.columns], shape)
        if x.dtype != torch.int64:
            return x.view(shape)
        sums = x.view(-1, SLOTS)
        units = torch.arange(SLOTS - 1, device=x.device, dtype=torch.float64) * SLOT_EXPONENTS + FIRST_UNIT
        total = (sums[:, :-1].double() * units.exp2()).sum(-1).float()
        return total.masked_fill(sums[:, -1] != 0, torch.nan).view(shape)

    def _reduced(self, number: int, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Sum of a stored gradient over the dimensions that its tensor is broadcast over, placed in a tensor of its shape.

        Args:
            x: [batch, heads, seqlen_q, seqlen_k], or transposed.
        """
        values, gradient = self.call.program.values, self.call.program.gradients[number]
        outer = [values[i] for i in gradient.index[:-2]]
        dims, dtype = {"batch": 0, "head": 1}, self.call.tensors[gradient.tensor].dtype
        kept = [dims[value.op] for value in outer if value.op in dims]
        dropped = [dim for dim in (0, 1) if dim not in kept]
        if dropped:
            # bf16 is added in fp32 and rounded once
            x = x.sum(dropped, dtype=dtype if dtype == x.dtype else torch.float32)
        if self.transposed:  # after the sum, which is slow where rows are not contiguous
            x = x.mT
        if kept == [1, 0]:
            x = x.transpose(0, 1)
        if x.numel() == shape.numel():
            return x.reshape(shape)
        sizes, places = iter(x.shape), []
        for value in outer:
            if value.op in dims:
                places.append(slice(0, next(sizes)))
            else:
                i = self.call.numbers[value.data] if value.op == "number" else value.data
                size = shape[len(places)]
                places.append(min(max(i + size if i < 0 else i, 0), size - 1))  # as the kernels read it
        places += [slice(0, size) for size in sizes]
        result = torch.zeros(shape, dtype=x.dtype, device=x.device)
        result[tuple(places)] = x
        return result


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows begin and end at multiples of 16 bytes: itself, or a copy with rows of that length."""
    x, elements = x.detach(), 16 // x.element_size()
    lengths = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    if x.stride(-1) == 1 and not any(n % elements for n in (*lengths, x.shape[-1])) and not x.data_ptr() % 16:
        return x
    entry = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]
    copy = entry.new_zeros((*entry.shape[:-1], -(-x.shape[-1] // elements) * elements))[..., : x.shape[-1]]
    return copy.copy_(entry).expand(x.shape)


def _argument(x: torch.Tensor) -> torch.Tensor:
    """A captured tensor as an argument: at least one dimension, no bool."""
    x = x.detach()
    if not x.ndim:
        x = x.view(1)
    return x.view(torch.uint8) if x.dtype == torch.bool else x
