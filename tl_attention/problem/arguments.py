"""Types of command-line arguments: each turns a word into a value, or says what was expected."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable

from tl_attention.problem.attn_problem import DTYPES


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number from `least` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least:
            raise ArgumentTypeError(f"expected a whole number, at least {least}, got {text!r}")
        return number

    return parse


def dtype_name(text: str) -> str:
    """Name of a dtype from its name or short name: float16 from fp16. Other words are left as they are."""
    return next((dtype.name for dtype in DTYPES.values() if text == dtype.short), text)


def seconds(text: str) -> float:
    """90s, 10m, 1h or plain seconds, above 0."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        found = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ArgumentTypeError(f"expected a time such as 90s, 10m or 1h, above 0, got {text!r}")
    return found
