"""Tensors without values, which functions of scores get where they are traced, and refusals of what needs values."""

from __future__ import annotations

from typing import Any

import torch

WITHOUT_VALUES = (
    "use torch.where in place of if, & and | in place of and and or, torch.minimum in place of min(), .float() in place of float(), a"
    " tensor in place of a list"
)


class Stated(Exception):
    """Refusal whose words are final but for the place: kind(f"{place}: expected {expected}, got {got}; {instead}")."""

    def __init__(self, kind: type[Exception], expected: str, got: str, instead: str):
        self.kind, self.expected, self.got, self.instead = kind, expected, got, instead


def no_value(of_input: bool) -> Stated:
    """Refusal of what needs a value: of a score, an index or what follows from one; else of a captured tensor."""
    if of_input:
        return Stated(
            NotImplementedError,
            "no control flow that depends on the score or an index",
            "if, and, or, while, min(), float(), .item() or a list indexed by it",
            WITHOUT_VALUES,
        )
    return Stated(
        NotImplementedError,
        "captured tensors whose elements it uses as tensors",
        "one as a number, by .item(), .tolist(), if or similar",
        "leave that out, or read the number before the call",
    )


class Symbol(torch.Tensor):
    """Tensor without values that a recorded function gets, on the CPU: Symbol(tensor of its shape and dtype)."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, stand_in: torch.Tensor) -> Symbol:
        return cls._make_wrapper_subclass(cls, stand_in.shape, dtype=stand_in.dtype, device="cpu")

    def __init__(self, stand_in: torch.Tensor) -> None:
        """__new__() has done all."""

    def __repr__(self, **_: Any) -> str:
        return f"a {self.dtype} without a value, as the function is traced"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called where torch leaves the recorder out, as it reads values: torch.tensor([q_idx, kv_idx])."""
        raise no_value(True)
