"""Calls with functions of scores: checked, traced and prepared once per signature, then run by kernels, options or a reference.

All that follows from the functions of a call and the metadata of its tensors is found once: see _Prepared.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tl_attention.api.flex_lists import KeptMask, kept_mask, listed
from tl_attention.checks.common import FWD_DTYPES, check_fwd, describe, is_dtensor
from tl_attention.checks.flex import (
    FLASH_NAMES,
    FLEX_NAMES,
    Names,
    check_bias,
    check_block_mask,
    check_captured,
    check_dense_captures,
    check_function,
    check_group,
    check_sizes,
    expand_batch,
    warn_about_mask_of_numbers,
)
from tl_attention.checks.fp32 import check_precision, has_gradient_kernels, runs_in_bf16
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.problem.options import MAX_SCALE, options_of_terms, saveable
from tl_attention.problem.program import LEAVES, Call, Program
from tl_attention.problem.request import Functions, Request, new_request
from tl_attention.problem.switches import switch
from tl_attention.torch_ops.attend import attend, with_derivatives
from tl_attention.torch_ops.dtensors import Shards, axes_of_rows
from tl_attention.torch_ops.flex_autograd import Shapes, differentiable, run_forward, transposed
from tl_attention.torch_ops.ops import check_device_or_warn, in_bf16, scale_of
from tl_attention.tracing.builtin_options import BuiltinOptions, Recognized, recognized
from tl_attention.tracing.by_distance import MIN_SCORES, ByDistance, by_distance
from tl_attention.tracing.captures import Captures, is_recording

LOG = logging.getLogger(__name__)
_RENAMED = Renaming({"q": "query", "k": "key", "v": "value", "sm_scale": "scale"})


def attend_functions(
    request: Request, results: tuple[torch.Tensor, ...] | None = None
) -> tuple[torch.Tensor, ...]:
    """(out, lse) of a call with functions, from unchecked arguments but for the switches of flex_attention.

    With max_logits (out, lse, max_logits).

    Args:
        results: those of an earlier call of the same request. Nothing is computed then: these come back with derivatives.
    """
    q, k, v, scale, _, deterministic, precision = request[:7]
    functions, heads_first = request.functions, request.heads_first
    if not (type(q) is type(k) is type(v) is torch.Tensor):
        if isinstance(q, FakeTensor) and not is_recording():
            return _shapes(request)
        if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
            return _on_shards(request)
    differentiate = torch.is_grad_enabled()
    key, captures, mask = _key(request, differentiate)
    try:
        prepared = None if key is None else _prepared.get(key)
    except TypeError:  # sizes that are symbols have no hash
        key = prepared = None
    if prepared is None:
        call, prepared = _prepare(request, differentiate, captures)
        if key is not None and prepared.slots is not None:
            if len(_prepared) >= MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    else:
        tensors = captures.tensors
        call = Call(prepared.program, tuple([tensors[i] for i in prepared.slots]), prepared.numbers)
    if prepared.expands:
        k, v = expand_batch(q, k, v)
    batch, heads, rows, _ = q.shape
    if not heads_first:
        rows, heads = heads, rows
    if prepared.recognized is not None:
        options = prepared.recognized.of(call, batch, heads, q.device)
        return _with_options(request._replace(k=k, v=v) if prepared.expands else request, options, results)
    terms = 0
    if precision is not None or q.dtype == torch.float32:
        terms = check_precision(q, precision)
        if runs_in_bf16(q, terms):
            in_half = request._replace(precision=None)
            if results is not None:
                results = results[0].bfloat16(), *results[1:]
            return in_bf16(
                lambda q, k, v: attend_functions(in_half._replace(q=q, k=k, v=v), results), q, k, v
            )
    if prepared.by_distance is not None and q.is_cuda and not request.batch_invariant:
        sizes = batch, heads, rows, k.shape[2 if heads_first else 1]
        if math.prod(sizes) >= MIN_SCORES:
            call = prepared.by_distance.call(call, sizes, deterministic)
    if functions[2] is not None:
        # PyTorch's formula calls the mask; whether its bits are too many depends on the whole batch
        by_bits = not request.batch_invariant and (not differentiate or has_gradient_kernels(q, v, terms))
        call = listed(call, kept_mask(functions[2]) if mask is None else mask, q, heads, by_bits)
    layout = scale_of(q, scale), heads_first, deterministic
    options = options_of_terms(terms, request.batch_invariant)
    if differentiate and any([x.requires_grad for x in (q, k, v, *call.tensors)]):
        if request.max_logits and results is None:
            with torch.no_grad():
                results = run_forward(call, layout, options, q, k, v, max_logits=True)
        try:
            return differentiable(call, layout, options, results, q, k, v, *call.tensors)
        except RuntimeError:  # of torch, if it cannot save a tensor of inference mode
            captured = tuple(map(saveable, call.tensors))
            if all(map(operator.is_, captured, call.tensors)):
                raise
            call = replace(call, tensors=captured)
            return differentiable(call, layout, options, results, q, k, v, *captured)
    return run_forward(call, layout, options, q, k, v, request.max_logits)


def _on_shards(request: Request) -> tuple[torch.Tensor, ...]:
    """attend_functions() of DTensors, on this rank's batch entries and heads."""
    q, k, v, *_ = request
    try:
        shards = Shards(q, k, v, axes_of_rows(request.heads_first))
        _check_shards(shards, q, k, request.functions)
    except ARGUMENT_ERRORS as error:
        raise (_RENAMED.of(error) if request.heads_first else error) from None
    return shards.run(lambda q, k, v: attend_functions(request._replace(q=q, k=k, v=v)), q, k, v)


def _check_shards(shards: Shards, q: torch.Tensor, k: torch.Tensor, functions: Functions) -> None:
    """Refuse what a rank cannot compute from its own batch entries and heads."""
    instead = "call .to_local() on q, k and v"
    score_mod, mask_mod, block_mask, attn_bias = functions
    for name, x in (("block_mask", block_mask), ("attn_bias", attn_bias)):
        if x is not None:
            raise NotImplementedError(
                f"{name}: expected None with DTensors, got {describe(x)}; {instead}, and pass this rank's part"
            )
    axes = shards.axes
    sharded = [axis for axis, dim in (("batch", axes.batch), ("head", axes.heads)) if shards.shards(dim)]
    if k.shape[0] != q.shape[0] and "batch" in sharded:
        raise NotImplementedError(
            f"k: expected the batch of q with DTensors that shard it, {q.shape[0]}, got {k.shape[0]}; call .expand(), or {instead}"
        )
    for name, x in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        check_function(name, x)
        reads, captures_tensors = _reads(x, name == "score_mod")
        if captures_tensors:
            raise NotImplementedError(
                f"{name}: expected a function without captured tensors with DTensors, got one with; {instead}, and capture this rank's"
                " part"
            )
        for axis in sharded:
            if axis in reads:
                raise NotImplementedError(
                    f"{name}: expected a function that does not read the index of the {axis}, which DTensors shard here, got one that"
                    f" does; {instead}"
                )


def _reads(function: Callable[..., Any] | None, is_score: bool) -> tuple[frozenset[str], bool]:
    """(leaves that a function reads, True if it captures tensors)."""
    captures = Captures.of(function)
    if captures is not None and captures.tensors:
        return frozenset(), True
    key = None if captures is None else (is_score, captures.key)
    found = None if key is None else _known_reads.get(key)
    if found is None:
        traced = (function, None) if is_score else (None, function)
        call = _tracer()(*traced, False, None, False)
        found = frozenset(value.op for value in call.program.values if value.op in LEAVES), bool(call.tensors)
        if key is not None:
            if len(_known_reads) >= MAX_PREPARED:
                _known_reads.clear()
            _known_reads[key] = found
    return found


class _Prepared(NamedTuple):
    """Facts that follow from the functions of a call and the metadata of its tensors, which have passed the checks.

    It holds no tensor and no value of one. Numbers are part of its key.

    Attributes:
        slots: captured tensors of the program among those that the functions see; None: a call has to find them anew.
        recognized: options that compute the program.
        expands: keys and values have one batch entry for all.
        by_distance: the program for launches of many scores, where that is another.
    """

    program: Program
    slots: tuple[int, ...] | None
    numbers: tuple[float | int, ...]
    recognized: Recognized | None
    expands: bool
    by_distance: ByDistance | None


MAX_PREPARED = 2048  # signatures of calls
_known_reads: dict[tuple[Any, ...], tuple[frozenset[str], bool]] = {}
_prepared: dict[tuple[Any, ...], _Prepared] = {}


def _key(
    request: Request, differentiate: bool
) -> tuple[tuple[Any, ...] | None, Captures | None, KeptMask | None]:
    """(key, captures, mask) of a call: key of its _Prepared, or None; captures of its functions; KeptMask of its block mask.

    The key holds all that _prepare() reads, so a known key has passed the checks. It keeps no tensor alive.
    """
    q, k, v, scale = request[:4]
    score_mod, mask_mod, block_mask, attn_bias = request.functions
    mask = lists = None
    if not (scale is None or (type(scale) in (float, int) and -MAX_SCALE <= scale <= MAX_SCALE)):
        return None, None, None
    try:
        if block_mask is not None:
            if mask_mod is not None:
                return None, None, None
            mask, mask_mod = kept_mask(block_mask), block_mask.mask_mod
            lists = mask.origin(mask_mod), mask.facts
        captures = Captures.of(score_mod, mask_mod, attn_bias)
        if captures is None:
            return None, None, mask
        return (
            captures.key, request.enable_gqa, request.heads_first, differentiate, lists,
            type(q), q.shape, q.stride(), q.dtype, q.device,
            type(k), k.shape, k.stride(), k.dtype, k.device,
            type(v), v.shape, v.stride(), v.dtype, v.device,
            *[(type(x), x.shape, x.stride(), x.layout) for x in captures.tensors],
        ), captures, mask  # fmt: skip
    # No dense tensor or no BlockMask, which the checks refuse
    except (AttributeError, RuntimeError, TypeError):
        return None, None, None


def _prepare(request: Request, differentiate: bool, captures: Captures | None) -> tuple[Call, _Prepared]:
    """Check the arguments of a call, trace its functions and look for options that compute them."""
    score_mod, mask_mod, block_mask, attn_bias = request.functions
    query, key, expands, names = check_request(request)
    _check_device(query, request.heads_first, traced=False)
    if attn_bias is not None:
        warn_about_mask_of_numbers(attn_bias)
    if block_mask is not None:
        mask_mod = block_mask.mask_mod
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if seen := Captures.of(function):
            check_dense_captures(name, seen.tensors)
    call = _tracer()(score_mod, mask_mod, differentiate, attn_bias, block_mask is not None)
    check_captured(call, query, key, names)
    slots = None
    if captures is not None:
        slots = tuple(captures.position(tensor) for tensor in call.tensors)
    options = None
    if block_mask is None or kept_mask(block_mask).follow(mask_mod):
        batch, heads, seqlen_q, _ = query.shape
        options = recognized(call, seqlen_q, key.shape[2])
        prints = switch("TL_ATTENTION_PRINT_CONFIGS")
        if options is not None and (prints or LOG.isEnabledFor(logging.DEBUG)):
            _report(str(call.program), str(options.of(call, batch, heads, query.device)), prints)
    is_kept = slots is not None and None not in slots
    kept_slots, tables = slots if is_kept else None, by_distance(call.program)
    return call, _Prepared(call.program, kept_slots, call.numbers, options, expands, tables)


def check_request(request: Request) -> tuple[torch.Tensor, torch.Tensor, bool, Names]:
    """Check the arguments of a call, but for the functions themselves: (query, key, expands, names).

    query and key are [batch, heads, seqlen, head_dim]; expands: as in _Prepared.
    """
    q, k, v, scale, *_ = request
    score_mod, mask_mod, block_mask, attn_bias = request.functions
    names, expanded = FLASH_NAMES, (k, v)
    if not request.heads_first:
        check_fwd(q, k, v, scale, False, heads_first=False, dtypes=FWD_DTYPES)
        query, key = transposed(q, k)
    else:
        names = FLEX_NAMES
        try:
            expanded = expand_batch(q, k, v)
            check_fwd(q, *expanded, scale, False, heads_first=True, dtypes=FWD_DTYPES)
        except ARGUMENT_ERRORS as error:
            raise _RENAMED.of(error) from None
        query, (key, _) = q, expanded
    check_sizes(query, key, names)
    check_group(query, key, request.enable_gqa)
    check_function("score_mod", score_mod)
    check_function("mask_mod", mask_mod)
    if block_mask is not None:
        check_block_mask(block_mask, mask_mod, query, key, names)
    if attn_bias is not None:
        check_bias(attn_bias, query, key, names)
    return query, key, expanded[0] is not k, names


def _check_device(query: torch.Tensor, heads_first: bool, traced: bool) -> None:
    try:
        check_device_or_warn(query, traced)
    except ARGUMENT_ERRORS as error:
        raise (_RENAMED.of(error) if heads_first else error) from None


def _shapes(request: Request) -> tuple[torch.Tensor, ...]:
    """Results of fake tensors, without values: the arguments are checked, no function is traced and nothing runs."""
    query, *_ = check_request(request)
    q, k, v, _, _, _, precision, *_ = request
    _check_device(query, request.heads_first, traced=True)
    check_precision(q, precision)
    score_mod, mask_mod, block_mask, attn_bias = request.functions
    captures = Captures.of(score_mod, mask_mod if block_mask is None else block_mask.mask_mod, attn_bias)
    inputs = [q, k, v, *(() if captures is None else captures.tensors)]
    out, lse = Shapes.apply(request.heads_first, *inputs)
    return (out, lse, torch.empty_like(lse.detach())) if request.max_logits else (out, lse)


def _with_options(
    request: Request, options: BuiltinOptions, results: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, ...]:
    """Results of functions that are options, by the kernels of the options. results: as in attend_functions()."""
    q, k, v, scale, _, deterministic, precision = request[:7]
    causal, window, softcap, slopes = options
    asked: dict[str, Any] = {"heads_first": request.heads_first}
    if not options.is_plain:
        asked = {"window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    transposes = request.heads_first and not options.is_plain
    if transposes:
        q, k, v = transposed(q, k, v)
    of_options = new_request(
        q, k, v, scale, causal, deterministic, precision, batch_invariant=request.batch_invariant, max_logits=request.max_logits,
        **asked,
    )  # fmt: skip
    if results is None:
        out, *numbers = attend(of_options)
    else:
        out, *numbers = results
        out, *numbers = with_derivatives(of_options, (out.transpose(1, 2) if transposes else out, *numbers))
    return (out.transpose(1, 2) if transposes else out), *numbers


@functools.cache
def _report(functions: str, options: str, prints: bool) -> None:
    """Log, and print if asked, once which options replace the functions."""
    line = f"flex_attention {functions or 'without functions'} -> {options} (recognized)"
    LOG.debug(line)
    if prints:
        print(f"tl_attention: {line}", file=sys.stderr)


@functools.cache
def _tracer() -> Callable[..., Call]:
    """trace.trace, imported at the first call: the tools of torch that it needs take time to import."""
    from tl_attention.tracing.trace import trace

    return trace
