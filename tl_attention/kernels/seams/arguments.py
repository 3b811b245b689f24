"""Groups of kernel arguments: a dataclass of types becomes a dataclass of arguments."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from tilelang import tvm
from tilelang.language.eager.builder import Builder

Group = TypeVar("Group")


def declare(types: Group, **names: str) -> Group:
    """Declare the fields of a dataclass as arguments of the kernel, in their order, after those of its signature.

    For the start of the body of a prim_func. A field that is False or None is no argument, and stays.

    Args:
        types: tensor types, or dtypes of numbers.
        names: of arguments that are not called as their field.
    """
    builder, found = Builder.current(), {}
    for field in fields(types):
        name, kind = names.get(field.name, field.name), getattr(types, field.name)
        if kind is not None and kind is not False:
            is_number = isinstance(kind, str)  # as dtypes are
            found[field.name] = builder.arg(name, tvm.tirx.Var(name, kind) if is_number else kind)
    return replace(types, **found)
