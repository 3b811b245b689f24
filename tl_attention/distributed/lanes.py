"""Launches side by side, on two streams.

A kernel ends when its last tiles do, and until then SMs without a tile are idle. A kernel on another stream gets them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Beside(threading.local):
    """Streams beside those of this thread.

    Memory that was allocated on a stream beside is allocated again only there, after side_by_side() has made it wait for what this thread
    had launched before. So results need no record_stream(), which would keep their memory until the GPU has caught up with the host.
    """

    def __init__(self):
        self._streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}

    def of(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = torch.cuda.Stream(stream.device)
        return found


_beside = Beside()


def side_by_side(launches: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
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
    return found
