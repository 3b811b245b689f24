"""A decode step of transformers: flash_attn_with_kvcache on keys that transformers has written, and its op.

`import tl_attention` defines the op, which programs of torch.export hold.
"""

from __future__ import annotations

from typing import Any

import torch

from tl_attention.api import kvcache
from tl_attention.checks.kvcache import LATENT, is_cache, is_part
from tl_attention.problem.options import Cache
from tl_attention.torch_ops.flops import register_flops


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    sink: torch.Tensor | None,
    batch_invariant: bool,
) -> torch.Tensor:
    """flash_attn_with_kvcache without new keys, as a torch op: its arguments have types that an op may have.

    Keys and values that a cache cannot be are copied; values that are columns of the keys stay so.
    """
    v_in_k = (k.shape[3], v.shape[3]) == LATENT and is_part(v, k)
    # Not contiguous(), as empty tensors are contiguous with any strides
    k, v = (x if is_cache(x) else x.clone(memory_format=torch.contiguous_format) for x in (k, v))
    if v_in_k:
        v = k[..., : LATENT[1]]
    return kvcache.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=seqlens,
        cache_leftpad=leftpad,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, right),
        softcap=softcap,
        learnable_sink=sink,
        batch_invariant=batch_invariant,
    )


decode_op = torch.library.custom_op("tl_attention::hf_decode", decode, mutates_args=())


@decode_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _flops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor | None, leftpad: Any, *_: Any
) -> int:
    rows = k.shape[1] if seqlens is None else seqlens
    return kvcache.decode_flops(q, Cache(k, v, rows, leftpad=leftpad))


register_flops(_flops, "hf_decode")
