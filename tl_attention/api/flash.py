"""FlashAttention-2's functions: its parameters in its order, then further ones by keyword only.

Tensors are [batch, seqlen, heads, head_dim], or [total, heads, head_dim] for packed sequences. The log-sum-exp is natural. The order
is: softmax_scale, softcap, ALiBi, masks, softmax (the sink is one of its scores), dropout. The diagonal of query i is key
i + seqlen_k - seqlen_q (bottom-right alignment); positions and lengths count within a sequence.

The entries below are those of all functions: complete() puts them into the docstring of each one that takes the option.

Args:
    softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with log2(e) and the lowest row max, -1e20,
        is finite in fp32. It may be negative or 0. None: head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays
        below about 2 ** 30.
    causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query sees all.
    window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <= diagonal + right; -1 or None: no
        limit. With causal, right is 0. Bounds below -1 are refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
    softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
    alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|. Not differentiable.
    learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no value. It is neither scaled nor capped,
        and counts in softmax_lse. Differentiable where q is.
    dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256: at least 1/256 if > 0, at most 255/256. Kept
        weights are divided by 1 - dropout_p. softmax_lse is computed before dropout. torch.no_grad() does not turn it off: pass 0 in
        evaluation.
    rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask depends on it, on the entry of the batch, the
        head, and the positions in the sequence. None: drawn from torch's generator. Unused without dropout.
    deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much longer the backward takes. The forward
        always is. torch.use_deterministic_algorithms(True) sets it, too.
    return_attn_probs: also return the log-sum-exp.
    return_max_logits: also return the largest score of each query, max_logits, as the softmax sees it: scaled, capped, with ALiBi, or after
        score_mod and attn_bias, over the keys that the masks show, without the sink. QK-clip needs it (examples/qk_clip.py). Not
        differentiable; out and softmax_lse are, as without it. Keys are not split among CTAs, so num_splits is at most 1.
    precision: relative error of a product of fp32 tensors, in forward and backward: "highest", 2 ** -23; "high", 2 ** -15; "medium",
        that of bf16. None: torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has measured errors.
        Gradients at "highest" of head dims above 128 have no kernels: PyTorch's formula computes them, slower.
    num_splits: number of CTAs that share the keys of a forward tile; 1: none do; 0: chosen for the problem.
    batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the batch, the place in it, the number of
        queries of the call and the pages, and with deterministic=True the gradients of a sequence those of the sequence alone
        (docs/numerics.md). Without dropout, and num_splits at most 1. TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
    check_lengths: for debugging: check the values of cu_seqlens, seqused and max_seqlen, which waits for the GPU. IndexError says which
        value is wrong. TL_ATTENTION_CHECK_LENGTHS=1 sets it in every call.
Returns:
    out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With return_attn_probs (out, softmax_lse, None), where
    softmax_lse is [batch, heads, seqlen_q], or [heads, total_q] for packed sequences, fp32, natural log. A query that sees no key has
    out 0 and softmax_lse -inf (FA2: +inf), or with a sink softmax_lse = sink. out and softmax_lse are differentiable once: there is no
    second derivative. With return_max_logits max_logits come last, (out, max_logits) or (out, softmax_lse, None, max_logits), in the shape
    of softmax_lse, fp32, -inf for a query that sees no key and for rows of no sequence.
Raises:
    TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tl_attention.api.docstrings import complete
from tl_attention.api.flex import attend_by_functions
from tl_attention.api.paged import attend_packed
from tl_attention.checks import lengths as checks_lengths
from tl_attention.checks.common import check_packed, expect_bool
from tl_attention.checks.keywords import unknown_keyword
from tl_attention.checks.lengths import NAMES, Lengths, Names, checked_lengths
from tl_attention.checks.transforms import ARGUMENT_ERRORS, Renaming
from tl_attention.problem.attn_problem import Precision
from tl_attention.problem.request import MaskMod, Request, ScoreMod, new_request
from tl_attention.torch_ops.attend import attend
from tl_attention.torch_ops.ops import Outputs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Without flags, with return_attn_probs, with return_max_logits, with both
Output = (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
)
_QKV = Names("cu_seqlens", "max_seqlen", "seqused", "qkv")
_KV = NAMES[1]._replace(tensor="kv")
# Name in an error of the checks -> argument of the packed function
_QKV_NAMES = Renaming(dict.fromkeys(("q", "k", "v"), "qkv"))
_KV_NAMES = Renaming({"q": "q", "k": "kv", "v": "kv"})
_VARLEN_QKV_NAMES = Renaming(
    _QKV_NAMES.names
    | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
    | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
)


def _attend(
    request: Request,
    return_attn_probs: bool,
    return_max_logits: bool,
    attend: Callable[[Request], Outputs] = attend,
) -> Any:
    """Results of a public function, by attend()."""
    if return_attn_probs is not False:
        expect_bool("return_attn_probs", return_attn_probs)
    if return_max_logits is not False:
        expect_bool("return_max_logits", return_max_logits)
        out, lse, largest = attend(request._replace(max_logits=True))
        return (out, lse, None, largest) if return_attn_probs else (out, largest)
    out, lse = attend(request)
    return (out, lse, None) if return_attn_probs else out


def _lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: Lengths,
    check_lengths: bool,
    names: tuple[Names, Names] = NAMES,
) -> Lengths:
    """Lengths of packed sequences; their values are checked if check_lengths or the environment asks for it."""
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
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    attn_bias: torch.Tensor | None = None,
    **unknown: NoReturn,
) -> Output:
    """Exact attention in one pass: softmax(softmax_scale * q k^T + mask) v.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16, float16 or float32; head_dim at most 256. If it is no multiple of 8, q, k and v
            are copied to padded columns.
        k: [batch, seqlen_k, heads_kv, head_dim], heads a multiple of heads_kv.
        v: [batch, seqlen_k, heads_kv, head_dim_v], head_dim_v <= head_dim.
            q, k and v may have any strides with a contiguous last dimension; mha_fwd_interface says which are copied.
        score_mod, mask_mod, block_mask, attn_bias: as in flex_attention; all other options must be off.
    """
    if unknown:
        raise unknown_keyword(flash_attn_func, unknown)
    request = new_request(
        q, k, v, softmax_scale, causal, deterministic, precision=precision, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, rng_state=rng_state, num_splits=num_splits,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    # One by one, as torch.compile cannot compare functions
    if score_mod is None and mask_mod is None and block_mask is None and attn_bias is None:
        return _attend(request, return_attn_probs, return_max_logits)
    request = request._replace(functions=(score_mod, mask_mod, block_mask, attn_bias))
    return _attend(request, return_attn_probs, return_max_logits, attend_by_functions)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    **unknown: NoReturn,
) -> Output:
    """flash_attn_func of q, k and v packed in one tensor, which gets one gradient.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], any strides with a contiguous last dimension.
    """
    if unknown:
        raise unknown_keyword(flash_attn_qkvpacked_func, unknown)
    check_packed("qkv", qkv, "batch, seqlen, 3, heads, head_dim", 3)
    q, k, v = qkv.unbind(-3)
    request = new_request(
        q, k, v, softmax_scale, causal, deterministic, precision=precision, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, rng_state=rng_state, batch_invariant=batch_invariant,
    )  # fmt: skip
    try:
        return _attend(request, return_attn_probs, return_max_logits)
    except ARGUMENT_ERRORS as error:
        raise _QKV_NAMES.of(error) from None


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    **unknown: NoReturn,
) -> Output:
    """flash_attn_func of k and v packed in one tensor, which gets one gradient.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        kv: [batch, seqlen_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.
    """
    if unknown:
        raise unknown_keyword(flash_attn_kvpacked_func, unknown)
    check_packed("kv", kv, "batch, seqlen_k, 2, heads_kv, head_dim", 2)
    k, v = kv.unbind(-3)
    request = new_request(
        q, k, v, softmax_scale, causal, deterministic, precision=precision, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, rng_state=rng_state, batch_invariant=batch_invariant,
    )  # fmt: skip
    try:
        return _attend(request, return_attn_probs, return_max_logits)
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
    window_size: Sequence[int | None] = (-1, -1),
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
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
    **unknown: NoReturn,
) -> Output:
    """flash_attn_func per sequence of a batch of packed sequences.

    Rows past the last sequence are not read; their out and gradients are 0, their softmax_lse is -inf.

    Args:
        q: [total_q, heads, head_dim].
        k: [total_k, heads_kv, head_dim].
        v: [total_k, heads_kv, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: [batch + 1], int32, on the device of q: sequence i has rows cu_seqlens[i] to cu_seqlens[i + 1],
            exclusive. They must start at 0, never decrease and stay within the tensors. On a GPU only check_lengths checks this: with other
            values the kernels may read and write other memory. A sequence may be empty. cu_seqlens_k may be None with block_table.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, used by the schedule only. A 0-d tensor is accepted but not read:
            the total number of rows replaces it.
        block_table: [batch, pages per sequence], int32, for keys in pages: page i of a sequence holds its keys from i * page_size on;
            entries past its length are not read. k and v are then [pages, page_size, heads_kv, head_dim or head_dim_v], with the
            strides of k_cache in flash_attn_with_kvcache, and page_size is a multiple of 16. The key length of a sequence is seqused_k[i],
            or where seqused_k is None cu_seqlens_k[i + 1] - cu_seqlens_k[i]; one of the two may be None. Pages are never copied.
            Gradients, dropout and vmap are refused.
        seqused_q, seqused_k: [batch], int32: only the first seqused[i] rows of sequence i are used, also by the masks. Rows beyond are
            not read; their out and gradients are 0, their softmax_lse is -inf. Each is between 0 and the length of its sequence;
            on a GPU only check_lengths checks this.
        out: [total_q, heads, head_dim_v] in the dtype of q, contiguous, 16-byte aligned, sharing no memory with q, k and v. It is
            written and returned; gradients and vmap are refused. None: a new tensor.
    """
    if unknown:
        raise unknown_keyword(flash_attn_varlen_func, unknown)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    if block_table is None and out is None:
        lengths = _lengths(q, k, lengths, check_lengths)
    request = new_request(
        q, k, v, softmax_scale, causal, deterministic, precision=precision, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, rng_state=rng_state, num_splits=num_splits,
        batch_invariant=batch_invariant, lengths=lengths,
    )  # fmt: skip
    if block_table is None and out is None:
        return _attend(request, return_attn_probs, return_max_logits)
    return _attend(
        request,
        return_attn_probs,
        return_max_logits,
        lambda request: attend_packed(request, block_table, out, check_lengths),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    check_lengths: bool = False,
    **unknown: NoReturn,
) -> Output:
    """flash_attn_varlen_func of q, k and v packed in one tensor, which gets one gradient; q and k share cu_seqlens.

    Args:
        qkv: [total, 3, heads, head_dim], any strides with a contiguous last dimension.
        cu_seqlens, max_seqlen: as in flash_attn_varlen_func.
    """
    if unknown:
        raise unknown_keyword(flash_attn_varlen_qkvpacked_func, unknown)
    check_packed("qkv", qkv, "total, 3, heads, head_dim", 3)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, None, None
    q, k, v = qkv.unbind(-3)
    request = new_request(
        q, k, v, softmax_scale, causal, deterministic, precision=precision, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, rng_state=rng_state, batch_invariant=batch_invariant,
    )  # fmt: skip
    try:
        lengths = _lengths(qkv, qkv, lengths, check_lengths, (_QKV, _QKV))
        return _attend(request._replace(lengths=lengths), return_attn_probs, return_max_logits)
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
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    check_lengths: bool = False,
    **unknown: NoReturn,
) -> Output:
    """flash_attn_varlen_func of k and v packed in one tensor, which gets one gradient.

    Args:
        q: [total_q, heads, head_dim].
        kv: [total_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in flash_attn_varlen_func.
    """
    if unknown:
        raise unknown_keyword(flash_attn_varlen_kvpacked_func, unknown)
    check_packed("kv", kv, "total_k, 2, heads_kv, head_dim", 2)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None
    k, v = kv.unbind(-3)
    request = new_request(
        q, k, v, softmax_scale, causal, deterministic, precision=precision, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, rng_state=rng_state, batch_invariant=batch_invariant,
    )  # fmt: skip
    try:
        lengths = _lengths(q, kv, lengths, check_lengths, (NAMES[0], _KV))
        return _attend(request._replace(lengths=lengths), return_attn_probs, return_max_logits)
    except ARGUMENT_ERRORS as error:
        raise _KV_NAMES.of(error) from None


complete(
    __doc__,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)
