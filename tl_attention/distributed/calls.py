"""Calls of the kernels on parts of a shard: [batch, rows, heads, head_dim] tensors, natural log-sum-exp [batch, heads, rows]."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tl_attention import launch
from tl_attention.distributed.pieces import Call
from tl_attention.ops import bwd_op, fwd_op
from tl_attention.options import Options, canonical_window

State = tuple[torch.Tensor, torch.Tensor]  # out, lse


class Scores(NamedTuple):
    """Options of all calls beside their masks.

    Args:
        slopes: [heads], [batch, heads] or, with packed documents, [documents, heads].
        sink: [heads].
        packed: the tensors hold packed documents, in a batch of one.
    """

    softmax_scale: float
    softcap: float
    deterministic: bool
    slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    packed: bool = False


def queries(x: torch.Tensor, call: Call) -> torch.Tensor:
    """Rows of a call in a tensor [batch, rows, heads, columns] of its queries."""
    return x[:, call.q[0] : call.q[1]]


def keys(x: torch.Tensor, call: Call) -> torch.Tensor:
    """Rows of a call in a buffer [batch, rows, heads, columns] of keys."""
    return x[:, call.k[0] : call.k[1]]


def _options(call: Call, scores: Scores, device: torch.device) -> tuple[bool, Options]:
    """(causal, options) of a call."""
    causal, window = canonical_window(False, call.window)
    cu_seqlens = call.cu_seqlens(device) if call.packed else (None, None)
    return causal, Options(
        window=window,
        softcap=scores.softcap,
        max_seqlen_q=max(call.lengths_q) if call.packed else 0,
        max_seqlen_k=max(call.lengths_k) if call.packed else 0,
        alibi_slopes=_slopes(call, scores),
        sink=scores.sink,
        cu_seqlens_q=cu_seqlens[0],
        cu_seqlens_k=cu_seqlens[1],
    )


def _slopes(call: Call, scores: Scores) -> torch.Tensor | None:
    slopes = scores.slopes
    if slopes is None or slopes.ndim == 1 or not scores.packed:
        return slopes
    return torch.stack([slopes[number] for number in call.documents])


def forward(call: Call, scores: Scores, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> State:
    """(out, lse) of a call on its own rows."""
    causal, options = _options(call, scores, q.device)
    if call.packed:
        q, k, v = q[0], k[0], v[0]
    if q.is_cuda:
        named = options if options.names else None
        out, lse = launch.forward(q, k, v, scores.softmax_scale, causal, False, options=named)
    else:
        out, lse = fwd_op(q, k, v, scores.softmax_scale, causal, False, False, False, *options.arguments())
    return (out[None], lse[None]) if call.packed else (out, lse)


def backward(
    call: Call,
    scores: Scores,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv, dsink) of a call whose queries see keys of this call alone; without a sink dsink is None."""
    causal, options = _options(call, scores, q.device)
    tensors = dout, q, k, v, out, lse
    if call.packed:
        tensors = tuple(x[0] for x in tensors)
        dlse = None if dlse is None else dlse[0]
    if q.is_cuda:
        deterministic = scores.deterministic or torch.are_deterministic_algorithms_enabled()
        named = options if options.names else None
        asked = scores.softmax_scale, causal, False, False, deterministic, dlse
        *grads, dsink = (*launch.backward(*tensors, *asked, options=named), None)[:4]
    else:
        asked = scores.softmax_scale, causal, False, False, scores.deterministic
        *grads, dsink = bwd_op(*tensors, dlse, *asked, *options.arguments())
    return *(grad[None] if call.packed else grad for grad in grads), dsink


def partial_backward(
    call: Call,
    scores: Scores,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of a call whose queries see other keys, too.

    out, lse, dout and dlse are those of all keys. Kernels compute P = exp(score - lse) and delta = rowsum(dout * out) - dlse from them,
    which is right for any part of the keys. The reference recomputes out and lse from the keys at hand. It gets the gradients with
    respect to these, which gives the same P and delta: for w = exp(lse_part - lse)

        dout_part = w dout    dlse_part = w (rowsum(dout * (out_part - out)) + dlse)
    """
    if q.device.type != "cpu":
        return backward(call, scores, dout, q, k, v, out, lse, dlse)[:3]
    part, lse_part = forward(call, scores, q, k, v)
    weight = torch.exp(lse_part - lse)
    slope = (dout.float() * (part.float() - out.float())).sum(-1).mT  # [batch, heads, rows]
    dlse_part = weight * (slope if dlse is None else slope + dlse)
    dout_part = (dout.float() * weight.mT[..., None]).to(dout.dtype)
    return backward(call, scores, dout_part, q, k, v, part, lse_part, dlse_part)[:3]
