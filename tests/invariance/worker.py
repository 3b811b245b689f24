"""Worker of the rearrangements: runs shares of draws that it reads from stdin, and writes a line to the parent before each."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matrix.memory import forget_plans
from matrix.worker import is_lost, line_to_parent

from .arrangements import Arrangement, Sequences
from .draws import Draw, OptionSet, Run, draw_of

MAX_TEXT = 600  # characters of a fault
MOST_TEXTS = 3  # calls of a draw that a fault names
COUNTS = ("draws", "comparisons", "rows", "failures")

Say = Callable[..., None]


@dataclass(frozen=True)
class Share:
    """Draws first to last - 1 of some options. Its id says so."""

    options: str
    first: int
    last: int

    @property
    def id(self) -> str:
        return f"{self.options} {self.first} {self.last}"

    @classmethod
    def of(cls, text: str) -> Share:
        options, first, last = text.split()
        return cls(options, int(first), int(last))


@torch.no_grad()
def run_draw(draw: Draw, sequences: Sequences, counts: Counter[str]) -> str:
    """Make the calls of a draw, and count. Returns what differs."""
    counts[f"{draw.column}|draws"] += 1
    compared = Arrangement(sequences, draw).run()
    counts[f"{draw.column}|comparisons"] += len(compared)
    counts[f"{draw.column}|rows"] += sum(one.out.numel() for one in compared)
    if not compared:
        return ""
    wrong = torch.stack([one.out.sum() + one.lse.sum() for one in compared]).tolist()
    found = [one.text() for one, n in zip(compared, wrong, strict=True) if n]
    more = f"; and {len(found) - MOST_TEXTS} more" if len(found) > MOST_TEXTS else ""
    return f"{'; '.join(found[:MOST_TEXTS])}{more}"[:MAX_TEXT] if found else ""


def run_share(run: Run, share: Share, device: str, say: Say) -> None:
    """Run the draws of a share and say how they ended. A fault of a draw does not stop the others, an error of CUDA does."""
    begin, failures, counts = time.monotonic(), [], Counter()
    options, sequences = OptionSet(share.options), None
    forget_plans()
    for index in range(share.first, share.last):
        draw = draw_of(run, options, index)
        say("at", draw=index, text=str(draw))
        try:
            if sequences is None or sequences.drawn != draw.sequences:
                sequences = None  # its memory serves the next one
                sequences = Sequences(run, options, draw.sequences, device)
            fault = run_draw(draw, sequences, counts)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            fault = f"{type(error).__name__}: {error} ({place})"[:MAX_TEXT]
        if fault:
            counts[f"{draw.column}|failures"] += 1
            failures.append((index, str(draw), fault))
            if device != "cpu" and is_lost():
                seconds = time.monotonic() - begin
                done = index + 1 - share.first
                say("end", failures=failures, draws=done, launches=counts, seconds=seconds, lost=True)
                os._exit(1)
    seconds = time.monotonic() - begin
    say("end", failures=failures, draws=share.last - share.first, launches=counts, seconds=seconds)


def main(run: Run, device: str) -> None:
    """Run shares by their ids in lines of JSON, until stdin ends."""
    say = line_to_parent()
    torch.set_num_threads(1)
    gpu = "no GPU" if device == "cpu" else torch.cuda.get_device_name()
    torch.ones(64, 64, device=device).matmul(torch.ones(64, 64, device=device)).sum().item()
    say("ready", gpu=gpu)
    for line in sys.stdin:
        run_share(run, Share.of(json.loads(line)["id"]), device, say)
