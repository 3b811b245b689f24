"""Launch of the kernel that splits fp32 tensors into bf16 parts, before attention in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.launch.arrays import ArgumentViews
from tl_attention.launch.common import FP32_NAMES, dense, empty
from tl_attention.part_configs import FirstPartsConfig, part_items
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
    """Splits tensors of fixed shapes and strides before attention. Serves one thread.

    Args:
        kernel: compiled from kernels/parts.py for `problem`.
        heads_first: tensors are [batch, heads, seqlen, columns], else [batch, seqlen, heads, columns].
        tensors: q, k, v, and in a backward dout.
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

    def __call__(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
        """(parts, last arguments of the attention kernel) for tensors with the metadata of __init__."""
        parts = self.empty()
        for view, part in zip(self.views.of(*tensors), parts, strict=True):
            self.kernel(view, part)
        return parts, ()


# Tiles per SM whose parts are made before the attention kernel
FIRST_TILES = 1.0


class AttentionTiles(NamedTuple):
    """Tiles of an attention kernel that makes parts.

    Attributes:
        group: tiles of a group of heads, see kernels.scheduler.TileOrder.
        ctas: CTAs of the kernel, one per tile or one per SM.
    """

    tiles: int
    group: int
    ctas: int
    sms: int


class FirstPartsLaunch(PartsLaunch):
    """Splits the first heads of such tensors, for an attention kernel whose idle warps split the others. kernel: of first_parts.py."""

    def __init__(
        self,
        kernel: Kernel,
        problem: AttnProblem,
        heads_first: bool,
        attention: AttentionTiles,
        *tensors: torch.Tensor,
    ):
        super().__init__(kernel, problem, heads_first, *tensors)
        (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _), *others = (shape for shape, *_ in self.sizes)
        per_key_head = part_items(problem.head_dim, heads // heads_kv, seqlen_q, seqlen_k, len(others) > 1)
        tiles, group, ctas, sms = attention
        key_heads, first_tiles = batch * heads_kv, max(int(FIRST_TILES * sms), group)
        self.key_heads = min(-(-first_tiles * key_heads // tiles), key_heads)
        self.ctas = -(-self.key_heads * per_key_head // FirstPartsConfig().warps)
        # A CTA with one tile makes parts until there are enough for the CTAs that run beside it and after it
        self.tiles_ahead = ctas if ctas < tiles else group + sms
        self.progress = dense((1 + batch * (heads + heads_kv),), torch.int32)

    def __call__(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
        parts, progress = self.empty(), empty(*self.progress)
        inputs = self.views.of(*tensors)
        self.kernel(*inputs, *parts, progress, self.key_heads, self.ctas)
        return parts, (*inputs, progress, self.tiles_ahead)


def parts_launch(
    kernel: Kernel,
    problem: AttnProblem,
    heads_first: bool,
    attention: AttentionTiles | None,
    *tensors: torch.Tensor,
) -> PartsLaunch:
    """Launch of the kernel before attention. attention: of an attention kernel that makes parts, else None."""
    if attention is None:
        return PartsLaunch(kernel, problem, heads_first, *tensors)
    return FirstPartsLaunch(kernel, problem, heads_first, attention, *tensors)
