"""The libraries compared on problems with options, and the tensors that options need.

All take q, k and v as [batch, seqlen, heads, head_dim], contiguous unless the problem is packed. Backwards are what
torch.autograd.grad launches, as most of these libraries have no other; gradients of a sink are among them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import providers
import torch
from providers import Provider, Ready, Result, Unsupported, has_flash_attn, import_function
from report import OURS, PLAIN

from tl_attention.reference import dropout_keep
from tl_attention.testing import counts, shapes, timer
from tl_attention.testing.shapes import Shape

OWN_MASK = ("fa2", "cudnn")  # whose dropout draws masks that the reference does not know

# (q, k, v), packed: (qkv) -> (out, lse [batch, heads_q, seqlen_q], of varlen [heads_q, tokens], or None)
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Tensors:
    """What the options of a problem need on the device; None where they are not asked for."""

    cu_seqlens: tuple[torch.Tensor, torch.Tensor]  # int32 [batch + 1], of queries and of keys
    max_seqlens: tuple[int, int]
    slopes: torch.Tensor | None  # fp32 [heads_q], ALiBi's geometric ones
    sink: torch.Tensor | None  # [heads_q], about as heavy as all keys that a query sees; requires grad
    rng_state: torch.Tensor | None  # int64 [2]


@functools.lru_cache(maxsize=4)
def tensors(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    asked, heads = shape.options, shape.heads_q
    lengths = list(zip(*shapes.sequences(shape), strict=True))
    ends = (torch.tensor([0, *each]).cumsum(0).to(device, torch.int32) for each in lengths)
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    seen = counts.visible_pairs(shape) / (shape.batch * shape.seqlen_q)
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(0)) + math.log(seen)
    return Tensors(
        tuple(ends),
        tuple(map(max, lengths)),
        slopes.to(device) if asked.alibi else None,
        sink.to(device, dtype).requires_grad_() if asked.sink else None,
        torch.tensor([0x5EED, 0], device=device) if asked.dropout else None,
    )


def reference_options(
    shape: Shape, dtype: torch.dtype, device: torch.device, heads: Sequence[int]
) -> dict[str, Any]:
    """The options of a problem as the reference takes them, of some query heads."""
    needs, asked = tensors(shape, dtype, device), shape.options
    chosen = list(heads)
    options: dict[str, Any] = {}
    if asked.window is not None:
        options["window"] = shape.window_size
    if asked.softcap:
        options["softcap"] = asked.softcap
    if needs.slopes is not None:
        options["alibi_slopes"] = needs.slopes[chosen]
    if needs.sink is not None:
        options["sink"] = needs.sink.detach()[chosen]
    if shape.is_varlen:
        options |= zip(("cu_seqlens_q", "cu_seqlens_k"), needs.cu_seqlens, strict=True)
    if asked.dropout:
        options |= {"keep": _keep(shape, needs)[:, chosen], "dropout_p": asked.dropout}
    return options


@functools.lru_cache(maxsize=1)
def _keep(shape: Shape, needs: Tensors) -> torch.Tensor:
    """bool [batch, heads_q, seqlen_q, seqlen_k]; of uneven lengths, as of the longest."""
    return dropout_keep(
        needs.rng_state, shape.batch, shape.heads_q, *needs.max_seqlens, shape.options.dropout
    )


def flash(module: str, shape: Shape, needs: Tensors) -> Attend:
    """The functions of FlashAttention 2, which are ours, too."""
    asked, options = shape.options, {"causal": shape.causal, "return_attn_probs": True}
    options |= {
        name: value
        for name, value, given in (
            ("window_size", shape.window_size, asked.window is not None),
            ("softcap", asked.softcap, asked.softcap),
            ("alibi_slopes", needs.slopes, asked.alibi),
            ("learnable_sink", needs.sink, asked.sink),
            ("dropout_p", asked.dropout, asked.dropout),
            ("rng_state", needs.rng_state, asked.dropout and module == "tl_attention"),
        )
        if given
    }
    packed = asked.packed and module == "tl_attention"
    forms = ["varlen"] * shape.is_varlen + ["qkvpacked"] * packed
    function = import_function(module, "_".join(["flash_attn", *forms, "func"]))
    sides = 1 if packed else 2

    def attend(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not shape.is_varlen:
            return function(*operands, **options)[:2]
        tokens = [x.flatten(0, 1) for x in operands]
        out, lse, *_ = function(*tokens, *needs.cu_seqlens[:sides], *needs.max_seqlens[:sides], **options)
        return _by_entry(out, operands[0]), lse

    return attend


def tl_attention(shape: Shape, needs: Tensors) -> Attend:
    return flash("tl_attention", shape, needs)


def fa2(shape: Shape, needs: Tensors) -> Attend:
    asked = shape.options
    if asked.sink:
        raise Unsupported("it has no sink")
    if shape.head_dim != shape.head_dim_v:
        raise Unsupported("one head_dim for q, k and v")
    if has_flash_attn():
        return flash("flash_attn", shape, needs)
    for name in ("softcap", "alibi"):
        if getattr(asked, name):
            raise Unsupported(f"PyTorch's FlashAttention 2 has no {name}")
    if shape.is_varlen or asked.window is not None:
        return _varlen_attn(shape, needs)
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, asked.dropout, shape.causal)[0].transpose(1, 2), None

    return attend


def _varlen_attn(shape: Shape, needs: Tensors) -> Attend:
    """PyTorch's FlashAttention 2 with windows and sequences of any lengths."""
    if shape.options.dropout:
        raise Unsupported("PyTorch's varlen_attn has no dropout")
    if shape.heads_q != shape.heads_kv:
        raise Unsupported("PyTorch's varlen_attn of 2.11 has no GQA")
    function = import_function("torch.nn.attention.varlen", "varlen_attn")
    left, right = shape.window_size
    window = (left, 0 if shape.causal else right)

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
        tokens = (x.flatten(0, 1) for x in qkv)
        return _by_entry(
            function(*tokens, *needs.cu_seqlens, *needs.max_seqlens, window_size=window), qkv[0]
        ), None

    return attend


def cudnn(shape: Shape, needs: Tensors) -> Attend:
    asked = shape.options
    for name in ("window", "softcap", "alibi", "sink"):
        if getattr(asked, name) not in (None, False, 0.0):
            raise Unsupported(f"PyTorch's cuDNN backend has no {name}")
    if shape.is_varlen:
        raise Unsupported("PyTorch's cuDNN backend is not reached by varlen_attn")
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        saves = torch.is_grad_enabled()
        return sdpa(q, k, v, None, saves, asked.dropout, shape.causal)[0].transpose(1, 2), None

    return attend


def fa4(shape: Shape, needs: Tensors) -> Attend:
    asked = shape.options
    if asked.alibi:
        raise Unsupported("ALiBi only as a score_mod of one's own")
    if asked.dropout:
        raise Unsupported("it has no dropout")
    options: dict[str, Any] = {"causal": shape.causal, "softcap": asked.softcap, "return_lse": True}
    options["window_size"] = tuple(None if bound < 0 else bound for bound in shape.window_size)
    if asked.sink:
        options["learnable_sink"] = needs.sink
    if not shape.is_varlen:
        return functools.partial(import_function("flash_attn.cute", "flash_attn_func"), **options)
    function = import_function("flash_attn.cute", "flash_attn_varlen_func")
    for side, ends, longest in zip("qk", needs.cu_seqlens, needs.max_seqlens, strict=True):
        options |= {f"cu_seqlens_{side}": ends, f"max_seqlen_{side}": longest}

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = function(*(x.flatten(0, 1) for x in qkv), **options)
        return _by_entry(out, qkv[0]), lse

    return attend


def flex(shape: Shape, needs: Tensors) -> Attend:
    """Compiled with its score and mask functions; a sink is applied to what it returns, by way of the log-sum-exp."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    asked, (left, right) = shape.options, shape.window_size
    if asked.dropout:
        raise Unsupported("it has no dropout")
    rows, keys, document = shape.seqlen_q, shape.seqlen_k, None
    device = needs.cu_seqlens[0].device
    if shape.is_varlen:
        if rows != keys:
            raise Unsupported("its masks of documents are made for q and k of one length here")
        rows = keys = shape.batch * shape.seqlen_q
        document = torch.searchsorted(needs.cu_seqlens[0][1:], torch.arange(rows, device=device), right=True)
    offset = keys - rows

    cap, slopes, causal = asked.softcap, needs.slopes, shape.causal

    def score_mod(score: torch.Tensor, _b: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[head] * (query + offset - key).abs()
        return score

    def mask_mod(_b: Any, _h: Any, query: Any, key: Any) -> torch.Tensor:
        seen = key >= 0
        if causal:
            seen = seen & (key <= query + offset)
        if left >= 0:
            seen = seen & (key >= query + offset - left)
        if right >= 0:
            seen = seen & (key <= query + offset + right)
        return seen if document is None else seen & (document[query] == document[key])

    masks = causal or left >= 0 or document is not None
    options = {
        "block_mask": create_block_mask(mask_mod, None, None, rows, keys, device=device) if masks else None,
        "score_mod": score_mod if asked.softcap or asked.alibi else None,
        "enable_gqa": shape.heads_q != shape.heads_kv,
        "return_aux": AuxRequest(lse=True) if asked.sink else None,
    }
    torch._dynamo.config.recompile_limit = 1024

    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def compiled(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        found = flex_attention(q, k, v, **options)
        if sink is None:
            return found
        out, aux = found
        return (out * (aux.lse - sink[:, None]).sigmoid()[..., None]).to(out.dtype)

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
        tokens = (x.flatten(0, 1)[None] if shape.is_varlen else x for x in qkv)
        out = compiled(*(x.transpose(1, 2) for x in tokens), needs.sink).transpose(1, 2)
        return _by_entry(out, qkv[0]), None

    return attend


def _by_entry(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """out of tokens as [batch, seqlen, heads, head_dim_v], q or qkv having the first two."""
    return out.reshape(*q.shape[:2], *out.shape[-2:])


def _provider(
    attend_of: Callable[[Shape, Tensors], Attend], name: str, takes_packed: bool = False
) -> Provider:
    """Both passes of a library from what makes its attention ready, or raises Unsupported."""

    def forward(shape: Shape, *qkv: torch.Tensor, saves: bool) -> Ready:
        shape = asked_of(name, shape)
        needs = tensors(shape, qkv[0].dtype, qkv[0].device)
        attend = attend_of(shape, needs)
        if shape.options.packed and not takes_packed:
            attend = _unbinding(attend)

        def operands(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (_packed(*qkv),) if shape.options.packed else qkv

        @torch.no_grad()
        def once(*qkv: torch.Tensor) -> Result:
            return attend(*operands(*qkv))

        def recorded(*qkv: torch.Tensor) -> Result:
            with timer.on_capture_stream():
                given = [x.detach().requires_grad_() for x in operands(*qkv)]
                out, lse = attend(*given)
            leaves = given if needs.sink is None else [*given, needs.sink]
            return out.detach(), lse if lse is None else lse.detach(), (out, leaves)

        attend_so = recorded if saves else once
        return Ready(attend_so, attend_so)

    def backward(shape: Shape, deterministic: bool, *_: object) -> Ready:
        if deterministic:
            raise Unsupported("deterministic gradients are not compared with options")
        packed = asked_of(name, shape).options.packed

        def differentiate(dout: torch.Tensor, *given: Any) -> Result:
            out, leaves = given[-1]
            grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            return (*grads[0].unbind(2), *grads[1:]) if packed else grads

        return Ready(differentiate, differentiate)

    library = providers.PROVIDERS[OURS if name == PLAIN else name].library
    return Provider(forward, backward, "bshd", library)


def asked_of(name: str, shape: Shape) -> Shape:
    """The problem that a provider solves in the row of a shape."""
    return shape.plain if name == PLAIN else shape


def _packed(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """[batch, seqlen, 3, heads, head_dim] of which q, k and v are slices."""
    batch, seqlen, heads, head_dim = q.shape
    strides = (*q.stride()[:2], heads * head_dim, head_dim, 1)
    return q.as_strided((batch, seqlen, 3, heads, head_dim), strides)


def _unbinding(attend: Attend) -> Attend:
    return lambda qkv: attend(*qkv.unbind(2))


PROVIDERS = {
    OURS: _provider(tl_attention, OURS, takes_packed=True),
    PLAIN: _provider(tl_attention, PLAIN),
    "fa2": _provider(fa2, "fa2"),
    "cudnn": _provider(cudnn, "cudnn"),
    "fa4": _provider(fa4, "fa4"),
    "flex": _provider(flex, "flex"),
}
