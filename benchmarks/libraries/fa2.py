"""FlashAttention-2: the flash_attn package where it has the function of a pass, else PyTorch's copy of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import library
import torch
from library import Attend, Provider, Ready, Result, Unsupported, by_entry, out_and_lse, same_call, tried
from options import Tensors

from libraries import flash_api
from tl_attention.testing.environment import version
from tl_attention.testing.shapes import Shape

# Builds without options lack flash_attn_varlen_func; builds without caches and splits lack flash_attn_with_kvcache
FUNCTION = {
    "fwd": "flash_attn_func",
    "bwd": "flash_attn_func",
    "options": "flash_attn_varlen_func",
    "decode": "flash_attn_with_kvcache",
}


@functools.cache
def has_package(name: str = "fwd") -> bool:
    """True if the flash_attn package runs a pass."""
    return library.can_import("flash_attn", FUNCTION[name])


def library_of(name: str) -> str:
    return f"flash-attn {version('flash-attn')}" if has_package(name) else "torch SDPA"


def forward(shape: Shape, *qkv: torch.Tensor, saves: bool) -> Ready:
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    if has_package():
        function = library.import_function("flash_attn", "flash_attn_func")
        flash = functools.partial(function, causal=shape.causal, return_attn_probs=saves)
        return tried(lambda q, k, v: out_and_lse(flash(q, k, v)), *qkv)
    return _sdpa_forward(shape, saves=saves)


def _sdpa_forward(shape: Shape, *_: torch.Tensor, saves: bool) -> Ready:
    """The op behind SDPA's flash backend. Its causal mask is bottom-right, SDPA's own is top-left."""
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, *rest = sdpa(q, k, v, 0.0, shape.causal)
        return (out.transpose(1, 2), *rest) if saves else (out.transpose(1, 2), None)

    return same_call(attend)


def backward(shape: Shape, deterministic: bool, *given: object) -> Ready:
    if has_package():
        return tried(_package_backward(shape, deterministic), *given)
    return same_call(_sdpa_backward(shape, deterministic))


def _package_backward(shape: Shape, deterministic: bool) -> Callable[..., Result]:
    flash = functools.partial(
        library.import_function("flash_attn.flash_attn_interface", "_flash_attn_backward"),
        dropout_p=0.0,
        softmax_scale=shape.head_dim**-0.5,
        causal=shape.causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=deterministic,
    )

    def attend(dout: torch.Tensor, *saved: torch.Tensor) -> Result:
        grads = tuple(torch.empty_like(x) for x in saved[:3])
        flash(dout, *saved, *grads)
        return grads

    return attend


def _sdpa_backward(shape: Shape, deterministic: bool) -> Callable[..., Result]:
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention_backward

    def attend(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *rest: Any,
    ) -> Result:
        *lengths, seed, offset, _ = rest
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        with _deterministic_algorithms() if deterministic else contextlib.nullcontext():
            grads = sdpa(dout, q, k, v, out, lse, *lengths, 0.0, shape.causal, seed, offset)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return attend


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """PyTorch's deterministic mode, without its fills of uninitialized memory."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def attend_with_options(shape: Shape, needs: Tensors) -> Attend:
    asked = shape.options
    if asked.sink:
        raise Unsupported("no sink")
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    if has_package("options"):
        return flash_api.attend_with_options("flash_attn", shape, needs)
    for name in ("softcap", "alibi"):
        if getattr(asked, name):
            raise Unsupported(f"no {name} in PyTorch's FlashAttention-2")
    if shape.is_varlen or asked.window is not None:
        return _varlen_attn(shape, needs)
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, asked.dropout, shape.causal)[0].transpose(1, 2), None

    return attend


def _varlen_attn(shape: Shape, needs: Tensors) -> Attend:
    """PyTorch's FlashAttention-2 with windows and packed sequences."""
    if shape.options.dropout:
        raise Unsupported("no dropout in PyTorch's varlen_attn")
    if shape.heads_q != shape.heads_kv:
        raise Unsupported("no GQA in PyTorch 2.11's varlen_attn")
    function = library.import_function("torch.nn.attention.varlen", "varlen_attn")
    left, right = shape.window_size
    window = (left, 0 if shape.causal else right)

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
        tokens = (x.flatten(0, 1) for x in qkv)
        out = function(*tokens, *needs.cu_seqlens, *needs.max_seqlens, window_size=window)
        return by_entry(out, qkv[0]), None

    return attend


def decode(shape: Shape, *inputs: torch.Tensor, saves: bool) -> Ready:
    if has_package("decode"):
        return flash_api.decode_with_kvcache("flash_attn", page_multiple=256)(shape, *inputs, saves=saves)
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    return flash_api.decode_with_forward(_sdpa_forward)(shape, *inputs, saves=saves)


PROVIDER = Provider(
    {"fwd": forward, "bwd": backward, "options": attend_with_options, "decode": decode}, library_of
)
