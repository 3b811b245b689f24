"""Calls with functions of scores inside torch.compile: an op that the compiler keeps, and its gradients.

The functions are recorded while torch.compile traces the call. The op gets their texts, and all that they capture as arguments: a new
length or value of a tensor compiles nothing again. When it runs, it makes the functions of the texts and calls attend_functions(), which
knows them as it knows functions in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from tl_attention.api.flex_calls import attend_functions, check_request
from tl_attention.api.flex_lists import block_mask_of
from tl_attention.checks.common import is_dtensor
from tl_attention.checks.flex import FLEX_NAMES, LISTS, batched_gradients, no_second_order, transformed
from tl_attention.problem.request import Functions, Request, new_request
from tl_attention.problem.uncompiled import uncompiled
from tl_attention.torch_ops.flops import backward_flops, forward_flops, register_flops, scores_of
from tl_attention.torch_ops.ops import scale_of
from tl_attention.torch_ops.transforms import (
    Outputs,
    define_composite_op,
    define_op,
    empty_results,
    register_autograd_of_lists,
    register_batched_gradients_error,
    register_vmap_error,
    with_max_logits,
)
from tl_attention.tracing.captures import is_tracing
from tl_attention.tracing.record import POSITIONS, Recording, rebuilt


class _Call(NamedTuple):
    """Arguments of the ops after their tensors of rows.

    Args:
        attn_bias: as in flex_attention.
        captured: tensors that the functions capture; ints, floats: numbers, and constants.
        lists: those of a BlockMask in the order of LISTS, without the last two if it has none of full blocks; [] without a BlockMask.
        blocks: its BLOCK_SIZE and seq_lengths; [] without one.
        score_mod, mask_mod: texts of Recording; the latter that of the BlockMask, if there is one.
        scale, deterministic, precision, heads_first, batch_invariant: as in Request.
    """

    attn_bias: torch.Tensor | None
    captured: Sequence[torch.Tensor]
    lists: Sequence[torch.Tensor]
    ints: Sequence[int]
    floats: Sequence[float]
    blocks: Sequence[int]
    score_mod: str
    mask_mod: str
    scale: float
    deterministic: bool
    precision: str | None
    heads_first: bool
    batch_invariant: bool

    @property
    def functions(self) -> Functions:
        score_mod, mask_mod = (
            rebuilt(text, self.captured, self.ints, self.floats) for text in (self.score_mod, self.mask_mod)
        )
        if not self.lists:
            return score_mod, mask_mod, None, self.attn_bias
        return score_mod, None, block_mask_of(self.lists, tuple(self.blocks), mask_mod), self.attn_bias

    def request(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_logits: bool = False) -> Request:
        return new_request(
            q, k, v, self.scale, False, self.deterministic, self.precision, batch_invariant=self.batch_invariant,
            heads_first=self.heads_first, functions=self.functions, max_logits=max_logits,
        )  # fmt: skip


_ARGUMENTS = (
    "Tensor? attn_bias, Tensor[] captured, Tensor[] lists, SymInt[] ints, float[] floats, SymInt[] blocks, str score_mod, str mask_mod,"
    " float scale, bool deterministic, str? precision, bool heads_first,"
    " bool batch_invariant"
)


def attend_compiled(request: Request) -> Outputs:
    """attend_functions() as torch.compile traces it."""
    q, k, v, scale, _, deterministic, precision = request[:7]
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        return _attend_eagerly(request)
    check_request(request)
    score_mod, mask_mod, block_mask, attn_bias = request.functions
    lists, blocks = [], []
    if block_mask is not None:
        mask_mod = block_mask.mask_mod
        lists = [x for x in [getattr(block_mask, name) for name in LISTS] if x is not None]
        blocks = [*block_mask.BLOCK_SIZE, *block_mask.seq_lengths]
    like = q.detach()
    recording = Recording(
        {"score": leaf_op(like, True), **{name: leaf_op(like, False) for name in POSITIONS}}
    )
    texts = recording.text("score_mod", score_mod), recording.text("mask_mod", mask_mod)
    captured = recording.tensors, lists, recording.ints, recording.floats, blocks
    others = scale_of(q, scale), deterministic, precision, request.heads_first, request.batch_invariant
    op = flex_max_logits_op if request.max_logits else flex_op
    return op(q, k, v, attn_bias, *captured, *texts, *others)


_attend_eagerly = uncompiled(attend_functions)


class _Leaf(torch.Tensor):
    """Argument of a recorded function, and all that is computed from it, where a graph runs without AOTAutograd."""


def _zero(like: torch.Tensor, is_score: bool) -> torch.Tensor:
    return like.new_zeros((), dtype=torch.float32 if is_score else torch.int32)


@define_op("traced_leaf", "(Tensor like, bool is_score) -> Tensor", _zero)
def traced_leaf_op(like: torch.Tensor, is_score: bool) -> torch.Tensor:
    """A leaf that a graph uses: an operation on it was not recorded, so its result looks like a captured tensor."""
    raise _hidden_operation()


def _hidden_operation() -> NotImplementedError:
    return NotImplementedError(
        "score_mod, mask_mod: expected operations that torch.compile shows one by one, got one that it hides, such as Python's abs(), a"
        " function of torch.compiler.allow_in_graph, a value of the other function or code at a graph break; write it as operations of"
        " torch, x.abs() for abs(x), or call the function in code of torch.compiler.disable"
    )


@define_composite_op("leaf", "(Tensor like, bool is_score) -> Tensor")
def leaf_op(like: torch.Tensor, is_score: bool) -> torch.Tensor:
    """An argument of a recorded function. AOTAutograd drops it from a graph, with all that is computed from it, if nothing uses that."""
    if is_tracing():
        return traced_leaf_op(like, is_score)
    return _zero(like, is_score).as_subclass(_Leaf)


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Outputs:
    return empty_results(q, v, _Call(*arguments).heads_first)


@define_op("flex", f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)", _fake_forward)
def flex_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Outputs:
    """The forward: a launch, or the reference on CPU tensors."""
    return _forward(q, k, v, arguments)


@define_op(
    "flex_max_logits",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    with_max_logits(_fake_forward),
)
def flex_max_logits_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Outputs:
    """flex_op with max_logits, an op of its own: exported programs hold the outputs of flex_op."""
    return _forward(q, k, v, arguments, max_logits=True)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Sequence[Any], max_logits: bool = False
) -> Outputs:
    call = _Call(*arguments)
    if any(isinstance(x, _Leaf) for x in call.captured):
        raise _hidden_operation()
    with torch.no_grad():
        out, *numbers = attend_functions(call.request(q, k, v, max_logits))
    return out.contiguous(), *numbers


def _fake_backward(*arguments: Any) -> list[torch.Tensor]:
    _dout, _dlse, _out, _lse, q, k, v, wanted, *of_call = arguments
    call = _Call(*of_call)
    inputs = q, k, v, call.attn_bias, *call.captured
    return [inputs[i].new_empty(inputs[i].shape) for i in wanted]


@define_op(
    "flex_bwd",
    "(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, int[] wanted,"
    f" {_ARGUMENTS}) -> Tensor[]",
    _fake_backward,
)
def flex_bwd_op(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    wanted: Sequence[int],
    *arguments: Any,
) -> list[torch.Tensor]:
    """Gradients of the wanted ones of q, k, v, attn_bias and captured tensors, in this order, by the backward of eager calls."""
    from tl_attention.tracing.trace import above_autograd  # here, as it takes time to import

    call = _Call(*arguments)
    inputs = [q, k, v, call.attn_bias, *call.captured]
    for i in range(len(inputs)):
        if i in wanted:
            inputs[i] = inputs[i].detach().requires_grad_()
        elif inputs[i] is not None and inputs[i].requires_grad:
            inputs[i] = inputs[i].detach()
    q, k, v, bias, *captured = inputs
    with torch.enable_grad(), above_autograd():
        request = call._replace(attn_bias=bias, captured=captured).request(q, k, v)
        results = attend_functions(request, (out.detach(), lse.detach()))
        given = [(y, dy) for y, dy in zip(results, (dout, dlse), strict=True) if dy is not None]
        outputs, grads = zip(*given, strict=True)
        learned = [inputs[i] for i in wanted]
        grads = torch.autograd.grad(outputs, learned, grads, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(learned, grads, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, *arguments = inputs
    call = _Call(*arguments)
    learned = q, k, v, call.attn_bias, *call.captured
    ctx.wanted = [i for i, x in enumerate(learned) if x is not None and x.requires_grad]
    ctx.call, ctx.captured = call._replace(attn_bias=None, captured=[], lists=[]), len(call.captured)
    out, lse, *largest = output
    ctx.save_for_backward(out, lse, q, k, v, call.attn_bias, *call.captured, *call.lists)
    ctx.mark_non_differentiable(*largest)
    ctx.set_materialize_grads(False)  # no zeros for an unused lse


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    out, lse, q, k, v, bias, *others = ctx.saved_tensors
    call = ctx.call._replace(attn_bias=bias, captured=others[: ctx.captured], lists=others[ctx.captured :])
    grads: list[torch.Tensor | None] = [None] * (4 + ctx.captured)
    if dout is not None or dlse is not None:
        found = flex_bwd_op(dout, dlse, out, lse, q, k, v, ctx.wanted, *call)
        for i, grad in zip(ctx.wanted, found, strict=True):
            grads[i] = grad
    # torch counts an empty list as one of tensors
    others = [[] if isinstance(x, list) and not x else None for x in call[3:]]
    return *grads[:4], grads[4:], [None] * len(call.lists), *others


def _forward_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> int:
    return forward_flops(scores_of(q, k, _Call(*arguments).heads_first), q, v)


def _backward_flops(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, wanted: Any, *arguments: Any
) -> int:
    return backward_flops(scores_of(q, k, _Call(*arguments).heads_first), q, v)


def _no_double_backward(ctx: Any, *grads: Any) -> NoReturn:
    raise no_second_order(FLEX_NAMES.function)


register_autograd_of_lists(flex_op, _save, _backward)
register_autograd_of_lists(flex_max_logits_op, _save, _backward)
register_autograd_of_lists(flex_bwd_op, None, _no_double_backward)
register_flops(_forward_flops, "flex", "flex_max_logits")
register_flops(_backward_flops, "flex_bwd")
for _op in (flex_op, flex_max_logits_op):
    register_vmap_error(_op, transformed(FLEX_NAMES.function))
register_batched_gradients_error(flex_bwd_op, batched_gradients(FLEX_NAMES.function))
