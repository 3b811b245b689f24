"""Launches side by side, on two streams.

A kernel ends when its last tiles do, and until then SMs without a tile are idle. A kernel on another stream gets them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

Results = tuple[torch.Tensor | None, ...]


class Beside(threading.local):
    """Streams beside those of this thread."""

    def __init__(self):
        self._streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}

    def of(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = torch.cuda.Stream(stream.device)
        return found


_beside = Beside()


def side_by_side(launches: Sequence[Callable[[], Results]], device: torch.device) -> list[Results]:
    """Results of launches, in their order.

    On a GPU every second one is launched on a stream beside the current one, which waits for all. Kernels get SMs in the order of
    `launches`, so the one with the longest tiles comes first. No launch may need the results of another, and results are for the current
    stream alone.
    """
    if device.type != "cuda" or len(launches) < 2:
        return [launch() for launch in launches]
    current, found = torch.cuda.current_stream(device), []
    beside = _beside.of(current)
    beside.wait_stream(current)
    try:
        for number, launch in enumerate(launches):
            with torch.cuda.stream(beside if number % 2 else current):
                found.append(launch())
    finally:
        current.wait_stream(beside)
    # PyTorch hands out a few streams in turns: another part of the program may allocate on this one
    for results in found[1::2]:
        for x in results:
            if x is not None:
                x.record_stream(current)
    return found
