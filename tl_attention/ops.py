"""The forward as a torch op, with a schema and a fake, so that torch.compile traces through it without a break."""

from __future__ import annotations

import math
import warnings

import torch

from tl_attention import dispatch
from tl_attention.checks import check_device, check_no_forward_ad
from tl_attention.reference import attention_reference

Outputs = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("tl_attention::fwd", mutates_args=(), device_types=("cuda", "cpu"))
def fwd_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dispatch.fwd, or the reference on CPU tensors."""
    if q.device.type != "cpu":
        check_device(q)
        return dispatch.fwd(q, k, v, softmax_scale, causal, lse_base2, heads_first)
    out, lse = attention_reference(q, k, v, softmax_scale, causal, lse_base2=lse_base2)
    out = out.to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else out.contiguous(), lse


@fwd_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
) -> Outputs:
    batch, seqlen_q, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if heads_first:
        return q.new_empty((batch, heads, seqlen_q, v.shape[3])).transpose(1, 2), lse
    return q.new_empty((batch, seqlen_q, heads, v.shape[3])), lse


def _no_backward(ctx: object, *grads: torch.Tensor) -> None:
    raise NotImplementedError(
        "the backward of tl_attention is not built yet; call it under torch.no_grad() or detach q, k and v"
    )


fwd_op.register_autograd(_no_backward)

_warned_of_cpu = False


def _someone_looks(*tensors: torch.Tensor) -> bool:
    """Whether a tracer, a mode, a transform, a subclass or autograd has to see the op."""
    return (
        torch.compiler.is_compiling()
        or any(type(x) is not torch.Tensor for x in tensors)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
) -> Outputs:
    """The one way in of the public functions; [batch, seqlen, heads, head_dim] views, checked.

    Straight to the launch where nobody looks: the bookkeeping of the op costs more than the rest of the call.
    """
    global _warned_of_cpu
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    check_no_forward_ad()
    if q.device.type == "cpu":
        if not _warned_of_cpu and not torch.compiler.is_compiling():
            _warned_of_cpu = True
            warnings.warn(
                "tl_attention: CPU tensors run the plain PyTorch reference, which is slow", stacklevel=3
            )
    elif q.device.type != "cuda" or not _someone_looks(q, k, v):
        check_device(q)
        return dispatch.fwd(q, k, v, scale, causal, lse_base2, heads_first)
    return fwd_op(q, k, v, scale, causal, lse_base2, heads_first)
