"""Values of a traced program in PyTorch, on tensors of batch entries, heads, queries, keys and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tl_attention.problem.program import FLOAT, LEAVES, Call, Value
from tl_attention.tracing.trace_ops import TORCH_DTYPES, evaluate


def program_values(
    call: Call, roots: Sequence[int], leaves: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Values of a program at these leaves.

    Args:
        roots: values to compute.
        leaves: tensors by the name of a leaf, which broadcast together: score in `dtype`, the others int32.
        dtype: of float values.
    Returns:
        One tensor per root, in the shape that the leaves it depends on broadcast to. An index into a captured tensor counts from the
        end if it is negative; out of range it reads the nearest element, as in the kernels.
    """
    values = call.program.values
    found: dict[int, torch.Tensor] = {}
    device = next(iter(leaves.values())).device
    for i in sorted(call.program.needed(roots)):
        value = values[i]
        value_dtype = dtype if value.dtype == FLOAT else TORCH_DTYPES[value.dtype]
        if value.op in LEAVES:
            found[i] = leaves[value.op]
        elif value.op in ("constant", "number"):
            number = value.data if value.op == "constant" else call.numbers[value.data]
            found[i] = torch.full((), number, dtype=value_dtype, device=device)
        elif value.op == "load":
            tensor = call.tensors[value.data]
            index = program_index(call, value.args, tensor.shape, [found[arg] for arg in value.args])
            # Not tensor[index], which reads an index of no dimensions, and so waits for the GPU
            found[i] = (torch.ops.aten.index.Tensor(tensor, index) if index else tensor).to(value_dtype)
        else:
            x = evaluate(value, [found[arg] for arg in value.args], device)
            found[i] = x.to(dtype) if value.dtype == FLOAT else x
    return [found[root] for root in roots]


def program_index(
    call: Call, args: Sequence[int], shape: Sequence[int], found: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Index into a captured tensor of this shape: `found` are the values `args`, of which only leaves are known to be in range."""
    values = call.program.values
    return tuple(
        x.long() if values[arg].op in LEAVES else within(x, size)
        for arg, size, x in zip(args, shape, found, strict=True)
    )


def within(index: torch.Tensor, size: int) -> torch.Tensor:
    """Indices into a dimension: negative ones count from the end, those out of range become the nearest."""
    index = index.long()
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def differentiable(values: Sequence[Value], root: int) -> set[int]:
    """Values that the derivative of a value may depend on: those it is computed from by floats, without a detach between."""
    found, left = set(), [root]
    while left:
        i = left.pop()
        value = values[i]
        if i not in found and value.dtype == FLOAT:
            found.add(i)
            left += () if value.op in ("load", "detach") else value.args
    return found
