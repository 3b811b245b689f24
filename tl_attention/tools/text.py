"""Text that commands print: lines within the columns of a terminal, which are whole in a pipe or a file, and JSON."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap

WHOLE = 1 << 20  # columns of a line that goes on without an end


def on_terminal() -> bool:
    """True if stdout is a terminal. It is None in a process that starts with it closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def columns() -> int:
    """Columns of the terminal; without one, more than any line has."""
    return shutil.get_terminal_size().columns if on_terminal() else WHOLE


def filled(words: str, first: str = "", rest: str = "") -> str:
    """Lines of words within the columns. first, rest: what the first line and the others begin with."""
    return textwrap.fill(
        words,
        max(columns(), len(rest) + 20),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(value: object) -> str:
    """Value in JSON, with dataclasses as objects and paths as their text."""
    return json.dumps(value, indent=2, default=_plain)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
