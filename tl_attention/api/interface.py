"""Research interface: [batch, heads, seqlen, head_dim] tensors, log-sum-exp in base 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import torch

from tl_attention import launch
from tl_attention.checks.common import (
    FLOATS,
    FWD_DTYPES,
    check_device,
    check_fwd,
    check_reference,
    expect_bool,
    expect_like,
    expect_tensor,
)
from tl_attention.checks.fp32 import check_precision, has_gradient_kernels
from tl_attention.checks.keywords import unknown_keyword
from tl_attention.problem.attn_problem import MAX_HEAD_DIM, Precision
from tl_attention.problem.options import options_of_terms
from tl_attention.problem.request import new_request
from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.torch_ops.attend import attend
from tl_attention.torch_ops.ops import attention_backward, in_bf16, scale_of

# (q, k, v) -> (out, lse), and (do, q, k, v, out, lse) -> (dq, dk, dv)
ForwardKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
BackwardKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]


def mha_fwd_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    return_kernel: bool = False,
    *,
    precision: Precision | None = None,
    **unknown: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor] | ForwardKernel:
    """Exact attention in one pass: out = softmax(sm_scale * q k^T + mask) v, and the log-sum-exp per row in BASE 2.

    Args:
        q: [batch, heads, seqlen_q, head_dim_qk], bfloat16, float16 or float32; head_dim_qk at most 256.
        k: [batch, heads_kv, seqlen_kv, head_dim_qk], heads a multiple of heads_kv.
        v: [batch, heads_kv, seqlen_kv, head_dim_v], head_dim_v <= head_dim_qk.
            Any strides with a contiguous last dimension: transposed views and slices of packed QKV are not copied. A tensor that TMA
            cannot address is copied: one with a stride of 0, with a stride or address that is no multiple of 16 bytes, or with a head
            dim that is no multiple of 8.
        sm_scale: multiplies the scores; at most 2 ** 60 in magnitude, may be negative or 0; None: head_dim_qk ** -0.5. The kernel
            is exact while |score * sm_scale| stays below about 2 ** 30.
        is_causal: query i sees key j if j <= i + seqlen_kv - seqlen_q (bottom-right); False: every query sees every key.
        return_kernel: return kernel(q, k, v) -> (out, lse), compiled for tensors like these and without checks, for timing.
        precision: that of products of fp32 tensors: "highest", "high" or "medium"; None: torch.get_float32_matmul_precision(). Only
            with fp32 tensors; docs/numerics.md has measured errors.
    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the dtype of q; lse [batch, heads, seqlen_q], fp32: log2 of the sum of
        2 ** (score * sm_scale * log2 e); multiply by ln 2 for the natural log. A query that sees no key has out 0 and lse -inf.
        Both are differentiable, once.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """
    if unknown:
        raise unknown_keyword(mha_fwd_interface, unknown)
    if return_kernel is not False:
        expect_bool("return_kernel", return_kernel)
        check_fwd(q, k, v, sm_scale, is_causal, heads_first=True, dtypes=FWD_DTYPES)
        return _forward_kernel_like(q, k, v, sm_scale, is_causal, check_precision(q, precision))
    return attend(
        new_request(q, k, v, sm_scale, is_causal, precision=precision, heads_first=True, lse_base2=True)
    )


def _forward_kernel_like(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float | None, is_causal: bool, terms: int
) -> ForwardKernel:
    """kernel(q, k, v) -> (out, lse) without checks, compiled by a first call on q, k and v."""
    scale = scale_of(q, sm_scale)
    options = options_of_terms(terms if terms > 1 else 0)

    def launched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return launch.forward(q, k, v, scale, is_causal, lse_base2=True, heads_first=True, options=options)

    if q.device.type == "cpu":
        kernel = functools.partial(mha_fwd_interface, sm_scale=scale, is_causal=is_causal)
    else:
        check_device(q)
        kernel = functools.partial(in_bf16, launched) if terms == 1 else launched
    kernel(q, k, v)
    return kernel


def _backward_kernel_like(
    q: torch.Tensor, sm_scale: float | None, is_causal: bool, deterministic: bool, terms: int
) -> BackwardKernel:
    """kernel(do, q, k, v, out, lse) -> (dq, dk, dv) without checks, on a GPU."""
    scale = scale_of(q, sm_scale)
    options = options_of_terms(terms if terms > 1 else 0)
    deterministic |= torch.are_deterministic_algorithms_enabled()

    def launched(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = launch.backward(*tensors, scale, is_causal, True, True, deterministic, options=options)
        return grads["q"], grads["k"], grads["v"]

    def in_half(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *rows, lse = tensors
        return in_bf16(lambda *half: launched(*half, lse), *rows)

    return in_half if terms == 1 else launched


def ref_mha_fwd_interface(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float | None = None, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of mha_fwd_interface: the plain formula in fp32, on any device. The tests compare with it.

    Returns:
        out in fp32 (not rounded to the dtype of q), and lse in base 2, fp32; shapes and edge values as mha_fwd_interface.
    """
    check_reference(q, k, v, sm_scale, is_causal)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = attention_reference(q, k, v, sm_scale, is_causal, lse_base2=True)
    return out.transpose(1, 2), lse


def mha_bwd_interface(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    deterministic: bool = False,
    return_kernel: bool = False,
    *,
    precision: Precision | None = None,
    **unknown: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | BackwardKernel:
    """Gradients of mha_fwd_interface with respect to q, k and v, in O(N) memory.

    Args:
        do: [batch, heads, seqlen_q, head_dim_v], the gradient with respect to out, in its dtype; any strides.
        q, k, v, sm_scale, is_causal: as in the forward.
        out, lse: results of the forward, lse in base 2.
        deterministic: bitwise equal from run to run; docs/numerics.md says how much longer it takes.
            torch.use_deterministic_algorithms(True) sets it, too. Otherwise the order of the sums of dq may vary.
        return_kernel: return kernel(do, q, k, v, out, lse) -> (dq, dk, dv), compiled for tensors like these and without
            checks, for timing.
        precision: as in the forward.
    Returns:
        dq, dk, dv: shaped as q, k, v, in their dtype; dk and dv are summed in fp32 over the query heads of a key head. A query
        that sees no key has gradient 0 and adds nothing to dk and dv.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 2; Shah et al. 2024 (FlashAttention-3).
    """
    if unknown:
        raise unknown_keyword(mha_bwd_interface, unknown)
    expect_bool("return_kernel", return_kernel)
    grads = attention_backward(do, q, k, v, out, lse, sm_scale, is_causal, deterministic, precision)
    if not return_kernel:
        return grads
    terms = check_precision(q, precision)
    if q.device.type == "cpu" or not has_gradient_kernels(q, v, terms):
        return lambda *tensors: attention_backward(*tensors, sm_scale, is_causal, deterministic, precision)
    return _backward_kernel_like(q, sm_scale, is_causal, deterministic, terms)


def ref_mha_bwd_interface(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of mha_bwd_interface: the plain formulas in fp32, on any device. The tests compare with it.

    Returns:
        dq, dk, dv in fp32 (not rounded to the dtype of q); shapes and edge values as mha_bwd_interface.
    """
    check_reference(q, k, v, sm_scale, is_causal)
    expect_like("do", do, q, ((*q.shape[:3], v.shape[3]),), FLOATS)
    views = (x.transpose(1, 2) for x in (do, q, k, v))
    return tuple(x.transpose(1, 2) for x in attention_backward_reference(*views, sm_scale, is_causal))


def fp32_workspace_bytes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    precision: Precision | None = None,
    *,
    backward: bool = False,
) -> int:
    """Workspace of a call with fp32 tensors, in bytes: the bf16 terms of k and v that it allocates on a GPU while it runs.

    Each element takes 6 bytes at "highest" and 4 at "high", with rows padded to 64, 128 or 256 columns. At "medium" q, k, v and out have
    bf16 copies of 2 bytes per element; in a backward so do the gradient of out and the results. This function allocates nothing.

    Args:
        q: [.., head_dim], fp32, in any layout.
        k, v: likewise, [.., head_dim] and [.., head_dim_v].
        precision: as in the call.
        backward: the workspace of the backward, which has terms of q and of the gradient of out, too; one that computes all gradients in
            one pass has no terms of k and v, and takes less. docs/numerics.md has the rest of its workspace. At "highest" 0 for head
            dims above 128, whose gradients need no terms.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, x)
        if x.dtype != torch.float32:
            raise TypeError(f"{name}: expected float32, got {x.dtype}; other dtypes need no terms")
        if not x.ndim or not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: expected shape [.., head_dim], head_dim 1 to {MAX_HEAD_DIM}, got {tuple(x.shape)}"
            )
    expect_bool("backward", backward)
    terms = check_precision(q, precision)
    if backward and not has_gradient_kernels(q, v, terms):
        return 0
    return launch.terms_workspace_bytes(terms, q.shape, k.shape, v.shape, backward)
