"""Process groups: the ranks of a call, messages between them, and the check that they agree."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None


class Ranks(NamedTuple):
    """A process group, this rank in it and its size. Without torch.distributed: no group, one rank."""

    group: dist.ProcessGroup | None
    rank: int
    world: int


def ranks_of(group: Group) -> Ranks:
    """Ranks of a process group, of a mesh of one dimension, or of all processes for None.

    Raises:
        TypeError, ValueError: not a group, a mesh of more dimensions, a group without this process.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a mesh of one dimension, got one of {group.ndim}, {group.mesh_dim_names}; pass"
                " mesh['cp'], or the name that it has"
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, 1)
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected a ProcessGroup, a DeviceMesh or None for all processes, got {type(group).__name__}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: expected a group that this process is in, got one without it")
    return Ranks(group, rank, dist.get_world_size(group))


class Part(NamedTuple):
    """Rows [start, stop) of a tensor, for another rank or from it."""

    peer: int
    start: int
    stop: int


class Exchange:
    """Rows of contiguous tensors [rows, ...] on their way between ranks, by one collective that all ranks of the group start.

    Args:
        sends: rows of each tensor, sorted by rank.
        receives: as many rows arrive, sorted by rank. Two ranks list what they share in the same order.
    """

    def __init__(
        self, ranks: Ranks, sends: Sequence[Part], receives: Sequence[Part], tensors: Sequence[torch.Tensor]
    ):
        self._receives, self._shapes = receives, [x.shape[1:] for x in tensors]
        self._widths = [shape.numel() for shape in self._shapes]
        width = sum(self._widths)
        parts = [x[part.start : part.stop].view(-1) for run in _runs(sends) for x in tensors for part in run]
        self._sent = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else tensors[0].new_empty(0)
        sizes = [0] * ranks.world, [0] * ranks.world
        for counts, rows in zip(sizes, (sends, receives), strict=True):
            for part in rows:
                counts[part.peer] += (part.stop - part.start) * width
        self._arrived = tensors[0].new_empty(sum(sizes[1]))
        self._work = dist.all_to_all_single(
            self._arrived, self._sent, sizes[1], sizes[0], group=ranks.group, async_op=True
        )

    def wait(self) -> list[list[torch.Tensor]]:
        """Per tensor the rows that arrived, in the order of `receives`. The current stream waits, the host does not (NCCL)."""
        self._work.wait()
        self._sent = None
        found: list[list[torch.Tensor]] = [[] for _ in self._shapes]
        offset = 0
        for run in _runs(self._receives):
            for parts, shape, width in zip(found, self._shapes, self._widths, strict=True):
                for part in run:
                    rows = part.stop - part.start
                    parts.append(self._arrived[offset : offset + rows * width].view(rows, *shape))
                    offset += rows * width
        return found


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts by their ranks."""
    return [list(run) for _, run in itertools.groupby(parts, key=lambda part: part.peer)]


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set] = weakref.WeakKeyDictionary()


def agree(ranks: Ranks, check: Callable[[], dict[str, Any]], key: object) -> None:
    """Run the checks of a call on its first occurrence on this rank, and compare its arguments with those of the other ranks.

    A call occurs for the first time if its key is new in the group. All ranks exchange their arguments then, which waits for the GPU.

    Args:
        check: returns arguments by name that must be equal on all ranks; raises for wrong ones.
        key: identifies calls that need no further check.
    Raises:
        The error of check(), on its rank. ValueError: the ranks disagree, or another rank raised; on all ranks.
    """
    known = _agreed.setdefault(ranks.group, set())
    if key is not None and key in known:
        return
    error, arguments = None, {}
    try:
        arguments = check()
    except Exception as found:
        error = found
    of_all: list = [None] * ranks.world
    mine = arguments if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(of_all, mine, ranks.group)
    if error is not None:
        raise error
    for rank, other in enumerate(of_all):
        if isinstance(other, str):
            raise ValueError(f"group: rank {rank} refused its arguments with {other}")
    for name in arguments:
        values: dict[str, list[int]] = {}
        for rank, other in enumerate(of_all):
            values.setdefault(repr(other[name]), []).append(rank)
        if len(values) > 1:
            words = "; ".join(
                f"{_short(value)} on {'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, who[:8]))}"
                f"{', ...' if len(who) > 8 else ''}"
                for value, who in values.items()
            )
            raise ValueError(f"{name}: expected the same on all ranks of the group, got {words}")
    if key is not None:
        known.add(key)


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
