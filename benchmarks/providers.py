"""The libraries compared: one function each, which makes it ready for a problem or says why it cannot run it.

To add one: a function and its line in PROVIDERS.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tl_attention.testing.bench import Shape, version

Result = tuple[torch.Tensor, torch.Tensor | None]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Result]

MAX_SCORE_BYTES = 16 << 30  # of the score matrix of plain PyTorch, which holds up to three of them


class Unsupported(Exception):
    """Why a library cannot run a problem, in words."""


@dataclass(frozen=True)
class Ready:
    """A library ready for one problem: (q, k, v) -> (out, lse [batch, heads_q, seqlen_q] or None)."""

    call: Attend  # as a user calls it
    launch: Attend  # the same without its checks and lookups, where it can be had


@dataclass(frozen=True)
class Provider:
    prepare: Callable[[Shape, torch.Tensor, torch.Tensor, torch.Tensor], Ready]
    layout: str  # of q, k, v and out, all contiguous: bshd or bhsd
    library: Callable[[], str]  # its name and version
    lse_base2: bool = False


def tl_attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
    interface = functools.partial(_function("tl_attention", "mha_fwd_interface"), is_causal=shape.causal)
    return Ready(interface, interface(q, k, v, return_kernel=True))


def fa2(shape: Shape, *_: torch.Tensor) -> Ready:
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    if _has_flash_attn():
        flash = _function("flash_attn", "flash_attn_func")
        return _same(lambda q, k, v: (flash(q, k, v, causal=shape.causal), None))
    # The op behind SDPA's flash backend. Its causal is bottom-right where SDPA's own is top-left.
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, 0.0, shape.causal)[0].transpose(1, 2), None

    return _same(attend)


def cudnn(shape: Shape, *_: torch.Tensor) -> Ready:
    if shape.causal and shape.seqlen_q != shape.seqlen_k:
        raise Unsupported("its causal mask is top-left")
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention  # the op behind SDPA's cuDNN backend
    return _same(lambda q, k, v: (sdpa(q, k, v, None, False, 0.0, shape.causal)[0], None))


def fa3(shape: Shape, *_: torch.Tensor) -> Ready:
    flash = _function("flash_attn_interface", "flash_attn_func")
    return _same(lambda q, k, v: _pair(flash(q, k, v, causal=shape.causal)))


def fa4(shape: Shape, *_: torch.Tensor) -> Ready:
    flash = _function("flash_attn.cute", "flash_attn_func")
    return _same(lambda q, k, v: _pair(flash(q, k, v, causal=shape.causal)))


def triton(shape: Shape, *_: torch.Tensor) -> Ready:
    flash = _function("triton_fwd", "flash_attn_triton")
    return _same(lambda q, k, v: flash(q, k, v, shape.causal))


def flex(shape: Shape, q: torch.Tensor, *_: torch.Tensor) -> Ready:
    from torch.nn.attention.flex_attention import create_block_mask

    offset = shape.seqlen_k - shape.seqlen_q
    mask = None
    if shape.causal:
        sizes = (None, None, shape.seqlen_q, shape.seqlen_k)
        mask = create_block_mask(lambda _b, _h, i, j: j <= i + offset, *sizes, device=q.device)
    attend = functools.partial(_compiled_flex(), block_mask=mask, enable_gqa=shape.heads_q != shape.heads_kv)
    return _same(lambda q, k, v: (attend(q, k, v), None))


def naive(shape: Shape, q: torch.Tensor, *_: torch.Tensor) -> Ready:
    score_bytes = 2 * shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k
    if score_bytes > MAX_SCORE_BYTES:
        raise Unsupported(f"its scores would take {score_bytes / 2**30:.0f} GiB")
    if shape.causal and shape.seqlen_q > shape.seqlen_k:
        raise Unsupported("a row without a key is NaN")
    hidden = None
    if shape.causal:
        ones = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device=q.device)
        hidden = ones.triu(shape.seqlen_k - shape.seqlen_q + 1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        k, v = (x.repeat_interleave(shape.heads_q // shape.heads_kv, 1) for x in (k, v))
        scores = q @ k.mT * shape.head_dim**-0.5
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        return scores.softmax(-1) @ v, None

    return _same(attend)


PROVIDERS = {
    "tl_attention": Provider(tl_attention, "bhsd", lambda: f"TileLang {version('tilelang')}", lse_base2=True),
    "fa2": Provider(
        fa2, "bshd", lambda: f"flash-attn {version('flash-attn')}" if _has_flash_attn() else "torch SDPA"
    ),
    "cudnn": Provider(cudnn, "bhsd", lambda: f"torch SDPA, cuDNN {torch.backends.cudnn.version()}"),
    "fa3": Provider(fa3, "bshd", lambda: f"flash-attn-3 {version('flash-attn-3')}"),
    "fa4": Provider(fa4, "bshd", lambda: f"flash-attn-4 {version('flash-attn-4')}"),
    "triton": Provider(triton, "bhsd", lambda: f"triton_fwd.py, Triton {version('triton')}"),
    "flex": Provider(flex, "bhsd", lambda: f"torch {torch.__version__}, compiled flex_attention"),
    "naive": Provider(naive, "bhsd", lambda: f"torch {torch.__version__}, matmul and softmax"),
}


def title(name: str) -> str:
    """A provider's name in tables and plots."""
    return "fa2 (torch sdpa)" if name == "fa2" and not _has_flash_attn() else name


def _same(attend: Attend) -> Ready:
    return Ready(attend, attend)


def _pair(result: Any) -> Result:
    """(out, lse) of a library some of whose versions return out alone."""
    return (result, None) if isinstance(result, torch.Tensor) else (result[0], result[1])


def _function(module: str, name: str) -> Callable[..., Any]:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # of a broken installation: whatever it raises
        raise Unsupported(f"{module}.{name} cannot be imported: {error}") from error


@functools.cache
def _has_flash_attn() -> bool:
    try:
        return callable(_function("flash_attn", "flash_attn_func"))
    except Unsupported:
        return False


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1024  # static shapes are its fastest, at one compile each
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
