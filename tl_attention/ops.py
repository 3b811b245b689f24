"""Forward and backward as torch ops, with schemas and fakes, so that torch.compile traces through them without a break."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from tl_attention import dispatch
from tl_attention.checks import check_device, check_no_forward_ad
from tl_attention.reference import attention_backward_reference, attention_reference

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("tl_attention::fwd", mutates_args=(), device_types=("cuda", "cpu"))
def fwd_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dispatch.fwd, or the reference on CPU tensors; deterministic is for its backward."""
    if q.device.type != "cpu":
        check_device(q)
        return dispatch.fwd(q, k, v, softmax_scale, causal, lse_base2, heads_first)
    out, lse = attention_reference(q, k, v, softmax_scale, causal, lse_base2=lse_base2)
    return _laid_out(out.to(q.dtype), heads_first), lse


@fwd_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
    deterministic: bool,
) -> Outputs:
    batch, seqlen_q, heads, _ = q.shape
    out = dispatch.empty_view(q, batch, seqlen_q, heads, v.shape[3], heads_first)
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


@torch.library.custom_op("tl_attention::bwd", mutates_args=(), device_types=("cuda", "cpu"))
def bwd_op(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dispatch.bwd, or the reference on CPU tensors."""
    if q.device.type != "cpu":
        check_device(q)
        deterministic |= torch.are_deterministic_algorithms_enabled()
        return dispatch.bwd(
            dout, q, k, v, out, lse, softmax_scale, causal, lse_base2, heads_first, deterministic, dlse
        )
    grads = attention_backward_reference(dout, q, k, v, softmax_scale, causal, dlse=dlse, lse_base2=lse_base2)
    return tuple(_laid_out(grad.to(q.dtype), heads_first) for grad in grads)


@bwd_op.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
    deterministic: bool,
) -> Gradients:
    return tuple(dispatch.empty_view(x, *x.shape, heads_first) for x in (q, k, v))


def _laid_out(x: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """x [batch, seqlen, heads, head_dim], in memory as dispatch.empty_view lays it out."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else x.contiguous()


def _save(ctx: Any, inputs: tuple, output: Outputs) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # no zeros for an lse that nobody used


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
    rest = (None,) * len(ctx.options)
    if dout is None and dlse is None:
        return None, None, None, *rest
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    return *bwd_op(dout, q, k, v, out, lse, dlse, *ctx.options), *rest


def _no_double_backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(
        "tl_attention: the gradient of a gradient is not supported; call backward without create_graph=True, or use"
        " ref_mha_fwd_interface"
    )


fwd_op.register_autograd(_backward, setup_context=_save)
bwd_op.register_autograd(_no_double_backward)

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
    deterministic: bool = False,
) -> Outputs:
    """The one way in of the public functions; [batch, seqlen, heads, head_dim] views, checked.

    Straight to the launch where nobody looks: the bookkeeping of the op costs more than the rest of the call.
    """
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    check_no_forward_ad()
    if q.device.type == "cpu":
        _warn_of_cpu()
    elif q.device.type != "cuda" or not _someone_looks(q, k, v):
        check_device(q)
        return dispatch.fwd(q, k, v, scale, causal, lse_base2, heads_first)
    return fwd_op(q, k, v, scale, causal, lse_base2, heads_first, deterministic)


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
    deterministic: bool,
) -> Gradients:
    """The gradients of attention() for dout, of views as it has them."""
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    if q.device.type == "cpu":
        _warn_of_cpu()
    return bwd_op(dout, q, k, v, out, lse, None, scale, causal, lse_base2, heads_first, deterministic)


def _warn_of_cpu() -> None:
    global _warned_of_cpu
    if not _warned_of_cpu and not torch.compiler.is_compiling():
        _warned_of_cpu = True
        warnings.warn(
            "tl_attention: CPU tensors run the plain PyTorch reference, which is slow", stacklevel=4
        )
