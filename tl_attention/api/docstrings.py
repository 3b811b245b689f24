"""Docstrings of functions that share options: each has the entries of its own parameters, and gets those of the options that it takes."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable

COLUMNS = 96  # of an entry in help()
_SECTION = re.compile(r"^(Args|Returns|Raises):\n", re.MULTILINE)
_ENTRY = re.compile(r"\n(?= {4}\S)")


def complete(shared: str | None, *functions: Callable[..., object]) -> None:
    """Add to the docstring of functions the options that they take and leave out, and the results and errors where one has none.

    Args:
        shared: docstring with entries for all options; None under python -OO.
        functions: their docstrings may have Args, Returns and Raises, as this one has Args.
    """
    for function in functions:
        if shared is not None and function.__doc__ is not None:
            function.__doc__ = _completed(function, function.__doc__, shared)


def _completed(function: Callable[..., object], docstring: str, shared: str) -> str:
    """Docstring of a function with all of its parameters in their order."""
    own, common = _sections(docstring), _sections(shared)
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
    texts = (f"{name}:\n{text}" for name, text in sections.items())
    return "\n".join([own[""].rstrip("\n"), "", *texts, ""])


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
