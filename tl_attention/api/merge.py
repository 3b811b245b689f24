"""Merging of attention over disjoint sets of keys, for ring attention, tree attention and context parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tl_attention.checks.merge import check_states


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    lse_base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial attention results of the same queries over disjoint sets of keys.

        lse = log(sum_i exp(lse_i))    out = sum_i exp(lse_i - lse) out_i

    Plain PyTorch in fp32, differentiable.

    Args:
        outs: [batch, seqlen, heads, head_dim] or [total, heads, head_dim] each: a list of tensors, or one tensor that stacks them in its
            first dimension.
        lses: [batch, heads, seqlen] or [heads, total] each, fp32, as many as outs.
        lse_base2: True if lses are in base 2, as mha_fwd_interface returns them, and the result should be; False: natural logarithms.
    Returns:
        out in the dtype of outs, lse in fp32. A partial result with lse -inf contributes nothing, even if its out is NaN, and its
        gradient is 0. Where all lses are -inf, out is 0 and lse is -inf.
    Raises:
        TypeError, ValueError: the message names the argument, what was expected and what was passed.
    """
    check_states(outs, lses, lse_base2)
    exp, log = (torch.exp2, torch.log2) if lse_base2 else (torch.exp, torch.log)
    stacked = lses if isinstance(lses, torch.Tensor) else torch.stack(tuple(lses))
    has_keys = stacked != -math.inf
    peak = stacked.detach().amax(0)
    peak = peak.masked_fill(peak == -math.inf, 0)
    # Masks before and after exp, so that neither the value nor the gradient is inf * 0
    weights = exp(stacked.where(has_keys, peak) - peak).masked_fill(~has_keys, 0)
    total = weights.sum(0)
    without_keys = total == 0
    total = total.masked_fill(without_keys, 1)
    lse = (log(total) + peak).masked_fill(without_keys, -math.inf)

    dtype = outs[0].dtype
    merged = 0
    for out, weight, mask in zip(outs, weights / total, has_keys, strict=True):
        weight, mask = weight.mT[..., None], mask.mT[..., None]  # [.., seqlen, heads, 1]
        merged = merged + weight * out.to(weight.dtype).masked_fill(~mask, 0)
    return merged.to(dtype), lse
