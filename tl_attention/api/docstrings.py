"""Docstrings of functions that share options: each has the entries of its own parameters, and gets those of the options that it takes."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable

COLUMNS = 96  # of an entry in help()
_SECTION = re.compile(r"^(Args|Returns|Raises):\n", re.MULTILINE)
_ENTRY = re.compile(r"\n(?= {4}\S)")


def complete(function: Callable[..., object], shared: str | None) -> None:
    """Add to a function's docstring the options that it takes and leaves out, and the results and errors if it has none.

    Args:
        function: its docstring may have Args, Returns and Raises, as that of this function has Args.
        shared: docstring with entries for all options; None under python -OO.
    """
    if shared is None or function.__doc__ is None:
        return
    own, common = _sections(function.__doc__), _sections(shared)
    names = list(inspect.signature(function).parameters)
    known = _entries(own.get("Args", ""))
    documented = {name for entry in known for name in entry}
    known |= {
        entry: text
        for entry, text in _entries(common["Args"]).items()
        if documented.isdisjoint(entry) and entry[0] in names
    }
    arguments = (_filled(known[entry]) for entry in sorted(known, key=lambda entry: names.index(entry[0])))
    sections = {
        "Args": "\n".join(arguments),
        "Returns": own.get("Returns") or _filled(common["Returns"]),
        "Raises": own.get("Raises") or common["Raises"],
    }
    function.__doc__ = "\n".join(
        [own[""].rstrip("\n"), "", *(f"{name}:\n{text}" for name, text in sections.items()), ""]
    )


def _sections(docstring: str) -> dict[str, str]:
    """Text of each section by its name, and under "" the text before them."""
    start, *others = _SECTION.split(inspect.cleandoc(docstring))
    return {"": start} | {
        name: text.rstrip("\n") for name, text in zip(others[::2], others[1::2], strict=True)
    }


def _entries(arguments: str) -> dict[tuple[str, ...], str]:
    """Entries of a section Args by the names that they document."""
    found = _ENTRY.split(arguments) if arguments else []
    return {tuple(entry.partition(":")[0].strip().split(", ")): entry for entry in found}


def _filled(entry: str) -> str:
    return textwrap.fill(
        " ".join(entry.split()),
        COLUMNS,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
