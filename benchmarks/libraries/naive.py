"""Attention in plain PyTorch: matrix products and a softmax over all scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from library import Provider, Ready, Result, Unsupported, same_call

from tl_attention.testing.shapes import Shape

MAX_SCORE_BYTES = 16 << 30  # one score matrix; up to three exist at once


def forward(shape: Shape, q: torch.Tensor, *_: torch.Tensor, saves: bool) -> Ready:
    attention_weights = _weights(shape, q.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        return attention_weights(q, k) @ v.repeat_interleave(shape.heads_q // shape.heads_kv, 1), None

    return same_call(attend)


def backward(shape: Shape, deterministic: bool, dout: torch.Tensor, *_: object) -> Ready:
    """Gradients from the inputs and out: the scores are recomputed, as in the other libraries."""
    attention_weights = _weights(shape, dout.device)
    group = shape.heads_q // shape.heads_kv

    def attend(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _: None
    ) -> Result:
        weights = attention_weights(q, k)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        dv = weights.mT @ dout
        delta = (dout.float() * out).sum(-1, keepdim=True).to(dout.dtype)
        dscores = (dout @ v.mT).sub_(delta).mul_(weights).mul_(shape.head_dim**-0.5)
        dk = dscores.mT @ q
        return dscores @ k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))

    return same_call(attend)


def _weights(shape: Shape, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(q, k) -> softmax of their scores."""
    score_bytes = 2 * shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
    if score_bytes > MAX_SCORE_BYTES:
        raise Unsupported(f"its scores would take {score_bytes / 2**30:.0f} GiB")
    if shape.causal and shape.seqlen_q > shape.seqlen_k:
        raise Unsupported("a row without a key is NaN")
    hidden = None
    if shape.causal:
        ones = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device=device)
        hidden = ones.triu(shape.seqlen_k - shape.seqlen_q + 1)

    def attention_weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = k.repeat_interleave(shape.heads_q // shape.heads_kv, 1)
        scores = q @ k.mT * shape.head_dim**-0.5
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        return scores.softmax(-1)

    return attention_weights


PROVIDER = Provider(
    {"fwd": forward, "bwd": backward},
    lambda _: f"torch {torch.__version__}, matmul and softmax",
    layout="bhsd",
)
