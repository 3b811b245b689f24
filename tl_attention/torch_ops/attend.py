"""Calls of attention without functions of scores: from a Request to a launch, or to the ops of torch.

A call whose signature is that of an earlier one skips the checks, and finds its launch plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tl_attention import launch
from tl_attention.checks.common import (
    FWD_DTYPES,
    check_device,
    check_fwd,
    check_lengths,
    check_options,
    check_splits,
    describe,
    expect_bool,
    is_dtensor,
)
from tl_attention.checks.fp32 import check_precision, runs_in_bf16
from tl_attention.launch import kept_call
from tl_attention.problem.options import (
    BATCH_INVARIANT,
    GRADIENTS,
    MAX_SCALE,
    PER_HEAD,
    PUBLIC_NAMES,
    TENSOR_RULES,
    Call,
    Options,
    as_stored_eagerly,
    canonical_window,
)
from tl_attention.problem.request import Request
from tl_attention.torch_ops.dropout import draw, dropout_state_op
from tl_attention.torch_ops.dtensors import Axes, Shards, axes_of_rows
from tl_attention.torch_ops.ops import (
    Outputs,
    Plan,
    differentiable,
    in_bf16,
    is_traced,
    run,
    run_eagerly,
    scale_of,
)

# Bound once: each dot costs 20 ns of a plain call
_Tensor, _FLOAT32, _is_grad_enabled = torch.Tensor, torch.float32, torch.is_grad_enabled
# Fields of Options that have a number per head, and their place in a Request
_PLACES = tuple((name, Request._fields.index(PUBLIC_NAMES[name])) for name in PER_HEAD)
_LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"


class _KnownCall(NamedTuple):
    """Facts that follow from the signature of a call that has passed the checks. They hold no tensor.

    Attributes:
        causal, options: in canonical form; the options without their tensors, None if all are off.
        takes_tensors: the options have some.
        default_scale: softmax_scale where the call has none.
    """

    causal: bool
    options: Options | None
    takes_tensors: bool
    default_scale: float
    plan: Plan


def attend(request: Request) -> Outputs:
    """Results of a call: (out, lse), with max_logits (out, lse, max_logits). Its arguments are unchecked, except for max_logits.

    The signature of a call is all that its checks and its launch plan depend on: metadata of tensors, and numbers with their types, as
    1, 1.0 and True are equal. It holds no tensor. A device is its index, which suffices as only a q on a GPU has a signature.
    """
    (
        q, k, v, softmax_scale, causal, deterministic, precision, window_size, softcap, dropout_p, slopes, sink, rng_state, num_splits,
        batch_invariant, lengths, heads_first, lse_base2, _, _, max_logits,
    ) = request  # fmt: skip
    known = signature = None
    if (
        type(q) is type(k) is type(v) is _Tensor
        and not is_traced()
        and q.is_cuda
        and type(causal) is type(deterministic) is type(batch_invariant) is bool
        and (
            softmax_scale is None
            or (type(softmax_scale) is float and -MAX_SCALE <= softmax_scale <= MAX_SCALE)
        )
        and type(window_size) in (tuple, list)
        and len(window_size) == 2
    ):
        left, right = window_size
        try:
            facts = ()
            if q.dtype is _FLOAT32:
                if q.is_neg() or k.is_neg() or v.is_neg():  # launch.forward makes copies
                    raise _Unknown
                precision = torch.get_float32_matmul_precision() if precision is None else precision
            if not (lengths is slopes is sink is rng_state is None):
                facts = _facts(request)
            signature = (
                q.shape, q.stride(), q.dtype, q.get_device(),
                k.shape, k.stride(), k.dtype, k.get_device(),
                v.shape, v.stride(), v.dtype, v.get_device(),
                causal, heads_first, left, right, softcap, dropout_p, num_splits, batch_invariant, max_logits,
                type(left), type(right), type(softcap), type(dropout_p), type(num_splits), precision, facts,
            )  # fmt: skip
            known = kept_call(signature)
        # A nested or sparse tensor, an option without a hash, settings of torch that differ, tensors that each call checks
        except (RuntimeError, TypeError, _Unknown):
            signature = None
    if known is None:
        return _attend_new(request, signature)
    causal, options, takes_tensors, default_scale, plan = known
    scale = default_scale if softmax_scale is None else softmax_scale
    call = scale, causal, lse_base2, heads_first, deterministic
    if options is not None:
        options = options_with_tensors(request, options) if takes_tensors else options
        return run_eagerly(q, k, v, call, options, plan)
    if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return differentiable(call, None, plan, q, k, v)
    return plan(q, k, v, scale, lse_base2)


class _Unknown(Exception):
    """A call that is checked each time."""


def _facts(request: Request) -> tuple:
    """Part of a signature: metadata of the tensors of options, and upper bounds of lengths."""
    facts: list[Any] = []
    tensors = (request.rng_state,)
    if request.lengths is not None:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k = request.lengths
        # With seqused_q launch_forward() clears rows; a bound that is a tensor is replaced by the number of rows
        if seqused_q is not None or not (type(max_seqlen_q) is type(max_seqlen_k) is int):
            raise _Unknown
        facts += max_seqlen_q, max_seqlen_k
        tensors = request.rng_state, cu_seqlens_q, cu_seqlens_k, seqused_k
    for name, place in _PLACES:
        x = request[place]
        if x is None:
            facts.append(None)
            continue
        learned = name in GRADIENTS
        if type(x) is not _Tensor and not (learned and type(x) is torch.nn.Parameter):
            raise _Unknown
        if not learned and x.requires_grad and _is_grad_enabled():
            raise _Unknown
        facts += x.shape, x.stride(), x.dtype, x.device
    for x in tensors:
        if x is None:
            facts.append(None)
        elif type(x) is _Tensor:
            facts += x.shape, x.stride(), x.dtype, x.device
        else:
            raise _Unknown
    return tuple(facts)


def options_with_tensors(request: Request, options: Options) -> Options:
    """Options of a call whose signature is known: those of an earlier call, which lack its tensors, with the tensors of this one."""
    tensors = _per_head(request)
    if request.dropout_p:
        tensors["rng_state"] = _state_of_dropout(request)
    if request.lengths is not None:
        tensors["cu_seqlens_q"], tensors["cu_seqlens_k"], _, _, _, tensors["seqused_k"] = request.lengths
    return options.with_tensors(**tensors)


def _per_head(request: Request) -> dict[str, torch.Tensor]:
    """Tensors of options with a number per head, by fields of Options, as a launch takes them."""
    tensors = {}
    for name, place in _PLACES:
        x = request[place]
        if x is not None:
            tensors[name] = as_stored_eagerly(x).contiguous()
    return tensors


def _attend_new(request: Request, signature: tuple | None) -> Outputs:
    """Check a call and compute its results. signature: key under which its facts are kept; None: nothing is kept."""
    q, k, v, softmax_scale, causal, deterministic, *_ = request
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        return _on_shards(request)
    packed, heads_first = request.lengths is not None, request.heads_first
    check_fwd(q, k, v, softmax_scale, causal, heads_first, packed, FWD_DTYPES)
    expect_bool("deterministic", deterministic)
    causal, options = checked_options(request, k.shape[0])
    if runs_in_bf16(q, options.parts):
        return in_bf16(lambda q, k, v: attend(request._replace(q=q, k=k, v=v, precision=None)), q, k, v)
    options = None if options.is_off else options
    call = Call(scale_of(q, softmax_scale), causal, request.lse_base2, heads_first, deterministic)
    plan = None
    if signature is not None:  # q is on a GPU
        check_device(q)
        others = {"max_logits": request.max_logits, "deterministic": deterministic}
        plan = launch.fwd_plan(q, k, v, causal, heads_first, options, **others)
    if plan is None:
        return run(q, k, v, call, options, request.max_logits)
    takes_tensors = options is not None and any(x is not None for x in options.tensors())
    kept = None if options is None else options.without_tensors()
    launch.keep_call(signature, _KnownCall(causal, kept, takes_tensors, scale_of(q, None), plan))
    return run_eagerly(q, k, v, call, options, plan)


def with_derivatives(request: Request, results: Outputs) -> Outputs:
    """Results of an earlier call of the same request, now with derivatives. Nothing is computed.

    results: new tensors, as autograd changes them.
    """
    q, k, v, softmax_scale, _, deterministic, *_ = request
    causal, options = checked_options(request, k.shape[0])
    if runs_in_bf16(q, options.parts):
        out, *numbers = results
        half = out.bfloat16(), *numbers
        return in_bf16(
            lambda q, k, v: with_derivatives(request._replace(q=q, k=k, v=v, precision=None), half), q, k, v
        )
    call = Call(scale_of(q, softmax_scale), causal, request.lse_base2, request.heads_first, deterministic)
    return run_eagerly(q, k, v, call, None if options.is_off else options, lambda *_: results)


def checked_options(request: Request, keys: int) -> tuple[bool, Options]:
    """(causal, options) of a call in canonical form, checked. keys: upper bound of the keys of a packed sequence."""
    q, dropout_p, lengths, batch = request.q, request.dropout_p, {}, request.q.shape[0]
    if request.lengths is not None:
        check_lengths(q, *request.lengths)
        lengths = dict(zip(_LENGTHS, request.lengths, strict=True))
        batch = lengths["cu_seqlens_q"].shape[0] - 1
        # Reading a tensor would synchronize with the GPU; the total number of rows bounds a length, too
        for name, rows in (("max_seqlen_q", q.shape[0]), ("max_seqlen_k", keys)):
            if isinstance(lengths[name], torch.Tensor):
                lengths[name] = rows
    check_splits(request.num_splits, request.batch_invariant, dropout_p, request.max_logits)
    check_options(q, batch, request)
    causal, window = canonical_window(request.causal, request.window_size)
    return causal, Options(
        window=window,
        softcap=float(request.softcap),
        dropout_p=float(dropout_p),
        num_splits=BATCH_INVARIANT if request.batch_invariant else request.num_splits,
        parts=check_precision(q, request.precision),
        rng_state=_state_of_dropout(request) if dropout_p else None,
        **lengths,
        **_per_head(request),
    )


def _state_of_dropout(request: Request) -> torch.Tensor:
    """rng_state of a launch, contiguous: that of the call, else a drawn one."""
    if request.rng_state is None:
        return dropout_state_op(request.q) if is_traced() else draw(request.q)
    return request.rng_state.contiguous()


def _on_shards(request: Request) -> Outputs:
    """attend() of DTensors, on this rank's batch entries and heads."""
    if request.dropout_p:
        raise NotImplementedError(
            "dropout_p: expected 0 with DTensors, as a mask depends on batch entry and head, got"
            f" {describe(request.dropout_p)}; call .to_local() on q, k and v"
        )
    lengths, own = request.lengths, {}
    q, k, v, *_ = request
    shards = Shards(q, k, v, axes_of_rows(request.heads_first, packed=lengths is not None))
    own["rng_state"] = shards.replicated("rng_state", request.rng_state)
    for name, place in _PLACES:
        x, rule = request[place], TENSOR_RULES[name]
        axes = Axes(*(rule.axis(size, getattr(x, "ndim", 1)) for size in ("batch", "heads")))
        own[PUBLIC_NAMES[name]] = shards.option(PUBLIC_NAMES[name], x, axes)
    if lengths is not None:
        lengths = tuple(shards.replicated(name, x) for name, x in zip(_LENGTHS, lengths, strict=True))
    local = request._replace(lengths=lengths, **own)
    return shards.run(lambda q, k, v: attend(local._replace(q=q, k=k, v=v)), q, k, v)
