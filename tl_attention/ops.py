"""Forward and backward as torch ops, with schemas and fakes, so that torch.compile traces through them without a break."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tl_attention import dispatch
from tl_attention.checks import check_bwd, check_deterministic, check_device, check_fwd, check_no_forward_ad
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
    q, k, v = _seqlen_first(heads_first, q, k, v)
    out, lse = attention_reference(q, k, v, softmax_scale, causal, lse_base2=lse_base2)
    (out,) = _seqlen_first(heads_first, out.to(q.dtype))
    return out.contiguous(), lse


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
    n0, n1, n2, _ = q.shape
    heads, seqlen_q = (n1, n2) if heads_first else (n2, n1)
    return q.new_empty((n0, n1, n2, v.shape[3])), q.new_empty((n0, heads, seqlen_q), dtype=torch.float32)


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
        return _launched_backward(
            dout, q, k, v, out, lse, dlse, softmax_scale, causal, lse_base2, heads_first, deterministic
        )
    views = _seqlen_first(heads_first, dout, q, k, v)
    grads = attention_backward_reference(*views, softmax_scale, causal, dlse=dlse, lse_base2=lse_base2)
    return tuple(x.to(q.dtype).contiguous() for x in _seqlen_first(heads_first, *grads))


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
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _seqlen_first(heads_first: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[batch, heads, seqlen, head_dim] as [batch, seqlen, heads, head_dim] views, or back; the latter alone."""
    return [x.transpose(1, 2) for x in tensors] if heads_first else [*tensors]


def _launched_backward(
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
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return dispatch.bwd(
        dout, q, k, v, out, lse, softmax_scale, causal, lse_base2, heads_first, deterministic, dlse
    )


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
    tensors = dout, q, k, v, out, lse
    looked_at = torch.is_grad_enabled() or _someone_looks() or not _are_plain(*tensors)
    run = bwd_op if looked_at or not q.is_cuda else _launched_backward
    return *run(*tensors, dlse, *ctx.options), *rest


def _no_double_backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(
        "tl_attention: the gradient of a gradient is not supported; call backward without create_graph=True, or use"
        " ref_mha_fwd_interface"
    )


fwd_op.register_autograd(_backward, setup_context=_save)
bwd_op.register_autograd(_no_double_backward)


class _Attention(torch.autograd.Function):
    """fwd_op in eager mode, with less bookkeeping."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Callable[..., Outputs],  # (q, k, v, softmax_scale, lse_base2=) -> out, lse
        *options: float | bool,  # as fwd_op has them
    ) -> Outputs:
        softmax_scale, _, lse_base2, *_ = options
        outputs = launch(q, k, v, softmax_scale, lse_base2=lse_base2)
        _save(ctx, (q, k, v, *options), outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        return *_backward(ctx, dout, dlse), None


# Past Function.apply, which looks for transforms of torch.func: those see fwd_op
_differentiable = super(torch.autograd.Function, _Attention).apply

_warned_of_cpu = False


def _someone_looks() -> bool:
    """Whether a tracer, a mode or a transform has to see the op."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _are_plain(*tensors: object) -> bool:
    """Whether all are tensors, and of no class that looks into what is done with them."""
    return all(type(x) is torch.Tensor for x in tensors)


def _may_be_known(q: torch.Tensor, softmax_scale: object, causal: object, deterministic: object) -> bool:
    """Whether the checks of a call on such tensors are all about their metadata."""
    return (
        q.is_cuda
        and (softmax_scale is None or (type(softmax_scale) is float and math.isfinite(softmax_scale)))
        and type(causal) is type(deterministic) is bool
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
    """The one way in of the public functions, with arguments as they came.

    Straight to the launch where nobody looks, as the bookkeeping of the op costs more than the rest of the call; and without
    checks if tensors of this metadata have passed them before.
    """
    looked_at = _someone_looks() or not (type(q) is type(k) is type(v) is torch.Tensor)
    launch = None
    if not looked_at and _may_be_known(q, softmax_scale, causal, deterministic):
        launch = dispatch.fwd_plan(q, k, v, causal, heads_first)
    if launch is None:
        check_fwd(q, k, v, softmax_scale, causal, heads_first)
        check_deterministic(deterministic)
        check_no_forward_ad()
        if q.device.type == "cpu":
            _warn_of_cpu()
        elif q.device.type != "cuda" or not looked_at:
            check_device(q)

    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    if looked_at or not q.is_cuda:
        return fwd_op(q, k, v, scale, causal, lse_base2, heads_first, deterministic)
    launch = launch or functools.partial(dispatch.fwd, causal=causal, heads_first=heads_first)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _differentiable(q, k, v, launch, scale, causal, lse_base2, heads_first, deterministic)
    return launch(q, k, v, scale, lse_base2=lse_base2)


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
) -> Gradients:
    """The gradients of attention() in base 2 and heads first, with arguments as they came; short cuts as there."""
    tensors = dout, q, k, v, out, lse
    looked_at = (
        _someone_looks()
        or not _are_plain(*tensors)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )
    plan = None
    if not looked_at and _may_be_known(q, softmax_scale, causal, deterministic):
        fixed_order = deterministic or torch.are_deterministic_algorithms_enabled()
        plan = dispatch.bwd_plan(*tensors, causal, True, fixed_order)
    if plan is None:
        check_fwd(q, k, v, softmax_scale, causal, heads_first=True)
        check_bwd(*tensors, deterministic)
        if q.device.type == "cpu":
            _warn_of_cpu()
        elif not looked_at:
            check_device(q)

    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    if plan is not None:
        return plan(*tensors, scale, True)
    run = bwd_op if looked_at or not q.is_cuda else _launched_backward
    return run(*tensors, None, scale, causal, True, True, deterministic)


def _warn_of_cpu() -> None:
    global _warned_of_cpu
    if not _warned_of_cpu and not torch.compiler.is_compiling():
        _warned_of_cpu = True
        warnings.warn(
            "tl_attention: CPU tensors run the plain PyTorch reference, which is slow", stacklevel=4
        )
