"""flex_attention: scores and masks as Python functions, with the parameters of PyTorch's function in its order."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tl_attention import launch
from tl_attention.block_masks import ListsState, lists_follow_mask
from tl_attention.checks.common import check_deterministic, check_fwd, expect_bool
from tl_attention.checks.flex import (
    check_bias,
    check_block_mask,
    check_captured,
    check_function,
    check_group,
    check_no_options,
    check_not_transformed,
    check_order,
    expand_batch,
)
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.launch.block_lists import BlockLists, block_states
from tl_attention.ops import (
    UserOptions,
    attention,
    attention_with_options,
    check_device_or_warn,
    scale_of,
)
from tl_attention.program import Call
from tl_attention.reference.flex import flex_reference
from tl_attention.tracing.builtin_options import BuiltinOptions, builtin_options
from tl_attention.tracing.captures import versions
from tl_attention.tracing.dense_bias import with_bias
from tl_attention.tracing.intervals import stream_of

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
    attn_bias: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with scores and mask as Python functions: softmax(score_mod(scale * q k^T)) v over the keys that mask_mod shows.

    A function is traced once, as by torch.compile, into scalar operations that the kernels evaluate for each score; docs/flex.md lists
    them. Tensors and numbers that it captures are arguments of a launch: new values and lengths build no kernel. Captured
    floating-point tensors that require a gradient get one. Causal masks, windows, softcap and ALiBi are recognized and run as options.

    Args:
        query: [batch, heads, seqlen_q, head_dim], bfloat16 or float16; head_dim at most 256.
        key: [batch or 1, heads_kv, seqlen_k, head_dim]. value: [batch or 1, heads_kv, seqlen_k, head_dim_v], head_dim_v <= head_dim.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> new score, on 0-d tensors: the scaled score in fp32, and int32 indices of
            batch entry, query head, query and key. Indices count from 0: the diagonal is top-left if lengths differ. A score below
            -1e20 hides its key.
        block_mask: PyTorch's BlockMask, with a BLOCK_SIZE of multiples of 128. Blocks of keys that it does not list are hidden and
            cost no time. In partial blocks its mask_mod decides on each key; in full blocks a query sees all keys.
        scale: multiplies the scores; None: head_dim ** -0.5.
        enable_gqa: allow fewer heads of key and value than of query; heads must be a multiple of heads_kv.
        return_lse: also return the log-sum-exp.
        kernel_options: must be None: these are options of PyTorch's kernels.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> True where the query sees the key; instead of block_mask.
        attn_bias: [1 or batch, 1 or heads, seqlen_q, seqlen_k], broadcast where 1. A float tensor is added to the score, after score_mod,
            and may require a gradient; a bool tensor hides the keys where it is False.
        deterministic: bitwise equal gradients from run to run; torch.use_deterministic_algorithms(True) sets it, too. Gradients of
            captured tensors are then exact sums, whose workspace takes 128 bytes per element.
    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the dtype of query; with return_lse (out, lse), where lse is
        [batch, heads, seqlen_q], fp32, natural log. A query that sees no key has out 0 and lse -inf. Both are differentiable, once.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, or which operation of a function, what was expected and what was passed.
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
    functions = score_mod, mask_mod, block_mask, attn_bias
    out, lse = attend(query, key, value, functions, scale, enable_gqa, deterministic)
    return (out, lse) if return_lse else out


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    functions: tuple[Callable | None, Callable | None, Any, torch.Tensor | None],
    scale: float | None,
    enable_gqa: bool,
    deterministic: bool,
    rows_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of flex_attention, whose arguments these are.

    Args:
        functions: score_mod, mask_mod, block_mask, attn_bias.
        rows_first: out has [batch, seqlen, heads, head_dim] in memory, whatever its shape.
    """
    score_mod, mask_mod, block_mask, attn_bias = functions
    try:
        key, value = expand_batch(query, key, value)
        check_fwd(query, key, value, scale, False, heads_first=True)
    except ARGUMENT_ERRORS as error:
        raise _NAMES.of(error) from None
    check_group(query, key, enable_gqa)
    check_function("score_mod", score_mod)
    check_function("mask_mod", mask_mod)
    if block_mask is not None:
        check_block_mask(block_mask, mask_mod, query, key)
        mask_mod = block_mask.mask_mod
    if attn_bias is not None:
        check_bias(attn_bias, query, key)
        if attn_bias.numel():
            score_mod, mask_mod = with_bias(score_mod, mask_mod, attn_bias)
    check_device_or_warn(query, traced=False)

    differentiate = torch.is_grad_enabled()
    call = _tracer()(score_mod, mask_mod, differentiate)
    check_captured(call, query, key)
    options = None
    if block_mask is None or lists_follow_mask(block_mask):
        batch, heads, seqlen_q, _ = query.shape
        options = builtin_options(call, seqlen_q, key.shape[2], batch, heads, query.device)
    if options is not None:
        if os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1":
            _report(str(call.program), str(options))
        return _with_options(query, key, value, scale, options, deterministic)
    if block_mask is not None:
        call = _listed(call, block_mask, query)
    scale = scale_of(query, scale)
    if not query.is_cuda:
        out, lse = flex_reference(query, key, value, scale, call)
        out = out.to(query.dtype)
    else:
        inputs = query, key, value, *call.tensors
        if differentiate and any(x.requires_grad for x in inputs):
            out, lse = _Flex.apply(call, scale, deterministic, rows_first, *inputs)
        else:
            out, lse = _forward(query, key, value, scale, call, rows_first, deterministic)
    return out, lse


def attend_by_functions(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    functions: tuple[Callable | None, Callable | None, Any, torch.Tensor | None],
    softmax_scale: float | None,
    deterministic: bool,
    options: tuple,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of flash_attn_func with functions; options: causal, then the fields of UserOptions, all of which must be off."""
    check_deterministic(deterministic)
    check_not_transformed()
    check_no_options(options)
    try:
        check_fwd(q, k, v, softmax_scale, False, heads_first=False)
    except ARGUMENT_ERRORS as error:
        raise Renaming({"sm_scale": "softmax_scale"}).of(error) from None
    out, lse = attend(*_transposed(q, k, v), functions, softmax_scale, True, deterministic, rows_first=True)
    return out.transpose(1, 2), lse


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    call: Call,
    rows_first: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on tensors [batch, heads, seqlen, head_dim]; see attend()."""
    options = {"traced": call, "deterministic": deterministic}
    if not rows_first:
        return launch.forward(q, k, v, scale, False, False, True, **options)
    out, lse = launch.forward(*_transposed(q, k, v), scale, False, False, False, **options)
    return out.transpose(1, 2), lse


def _transposed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _with_options(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    options: BuiltinOptions,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of functions that are options, by the kernels of the options."""
    if options.is_plain:
        return attention(query, key, value, scale, options.causal, False, True, deterministic)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    asked = UserOptions(options.window, options.softcap, 0.0, options.alibi_slopes, None, None, 0, None)
    out, lse = attention_with_options(q, k, v, scale, options.causal, deterministic, asked)
    return out.transpose(1, 2), lse


@functools.cache
def _report(functions: str, options: str) -> None:
    """Print once which options replace the functions."""
    print(
        f"tl_attention: flex_attention {functions or 'without functions'} -> {options} (recognized)",
        file=sys.stderr,
    )


@functools.cache
def _tracer() -> Callable[[Callable | None, Callable | None, bool], Call]:
    """trace.trace, imported at the first call: the tools of torch that it needs take time to import."""
    from tl_attention.tracing.trace import trace

    return trace


MAX_LISTS = 8  # of one mask, for other batches and heads
_lists: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], tuple[ListsState, int, BlockLists]]] = (
    weakref.WeakKeyDictionary()
)


def _block_lists(block_mask: Any, batch: int, heads: int) -> BlockLists:
    """Lists of a BlockMask, made at its first call on a stream, and again after a change."""
    kept = _lists.setdefault(block_mask, {})
    stream = stream_of(block_mask.kv_num_blocks.device)
    state, made_on, lists = kept.get((batch, heads), (None, None, None))
    # A CUDA graph capture may use what was made before it, on any stream; what it makes itself is empty until a replay
    if lists is not None and stream in (None, made_on) and state.are_in(block_mask):
        return lists
    size, lengths = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)
    state = ListsState(block_mask)
    lists = BlockLists(block_states(*state.tensors, -(-lengths[1] // size[1])), size, lengths, (batch, heads))
    if stream is not None:
        if len(kept) >= MAX_LISTS:
            kept.clear()
        kept[batch, heads] = state, stream, lists
    return lists


def _listed(call: Call, block_mask: Any, query: torch.Tensor) -> Call:
    """The call with the lists of its block mask; on a GPU with bits for its mask, unless these are too many."""
    lists = _block_lists(block_mask, *query.shape[:2])
    if query.is_cuda and (with_bits := _with_bits(call, lists)) is not None:
        program, tensors, numbers = call.program.with_bits
        of_program = tuple(call.tensors[i] for i in tensors), tuple(call.numbers[i] for i in numbers)
        return Call(program, *of_program, with_bits)
    return replace(call, program=call.program.as_listed, blocks=lists)


class _MaskState:
    """All that the mask of a call depends on: its program, its numbers, its tensors, and the changes in place of each.

    It keeps no tensor alive.
    """

    def __init__(self, call: Call):
        self.program = call.program.mask_alone
        self.numbers = [call.numbers[i] for i in self.program.used("number")]
        tensors = [call.tensors[i] for i in self.program.used("load")]
        self.tensors = [weakref.ref(x) for x in tensors]
        # A tensor whose .data is replaced has the version of before
        self.changes = versions(tensors), [x.data_ptr() for x in tensors]
        self.is_visible = not any(x.is_inference() for x in tensors)

    def is_of(self, other: _MaskState) -> bool:
        """True if the mask of the other state is the same."""
        pairs = zip(self.tensors, other.tensors, strict=False)
        same = len(self.tensors) == len(other.tensors) and all(
            x() is not None and x() is y() for x, y in pairs
        )
        return same and all(getattr(self, x) == getattr(other, x) for x in ("program", "numbers", "changes"))


_lists_with_bits: weakref.WeakKeyDictionary[BlockLists, tuple[_MaskState, BlockLists | None]] = (
    weakref.WeakKeyDictionary()
)


def _with_bits(call: Call, lists: BlockLists) -> BlockLists | None:
    """Lists with bits for the mask of a call, made at its first call and again after a change of what it captures.

    None where there are too many; where the mask captures a tensor of inference mode, whose changes nobody counts; and in a CUDA graph
    capture, which cannot wait for their number, without a call before it.
    """
    state = _MaskState(call)
    if not state.is_visible:
        return None
    kept, with_bits = _lists_with_bits.get(lists, (None, None))
    if kept is not None and kept.is_of(state):
        return with_bits
    if torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        with_bits = lists.with_bits(call)
    _lists_with_bits[lists] = state, with_bits
    return with_bits


class _Flex(torch.autograd.Function):
    """Differentiable launch on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, scale: float, deterministic: bool, rows_first: bool, *inputs: torch.Tensor
    ) -> tuple:
        """inputs: q, k, v, captured tensors."""
        q, k, v, *_ = inputs
        out, lse = _forward(q, k, v, scale, call, rows_first, deterministic)
        ctx.rows_first = rows_first
        ctx.call, ctx.scale, ctx.deterministic = call, scale, deterministic
        ctx.save_for_backward(out, lse, *inputs)
        ctx.set_materialize_grads(False)  # no zeros for an unused lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        out, lse, q, k, v, *tensors = ctx.saved_tensors
        grads: list[torch.Tensor | None] = [None] * (3 + len(tensors))
        if dout is None and dlse is None:
            return None, None, None, None, *grads
        check_order(dout, dlse)
        dout = torch.zeros_like(out) if dout is None else dout
        deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
        call = replace(ctx.call, tensors=tuple(tensors))
        inputs = dout, q, k, v, out
        dout, *inputs = _transposed(*inputs) if ctx.rows_first else inputs
        layout = ctx.scale, False, False, not ctx.rows_first, deterministic, dlse
        found, sums = _split(launch.backward(dout.contiguous(), *inputs, lse, *layout, traced=call))
        grads[:3] = _transposed(*found) if ctx.rows_first else found
        for i, total in zip(call.program.learned, sums, strict=True):
            grads[3 + i] = total.to(call.tensors[i].dtype)
        return None, None, None, None, *grads


def _split(grads: tuple[torch.Tensor, ...]) -> tuple[list, tuple]:
    """Gradients of q, k and v, and those of captured tensors."""
    return [*grads[:3]], grads[3:]
