"""Forward and backward as torch ops, with schemas and fakes, so that torch.compile traces through them without a break."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tl_attention import launch
from tl_attention.checks import (
    check_bwd,
    check_deterministic,
    check_device,
    check_fwd,
    check_lengths,
    check_no_forward_ad,
    check_num_splits,
    check_options,
)
from tl_attention.options import NUMBERS, SCHEMA, SINK, Options, canonical_window, of_arguments, rows_in_use
from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    varlen_backward_reference,
    varlen_reference,
)

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, ...]  # dq, dk, dv, and dsink where there is a sink

# What both ops take after their tensors; defaults are for calls without options
ARGUMENTS = (
    f"float softmax_scale, bool causal, bool lse_base2, bool heads_first, bool deterministic, {SCHEMA}"
)
PLAIN = 5  # of ARGUMENTS, before the options


@torch.library.custom_op(
    "tl_attention::fwd",
    mutates_args=(),
    device_types=("cuda", "cpu"),
    schema=f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> (Tensor, Tensor)",
)
def fwd_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_base2: bool,
    heads_first: bool,
    deterministic: bool,
    *arguments: object,  # of Options
) -> Outputs:
    """launch.forward, or the reference on CPU tensors; deterministic is for its backward."""
    options = of_arguments(*arguments)
    if q.device.type != "cpu":
        check_device(q)
        return _launched(q, k, v, softmax_scale, lse_base2, causal, heads_first, options)
    qkv = _seqlen_first(heads_first, q, k, v)
    out, lse = _reference(
        attention_reference, varlen_reference, qkv, softmax_scale, causal, options, lse_base2=lse_base2
    )
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
    *arguments: object,
) -> Outputs:
    *batch, n1, n2, _ = q.shape
    rows = (n1, n2) if heads_first else (n2, n1)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((*batch, *rows), dtype=torch.float32)


@torch.library.custom_op(
    "tl_attention::bwd",
    mutates_args=(),
    device_types=("cuda", "cpu"),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse,"
    f" {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
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
    *arguments: object,
) -> Gradients:
    """launch.backward, or the reference on CPU tensors; without a sink its gradient is empty."""
    if q.device.type != "cpu":
        check_device(q)
        grads = _launched_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse,
            softmax_scale,
            causal,
            lse_base2,
            heads_first,
            deterministic,
            *arguments,
        )
        return grads if len(grads) == 4 else (*grads, q.new_empty(0))
    options = of_arguments(*arguments)
    grads = _reference(
        attention_backward_reference,
        varlen_backward_reference,
        _seqlen_first(heads_first, dout, q, k, v),
        softmax_scale,
        causal,
        options,
        lse_base2=lse_base2,
        dlse=dlse,
    )
    dsink = q.new_empty(0) if len(grads) == 3 else grads[3].to(options.sink.dtype)
    return *(x.to(q.dtype).contiguous() for x in _seqlen_first(heads_first, *grads[:3])), dsink


@bwd_op.register_fake
def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> Gradients:
    options = of_arguments(*others[3 + PLAIN :])  # after out, lse and dlse
    sink = None if options is None else options.sink
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsink


def _seqlen_first(heads_first: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[batch, heads, seqlen, head_dim] as [batch, seqlen, heads, head_dim] views, or back; the latter alone."""
    return [x.transpose(1, 2) for x in tensors] if heads_first else [*tensors]


def _reference(
    dense: Callable[..., tuple],
    varlen: Callable[..., tuple],
    tensors: list[torch.Tensor],  # q, k and v the last of them
    softmax_scale: float,
    causal: bool,
    options: Options | None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    if options is None:
        return dense(*tensors, softmax_scale, causal, **others)
    score_options = {name: getattr(options, name) for name in ("window", "softcap", "alibi_slopes", "sink")}
    q, k, _ = tensors[-3:]
    lengths = options.cu_seqlens_q, options.cu_seqlens_k
    if options.dropout_p:
        sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        if options.varlen:
            batch = len(options.cu_seqlens_q) - 1
            longest = (max(cu.diff().tolist(), default=0) for cu in lengths)
            sizes = batch, q.shape[1], *longest
        score_options["dropout_p"] = options.dropout_p
        score_options["keep"] = dropout_keep(options.rng_state, *sizes, options.dropout_p)
    if not options.varlen:
        return dense(*tensors, softmax_scale, causal, **score_options, **others)
    used = {"seqused_q": options.seqused_q, "seqused_k": options.seqused_k}
    return varlen(*tensors, *lengths, softmax_scale, causal, **used, **score_options, **others)


def _launched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    lse_base2: bool,
    causal: bool,
    heads_first: bool,
    options: Options | None,
) -> Outputs:
    if options is None:
        return launch.forward(q, k, v, softmax_scale, causal, lse_base2, heads_first)
    out, lse = launch.forward(q, k, v, softmax_scale, causal, lse_base2, heads_first, options=options)
    if options.seqused_q is not None:
        unused = ~rows_in_use(options.cu_seqlens_q, options.seqused_q, q.shape[0])
        out.masked_fill_(unused[:, None, None], 0)
        lse.masked_fill_(unused, -math.inf)
    return out, lse


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
    *arguments: object,
) -> Gradients:
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    tensors = dout, q, k, v, out, lse
    options = of_arguments(*arguments)
    if options is None or not options.names:  # num_splits is of the forward
        return launch.backward(*tensors, softmax_scale, causal, lse_base2, heads_first, deterministic, dlse)
    grads = launch.backward(
        *tensors, softmax_scale, causal, lse_base2, heads_first, deterministic, dlse, options=options
    )
    of_q = options.cu_seqlens_q, options.seqused_q
    of_k = options.cu_seqlens_k, options.seqused_k
    for grad, (cu_seqlens, seqused) in zip(grads[:3], (of_q, of_k, of_k), strict=True):
        if seqused is not None:
            unused = ~rows_in_use(cu_seqlens, seqused, grad.shape[0])
            grad.masked_fill_(unused[:, None, None], 0)
    return grads


def _save(ctx: Any, inputs: Sequence, output: Outputs) -> None:
    q, k, v, *arguments = inputs
    ctx.arguments = arguments[: PLAIN + NUMBERS]
    ctx.save_for_backward(q, k, v, *output, *arguments[PLAIN + NUMBERS :])
    ctx.set_materialize_grads(False)  # no zeros for an lse that nobody used


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
    q, k, v, out, lse, *others = ctx.saved_tensors
    rest = [None] * (len(ctx.arguments) + len(others))
    if dout is None and dlse is None:
        return None, None, None, *rest
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = dout, q, k, v, out, lse
    looked_at = torch.is_grad_enabled() or someone_looks() or not _are_plain(*tensors)
    run = bwd_op if looked_at or not q.is_cuda else _launched_backward
    grads = run(*tensors, dlse, *ctx.arguments, *others)
    sink = PLAIN + SINK  # the argument
    # The dispatcher passes no None at the end
    if others and others[SINK - NUMBERS] is not None and ctx.needs_input_grad[3 + sink]:
        rest[sink] = grads[3]
    return *grads[:3], *rest


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
    def forward(ctx: Any, *inputs: Any) -> Outputs:
        """inputs: those of fwd_op, and launch(q, k, v, softmax_scale, lse_base2=) -> out, lse."""
        *inputs, launch = inputs
        q, k, v, softmax_scale, _, lse_base2, *_ = inputs
        outputs = launch(q, k, v, softmax_scale, lse_base2=lse_base2)
        _save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        return *_backward(ctx, dout, dlse), None


# Past Function.apply, which looks for transforms of torch.func: those see fwd_op
_differentiable = super(torch.autograd.Function, _Attention).apply

_warned_of_cpu = False


def someone_looks() -> bool:
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
    """The way in of the public functions without options, with arguments as they came.

    Straight to the launch where nobody looks, as the bookkeeping of the op costs more than the rest of the call; and without
    checks if tensors of this metadata have passed them before.
    """
    looked_at = someone_looks() or not (type(q) is type(k) is type(v) is torch.Tensor)
    launch = None
    if not looked_at and _may_be_known(q, softmax_scale, causal, deterministic):
        launch = launch.fwd_plan(q, k, v, causal, heads_first)
    if launch is None:
        check_fwd(q, k, v, softmax_scale, causal, heads_first)
        check_deterministic(deterministic)
        check_no_forward_ad()
        if q.device.type == "cpu":
            warn_of_cpu()
        elif q.device.type != "cuda" or not looked_at:
            check_device(q)

    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    if looked_at or not q.is_cuda:
        return fwd_op(q, k, v, scale, causal, lse_base2, heads_first, deterministic)
    launch = launch or functools.partial(launch.forward, causal=causal, heads_first=heads_first)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _differentiable(q, k, v, scale, causal, lse_base2, heads_first, deterministic, launch)
    return launch(q, k, v, scale, lse_base2=lse_base2)


def attention_with_options(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    dropout_p: float,
    alibi_slopes: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    lengths: tuple | None = None,  # what check_lengths takes beside q
    num_splits: int = 0,
) -> Outputs:
    """attention() in natural log with all the options of flash.py, as they came; lengths of [total, heads, head_dim] tensors."""
    check_fwd(q, k, v, softmax_scale, causal, heads_first=False, varlen=lengths is not None)
    check_deterministic(deterministic)
    check_no_forward_ad()
    cu_seqlens_q = cu_seqlens_k = seqused_q = seqused_k = None
    max_seqlens, batch = [0, 0], q.shape[0]
    if lengths is not None:
        check_lengths(q, *lengths)
        cu_seqlens_q, cu_seqlens_k, *max_seqlens, seqused_q, seqused_k = lengths
        batch = cu_seqlens_q.shape[0] - 1
        # To read a tensor would be to wait for the GPU
        max_seqlens = [
            x.shape[0] if isinstance(n, torch.Tensor) else n for x, n in zip((q, k), max_seqlens, strict=True)
        ]
    check_num_splits(num_splits)
    check_options(q, batch, window_size, softcap, dropout_p, alibi_slopes, learnable_sink, rng_state)
    causal, window = canonical_window(causal, window_size)
    if not dropout_p:
        rng_state = None
    elif rng_state is None:
        rng_state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    options = Options(
        window,
        float(softcap),
        float(dropout_p),
        *max_seqlens,
        num_splits,
        rng_state,
        None if alibi_slopes is None else alibi_slopes.contiguous(),
        None if learnable_sink is None else learnable_sink.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
    )
    if options.is_off:
        return attention(q, k, v, softmax_scale, causal, False, False, deterministic)

    sink = None if options.sink is None else options.sink.detach()
    others = (alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    looked_at = someone_looks() or not _are_plain(q, k, v, *(x for x in others if x is not None))
    if q.device.type == "cpu":
        warn_of_cpu()
    elif q.device.type != "cuda" or not looked_at:
        check_device(q)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    arguments = scale, causal, False, False, deterministic, *options.arguments()
    if looked_at or not q.is_cuda:
        return fwd_op(q, k, v, *arguments)
    launch = functools.partial(
        _launched, causal=causal, heads_first=False, options=dataclasses.replace(options, sink=sink)
    )
    differentiable = (q, k, v) if learnable_sink is None else (q, k, v, learnable_sink)
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiable):
        return _differentiable(q, k, v, *arguments, launch)
    return launch(q, k, v, scale, lse_base2=False)


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
        someone_looks()
        or not _are_plain(*tensors)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )
    plan = None
    if not looked_at and _may_be_known(q, softmax_scale, causal, deterministic):
        fixed_order = deterministic or torch.are_deterministic_algorithms_enabled()
        plan = launch.bwd_plan(*tensors, causal, True, fixed_order)
    if plan is None:
        check_fwd(q, k, v, softmax_scale, causal, heads_first=True)
        check_bwd(*tensors, deterministic)
        if q.device.type == "cpu":
            warn_of_cpu()
        elif not looked_at:
            check_device(q)

    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    if plan is not None:
        return plan(*tensors, scale, True)
    run = bwd_op if looked_at or not q.is_cuda else _launched_backward
    return run(*tensors, None, scale, causal, True, True, deterministic)[:3]


def warn_of_cpu() -> None:
    global _warned_of_cpu
    if torch.compiler.is_compiling() or _warned_of_cpu:
        return
    _warned_of_cpu = True
    caller = 1
    while sys._getframe(caller).f_globals["__name__"].startswith("tl_attention."):
        caller += 1
    warnings.warn(
        "tl_attention: CPU tensors run the plain PyTorch reference, which is slow", stacklevel=caller + 1
    )
