# Written by `python scripts/stubs.py`: change the signatures and docstrings of the code instead

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tl_attention import block_masks as block_masks
from tl_attention import distributed as distributed
from tl_attention import hf as hf
from tl_attention import mask_picture as mask_picture
from tl_attention import torch_backend as torch_backend
from tl_attention.api.block_masks import create_block_mask as create_block_mask
from tl_attention.api.interface import BackwardKernel, ForwardKernel
from tl_attention.api.interface import fp32_workspace_bytes as fp32_workspace_bytes
from tl_attention.api.interface import ref_mha_bwd_interface as ref_mha_bwd_interface
from tl_attention.api.interface import ref_mha_fwd_interface as ref_mha_fwd_interface
from tl_attention.api.kvcache import kvcache_workspace_bytes as kvcache_workspace_bytes
from tl_attention.api.merge import merge_states as merge_states
from tl_attention.api.trees import draft_tree_mask as draft_tree_mask
from tl_attention.problem.attn_problem import Precision
from tl_attention.problem.request import MaskMod, ScoreMod

__all__ = [
    "__version__",
    "create_block_mask",
    "draft_tree_mask",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "fp32_workspace_bytes",
    "kvcache_workspace_bytes",
    "merge_states",
    "mha_bwd_interface",
    "mha_fwd_interface",
    "ref_mha_bwd_interface",
    "ref_mha_fwd_interface",
]
__version__: str

@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    attn_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact attention in one pass: softmax(softmax_scale * q k^T + mask) v.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16, float16 or float32; head_dim at most 256.
            If it is no multiple of 8, q, k and v are copied to padded columns.
        k: [batch, seqlen_k, heads_kv, head_dim], heads a multiple of heads_kv.
        v: [batch, seqlen_k, heads_kv, head_dim_v], head_dim_v <= head_dim. q, k and v may have any
            strides with a contiguous last dimension; mha_fwd_interface says which are copied.
        dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256: at
            least 1/256 if > 0, at most 255/256. Kept weights are divided by 1 - dropout_p.
            softmax_lse is computed before dropout. torch.no_grad() does not turn it off: pass 0 in
            evaluation.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much
            longer the backward takes. The forward always is.
            torch.use_deterministic_algorithms(True) sets it, too.
        return_attn_probs: also return the log-sum-exp.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no
            value. It is neither scaled nor capped, and counts in softmax_lse. Differentiable where
            q is.
        rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask
            depends on it, on the entry of the batch, the head, and the positions in the sequence.
            None: drawn from torch's generator. Unused without dropout.
        precision: relative error of a product of fp32 tensors, in forward and backward: "highest",
            2 ** -23; "high", 2 ** -15; "medium", that of bf16. None:
            torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has
            measured errors. Gradients at "highest" of head dims above 128 have no kernels:
            PyTorch's formula computes them, slower.
        num_splits: number of CTAs that share the keys of a forward tile; 1: none do; 0: chosen for
            the problem.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the
            batch, the place in it, the number of queries of the call and the pages, and with
            deterministic=True the gradients of a sequence those of the sequence alone
            (docs/numerics.md). Without dropout, and num_splits at most 1.
            TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
        return_max_logits: also return the largest score of each query, max_logits, as the softmax
            sees it: scaled, capped, with ALiBi, or after score_mod and attn_bias, over the keys
            that the masks show, without the sink. QK-clip needs it (examples/qk_clip.py). Not
            differentiable; out and softmax_lse are, as without it. Keys are not split among CTAs,
            so num_splits is at most 1.
        score_mod, mask_mod, block_mask, attn_bias: as in flex_attention; all other options must be
            off.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With
            return_attn_probs (out, softmax_lse, None), where softmax_lse is [batch, heads,
            seqlen_q], or [heads, total_q] for packed sequences, fp32, natural log. A query that
            sees no key has out 0 and softmax_lse -inf (FA2: +inf), or with a sink softmax_lse =
            sink. out and softmax_lse are differentiable once: there is no second derivative. With
            return_max_logits max_logits come last, (out, max_logits) or (out, softmax_lse, None,
            max_logits), in the shape of softmax_lse, fp32, -inf for a query that sees no key and
            for rows of no sequence.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """

@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    attn_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    attn_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    attn_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    attn_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    attn_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
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
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
): ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
) -> torch.Tensor:
    """flash_attn_func of k and v packed in one tensor, which gets one gradient.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        kv: [batch, seqlen_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.
        dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256: at
            least 1/256 if > 0, at most 255/256. Kept weights are divided by 1 - dropout_p.
            softmax_lse is computed before dropout. torch.no_grad() does not turn it off: pass 0 in
            evaluation.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much
            longer the backward takes. The forward always is.
            torch.use_deterministic_algorithms(True) sets it, too.
        return_attn_probs: also return the log-sum-exp.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no
            value. It is neither scaled nor capped, and counts in softmax_lse. Differentiable where
            q is.
        rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask
            depends on it, on the entry of the batch, the head, and the positions in the sequence.
            None: drawn from torch's generator. Unused without dropout.
        precision: relative error of a product of fp32 tensors, in forward and backward: "highest",
            2 ** -23; "high", 2 ** -15; "medium", that of bf16. None:
            torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has
            measured errors. Gradients at "highest" of head dims above 128 have no kernels:
            PyTorch's formula computes them, slower.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the
            batch, the place in it, the number of queries of the call and the pages, and with
            deterministic=True the gradients of a sequence those of the sequence alone
            (docs/numerics.md). Without dropout, and num_splits at most 1.
            TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
        return_max_logits: also return the largest score of each query, max_logits, as the softmax
            sees it: scaled, capped, with ALiBi, or after score_mod and attn_bias, over the keys
            that the masks show, without the sink. QK-clip needs it (examples/qk_clip.py). Not
            differentiable; out and softmax_lse are, as without it. Keys are not split among CTAs,
            so num_splits is at most 1.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With
            return_attn_probs (out, softmax_lse, None), where softmax_lse is [batch, heads,
            seqlen_q], or [heads, total_q] for packed sequences, fp32, natural log. A query that
            sees no key has out 0 and softmax_lse -inf (FA2: +inf), or with a sink softmax_lse =
            sink. out and softmax_lse are differentiable once: there is no second derivative. With
            return_max_logits max_logits come last, (out, max_logits) or (out, softmax_lse, None,
            max_logits), in the shape of softmax_lse, fp32, -inf for a query that sees no key and
            for rows of no sequence.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """

@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
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
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
): ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
) -> torch.Tensor:
    """flash_attn_func of q, k and v packed in one tensor, which gets one gradient.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], any strides with a contiguous last dimension.
        dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256: at
            least 1/256 if > 0, at most 255/256. Kept weights are divided by 1 - dropout_p.
            softmax_lse is computed before dropout. torch.no_grad() does not turn it off: pass 0 in
            evaluation.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much
            longer the backward takes. The forward always is.
            torch.use_deterministic_algorithms(True) sets it, too.
        return_attn_probs: also return the log-sum-exp.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no
            value. It is neither scaled nor capped, and counts in softmax_lse. Differentiable where
            q is.
        rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask
            depends on it, on the entry of the batch, the head, and the positions in the sequence.
            None: drawn from torch's generator. Unused without dropout.
        precision: relative error of a product of fp32 tensors, in forward and backward: "highest",
            2 ** -23; "high", 2 ** -15; "medium", that of bf16. None:
            torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has
            measured errors. Gradients at "highest" of head dims above 128 have no kernels:
            PyTorch's formula computes them, slower.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the
            batch, the place in it, the number of queries of the call and the pages, and with
            deterministic=True the gradients of a sequence those of the sequence alone
            (docs/numerics.md). Without dropout, and num_splits at most 1.
            TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
        return_max_logits: also return the largest score of each query, max_logits, as the softmax
            sees it: scaled, capped, with ALiBi, or after score_mod and attn_bias, over the keys
            that the masks show, without the sink. QK-clip needs it (examples/qk_clip.py). Not
            differentiable; out and softmax_lse are, as without it. Keys are not split among CTAs,
            so num_splits is at most 1.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With
            return_attn_probs (out, softmax_lse, None), where softmax_lse is [batch, heads,
            seqlen_q], or [heads, total_q] for packed sequences, fp32, natural log. A query that
            sees no key has out 0 and softmax_lse -inf (FA2: +inf), or with a sink softmax_lse =
            sink. out and softmax_lse are differentiable once: there is no second derivative. With
            return_max_logits max_logits come last, (out, max_logits) or (out, softmax_lse, None,
            max_logits), in the shape of softmax_lse, fp32, -inf for a query that sees no key and
            for rows of no sequence.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """

@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
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
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
): ...
@overload
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
    return_attn_probs: Literal[False] = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash_attn_func per sequence of a batch of packed sequences.

    Rows past the last sequence are not read; their out and gradients are 0, their softmax_lse is -inf.

    Args:
        q: [total_q, heads, head_dim].
        k: [total_k, heads_kv, head_dim].
        v: [total_k, heads_kv, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: [batch + 1], int32, on the device of q: sequence i has rows
            cu_seqlens[i] to cu_seqlens[i + 1], exclusive. They must start at 0, never decrease and
            stay within the tensors. On a GPU only check_lengths checks this: with other values the
            kernels may read and write other memory. A sequence may be empty. cu_seqlens_k may be
            None with block_table.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, used by the schedule only. A 0-d
            tensor is accepted but not read: the total number of rows replaces it.
        dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256: at
            least 1/256 if > 0, at most 255/256. Kept weights are divided by 1 - dropout_p.
            softmax_lse is computed before dropout. torch.no_grad() does not turn it off: pass 0 in
            evaluation.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much
            longer the backward takes. The forward always is.
            torch.use_deterministic_algorithms(True) sets it, too.
        return_attn_probs: also return the log-sum-exp.
        block_table: [batch, pages per sequence], int32, for keys in pages: page i of a sequence
            holds its keys from i * page_size on; entries past its length are not read. k and v are
            then [pages, page_size, heads_kv, head_dim or head_dim_v], with the strides of k_cache
            in flash_attn_with_kvcache, and page_size is a multiple of 16. The key length of a
            sequence is seqused_k[i], or where seqused_k is None cu_seqlens_k[i + 1] -
            cu_seqlens_k[i]; one of the two may be None. Pages are never copied. Gradients, dropout
            and vmap are refused.
        seqused_q, seqused_k: [batch], int32: only the first seqused[i] rows of sequence i are used,
            also by the masks. Rows beyond are not read; their out and gradients are 0, their
            softmax_lse is -inf. Each is between 0 and the length of its sequence; on a GPU only
            check_lengths checks this.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no
            value. It is neither scaled nor capped, and counts in softmax_lse. Differentiable where
            q is.
        rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask
            depends on it, on the entry of the batch, the head, and the positions in the sequence.
            None: drawn from torch's generator. Unused without dropout.
        precision: relative error of a product of fp32 tensors, in forward and backward: "highest",
            2 ** -23; "high", 2 ** -15; "medium", that of bf16. None:
            torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has
            measured errors. Gradients at "highest" of head dims above 128 have no kernels:
            PyTorch's formula computes them, slower.
        num_splits: number of CTAs that share the keys of a forward tile; 1: none do; 0: chosen for
            the problem.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the
            batch, the place in it, the number of queries of the call and the pages, and with
            deterministic=True the gradients of a sequence those of the sequence alone
            (docs/numerics.md). Without dropout, and num_splits at most 1.
            TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
        return_max_logits: also return the largest score of each query, max_logits, as the softmax
            sees it: scaled, capped, with ALiBi, or after score_mod and attn_bias, over the keys
            that the masks show, without the sink. QK-clip needs it (examples/qk_clip.py). Not
            differentiable; out and softmax_lse are, as without it. Keys are not split among CTAs,
            so num_splits is at most 1.
        check_lengths: for debugging: check the values of cu_seqlens, seqused and max_seqlen, which
            waits for the GPU. IndexError says which value is wrong. TL_ATTENTION_CHECK_LENGTHS=1
            sets it in every call.
        out: [total_q, heads, head_dim_v] in the dtype of q, contiguous, 16-byte aligned, sharing no
            memory with q, k and v. It is written and returned; gradients and vmap are refused.
            None: a new tensor.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With
            return_attn_probs (out, softmax_lse, None), where softmax_lse is [batch, heads,
            seqlen_q], or [heads, total_q] for packed sequences, fp32, natural log. A query that
            sees no key has out 0 and softmax_lse -inf (FA2: +inf), or with a sink softmax_lse =
            sink. out and softmax_lse are differentiable once: there is no second derivative. With
            return_max_logits max_logits come last, (out, max_logits) or (out, softmax_lse, None,
            max_logits), in the shape of softmax_lse, fp32, -inf for a query that sees no key and
            for rows of no sequence.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """

@overload
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
    *,
    return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
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
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
): ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
) -> torch.Tensor:
    """flash_attn_varlen_func of k and v packed in one tensor, which gets one gradient.

    Args:
        q: [total_q, heads, head_dim].
        kv: [total_k, 2, heads_kv, head_dim], any strides with a contiguous last dimension.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in flash_attn_varlen_func.
        dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256: at
            least 1/256 if > 0, at most 255/256. Kept weights are divided by 1 - dropout_p.
            softmax_lse is computed before dropout. torch.no_grad() does not turn it off: pass 0 in
            evaluation.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much
            longer the backward takes. The forward always is.
            torch.use_deterministic_algorithms(True) sets it, too.
        return_attn_probs: also return the log-sum-exp.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no
            value. It is neither scaled nor capped, and counts in softmax_lse. Differentiable where
            q is.
        rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask
            depends on it, on the entry of the batch, the head, and the positions in the sequence.
            None: drawn from torch's generator. Unused without dropout.
        precision: relative error of a product of fp32 tensors, in forward and backward: "highest",
            2 ** -23; "high", 2 ** -15; "medium", that of bf16. None:
            torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has
            measured errors. Gradients at "highest" of head dims above 128 have no kernels:
            PyTorch's formula computes them, slower.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the
            batch, the place in it, the number of queries of the call and the pages, and with
            deterministic=True the gradients of a sequence those of the sequence alone
            (docs/numerics.md). Without dropout, and num_splits at most 1.
            TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
        return_max_logits: also return the largest score of each query, max_logits, as the softmax
            sees it: scaled, capped, with ALiBi, or after score_mod and attn_bias, over the keys
            that the masks show, without the sink. QK-clip needs it (examples/qk_clip.py). Not
            differentiable; out and softmax_lse are, as without it. Keys are not split among CTAs,
            so num_splits is at most 1.
        check_lengths: for debugging: check the values of cu_seqlens, seqused and max_seqlen, which
            waits for the GPU. IndexError says which value is wrong. TL_ATTENTION_CHECK_LENGTHS=1
            sets it in every call.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With
            return_attn_probs (out, softmax_lse, None), where softmax_lse is [batch, heads,
            seqlen_q], or [heads, total_q] for packed sequences, fp32, natural log. A query that
            sees no key has out 0 and softmax_lse -inf (FA2: +inf), or with a sink softmax_lse =
            sink. out and softmax_lse are differentiable once: there is no second derivative. With
            return_max_logits max_logits come last, (out, max_logits) or (out, softmax_lse, None,
            max_logits), in the shape of softmax_lse, fp32, -inf for a query that sees no key and
            for rows of no sequence.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """

@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
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
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
): ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
) -> torch.Tensor:
    """flash_attn_varlen_func of q, k and v packed in one tensor, which gets one gradient; q and k share cu_seqlens.

    Args:
        qkv: [total, 3, heads, head_dim], any strides with a contiguous last dimension.
        cu_seqlens, max_seqlen: as in flash_attn_varlen_func.
        dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256: at
            least 1/256 if > 0, at most 255/256. Kept weights are divided by 1 - dropout_p.
            softmax_lse is computed before dropout. torch.no_grad() does not turn it off: pass 0 in
            evaluation.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        deterministic: bitwise equal gradients from run to run; docs/numerics.md says how much
            longer the backward takes. The forward always is.
            torch.use_deterministic_algorithms(True) sets it, too.
        return_attn_probs: also return the log-sum-exp.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no
            value. It is neither scaled nor capped, and counts in softmax_lse. Differentiable where
            q is.
        rng_state: int64 [2], on the device of q: seed and offset of the dropout mask. The mask
            depends on it, on the entry of the batch, the head, and the positions in the sequence.
            None: drawn from torch's generator. Unused without dropout.
        precision: relative error of a product of fp32 tensors, in forward and backward: "highest",
            2 ** -23; "high", 2 ** -15; "medium", that of bf16. None:
            torch.get_float32_matmul_precision(). Only with fp32 tensors; docs/numerics.md has
            measured errors. Gradients at "highest" of head dims above 128 have no kernels:
            PyTorch's formula computes them, slower.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the
            batch, the place in it, the number of queries of the call and the pages, and with
            deterministic=True the gradients of a sequence those of the sequence alone
            (docs/numerics.md). Without dropout, and num_splits at most 1.
            TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
        return_max_logits: also return the largest score of each query, max_logits, as the softmax
            sees it: scaled, capped, with ALiBi, or after score_mod and attn_bias, over the keys
            that the masks show, without the sink. QK-clip needs it (examples/qk_clip.py). Not
            differentiable; out and softmax_lse are, as without it. Keys are not split among CTAs,
            so num_splits is at most 1.
        check_lengths: for debugging: check the values of cu_seqlens, seqused and max_seqlen, which
            waits for the GPU. IndexError says which value is wrong. TL_ATTENTION_CHECK_LENGTHS=1
            sets it in every call.
    Returns:
        out: [.., heads, head_dim_v], the other dimensions and the dtype those of q. With
            return_attn_probs (out, softmax_lse, None), where softmax_lse is [batch, heads,
            seqlen_q], or [heads, total_q] for packed sequences, fp32, natural log. A query that
            sees no key has out 0 and softmax_lse -inf (FA2: +inf), or with a sink softmax_lse =
            sink. out and softmax_lse are differentiable once: there is no second derivative. With
            return_max_logits max_logits come last, (out, max_logits) or (out, softmax_lse, None,
            max_logits), in the shape of softmax_lse, fp32, -inf for a query that sees no key and
            for rows of no sequence.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, what was expected and what was passed.
    Source: Dao 2023 (FlashAttention-2), alg. 1; Shah et al. 2024 (FlashAttention-3).
    """

@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[False] = False,
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    return_max_logits: Literal[True],
    check_lengths: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]: ...
@overload
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
) -> (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor, None]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]
): ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: Literal[False] = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    check_lengths: bool = False,
    check_block_table: bool = False,
) -> torch.Tensor:
    """Append new keys and values to a cache, then compute attention of each sequence's queries to its keys in the cache.

    The keys of a sequence are rows cache_leftpad to cache_seqlens + new - 1 of its cache; their number is its length. The diagonal of
    query i is key i + length - seqlen_q of the sequence, so with causal the last query sees all keys. Other rows of the cache are not
    used and may hold NaN. There is no backward. The cache is never copied.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16 or float16; head_dim a multiple of 8, at
            most 256, or 576 where v_cache is k_cache[..., :512] (multi-head latent attention with
            absorbed weights).
        k_cache: [caches, seqlen_cache, heads_kv, head_dim], or with block_table [pages, page_size,
            heads_kv, head_dim], page_size a multiple of 16. The last dimension is contiguous, the
            other strides are positive multiples of 8, stride(0) is a multiple of stride(1), and the
            address is a multiple of 16 bytes.
        v_cache: like k_cache, with head_dim_v <= head_dim columns.
        k, v: [batch, new, heads_kv, head_dim or head_dim_v]: written to the cache from row
            cache_seqlens on. Pass both or neither; where v_cache is k_cache[..., :512] pass k
            alone. They must not share memory with the caches.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2] in the dtype of q, contiguous, with one
            position per row that a cache can hold. The first rotary_dim columns of q and of k
            (before it is written) are rotated: row i of k by position cache_seqlens + i; row i of q
            likewise with causal or a window, else by cache_seqlens. Positions count left padding. A
            row of q at a position past the table, where seqlen_q exceeds the new keys, is not
            rotated.
        cache_seqlens: [batch], int32, or an int for all: number of rows in use before the new keys,
            left padding included. None: all rows of the cache. The values of a tensor are not read
            on the host, so a CUDA graph can be replayed with other lengths.
        cache_batch_idx: [batch], int32: the cache of each sequence; None: cache b for sequence b.
            Not with block_table. Sequences may share a cache only where no new key is written to a
            row that another one has.
        cache_leftpad: [batch], int32: rows of left padding. Not with block_table.
        block_table: [batch, pages per sequence], int32: page i of a sequence holds its rows from i
            * page_size on. Entries beyond the rows in use are not read.
        softmax_scale: multiplies the scores; at most 2 ** 60 in magnitude, so that its product with
            log2(e) and the lowest row max, -1e20, is finite in fp32. It may be negative or 0. None:
            head_dim ** -0.5. The kernel is exact while |score * softmax_scale| stays below about 2
            ** 30.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q, so the last query
            sees all.
        window_size: (left, right), a sequence of two ints: a query sees diagonal - left <= key <=
            diagonal + right; -1 or None: no limit. With causal, right is 0. Bounds below -1 are
            refused: FlashAttention-2 drops them, FlashAttention-4 shifts the window.
        softcap: score -> softcap * tanh(score / softcap), from 2 ** -60 to 2 ** 60; 0: none.
        rotary_interleaved: rotate the column pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).
        alibi_slopes: [heads] or [batch, heads], fp32: score -> score - slope * |diagonal - key|.
            Not differentiable.
        num_splits: number of splits of a sequence's keys, each computed by another CTA; 0: chosen
            for the whole batch. At most 1 with batch_invariant.
        return_softmax_lse: also return the log-sum-exp.
        learnable_sink: [heads], fp32, bf16 or fp16: score of one extra key per query, which has no
            value. It is neither scaled nor capped, and counts in softmax_lse. Differentiable where
            q is.
        tree_mask: int64, [seqlen_q] for all sequences or [batch, seqlen_q], of at most 64 queries:
            the last seqlen_q keys are those of the queries, nodes of a tree of draft tokens, and
            query i sees the key of query j if bit j of tree_mask[.., i] is set, and all keys before
            them. draft_tree_mask() makes it from the parents of the nodes. With causal a key hidden
            by either is hidden. The values are not read on the host, so a CUDA graph can be
            replayed with another tree. Not with window_size, alibi_slopes or rotary_cos: the
            position of a node is its depth, so rotate q and k before the call.
        batch_invariant: out and softmax_lse of a query have the same bits whatever the rest of the
            batch, and those of flash_attn_func and flash_attn_varlen_func with batch_invariant, but
            with ALiBi and multi-head latent attention (docs/numerics.md), which is refused beside a
            sink or a left bound of window_size. One CTA then reads all keys of a sequence and key
            head: slower where these are few and long. TL_ATTENTION_BATCH_INVARIANT=1 sets it in
            every call.
        workspace: uint8, at least kvcache_workspace_bytes(..) long, for the partial results of
            splits. No other launch may use it at the same time. None: the call allocates it.
        check_lengths: for debugging: check the values of cache_seqlens, cache_batch_idx,
            cache_leftpad and block_table, that no sequence has rows that another one writes, and
            that rotary_cos has all positions. Waits for the GPU. TL_ATTENTION_CHECK_LENGTHS=1 asks
            for it in every call. Without it these values are not checked on a GPU: a key or page
            out of range is neither read nor written, and a position outside rotary_cos is not
            rotated.
        check_block_table: the same as check_lengths.
    Returns:
        out [batch, seqlen_q, heads, head_dim_v] in the dtype of q; with return_softmax_lse (out, softmax_lse [batch, heads,
        seqlen_q], fp32, natural log). A query that sees no key has out 0 and softmax_lse -inf, or with a sink softmax_lse = sink.
    Raises:
        TypeError, ValueError, NotImplementedError: the message names the argument, what was expected and what was passed.
        IndexError: a value of an index tensor is wrong; only with check_lengths and on the CPU.
    """

@overload
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    *,
    return_softmax_lse: Literal[True],
    learnable_sink: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    check_lengths: bool = False,
    check_block_table: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: torch.Tensor | int | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
    return_softmax_lse: Literal[True],
    *,
    learnable_sink: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    check_lengths: bool = False,
    check_block_table: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    check_lengths: bool = False,
    check_block_table: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: None = None,
    *,
    return_aux: None = None,
    mask_mod: MaskMod | None = None,
    attn_bias: torch.Tensor | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
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
        return_aux: PyTorch's AuxRequest: also return an AuxOutput with lse, max_scores, or both. max_scores are the largest score of each
            query after score_mod and masks, and are not differentiable. Instead of return_lse.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> True where the query sees the key; instead of block_mask.
        attn_bias: [1 or batch, 1 or heads, seqlen_q, seqlen_k], broadcast where 1. A float tensor is added to the score, after score_mod,
            and may require a gradient; a bool tensor hides the keys where it is False.
        deterministic: bitwise equal gradients from run to run; torch.use_deterministic_algorithms(True) sets it, too. Gradients of
            captured tensors are then exact sums, whose workspace takes 128 bytes per element.
        precision: of products of fp32 tensors, "highest", "high" or "medium"; None: torch.get_float32_matmul_precision(). Only with fp32
            tensors; docs/numerics.md has measured errors. Gradients at "highest" of head dims above 128 have no kernels: PyTorch's formula
            computes them, slower.
        batch_invariant: out and lse of a batch entry have the same bits whatever the other entries, at the same lengths; with
            deterministic=True its gradients, too (docs/numerics.md). TL_ATTENTION_BATCH_INVARIANT=1 sets it in every call.
    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the dtype of query; with return_lse (out, lse), where lse is
        [batch, heads, seqlen_q], fp32, natural log; with return_aux (out, AuxOutput), which holds this lse and max_scores of the same
        shape, or None. A query that sees no key has out 0, lse -inf and max_scores -inf. out and lse are differentiable, once.
    Raises:
        TypeError, ValueError, NotImplementedError: which argument, or which operation of a function, what was expected and what was passed.
    Source: Dong et al. 2024 (FlexAttention).
    """

@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: None = None,
    return_aux: None = None,
    mask_mod: MaskMod | None = None,
    attn_bias: torch.Tensor | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: Literal[True],
    kernel_options: None = None,
    *,
    return_aux: None = None,
    mask_mod: MaskMod | None = None,
    attn_bias: torch.Tensor | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: None = None,
    *,
    return_aux: AuxRequest,
    mask_mod: MaskMod | None = None,
    attn_bias: torch.Tensor | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, AuxOutput]: ...
@overload
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
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]: ...
@overload
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
    return_kernel: Literal[False] = False,
    *,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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

@overload
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
    *,
    return_kernel: Literal[True],
    precision: Precision | None = None,
) -> BackwardKernel: ...
@overload
def mha_bwd_interface(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float | None,
    is_causal: bool,
    deterministic: bool,
    return_kernel: Literal[True],
    *,
    precision: Precision | None = None,
) -> BackwardKernel: ...
@overload
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | BackwardKernel: ...
@overload
def mha_fwd_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    return_kernel: Literal[False] = False,
    *,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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

@overload
def mha_fwd_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    *,
    return_kernel: Literal[True],
    precision: Precision | None = None,
) -> ForwardKernel: ...
@overload
def mha_fwd_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None,
    is_causal: bool,
    return_kernel: Literal[True],
    *,
    precision: Precision | None = None,
) -> ForwardKernel: ...
@overload
def mha_fwd_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    return_kernel: bool = False,
    *,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | ForwardKernel: ...
