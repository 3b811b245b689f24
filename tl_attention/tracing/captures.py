"""Captures: the variables that a Python function reads besides its arguments; they are the cache key of its trace.

Two functions with the same code that read equal numbers, and tensors of equal dtype and rank, share a trace; those that read sizes
of tensors, only with equal sizes. A function that reads anything else, such as an object with attributes, has no key and is traced at
each call, as changes of the object cannot be noticed.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tl_attention.tracing.symbol import Symbol

# Modules whose names do not change while a program runs
STABLE_MODULES = ("torch", "math", "operator", "functools", "builtins", "numpy")
CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), torch.dtype, torch.device)
_MODES = torch._C._TorchDispatchModeKey
_EXACT = frozenset(CONSTANTS) - {float}  # kinds whose equal values are the same to a trace


class _Opaque(Exception):
    """Something whose content cannot be compared."""


class Captures:
    """Key of everything that functions capture, and the captured tensors in order."""

    def __init__(self):
        self.parts: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.seen: dict[int, int] = {}  # functions by id
        self.key: tuple[Any, ...] = ()

    @classmethod
    def of(cls, *values: Any) -> Captures | None:
        """Captures of these functions and tensors; None if a function sees something that cannot be compared."""
        captures = cls()
        try:
            for value in values:
                captures.add(value)
        except _Opaque:
            return None
        captures.key = tuple(captures.parts)
        return captures

    @property
    def sizes(self) -> tuple[tuple[torch.Size, tuple[int, ...]] | None, ...] | None:
        """Shape and strides of each tensor, which a function may read; None of a sparse or nested one. None if a size is a symbol."""
        dense = [x.layout == torch.strided and not x.is_nested for x in self.tensors]
        found = tuple((x.shape, x.stride()) if y else None for x, y in zip(self.tensors, dense, strict=True))
        is_known = all(type(n) is int for sizes in found if sizes for both in sizes for n in both)
        return found if is_known else None

    def position(self, tensor: torch.Tensor) -> int | None:
        """Index of a tensor among those that the functions see."""
        for i, other in enumerate(self.tensors):
            if other is tensor:
                return i
        return None

    def add(self, x: Any) -> None:
        """Append x, and everything that it sees, to the key."""
        kind = type(x)
        if kind in _EXACT:
            self.parts.append((kind, x))
        elif kind is types.FunctionType:
            self._add_function(x)
        elif isinstance(x, functools.partial):
            self.parts.append((functools.partial, len(x.args), tuple(x.keywords)))
            for part in (x.func, *x.args, *x.keywords.values()):
                self.add(part)
        elif isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif isinstance(x, CONSTANTS):
            # 0.0 equals -0.0, and a NaN nothing
            self.parts.append((kind, repr(x) if isinstance(x, float) else x))
        elif isinstance(x, tuple | list):
            self.parts.append((kind, len(x)))
            for part in x:
                self.add(part)
        elif isinstance(x, dict):
            self.parts.append((dict, len(x)))
            for part in (*x, *x.values()):
                self.add(part)
        elif isinstance(x, types.ModuleType) and _is_stable(x.__name__):
            self.parts.append(("module", x.__name__))
        elif isinstance(x, types.BuiltinFunctionType):
            if not isinstance(x.__self__, types.ModuleType | type | None):  # a method of an object
                raise _Opaque
            self.parts.append(x)
        elif isinstance(x, type) and _is_stable(x.__module__):  # others may have attributes that change
            self.parts.append(x)
        else:
            raise _Opaque

    def _add_tensor(self, x: torch.Tensor) -> None:
        position = self.position(x)
        if position is None:
            position = len(self.tensors)
            self.tensors.append(x)
        if is_number(x):
            self.parts.append(
                ("number", x.dtype, repr(number_of(x)))
            )  # its value becomes a number of the call
        else:
            self.parts.append(("tensor", position, x.dtype, x.ndim, x.requires_grad, x.device, not x.numel()))

    def _add_function(self, x: types.FunctionType) -> None:
        if id(x) in self.seen:
            self.parts.append(("function", self.seen[id(x)]))
            return
        self.seen[id(x)] = len(self.seen)
        code, cells = x.__code__, x.__closure__
        # A function of torch or of a module that does not change
        if cells is None and _is_stable(x.__module__ or ""):
            self.parts.append(("stable", x))
            return
        self.parts.append((code, len(x.__defaults__ or ()), tuple(x.__kwdefaults__ or ())))
        for cell in cells or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self.parts.append("empty")
            else:
                self.add(content)
        for default in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            self.add(default)
        if x.__dict__:
            self.add(x.__dict__)
        of_module = x.__globals__
        for name in _names(code):
            if name in of_module:
                self.parts.append(name)
                self.add(of_module[name])


def is_recording() -> bool:
    """True while make_fx or a like tracer records what runs."""
    return torch._C._get_dispatch_mode(_MODES.PROXY) is not None


def is_tracing() -> bool:
    """True inside a mode of torch that traces: FakeTensorMode, that of make_fx, or that of functionalization."""
    modes = _MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)


def is_number(x: torch.Tensor) -> bool:
    """True for a captured tensor that stands for its value, as 0-d CPU tensors do everywhere in torch, and that can be read."""
    return not x.ndim and not x.requires_grad and x.device.type == "cpu" and holds_values(x)


def number_of(x: torch.Tensor) -> float | int | bool:
    """Value of a tensor that is_number(), which FakeTensorMode would not read."""
    with _disable_current_modes() if is_tracing() else contextlib.nullcontext():
        return x.item()


def has_values(x: torch.Tensor) -> bool:
    """True for a tensor that can be read: one that holds values, but not where all tensors are to be fake."""
    return torch._C._get_dispatch_mode(_MODES.FAKE) is None and holds_values(x)


def holds_values(x: torch.Tensor) -> bool:
    """True for a tensor with values of its own: no fake one, none that make_fx records, none inside torch.func.functionalize."""
    if isinstance(x, FakeTensor | Symbol) or x.is_meta or torch._is_functional_tensor(x):
        return False
    recording = torch._C._get_dispatch_mode(_MODES.PROXY)
    if recording is None:
        return True
    from torch.fx.experimental.proxy_tensor import has_proxy_slot  # here, as it takes time to import

    return not has_proxy_slot(x, recording.tracer)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """A context in which no dispatch mode of the caller sees an operation, such as that of a selective checkpoint.

    Such a mode expects the same operations at the next call, which finds what this one made. FakeTensorMode and make_fx stay.
    """
    none_active = not torch._C._len_torch_dispatch_stack()
    with contextlib.nullcontext() if none_active or is_tracing() else _disable_current_modes():
        yield


@contextlib.contextmanager
def for_later_calls() -> Iterator[None]:
    """A context for tensors that later calls get: no mode of the caller sees them, and they are none of inference mode or torch.func.

    A backward cannot save tensors of inference mode, and they count no changes.
    """
    with outside_modes(), torch.inference_mode(False):
        if torch._C._functorch.peek_interpreter_stack() is None:
            yield
            return
        # Imported here, as few calls need it
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            yield


def is_vmapped(x: torch.Tensor) -> bool:
    """True for a tensor with values for each sample of torch.vmap, inside other transforms of torch.func, too."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


@functools.lru_cache(maxsize=1024)
def _is_stable(module: str) -> bool:
    return module.split(".")[0] in STABLE_MODULES


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that code may read, those of the functions inside it among them. _Opaque: it imports a module that may change."""
    imported = (x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME")
    if not all(map(_is_stable, imported)):
        raise _Opaque
    inner = (name for x in code.co_consts if isinstance(x, types.CodeType) for name in _names(x))
    return *code.co_names, *inner


def versions(tensors: Iterable[torch.Tensor | None]) -> tuple[int | None, ...]:
    """Number of changes in place of each tensor; None for tensors of inference mode, which do not count."""
    return tuple([None if x is None or x.is_inference() else x._version for x in tensors])
