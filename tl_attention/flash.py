"""The names the ecosystem calls, with FlashAttention-2's parameters in its order; what is ours follows as keywords.

Layout [batch, seqlen, heads, head_dim], or [total, heads, head_dim] of sequences one after another; log-sum-exp in natural log. A
score goes through softmax_scale, softcap, ALiBi and masks; then come the softmax, with the sink among its scores, and dropout. The
diagonal of query i is key i + seqlen_k - seqlen_q (bottom-right), where numbers and lengths are those of its sequence.

All the functions take:

Args:
    softmax_scale: multiplies the scores; finite, negative and 0 included, head_dim ** -0.5 if None. The kernel is right while
        |score * softmax_scale| stays below about 2 ** 30.
    causal: a query sees no key past its diagonal.
    window_size: (left, right): a query sees diagonal - left <= key <= diagonal + right; -1 or None: no limit. With causal, right is 0.
    softcap: score -> softcap * tanh(score / softcap); 0: none.
    alibi_slopes: [heads] or [batch, heads], fp32: score - slope * |diagonal - key|. Not differentiable.
    learnable_sink: [heads], fp32 or the dtype of q: for each query one more key, of no value, that has this score, neither scaled nor
        capped; in softmax_lse, too. Differentiable.
    dropout_p: a probability becomes 0 with this one, rounded to a multiple of 1/256, at least one if > 0; at most 255/256. The others are
        divided by 1 - dropout_p. softmax_lse is of the undropped.
    rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The same give the same mask, for the same heads and
        numbers in the batch and within a sequence. None: drawn as torch.manual_seed says. Nothing without dropout.
    deterministic: gradients are the same bits every time, for up to a third more time at d64 and a tenth at d128; the forward always
        is. torch.use_deterministic_algorithms(True) asks for it, too.
    return_attn_probs: also return the log-sum-exp.
    num_splits: among how many CTAs the keys of a tile of queries are divided in the forward; 0: as many as suit the problem. Only
        flash_attn_func and flash_attn_varlen_func take one.
Returns:
    out, shaped as q but head_dim_v wide, in its dtype. With return_attn_probs (out, softmax_lse, None), where softmax_lse is
    [batch, heads, seqlen_q], or [heads, total_q], fp32, natural log. A query that sees no key has out 0 and softmax_lse -inf
    (FA2: +inf), or that of its sink. out and softmax_lse are differentiable, once.
Raises:
    TypeError, ValueError, NotImplementedError: the argument, what was expected and what came.
Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
"""

from __future__ import annotations

import torch

from tl_attention.checks import check_no_block_table, check_packed
from tl_attention.ops import attention, attention_with_options

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    learnable_sink: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    lengths: tuple | None = None,
    num_splits: int = 0,
) -> Output:
    plain = (
        lengths is None
        and type(num_splits) is int
        and not num_splits
        and alibi_slopes is None
        and learnable_sink is None
        and type(window_size) is tuple
        and type(softcap) is type(dropout_p) is float
        and (dropout_p, window_size, softcap) == (0, (-1, -1), 0)
    )
    if plain:
        out, lse = attention(q, k, v, softmax_scale, causal, False, False, deterministic)
    else:
        out, lse = attention_with_options(
            q,
            k,
            v,
            softmax_scale,
            causal,
            deterministic,
            window_size,
            softcap,
            dropout_p,
            alibi_slopes,
            learnable_sink,
            rng_state,
            lengths,
            num_splits,
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    num_splits: int = 0,
) -> Output:
    """Exact attention in one pass: softmax(softmax_scale * q k^T + mask) v.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16 or float16; head_dim a multiple of 8, at most 256.
        k: [batch, seqlen_k, heads_kv, head_dim], heads a multiple of heads_kv.
        v: [batch, seqlen_k, heads_kv, head_dim_v], head_dim_v <= head_dim.
            Any strides with a contiguous last dimension; see mha_fwd_interface for what is copied.

    Options, what is returned and raised: see the module.
    """
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        rng_state,
        num_splits=num_splits,
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
) -> Output:
    """flash_attn_func of views of one tensor, whose gradient is one.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], any strides with a contiguous last dimension.

    Options, what is returned and raised: see the module.
    """
    check_packed("qkv", qkv, "batch, seqlen, 3, heads, head_dim", 3)
    return _attend(
        *qkv.unbind(-3),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        rng_state,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
) -> Output:
    """flash_attn_func of q and of views of one tensor, whose gradient is one.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        kv: [batch, seqlen_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.

    Options, what is returned and raised: see the module.
    """
    check_packed("kv", kv, "batch, seqlen_k, 2, heads_kv, head_dim", 2)
    return _attend(
        q,
        *kv.unbind(-3),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        rng_state,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    num_splits: int = 0,
) -> Output:
    """flash_attn_func of each sequence of a batch, whose sequences lie one after another in memory.

    Args:
        q: [total_q, heads, head_dim].
        k: [total_k, heads_kv, head_dim].
        v: [total_k, heads_kv, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: [batch + 1], int32, on the device of q: sequence i has the rows from cu_seqlens[i] to before
            cu_seqlens[i + 1]. They start at 0, never fall and stay within the tensors, which is not checked; a sequence may have no row.
        max_seqlen_q, max_seqlen_k: no sequence is longer; how large they are matters to the schedule alone. A 0-d tensor is not read:
            the rows of all sequences together serve instead.
        block_table: None; paged caches are not supported: see flash_attn_with_kvcache.
        seqused_q, seqused_k: [batch], int32: of sequence i only the first seqused[i] rows exist, which is its length for masks, too. Rows
            beyond are not read; their out and gradients are 0, their softmax_lse -inf.

    A row past the last sequence has no meaning in out, softmax_lse and gradients.
    Options, what is returned and raised: see the module.
    """
    check_no_block_table(block_table)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        rng_state,
        lengths,
        num_splits,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
) -> Output:
    """flash_attn_varlen_func of views of one tensor, whose gradient is one; queries and keys have the same sequences.

    Args:
        qkv: [total, 3, heads, head_dim], any strides with a contiguous last dimension.
        cu_seqlens, max_seqlen: as there.

    Options, what is returned and raised: see the module.
    """
    check_packed("qkv", qkv, "total, 3, heads, head_dim", 3)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, None, None
    return _attend(
        *qkv.unbind(-3),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        rng_state,
        lengths,
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
) -> Output:
    """flash_attn_varlen_func of q and of views of one tensor, whose gradient is one.

    Args:
        q: [total_q, heads, head_dim].
        kv: [total_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as there.

    Options, what is returned and raised: see the module.
    """
    check_packed("kv", kv, "total_k, 2, heads_kv, head_dim", 2)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None
    return _attend(
        q,
        *kv.unbind(-3),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        learnable_sink,
        rng_state,
        lengths,
    )
