"""Argument checks of flash_attn_varlen_func with block_table or out, in the form of common.py."""

from __future__ import annotations

import torch

from tl_attention.checks.common import (
    PACKED,
    WIDER,
    describe,
    expect_boundaries,
    expect_device,
    expect_head_dims,
    expect_heads_divide,
    expect_like,
    expect_operand,
    expect_stored,
    expect_tensor,
    memory_of,
)
from tl_attention.checks.kvcache import ALIGNMENT, check_page_strides, check_pages
from tl_attention.problem.attn_problem import MAX_HEAD_DIM


def check_forward_only(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, learnable_sink: torch.Tensor | None
) -> None:
    """Refuse gradients; `name` is the argument that has no backward."""
    for operand, x in (("q", q), ("k", k), ("v", v), ("learnable_sink", learnable_sink)):
        if getattr(x, "requires_grad", False):
            raise NotImplementedError(
                f"{operand}: expected a tensor that needs no gradient, as a call with {name} has no backward, got requires_grad=True; use"
                f" torch.no_grad(), or pass {name}=None"
            )


def check_no_fp32(name: str, q: torch.Tensor) -> None:
    """Refuse fp32, which flash_attn_varlen_func takes without the argument `name`."""
    if isinstance(q, torch.Tensor) and q.dtype == torch.float32:
        raise TypeError(
            f"q: expected bfloat16 or float16 with {name}, got {q.dtype}; cast q, k and v with .to(torch.bfloat16), or pass {name}=None"
        )


def check_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor,
    dropout_p: float,
) -> None:
    """Check q [total_q, heads, head_dim], k and v in pages, and the table of pages. Other functions check the other arguments."""
    expect_operand("q", q, "total_q, heads, head_dim", 3)
    for name, x, width in (("k", k, "head_dim"), ("v", v, "head_dim_v")):
        hints = {3: "leave block_table out, as these keys are packed"}
        expect_operand(name, x, f"pages, page_size, heads_kv, {width}", 4, (q.dtype,), hints)
        expect_device(name, x, q)
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: expected the shape of k, {tuple(k.shape)}, but for the last dimension, got {tuple(v.shape)}"
        )
    (_, heads, head_dim), head_dim_v = q.shape, v.shape[3]
    if k.shape[3] != head_dim:
        raise ValueError(f"k: expected the head_dim of q, {head_dim}, got {k.shape[3]}")
    expect_heads_divide("k, v", heads, k.shape[2], PACKED)
    expect_head_dims("q, k", "v", head_dim, head_dim_v)
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"q, k, v: expected a head_dim of at most {MAX_HEAD_DIM}, got {head_dim} and {head_dim_v}, which are not supported; {WIDER}"
        )
    if head_dim_v > head_dim:
        raise NotImplementedError(
            f"v: expected a head_dim of at most that of q and k, {head_dim}, got {head_dim_v}, which is not supported; allocate pages of k"
            f" as wide as those of v, pad q with zeros and pass softmax_scale={head_dim} ** -0.5"
        )
    if head_dim % ALIGNMENT or head_dim_v % ALIGNMENT:
        raise ValueError(
            f"q, k, v: expected head dims that are multiples of {ALIGNMENT}, as pages are never copied, got {head_dim} for q, k and"
            f" {head_dim_v} for v; allocate wider pages, pad q with zeros and pass softmax_scale explicitly"
        )
    expect_boundaries("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError(
            "cu_seqlens_k, seqused_k: expected one of them, the lengths of keys, got None and None; pass seqused_k"
        )
    for name, x in (("k", k), ("v", v)):
        check_page_strides(name, x)
    check_pages("k", q, k, cu_seqlens_q.shape[0] - 1, block_table)
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: expected 0 with block_table, which serves inference alone, got {describe(dropout_p)}"
        )


def check_out(q: torch.Tensor, head_dim_v: int, out: torch.Tensor) -> None:
    """Check the tensor to write to, but not its address: see check_paged_addresses."""
    expect_tensor("out", out)
    if out.dtype != q.dtype:
        raise TypeError(
            f"out: expected the dtype of q, {q.dtype}, got {out.dtype}; allocate it with dtype=q.dtype, as a cast is a copy"
        )
    expect_like("out", out, q, ((*q.shape[:2], head_dim_v),), (q.dtype,))
    if not out.is_contiguous():
        raise ValueError(
            f"out: expected a contiguous tensor, got strides {out.stride()}; pass a contiguous one and copy it"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "out: expected a tensor that needs no gradient, as a call with out has no backward, got requires_grad=True; use torch.no_grad()"
        )


def check_paged_addresses(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paged: bool, out: torch.Tensor | None
) -> None:
    """Check 16-byte alignment and the memory of tensors that are never copied, and that out shares no memory with q, k and v."""
    never_copied = [("out", out), *((("k", k), ("v", v)) if paged else ())]
    for name, x in never_copied:
        if x is None:
            continue
        expect_stored(name, x)
        if x.data_ptr() & 15:
            raise ValueError(
                f"{name}: expected an address that is a multiple of 16 bytes, as it is never copied, got {name}.data_ptr() % 16 ="
                f" {x.data_ptr() & 15}; slice it at multiples of 16 bytes"
            )
    if out is None:
        return
    written = memory_of(out)
    for name, x in (("q", q), ("k", k), ("v", v)):
        read = memory_of(x)
        shared = min(written.stop, read.stop) - max(written.start, read.start)
        if shared > 0:
            raise ValueError(
                f"out: expected memory that q, k and v do not use, as they are read while out is written, got {shared} bytes that {name}"
                f" spans, too, from byte {max(read.start - written.start, 0)} of out on; pass a tensor of its own, such as"
                " torch.empty_like(q)"
            )
