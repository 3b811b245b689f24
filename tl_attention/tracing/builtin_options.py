"""Recognition of programs that equal options of attention, whose kernels skip hidden blocks and are faster."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from tl_attention.problem.options import MAX_SOFTCAP, MIN_SOFTCAP, UNLIMITED
from tl_attention.problem.program import BOOL, FLOAT, INT, LONG, Call, Program
from tl_attention.tracing.program_values import program_values

EXACT_CASTS = {(INT, LONG), (INT, FLOAT), (LONG, FLOAT)}  # exact for positions, which are below 2**24
MAX_CONSTANT = 2**28
MAX_EXACT = 2**24  # integers up to it are exact in fp32
OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


class BuiltinOptions(NamedTuple):
    """Options of attention that are equal to a program, aligned bottom-right as those of flash_attn_func."""

    causal: bool = False
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.alibi_slopes is None and not self.softcap and self.window == (UNLIMITED, UNLIMITED)

    def __str__(self) -> str:
        """Arguments of flash_attn_func."""
        words = ["causal=True"] if self.causal else []
        if self.window != (UNLIMITED, UNLIMITED):
            words.append(f"window_size={self.window}")
        if self.softcap:
            words.append(f"softcap={self.softcap}")
        if self.alibi_slopes is not None:
            words.append(f"alibi_slopes={tuple(self.alibi_slopes.shape)}")
        return ", ".join(words) or "no options"


class _Line(NamedTuple):
    """query * q_idx + key * kv_idx + constant, of integers."""

    query: int = 0
    key: int = 0
    constant: int = 0

    def plus(self, other: _Line, sign: int = 1) -> _Line:
        return _Line(*(x + sign * y for x, y in zip(self, other, strict=True)))

    def bound(self, length: int) -> int:
        """Upper bound of its absolute value for positions below length."""
        slopes = self.query, self.key
        return max(sum(x for x in slopes if x > 0), -sum(x for x in slopes if x < 0)) * length + abs(
            self.constant
        )


class _Distances(NamedTuple):
    """Values of q_idx - kv_idx at which a mask shows a key, both included; None: no bound."""

    least: int | None = None
    most: int | None = None

    def both(self, other: _Distances) -> _Distances:
        least = [x for x in (self.least, other.least) if x is not None]
        most = [x for x in (self.most, other.most) if x is not None]
        return _Distances(max(least, default=None), min(most, default=None))


class _Bias(NamedTuple):
    """A bias per head: product of `factors`, times `sign`, times a linear function or its absolute value."""

    factors: tuple[int, ...]  # values that depend on the head and the batch entry alone
    sign: int
    line: _Line
    is_absolute: bool


class Recognized(NamedTuple):
    """Options that compute a program, but for the slopes of ALiBi, which are values of a call.

    Args:
        bias: whose slopes these are; None: there is no ALiBi.
    """

    options: BuiltinOptions
    bias: _Bias | None = None

    def of(self, call: Call, batch: int, heads: int, device: torch.device | None) -> BuiltinOptions:
        """Options of a call of the program. batch, heads, device: of the query."""
        if self.bias is None:
            return self.options
        return self.options._replace(alibi_slopes=_slopes(call, self.bias, batch, heads, device))


def builtin_options(
    call: Call,
    seqlen_q: int,
    seqlen_k: int,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | None = None,
) -> BuiltinOptions | None:
    """Options that compute the program of a call; None if none do, a captured tensor needs a gradient or blocks are listed.

    Args:
        batch, heads, device: of the query, for the slopes of ALiBi.
    """
    found = recognized(call, seqlen_q, seqlen_k)
    return None if found is None else found.of(call, batch, heads, device)


def recognized(call: Call, seqlen_q: int, seqlen_k: int) -> Recognized | None:
    """Options for all calls of a program with the same numbers; None as in builtin_options."""
    program = call.program
    if program.gradients or program.listed:
        return None
    reader = _Reader(call, max(seqlen_q, seqlen_k))
    distances = _Distances()
    if program.mask is not None:
        distances = reader.distances(program.mask)
    score = program.score
    while distances is not None and score is not None and (masked := reader.masked_score(score)) is not None:
        score, shown = masked
        distances = None if shown is None else distances.both(shown)
    offset = seqlen_k - seqlen_q  # the options align the last query with the last key
    found = None if distances is None else _window(distances, offset)
    if found is None:
        return None
    if score is None or reader.is_score(score):
        return Recognized(found)
    bias = None
    for other, sign, term in reader.sums(score):
        bias = reader.bias(term, sign)
        if bias is not None:
            score = other
            break
    cap = reader.softcap(score)
    if cap is None and not reader.is_score(score):
        return None
    if bias is not None and not _is_alibi(bias, distances, offset):
        return None
    return Recognized(found._replace(softcap=cap or 0.0), bias)


def seen_distances(call: Call, length: int) -> tuple[int | None, int | None] | None:
    """Range (least, most) of q_idx - kv_idx in which the mask shows keys, None: no bound. None for a mask that is no such range.

    Args:
        length: the larger of seqlen_q and seqlen_k.
    """
    return None if call.program.mask is None else _Reader(call, length).distances(call.program.mask)


def program_with_bits(call: Call, length: int) -> tuple[Program, tuple[int, ...], tuple[int, ...]]:
    """Program.with_bits of a call. Without a score_mod it is a band if the mask shows a range of distances.

    Args:
        length: as in seen_distances.
    """
    program, tensors, numbers = call.program.with_bits
    if call.program.score is None and _shows_band(call.program, call.numbers, length):
        program = _as_band(program)
    return program, tensors, numbers


@functools.lru_cache(maxsize=1024)
def _shows_band(program: Program, numbers: tuple[float | int, ...], length: int) -> bool:
    distances = seen_distances(Call(program, (), numbers), length)
    return distances is not None and None not in distances


@functools.lru_cache(maxsize=1024)
def _as_band(program: Program) -> Program:
    return replace(program, band=True)


def _window(distances: _Distances, offset: int) -> BuiltinOptions | None:
    left, right = UNLIMITED, UNLIMITED
    if distances.most is not None:
        left = distances.most + offset
    if distances.least is not None:
        right = -distances.least - offset
    bounds = [x for x, limit in ((left, distances.most), (right, distances.least)) if limit is not None]
    if any(x < 0 for x in bounds):
        return None  # a window beside the diagonal
    if distances.most is None and right == 0:
        return BuiltinOptions(causal=True)
    return BuiltinOptions(window=(left, right))


def _is_alibi(bias: _Bias, distances: _Distances, offset: int) -> bool:
    """True if a bias is a slope times the distance of a key from the diagonal, as far as the mask shows it."""
    one = bias.line.key
    if abs(one) != 1 or bias.line != _Line(-one, one, -one * offset):
        return False
    return bias.is_absolute or (distances.least is not None and distances.least >= -offset)


def _slopes(call: Call, bias: _Bias, batch: int, heads: int, device: torch.device | None) -> torch.Tensor:
    """alibi_slopes of the options: fp32 [heads] or [batch, heads], multiplied by minus the distance."""
    sign = -bias.sign if bias.is_absolute else bias.sign * bias.line.key
    values = call.program.values
    if len(bias.factors) == 1 and sign == 1:
        value = values[bias.factors[0]]
        if value.op == "load" and [values[arg].op for arg in value.args] == ["head"]:
            tensor = call.tensors[value.data]
            if tensor.dtype == torch.float32:
                return tensor.detach()[:heads]
    leaves = {
        "head": torch.arange(heads, dtype=torch.int32, device=device),
        "batch": torch.arange(batch, dtype=torch.int32, device=device)[:, None],
    }
    slopes = torch.full((heads,), float(sign), dtype=torch.float32, device=device)
    for factor in program_values(call, bias.factors, leaves):
        slopes = slopes * factor.detach()
    return slopes


class _Reader:
    """Patterns among the values of a call."""

    def __init__(self, call: Call, length: int):
        self.length = length
        self.call, self.program, self.values = call, call.program, call.program.values

    def uncast(self, i: int) -> int:
        """The value before exact casts."""
        value = self.values[i]
        while value.op == "cast" and (self.values[value.args[0]].dtype, value.dtype) in EXACT_CASTS:
            i = value.args[0]
            value = self.values[i]
        return i

    def number(self, i: int) -> float | int | None:
        """Number that a value is; None if it is none."""
        value = self.values[self.uncast(i)]
        if value.dtype == BOOL:
            return None
        if value.op == "constant":
            return value.data
        return self.call.numbers[value.data] if value.op == "number" else None

    def is_score(self, i: int) -> bool:
        return self.values[i].op == "score"

    def line(self, i: int) -> _Line | None:
        """A value as a linear function of q_idx and kv_idx, which are below 2**24; None if it is not, or may overflow or round."""
        is_float = self.values[i].dtype == FLOAT
        i = self.uncast(i)
        value = self.values[i]
        found = None
        if value.op in ("query", "key"):
            found = _Line(**{value.op: 1})
        elif (number := self.number(i)) is not None:
            is_int = math.isfinite(number) and number == int(number)
            found = _Line(constant=int(number)) if is_int else None
        elif value.op in ("add", "sub", "neg"):
            lines = [self.line(arg) for arg in value.args]
            if None not in lines:
                first = _Line() if value.op == "neg" else lines[0]
                found = first.plus(lines[-1], 1 if value.op == "add" else -1)
        if found is None or abs(found.constant) > MAX_CONSTANT:
            return None
        return None if is_float and found.bound(self.length) > MAX_EXACT else found

    def distances(self, i: int, negated: bool = False) -> _Distances | None:
        """Range of distances in which a mask shows keys; None if the mask depends on anything else or has holes."""
        value = self.values[i]
        if value.op == "constant" and value.data is not negated:
            return _Distances()
        if value.op == "not":
            return self.distances(value.args[0], not negated)
        if value.op == ("or" if negated else "and") and value.dtype == BOOL:
            one, other = (self.distances(arg, negated) for arg in value.args)
            return None if one is None or other is None else one.both(other)
        if value.op not in SWAPPED or (negated and value.op == "eq"):
            return None
        op = OPPOSITE[value.op] if negated else value.op
        x, y = value.args
        for left, right, it in ((x, y, op), (y, x, SWAPPED[op])):
            absolute, limit = self.values[self.uncast(left)], self.line(right)
            if (
                absolute.op == "abs"
                and limit is not None
                and not (limit.query or limit.key)
                and it in ("lt", "le")
            ):
                line = self.line(absolute.args[0])
                most = limit.constant - (it == "lt")
                if line is None:
                    return None
                near, far = (
                    _compared(line.plus(_Line(constant=n), -1), sign)
                    for n, sign in ((most, "le"), (-most, "ge"))
                )
                return None if near is None or far is None else near.both(far)
        lines = self.line(x), self.line(y)
        return None if None in lines else _compared(lines[0].plus(lines[1], -1), op)

    def masked_score(self, i: int) -> tuple[int, _Distances | None] | None:
        """(score, distances) of a score that is -inf at all other distances; None for other scores."""
        value = self.values[i]
        if value.op != "where":
            return None
        condition, yes, no = value.args
        if self.number(no) == -math.inf:
            return yes, self.distances(condition)
        if self.number(yes) == -math.inf:
            return no, self.distances(condition, negated=True)
        return None

    def sums(self, i: int) -> Iterator[tuple[int, int, int]]:
        """(value, sign, term) for each way in which a value is value + sign * term."""
        value = self.values[i]
        if value.op in ("add", "sub"):
            x, y = value.args
            yield x, 1 if value.op == "add" else -1, y
            if value.op == "add":
                yield y, 1, x

    def softcap(self, i: int) -> float | None:
        """Value of c in c * tanh(score / c)."""
        value = self.values[i]
        if value.op != "mul":
            return None
        for factor, other in (value.args, value.args[::-1]):
            cap, tanh = self.number(factor), self.values[other]
            if cap is None or tanh.op != "tanh" or not MIN_SOFTCAP <= cap <= MAX_SOFTCAP:
                continue
            inner = self.values[tanh.args[0]]
            if inner.op == "div" and self.is_score(inner.args[0]) and self.number(inner.args[1]) == cap:
                return float(cap)
            if inner.op == "mul" and any(
                self.is_score(x) and self.number(y) == 1 / cap for x, y in (inner.args, inner.args[::-1])
            ):
                return float(cap)
        return None

    def bias(self, i: int, sign: int) -> _Bias | None:
        """A value as a bias per head."""
        factors, shapes, left = [], [], [i]
        while left:
            factor = self.uncast(left.pop())
            value = self.values[factor]
            if not self.program.depends_on(factor, ("score", "query", "key")):
                factors.append(factor)
            elif value.op == "mul":
                left += value.args
            elif value.op == "neg" and value.dtype == FLOAT:
                sign = -sign
                left += value.args
            else:
                shapes.append(factor)
        if len(shapes) != 1:
            return None
        value = self.values[shapes[0]]
        is_absolute = value.op == "abs"
        line = self.line(value.args[0] if is_absolute else shapes[0])
        return None if line is None else _Bias(tuple(factors), sign, line, is_absolute)


def _compared(line: _Line, op: str) -> _Distances | None:
    """Range of distances in which a linear function compares with 0 as `op` says; positions are not negative."""
    upward = line if op in ("ge", "gt") else _Line().plus(line, -1)
    if op != "eq" and min(upward) >= 0 and upward.constant >= (op in ("gt", "lt")):
        return _Distances()
    if line.query != -line.key or abs(line.query) != 1:
        return None
    if line.query == -1:
        line, op = _Line().plus(line, -1), SWAPPED[op]
    at = -line.constant
    bounds = {"le": (None, at), "lt": (None, at - 1), "ge": (at, None), "gt": (at + 1, None), "eq": (at, at)}
    return _Distances(*bounds[op])
