"""Recognition of programs that the options of attention compute, whose kernels skip what is hidden and are faster."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tl_attention.checks import MAX_SOFTCAP, MIN_SOFTCAP
from tl_attention.options import UNLIMITED
from tl_attention.program import Call


class BuiltinOptions(NamedTuple):
    """Options of attention that are equal to a program. The diagonals agree only if seqlen_q and seqlen_k are equal."""

    causal: bool = False
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self == BuiltinOptions(self.causal)


def builtin_options(call: Call, same_length: bool) -> BuiltinOptions | None:
    """Options that compute the program of a call; None if none do, a captured tensor needs a gradient or blocks are listed.

    Args:
        same_length: seqlen_q and seqlen_k are equal; else only programs without a mask are recognised.
    """
    program = call.program
    if program.gradients or program.listed:
        return None
    found = BuiltinOptions()
    if program.mask is not None:
        mask = _tree(call, program.mask)
        if not same_length:
            return None
        if _is_causal(mask):
            found = found._replace(causal=True)
        elif (left := _window(mask)) is not None:
            found = found._replace(window=(left, 0))
        else:
            return None
    if program.score is None:
        return found
    score = _tree(call, program.score)
    if (cap := _softcap(score)) is not None:
        return found._replace(softcap=cap)
    if found.causal and (slopes := _slopes(score)) is not None:
        return found._replace(alibi_slopes=slopes)
    return None


def _tree(call: Call, i: int) -> Any:
    """Value as nested tuples (operation, operands..); numbers and constants as numbers, tensors as themselves, without casts."""
    value = call.program.values[i]
    if value.op == "constant":
        return value.data
    if value.op == "number":
        return call.numbers[value.data]
    operands = tuple(_tree(call, arg) for arg in value.args)
    if value.op == "load":
        return "load", call.tensors[value.data], *operands
    return operands[0] if value.op == "cast" else (value.op, *operands)


QUERY, KEY, HEAD, SCORE = ("query",), ("key",), ("head",), ("score",)


def _is_causal(tree: Any) -> bool:
    return tree in (("ge", QUERY, KEY), ("le", KEY, QUERY))


def _window(tree: Any) -> int | None:
    """Keys left of the diagonal of a causal window."""
    if not isinstance(tree, tuple) or tree[0] != "and":
        return None
    for one, other in (tree[1:], tree[:0:-1]):
        if _is_causal(one) and isinstance(other, tuple) and len(other) == 3:
            op, x, y = other
            left = None
            if x == ("sub", QUERY, KEY) and op in ("lt", "le"):
                left = y if op == "le" else _minus_1(y)
            elif x == KEY and op in ("gt", "ge") and isinstance(y, tuple) and y[:2] == ("sub", QUERY):
                left = y[2] if op == "ge" else _minus_1(y[2])
            if type(left) is int and left >= 0:
                return left
    return None


def _minus_1(x: Any) -> int | None:
    return x - 1 if type(x) is int else None


def _softcap(tree: Any) -> float | None:
    """Value of c in c * tanh(score / c)."""
    if not isinstance(tree, tuple) or tree[0] != "mul":
        return None
    for factor, other in (tree[1:], tree[:0:-1]):
        is_cap = type(factor) in (int, float) and MIN_SOFTCAP <= factor <= MAX_SOFTCAP
        if is_cap and other == ("tanh", ("div", SCORE, factor)):
            return float(factor)
    return None


def _slopes(tree: Any) -> torch.Tensor | None:
    """Slopes per head in score + slopes[h] * (kv_idx - q_idx)."""
    if not isinstance(tree, tuple) or tree[0] != "add":
        return None
    for one, other in (tree[1:], tree[:0:-1]):
        if one == SCORE and isinstance(other, tuple) and other[0] == "mul":
            for load, distance in (other[1:], other[:0:-1]):
                is_load = isinstance(load, tuple) and load[0] == "load" and load[2:] == (HEAD,)
                if is_load and distance == ("sub", KEY, QUERY) and load[1].dtype == torch.float32:
                    return load[1]
    return None
