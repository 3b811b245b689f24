"""Reference of flex_attention: attention with a traced program in plain PyTorch, differentiable by autograd. CPU tensors run it."""

from __future__ import annotations

import math

import torch

from tl_attention.program import Call
from tl_attention.tracing.program_values import program_values

PARTIAL, FULL = 1, 2  # states of blocks, see launch/block_lists.py


def flex_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    call: Call,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a program; all scores are in memory at once.

    Args:
        q: [batch, heads, seqlen_q, head_dim]; k, v: [batch, heads_kv, seqlen_k, ..].
        dtype: of the computation, fp32 or fp64.
    Returns:
        out: [batch, heads, seqlen_q, head_dim_v] in `dtype`. lse: [batch, heads, seqlen_q], natural. A query that sees no key has out
        0 and lse -inf.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * softmax_scale
    scores = new_scores(scores, call)
    lse = scores.logsumexp(-1)
    sees_none = lse == -math.inf
    weights = (scores - lse.masked_fill(sees_none, 0)[..., None]).exp()
    return weights @ v, lse


def new_scores(scores: torch.Tensor, call: Call) -> torch.Tensor:
    """Scores [batch, heads, seqlen_q, seqlen_k] after score_mod, -inf where mask_mod hides the key."""
    program, device = call.program, scores.device
    positions = [
        torch.arange(n, dtype=torch.int32, device=device).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate(scores.shape)
    ]
    leaves = dict(zip(("batch", "head", "query", "key"), positions, strict=True), score=scores)
    roots = [root for root in (program.score, program.mask) if root is not None]
    found = dict(zip(roots, program_values(call, roots, leaves, scores.dtype), strict=True))
    if program.score is not None:
        scores = found[program.score].expand(scores.shape)
    if program.mask is None and call.blocks is None:
        return scores
    seen = torch.ones((), dtype=torch.bool, device=device) if program.mask is None else found[program.mask]
    if call.blocks is not None:
        states = call.blocks.states
        for dim, size, length in zip((-2, -1), call.blocks.block_size, scores.shape[-2:], strict=True):
            states = states.repeat_interleave(size, dim=dim).narrow(dim, 0, length)
        seen = (states == FULL) | (states == PARTIAL) & seen
    return scores.masked_fill(~seen, -math.inf)
