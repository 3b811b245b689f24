"""torch ops that work under torch.func: their definition, autograd, and batching rules for torch.vmap.

torch.func refuses the backward of an op made by torch.library.custom_op (torch 2.14), so this module defines the ops of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from tl_attention.problem.options import ALIKE_IN_BATCH, FIELDS, LENGTHS, PER_HEAD, PLAIN, Call
from tl_attention.problem.uncompiled import uncompiled

NAMESPACE = "tl_attention"
_libraries: dict[str, torch.library.Library] = {}  # by op, or op and rule
_innermost_transform = torch._C._functorch.peek_interpreter_stack
_forward_ad = torch.autograd.forward_ad
_JVP = torch._C._functorch.TransformType.Jvp


Outputs = tuple[torch.Tensor, ...]  # out, lse, and max_logits of a call that asks for these


def empty_results(q: torch.Tensor, v: torch.Tensor, heads_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a forward without their values, for fakes; with packed sequences heads_first is False."""
    *outer, n1, n2, _ = q.shape
    rows = (n1, n2) if heads_first else (n2, n1)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((*outer, *rows), dtype=torch.float32)


def with_max_logits(fake: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """The fake of an op that returns max_logits after what `fake` returns."""

    def with_them(*arguments: Any) -> Outputs:
        out, lse = fake(*arguments)
        return out, lse, torch.empty_like(lse)

    return with_them


def define_op(
    name: str, schema: str, fake: Callable, tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable], torch._ops.OpOverload]:
    """Define an op that runs the decorated function on CPU and CUDA tensors; fake computes the metadata of its outputs."""

    def define(kernel: Callable) -> torch._ops.OpOverload:
        library = _define(name, schema, tags)
        kernel = uncompiled(kernel)
        for device in ("CPU", "CUDA"):
            library.impl(name, kernel, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define


def define_composite_op(name: str, schema: str) -> Callable[[Callable], torch._ops.OpOverload]:
    """Define an op that runs the decorated function, made of other ops, wherever torch calls or traces it."""

    def define(kernel: Callable) -> torch._ops.OpOverload:
        _define(name, schema, ()).impl(name, uncompiled(kernel), "CompositeImplicitAutograd")
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define


def _define(name: str, schema: str, tags: Sequence[torch.Tag]) -> torch.library.Library:
    library = _new_library(name)
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    return library


def _library_of(op: torch._ops.OpOverload, rule: str) -> torch.library.Library:
    """Library for one rule of an op, "autograd" or "vmap"."""
    return _new_library(f"{op._opname} {rule}")


def _new_library(name: str) -> torch.library.Library:
    """Library in the place of one of that name, which a module that is loaded again has left: torch 2.11 overrides no rule."""
    if name in _libraries:
        _libraries[name]._destroy()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    return library


def register_autograd_of_lists(op: torch._ops.OpOverload, save: Callable | None, backward: Callable) -> None:
    """Register the derivatives of an op with lists of tensors for autograd alone. save, backward: as in torch.library.register_autograd."""
    name = op._opname
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=save, lib=_library_of(op, "autograd")
    )


def register_vmap_error(op: torch._ops.OpOverload, error: Exception) -> None:
    """Register an error for an op that would have to run under torch.vmap."""
    torch.library.register_vmap(f"{NAMESPACE}::{op._opname}", _raising(error), lib=_library_of(op, "vmap"))


def register_batched_gradients_error(op: torch._ops.OpOverload, error: Exception) -> None:
    """Register an error for a backward op that would have to run in torch.autograd.grad(is_grads_batched=True)."""
    _library_of(op, "batched gradients").impl(op._opname, _raising(error), "Batched")


def _raising(error: Exception) -> Callable[..., NoReturn]:
    def rule(*arguments: Any) -> NoReturn:
        raise error

    return rule


def register_autograd(
    op: torch._ops.OpOverload, save: Callable | None, backward: Callable, push_forward: Callable
) -> None:
    """Register the derivatives of an op, for autograd and for torch.func.

    Args:
        save: save(ctx, inputs, outputs), after the forward; None: nothing is saved.
        backward: backward(ctx, *gradients of the outputs) -> gradients of the inputs.
        push_forward: push_forward(inputs, their tangents or None) -> (outputs, their tangents). It runs instead of the op if an input
            has a forward-mode tangent; it may raise an error.
    """

    def below(keyset: torch._C.DispatchKeySet, inputs: Sequence) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    # torch.autograd.Function would choose the level of a transform a second time, after the dispatcher
    class Function(_SingleLevelFunction):
        """The op at one level of autograd, that of the innermost transform."""

        _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            *inputs, keyset, (backward_mode, forward_mode) = inputs
            # Function.apply has disabled both modes, and the levels below need them
            with torch.set_grad_enabled(backward_mode), _forward_ad._set_fwd_grad_enabled(forward_mode):
                outputs = below(keyset, inputs)
            if save is not None:
                save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
            return *backward(ctx, *grads), None, None

    def kernel(keyset: torch._C.DispatchKeySet, *inputs: Any) -> Any:
        transform = _innermost_transform()
        transformed = transform is not None or _forward_ad._current_level >= 0
        if transformed and (transform is None or transform.key() == _JVP) and torch._C._is_fwd_grad_enabled():
            primals, tangents = zip(*map(_unpack_dual, inputs), strict=True)
            if any(tangent is not None for tangent in tangents):
                pairs = zip(*push_forward(primals, tangents), strict=True)
                return tuple(torch._VF._make_dual(*pair, level=0) for pair in pairs)
        if not transformed and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
            return below(keyset, inputs)
        modes = (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()) if transformed else (False, False)
        with enable_single_level_autograd_function():
            return Function.apply(*inputs, keyset, modes)

    _library_of(op, "autograd").impl(op._opname, kernel, "Autograd", with_keyset=True)


def _unpack_dual(x: Any) -> tuple:
    """(x, None), or primal and tangent of a tensor that has one for the innermost transform."""
    if isinstance(x, torch.Tensor):
        # Traced code enters a level without telling torch.autograd.forward_ad, which allows level 0 alone
        primal, tangent = torch._VF._unpack_dual(x, level=0)
        if tangent is not None:
            return primal, tangent
    return x, None


def register_vmap(op: torch._ops.OpOverload, kinds: str, output_kinds: Sequence[tuple[str, int]]) -> None:
    """Register the batching rule of an op of attention.

    The vmapped dimension joins the batch, or the heads if an option of heads alone (a sink) or one set of packed sequences serves all
    samples. With dropout, or with sequences of its own, each sample is a separate call: a dropout mask depends on the position in the
    batch.

    Args:
        kinds: a letter per tensor: r: rows [.., heads, columns]; l: log-sum-exp.
        output_kinds: per output its letter, or the option whose gradient [heads] it is, and the index of a tensor with the same number of
            heads.
    """
    tensors = len(kinds)

    def rule(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[tuple, tuple]:
        size = info.batch_size
        batched = [isinstance(dim, int) for dim in in_dims]  # a list of ints has a list of dims
        inputs = [
            x.movedim(dim, 0) if of_sample else x
            for x, dim, of_sample in zip(inputs, in_dims, batched, strict=True)
        ]
        call, first_option = Call(*inputs[tensors : tensors + PLAIN]), tensors + PLAIN
        options = dict(zip(FIELDS, inputs[first_option:], strict=False))  # trailing defaults are left out
        own = {name for name, of_sample in zip(FIELDS, batched[first_option:], strict=False) if of_sample}
        if size and (options.get("dropout_p") or own.intersection(LENGTHS)):
            return _call_each(op, size, inputs, batched, tensors)
        if not size:  # no sample has lengths or a dropout state: any will do
            options |= {name: options[name].new_zeros(options[name].shape[1:]) for name in own - {*PER_HEAD}}

        varlen = options.get("cu_seqlens_q") is not None
        into_heads = varlen or any(options.get(name) is not None for name in ALIKE_IN_BATCH)
        axes = {"r": 0, "l": 0}
        if into_heads:
            axes = {"r": 1, "l": 0} if varlen else {"r": 1 if call.heads_first else 2, "l": 1}
        folded = [
            None if x is None else _fold(x, size, axes[kind], of_sample)
            for x, kind, of_sample in zip(inputs[:tensors], kinds, batched, strict=False)
        ]
        batch = inputs[0].shape[batched[0]]
        for name in PER_HEAD:
            x, of_sample = options.get(name), name in own
            if x is None or (x.ndim == 1 and not into_heads and not of_sample):
                continue
            if not into_heads and x.ndim - of_sample == 1:  # [size, heads] to [size, batch, heads]
                x = x[:, None].expand(size, batch, x.shape[1])
            axis = x.ndim - of_sample - 1 if into_heads else 0
            options[name] = _fold(x, size, axis, of_sample).contiguous()

        outputs = op(*folded, *call, *options.values())
        unfolded, out_dims = [], []
        for x, (kind, like) in zip(outputs, output_kinds, strict=True):
            axis = axes[kind] if kind in axes else None if options.get(kind) is None else 0
            if axis is not None:
                x = x.unflatten(axis, (size, inputs[like].shape[axes["r"] + batched[like]]))
            unfolded.append(x)
            out_dims.append(axis)
        return tuple(unfolded), tuple(out_dims)

    torch.library.register_vmap(f"{NAMESPACE}::{op._opname}", rule, lib=_library_of(op, "vmap"))


def _fold(x: torch.Tensor, size: int, axis: int, of_sample: bool) -> torch.Tensor:
    """Merge the vmapped dimension of x, its first one with `size` samples, into dimension `axis`; if x has none, repeat x."""
    x = x if of_sample else x.expand(size, *x.shape)
    return x.movedim(0, axis).flatten(axis, axis + 1)


def _call_each(
    op: torch._ops.OpOverload, size: int, inputs: list, batched: list[bool], tensors: int
) -> tuple[tuple, tuple]:
    """Call the op per sample, and stack the outputs."""
    results = []
    for i in range(size):
        sample = [x[i] if of_sample else x for x, of_sample in zip(inputs, batched, strict=True)]
        options = (x.contiguous() if isinstance(x, torch.Tensor) else x for x in sample[tensors:])
        results.append(op(*sample[:tensors], *options))
    outputs = tuple(torch.stack(x) for x in zip(*results, strict=True))
    return outputs, (0,) * len(outputs)
