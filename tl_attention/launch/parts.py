"""Launch of the kernel that splits fp32 tensors into bf16 parts, before attention in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.config.costs import Costs
from tl_attention.config.part_configs import FirstPartsConfig, part_items
from tl_attention.launch.arrays import ArgumentViews
from tl_attention.launch.common import FP32_NAMES, dense, empty
from tl_attention.problem.attn_problem import AttnProblem, tile_width

BF16_BYTES = 2


def parts_workspace_bytes(
    parts: int, q: Sequence[int], k: Sequence[int], v: Sequence[int], backward: bool = False
) -> int:
    """Bytes of the parts of k and v of these shapes [.., columns], in a backward also of q and dout; with one part of all bf16 tensors."""
    dout = *q[:-1], v[-1]
    if parts == 1:  # out and dout have one shape; dq, dk and dv those of q, k and v
        return BF16_BYTES * sum(map(math.prod, (q, k, v, dout))) * (1 + backward)
    shapes = [k, v, *(q, dout) * backward]
    width, _ = tile_width(q[-1], v[-1], "bwd" if backward else "fwd", FP32_NAMES[parts])
    return BF16_BYTES * parts * width * sum(math.prod(shape[:-1]) for shape in shapes)


def halves(x: torch.Tensor) -> torch.Tensor:
    """View of an fp32 tensor as bf16 numbers, two per number: see kernels/seams/split_tile.py."""
    return x.view(torch.bfloat16)


def parts_size(problem: AttnProblem, heads_first: bool, x: torch.Tensor) -> tuple:
    """Arguments of empty() for the parts of a tensor, [batch, seqlen, heads, parts * width]."""
    batch, n1, n2, _ = x.shape
    rows = (n2, n1) if heads_first else (n1, n2)
    return dense((batch, *rows, problem.parts * problem.head_dim), torch.bfloat16)


class PartsLaunch:
    """Splits tensors of fixed shapes and strides before attention. Serves one thread.

    Args:
        kernel: compiled from kernels/fp32/parts.py for `problem`.
        heads_first: tensors are [batch, heads, seqlen, columns], else [batch, seqlen, heads, columns].
        tensors: k and v of a forward, q and dout of a backward.
    """

    def __init__(self, kernel: Kernel, problem: AttnProblem, heads_first: bool, *tensors: torch.Tensor):
        self.kernel = kernel
        self.views = ArgumentViews(heads_first, *tensors)
        self.sizes = [parts_size(problem, heads_first, x) for x in tensors]

    def empty(self) -> list[torch.Tensor]:
        """Tensors for the parts, [batch, seqlen, heads, parts * width]."""
        return [empty(*size) for size in self.sizes]

    def __call__(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
        """(parts, last arguments of the attention kernel) for tensors with the metadata of __init__."""
        parts = self.empty()
        for view, part in zip(self.views.of(*tensors), parts, strict=True):
            self.kernel(view, part)
        return parts, ()


class AttentionTiles(NamedTuple):
    """Tiles of an attention kernel that makes parts.

    Attributes:
        group: tiles of a group of heads, see seams.scheduler.TileOrder.
        ctas: CTAs of the kernel, one per tile or one per SM.
        heads: heads of the split tensors that a tile reads.
    """

    tiles: int
    group: int
    ctas: int
    costs: Costs
    heads: int = 1


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
        (batch, seqlen, heads, _), *_ = self.sizes[0]
        tiles, group, ctas, costs, heads_per_tile = attention
        first_tiles = max(int(costs.terms.first_tiles * costs.sms), group)
        units = batch * heads // heads_per_tile
        self.heads = min(-(-first_tiles * units // tiles), units) * heads_per_tile
        self.ctas = -(-part_items(problem.head_dim, self.heads, seqlen) // FirstPartsConfig().warps)
        # A CTA with one tile makes parts until there are enough for the CTAs that run beside it and after it
        self.tiles_ahead = ctas if ctas < tiles else group + costs.sms
        self.progress = dense((1 + batch * heads,), torch.int32)

    def __call__(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
        parts, progress = self.empty(), empty(*self.progress)
        inputs = self.views.of(*tensors)
        self.kernel(*inputs, *parts, progress, self.heads, self.ctas)
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


class InputsOfPasses(NamedTuple):
    """fp32 inputs of the passes of a backward; `kept` must live until the last launch.

    Attributes:
        first: q, k, v, dout of the first pass, which splits k and v itself.
        others: of the passes after it.
        key_parts: arguments of the first pass, which stores the parts of k and v there for the others.
        share: last arguments of the first pass.
    """

    first: tuple
    others: tuple
    key_parts: tuple
    share: tuple
    kept: tuple


class BwdPartsLaunch:
    """Splits the inputs of a backward, or has its kernels split them. Serves one thread.

    Args:
        split: launch for q and dout.
        stores: whether the first of several passes stores the parts of k and v.
        k, v: see PartsLaunch.
    """

    def __init__(
        self,
        split: PartsLaunch,
        problem: AttnProblem,
        heads_first: bool,
        packed: bool,
        stores: bool,
        k: torch.Tensor,
        v: torch.Tensor,
    ):
        self.split, self.views = split, ArgumentViews(heads_first, halves(k), halves(v), packed=packed)
        self.part_views = ArgumentViews(False, *split.empty(), packed=packed)
        self.sizes = [parts_size(problem, heads_first, x) for x in (k, v)] if stores else []
        self.key_part_views = ArgumentViews(False, *self._empty(), packed=packed) if stores else None

    def _empty(self) -> list[torch.Tensor]:
        return [empty(*size) for size in self.sizes]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
    ) -> InputsOfPasses:
        """Inputs for tensors with the metadata of __init__."""
        parts, share = self.split(q, dout)
        keys, key_parts = (halves(k), halves(v)), self._empty()
        (q, dout), (k, v) = self.part_views.of(*parts), self.views.of(*keys)
        stored = tuple(self.key_part_views.of(*key_parts)) if key_parts else ()
        return InputsOfPasses((q, k, v, dout), (q, *stored, dout), stored, share, (parts, keys, key_parts))
