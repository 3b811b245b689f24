"""cuDNN, by way of PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from library import Attend, Provider, Ready, Result, Unsupported, same_call
from options import Tensors

from libraries import flash_api
from tl_attention.testing.shapes import Shape


def forward(shape: Shape, q: torch.Tensor, *_: torch.Tensor, saves: bool) -> Ready:
    """Forward. Its causal mask is top-left; unequal lengths get a dense bottom-right bias, made beforehand as SDPA makes it."""
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention  # the op behind SDPA's cuDNN backend
    bias, causal = None, shape.causal
    if shape.causal and shape.seqlen_q != shape.seqlen_k:
        if saves:
            raise Unsupported(
                "its causal mask is top-left, and its backward is not compared with a dense mask"
            )
        if shape.seqlen_q > shape.seqlen_k:
            raise Unsupported("its causal mask is top-left, and a dense mask makes rows without a key NaN")
        bias, causal = _bottom_right_bias(shape, q), False

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        saved = sdpa(q, k, v, bias, saves, 0.0, causal)
        return saved if saves else (saved[0], None)

    return same_call(attend)


def _bottom_right_bias(shape: Shape, q: torch.Tensor) -> torch.Tensor:
    """[seqlen_q, seqlen_k] in the dtype of q, -inf at the keys hidden from a query."""
    hidden = torch.full((shape.seqlen_q, shape.seqlen_k), -math.inf, dtype=q.dtype, device=q.device)
    return hidden.triu_(shape.seqlen_k - shape.seqlen_q + 1)


def backward(shape: Shape, deterministic: bool, *_: object) -> Ready:
    if deterministic:
        raise Unsupported("no deterministic mode of its backward in PyTorch")
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

    def attend(*given: Any) -> Result:
        *tensors, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = given
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        return sdpa(*tensors, seed, offset, None, *lengths, 0.0, shape.causal)

    return same_call(attend)


def attend_with_options(shape: Shape, needs: Tensors) -> Attend:
    asked = shape.options
    for name in ("window", "softcap", "alibi", "sink"):
        if getattr(asked, name) not in (None, False, 0.0):
            raise Unsupported(f"no {name} in PyTorch's cuDNN backend")
    if shape.is_varlen:
        raise Unsupported("PyTorch's varlen_attn does not use the cuDNN backend")
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        saves = torch.is_grad_enabled()
        return sdpa(q, k, v, None, saves, asked.dropout, shape.causal)[0].transpose(1, 2), None

    return attend


PROVIDER = Provider(
    {
        "fwd": forward,
        "bwd": backward,
        "options": attend_with_options,
        "decode": flash_api.decode_with_forward(forward),
    },
    lambda _: (
        f"torch SDPA, cuDNN {torch.backends.cudnn.version()} (causal with unequal lengths: a dense bias)"
    ),
    layout="bhsd",
    decode_layout="bhsd",
)
