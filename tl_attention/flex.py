"""flex_attention: scores and masks as Python functions, with the parameters of PyTorch's function in its order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tl_attention import launch
from tl_attention.builtin_options import BuiltinOptions, builtin_options
from tl_attention.checks import check_deterministic, check_fwd, expect_bool
from tl_attention.checks_flex import (
    check_block_mask,
    check_captured,
    check_function,
    check_group,
    check_not_transformed,
    check_order,
    expand_batch,
    refuse_lists_alone,
)
from tl_attention.checks_torch import ARGUMENT_ERRORS, Renaming
from tl_attention.ops import (
    UserOptions,
    attention,
    attention_with_options,
    check_device_or_warn,
    scale_of,
)
from tl_attention.program import Call
from tl_attention.reference_flex import flex_reference

_NAMES = Renaming({"q": "query", "k": "key", "v": "value", "sm_scale": "scale"})


@torch._disable_dynamo
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: None = None,
    *,
    mask_mod: Callable | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention whose scores and mask are Python functions: softmax(score_mod(scale * q k^T)) v, over the keys that the mask shows.

    The functions are traced once, like torch.compile would, into operations on scalars that the kernels evaluate for each score; see
    docs/flex.md for the operations. Tensors and numbers that they capture are arguments of a launch: new values and lengths build no
    kernel. Captured floating-point tensors that require a gradient get one. Causal masks, windows, softcap and ALiBi are recognized:
    see docs/flex.md.

    Args:
        query: [batch, heads, seqlen_q, head_dim], bfloat16 or float16; head_dim at most 256.
        key: [batch or 1, heads_kv, seqlen_k, head_dim]. value: [batch or 1, heads_kv, seqlen_k, head_dim_v], head_dim_v <= head_dim.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> new score, on 0-d tensors: the scaled score in fp32, and int32 indices of
            batch entry, query head, query and key. Indices count from 0: the diagonal is top-left if lengths differ. A score below
            -1e20 hides its key.
        block_mask: PyTorch's BlockMask. Its mask_mod decides on each key. Its lists of blocks are not used.
        scale: multiplies the scores; None: head_dim ** -0.5.
        enable_gqa: allow fewer heads of key and value than of query, by a factor.
        return_lse: also return the log-sum-exp.
        kernel_options: None: these are options of PyTorch's kernels.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> True where the query sees the key; in the place of block_mask.
        deterministic: gradients are bitwise equal from run to run. Gradients of captured tensors are not: they are refused.
            torch.use_deterministic_algorithms(True) asks for it, too.
    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the dtype of query; with return_lse (out, lse), where lse is
        [batch, heads, seqlen_q], fp32, natural log. A query that sees no key has out 0 and lse -inf. Both are differentiable, once.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, or which operation of a function, what was expected and what came.
    Source: Dong et al. 2024 (FlexAttention).
    """
    expect_bool("return_lse", return_lse)
    expect_bool("enable_gqa", enable_gqa)
    check_deterministic(deterministic)
    check_not_transformed()
    if kernel_options:
        raise NotImplementedError(
            f"kernel_options: expected None, got {kernel_options!r}, which are options of PyTorch's kernels; leave them out"
        )
    try:
        key, value = expand_batch(query, key, value)
        check_fwd(query, key, value, scale, False, heads_first=True)
    except ARGUMENT_ERRORS as error:
        raise _NAMES.of(error) from None
    check_group(query, key, enable_gqa)
    check_function("score_mod", score_mod)
    check_function("mask_mod", mask_mod)
    mask_mod = check_block_mask(block_mask, mask_mod, query, key)
    check_device_or_warn(query, traced=False)

    differentiate = torch.is_grad_enabled()
    call = _trace(score_mod, mask_mod, differentiate)
    check_captured(call, query, key)
    if block_mask is not None and call.program.mask is None:
        refuse_lists_alone()
    same_length = query.shape[2] == key.shape[2]
    if (options := builtin_options(call, same_length)) is not None:
        out, lse = _with_options(query, key, value, scale, options, deterministic)
        return (out, lse) if return_lse else out
    scale = scale_of(query, scale)
    if not query.is_cuda:
        out, lse = flex_reference(query, key, value, scale, call)
        out = out.to(query.dtype)
    else:
        inputs = query, key, value, *call.tensors
        if differentiate and any(x.requires_grad for x in inputs):
            out, lse = _Flex.apply(call, scale, deterministic, *inputs)
        else:
            out, lse = launch.forward(query, key, value, scale, False, False, True, traced=call)
    return (out, lse) if return_lse else out


def _with_options(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    options: BuiltinOptions,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a program that the options compute."""
    if options.is_plain:
        return attention(query, key, value, scale, options.causal, False, True, deterministic)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    slopes = options.alibi_slopes
    slopes = None if slopes is None else slopes.detach()[: query.shape[1]]
    asked = UserOptions(options.window, options.softcap, 0.0, slopes, None, None, 0, None)
    out, lse = attention_with_options(q, k, v, scale, options.causal, deterministic, asked)
    return out.transpose(1, 2), lse


@functools.cache
def _tracer() -> Callable[[Callable | None, Callable | None, bool], Call]:
    """trace.trace, imported at the first call: the tools of torch that it needs take time to import."""
    from tl_attention.trace import trace

    return trace


def _trace(score_mod: Callable | None, mask_mod: Callable | None, differentiate: bool) -> Call:
    return _tracer()(score_mod, mask_mod, differentiate)


class _Flex(torch.autograd.Function):
    """Differentiable launch on a GPU."""

    @staticmethod
    def forward(ctx: Any, call: Call, scale: float, deterministic: bool, *inputs: torch.Tensor) -> tuple:
        """inputs: q, k, v, captured tensors."""
        q, k, v, *_ = inputs
        out, lse = launch.forward(
            q, k, v, scale, False, False, True, traced=call, deterministic=deterministic
        )
        ctx.call, ctx.scale, ctx.deterministic = call, scale, deterministic
        ctx.save_for_backward(out, lse, *inputs)
        ctx.set_materialize_grads(False)  # no zeros for an unused lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        out, lse, q, k, v, *tensors = ctx.saved_tensors
        grads: list[torch.Tensor | None] = [None] * (3 + len(tensors))
        if dout is None and dlse is None:
            return None, None, None, *grads
        check_order(dout, dlse)
        dout = torch.zeros_like(out) if dout is None else dout
        program = ctx.call.program
        call = Call(program, tuple(tensors), ctx.call.numbers)
        deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
        if program.gradients and deterministic:
            raise NotImplementedError(
                "deterministic: expected captured tensors without gradients, whose sums are made in no fixed order, got"
                f" {len(program.learned)} that require one; detach them, or leave deterministic out"
            )
        tensors = dout.contiguous(), q, k, v, out, lse
        grads[:3], sums = _split(
            launch.backward(*tensors, ctx.scale, False, False, True, deterministic, dlse, traced=call)
        )
        for i, total in zip(program.learned, sums, strict=True):
            grads[3 + i] = total.view(call.tensors[i].shape).to(call.tensors[i].dtype)
        return None, None, None, *grads


def _split(grads: tuple[torch.Tensor, ...]) -> tuple[list, tuple]:
    """Gradients of q, k and v, and those of captured tensors."""
    return [*grads[:3]], grads[3:]
