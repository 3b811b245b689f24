"""A dense bias of scores as a score_mod, a dense mask as a mask_mod."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch


def element(x: torch.Tensor) -> Callable:
    """Function of (b, h, q_idx, kv_idx) that reads an element of x; a dimension of size 1 serves all indices."""
    indexed = tuple(size > 1 for size in x.shape)  # no sizes, which would make a trace of each

    def read(*index):
        return x[tuple(i if has_many else 0 for i, has_many in zip(index, indexed, strict=True))]

    return read


def _is_bool(x: Any) -> bool:
    """True for a mask, which the tracer refuses in the place of a score."""
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool


def with_bias(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    attn_bias: torch.Tensor,
    listed: bool = False,
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """(score_mod, mask_mod) extended by attn_bias: a float bias is added to the score, a bool one hides keys where it is False.

    Args:
        attn_bias: [1 or batch, 1 or heads, seqlen_q, seqlen_k], of a dtype that functions can capture. Dimensions of size 1 are broadcast.
        listed: the mask_mod is that of a block mask, which kernels do not ask in full blocks. A bool bias then makes scores -inf.
    """
    one_batch, one_head = (size == 1 for size in attn_bias.shape[:2])

    def entry(b, h, q_idx, kv_idx):
        return attn_bias[0 if one_batch else b, 0 if one_head else h, q_idx, kv_idx]

    if attn_bias.dtype == torch.bool and listed:

        @functools.wraps(score_mod or entry)
        def hidden(score, b, h, q_idx, kv_idx):
            new = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
            if _is_bool(new):
                return new
            return torch.where(entry(b, h, q_idx, kv_idx), new, -math.inf)

        return hidden, mask_mod
    if attn_bias.dtype == torch.bool:
        if mask_mod is None:
            return score_mod, entry

        @functools.wraps(mask_mod)
        def shown(b, h, q_idx, kv_idx):
            found = mask_mod(b, h, q_idx, kv_idx)
            return found & entry(b, h, q_idx, kv_idx) if isinstance(found, bool) or _is_bool(found) else found

        return score_mod, shown
    if score_mod is None:
        return (lambda score, b, h, q_idx, kv_idx: score + entry(b, h, q_idx, kv_idx)), mask_mod

    @functools.wraps(score_mod)
    def both(score, b, h, q_idx, kv_idx):
        new = score_mod(score, b, h, q_idx, kv_idx)
        return new if _is_bool(new) else new + entry(b, h, q_idx, kv_idx)

    return both, mask_mod
