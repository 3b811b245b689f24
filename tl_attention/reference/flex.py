"""Reference of flex_attention: attention with a traced program in plain PyTorch, differentiable by autograd. CPU tensors run it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tl_attention.problem.program import Call
from tl_attention.reference.attention import MAX_SCORES, true_fp32
from tl_attention.tracing.program_values import program_index, program_values

LEAST_SCORE = -1e20  # a lower one hides its key, as in the kernels
PARTIAL, FULL = 1, 2  # states of blocks, see launch/block_lists.py


def flex_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    call: Call,
    dtype: torch.dtype = torch.float32,
    first_query: int = 0,
    max_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Attention with a program, without autocast or TF32; all scores are in memory at once.

    Args:
        q: [batch, heads, seqlen_q, head_dim]; k, v: [batch, heads_kv, seqlen_k, ..].
        dtype: of the computation, fp32 or fp64.
        first_query: q_idx of the first row of q.
        max_logits: return the largest score of each query, too.
    Returns:
        out: [batch, heads, seqlen_q, head_dim_v] in `dtype`. lse: [batch, heads, seqlen_q], natural. A query that sees no key has out
        0 and lse -inf. max_logits: as lse, not differentiable.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    with true_fp32(q.device):
        scores = q @ k.mT * softmax_scale
        scores = new_scores(scores, call, first_query)
        # Their gradient is 0, also in rows without a key
        scores = scores.masked_fill(scores < LEAST_SCORE, -math.inf)
        lse = scores.logsumexp(-1)
        # Not exp(scores - lse), where a large lse has lost the log of the number of keys
        sees_none = (lse == -math.inf)[..., None]
        weights = scores.masked_fill(sees_none, 0).softmax(-1).masked_fill(sees_none, 0)
        if not max_logits:
            return weights @ v, lse
        largest = scores.detach().amax(-1) if scores.shape[-1] else torch.full_like(lse, -math.inf).detach()
        return weights @ v, lse, largest


def flex_backward_reference(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    call: Call,
) -> tuple[torch.Tensor, ...]:
    """Gradients of sum(dout * out) + sum(dlse * lse) by autograd, on any device, in chunks of about MAX_SCORES scores.

    Args:
        dout: [batch, heads, seqlen_q, head_dim_v]. dlse: [batch, heads, seqlen_q]; None is 0.
        q, k, v, softmax_scale, call: as for flex_reference.
    Returns:
        dq, dk, dv, then those of the tensors of program.learned, in fp32.
    """
    learned, (*_, seqlen_q, _), seqlen_k = call.program.learned, q.shape, k.shape[2]
    tensors = [x.detach() for x in call.tensors]
    for i in learned:  # in fp32, as autograd sums in the dtype of a tensor
        tensors[i] = tensors[i].to(torch.float32, copy=True).requires_grad_()
    call = replace(call, tensors=tuple(tensors))
    dq = torch.empty_like(q, dtype=torch.float32)
    shared = [*(x.detach().float().requires_grad_() for x in (k, v)), *(tensors[i] for i in learned)]
    sums = [torch.zeros_like(x) for x in shared]
    step = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * seqlen_k))
    # Derivatives at queries that see no key pass through NaN before they are 0: anomaly detection looks at results alone
    no_search_for_nan = torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False)
    with no_search_for_nan, true_fp32(q.device), torch.enable_grad():
        for first in range(0, seqlen_q, step):
            rows = slice(first, min(first + step, seqlen_q))
            q_rows = q[:, :, rows].detach().float().requires_grad_()
            out, lse = flex_reference(q_rows, *shared[:2], softmax_scale, call, first_query=first)
            lse = lse.masked_fill(lse == -math.inf, 0)
            dlse_rows = torch.zeros_like(lse) if dlse is None else dlse[:, :, rows].to(lse.dtype)
            outputs, given = [out, lse], [dout[:, :, rows].to(out.dtype), dlse_rows]
            partial_dq, *partial = torch.autograd.grad(outputs, [q_rows, *shared], given, allow_unused=True)
            dq[:, :, rows] = partial_dq
            for total, x in zip(sums, partial, strict=True):
                if x is not None:
                    total += x
    return dq, *sums


class _Changed(torch.autograd.Function):
    """New scores of a program that has derivatives, which are those of the program, as in the kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        positions: Mapping[str, torch.Tensor],
        scores: torch.Tensor,
        *learned: torch.Tensor,
    ) -> torch.Tensor:
        """positions: values of the leaves but for the score. learned: tensors of program.learned."""
        ctx.call, ctx.positions = call, positions
        ctx.save_for_backward(scores, *learned)
        (new,) = program_values(call, [call.program.score], {**positions, "score": scores}, scores.dtype)
        return new.expand(scores.shape).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        scores, *learned = ctx.saved_tensors
        program, leaves = ctx.call.program, {**ctx.positions, "score": scores}

        def values(roots: Sequence[int]) -> list[torch.Tensor]:
            return program_values(ctx.call, roots, leaves, scores.dtype)

        def times(factor: torch.Tensor) -> torch.Tensor:  # 0 for a hidden score, whatever the factor
            return torch.where(grad == 0, 0, grad * factor)

        dscores = grad if program.slope is None else times(*values([program.slope]))
        sums = {
            i: torch.zeros_like(x, dtype=grad.dtype) for i, x in zip(program.learned, learned, strict=True)
        }
        for gradient in program.gradients:
            total = sums[gradient.tensor]
            index = program_index(ctx.call, gradient.index, total.shape, values(gradient.index))
            shape = torch.broadcast_shapes(*(x.shape for x in index))
            added = times(*values([gradient.factor])).sum_to_size(shape)
            total.index_put_(index, added, accumulate=True) if index else total.add_(added)
        return (
            None,
            None,
            dscores,
            *(sums[i].to(x.dtype) for i, x in zip(program.learned, learned, strict=True)),
        )


def new_scores(scores: torch.Tensor, call: Call, first_query: int = 0) -> torch.Tensor:
    """Scores [batch, heads, seqlen_q, seqlen_k] after score_mod, -inf where mask_mod hides the key. first_query: as in flex_reference."""
    program, device = call.program, scores.device
    positions = [
        torch.arange(n, dtype=torch.int32, device=device).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate(scores.shape)
    ]
    positions[2] = positions[2] + first_query
    leaves = dict(zip(("batch", "head", "query", "key"), positions, strict=True))
    if program.score is not None and (program.slope is not None or program.gradients):
        learned = [call.tensors[i] for i in program.learned]
        scores = _Changed.apply(call, leaves, scores, *learned)
    elif program.score is not None:  # a derivative of 1, or none is asked for
        (changed,) = program_values(call, [program.score], {**leaves, "score": scores}, scores.dtype)
        scores = changed.expand(scores.shape)
    if program.mask is None and call.blocks is None:
        return scores
    seen = torch.ones((), dtype=torch.bool, device=device)
    if program.mask is not None:
        (seen,) = program_values(call, [program.mask], leaves)
    if call.blocks is not None:
        states = call.blocks.states
        for dim, size, at in zip((-2, -1), call.blocks.block_size, positions[2:], strict=True):
            states = states.index_select(dim, at.flatten() // size)
        seen = (states == FULL) | (states == PARTIAL) & seen
    return scores.masked_fill(~seen, -math.inf)
