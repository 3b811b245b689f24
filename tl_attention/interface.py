"""Research interface: [batch, heads, seqlen, head_dim] tensors, log-sum-exp in base 2."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tl_attention import launch
from tl_attention.checks import FLOATS, check_device, check_fwd, check_reference, expect_bool, expect_like
from tl_attention.ops import attention, attention_backward, scale_of
from tl_attention.reference import attention_backward_reference, attention_reference


def mha_fwd_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    return_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | Callable:
    """Exact attention in one pass: out = softmax(sm_scale * q k^T + mask) v, and the log-sum-exp of its rows in BASE 2.

    Args:
        q: [batch, heads, seqlen_q, head_dim_qk], bfloat16 or float16; head_dim_qk at most 256.
        k: [batch, heads_kv, seqlen_kv, head_dim_qk], heads a multiple of heads_kv.
        v: [batch, heads_kv, seqlen_kv, head_dim_v], head_dim_v <= head_dim_qk.
            Any strides with a contiguous last dimension: transposed views and slices of packed QKV are not copied. A tensor that TMA
            cannot address is copied: one with a stride of 0, with a stride or address that is no multiple of 16 bytes, or with a head
            dim that is no multiple of 8.
        sm_scale: multiplies the scores; at most 2 ** 60 in magnitude, negative and 0 included; None: head_dim_qk ** -0.5. The kernel
            is exact while |score * sm_scale| stays below about 2 ** 30.
        is_causal: query i sees key j if j <= i + seqlen_kv - seqlen_q (bottom-right); False: every query sees every key.
        return_kernel: return kernel(q, k, v) -> (out, lse), compiled for tensors like these and without checks, for timing.
    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the dtype of q; lse [batch, heads, seqlen_q], fp32: log2 of the sum of
        2 ** (score * sm_scale * log2 e); times ln 2 it is the natural one. A query that sees no key has out 0 and lse -inf.
        Both are differentiable, once.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """
    if return_kernel is not False:
        expect_bool("return_kernel", return_kernel)
        check_fwd(q, k, v, sm_scale, is_causal, heads_first=True)
        return _kernel_like(q, k, v, sm_scale, is_causal)
    return attention(q, k, v, sm_scale, is_causal, lse_base2=True, heads_first=True)


def _kernel_like(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float | None, is_causal: bool
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """kernel(q, k, v) -> (out, lse) without checks, compiled by a first call on q, k and v."""
    scale = scale_of(q, sm_scale)
    run = attention
    if q.device.type != "cpu":
        check_device(q)
        run = launch.forward

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return run(q, k, v, scale, is_causal, True, True)  # base 2, heads first

    kernel(q, k, v)
    return kernel


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | Callable:
    """Gradients of mha_fwd_interface with respect to q, k and v, in O(N) memory.

    Args:
        do: [batch, heads, seqlen_q, head_dim_v], the gradient with respect to out, in its dtype; any strides.
        q, k, v, sm_scale, is_causal: those of the forward.
        out, lse: results of the forward, lse in base 2.
        deterministic: bitwise equal from run to run, for up to a third more time at d64 and a tenth at d128;
            torch.use_deterministic_algorithms(True) asks for it, too. Otherwise the order of the sums of dq may vary.
        return_kernel: return kernel(do, q, k, v, out, lse) -> (dq, dk, dv), compiled for tensors like these and without
            checks, for timing.
    Returns:
        dq, dk, dv: shaped as q, k, v, in their dtype; dk and dv are summed in fp32 over the query heads of a key head. A query
        that sees no key has gradient 0 and contributes none.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 2; Shah et al. 2024 (FlashAttention-3).
    """
    expect_bool("return_kernel", return_kernel)
    grads = attention_backward(do, q, k, v, out, lse, sm_scale, is_causal, deterministic)
    if not return_kernel:
        return grads
    if q.device.type == "cpu":
        return lambda *tensors: attention_backward(*tensors, sm_scale, is_causal, deterministic)
    scale = scale_of(q, sm_scale)
    deterministic |= torch.are_deterministic_algorithms_enabled()
    return lambda *tensors: launch.backward(*tensors, scale, is_causal, True, True, deterministic)


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
