"""Forward and backward as torch ops, with schemas and fakes, so that torch.compile traces them without a graph break.

To save host time a call skips the op if nothing traces it: see attend.py, and attention_backward for a backward without autograd.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tl_attention import launch
from tl_attention.checks.common import (
    FWD_DTYPES,
    check_bwd,
    check_device,
    check_fwd,
)
from tl_attention.checks.fp32 import check_precision, has_gradient_kernels, runs_in_bf16
from tl_attention.checks.lengths import check_cpu_lengths
from tl_attention.checks.transforms import warn_about_cpu
from tl_attention.problem.options import (
    ARGUMENTS,
    FIELDS,
    GRADIENTS,
    MAX_SCALE,
    NUMBERS,
    PLAIN,
    TENSORS,
    Call,
    Options,
    options_of_terms,
    parse_arguments,
    rows_in_use,
    saveable,
    writing,
)
from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    varlen_backward_reference,
    varlen_reference,
)
from tl_attention.torch_ops.flops import backward_flops, call_scores, forward_flops, register_flops
from tl_attention.torch_ops.jvp import (
    push_forward,
    refuse_max_logits,
    refuse_to_push_gradients,
    register_jvp,
)
from tl_attention.torch_ops.transforms import (
    Outputs,
    define_op,
    empty_results,
    register_autograd,
    register_vmap,
    with_max_logits,
)

LOG = logging.getLogger(__name__)

Plan = Callable[..., Outputs]  # of a launch, called as FwdPlan
Gradients = dict[str, torch.Tensor]  # by name: q, k, v, and fields of Options
# Inputs of fwd_op by name, and outputs of bwd_op: a gradient per tensor that has one
INPUTS = "q", "k", "v", *Call._fields, *FIELDS
DIFFERENTIABLE = "q", "k", "v", *GRADIENTS


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: object) -> Outputs:
    return empty_results(q, v, Call(*arguments[:PLAIN]).heads_first)


@define_op("fwd", f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> (Tensor, Tensor)", _fake_forward)
def fwd_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: object) -> Outputs:
    """The forward: a launch, or the reference on CPU tensors."""
    return _forward(q, k, v, *parse_arguments(arguments))


@define_op(
    "fwd_max_logits",
    f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    with_max_logits(_fake_forward),
)
def fwd_max_logits_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: object) -> Outputs:
    """fwd_op with max_logits, an op of its own: exported programs hold the outputs of fwd_op."""
    return _forward(q, k, v, *parse_arguments(arguments), max_logits=True)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    options: Options | None,
    max_logits: bool = False,
) -> Outputs:
    """A launch, or the reference on CPU tensors."""
    if q.device.type != "cpu":
        check_device(q)
        return launch_forward(q, k, v, call, options, max_logits=max_logits)
    if options is not None and options.varlen:
        check_cpu_lengths(q, k, options)
    qkv, asked = _transpose_if(call.heads_first, q, k, v), {"max_logits": True} if max_logits else {}
    out, *numbers = _reference(attention_reference, varlen_reference, qkv, call, options, **asked)
    (out,) = _transpose_if(call.heads_first, out.to(q.dtype))
    return out.contiguous(), *numbers


def _fake_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object
) -> tuple[torch.Tensor, ...]:
    _, options = parse_arguments(others[3:])  # after out, lse, dlse
    grads = {name: x.new_empty(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    for name in _differentiable_options(options):
        x = getattr(options, name)
        grads[name] = x.new_empty(x.shape)
    return _outputs(grads, q)


def _differentiable_options(options: Options | None) -> list[str]:
    """Tensors of options that have a gradient."""
    return [] if options is None else [name for name in GRADIENTS if getattr(options, name) is not None]


def _outputs(grads: Gradients, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results of bwd_op: an empty tensor stands for a gradient that a call lacks."""
    return tuple([grads[name] if name in grads else q.new_empty(0) for name in DIFFERENTIABLE])


@define_op(
    "bwd",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {ARGUMENTS})"
    f" -> ({', '.join(['Tensor'] * len(DIFFERENTIABLE))})",
    _fake_backward,
)
def bwd_op(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *arguments: object,
) -> tuple[torch.Tensor, ...]:
    """The backward: a launch, or the reference on CPU tensors. Gradients in the order of DIFFERENTIABLE; empty where a call lacks one."""
    call, options = parse_arguments(arguments)
    if q.device.type == "cpu":
        grads = _reference_backward(dlse, call, options, dout, q, k, v)
    else:
        check_device(q)
        grads = _launch_backward(dout, q, k, v, out, lse, dlse, call, options)
    return _outputs(grads, q)


def run_backward_op(
    tensors: Sequence[torch.Tensor],
    dlse: torch.Tensor | None,
    call: Sequence,
    options: Options | None = None,
) -> Gradients:
    """Gradients by name, by bwd_op. tensors: dout, q, k, v, out, lse. call: fields of Call."""
    arguments = () if options is None else options.arguments()
    grads = zip(DIFFERENTIABLE, bwd_op(*tensors, dlse, *call, *arguments), strict=True)
    found = "q", "k", "v", *_differentiable_options(options)
    return {name: grad for name, grad in grads if name in found}


def _reference_backward(dlse: Any, call: Call, options: Options | None, *tensors: torch.Tensor) -> Gradients:
    """Gradients computed by the reference. tensors: dout, q, k, v."""
    references = attention_backward_reference, varlen_backward_reference
    found = _reference(*references, _transpose_if(call.heads_first, *tensors), call, options, dlse=dlse)
    names = _differentiable_options(options)
    of_options = {name: x.to(getattr(options, name).dtype) for name, x in zip(names, found[3:], strict=True)}
    rows = _transpose_if(call.heads_first, *found[:3])
    return {
        name: x.to(tensors[0].dtype).contiguous() for name, x in zip("qkv", rows, strict=True)
    } | of_options


def _transpose_if(heads_first: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[batch, heads, seqlen, head_dim] tensors as [batch, seqlen, heads, head_dim] views, or back."""
    return [x.transpose(1, 2) for x in tensors] if heads_first else [*tensors]


def _reference(
    dense: Callable[..., tuple[Any, ...]],
    varlen: Callable[..., tuple[Any, ...]],
    tensors: list[torch.Tensor],  # q, k and v the last of them
    call: Call,
    options: Options | None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    others["lse_base2"] = call.lse_base2
    if options is None:
        return dense(*tensors, call.softmax_scale, call.causal, **others)
    others |= options.reference_arguments()
    q, k, _ = tensors[-3:]
    lengths = options.cu_seqlens_q, options.cu_seqlens_k
    if options.dropout_p:
        sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        if options.varlen:
            batch = len(options.cu_seqlens_q) - 1
            longest = (max(cu.diff().tolist(), default=0) for cu in lengths)
            sizes = batch, q.shape[1], *longest
        others["dropout_p"] = options.dropout_p
        others["keep"] = dropout_keep(options.rng_state, *sizes, options.dropout_p, options.position)
    if not options.varlen:
        return dense(*tensors, call.softmax_scale, call.causal, **others)
    used = {"seqused_q": options.seqused_q, "seqused_k": options.seqused_k}
    return varlen(*tensors, *lengths, call.softmax_scale, call.causal, **used, **others)


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    options: Options | None,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    max_logits: bool = False,
) -> Outputs:
    """launch.forward, with defined values in the unused rows of packed sequences: out 0, lse -inf."""
    *layout, deterministic = call
    others = {"options": options, "block_table": block_table, "out": out, "deterministic": deterministic}
    out, lse, *largest = launch.forward(q, k, v, *layout, **others, max_logits=max_logits)
    if options is not None and options.seqused_q is not None:
        unused = ~rows_in_use(options.cu_seqlens_q, options.seqused_q, q.shape[0])
        with writing(out):
            out.masked_fill_(unused[:, None, None], 0)
        lse.masked_fill_(unused, -math.inf)
    return out, lse, *largest


def _launch_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    call: Call,
    options: Options | None,
) -> Gradients:
    """launch.backward, with gradient 0 in the unused rows of packed sequences; the reference where fp32 has no kernels."""
    if options is not None and not has_gradient_kernels(q, v, options.parts):
        LOG.debug(
            "gradients of fp32 head dims %d, %d -> PyTorch's formula (no kernels)", q.shape[-1], v.shape[-1]
        )
        return _reference_backward(dlse, call, options, dout, q, k, v)
    *layout, deterministic = call
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    tensors = dout, q, k, v, out, lse
    if options is not None and not (options.names or options.parts or options.batch_invariant):
        options = None  # splits matter to the forward alone
    grads = launch.backward(*tensors, *layout, deterministic, dlse, options=options)
    if options is None:
        return grads
    of_q = options.cu_seqlens_q, options.seqused_q
    of_k = options.cu_seqlens_k, options.seqused_k
    for name, (cu_seqlens, seqused) in (("q", of_q), ("k", of_k), ("v", of_k)):
        if seqused is not None:
            unused = ~rows_in_use(cu_seqlens, seqused, grads[name].shape[0])
            grads[name].masked_fill_(unused[:, None, None], 0)
    return grads


def _save(ctx: Any, inputs: Sequence[Any], output: Outputs) -> None:
    q, k, v, *arguments = inputs
    out, lse, *largest = output
    ctx.arguments = arguments[: PLAIN + NUMBERS]
    ctx.save_for_backward(q, k, v, out, lse, *map(saveable, arguments[PLAIN + NUMBERS :]))
    ctx.mark_non_differentiable(*largest)
    ctx.set_materialize_grads(False)  # no zeros for an unused lse


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    """Gradients of the inputs of fwd_op, by bwd_op."""
    q, k, v, out, lse, *option_tensors = ctx.saved_tensors
    arguments = *ctx.arguments, *option_tensors
    # Not strict: the torch dispatcher leaves out trailing Nones
    inputs = dict(zip(INPUTS, (q, k, v, *arguments), strict=False))
    if dout is None and dlse is None:
        return (None,) * len(inputs)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = dict(zip(DIFFERENTIABLE, bwd_op(dout, q, k, v, out, lse, dlse, *arguments), strict=True))
    return tuple(grads.get(name) if isinstance(x, torch.Tensor) else None for name, x in inputs.items())


def _no_double_backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(
        "tl_attention: the gradient of a gradient is not supported; call backward without create_graph=True, or use"
        " ref_mha_fwd_interface"
    )


register_autograd(fwd_op, _save, _backward, push_forward)
register_autograd(fwd_max_logits_op, _save, _backward, refuse_max_logits)
register_autograd(bwd_op, None, _no_double_backward, refuse_to_push_gradients)
register_jvp(_save, _backward)
register_flops(
    lambda q, k, v, *arguments: forward_flops(call_scores(q, k, arguments), q, v),
    "fwd",
    "fwd_max_logits",
)
register_flops(
    lambda dout, q, k, v, out, lse, dlse, *arguments: backward_flops(call_scores(q, k, arguments), q, v),
    "bwd",
)
register_vmap(fwd_op, "rrr", (("r", 0), ("l", 0)))
register_vmap(fwd_max_logits_op, "rrr", (("r", 0), ("l", 0), ("l", 0)))
register_vmap(bwd_op, "rrrrrll", (("r", 1), ("r", 2), ("r", 3), *((name, 1) for name in GRADIENTS)))


class _Attention(torch.autograd.Function):
    """A launch in eager mode, with less bookkeeping than fwd_op."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple,
        options: Options | None,
        plan: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *learned: torch.Tensor | None,
    ) -> Outputs:
        """call: fields of Call. learned: GRADIENTS of the options."""
        results = plan(q, k, v, call[0], call[2], options)
        out, lse = results[:2]
        if len(results) > 2:
            ctx.mark_non_differentiable(results[2])
        ctx.call, ctx.options = call, None
        if options is None:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.options = options.without_tensors()
            ctx.save_for_backward(q, k, v, out, lse, *options.tensors())
        ctx.set_materialize_grads(False)  # no zeros for an unused lse
        return results

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *option_tensors = ctx.saved_tensors
        call, options = Call(*ctx.call), ctx.options
        if options is not None:
            options = options.with_tensors(**dict(zip(TENSORS, option_tensors, strict=True)))
        if dout is None:
            dout = torch.zeros_like(out)
        tensors = dout, q, k, v, out, lse
        traced = torch.is_grad_enabled() or is_traced() or is_batched(dout) or is_batched(dlse)
        if traced or not are_plain(*tensors) or not q.is_cuda:
            grads = run_backward_op(tensors, dlse, call, options)
        else:
            grads = _launch_backward(*tensors, dlse, call, options)
        _, _, _, *wanted = ctx.needs_input_grad
        return (
            None,
            None,
            None,
            *[grads[name] if wants else None for name, wants in zip(DIFFERENTIABLE, wanted, strict=False)],
        )


# Skips Function.apply, which looks for transforms of torch.func: a traced call runs fwd_op instead
differentiable = super(torch.autograd.Function, _Attention).apply


# Bound once: each dot costs 20 ns of a plain call
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_forward_ad = torch.autograd.forward_ad


def is_traced() -> bool:
    """True if a tracer, a dispatch mode or a transform of torch must see the op."""
    return (
        _is_compiling()
        or _dispatch_modes() > 0
        or _innermost_transform() is not None
        or _tracing_state() is not None
        or _forward_ad._current_level >= 0
    )


def is_batched(grad: torch.Tensor | None) -> bool:
    """True for a gradient of torch.autograd.grad(is_grads_batched=True), which is_traced does not see."""
    return grad is not None and _is_legacy_batched(grad)


def are_plain(*tensors: object) -> bool:
    """True if all are torch.Tensor and no subclass of it, which may intercept the op."""
    return all(type(x) is torch.Tensor for x in tensors)


def has_plain_values(q: torch.Tensor, softmax_scale: object, causal: object, deterministic: object) -> bool:
    """True if the checks of a call with these values depend on tensor metadata only."""
    return (
        q.is_cuda
        and (
            softmax_scale is None
            or (type(softmax_scale) is float and -MAX_SCALE <= softmax_scale <= MAX_SCALE)
        )
        and type(causal) is type(deterministic) is bool
    )


def check_device_or_warn(q: torch.Tensor, traced: bool) -> None:
    """Refuse a device without kernels; warn about the slow reference on the CPU. A traced call on a GPU is checked when it runs."""
    if q.device.type == "cpu":
        warn_about_cpu()
    elif q.device.type != "cuda" or not traced:
        check_device(q)


def scale_of(q: torch.Tensor, softmax_scale: float | None) -> float:
    """softmax_scale, by default head_dim ** -0.5."""
    return 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)


def in_bf16(run: Callable[..., tuple[Any, ...]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results of run() on fp32 tensors rounded to bf16, as fp32: a call whose products have one bf16 term."""
    return tuple(x.float() for x in run(*[x.bfloat16() for x in tensors]))


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    options: Options | None,
    max_logits: bool = False,
) -> Outputs:
    """(out, lse) from checked arguments; with max_logits (out, lse, max_logits)."""
    arguments, learned = (), ()
    if options is not None:
        arguments, learned = options.arguments(), options.learned()
    others = (x for x in arguments[NUMBERS:] if x is not None and not any(x is y for y in learned))
    of_learned = all(type(x) in (torch.Tensor, torch.nn.Parameter, type(None)) for x in learned)
    traced = is_traced() or not (of_learned and are_plain(q, k, v, *others))
    check_device_or_warn(q, traced)
    if traced or not q.is_cuda:
        return (fwd_max_logits_op if max_logits else fwd_op)(q, k, v, *call, *arguments)

    def plan(
        q: Any, k: Any, v: Any, scale: float, lse_base2: bool, options: Options | None = None
    ) -> Outputs:
        return launch_forward(q, k, v, call, options, max_logits=max_logits)

    return run_eagerly(q, k, v, call, options, plan)


def run_eagerly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: tuple[Any, ...],
    options: Options | None,
    plan: Plan,
) -> Outputs:
    """(out, lse) of plain tensors on a GPU. call: fields of Call."""
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    learned = ()
    if options is not None:
        learned = options.learned()
        for name, x in zip(GRADIENTS, learned, strict=True):
            if x is None:
                continue
            wants_gradient = wants_gradient or (x.requires_grad and torch.is_grad_enabled())
            if type(x) is not torch.Tensor:
                options = options.with_tensors(**{name: x.detach()})  # makes a plain tensor of a parameter
    if not wants_gradient:
        return plan(q, k, v, call[0], call[2], options)
    try:
        return differentiable(call, options, plan, q, k, v, *learned)
    except RuntimeError:  # torch cannot save a tensor of inference mode: asking each tensor would take time
        if options is None:
            raise
        saved = {name: saveable(x) for name, x in zip(TENSORS, options.tensors(), strict=True)}
        if all(x is getattr(options, name) for name, x in saved.items()):
            raise
        return differentiable(call, options.with_tensors(**saved), plan, q, k, v, *map(saveable, learned))


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
    precision: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of a call with base-2 lse and heads first, from the unchecked arguments of a public function."""
    tensors = dout, q, k, v, out, lse
    traced = (
        is_traced()
        or not are_plain(*tensors)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )
    if precision is None and not traced and has_plain_values(q, softmax_scale, causal, deterministic):
        fixed_order = deterministic or torch.are_deterministic_algorithms_enabled()
        plan = launch.bwd_plan(*tensors, causal, True, fixed_order)
        if plan is not None:
            return tuple(plan(*tensors, scale_of(q, softmax_scale), True).values())
    check_fwd(q, k, v, softmax_scale, causal, heads_first=True, dtypes=FWD_DTYPES)
    check_bwd(dout, q, v, out, lse, deterministic)
    terms = check_precision(q, precision)
    if runs_in_bf16(q, terms):
        given = lse, softmax_scale, causal, deterministic
        return in_bf16(lambda *half: attention_backward(*half, *given), dout, q, k, v, out)
    check_device_or_warn(q, traced)
    call = Call(scale_of(q, softmax_scale), causal, True, True, deterministic)
    options = options_of_terms(terms)
    if traced or not q.is_cuda:
        return tuple(run_backward_op(tensors, None, call, options).values())
    return tuple(_launch_backward(*tensors, None, call, options).values())
