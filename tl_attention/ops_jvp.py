"""The forward with its derivative along a direction as a torch op, which serves forward-mode differentiation of the forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tl_attention import launch
from tl_attention.checks import check_device
from tl_attention.checks_torch import check_jvp, refuse_tangents
from tl_attention.options import PLAIN_ARGUMENTS, Call, parse_arguments
from tl_attention.reference_jvp import attention_jvp_reference
from tl_attention.transforms import define_op

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # out, lse, their tangents
TANGENTS = ("tq", "tk", "tv")


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> Outputs:
    call = Call(*others[len(TANGENTS) :])
    batch, n1, n2, _ = q.shape
    rows = (n1, n2) if call.heads_first else (n2, n1)
    out, tout = (q.new_empty((*q.shape[:-1], v.shape[-1])) for _ in range(2))
    lse, tlse = (q.new_empty((batch, *rows), dtype=torch.float32) for _ in range(2))
    return out, lse, tout, tlse


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


def push_forward(names: Sequence[str], inputs: Sequence, tangents: Sequence) -> tuple[tuple, tuple]:
    """Outputs of the forward op, and their tangents.

    Args:
        names: of the inputs, for errors.
        inputs: those of the op: q, k, v, fields of Call and of Options.
        tangents: one per input; None is 0.
    Raises:
        NotImplementedError: the call has options, head dims above 128, or a tangent of another tensor than q, k, v.
    """
    (q, k, v, *arguments), along, others = inputs, tangents[:3], tangents[3:]
    if any(x is not None for x in others):
        refuse_tangents(
            "flash_attn_func and mha_fwd_interface have forward-mode derivatives along q, k and v alone",
            names[3:],
            others,
        )
    call, options = parse_arguments(arguments)
    check_jvp(q, v, () if options is None else options.on)
    out, lse, *moved = fwd_jvp_op(q, k, v, *along, *call)
    return (out, lse), tuple(moved)
