"""FlashAttention-4: flash_attn.cute, in CuTe DSL."""

from __future__ import annotations

import functools
from typing import Any

import library
import torch
from library import Attend, Provider, Ready, Result, Unsupported, by_entry, out_and_lse, same_call
from options import Tensors

from libraries import flash_api
from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape

MODULE = "flash_attn.cute"


def library_of(name: str) -> str:
    note = " (on sm_90 it does not split keys)" if name == "decode" else ""
    return f"flash-attn-4 {version('flash-attn-4')}{note}"


def forward(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    arguments = {"return_lse": True} if saves else {}
    function = library.import_function(MODULE, "flash_attn_func")
    flash = functools.partial(function, causal=shape.causal, **arguments)
    return same_call(lambda q, k, v: out_and_lse(flash(q, k, v)))


def backward(shape: Shape, deterministic: bool, *_: object) -> Ready:
    function = library.import_function(f"{MODULE}.interface", "_flash_attn_bwd")
    flash = functools.partial(function, causal=shape.causal, deterministic=deterministic)
    return same_call(lambda dout, q, k, v, out, lse: flash(q=q, k=k, v=v, out=out, dout=dout, lse=lse))


def attend_with_options(shape: Shape, needs: Tensors) -> Attend:
    asked = shape.options
    if asked.alibi:
        raise Unsupported("ALiBi only as a user's score_mod")
    if asked.dropout:
        raise Unsupported("no dropout")
    arguments: dict[str, Any] = {"causal": shape.causal, "softcap": asked.softcap, "return_lse": True}
    arguments["window_size"] = tuple(None if bound < 0 else bound for bound in shape.window_size)
    if asked.sink:
        arguments["learnable_sink"] = needs.sink
    if not shape.is_varlen:
        return functools.partial(library.import_function(MODULE, "flash_attn_func"), **arguments)
    function = library.import_function(MODULE, "flash_attn_varlen_func")
    for side, ends, longest in zip("qk", needs.cu_seqlens, needs.max_seqlens, strict=True):
        arguments |= {f"cu_seqlens_{side}": ends, f"max_seqlen_{side}": longest}

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = function(*(x.flatten(0, 1) for x in qkv), **arguments)
        return by_entry(out, qkv[0]), lse

    return attend


def decode(shape: Shape, *inputs: torch.Tensor, saves: bool) -> Ready:
    """Decode without splits: on sm_90 its default is one split, and more are an error."""
    if max(shape.head_dim, shape.head_dim_v) > 256:
        raise Unsupported("head dims on sm_90 are at most 256")
    if not shape.options:
        return flash_api.decode_with_forward(forward)(shape, *inputs, saves=saves)
    if shape.options.page and (shape.head_dim % 16 or shape.head_dim_v % 16):
        raise Unsupported("head dims with pages are multiples of 16")
    attend = library.import_function(MODULE, "flash_attn_varlen_func")

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor, pages: torch.Tensor | None
    ) -> Result:
        arguments = {"seqused_k": seqlens, "page_table": pages, "causal": shape.causal, "return_lse": True}
        return attend(q, k, v, **arguments)[:2]

    return same_call(launch)


PROVIDER = Provider(
    {"fwd": forward, "bwd": backward, "options": attend_with_options, "decode": decode}, library_of
)
