"""Types and actions of command-line arguments: each turns words into values, or says what was expected."""

from __future__ import annotations

import itertools
import math
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from tl_attention.problem.attn_problem import DTYPES

# Other names of dtypes, those of torch. Plain fp32 is "highest", the default precision of products in torch
OTHER_DTYPE_NAMES = {
    "half": "float16",
    **dict.fromkeys(("float", "float32", "fp32"), "float32-highest"),
}


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


def folder(text: str) -> Path:
    """The path of a folder."""
    if not text:
        raise ArgumentTypeError("expected a folder, '.' for the current one, got ''")
    return Path(text)


def dtype_name(text: str) -> str:
    """Name of a dtype from its name, a short or another name: float16 from fp16, half or torch.half. Other words are left as they are."""
    word = text.removeprefix("torch.")
    names = OTHER_DTYPE_NAMES | {dtype.short: dtype.name for dtype in DTYPES.values()}
    name = names.get(word, word)
    return name if name in DTYPES else text


def short_dtype_name(text: str) -> str:
    """Short name of a dtype from any of its names: bf16 from bfloat16. Other words are left as they are."""
    name = dtype_name(text)
    return DTYPES[name].short if name in DTYPES else text


def has_words(name: object, words: Sequence[str]) -> bool:
    """True if the text of a kernel or a row has all of these words; dtypes may have any of their names."""
    return set(map(short_dtype_name, words)) <= set(str(name).split())


class PassWords(Action):
    """Argument --pass: passes, up to the first word that is none; it and all after it are among the WORDs of the command.

    Args:
        passes: accepted words.
        others: attribute of the WORDs; None: the command has none.
    """

    def __init__(
        self, *args: object, passes: Sequence[str], others: str | None = None, **kwargs: object
    ) -> None:
        super().__init__(*args, nargs="+", **kwargs)
        self.passes, self.others = passes, others

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Sequence[str],
        option_string: str | None = None,
    ) -> None:
        found = list(itertools.takewhile(self.passes.__contains__, values))
        rest = values[len(found) :]
        if not found or (rest and self.others is None):
            raise ArgumentError(self, f"expected some of {', '.join(self.passes)}, got {rest[0]!r}")
        setattr(namespace, self.dest, found)
        if rest:
            setattr(namespace, self.others, [*(getattr(namespace, self.others, None) or ()), *rest])


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
