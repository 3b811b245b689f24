"""The forward with its derivative along a direction as a torch op, which serves forward-mode differentiation of the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from tl_attention import launch
from tl_attention.checks.common import check_device
from tl_attention.checks.transforms import check_jvp, refuse_tangents
from tl_attention.problem.options import PLAIN_ARGUMENTS, PUBLIC_NAMES, Call, parse_arguments
from tl_attention.reference.jvp import attention_jvp_reference
from tl_attention.torch_ops.flops import call_scores, register_flops
from tl_attention.torch_ops.transforms import define_op, empty_results, register_autograd, register_vmap

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # out, lse, their tangents
TANGENTS = "tq", "tk", "tv"
# Inputs of an op after its tensors, by their public names
ARGUMENT_NAMES = *Call._fields, *PUBLIC_NAMES.values()


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> Outputs:
    call = Call(*others[len(TANGENTS) :])
    return *empty_results(q, v, call.heads_first), *empty_results(q, v, call.heads_first)


@define_op(
    "fwd_jvp",
    f"(Tensor q, Tensor k, Tensor v, Tensor? tq, Tensor? tk, Tensor? tv, {PLAIN_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def fwd_jvp_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tq: torch.Tensor | None,
    tk: torch.Tensor | None,
    tv: torch.Tensor | None,
    *arguments: object,
) -> Outputs:
    """The forward with its derivative along (tq, tk, tv): a launch, or the reference on CPU tensors."""
    call = Call(*arguments)
    tensors = q, k, v, tq, tk, tv
    if q.device.type != "cpu":
        check_device(q)
        return launch.forward_jvp(*tensors, call.softmax_scale, call.causal, call.lse_base2, call.heads_first)
    if call.heads_first:
        tensors = (None if x is None else x.transpose(1, 2) for x in tensors)
    out, lse, tout, tlse = attention_jvp_reference(
        *tensors, call.softmax_scale, call.causal, lse_base2=call.lse_base2
    )
    if call.heads_first:
        out, tout = out.transpose(1, 2), tout.transpose(1, 2)
    return out.to(q.dtype).contiguous(), lse, tout.to(q.dtype).contiguous(), tlse


def _flops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tq: Any, tk: Any, tv: Any, *arguments: Any
) -> int:
    """FLOPs of S = QKᵀ and O = PV, and of their derivatives along the tangents that are there."""
    given_q, given_k, given_v = (x is not None for x in (tq, tk, tv))
    columns = (1 + given_q + given_k) * q.shape[-1] + (1 + (given_q or given_k) + given_v) * v.shape[-1]
    return 2 * call_scores(q, k, arguments) * columns


register_flops(_flops, "fwd_jvp")


def push_forward(inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Compute the outputs of the forward op and their tangents.

    Args:
        inputs: arguments of the op: q, k, v, fields of Call and of Options.
        tangents: one per input; None is 0. One of another dtype than its tensor, which torch allows, is rounded to that dtype.
    Raises:
        NotImplementedError: the call has options or head dims above 128, or a tensor other than q, k, v has a tangent.
    """
    (q, k, v, *arguments), along, others = inputs, tangents[:3], tangents[3:]
    if any(x is not None for x in others):
        refuse_tangents(
            "flash_attn_func and mha_fwd_interface have forward-mode derivatives along q, k and v alone",
            ARGUMENT_NAMES,
            others,
        )
    call, options = parse_arguments(arguments)
    check_jvp(q, v, () if options is None else options.on)
    along = (None if x is None else x.to(q.dtype) for x in along)
    out, lse, *moved = fwd_jvp_op(q, k, v, *along, *call)
    return (out, lse), tuple(moved)


def refuse_max_logits(inputs: Sequence[Any], tangents: Sequence[Any]) -> NoReturn:
    """Refuse the tangents of the inputs of the forward op with max_logits."""
    raise NotImplementedError(
        "return_max_logits: expected False in a forward-mode derivative, got True; compute max_logits in a call of its own, of"
        " q.detach(), k.detach() and v.detach()"
    )


def refuse_to_push_gradients(inputs: Sequence[Any], tangents: Sequence[Any]) -> None:
    """Refuse the tangents of the inputs of the backward op."""
    names = "do", "q", "k", "v", "out", "lse", "dlse", *ARGUMENT_NAMES
    refuse_tangents(
        "gradients of flash_attn_func and mha_fwd_interface have no forward-mode derivative", names, tangents
    )


def _refuse_second(inputs: Sequence[Any], tangents: Sequence[Any]) -> None:
    names = "q", "k", "v", *TANGENTS
    refuse_tangents(
        "forward-mode derivatives of flash_attn_func and mha_fwd_interface have none of their own",
        names,
        tangents,
    )


def register_jvp(save: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Register the derivatives of fwd_jvp_op: out and lse have the gradient of the forward op; gradients of tangents are refused.

    Args:
        save, backward: as registered for the forward op, see transforms.register_autograd.
    """

    def save_primals(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        q, k, v, *others = inputs
        save(ctx, (q, k, v, *others[len(TANGENTS) :]), outputs[:2])

    def backward_of_primals(
        ctx: Any, dout: Any, dlse: Any, *of_tangents: torch.Tensor | None
    ) -> tuple[Any, ...]:
        if any(x is not None for x in of_tangents):
            raise NotImplementedError(
                "tl_attention: the gradient of a forward-mode tangent is not supported; detach the tangent (stop the gradient), or use"
                " ref_mha_fwd_interface"
            )
        dq, dk, dv, *rest = backward(ctx, dout, dlse)
        return dq, dk, dv, *[None] * len(TANGENTS), *rest

    register_autograd(fwd_jvp_op, save_primals, backward_of_primals, _refuse_second)
    register_vmap(fwd_jvp_op, "rrrrrr", (("r", 0), ("l", 0)) * 2)
