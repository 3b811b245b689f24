"""Attention problems as text: their sizes, mask and options, and the named shapes of configs/shapes.toml."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tl_attention.config import configs
from tl_attention.problem.attn_problem import OPTIONS, AttnProblem
from tl_attention.problem.program import Program

# Measurable directions beside DECODE, named by their passes; det: gradients are bit-equal from call to call
DIRECTIONS = ("fwd", "bwd", "bwd_det", "fwd_bwd", "fwd_bwd_det")
RAGGED = 16  # largest ratio of two lengths of a ragged batch


def is_deterministic(direction: str) -> bool:
    """True for directions whose gradients must be bit-equal from call to call."""
    return direction.endswith("_det")


@dataclass(frozen=True)
class ShapeOptions:
    """Options of a problem beside its mask, written as words in this order: `window=1023,sink`."""

    window: int | None = None  # visible keys before the diagonal, and as many after it unless causal
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    dropout: float = 0.0
    varlen: bool = False  # packed sequences of one length
    uneven: bool = False  # packed sequences whose lengths are those of sequences()
    packed: bool = False  # q, k and v are slices of one tensor, as are their gradients
    page: int = 0  # decode, and forward of packed sequences: keys per page; 0: contiguous sequences
    ragged: bool = False  # decode: key lengths are those of sequences(), at most seqlen_k
    function: str = ""  # name of a score_mod, a mask or a bias, of testing/functions.py

    @classmethod
    def parse(cls, words: Sequence[str]) -> ShapeOptions:
        """Options from their words. Raises ValueError with the expected words."""
        asked: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name in asked:
                raise ValueError(f"expected each option once, got {name} twice")
            try:
                asked[name] = OPTION_TYPES[name](value)
            except (KeyError, ValueError):
                known = ", ".join(
                    name if kind is _flag else f"{name}=.." for name, kind in OPTION_TYPES.items()
                )
                raise ValueError(f"expected options of {known}, got {word!r}") from None
        return cls(**asked)

    @property
    def words(self) -> list[str]:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        asked = [(name, value) for name, value, default in values if value != default]
        return [name if value is True else f"{name}={str(value).removesuffix('.0')}" for name, value in asked]

    def __bool__(self) -> bool:
        return self != ShapeOptions()


def _flag(value: str) -> bool:
    if value:
        raise ValueError
    return True


def _size(value: str) -> int:
    if not value.isdecimal():
        raise ValueError
    return int(value)


def _cap(value: str) -> float:
    cap = float(value)
    if not 0 <= cap < math.inf:
        raise ValueError
    return cap


def _probability(value: str) -> float:
    probability = float(value)
    if not 0 <= probability < 1:
        raise ValueError
    return probability


def _name(value: str) -> str:
    if not value:
        raise ValueError
    return value


OPTION_TYPES: dict[str, Callable[[str], bool | int | float | str]] = {
    **dict.fromkeys((field.name for field in fields(ShapeOptions)), _flag),
    "window": _size,
    "page": _size,
    "softcap": _cap,
    "dropout": _probability,
    "function": _name,
}


@dataclass(frozen=True)
class Shape:
    """Sizes and mask of an attention problem, written `B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]` with mask causal or full."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int  # the mean of uneven lengths
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    options: ShapeOptions = ShapeOptions()

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape from its text. Raises ValueError with the expected form and the fault."""
        words = [word.strip() for word in text.split(",")]
        named = next((i for i, word in enumerate(words) if word in ("causal", "full")), len(words) - 1)
        sizes, mask, options = words[:named], words[named], words[named + 1 :]
        complaint = f"shape {text!r}: expected B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]"
        if mask not in ("causal", "full"):
            raise ValueError(f"{complaint} with mask causal or full, got {mask!r}")
        if len(sizes) not in (6, 7):
            raise ValueError(f"{complaint}: 6 or 7 numbers and a mask, got {len(sizes)} numbers")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"{complaint} with positive whole numbers")
        numbers = [int(size) for size in sizes]
        if numbers[1] % numbers[2]:
            raise ValueError(f"{complaint} with Hq a multiple of Hkv, got {numbers[1]} and {numbers[2]}")
        try:
            asked = ShapeOptions.parse(options)
        except ValueError as error:
            raise ValueError(f"{complaint}: {error}") from None
        if asked.uneven and numbers[3] != numbers[4]:
            raise ValueError(
                f"{complaint}: uneven lengths with Sq equal to Sk, got {numbers[3]} and {numbers[4]}"
            )
        if asked.packed and (
            numbers[1] != numbers[2] or numbers[3] != numbers[4] or numbers[-1] != numbers[5]
        ):
            raise ValueError(f"{complaint}: packed with q, k and v of one size")
        return cls(*numbers[:6], numbers[-1], mask == "causal", asked)

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def plain(self) -> Shape:
        """The same sizes and mask without options; all sequences have one length."""
        return replace(self, options=ShapeOptions())

    @property
    def window_size(self) -> tuple[int, int]:
        """FlashAttention's (left, right), -1 where unbounded. Causal alone sets no bound here."""
        left = -1 if self.options.window is None else self.options.window
        return left, 0 if self.causal and left >= 0 else left

    @property
    def window_keys(self) -> int:
        """Keys in the window; 0 without one."""
        return 0 if self.options.window is None else sum(self.window_size) + 1

    @property
    def is_varlen(self) -> bool:
        return self.options.varlen or self.options.uneven

    @property
    def option_names(self) -> tuple[str, ...]:
        """The OPTIONS that are on."""
        asked = self.options
        on = {
            "window": asked.window is not None,
            "softcap": asked.softcap,
            "alibi": asked.alibi,
            "sink": asked.sink,
            "dropout": asked.dropout,
            "varlen": self.is_varlen,
        }
        return tuple(name for name in OPTIONS if on[name])

    def problem(self, dtype: str, direction: str = "fwd", program: Program | None = None) -> AttnProblem:
        """The problem that kernels are compiled for. A window implies causal by its right bound; a backward finds the sink in the lse.

        Args:
            program: that of the functions of a call.
        """
        options = tuple(name for name in self.option_names if name != "sink" or direction == "fwd")
        causal = self.causal and "window" not in options
        return AttnProblem.of(dtype, self.head_dim, self.head_dim_v, causal, direction, options, program)

    def __str__(self) -> str:
        sizes = (getattr(self, field.name) for field in fields(self)[:7])
        return ",".join([*map(str, sizes), self.mask, *self.options.words])


def chosen_shapes(
    texts: Sequence[str], named: Mapping[str, str] | None = None, where: str = ""
) -> dict[str, Shape]:
    """Name -> shape, from names, patterns and literal shapes, separated by spaces or semicolons.

    Args:
        named: name -> text of a shape; default: those of configs/shapes.toml.
        where: file of the named shapes, for the error.
    Raises:
        ValueError: an unknown name, or a text that is no shape.
    """
    chosen = {}
    if named is None:
        named = configs.named_shapes()
        where = f"configs/shapes.toml, which has {', '.join(_groups(named))}"
    for text in " ".join(texts).replace(";", " ").split():
        if "," in text:
            chosen[text] = Shape.parse(text)
            continue
        if not (names := fnmatch.filter(named, text)):
            close = difflib.get_close_matches(text, named, n=3)
            form = "or write it as B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]"
            hint = f"did you mean {' or '.join(close)}?" if close else form
            raise ValueError(f"shape {text!r}: not in {where}; {hint}")
        chosen |= {name: Shape.parse(named[name]) for name in names}
    return chosen


def _groups(names: Iterable[str]) -> list[str]:
    """One pattern per first word that several names share, beside the names of their own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("-")[0], []).append(name)
    return [f"{word}-*" if len(group) > 1 else group[0] for word, group in groups.items()]


@functools.cache
def sequences(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(seqlen_q, seqlen_k) per batch entry, always the same for a shape.

    Uneven lengths are log-normal with sigma 1, like documents, and sum to batch x seqlen. Ragged lengths are those of the keys
    alone, log-uniform from seqlen_k / RAGGED to seqlen_k, the first one the longest.
    """
    generator = random.Random(0)
    if shape.options.ragged:
        shares = [1.0, *(RAGGED ** -generator.random() for _ in range(shape.batch - 1))]
        return tuple((shape.seqlen_q, max(shape.seqlen_q, round(shape.seqlen_k * share))) for share in shares)
    if not shape.options.uneven:
        return ((shape.seqlen_q, shape.seqlen_k),) * shape.batch
    weights = [generator.lognormvariate(0, 1) for _ in range(shape.batch)]
    spare = shape.batch * (shape.seqlen_q - 1)  # each has at least one token
    ends = [round(spare * sum(weights[: i + 1]) / sum(weights)) for i in range(shape.batch)]
    return tuple((1 + end - begin,) * 2 for begin, end in zip([0, *ends], ends, strict=False))
