"""Launch of the kernel that splits fp32 tensors into bf16 parts, before attention in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.launch.arrays import ArgumentViews
from tl_attention.launch.common import FP32_NAMES, dense, empty
from tl_attention.problem import AttnProblem, tile_width

BF16_BYTES = 2


def parts_workspace_bytes(
    parts: int, q: Sequence[int], k: Sequence[int], v: Sequence[int], backward: bool = False
) -> int:
    """Bytes of the parts of q, k and v of these shapes [.., columns], and in a backward of dout; with one part of all bf16 tensors."""
    shapes = [q, k, v, *([(*q[:-1], v[-1])] * (backward or parts == 1))]
    if parts == 1:  # out and dout have one shape; dq, dk and dv those of q, k and v
        shapes += [*shapes] * backward
        return BF16_BYTES * sum(map(math.prod, shapes))
    width, _ = tile_width(q[-1], v[-1], "bwd" if backward else "fwd", FP32_NAMES[parts])
    return BF16_BYTES * parts * width * sum(math.prod(shape[:-1]) for shape in shapes)


class PartsLaunch:
    """Splits tensors of fixed shapes and strides. Serves one thread.

    Args:
        kernel: compiled from kernels/parts.py for `problem`.
        heads_first: tensors are [batch, heads, seqlen, columns], else [batch, seqlen, heads, columns].
    """

    def __init__(self, kernel: Kernel, problem: AttnProblem, heads_first: bool, *tensors: torch.Tensor):
        self.kernel = kernel
        self.views = ArgumentViews(heads_first, *tensors)
        self.sizes = []
        for x in tensors:
            batch, n1, n2, _ = x.shape
            rows = (n2, n1) if heads_first else (n1, n2)
            self.sizes.append(dense((batch, *rows, problem.parts * problem.head_dim), torch.bfloat16))

    def empty(self) -> list[torch.Tensor]:
        """Tensors for the parts, [batch, seqlen, heads, parts * width]."""
        return [empty(*size) for size in self.sizes]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Parts of tensors with the metadata of __init__."""
        parts = self.empty()
        for view, part in zip(self.views.of(*tensors), parts, strict=True):
            self.kernel(view, part)
        return parts
