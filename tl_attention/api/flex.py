"""flex_attention: scores and masks as Python functions, with the parameters of PyTorch's function in its order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch.nn.functional import pad

from tl_attention.api.flex_calls import attend_functions
from tl_attention.api.flex_compiled import attend_compiled
from tl_attention.checks.common import describe, expect_bool
from tl_attention.checks.flex import (
    FLASH_NAMES,
    FLEX_NAMES,
    check_aux,
    check_no_options,
    check_not_transformed,
    check_value_width,
    has_wide_values,
)
from tl_attention.checks.keywords import unknown_keyword
from tl_attention.problem.attn_problem import Precision
from tl_attention.problem.request import MaskMod, Request, ScoreMod, new_request
from tl_attention.torch_ops.ops import scale_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

_is_compiling = torch.compiler.is_compiling


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
    if unknown:
        raise unknown_keyword(flex_attention, unknown)
    expect_bool("return_lse", return_lse)
    expect_bool("enable_gqa", enable_gqa)
    expect_bool("deterministic", deterministic)
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
        query, key, value, scale, False, deterministic, precision, batch_invariant=batch_invariant, heads_first=True,
        functions=functions, enable_gqa=enable_gqa, max_logits=return_aux is not None and bool(return_aux.max_scores),
    )  # fmt: skip
    out, lse, *largest = _attend(request)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(
            lse=lse if return_aux.lse else None, max_scores=largest[0] if return_aux.max_scores else None
        )
    return (out, lse) if return_lse else out


def attend_by_functions(request: Request) -> tuple[torch.Tensor, ...]:
    """Results of flash_attn_func with functions, whose options must be off but for the precision."""
    expect_bool("deterministic", request.deterministic)
    check_not_transformed(FLASH_NAMES.function)
    check_no_options(request)
    return _attend(request)


def _attend(request: Request) -> tuple[torch.Tensor, ...]:
    """Results of a call with functions: as an op that torch.compile keeps, else at once."""
    expect_bool("batch_invariant", request.batch_invariant)
    if _is_compiling():
        return attend_compiled(request)
    return attend_functions(request)
