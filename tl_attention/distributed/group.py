"""Process groups: the ranks of a call, and messages between them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None


class Ranks:
    """A process group, this rank in it and its size. Without torch.distributed: no group, one rank.

    It keeps no group alive, so prepared calls end with their group.
    """

    rank: int
    world: int

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int):
        self._group, self.rank, self.world = None if group is None else weakref.ref(group), rank, world

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self._group is None else self._group()


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
    rank = group.rank()
    if rank < 0:
        raise ValueError("group: expected a group that this process is in, got one without it")
    return Ranks(group, rank, group.size())


class Part(NamedTuple):
    """Rows [start, stop) of a tensor, for another rank or from it."""

    peer: int
    start: int
    stop: int


class Rows(NamedTuple):
    """Sizes of a tensor [batch, rows, heads, columns] that is stored by rows: [rows, batch, heads, columns] in memory."""

    batch: int
    heads: int
    columns: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Rows:
        return cls(x.shape[0], x.shape[2], x.shape[3])

    @property
    def width(self) -> int:
        """Elements per row."""
        return self.batch * self.heads * self.columns

    def view(self, flat: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
        """[batch, count, heads, columns] of the elements of a flat tensor from `first` on."""
        batch, heads, columns = self
        strides = heads * columns, batch * heads * columns, columns, 1
        return flat.as_strided((batch, count, heads, columns), strides, flat.storage_offset() + first)


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """The elements of x [batch, rows, heads, columns], flat and by rows; copied unless x is stored so."""
    return x.transpose(0, 1).reshape(-1)


class Exchange:
    """Rows that a rank sends and receives in one collective, which all ranks of the group start, of tensors with fixed widths.

    Tensors are flat: row i of tensor t starts at element i * widths[t]. A message holds all its rows of the first tensor, then those of
    the next.

    Args:
        sends: rows of each tensor, sorted by rank.
        receives: rows that arrive, sorted by rank. Both ends of a message list its rows in the same order.
        widths: elements per row of each tensor.
    """

    def __init__(self, ranks: Ranks, sends: Sequence[Part], receives: Sequence[Part], widths: Sequence[int]):
        self._ranks = ranks
        self._sent = [
            (number, part.start * width, part.stop * width)
            for run in _runs(sends)
            for number, width in enumerate(widths)
            for part in run
        ]
        self._lengths: list[int] = []
        self._places: list[list[int]] = [[] for _ in widths]
        for run in _runs(receives):
            for places, width in zip(self._places, widths, strict=True):
                for part in run:
                    places.append(len(self._lengths))
                    self._lengths.append((part.stop - part.start) * width)
        self._sizes = [0] * ranks.world, [0] * ranks.world
        for sizes, parts in zip(self._sizes, (receives, sends), strict=True):
            for part in parts:
                sizes[part.peer] += (part.stop - part.start) * sum(widths)
        self._size = sum(self._lengths)

    def run(self, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
        """Run the exchange: per tensor the flat rows that arrive, in the order of `receives`. With NCCL the stream waits, not the host."""
        return self.start(*tensors, overlap=False).wait()

    def start(self, *tensors: torch.Tensor, overlap: bool = True) -> Arriving:
        """Start the exchange. With `overlap` it runs beside the current stream, which has to wait for the result."""
        sent = [tensors[number][start:stop] for number, start, stop in self._sent]
        sent = sent[0] if len(sent) == 1 else torch.cat(sent) if sent else tensors[0].new_empty(0)
        arrived = sent.new_empty(self._size)
        options = _BESIDE if overlap else _IN_LINE
        # The method of the group: torch.distributed.all_to_all_single checks and logs in Python
        work = self._ranks.group.alltoall_base(arrived, sent, *self._sizes, options)
        return Arriving(self._lengths, self._places, work, arrived, sent)


class Arriving:
    """An exchange that has been started."""

    def __init__(
        self,
        lengths: list[int],
        places: list[list[int]],
        work: dist.Work | None,
        arrived: torch.Tensor,
        sent: torch.Tensor,
    ):
        self._lengths, self._places = lengths, places
        self._work, self._arrived, self._sent = work, arrived, sent

    def wait(self) -> list[list[torch.Tensor]]:
        """Per tensor the flat rows that arrived."""
        if self._work is not None:
            self._work.wait()
        self._sent = None
        pieces = self._arrived.split_with_sizes(self._lengths) if self._lengths else ()
        return [[pieces[place] for place in places] for places in self._places]


def _options(overlap: bool) -> dist.AllToAllOptions:
    options = dist.AllToAllOptions()
    options.asyncOp = overlap
    return options


_BESIDE, _IN_LINE = _options(True), _options(False)


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts by their ranks."""
    return [list(run) for _, run in itertools.groupby(parts, key=lambda part: part.peer)]
