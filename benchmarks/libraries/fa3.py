"""FlashAttention-3: the flash_attn_interface package."""

from __future__ import annotations

import inspect

import library
import torch
from library import Attend, Provider, Ready, Result, Unsupported, out_and_lse, tried
from options import Tensors

from libraries import flash_api
from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape

MODULE = "flash_attn_interface"
# Upstream's _flash_attn_backward has had several argument lists
BACKWARD_ARGUMENTS = ("out", "softmax_lse", "dq", "dk", "dv", "softmax_scale", "causal")


def forward(shape: Shape, *qkv: torch.Tensor, saves: bool) -> Ready:
    """Forward, with its log-sum-exp only if a backward follows."""
    function = library.import_function(MODULE, "flash_attn_func")
    asks = "return_attn_probs" in inspect.signature(function).parameters
    arguments = {"causal": shape.causal} | ({"return_attn_probs": saves} if asks else {})
    return tried(lambda q, k, v: out_and_lse(function(q, k, v, **arguments)), *qkv)


def backward(shape: Shape, deterministic: bool, *given: torch.Tensor) -> Ready:
    if deterministic:
        raise Unsupported("no deterministic mode of its backward is compared")
    function = library.import_function(MODULE, "_flash_attn_backward")
    names = tuple(inspect.signature(function).parameters)
    if names[4:11] != BACKWARD_ARGUMENTS:
        raise Unsupported(f"its _flash_attn_backward has other arguments: {', '.join(names)}")

    def attend(dout: torch.Tensor, *saved: torch.Tensor) -> Result:
        grads = tuple(torch.empty_like(x) for x in saved[:3])
        function(dout, *saved, *grads, shape.head_dim**-0.5, shape.causal)
        return grads

    return tried(attend, *given)


def attend_with_options(shape: Shape, needs: Tensors) -> Attend:
    for name in ("alibi", "dropout", "sink"):
        if getattr(shape.options, name):
            raise Unsupported(f"no {name}")
    function = library.import_function(MODULE, "flash_attn_func")
    if shape.options.softcap and "softcap" not in inspect.signature(function).parameters:
        raise Unsupported("built without softcap")
    return flash_api.attend_with_options(MODULE, shape, needs)


PROVIDER = Provider(
    {
        "fwd": forward,
        "bwd": backward,
        "options": attend_with_options,
        "decode": flash_api.decode_with_kvcache(MODULE, "page_table"),
    },
    lambda _: f"flash-attn-3 {version('flash-attn-3')}",
)
