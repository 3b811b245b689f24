"""The interface between the benchmark and a library that it compares: one Provider per library, with its passes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.testing.shapes import Shape, is_deterministic

PASSES = ("fwd", "bwd", "options", "decode")
NOT_SUPPORTED = re.compile(r"support|this build")  # words of libraries for what they cannot do

Result = tuple[Any, ...]
Inputs = tuple[torch.Tensor, ...]
# (q, k, v), or (qkv) if packed -> (out, lse [batch, heads_q, seqlen_q], varlen: [heads_q, tokens], or None)
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class Unsupported(Exception):
    """The reason why a library cannot run a problem. Its row shows "–", not an error."""


@dataclass(frozen=True)
class Ready:
    """A pass of a library, ready for one problem.

    A forward is (q, k, v) -> (out, lse [batch, heads_q, seqlen_q] or None, *what its backward needs besides).
    A backward is (dout, q, k, v, *all outputs of the forward) -> (dq, dk, dv).
    """

    call: Callable[..., Result]  # the public function, with its checks
    launch: Callable[..., Result]  # the same without checks and lookups, where the library allows it


@dataclass(frozen=True)
class Provider:
    """A library in the comparison.

    passes: pass of PASSES -> its function, or a string: the reason why the library has none. An absent pass is not offered.
        fwd: (shape, q, k, v, saves=whether a backward follows) -> Ready.
        bwd: (shape, deterministic, dout, q, k, v, *outputs of the forward) -> Ready.
        options: (shape, options.Tensors) -> Attend, of [batch, seqlen, heads, head_dim], differentiable.
        decode: (shape, q, k, v, seqlens, pages, saves=False) -> Ready.
        Each raises Unsupported for problems that the library cannot run.
    """

    passes: Mapping[str, Callable[..., Any] | str]
    library: Callable[[str], str]  # pass -> name and version of the code that runs it
    layout: str = "bshd"  # fwd and bwd: bshd or bhsd, contiguous
    decode_layout: str = "bshd"
    lse_base2: bool = False
    accepts_packed: bool = False  # the options pass has a function of packed qkv

    def function(self, name: str) -> Callable[..., Any]:
        """The function of a pass. Raises Unsupported."""
        made = self.passes.get(name, f"no {name} pass")
        if isinstance(made, str):
            raise Unsupported(made)
        return made


def prepare(
    provider: Provider, shape: Shape, direction: str, copies: Sequence[Inputs]
) -> tuple[Ready, list[Inputs]]:
    """A direction of a library, and the arguments of a call for each copy of the inputs.

    Args:
        direction: one of shapes.DIRECTIONS.
        copies: (q, k, v) each, or with a backward (dout, q, k, v), in the layout of the provider.
    Returns:
        fwd: (q, k, v) -> (out, lse). bwd: (dout, q, k, v, *outputs of its forward) -> (dq, dk, dv).
        fwd_bwd: (dout, q, k, v) -> (out, dq, dk, dv).
    Raises:
        Unsupported: the library cannot run the problem in this direction.
    """
    make_forward = provider.function("fwd")
    if direction == "fwd":
        return make_forward(shape, *copies[0], saves=False), list(copies)
    make_backward = provider.function("bwd")
    forward = make_forward(shape, *copies[0][1:], saves=True)
    given = [(*inputs, *forward.launch(*inputs[1:])) for inputs in copies]
    backward = make_backward(shape, is_deterministic(direction), *given[0])
    if "fwd" not in direction:
        return backward, given
    return Ready(_both(forward.call, backward.call), _both(forward.launch, backward.launch)), list(copies)


def _both(forward: Callable[..., Result], backward: Callable[..., Result]) -> Callable[..., Result]:
    def attend(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        saved = forward(q, k, v)
        return (saved[0], *backward(dout, q, k, v, *saved))

    return attend


def same_call(attend: Callable[..., Result]) -> Ready:
    """A pass whose public function is also its fastest launch."""
    return Ready(attend, attend)


def tried(attend: Callable[..., Result], *inputs: Any) -> Ready:
    """The pass after one call on the inputs: a refusal by the library becomes Unsupported."""
    try:
        attend(*inputs)
    except NotImplementedError as error:
        raise Unsupported(first_sentence(error)) from error
    except RuntimeError as error:
        if NOT_SUPPORTED.search(str(error)):
            raise Unsupported(first_sentence(error)) from error
        raise
    return same_call(attend)


def first_sentence(error: Exception) -> str:
    """First line of a message, or the type of the exception if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def out_and_lse(result: Any) -> Result:
    """(out, lse or None), for libraries some of whose versions return out alone."""
    return (result, None) if isinstance(result, torch.Tensor) else (result[0], result[1])


def by_entry(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """out [tokens, heads, head_dim_v] as [batch, seqlen, heads, head_dim_v], with batch and seqlen of q (or qkv)."""
    return out.reshape(*q.shape[:2], *out.shape[-2:])


def import_function(module: str, name: str) -> Callable[..., Any]:
    """A function of an installed library. Raises Unsupported."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a broken installation raises anything
        raise Unsupported(f"{module}.{name} cannot be imported: {error}") from error


def can_import(module: str, name: str) -> bool:
    """True if import_function finds the function."""
    try:
        return callable(import_function(module, name))
    except Unsupported:
        return False
