"""PyTorch's FlexAttention, compiled for each problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from library import Attend, Provider, Ready, Unsupported, by_entry, same_call
from options import Tensors

from tl_attention.testing.shapes import Shape

RECOMPILE_LIMIT = 1024  # static shapes are its fastest, at one compile per problem


def forward(shape: Shape, q: torch.Tensor, *_: torch.Tensor, saves: bool) -> Ready:
    from torch.nn.attention.flex_attention import create_block_mask

    offset = shape.seqlen_k - shape.seqlen_q
    mask = None
    if shape.causal:
        sizes = (None, None, shape.seqlen_q, shape.seqlen_k)
        mask = create_block_mask(lambda _b, _h, i, j: j <= i + offset, *sizes, device=q.device)
    attend = functools.partial(_compiled_flex(), block_mask=mask, enable_gqa=shape.heads_q != shape.heads_kv)
    return same_call(lambda q, k, v: (attend(q, k, v), None))


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend_with_options(shape: Shape, needs: Tensors) -> Attend:
    """FlexAttention with score and mask functions; a sink is applied to its output, by way of the log-sum-exp."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    asked, (left, right) = shape.options, shape.window_size
    if asked.dropout:
        raise Unsupported("no dropout")
    rows, keys, document = shape.seqlen_q, shape.seqlen_k, None
    device = needs.cu_seqlens[0].device
    if shape.is_varlen:
        if rows != keys:
            raise Unsupported("its document masks are made for q and k of one length here")
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
    arguments = {
        "block_mask": create_block_mask(mask_mod, None, None, rows, keys, device=device) if masks else None,
        "score_mod": score_mod if asked.softcap or asked.alibi else None,
        "enable_gqa": shape.heads_q != shape.heads_kv,
        "return_aux": AuxRequest(lse=True) if asked.sink else None,
    }
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT

    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def compiled(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        found = flex_attention(q, k, v, **arguments)
        if sink is None:
            return found
        out, aux = found
        return (out * (aux.lse - sink[:, None]).sigmoid()[..., None]).to(out.dtype)

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
        tokens = (x.flatten(0, 1)[None] if shape.is_varlen else x for x in qkv)
        out = compiled(*(x.transpose(1, 2) for x in tokens), needs.sink).transpose(1, 2)
        return by_entry(out, qkv[0]), None

    return attend


PROVIDER = Provider(
    {
        "fwd": forward,
        "bwd": "its backward is reached through Tensor.backward alone",
        "options": attend_with_options,
    },
    lambda _: f"torch {torch.__version__}, compiled flex_attention",
    layout="bhsd",
)
