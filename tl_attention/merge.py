"""Attention to all keys from attention to parts of them: what ring, tree and context parallelism put together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tl_attention.checks import check_states


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    lse_base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and log-sum-exp over all keys, of the same queries' over disjoint parts of the keys.

        lse = log(sum_i exp(lse_i))    out = sum_i exp(lse_i - lse) out_i

    Plain PyTorch in fp32, differentiable, as are the parts.

    Args:
        outs: any number of [batch, seqlen, heads, head_dim], or of [total, heads, head_dim]: a sequence of tensors, or one tensor that
            stacks them in its first dimension.
        lses: as many [batch, heads, seqlen] or [heads, total], fp32.
        lse_base2: of lses and of the one returned: they are in base 2 as mha_fwd_interface makes them, else natural.
    Returns:
        out in the dtype of outs, lse in fp32. A part whose lse is -inf adds nothing, whatever its out holds, and gets the gradient
        0; where all are, out is 0 and lse -inf.
    Raises:
        TypeError, ValueError: the argument, what was expected and what came.
    """
    check_states(outs, lses)
    exp, log = (torch.exp2, torch.log2) if lse_base2 else (torch.exp, torch.log)
    stacked = lses if isinstance(lses, torch.Tensor) else torch.stack(tuple(lses))
    seen = stacked != -math.inf
    peak = stacked.detach().amax(0)
    peak = peak.masked_fill(peak == -math.inf, 0)
    # A mask before exp and after it: neither value nor gradient is inf * 0
    weights = exp(stacked.where(seen, peak) - peak).masked_fill(~seen, 0)
    total = weights.sum(0)
    unseen = total == 0
    total = total.masked_fill(unseen, 1)
    lse = (log(total) + peak).masked_fill(unseen, -math.inf)

    dtype = outs[0].dtype
    merged = 0
    for out, weight, counts in zip(outs, weights / total, seen, strict=True):
        columns = weight.mT[..., None], counts.mT[..., None]
        merged = merged + columns[0] * out.to(weight.dtype).masked_fill(~columns[1], 0)
    return merged.to(dtype), lse
