"""Captures: the variables that a Python function reads besides its arguments; they are the cache key of its trace.

Two functions with the same code that read equal numbers, and tensors of equal dtype and rank, share a trace. A function that reads
anything else, such as an object with attributes, has no key and is traced at each call, as changes of the object cannot be noticed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# Modules whose names do not change while a program runs
STABLE_MODULES = ("torch", "math", "operator", "functools", "builtins", "numpy")
CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), torch.dtype, torch.device)


class _Opaque(Exception):
    """Something whose content cannot be compared."""


class Captures:
    """Key of everything that functions capture, and the captured tensors in order."""

    def __init__(self):
        self.parts: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.seen: dict[int, int] = {}  # functions by id
        self.key: tuple = ()

    @classmethod
    def of(cls, *functions: Callable | None) -> Captures | None:
        """Captures of these functions; None if one sees something that cannot be compared."""
        captures = cls()
        try:
            for function in functions:
                captures.add(function)
        except _Opaque:
            return None
        captures.key = tuple(captures.parts)
        return captures

    def position(self, tensor: torch.Tensor) -> int | None:
        """Index of a tensor among those that the functions see."""
        return next((i for i, other in enumerate(self.tensors) if other is tensor), None)

    def add(self, x: Any) -> None:
        """Append x, and everything that it sees, to the key."""
        if isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif isinstance(x, CONSTANTS):
            self.parts.append((type(x), repr(x) if isinstance(x, float) else x))
        elif isinstance(x, types.FunctionType):
            self._add_function(x)
        elif isinstance(x, functools.partial):
            self.parts.append((functools.partial, len(x.args), tuple(x.keywords)))
            for part in (x.func, *x.args, *x.keywords.values()):
                self.add(part)
        elif isinstance(x, tuple | list):
            self.parts.append((type(x), len(x)))
            for part in x:
                self.add(part)
        elif isinstance(x, dict):
            self.parts.append((dict, len(x)))
            for part in (*x, *x.values()):
                self.add(part)
        elif isinstance(x, types.ModuleType) and x.__name__.split(".")[0] in STABLE_MODULES:
            self.parts.append(("module", x.__name__))
        elif isinstance(x, types.BuiltinFunctionType | type) and not isinstance(
            getattr(x, "__self__", None), torch.Tensor | list | dict
        ):
            self.parts.append(x)
        else:
            raise _Opaque

    def _add_tensor(self, x: torch.Tensor) -> None:
        position = self.position(x)
        if position is None:
            position = len(self.tensors)
            self.tensors.append(x)
        if not x.ndim and x.device.type == "cpu" and not x.requires_grad:
            self.parts.append(("number", x.dtype, repr(x.item())))  # its value becomes a number of the call
        else:
            self.parts.append(
                ("tensor", position, x.dtype, x.ndim, x.requires_grad, x.device.type, not x.numel())
            )

    def _add_function(self, x: types.FunctionType) -> None:
        if id(x) in self.seen:
            self.parts.append(("function", self.seen[id(x)]))
            return
        self.seen[id(x)] = len(self.seen)
        # A function of torch or of a module that does not change
        if (x.__module__ or "").split(".")[0] in STABLE_MODULES and x.__closure__ is None:
            self.parts.append(("stable", x))
            return
        self.parts.append((x.__code__, tuple(x.__kwdefaults__ or {})))
        for cell in x.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # an empty cell
                self.parts.append("empty")
        for default in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            self.add(default)
        for name in _names(x.__code__):
            if name in x.__globals__:
                self.parts.append(name)
                self.add(x.__globals__[name])


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals that code may read, those of the functions inside it among them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def versions(tensors: Iterable[torch.Tensor | None]) -> tuple[int | None, ...]:
    """Number of changes in place of each tensor; None for tensors of inference mode, which do not count."""
    return tuple(None if x is None or x.is_inference() else x._version for x in tensors)
