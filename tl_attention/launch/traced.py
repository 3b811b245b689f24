"""Launch arguments of a program: captured tensors, numbers, and the sums of the gradients of captured tensors."""

from __future__ import annotations

import torch

from tl_attention.program import Call


def traced_arguments(call: Call) -> tuple:
    """Captured tensors and numbers, in the order of kernels/traced.py."""
    return *map(_argument, call.tensors), *call.numbers


def gradient_sums(call: Call) -> list[torch.Tensor]:
    """Zeros that a backward adds the gradients of captured tensors to: fp32, flat."""
    return [
        torch.zeros(call.tensors[i].numel(), dtype=torch.float32, device=call.tensors[i].device)
        for i in call.program.learned
    ]


def _argument(x: torch.Tensor) -> torch.Tensor:
    """A captured tensor as an argument: at least one dimension, no bool."""
    x = x.detach()
    if not x.ndim:
        x = x.view(1)
    return x.view(torch.uint8) if x.dtype == torch.bool else x
