"""Derivatives of a program, value by value from the score back: torch differentiates each operation, this file joins them.

A branch of where() that is not chosen contributes nothing, whatever its derivative is there: the choice is made last, so an infinite
derivative is never multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from tl_attention.problem.program import Value
from tl_attention.tracing.trace_ops import ROUNDINGS, evaluate

PASS_NOTHING = frozenset((*ROUNDINGS, "sign", "floor_divide", "detach"))  # their derivative is 0


class Choice(NamedTuple):
    """Condition under which a derivative counts: a bool tensor, and which of its values."""

    condition: torch.Tensor
    wanted: bool

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float32)
        return torch.where(self.condition, x, zero) if self.wanted else torch.where(self.condition, zero, x)


class Part(NamedTuple):
    """Addend of a derivative, 0 unless all of its choices hold, outermost first."""

    choices: tuple[Choice, ...]
    factor: torch.Tensor


class Reverse:
    """Derivatives of one value with respect to others.

    Args:
        ties: of a maximum or minimum that is a clamp or relu, True if its first operand has the whole derivative where both are equal.
        reached: values through which the derivative may pass.
        wanted: values to differentiate with respect to.
    """

    values: Sequence[Value]
    ties: Mapping[int, bool]
    wanted: Sequence[int]

    def __init__(
        self,
        values: Sequence[Value],
        ties: Mapping[int, bool],
        reached: Collection[int],
        wanted: Sequence[int],
    ):
        self.values, self.ties, self.wanted = values, ties, wanted
        self.leads: set[int] = set()  # values of `reached` that are computed from a wanted one
        for i in sorted({*reached, *wanted}):
            if i in wanted or (
                values[i].op not in PASS_NOTHING and not self.leads.isdisjoint(values[i].args)
            ):
                self.leads.add(i)

    def derivatives(self, root: int, found: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """One 0-d tensor per wanted value. found: tensors of all values that root needs."""
        parts: dict[int, list[Part]] = (
            {root: [Part((), torch.ones((), dtype=torch.float32))]} if root in self.leads else {}
        )
        for i in sorted(self.leads, reverse=True):
            if i in parts and i not in self.wanted:
                for arg, part in self._passed(i, _joined(parts.pop(i)), found):
                    if arg in self.leads:
                        parts.setdefault(arg, []).append(part)
        return [
            _total(_joined(parts[i])) if i in parts else torch.zeros((), dtype=torch.float32)
            for i in self.wanted
        ]

    def _passed(self, i: int, part: Part, found: Mapping[int, torch.Tensor]) -> list[tuple[int, Part]]:
        """(operand, part of its derivative) for the operands of a value whose derivative is `part`."""
        value = self.values[i]
        if value.op == "where":
            condition, *branches = value.args
            choices = [Choice(found[condition], wanted) for wanted in (True, False)]
        elif i in self.ties:
            branches = value.args
            larger, smaller = (found[arg] for arg in (branches if value.op == "maximum" else branches[::-1]))
            condition = larger >= smaller if self.ties[i] else larger > smaller
            choices = [Choice(condition, wanted) for wanted in (True, False)]
        else:
            operands = [
                found[arg].detach().requires_grad_() if arg in self.leads else found[arg]
                for arg in value.args
            ]
            leading = [x for x, arg in zip(operands, value.args, strict=True) if arg in self.leads]
            grads = torch.autograd.grad(evaluate(value, operands), leading, part.factor, allow_unused=True)
            args = [arg for arg in value.args if arg in self.leads]
            return [
                (arg, Part(part.choices, grad))
                for arg, grad in zip(args, grads, strict=True)
                if grad is not None
            ]
        return [
            (arg, Part((*part.choices, choice), part.factor))
            for arg, choice in zip(branches, choices, strict=True)
        ]


def _joined(parts: Sequence[Part]) -> Part:
    """Sum of the parts of one value, under the choices that all of them share."""
    if len(parts) == 1:
        return parts[0]
    shared: list[Choice] = []
    for choices in zip(*(part.choices for part in parts), strict=False):
        if any(not _same(choices[0], other) for other in choices):
            break
        shared.append(choices[0])
    rest = [Part(part.choices[len(shared) :], part.factor) for part in parts]
    if len(rest) == 2 and all(len(part.choices) == 1 for part in rest):
        (one,), (other,) = (part.choices for part in rest)
        if one.condition is other.condition:  # both branches of one choice
            yes, no = (part.factor for part in (rest if one.wanted else rest[::-1]))
            return Part(tuple(shared), torch.where(one.condition, yes, no))
    total = _total(rest[0])
    for part in rest[1:]:
        total = total + _total(part)
    return Part(tuple(shared), total)


def _same(one: Choice, other: Choice) -> bool:
    return one.condition is other.condition and one.wanted == other.wanted


def _total(part: Part) -> torch.Tensor:
    """A part with its choices made."""
    total = part.factor
    for choice in reversed(part.choices):
        total = choice.chosen(total)
    return total
