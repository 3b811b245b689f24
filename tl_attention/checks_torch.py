"""Names in errors, and refusals under the transforms of torch: forward mode, vmap."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

ARGUMENT_ERRORS = (TypeError, ValueError, NotImplementedError, IndexError)
_MESSAGE = re.compile(r"[\w, \[\]]+: expected ")
_SEPARATOR = re.compile(r", and |, or |, | and | or ")


class Renaming:
    """Change of argument names in errors, from those of a function to those of the public function that called it.

    Args:
        names: name in the message -> name in the public function.
    """

    def __init__(self, names: dict[str, str]):
        self.names = names
        # Compiled here, and split without a callback: torch.compile of torch 2.11 traces no more of re
        name = f"(?:{'|'.join(sorted(names, key=len, reverse=True))})"
        self.pattern = re.compile(rf"(?<![\w.])({name}(?:(?:, | and | or |, and |, or ){name})*)(?!\w)")

    def of(self, error: Exception) -> Exception:
        """The error in the caller's names. Only a message of checks.py is changed, `argument: expected X, got Y; do Z`."""
        message = str(error)
        if not _MESSAGE.match(message):
            return error

        text = ""
        for i, part in enumerate(self.pattern.split(message)):  # texts, and between them names
            if i % 2:
                part = ", ".join(dict.fromkeys(self.names[name] for name in _SEPARATOR.split(part)))
            text += part
        return type(error)(text).with_traceback(error.__traceback__)


def refuse_tangents(names: Sequence[str], *tangents: torch.Tensor | None) -> None:
    """Raise NotImplementedError for the inputs of attention that have a tangent of forward-mode differentiation."""
    found = [name for name, tangent in zip(names, tangents, strict=False) if tangent is not None]
    raise NotImplementedError(
        f"{', '.join(found)}: expected a tensor without a tangent, as flash_attn_func, its forms, mha_fwd_interface and mha_bwd_interface"
        " have no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad), got one with a tangent; use torch.func.vjp, or"
        " detach it"
    )


def check_no_forward_ad(function: str) -> None:
    """Raise NotImplementedError inside forward-mode differentiation, whose tangents would be lost."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{function}: expected a call outside forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad), as attention to"
            " a cache has no derivative, got one inside; call it before"
        )


def refuse_vmap(function: str) -> None:
    raise NotImplementedError(
        f"{function}: expected a call outside torch.vmap, as a cache is never copied, got one inside; use its batch dimension"
    )
