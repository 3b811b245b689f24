"""Forward-only attention of packed queries: with keys in pages (block_table), or into the caller's tensor (out)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tl_attention.checks import lengths as checks_lengths
from tl_attention.checks.common import check_device, check_fwd, expect_bool, expect_scale
from tl_attention.checks.kvcache import cache_capacity
from tl_attention.checks.lengths import NAMES, check_paged_keys, check_side, checked_lengths
from tl_attention.checks.paged import (
    check_forward_only,
    check_no_fp32,
    check_out,
    check_paged,
    check_paged_addresses,
)
from tl_attention.checks.transforms import check_no_forward_ad, refuse_vmap
from tl_attention.problem.options import ARGUMENTS, NUMBERS, Call, Options, parse_arguments, writing
from tl_attention.problem.request import Request
from tl_attention.reference.kvcache import paged_varlen_reference
from tl_attention.torch_ops.attend import checked_options
from tl_attention.torch_ops.flops import call_scores, forward_flops, register_flops
from tl_attention.torch_ops.inductor import keep_storage_offsets
from tl_attention.torch_ops.ops import (
    are_plain,
    check_device_or_warn,
    fwd_max_logits_op,
    fwd_op,
    is_traced,
    launch_forward,
    scale_of,
)
from tl_attention.torch_ops.transforms import Outputs, empty_results, with_max_logits


def attend_packed(
    request: Request, block_table: torch.Tensor | None, out: torch.Tensor | None, check_lengths: bool
) -> Outputs:
    """(out, lse) of flash_attn_varlen_func with block_table or out, from unchecked arguments but for max_logits.

    With max_logits (out, lse, max_logits).
    """
    q, k, v, softmax_scale, causal, deterministic, *_ = request
    name = "out" if block_table is None else "block_table"
    check_no_fp32(name, q)
    if torch.is_grad_enabled():
        check_forward_only(name, q, k, v, request.learnable_sink)
    cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k = request.lengths
    keys = 0
    if block_table is None:
        check_fwd(q, k, v, softmax_scale, causal, heads_first=False, varlen=True)
        keys = k.shape[0]
    else:
        check_paged(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, request.dropout_p)
        expect_scale("softmax_scale", softmax_scale)
        expect_bool("causal", causal)
        keys = cache_capacity(k, block_table)
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q  # not read: seqused_k has the lengths
    if out is not None:
        check_out(q, v.shape[-1], out)
    expect_bool("deterministic", deterministic)
    expect_bool("check_lengths", check_lengths)
    lengths = cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k
    causal, options = checked_options(request._replace(lengths=lengths), keys)
    if check_lengths or checks_lengths.ALWAYS:
        cu_seqlens_q, *_ = checked_lengths(q, k, lengths, NAMES, block_table)
        options = dataclasses.replace(options, cu_seqlens_q=cu_seqlens_q)
    if options.sink is not None:
        # detach() makes a plain tensor of a parameter
        options = dataclasses.replace(options, sink=options.sink.detach())

    call = Call(scale_of(q, softmax_scale), causal, False, False, deterministic)
    arguments = options.arguments()
    tensors = (x for x in (block_table, out, *arguments[NUMBERS:]) if x is not None)
    traced = is_traced() or not are_plain(q, k, v, *tensors)
    if traced:
        check_no_forward_ad("flash_attn_varlen_func with block_table or out")
    check_device_or_warn(q, traced)
    if not traced:
        return _attend(q, k, v, block_table, out, call, options, request.max_logits)
    op = fwd_packed_max_logits_op if request.max_logits else fwd_packed_op
    result, *numbers = op(q, k, v, block_table, out, *call, *arguments)
    return result if out is None else out, *numbers


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    out: torch.Tensor | None,
    call: Call,
    options: Options,
    max_logits: bool = False,
) -> Outputs:
    """A launch, or the reference on CPU tensors."""
    check_paged_addresses(q, k, v, block_table is not None, out)
    if q.is_cuda:
        return launch_forward(q, k, v, call, options, block_table, out, max_logits)
    if block_table is None:
        op = fwd_max_logits_op if max_logits else fwd_op
        result, *numbers = op(q, k, v, *call, *options.arguments())
    else:
        check_side(NAMES[0], options.cu_seqlens_q, options.seqused_q, options.max_seqlen_q, q.shape[0])
        lengths = check_paged_keys(
            NAMES[1],
            options.cu_seqlens_k,
            options.seqused_k,
            options.max_seqlen_k,
            block_table,
            k.shape[1],
            k.shape[0],
        )
        result, *numbers = paged_varlen_reference(
            q,
            k,
            v,
            options.cu_seqlens_q,
            lengths,
            block_table,
            call.softmax_scale,
            call.causal,
            seqused_q=options.seqused_q,
            max_logits=max_logits,
            **options.reference_arguments(),
        )
        result = result.to(q.dtype)
    if out is None:
        return result, *numbers
    with writing(out):
        return out.copy_(result), *numbers


@torch.library.custom_op(
    "tl_attention::fwd_packed",
    mutates_args=("out",),
    device_types=("cuda", "cpu"),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? block_table, Tensor(a!)? out, {ARGUMENTS}) -> (Tensor, Tensor)",
)
def fwd_packed_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    out: torch.Tensor | None,
    *arguments: object,
) -> Outputs:
    """The forward of packed queries: (out, lse). If `out` is passed it is written, and the first result is empty: an op may not return
    one of its arguments.
    """
    return _run_op(q, k, v, block_table, out, arguments)


@torch.library.custom_op(
    "tl_attention::fwd_packed_max_logits",
    mutates_args=("out",),
    device_types=("cuda", "cpu"),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? block_table, Tensor(a!)? out, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def fwd_packed_max_logits_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    out: torch.Tensor | None,
    *arguments: object,
) -> Outputs:
    """fwd_packed_op with max_logits."""
    return _run_op(q, k, v, block_table, out, arguments, max_logits=True)


def _run_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    out: torch.Tensor | None,
    arguments: Sequence[object],
    max_logits: bool = False,
) -> Outputs:
    if q.is_cuda:
        check_device(q)
    result, *numbers = _attend(q, k, v, block_table, out, *parse_arguments(arguments), max_logits)
    return result if out is None else q.new_empty(0), *numbers


@fwd_packed_op.register_fake
def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    out: torch.Tensor | None,
    *_: Any,
) -> Outputs:
    keep_storage_offsets()
    result, lse = empty_results(q, v, heads_first=False)
    return result if out is None else q.new_empty(0), lse


fwd_packed_max_logits_op.register_fake(with_max_logits(_fake))


for _op in (fwd_packed_op, fwd_packed_max_logits_op):
    _op.register_vmap(lambda *_: refuse_vmap("flash_attn_varlen_func with block_table or out"))


def _flops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: Any, out: Any, *arguments: Any
) -> int:
    pages = None if block_table is None else cache_capacity(k, block_table)
    return forward_flops(call_scores(q, k, arguments, pages), q, v)


register_flops(_flops, "fwd_packed", "fwd_packed_max_logits")
