"""Variables of the environment that are 1 or 0."""

from __future__ import annotations

import os


def switch(name: str, default: bool = False) -> bool:
    """True if the variable is 1, False if it is 0, `default` if it is unset or empty.

    Raises:
        ValueError: it has another value, such as "true".
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"{name}: expected 0 or 1 in the environment, got {value!r}; set one of them, or unset it"
        )
    return value == "1" if value else default
