"""Counters that CTAs draw numbers from, with the schedules dynamic and stream-K, and flags of the schedule stream-K."""

from __future__ import annotations

import itertools
import threading

import torch

# Rows per device, of counters alone and with flags. When streams and captured launches have used them up, each launch gets a new row,
# which a memset sets to 0
TICKET_ROWS, FLAG_ROWS = 1 << 15, 1 << 12
TICKETS = 2  # int32 per row of counters
_counters: dict[tuple[int, int], TicketCounters] = {}
_lock = threading.Lock()


class TicketCounters:
    """Counters of a device, and flags: rows of an int32 [n, numbers], zero while no kernel uses them.

    Kernels on one stream share a row, because they run one after the other. A captured launch gets a row of its own, because graphs
    may be replayed concurrently. Streams are told apart by their handles: the default streams of several threads (compiled with
    per-thread default streams) have one, so their launches must not overlap, and a stream must have ended before it is destroyed.
    """

    def __init__(self, device: int, numbers: int = TICKETS):
        self.length = TICKET_ROWS if numbers == TICKETS else FLAG_ROWS
        # Allocates in another thread: the current one may be filling the memory pool of a graph, which must not own the counters
        thread = threading.Thread(target=self._allocate, args=(device, numbers))
        thread.start()
        thread.join()
        self.unused = self.rows[0]  # for kernels that do not draw
        self.next_row = itertools.count(1)
        self.by_stream: dict[int, torch.Tensor] = {}

    def _allocate(self, device: int, numbers: int) -> None:
        self.rows = torch.zeros(self.length, numbers, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.current_stream(device).synchronize()

    def row(self) -> torch.Tensor:
        """A row that no launch has had."""
        number = next(self.next_row)
        return self.rows[number] if number < self.length else torch.zeros_like(self.rows[0])

    def of_current_stream(self, device: int) -> torch.Tensor:
        """The row of the current stream; a new one for a captured launch."""
        if torch.cuda.is_current_stream_capturing():
            return self.row()
        stream = torch._C._cuda_getCurrentRawStream(device)
        tickets = self.by_stream.get(stream)
        if tickets is None:
            tickets = self.by_stream.setdefault(stream, self.row())
        return tickets


def stream_tickets(device: int, draws: bool, numbers: int = TICKETS) -> torch.Tensor:
    """Tickets argument of a launch on the current stream of a device: int32 [numbers].

    Args:
        draws: the kernel draws from a counter, as with the schedules dynamic and stream-K; else it does not read its tickets.
        numbers: TICKETS; with the schedule stream-K one flag per SM more.
    """
    counters = _counters.get((device, numbers))
    if counters is None:
        # The first launch on a device, captured: a counter in the graph with a memset before each replay
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(numbers, dtype=torch.int32, device=f"cuda:{device}")
        with _lock:
            counters = _counters.get((device, numbers)) or TicketCounters(device, numbers)
            _counters[device, numbers] = counters
    return counters.of_current_stream(device) if draws else counters.unused
