"""flex_attention: scores and masks as Python functions, with the parameters of PyTorch's function in its order.

All that follows from the functions of a call and the metadata of its tensors is checked and found once: see _Prepared.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from tl_attention import launch
from tl_attention.api.flex_lists import KeptMask, kept_mask, listed
from tl_attention.checks.common import (
    FWD_DTYPES,
    check_deterministic,
    check_fwd,
    describe,
    expect_bool,
    is_dtensor,
)
from tl_attention.checks.flex import (
    FLASH_NAMES,
    FLEX_NAMES,
    Names,
    check_aux,
    check_bias,
    check_block_mask,
    check_captured,
    check_dense_captures,
    check_function,
    check_group,
    check_no_options,
    check_not_transformed,
    check_sizes,
    check_value_width,
    expand_batch,
    has_wide_values,
    no_second_order,
)
from tl_attention.checks.fp32 import check_precision, has_gradient_kernels, runs_in_bf16
from tl_attention.checks.keywords import unknown_keyword
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.problem.attn_problem import Precision
from tl_attention.problem.options import MAX_SCALE, options_of_parts, saveable
from tl_attention.problem.program import LEAVES, Call, Program
from tl_attention.problem.request import Functions, Request, new_request
from tl_attention.reference.flex import flex_backward_reference, flex_reference
from tl_attention.torch_ops.attend import attend, attend_again
from tl_attention.torch_ops.dtensors import Shards, axes_of_rows
from tl_attention.torch_ops.ops import check_device_or_warn, in_bf16, scale_of
from tl_attention.tracing.builtin_options import BuiltinOptions, Recognized, recognized
from tl_attention.tracing.by_distance import MIN_SCORES, ByDistance, by_distance
from tl_attention.tracing.captures import Captures

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

LOG = logging.getLogger(__name__)
_is_compiling = torch.compiler.is_compiling
_RENAMED = Renaming({"q": "query", "k": "key", "v": "value", "sm_scale": "scale"})
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: MaskMod | None = None,
    attn_bias: torch.Tensor | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]:
    """Attention with scores and mask as Python functions: softmax(score_mod(scale * q k^T)) v over the keys that mask_mod shows.

    A function is traced once, as by torch.compile, into scalar operations that the kernels evaluate for each score; docs/flex.md lists
    them. Tensors and numbers that it captures are arguments of a launch: new values and lengths build no kernel, but for learned tensors
    of which many scores share elements ("Tables by distance" in docs/flex.md). Captured floating-point tensors that require a gradient
    get one. Causal masks, windows, softcap and ALiBi are recognized and run as options.

    Args:
        query: [batch, heads, seqlen_q, head_dim], bfloat16, float16 or float32; head_dim at most 256.
        key: [batch or 1, heads_kv, seqlen_k, head_dim].
        value: [batch or 1, heads_kv, seqlen_k, head_dim_v]; head_dim_v at most 256. If it is larger than head_dim, query and key are
            copied, with zeros up to its width.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> new score, on 0-d tensors: the scaled score in fp32, and int32 indices of
            batch entry, query head, query and key. Indices count from 0: the diagonal is top-left if lengths differ. A score below
            -1e20 hides its key.
        block_mask: PyTorch's BlockMask. Blocks of keys that it does not list are hidden. In partial blocks its mask_mod decides on each
            key; in full blocks a query sees all keys. Blocks of 128 queries and 128 keys without a listed one inside cost no time.
        scale: multiplies the scores; None: head_dim ** -0.5.
        enable_gqa: allow fewer heads of key and value than of query; heads must be a multiple of heads_kv.
        return_lse: also return the log-sum-exp.
        kernel_options: must be None: these are options of PyTorch's kernels.
        return_aux: PyTorch's AuxRequest: also return an AuxOutput. Its max_scores are refused. Instead of return_lse.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> True where the query sees the key; instead of block_mask.
        attn_bias: [1 or batch, 1 or heads, seqlen_q, seqlen_k], broadcast where 1. A float tensor is added to the score, after score_mod,
            and may require a gradient; a bool tensor hides the keys where it is False.
        deterministic: bitwise equal gradients from run to run; torch.use_deterministic_algorithms(True) sets it, too. Gradients of
            captured tensors are then exact sums, whose workspace takes 128 bytes per element.
        precision: of products of fp32 tensors, "highest", "high" or "medium"; None: torch.get_float32_matmul_precision(). Only with fp32
            tensors; docs/numerics.md has measured errors. Gradients of head dims above 128 need "medium", but for functions that are
            options.
    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the dtype of query; with return_lse (out, lse), where lse is
        [batch, heads, seqlen_q], fp32, natural log; with return_aux (out, AuxOutput), which holds this lse or None. A query that sees no
        key has out 0 and lse -inf. Both are differentiable, once.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, or which operation of a function, what was expected and what was passed.
    Source: Dong et al. 2024 (FlexAttention).
    """
    if unknown:
        raise unknown_keyword(flex_attention, unknown)
    expect_bool("return_lse", return_lse)
    expect_bool("enable_gqa", enable_gqa)
    check_deterministic(deterministic)
    check_not_transformed(FLEX_NAMES.function)
    if not (kernel_options is None or (isinstance(kernel_options, dict) and not kernel_options)):
        raise NotImplementedError(
            f"kernel_options: expected None, got {describe(kernel_options)}, which are options of PyTorch's kernels; leave them out"
        )
    if return_aux is not None:
        check_aux(return_aux, return_lse)
    if has_wide_values(query, key, value):
        check_value_width(value)
        scale = scale_of(query, None) if scale is None else scale
        query, key = (pad(x, (0, value.shape[-1] - x.shape[-1])) for x in (query, key))
    functions = score_mod, mask_mod, block_mask, attn_bias
    request = new_request(
        query, key, value, scale, False, deterministic, precision, heads_first=True, functions=functions, enable_gqa=enable_gqa
    )  # fmt: skip
    out, lse = attend_functions(request)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def attend_functions(
    request: Request, results: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call with functions, from unchecked arguments but for the switches of flex_attention.

    Args:
        results: (out, lse) of an earlier call of the same request. Nothing is computed then: these come back with derivatives.
    """
    if _is_compiling():
        from tl_attention.api.flex_compiled import attend_compiled

        return attend_compiled(request)
    q, k, v, scale, _, deterministic, precision = request[:7]
    functions, heads_first = request.functions, request.heads_first
    if not (type(q) is type(k) is type(v) is torch.Tensor):
        if isinstance(q, FakeTensor) and not _is_recorded():
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
    parts = 0
    if precision is not None or q.dtype == torch.float32:
        parts = check_precision(q, precision)
        if runs_in_bf16(q, parts):
            in_half = request._replace(precision=None)
            if results is not None:
                results = results[0].bfloat16(), results[1]
            return in_bf16(
                lambda q, k, v: attend_functions(in_half._replace(q=q, k=k, v=v), results), q, k, v
            )
    if prepared.by_distance is not None and q.is_cuda:
        sizes = batch, heads, rows, k.shape[2 if heads_first else 1]
        if math.prod(sizes) >= MIN_SCORES:
            call = prepared.by_distance.call(call, sizes, deterministic)
    if functions[2] is not None:
        # PyTorch's formula calls the mask
        by_bits = not differentiate or has_gradient_kernels(q, v, parts)
        call = listed(call, kept_mask(functions[2]) if mask is None else mask, q, heads, by_bits)
    layout = scale_of(q, scale), False, False, heads_first, deterministic
    if differentiate and any([x.requires_grad for x in (q, k, v, *call.tensors)]):
        try:
            return _differentiable(call, layout, parts, results, q, k, v, *call.tensors)
        except RuntimeError:  # of torch, if it cannot save a tensor of inference mode
            captured = tuple(map(saveable, call.tensors))
            if all(map(operator.is_, captured, call.tensors)):
                raise
            call = replace(call, tensors=captured)
            return _differentiable(call, layout, parts, results, q, k, v, *captured)
    return _forward(call, layout, parts, q, k, v)


def _on_shards(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
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


def _forward(
    call: Call, layout: tuple, parts: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the kernels, on the CPU by the reference.

    Args:
        layout: fields of options.Call.
        parts: as in Options.
    """
    scale, _, _, heads_first, deterministic = layout
    if q.is_cuda:
        others = {"options": options_of_parts(parts), "traced": call, "deterministic": deterministic}
        return launch.forward(q, k, v, scale, False, False, heads_first, **others)
    out, lse = flex_reference(*((q, k, v) if heads_first else _transposed(q, k, v)), scale, call)
    out = out.to(q.dtype)
    return (out if heads_first else out.transpose(1, 2).contiguous()), lse


def attend_by_functions(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of flash_attn_func with functions, whose options must be off but for the precision."""
    check_deterministic(request.deterministic)
    check_not_transformed(FLASH_NAMES.function)
    check_no_options(request)
    return attend_functions(request)


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
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no dense tensor or no BlockMask, which the checks refuse
        return None, None, None


def _prepare(request: Request, differentiate: bool, captures: Captures | None) -> tuple[Call, _Prepared]:
    """Check the arguments of a call, trace its functions and look for options that compute them."""
    score_mod, mask_mod, block_mask, attn_bias = request.functions
    query, key, expands, names = check_request(request)
    check_device_or_warn(query, traced=False)
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
        prints = os.environ.get("TL_ATTENTION_PRINT_CONFIGS") == "1"
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
        query, key = _transposed(q, k)
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


def _shapes(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of fake tensors, without values: the arguments are checked, no function is traced and nothing runs."""
    query, *_ = check_request(request)
    q, k, v, _, _, _, precision, *_ = request
    check_device_or_warn(query, traced=True)
    if precision is not None or q.dtype == torch.float32:
        check_precision(q, precision)
    score_mod, mask_mod, block_mask, attn_bias = request.functions
    captures = Captures.of(score_mod, mask_mod if block_mask is None else block_mask.mask_mod, attn_bias)
    inputs = [q, k, v, *(() if captures is None else captures.tensors)]
    return _Shapes.apply(request.heads_first, *inputs)


def _is_recorded() -> bool:
    """True while make_fx or a like tracer records what runs: the operations, not only their shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


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


class _Shapes(torch.autograd.Function):
    """Results and gradients of fake tensors."""

    @staticmethod
    def forward(ctx: Any, heads_first: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs: q, k, v, captured tensors."""
        q, _, v, *_ = inputs
        batch, heads, rows = (q.shape[i] for i in ((0, 1, 2) if heads_first else (0, 2, 1)))
        out = q.new_empty((*q.shape[:3], v.shape[-1]))
        ctx.inputs = [(x.shape, x.dtype) for x in inputs]
        ctx.save_for_backward(q)
        ctx.names = FLEX_NAMES if heads_first else FLASH_NAMES
        return out, q.new_empty((batch, heads, rows), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
        (q,) = ctx.saved_tensors
        asked = zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
        grads = [q.new_empty(shape, dtype=dtype) if needs else None for (shape, dtype), needs in asked]
        if torch.is_grad_enabled():
            grads = _Once.apply(ctx.names, len(grads), *grads, dout, dlse, q)
        return None, *grads


def _transposed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _with_options(
    request: Request, options: BuiltinOptions, results: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of functions that are options, by the kernels of the options. results: as in attend_functions()."""
    q, k, v, scale, _, deterministic, precision = request[:7]
    causal, window, softcap, slopes = options
    asked: dict[str, Any] = {"heads_first": request.heads_first}
    if not options.is_plain:
        asked = {"window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    transposes = request.heads_first and not options.is_plain
    if transposes:
        q, k, v = _transposed(q, k, v)
    of_options = new_request(q, k, v, scale, causal, deterministic, precision, **asked)
    if results is None:
        out, lse = attend(of_options)
    else:
        out, lse = results
        out, lse = attend_again(of_options, (out.transpose(1, 2) if transposes else out, lse))
    return (out.transpose(1, 2) if transposes else out), lse


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


class _Flex(torch.autograd.Function):
    """Differentiable launch on a GPU, or reference on the CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        layout: tuple[Any, ...],
        parts: int,
        results: tuple[torch.Tensor, torch.Tensor] | None,
        *inputs: torch.Tensor,
    ) -> tuple[Any, ...]:
        """inputs: q, k, v, captured tensors. layout, parts: as in _forward(). results: as in attend_functions()."""
        q, k, v, *_ = inputs
        out, lse = _forward(call, layout, parts, q, k, v) if results is None else results
        ctx.asked = call.program, call.numbers, call.blocks, layout, parts
        ctx.save_for_backward(out, lse, *inputs)
        ctx.set_materialize_grads(False)  # no zeros for an unused lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        out, lse, q, k, v, *tensors = ctx.saved_tensors
        program, numbers, blocks, layout, parts = ctx.asked
        scale, _, _, heads_first, deterministic = layout
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        if dout is None and dlse is None:
            return *[None] * 7, *grads
        given = dout, dlse
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        call = Call(program, tuple(tensors), numbers, blocks)
        if q.is_cuda and has_gradient_kernels(q, v, parts):
            others = {"options": options_of_parts(parts), "traced": call}
            modes = False, False, heads_first, deterministic, dlse
            found = launch.backward(dout, q, k, v, out, lse, scale, *modes, **others)
        else:
            inputs = (dout, q, k, v) if heads_first else _transposed(dout, q, k, v)
            dq, dk, dv, *sums = flex_backward_reference(inputs[0], dlse, *inputs[1:], scale, call)
            rows = (dq, dk, dv) if heads_first else _transposed(dq, dk, dv)
            found = dict(zip(("q", "k", "v", *program.learned), (*rows, *sums), strict=True))
        for i in program.learned:
            grads[i] = found[i].to(tensors[i].dtype)
        grads = [found["q"], found["k"], found["v"], *grads]
        if torch.is_grad_enabled():
            names = FLEX_NAMES if heads_first else FLASH_NAMES
            grads = _Once.apply(names, len(grads), *grads, *given, q, k, v, *tensors)
        return *[None] * 4, *grads


# Skips Function.apply, which looks for transforms of torch.func: check_not_transformed() refuses them
_differentiable = super(torch.autograd.Function, _Flex).apply
