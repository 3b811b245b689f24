"""Problems with options: the tensors that options need, and the two passes of a library that has them.

Libraries take q, k and v as [batch, seqlen, heads, head_dim], contiguous unless the problem is packed. A backward is the work
that torch.autograd.grad launches, since most libraries have no other; the gradient of a sink is included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from library import Attend, Provider, Ready, Result, Unsupported, same_call
from rows import PLAIN

from tl_attention.reference import dropout_keep
from tl_attention.testing import counts, timer
from tl_attention.testing.shapes import Shape, sequences

OWN_MASK = ("fa2", "cudnn")  # their dropout masks are unknown to the reference


@dataclass(frozen=True)
class Tensors:
    """Device tensors that the options of a problem need; None where an option is off."""

    cu_seqlens: tuple[torch.Tensor, torch.Tensor]  # int32 [batch + 1], of queries and of keys
    max_seqlens: tuple[int, int]
    slopes: torch.Tensor | None  # fp32 [heads_q], ALiBi's geometric slopes
    sink: torch.Tensor | None  # [heads_q], about as heavy as all keys that a query sees; requires grad
    rng_state: torch.Tensor | None  # int64 [2]


@functools.lru_cache(maxsize=4)
def tensors(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    asked, heads = shape.options, shape.heads_q
    lengths = list(zip(*sequences(shape), strict=True))
    ends = (torch.tensor([0, *each]).cumsum(0).to(device, torch.int32) for each in lengths)
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    seen = counts.visible_pairs(shape) / (shape.batch * shape.seqlen_q)
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(0)) + math.log(seen)
    return Tensors(
        tuple(ends),
        tuple(map(max, lengths)),
        slopes.to(device) if asked.alibi else None,
        sink.to(device, dtype).requires_grad_() if asked.sink else None,
        torch.tensor([0x5EED, 0], device=device) if asked.dropout else None,
    )


def reference_options(
    shape: Shape, dtype: torch.dtype, device: torch.device, heads: Sequence[int]
) -> dict[str, Any]:
    """The options of a problem as arguments of the reference, for some query heads."""
    needs, asked = tensors(shape, dtype, device), shape.options
    chosen = list(heads)
    options: dict[str, Any] = {}
    if asked.window is not None:
        options["window"] = shape.window_size
    if asked.softcap:
        options["softcap"] = asked.softcap
    if needs.slopes is not None:
        options["alibi_slopes"] = needs.slopes[chosen]
    if needs.sink is not None:
        options["sink"] = needs.sink.detach()[chosen]
    if shape.is_varlen:
        options |= zip(("cu_seqlens_q", "cu_seqlens_k"), needs.cu_seqlens, strict=True)
    if asked.dropout:
        options |= {"keep": _keep(shape, needs)[:, chosen], "dropout_p": asked.dropout}
    return options


@functools.lru_cache(maxsize=1)
def _keep(shape: Shape, needs: Tensors) -> torch.Tensor:
    """bool [batch, heads_q, max seqlen_q, max seqlen_k]: the dropout mask."""
    return dropout_keep(
        needs.rng_state, shape.batch, shape.heads_q, *needs.max_seqlens, shape.options.dropout
    )


def problem_of(name: str, shape: Shape) -> Shape:
    """The problem that a provider solves in the row of a shape: PLAIN leaves the options out."""
    return shape.plain if name == PLAIN else shape


def with_passes(name: str, provider: Provider, learned: Sequence[torch.Tensor] = ()) -> Provider:
    """A library whose fwd and bwd are made from its options pass. learned: further tensors that get a gradient, as a sink does."""

    def forward(shape: Shape, *qkv: torch.Tensor, saves: bool) -> Ready:
        shape = problem_of(name, shape)
        needs = tensors(shape, qkv[0].dtype, qkv[0].device)
        attend = provider.function("options")(shape, needs)
        if shape.options.packed and not provider.accepts_packed:
            attend = _unbind(attend)

        def operands(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (packed_qkv(*qkv),) if shape.options.packed else qkv

        @torch.no_grad()
        def without_grad(*qkv: torch.Tensor) -> Result:
            return attend(*operands(*qkv))

        def recorded(*qkv: torch.Tensor) -> Result:
            with timer.on_capture_stream():
                given = [x.detach().requires_grad_() for x in operands(*qkv)]
                out, lse = attend(*given)
            leaves = [*given, *learned, *([] if needs.sink is None else [needs.sink])]
            return out.detach(), lse if lse is None else lse.detach(), (out, leaves)

        return same_call(recorded if saves else without_grad)

    def backward(shape: Shape, deterministic: bool, *_: object) -> Ready:
        if deterministic:
            raise Unsupported("deterministic gradients are not compared with options")
        packed = problem_of(name, shape).options.packed

        def differentiate(dout: torch.Tensor, *given: Any) -> Result:
            out, leaves = given[-1]
            grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            return (*grads[0].unbind(2), *grads[1:]) if packed else grads

        return same_call(differentiate)

    return Provider({"fwd": forward, "bwd": backward}, lambda _: provider.library("options"))


def packed_qkv(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """[batch, seqlen, 3, heads, head_dim], the tensor whose slices q, k and v are."""
    batch, seqlen, heads, head_dim = q.shape
    strides = (*q.stride()[:2], heads * head_dim, head_dim, 1)
    return q.as_strided((batch, seqlen, 3, heads, head_dim), strides)


def _unbind(attend: Attend) -> Attend:
    return lambda qkv: attend(*qkv.unbind(2))
