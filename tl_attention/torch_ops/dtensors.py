"""Calls with DTensors: attention of a rank's batch entries or heads is a call of its own, with its own shards.

Placements may shard the batch and the heads, alike in q, k and v. Others would need keys of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tl_attention.checks.common import is_dtensor
from tl_attention.torch_ops.transforms import Outputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class Axes(NamedTuple):
    """Dimensions of the batch and of the heads in a tensor; None: it has none."""

    batch: int | None
    heads: int | None


def axes_of_rows(heads_first: bool, packed: bool = False) -> Axes:
    """Axes of q, k, v and out."""
    if packed:
        return Axes(None, 1)
    return Axes(0, 1 if heads_first else 2)


class Shards:
    """Placements of a call with DTensors, which the constructor checks.

    Args:
        axes: those of q, k and v.

    Raises:
        NotImplementedError: a placement that is not local to a rank.
        TypeError: some of q, k and v are no DTensors.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    axes: Axes

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Axes):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not is_dtensor(x):
                raise TypeError(
                    f"{name}: expected a DTensor, as others of q, k and v are, got {type(x).__name__}; pass DTensors, or call .to_local()"
                    " on those"
                )
        self.mesh, self.placements, self.axes = q.device_mesh, tuple(q.placements), axes
        whole = f"Replicate(), or Shard of the {'heads' if axes.batch is None else 'batch or the heads'}"
        for name, x in (("q", q), ("k", k), ("v", v)):
            for placement in x.placements:
                if not (placement.is_replicate() or self._is_local(placement)):
                    raise NotImplementedError(
                        f"{name}: expected placements {whole}, got {tuple(x.placements)}; call .to_local() on the tensors of a call that is"
                        " local to a rank, or tl_attention.distributed.attention for a sharded sequence"
                    )
            if x.device_mesh != self.mesh or tuple(x.placements) != self.placements:
                raise NotImplementedError(
                    f"{name}: expected the placements of q, {self.placements} on {self.mesh}, got {tuple(x.placements)} on {x.device_mesh};"
                    " call .redistribute(), or .to_local() on q, k and v"
                )
            self._check_heads(name, x)

    def shards(self, axis: int | None) -> bool:
        """True if ranks have different parts of this dimension of q."""
        return any(placement.is_shard(axis) for placement in self.placements)

    def _is_local(self, placement: Any) -> bool:
        return any(axis is not None and placement.is_shard(axis) for axis in self.axes)

    def _check_heads(self, name: str, x: torch.Tensor) -> None:
        """Check that all ranks have equally many heads, so that query heads stay beside their key heads."""
        ranks = 1
        for dim, placement in enumerate(self.placements):
            ranks *= self.mesh.size(dim) if placement.is_shard(self.axes.heads) else 1
        heads = x.shape[self.axes.heads]
        if heads % ranks:
            raise NotImplementedError(
                f"{name}: expected a number of heads that the {ranks} ranks of its shards divide, got {heads}; call .redistribute(), or"
                " .to_local() on q, k and v"
            )

    def placed(self, axes: Axes, of_sum: Any = None) -> list[Any]:
        """Placements of a tensor with these axes. of_sum: that where the tensor has not the axis that q shards; None: Replicate."""
        from torch.distributed.tensor import Replicate, Shard

        result: list[Any] = []
        for placement in self.placements:
            found = Replicate()
            for axis, mine in zip(self.axes, axes, strict=True):
                if axis is not None and placement.is_shard(axis):
                    found = Shard(mine) if mine is not None else of_sum or Replicate()
            result.append(found)
        return result

    def replicated(self, name: str, x: Any) -> Any:
        """This rank's tensor of a replicated DTensor; anything else but other DTensors as it is."""
        if not is_dtensor(x):
            return x
        if not all(placement.is_replicate() for placement in x.placements):
            raise NotImplementedError(
                f"{name}: expected a replicated DTensor or a tensor of this rank beside DTensors, got placements {tuple(x.placements)};"
                " pass .full_tensor()"
            )
        return x.to_local()

    def option(self, name: str, x: torch.Tensor | None, axes: Axes) -> torch.Tensor | None:
        """The part of a tensor of options on this rank. Its gradient is a sum over the ranks that have other batch entries."""
        if x is None:
            return None
        wanted = self.placed(axes)
        if not is_dtensor(x) or x.device_mesh != self.mesh or list(x.placements) != wanted:
            found = tuple(x.placements) if is_dtensor(x) else f"{type(x).__name__}, no DTensor"
            raise NotImplementedError(
                f"{name}: expected a DTensor of placements {tuple(wanted)} beside those of q, {self.placements}, got {found}; call"
                " torch.distributed.tensor.distribute_tensor, or .to_local() on q, k and v"
            )
        from torch.distributed.tensor import Partial

        return x.to_local(grad_placements=self.placed(axes, Partial()))

    def run(
        self, attend: Callable[..., Outputs], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Outputs:
        """Outputs as DTensors, by attend() on this rank's parts of q, k and v."""
        out, *numbers = attend(q.to_local(), k.to_local(), v.to_local())
        *batch, n1, n2, _ = q.shape
        heads_last = self.axes.heads == q.ndim - 2
        rows = (*batch, n2, n1) if heads_last else (*batch, n1, n2)
        of_numbers = self.placed(Axes(self.axes.batch, len(rows) - 2))
        return (
            self._whole(out, (*q.shape[:-1], v.shape[-1]), self.placements),
            *(self._whole(x, rows, of_numbers) for x in numbers),
        )

    def _whole(self, x: torch.Tensor, shape: tuple[int, ...], placements: Any) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        sizes = {"shape": torch.Size(shape), "stride": _whole_strides(x, shape)}
        return DTensor.from_local(x, self.mesh, placements, run_check=False, **sizes)


def _whole_strides(x: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor of this shape whose dimensions have the order of x, a rank's part of it, in memory."""
    of_x, order = x.stride(), range(x.ndim)[::-1]  # the innermost dimension first
    if not x.is_contiguous() or not x.numel():
        order = sorted(order, key=lambda dim: of_x[dim])
    strides, step, whole, part = [0] * x.ndim, 1, 1, 1
    for dim in order:
        # The stride of a dimension of size 1 says nothing
        strides[dim] = of_x[dim] * whole // part if x.shape[dim] > 1 else step
        n = max(shape[dim], 1)
        step, whole, part = strides[dim] * n, whole * n, part * max(x.shape[dim], 1)
    return tuple(strides)
