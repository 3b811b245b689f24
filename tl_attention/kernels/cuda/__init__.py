"""CUDA C++ in front of kernels, one file per idea.

The head of a file ends at its first blank line: a comment, and the headers that the file needs where it is compiled alone. A kernel gets
what follows, and its hash covers it. A name in capitals that no header defines stands for a number of Python.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent


@functools.cache
def source(name: str, **values: object) -> str:
    """Text of a file in front of a kernel, from the blank line on that ends its head. values: of names in capitals."""
    text = (FOLDER / f"{name}.cuh").read_text(encoding="utf-8")
    return fill(text[text.index("\n\n") + 1 :], **values)


def fill(text: str, **values: object) -> str:
    """Text with values in the place of names, where it has them."""
    for name, value in values.items():
        text = re.sub(rf"\b{name}\b", str(value), text)
    return text
