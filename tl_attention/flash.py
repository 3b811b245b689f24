"""The names the ecosystem calls: [batch, seqlen, heads, head_dim], log-sum-exp in natural log, FlashAttention-2's parameter order."""

from __future__ import annotations

import torch

from tl_attention.checks import check_not_built
from tl_attention.ops import attention


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Exact attention in one pass: softmax(softmax_scale * q k^T + mask) v.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16 or float16; head_dim a multiple of 8, at most 256.
        k: [batch, seqlen_k, heads_kv, head_dim], heads a multiple of heads_kv.
        v: [batch, seqlen_k, heads_kv, head_dim_v], head_dim_v <= head_dim.
            Any strides with a contiguous last dimension; see mha_fwd_interface for what is copied.
        softmax_scale: multiplies the scores; finite, negative and 0 included, head_dim ** -0.5 if None. The kernel is right
            while |score * softmax_scale| stays below about 2 ** 30.
        causal: query i sees key j if j <= i + seqlen_k - seqlen_q (bottom-right).
        deterministic: gradients are the same bits every time, for up to a third more time at d64 and a tenth at d128; the forward always
            is. torch.use_deterministic_algorithms(True) asks for it, too.
        return_attn_probs: also return the log-sum-exp.
        dropout_p, window_size, softcap, alibi_slopes: not built yet, only their defaults are taken.
    Returns:
        out [batch, seqlen_q, heads, head_dim_v] in the dtype of q. With return_attn_probs (out, softmax_lse, None), where softmax_lse is
        [batch, heads, seqlen_q], fp32, natural log. A query that sees no key has out 0 and softmax_lse -inf (FA2: +inf).
        out and softmax_lse are differentiable, once.
    Raises:
        TypeError, ValueError, NotImplementedError: the argument, what was expected and what came.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """
    check_not_built(dropout_p, window_size, softcap, alibi_slopes)
    out, lse = attention(
        q, k, v, softmax_scale, causal, lse_base2=False, heads_first=False, deterministic=deterministic
    )
    return (out, lse, None) if return_attn_probs else out
