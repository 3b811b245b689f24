"""Launches and derivatives of calls with functions of scores: flex_attention after its checks and traces."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tl_attention import launch
from tl_attention.checks.flex import (
    FLASH_NAMES,
    FLEX_NAMES,
    Names,
    batched_gradients,
    no_second_order,
)
from tl_attention.checks.fp32 import has_gradient_kernels
from tl_attention.problem.options import Options
from tl_attention.problem.program import Call
from tl_attention.reference.flex import flex_backward_reference, flex_reference
from tl_attention.torch_ops.flops import is_seen, scores_of, show_backward, show_forward, unseen
from tl_attention.torch_ops.ops import is_batched
from tl_attention.torch_ops.transforms import empty_results


def run_forward(
    call: Call,
    layout: tuple[float, bool, bool],
    options: Options | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(out, lse), with max_logits also these, by the kernels, on the CPU by the reference.

    Args:
        layout: scale, heads_first, deterministic.
        options: terms and splits alone; None: default splits of tensors that are not fp32.
    """
    scale, heads_first, deterministic = layout
    if is_seen():
        show_forward(scores_of(q, k, heads_first), q, v)
    if q.is_cuda:
        others = {"deterministic": deterministic, "max_logits": max_logits}
        return launch.forward(
            q, k, v, scale, False, False, heads_first, options=options, traced=call, **others
        )
    inputs = (q, k, v) if heads_first else transposed(q, k, v)
    with unseen():
        out, *numbers = flex_reference(*inputs, scale, call, max_logits=max_logits)
    out = out.to(q.dtype)
    return (out if heads_first else out.transpose(1, 2).contiguous()), *numbers


class _Flex(torch.autograd.Function):
    """Differentiable launch on a GPU, or reference on the CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        layout: tuple[float, bool, bool],
        options: Options | None,
        results: tuple[torch.Tensor, ...] | None,
        *inputs: torch.Tensor,
    ) -> tuple[Any, ...]:
        """inputs: q, k, v, captured tensors. layout, options: as in run_forward(). results: as in attend_functions()."""
        q, k, v, *_ = inputs
        results = run_forward(call, layout, options, q, k, v) if results is None else results
        out, lse, *largest = results
        ctx.mark_non_differentiable(*largest)
        ctx.asked = call.program, call.numbers, call.blocks, layout, options
        ctx.save_for_backward(out, lse, *inputs)
        ctx.set_materialize_grads(False)  # no zeros for an unused lse
        return out, lse, *largest

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
        out, lse, q, k, v, *tensors = ctx.saved_tensors
        program, numbers, blocks, layout, options = ctx.asked
        scale, heads_first, deterministic = layout
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        if dout is None and dlse is None:
            return *[None] * 7, *grads
        names = FLEX_NAMES if heads_first else FLASH_NAMES
        given = dout, dlse
        if any(map(is_batched, given)):
            raise batched_gradients(names.function)
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        call = Call(program, tuple(tensors), numbers, blocks)
        if is_seen():
            show_backward(scores_of(q, k, heads_first), q, v)
        if q.is_cuda and has_gradient_kernels(q, v, 0 if options is None else options.parts):
            others = {"options": options, "traced": call}
            modes = False, False, heads_first, deterministic, dlse
            found = launch.backward(dout, q, k, v, out, lse, scale, *modes, **others)
        else:
            inputs = (dout, q, k, v) if heads_first else transposed(dout, q, k, v)
            with unseen():
                dq, dk, dv, *sums = flex_backward_reference(inputs[0], dlse, *inputs[1:], scale, call)
            rows = (dq, dk, dv) if heads_first else transposed(dq, dk, dv)
            found = dict(zip(("q", "k", "v", *program.learned), (*rows, *sums), strict=True))
        for i in program.learned:
            grads[i] = found[i].to(tensors[i].dtype)
        grads = [found["q"], found["k"], found["v"], *grads]
        if torch.is_grad_enabled():
            grads = _Once.apply(names, len(grads), *grads, *given, q, k, v, *tensors)
        return *[None] * 4, *grads


# Skips Function.apply, which looks for transforms of torch.func: check_not_transformed() refuses them
differentiable = super(torch.autograd.Function, _Flex).apply


class _Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated, where a backward is recorded (create_graph=True)."""

    @staticmethod
    def forward(
        ctx: Any, names: Names, number: int, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """names: of the caller. tensors: `number` gradients, then what they depend on."""
        ctx.names = names
        return tuple(None if x is None else x.detach() for x in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> NoReturn:
        raise no_second_order(ctx.names.function)


class Shapes(torch.autograd.Function):
    """Results and gradients of fake tensors."""

    @staticmethod
    def forward(ctx: Any, heads_first: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs: q, k, v, captured tensors."""
        q, k, v, *_ = inputs
        ctx.scores = scores_of(q, k, heads_first)
        show_forward(ctx.scores, q, v)
        ctx.inputs = [(x.shape, x.dtype) for x in inputs]
        ctx.save_for_backward(q, v)
        ctx.names = FLEX_NAMES if heads_first else FLASH_NAMES
        return empty_results(q, v, heads_first)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
        q, v = ctx.saved_tensors
        show_backward(ctx.scores, q, v)
        asked = zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
        grads = [q.new_empty(shape, dtype=dtype) if needs else None for (shape, dtype), needs in asked]
        if torch.is_grad_enabled():
            grads = _Once.apply(ctx.names, len(grads), *grads, dout, dlse, q)
        return None, *grads


def transposed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)
