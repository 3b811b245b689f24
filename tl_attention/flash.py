"""FlashAttention-2's functions, with its parameters in its order; ours follow as keyword-only parameters.

Tensors are [batch, seqlen, heads, head_dim], or [total, heads, head_dim] for packed sequences; the log-sum-exp is natural. A score
passes softmax_scale, softcap, ALiBi and masks; softmax, with the sink among its scores, and dropout follow. The diagonal of query i
is key i + seqlen_k - seqlen_q (bottom-right), with positions and lengths within the sequence.

Parameters of all functions:

Args:
    softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with log2(e) and the lowest row max, -1e20,
        is finite in fp32; negative and 0 included; None: head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays
        below about 2 ** 30.
    causal: a query sees no key past its diagonal.
    window_size: (left, right), two ints in a tuple or list: a query sees diagonal - left <= key <= diagonal + right; -1 or None: no
        limit. With causal, right is 0. Bounds below -1 are refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
    softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
    alibi_slopes: [heads] or [batch, heads], fp32: score - slope * |diagonal - key|. Not differentiable.
    learnable_sink: [heads], fp32, bf16 or fp16: score of one more key without value, for each query; neither scaled nor capped;
        part of softmax_lse. Differentiable.
    dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256, at least one if > 0; at most 255/256. Kept
        weights are divided by 1 - dropout_p. softmax_lse is computed before dropout.
    rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. Equal states give equal masks, for equal heads and
        positions in the batch and within a sequence. None: drawn from torch's generator. Unused without dropout.
    deterministic: gradients are bitwise equal from run to run, for up to a third more time at d64 and a tenth at d128; the forward
        always is. torch.use_deterministic_algorithms(True) asks for it, too.
    return_attn_probs: also return the log-sum-exp.
    precision: of the products of fp32 tensors, for the backward, too: "highest", within 2 ** -23; "high", within 2 ** -15; "medium",
        those of bf16. None: torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has errors.
        Gradients at "highest" of head dims above 128 have no kernels: PyTorch's formula computes them, slower.
    num_splits: splits of the keys of a forward tile, one per CTA; 0: chosen for the problem. Only flash_attn_func and
        flash_attn_varlen_func have it.
    check_lengths: for debugging: check the values of cu_seqlens, seqused and max_seqlen, which waits for the GPU; only functions of
        packed sequences have it. TL_ATTENTION_CHECK_LENGTHS=1 asks for it in every call. See checks/lengths.py.
Returns:
    out, shaped as q but head_dim_v wide, in its dtype. With return_attn_probs (out, softmax_lse, None), where softmax_lse is
    [batch, heads, seqlen_q], or [heads, total_q], fp32, natural log. A query that sees no key has out 0 and softmax_lse -inf
    (FA2: +inf), or its sink. out and softmax_lse are differentiable, once.
Raises:
    TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    IndexError: with check_lengths, which value is wrong.
Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tl_attention.checks import lengths as checks_lengths
from tl_attention.checks.common import check_packed, expect_bool
from tl_attention.checks.lengths import NAMES, Lengths, Names, checked_lengths
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.flex import attend_by_functions
from tl_attention.ops import UserOptions, attention, attention_with_options
from tl_attention.paged import attend_packed

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
_QKV = Names("cu_seqlens", "max_seqlen", "seqused", "qkv")
_KV = NAMES[1]._replace(tensor="kv")
# Names of the arguments of packed forms in errors
_QKV_NAMES = Renaming(dict.fromkeys(("q", "k", "v"), "qkv"))
_KV_NAMES = Renaming({"q": "q", "k": "kv", "v": "kv"})
_VARLEN_QKV_NAMES = Renaming(
    _QKV_NAMES.names
    | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
    | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    return_attn_probs: bool,
    asked: tuple,  # in the order of UserOptions, which costs more to make
) -> Output:
    if return_attn_probs is not False:
        expect_bool("return_attn_probs", return_attn_probs)
    window_size, softcap, dropout_p, alibi_slopes, sink, _, num_splits, lengths, precision = asked
    plain = (
        lengths is precision is None
        and type(num_splits) is int
        and not num_splits
        and alibi_slopes is None
        and sink is None
        and type(window_size) is tuple
        and type(softcap) is type(dropout_p) is float
        and (dropout_p, window_size, softcap) == (0, (-1, -1), 0)
    )
    if plain:
        out, lse = attention(q, k, v, softmax_scale, causal, False, False, deterministic)
    else:
        options = UserOptions(*asked)
        out, lse = attention_with_options(q, k, v, softmax_scale, causal, deterministic, options)
    return (out, lse, None) if return_attn_probs else out


def _lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: Lengths,
    check_lengths: bool,
    names: tuple[Names, Names] = NAMES,
) -> Lengths:
    """Return lengths, with their values checked if that is asked for."""
    if check_lengths is False and not checks_lengths.ALWAYS:
        return lengths
    expect_bool("check_lengths", check_lengths)
    return checked_lengths(q, k, lengths, names)


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
    precision: str | None = None,
    num_splits: int = 0,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    block_mask: Any = None,
    attn_bias: torch.Tensor | None = None,
) -> Output:
    """Exact attention in one pass: softmax(softmax_scale * q k^T + mask) v.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16, float16 or float32; head_dim at most 256. One that is no multiple of 8 is copied.
        k: [batch, seqlen_k, heads_kv, head_dim], heads a multiple of heads_kv.
        v: [batch, seqlen_k, heads_kv, head_dim_v], head_dim_v <= head_dim.
            Any strides with a contiguous last dimension; see mha_fwd_interface for what is copied.
        score_mod, mask_mod, block_mask, attn_bias: those of flex_attention, without other options.

    Options, result and errors: see the module.
    """
    asked = (
        window_size,
        softcap,
        dropout_p,
        alibi_slopes,
        learnable_sink,
        rng_state,
        num_splits,
        None,
        precision,
    )
    if score_mod is mask_mod is block_mask is attn_bias is None:
        return _attend(q, k, v, softmax_scale, causal, deterministic, return_attn_probs, asked)
    expect_bool("return_attn_probs", return_attn_probs)
    functions = score_mod, mask_mod, block_mask, attn_bias
    out, lse = attend_by_functions(q, k, v, functions, softmax_scale, deterministic, (causal, *asked))
    return (out, lse, None) if return_attn_probs else out


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
    precision: str | None = None,
) -> Output:
    """flash_attn_func of views of one tensor, which gets one gradient.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], any strides with a contiguous last dimension.

    Options, result and errors: see the module.
    """
    check_packed("qkv", qkv, "batch, seqlen, 3, heads, head_dim", 3)
    asked = window_size, softcap, dropout_p, alibi_slopes, learnable_sink, rng_state, 0, None, precision
    try:
        return _attend(*qkv.unbind(-3), softmax_scale, causal, deterministic, return_attn_probs, asked)
    except ARGUMENT_ERRORS as error:
        raise _QKV_NAMES.of(error) from None


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
    precision: str | None = None,
) -> Output:
    """flash_attn_func of q and views of one tensor, which gets one gradient.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        kv: [batch, seqlen_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.

    Options, result and errors: see the module.
    """
    check_packed("kv", kv, "batch, seqlen_k, 2, heads_kv, head_dim", 2)
    asked = window_size, softcap, dropout_p, alibi_slopes, learnable_sink, rng_state, 0, None, precision
    try:
        return _attend(q, *kv.unbind(-3), softmax_scale, causal, deterministic, return_attn_probs, asked)
    except ARGUMENT_ERRORS as error:
        raise _KV_NAMES.of(error) from None


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
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
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: str | None = None,
    num_splits: int = 0,
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
) -> Output:
    """flash_attn_func per sequence of a batch of packed sequences.

    Args:
        q: [total_q, heads, head_dim].
        k: [total_k, heads_kv, head_dim].
        v: [total_k, heads_kv, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: [batch + 1], int32, on the device of q: sequence i has rows cu_seqlens[i] to cu_seqlens[i + 1],
            exclusive. They start at 0, never decrease and stay within the tensors, which is not checked without check_lengths: with
            other values the kernels may read and write other memory. A sequence may be empty. cu_seqlens_k: see block_table, too.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, used by the schedule only. A 0-d tensor is not read: the number of
            all rows replaces it.
        block_table: [batch, pages per sequence], int32, for keys in pages: page i of a sequence holds its keys from i * page_size on;
            entries past its length are not read. k and v are then [pages, page_size, heads_kv, head_dim or head_dim_v], with the
            strides of k_cache in flash_attn_with_kvcache, and page_size a multiple of 16. The lengths of keys are seqused_k or, where
            it is None, the differences of cu_seqlens_k; of these two one may be None. max_seqlen_k may be any upper bound. Pages are
            never copied. Without gradients, dropout, vmap.
        seqused_q, seqused_k: [batch], int32: sequence i has only its first seqused[i] rows, for masks, too. Rows beyond are not
            read; their out and gradients are 0, their softmax_lse is -inf. They are from 0 to the length of the sequence, which is
            not checked without check_lengths.
        out: [total_q, heads, head_dim_v] in the dtype of q, contiguous, at a multiple of 16 bytes, sharing no memory with q, k and v:
            written and returned. Without gradients, vmap. None: a new tensor.

    A row past the last sequence is undefined in out, softmax_lse and gradients.
    Options, result and errors: see the module.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    asked = window_size, softcap, dropout_p, alibi_slopes, learnable_sink, rng_state, num_splits
    if block_table is not None or out is not None:
        if return_attn_probs is not False:
            expect_bool("return_attn_probs", return_attn_probs)
        options = UserOptions(*asked, lengths, precision), block_table, out, check_lengths
        out, lse = attend_packed(q, k, v, softmax_scale, causal, deterministic, *options)
        return (out, lse, None) if return_attn_probs else out
    asked = *asked, _lengths(q, k, lengths, check_lengths), precision
    return _attend(q, k, v, softmax_scale, causal, deterministic, return_attn_probs, asked)


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
    precision: str | None = None,
    check_lengths: bool = False,
) -> Output:
    """flash_attn_varlen_func of views of one tensor, which gets one gradient; queries and keys have the same sequences.

    Args:
        qkv: [total, 3, heads, head_dim], any strides with a contiguous last dimension.
        cu_seqlens, max_seqlen: as in flash_attn_varlen_func.

    Options, result and errors: see the module.
    """
    check_packed("qkv", qkv, "total, 3, heads, head_dim", 3)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, None, None
    lengths = _lengths(qkv, qkv, lengths, check_lengths, (_QKV, _QKV))
    asked = window_size, softcap, dropout_p, alibi_slopes, learnable_sink, rng_state, 0, lengths, precision
    try:
        return _attend(*qkv.unbind(-3), softmax_scale, causal, deterministic, return_attn_probs, asked)
    except ARGUMENT_ERRORS as error:
        raise _VARLEN_QKV_NAMES.of(error) from None


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
    precision: str | None = None,
    check_lengths: bool = False,
) -> Output:
    """flash_attn_varlen_func of q and views of one tensor, which gets one gradient.

    Args:
        q: [total_q, heads, head_dim].
        kv: [total_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in flash_attn_varlen_func.

    Options, result and errors: see the module.
    """
    check_packed("kv", kv, "total_k, 2, heads_kv, head_dim", 2)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None
    lengths = _lengths(q, kv, lengths, check_lengths, (NAMES[0], _KV))
    asked = window_size, softcap, dropout_p, alibi_slopes, learnable_sink, rng_state, 0, lengths, precision
    try:
        return _attend(q, *kv.unbind(-3), softmax_scale, causal, deterministic, return_attn_probs, asked)
    except ARGUMENT_ERRORS as error:
        raise _KV_NAMES.of(error) from None
