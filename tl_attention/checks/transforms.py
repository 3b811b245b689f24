"""Argument names in errors, and errors under transforms of torch: forward mode, vmap."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence

import torch

from tl_attention.checks.common import FROM_ENVIRONMENT
from tl_attention.problem.attn_problem import MAX_JVP_HEAD_DIM
from tl_attention.problem.options import PUBLIC_NAMES

FORWARD_MODE = "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad)"
ARGUMENT_ERRORS = (TypeError, ValueError, NotImplementedError, IndexError)
_MESSAGE = re.compile(r"[\w, \[\]]+: expected ")
_SEPARATOR = re.compile(r", and |, or |, | and | or ")


class Renaming:
    """Renames arguments in errors, from those of an inner function to those of the public function that called it.

    Args:
        names: name in the message -> name in the public function.
    """

    pattern: re.Pattern[str]

    def __init__(self, names: dict[str, str]):
        self.names = names
        # Compiled here, and split without a callback: torch.compile of torch 2.11 can trace no other use of re
        name = f"(?:{'|'.join(sorted(names, key=len, reverse=True))})"
        self.pattern = re.compile(rf"(?<![\w.])({name}(?:(?:, | and | or |, and |, or ){name})*)(?!\w)")

    def of(self, error: Exception) -> Exception:
        """The error with the caller's argument names. Only messages of the form `argument: expected X, got Y; do Z` are changed."""
        message = str(error)
        if not _MESSAGE.match(message):
            return error

        text = ""
        for i, part in enumerate(self.pattern.split(message)):  # texts, and between them names
            if i % 2:
                part = ", ".join(dict.fromkeys(self.names[name] for name in _SEPARATOR.split(part)))
            text += part
        return type(error)(text).with_traceback(error.__traceback__)


def refuse_tangents(reason: str, names: Sequence[str], tangents: Sequence[torch.Tensor | None]) -> None:
    """Raise NotImplementedError if inputs have a tangent of forward-mode differentiation. reason: why that is not supported."""
    found = [name for name, tangent in zip(names, tangents, strict=False) if tangent is not None]
    raise NotImplementedError(
        f"{', '.join(found)}: expected a tensor without a tangent, as {reason} (torch.func.jvp, torch.autograd.forward_ad), got one with a"
        " tangent; use torch.func.vjp, or detach it"
    )


def check_jvp(q: torch.Tensor, v: torch.Tensor, options: Sequence[str]) -> None:
    """Raise NotImplementedError for a call of attention that has no forward-mode derivative.

    Args:
        options: fields of Options that are on.
    """
    if "parts" in options:
        raise NotImplementedError(
            f"q, k, v: expected bfloat16 or float16 in {FORWARD_MODE}, got float32; use torch.func.vjp, or ref_mha_fwd_interface"
        )
    if options:
        names = ", ".join(PUBLIC_NAMES.get(name, name) for name in options)
        hint = FROM_ENVIRONMENT if "batch_invariant" in options else ""
        raise NotImplementedError(
            f"{names}: expected none in {FORWARD_MODE}, where flash_attn_func and mha_fwd_interface are plain or causal, got a value; leave"
            f" it out, or use torch.func.vjp{hint}"
        )
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > MAX_JVP_HEAD_DIM:
            raise NotImplementedError(
                f"{name}: expected a head dim of at most {MAX_JVP_HEAD_DIM} in {FORWARD_MODE}, got {x.shape[-1]}; use torch.func.vjp, or"
                " ref_mha_fwd_interface"
            )


def check_no_forward_ad(function: str) -> None:
    """Raise NotImplementedError inside forward-mode differentiation, whose tangents would be lost."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{function}: expected a call outside forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad), as it has no"
            " derivative, got one inside; call it before"
        )


def check_no_transforms(function: str) -> None:
    """Raise NotImplementedError inside torch.func and forward-mode differentiation, which see no message between ranks."""
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    ):
        raise NotImplementedError(
            f"{function}: expected a call outside torch.func (vmap, grad, jvp) and {FORWARD_MODE}, as ranks exchange no tangents and no"
            " samples, got one inside; call .backward(), and make a vmapped dimension part of the batch"
        )


def refuse_vmap(function: str) -> None:
    raise NotImplementedError(
        f"{function}: expected a call outside torch.vmap, as it would copy keys or outputs, got one inside; use its batch dimension"
    )


INNER_MODULES = "tl_attention.", "torch._compile", "torch._dynamo."
_warned_about_cpu = False


def warn_about_cpu() -> None:
    """Warn once that CPU tensors run the reference, at the line of the caller outside the package."""
    global _warned_about_cpu
    if torch.compiler.is_compiling() or _warned_about_cpu:
        return
    _warned_about_cpu = True
    warn_caller("tl_attention: CPU tensors run the plain PyTorch reference, which is slow")


def warn_caller(text: str) -> None:
    """Warn at the line of the caller outside the package."""
    caller = 1
    # torch._compile and torch._dynamo wrap the kernels of ops
    while sys._getframe(caller).f_globals["__name__"].startswith(INNER_MODULES):
        caller += 1
    warnings.warn(text, stacklevel=caller + 1)
