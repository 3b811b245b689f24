"""Process groups: the ranks of a call, messages between them, and the check that they agree."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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


class Message(NamedTuple):
    """A contiguous tensor to send to, or to fill from, another rank of the group."""

    peer: int
    tensor: torch.Tensor


class Exchange:
    """Messages on their way. The current stream waits for them in wait(), the host does not (NCCL).

    Messages between two ranks match by their order. A message without elements is left out by both ranks.
    """

    def __init__(self, ranks: Ranks, sends: Sequence[Message], receives: Sequence[Message]):
        operations, tags = [], {}
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for peer, tensor in messages:
                if not tensor.numel():
                    continue
                tag = tags[operation, peer] = tags.get((operation, peer), -1) + 1
                peer = dist.get_global_rank(ranks.group, peer)
                operations.append(dist.P2POp(operation, tensor, peer, ranks.group, tag))
        self._tensors = [operation.tensor for operation in operations]  # alive until wait()
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Make the current stream, or on the CPU the caller, wait for all messages."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []


class Rows(Protocol):
    """Rows [start, stop) of a tensor, to or from another rank."""

    peer: int
    start: int
    stop: int


def exchange(
    ranks: Ranks, sends: Sequence[Rows], receives: Sequence[Rows], tensors: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Send rows of contiguous tensors [rows, ...] to other ranks and get rows like them, in one collective of all ranks.

    The current stream waits for it, the host does not (NCCL).

    Args:
        sends: rows of each tensor, sorted by rank.
        receives: their counts of rows are those that arrive, sorted by rank; two ranks list their common rows in the same order.
    Returns:
        per tensor the received rows, in the order of `receives`.
    """
    widths = [x[0].numel() if len(x) else math.prod(x.shape[1:]) for x in tensors]
    outgoing = [
        x[part.start : part.stop].reshape(-1)
        for peer in range(ranks.world)
        for x in tensors
        for part in sends
        if part.peer == peer
    ]
    width = sum(widths)
    send_sizes, receive_sizes = [0] * ranks.world, [0] * ranks.world
    for sizes, parts in ((send_sizes, sends), (receive_sizes, receives)):
        for part in parts:
            sizes[part.peer] += (part.stop - part.start) * width
    first = tensors[0]
    outgoing = torch.cat(outgoing) if outgoing else first.new_empty(0)
    arrived = first.new_empty(sum(receive_sizes))
    dist.all_to_all_single(arrived, outgoing, receive_sizes, send_sizes, group=ranks.group)

    found: list[list[torch.Tensor]] = [[] for _ in tensors]
    offset = 0
    for peer in range(ranks.world):
        for x, size, parts in zip(tensors, widths, found, strict=True):
            for part in receives:
                if part.peer == peer:
                    rows = part.stop - part.start
                    parts.append(arrived[offset : offset + rows * size].view(rows, *x.shape[1:]))
                    offset += rows * size
    return found


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
