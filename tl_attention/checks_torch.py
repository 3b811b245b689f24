"""Names in errors, and refusals under the transforms of torch: forward mode, vmap."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

ARGUMENT_ERRORS = (TypeError, ValueError, NotImplementedError, IndexError)


def rename_arguments(error: Exception, names: dict[str, str]) -> Exception:
    """The error of a function, with the argument names of the public function that called it.

    Args:
        error: a message of checks.py, `argument: expected X, got Y; do Z`, is changed; any other is left as it is.
        names: name in the message -> name in the public function.
    """
    message = str(error)
    if not re.match(r"[\w, \[\]]+: expected ", message):
        return error

    name = f"(?:{'|'.join(sorted(names, key=len, reverse=True))})"
    one_or_more = rf"(?<![\w.])({name}(?:(?:, | and | or |, and |, or ){name})*)(?!\w)"

    def renamed(match: re.Match) -> str:
        found = re.split(r", and |, or |, | and | or ", match[1])
        return ", ".join(dict.fromkeys(names[name] for name in found))

    return type(error)(re.sub(one_or_more, renamed, message)).with_traceback(error.__traceback__)


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
