"""Tile counters of the dynamic kernels."""

from __future__ import annotations

import itertools
import threading

import torch

# Counters a device has; when streams and captured launches have used them up, a new one is a memset before its launch
TICKET_ROWS = 1 << 15
_offices: dict[int, TicketOffice] = {}
_lock = threading.Lock()


class TicketOffice:
    """The counters of the dynamic kernels of a device: rows of one int32 [n, 2], zero whenever no kernel runs with them.

    Kernels on one stream share a row, as they run one after the other; a captured launch has a row of its own, as graphs may be
    replayed beside each other.
    """

    def __init__(self, device: int):
        # In a thread of its own: this one may be filling the memory pool of a graph, which must not own the counters
        thread = threading.Thread(target=self._allocate, args=(device,))
        thread.start()
        thread.join()
        self.idle = self.rows[0]  # for kernels that draw none
        self.next_row = itertools.count(1)
        self.of_stream: dict[int, torch.Tensor] = {}

    def _allocate(self, device: int) -> None:
        self.rows = torch.zeros(TICKET_ROWS, 2, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.current_stream(device).synchronize()

    def row(self) -> torch.Tensor:
        number = next(self.next_row)
        return self.rows[number] if number < TICKET_ROWS else torch.zeros_like(self.rows[0])

    def tickets(self, device: int, dynamic: bool) -> torch.Tensor:
        if not dynamic:
            return self.idle
        if torch.cuda.is_current_stream_capturing():
            return self.row()
        stream = torch._C._cuda_getCurrentRawStream(device)
        tickets = self.of_stream.get(stream)
        if tickets is None:
            tickets = self.of_stream.setdefault(stream, self.row())
        return tickets


def stream_tickets(device: int, dynamic: bool) -> torch.Tensor:
    office = _offices.get(device)
    if office is None:
        # No call came before: a memset in the graph, before each launch
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
        with _lock:
            office = _offices.get(device) or _offices.setdefault(device, TicketOffice(device))
    return office.tickets(device, dynamic)
