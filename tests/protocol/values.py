"""Values of a warp: integers are real, contents of float tensors are UNKNOWN, and a policy answers conditions on them."""

from __future__ import annotations

import math
import operator
import struct
from dataclasses import dataclass, replace
from typing import Any


class Unknown:
    """Result of a computation on data that the model does not have."""

    def _same(self, *_: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __abs__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __and__ = __rand__ = __or__ = __ror__ = _same
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __invert__ = _same
    __hash__ = None

    def __bool__(self) -> bool:
        raise TypeError("a condition on unknown data has to ask the policy")

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()


class Variable(dict):
    """Variable of a warp, or a small array in its registers, by indices. What was never set is UNKNOWN."""

    def __missing__(self, key: tuple) -> Any:
        return UNKNOWN


@dataclass(frozen=True)
class Address:
    """Address in shared memory.

    Args:
        offset: bytes from the start of the buffer.
        slot_bytes: bytes per slot; 0: the buffer has one.
        inner: slots along a second dimension of them; 0: there is none.
    """

    buffer: str
    offset: int
    slot_bytes: int
    inner: int = 0

    def __add__(self, offset: int) -> Address:
        return replace(self, offset=self.offset + offset)

    __radd__ = __add__

    @property
    def tile(self) -> tuple[str, int | tuple[int, int]]:
        """(buffer, slot)"""
        slot = self.offset // self.slot_bytes if self.slot_bytes else 0
        return self.buffer, divmod(slot, self.inner) if self.inner else slot


@dataclass(frozen=True)
class Place:
    """Address of an int32 in global memory."""

    tensor: str
    index: int

    def __add__(self, offset: int) -> Place:
        return replace(self, index=self.index + offset)


def known(*values: Any) -> bool:
    for value in values:  # noqa: SIM110 (all() of a generator takes three times as long)
        if isinstance(value, Unknown):
            return False
    return True


def truncdiv(a: Any, b: Any) -> Any:
    if not known(a, b):
        return UNKNOWN
    if isinstance(a, float) or isinstance(b, float):
        return a / b if b else math.copysign(math.inf, a)
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def truncmod(a: Any, b: Any) -> Any:
    return a - truncdiv(a, b) * b if known(a, b) else UNKNOWN


def least(a: Any, b: Any) -> Any:
    return min(a, b) if known(a, b) else UNKNOWN


def largest(a: Any, b: Any) -> Any:
    return max(a, b) if known(a, b) else UNKNOWN


def both(a: Any, b: Any) -> Any:
    if (known(a) and not a) or (known(b) and not b):
        return False
    return True if known(a, b) else UNKNOWN


def either(a: Any, b: Any) -> Any:
    if (known(a) and a) or (known(b) and b):
        return True
    return False if known(a, b) else UNKNOWN


def opposite(a: Any) -> Any:
    return not a if known(a) else UNKNOWN


def cast(a: Any, kind: str) -> Any:
    if not known(a):
        return UNKNOWN
    return bool(a) if kind == "bool" else int(a) if "int" in kind else float(a)


def compute(name: str, kind: str, *args: Any) -> Any:
    """A function of floats. UNKNOWN where it has no value, or is none of FLOAT_FUNCTIONS."""
    if not known(*args) or name not in FLOAT_FUNCTIONS:
        return UNKNOWN
    try:
        return FLOAT_FUNCTIONS[name](kind, *args)
    except (ArithmeticError, ValueError, struct.error):
        return UNKNOWN


def reinterpret(kind: str, a: float | int) -> float | int:
    """The bits of an fp32 number as an int32, or back."""
    formats = ("<f", "<i") if "int" in kind else ("<i", "<f")
    return struct.unpack(formats[1], struct.pack(formats[0], a))[0]


FLOAT_FUNCTIONS = {
    "exp2": lambda _, a: 2.0**a,
    "log2": lambda _, a: math.log2(a),
    "exp": lambda _, a: math.exp(a),
    "log": lambda _, a: math.log(a),
    "sqrt": lambda _, a: math.sqrt(a),
    "tanh": lambda _, a: math.tanh(a),
    "reinterpret": reinterpret,
}
BINARY = {
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "shift_left": operator.lshift,
    "shift_right": operator.rshift,
}
