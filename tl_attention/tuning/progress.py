"""Progress of long work: a bar on a terminal, else lines of text, so that a log shows it too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
EVERY = 5.0  # seconds between lines


def track(results: Iterable[T], total: int, description: str, console: Console) -> Iterator[T]:
    """The results, with their number and the seconds so far on the console."""
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(results, total, description=description)
        return
    begin = shown = time.monotonic()
    console.print(f"{description}: 0/{total}", highlight=False, markup=False)
    for done, result in enumerate(results, 1):
        now = time.monotonic()
        if done == total or now >= shown + EVERY:
            shown = now
            console.print(
                f"{description}: {done}/{total}, {now - begin:.0f} s", highlight=False, markup=False
            )
        yield result
