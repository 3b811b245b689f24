"""Attention problems as text: their sizes, mask and options, and the named shapes of configs/shapes.toml."""

from __future__ import annotations

import fnmatch
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from tl_attention import configs
from tl_attention.problem import OPTIONS, AttnProblem

# What can be measured beside DECODE, named by its passes; det: gradients that are equal bit by bit from call to call.
DIRECTIONS = ("fwd", "bwd", "bwd_det", "fwd_bwd", "fwd_bwd_det")
RAGGED = 16  # the shortest of ragged lengths is not shorter than this part of the longest


def is_deterministic(direction: str) -> bool:
    """Whether its gradients must be equal bit by bit."""
    return direction.endswith("_det")


@dataclass(frozen=True)
class ShapeOptions:
    """What a problem asks beside its mask, written as words in this order: `window=1023,sink`."""

    window: int | None = (
        None  # keys that a query sees before the diagonal, and as many after it unless causal
    )
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    dropout: float = 0.0
    varlen: bool = False  # the batch is packed sequences, of one length
    uneven: bool = False  # the batch is packed sequences, of the lengths of `sequences`
    packed: bool = False  # q, k and v are slices of one tensor, as are their gradients
    page: int = 0  # decode: keys of a page of the cache; 0: each sequence lies in one piece
    ragged: bool = False  # decode: sequences of the lengths of `sequences`, seqlen_k at most

    @classmethod
    def parse(cls, words: Sequence[str]) -> ShapeOptions:
        """Raises ValueError with the words expected."""
        asked: dict[str, bool | int | float] = {}
        for word in words:
            name, _, value = word.partition("=")
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


OPTION_TYPES: dict[str, Callable[[str], bool | int | float]] = {
    **dict.fromkeys((field.name for field in fields(ShapeOptions)), _flag),
    "window": _size,
    "page": _size,
    "softcap": float,
    "dropout": float,
}


@dataclass(frozen=True)
class Shape:
    """An attention problem and its sizes, written `B,Hq,Hkv,Sq,Sk,D[,Dv],mask[,option..]` with mask causal or full."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int  # the mean, where the lengths are uneven
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    options: ShapeOptions = ShapeOptions()

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Raises ValueError with the form expected and what is wrong."""
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
        """The same sizes and mask without options; sequences of one length each instead of uneven ones."""
        return replace(self, options=ShapeOptions())

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right) as FlashAttention has it, -1 without a bound; causal itself bounds nothing here."""
        left = -1 if self.options.window is None else self.options.window
        return left, 0 if self.causal and left >= 0 else left

    @property
    def is_varlen(self) -> bool:
        return self.options.varlen or self.options.uneven

    @property
    def option_names(self) -> tuple[str, ...]:
        """What of OPTIONS it asks for."""
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

    def problem(self, dtype: str, direction: str = "fwd") -> AttnProblem:
        """What kernels are compiled for: the right end of a window stands for causal, and a backward finds a sink in the log-sum-exp."""
        options = tuple(name for name in self.option_names if name != "sink" or direction == "fwd")
        causal = self.causal and "window" not in options
        return AttnProblem.of(dtype, self.head_dim, self.head_dim_v, causal, direction, options)

    def __str__(self) -> str:
        sizes = (getattr(self, field.name) for field in fields(self)[:7])
        return ",".join([*map(str, sizes), self.mask, *self.options.words])


def chosen_shapes(
    texts: Sequence[str], named: Mapping[str, str] | None = None, where: str = ""
) -> dict[str, Shape]:
    """Name -> shape, of names and patterns and literal shapes, split by space or ;

    Args:
        named: name -> text of a shape, and where they are in words; default: what configs/shapes.toml has.
    Raises:
        ValueError: nothing has this name, or the text is no shape.
    """
    chosen = {}
    if named is None:
        named = configs.named_shapes()
        where = f"configs/shapes.toml, which has {', '.join(named)}"
    for text in " ".join(texts).replace(";", " ").split():
        if "," in text:
            chosen[text] = Shape.parse(text)
            continue
        if not (names := fnmatch.filter(named, text)):
            raise ValueError(f"shape {text!r}: not in {where}")
        chosen |= {name: Shape.parse(named[name]) for name in names}
    return chosen


@functools.cache
def sequences(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(seqlen_q, seqlen_k) of each entry of the batch.

    Uneven lengths are log-normal with sigma 1, as documents are, always the same, and sum to batch x seqlen. Ragged ones are of
    keys alone, log-uniform from a RAGGED-th of seqlen_k up to it, always the same, the first the longest.
    """
    generator = random.Random(0)
    if shape.options.ragged:
        shares = [1.0, *(RAGGED ** -generator.random() for _ in range(shape.batch - 1))]
        return tuple((shape.seqlen_q, max(shape.seqlen_q, round(shape.seqlen_k * share))) for share in shares)
    if not shape.options.uneven:
        return ((shape.seqlen_q, shape.seqlen_k),) * shape.batch
    weights = [generator.lognormvariate(0, 1) for _ in range(shape.batch)]
    spare = shape.batch * (shape.seqlen_q - 1)  # each has one token at least
    ends = [round(spare * sum(weights[: i + 1]) / sum(weights)) for i in range(shape.batch)]
    return tuple((1 + end - begin,) * 2 for begin, end in zip([0, *ends], ends, strict=False))
