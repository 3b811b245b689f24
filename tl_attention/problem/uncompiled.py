"""Functions that torch.compile leaves to Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def may_compile() -> bool:
    """True in a process that has imported torch's compiler."""
    return "torch._dynamo" in sys.modules


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that compiled code calls without looking into it, as torch.compiler.disable makes it.

    That imports torch's compiler, which takes over a second. Here only a process that has imported it, and so may compile, waits for it.
    """
    disabled = torch._disable_dynamo(function)  # imports it at the first call

    @functools.wraps(function)
    def either(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling() or may_compile():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return either
