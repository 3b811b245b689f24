"""Launches side by side, on two streams.

A kernel ends when its last tiles do, and until then SMs without a tile are idle. A kernel on another stream gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Results = tuple[torch.Tensor | None, ...]
_beside: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def stream_beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The second stream of a stream, always the same one."""
    found = _beside.get(stream)
    return found or _beside.setdefault(stream, torch.cuda.Stream(stream.device))


def side_by_side(launches: Sequence[Callable[[], Results]], device: torch.device) -> list[Results]:
    """Results of launches, in their order.

    On a GPU every second one is launched on a stream beside the current one, which waits for all. Kernels get SMs in the order of
    `launches`, so the one with the longest tiles comes first. No launch may need the results of another.
    """
    if device.type != "cuda" or len(launches) < 2:
        return [launch() for launch in launches]
    current, found = torch.cuda.current_stream(device), []
    beside = stream_beside(current)
    beside.wait_stream(current)
    try:
        for number, launch in enumerate(launches):
            with torch.cuda.stream(beside if number % 2 else current):
                found.append(launch())
    finally:
        current.wait_stream(beside)
    for results in found[1::2]:
        for x in results:
            if x is not None:
                x.record_stream(current)
    return found
