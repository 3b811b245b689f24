"""Launch of the kernel that splits fp32 tensors into bf16 terms, before attention in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tl_attention.compilation.store import Kernel
from tl_attention.config.costs import Costs
from tl_attention.config.term_configs import FirstTermsConfig, term_items
from tl_attention.launch.arrays import ArgumentViews
from tl_attention.launch.common import FP32_NAMES, dense, empty
from tl_attention.problem.attn_problem import AttnProblem, tile_width

BF16_BYTES = 2


def terms_workspace_bytes(
    terms: int, q: Sequence[int], k: Sequence[int], v: Sequence[int], backward: bool = False
) -> int:
    """Bytes of the terms of k and v of these shapes [.., columns], in a backward also of q and dout; with one term of all bf16 tensors."""
    dout = *q[:-1], v[-1]
    if terms == 1:  # out and dout have one shape; dq, dk and dv those of q, k and v
        return BF16_BYTES * sum(map(math.prod, (q, k, v, dout))) * (1 + backward)
    shapes = [k, v, *(q, dout) * backward]
    width, _ = tile_width(q[-1], v[-1], "bwd" if backward else "fwd", FP32_NAMES[terms])
    return BF16_BYTES * terms * width * sum(math.prod(shape[:-1]) for shape in shapes)


def halves(x: torch.Tensor) -> torch.Tensor:
    """View of an fp32 tensor as bf16 numbers, two per number: see kernels/seams/split_tile.py."""
    return x.view(torch.bfloat16)


def terms_size(problem: AttnProblem, heads_first: bool, x: torch.Tensor) -> tuple:
    """Arguments of empty() for the terms of a tensor, [batch, seqlen, heads, terms * width]."""
    batch, n1, n2, _ = x.shape
    rows = (n2, n1) if heads_first else (n1, n2)
    return dense((batch, *rows, problem.terms * problem.head_dim), torch.bfloat16)


class TermsLaunch:
    """Splits tensors of fixed shapes and strides before attention. Serves one thread.

    Args:
        kernel: compiled from kernels/fp32/terms.py for `problem`.
        heads_first: tensors are [batch, heads, seqlen, columns], else [batch, seqlen, heads, columns].
        tensors: k and v of a forward, q and dout of a backward.
    """

    def __init__(self, kernel: Kernel, problem: AttnProblem, heads_first: bool, *tensors: torch.Tensor):
        self.kernel = kernel
        self.views = ArgumentViews(heads_first, *tensors)
        self.sizes = [terms_size(problem, heads_first, x) for x in tensors]

    def empty(self) -> list[torch.Tensor]:
        """Tensors for the terms, [batch, seqlen, heads, terms * width]."""
        return [empty(*size) for size in self.sizes]

    def __call__(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
        """(terms, last arguments of the attention kernel) for tensors with the metadata of __init__."""
        terms = self.empty()
        for view, term in zip(self.views.of(*tensors), terms, strict=True):
            self.kernel(view, term)
        return terms, ()


class AttentionTiles(NamedTuple):
    """Tiles of an attention kernel that makes terms.

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


class FirstTermsLaunch(TermsLaunch):
    """Splits the first heads of such tensors, for an attention kernel whose idle warps split the others. kernel: of first_terms.py."""

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
        self.ctas = -(-term_items(problem.head_dim, self.heads, seqlen) // FirstTermsConfig().warps)
        # A CTA with one tile makes terms until there are enough for the CTAs that run beside it and after it
        self.tiles_ahead = ctas if ctas < tiles else group + costs.sms
        self.progress = dense((1 + batch * heads,), torch.int32)

    def __call__(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
        terms, progress = self.empty(), empty(*self.progress)
        inputs = self.views.of(*tensors)
        self.kernel(*inputs, *terms, progress, self.heads, self.ctas)
        return terms, (*inputs, progress, self.tiles_ahead)


def terms_launch(
    kernel: Kernel,
    problem: AttnProblem,
    heads_first: bool,
    attention: AttentionTiles | None,
    *tensors: torch.Tensor,
) -> TermsLaunch:
    """Launch of the kernel before attention. attention: of an attention kernel that makes terms, else None."""
    if attention is None:
        return TermsLaunch(kernel, problem, heads_first, *tensors)
    return FirstTermsLaunch(kernel, problem, heads_first, attention, *tensors)


class InputsOfPasses(NamedTuple):
    """fp32 inputs of the passes of a backward; `kept` must live until the last launch.

    Attributes:
        first: q, k, v, dout of the first pass, which splits k and v itself.
        others: of the passes after it.
        key_terms: arguments of the first pass, which stores the terms of k and v there for the others.
        last_arguments: of the first pass, where its idle warps make terms.
    """

    first: tuple
    others: tuple
    key_terms: tuple
    last_arguments: tuple
    kept: tuple


class BwdTermsLaunch:
    """Splits the inputs of a backward, or has its kernels split them. Serves one thread.

    Args:
        query_terms: launch for q and dout.
        stores: whether the first of several passes stores the terms of k and v.
        k, v: see TermsLaunch.
    """

    def __init__(
        self,
        query_terms: TermsLaunch,
        problem: AttnProblem,
        heads_first: bool,
        packed: bool,
        stores: bool,
        k: torch.Tensor,
        v: torch.Tensor,
    ):
        self.query_terms = query_terms
        self.views = ArgumentViews(heads_first, halves(k), halves(v), packed=packed)
        self.term_views = ArgumentViews(False, *query_terms.empty(), packed=packed)
        self.sizes = [terms_size(problem, heads_first, x) for x in (k, v)] if stores else []
        self.key_term_views = ArgumentViews(False, *self._empty(), packed=packed) if stores else None

    def _empty(self) -> list[torch.Tensor]:
        return [empty(*size) for size in self.sizes]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
    ) -> InputsOfPasses:
        """Inputs for tensors with the metadata of __init__."""
        terms, last_arguments = self.query_terms(q, dout)
        keys, key_terms = (halves(k), halves(v)), self._empty()
        (q, dout), (k, v) = self.term_views.of(*terms), self.views.of(*keys)
        stored = tuple(self.key_term_views.of(*key_terms)) if key_terms else ()
        kept = terms, keys, key_terms
        return InputsOfPasses((q, k, v, dout), (q, *stored, dout), stored, last_arguments, kept)
