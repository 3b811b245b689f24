"""Code of a user: type checkers accept it in their strict modes, and it runs on a CPU."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

import tl_attention
from tl_attention import block_masks, flash_attn_func, flex_attention


def soft(
    score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
) -> torch.Tensor:
    return score - 0.1 * (q_idx - kv_idx)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out: torch.Tensor = flash_attn_func(q, k, v, causal=True, window_size=[8, 0], softcap=20.0)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    by_position = flash_attn_func(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, True)
    again: torch.Tensor = by_position[1]
    out, largest = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    both = flash_attn_func(q, k, v, return_attn_probs=True, return_max_logits=True)
    again = again + largest + both[3]
    packed: torch.Tensor = tl_attention.flash_attn_qkvpacked_func(
        torch.stack((q, k, v), 2), precision="highest"
    )
    return out + packed, lse + again


def varlen(x: torch.Tensor) -> torch.Tensor:
    cu_seqlens = torch.tensor([0, 7, len(x)], dtype=torch.int32)
    out, lse, none = tl_attention.flash_attn_varlen_func(
        x, x, x, cu_seqlens, cu_seqlens, len(x), len(x), return_attn_probs=True, check_lengths=True
    )
    assert none is None
    merged: tuple[torch.Tensor, torch.Tensor] = tl_attention.merge_states([out, out], [lse, lse])
    return merged[0]


def decode(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    out, lse = tl_attention.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, return_softmax_lse=True)
    alone: torch.Tensor = tl_attention.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)
    size: int = tl_attention.kvcache_workspace_bytes(1, 1, 2, 2, 64, 128)
    return out + alone + float(lse.sum()) * size * 0


def functions(q: torch.Tensor) -> torch.Tensor:
    mask: BlockMask = block_masks.sliding_window(q.shape[2], q.shape[2], (8, 0), device="cpu")
    out: torch.Tensor = flex_attention(q, q, q, score_mod=soft, block_mask=mask)
    out, lse = flex_attention(q, q, q, soft, return_lse=True)
    aux: AuxOutput = flex_attention(q, q, q, return_aux=AuxRequest(lse=True))[1]
    assert aux.lse is not None
    return out + (lse + aux.lse)[..., None] * 0


def research(q: torch.Tensor) -> torch.Tensor:
    out, lse = tl_attention.mha_fwd_interface(q, q, q, is_causal=True)
    kernel = tl_attention.mha_fwd_interface(q, q, q, None, True, return_kernel=True)
    dq, _, _ = tl_attention.mha_bwd_interface(out, q, q, q, out, lse, is_causal=True)
    return dq + kernel(q, q, q)[0]


def sharded(q: torch.Tensor) -> torch.Tensor:
    layout = tl_attention.distributed.make_layout(seqlen=q.shape[1], layout="zigzag")
    rows: torch.Tensor = tl_attention.distributed.shard(q, dim=1, layout=layout)
    out, lse, _ = tl_attention.distributed.attention(
        rows, rows, rows, layout=layout, method="ring", return_attn_probs=True
    )
    out, largest = tl_attention.distributed.attention(rows, rows, rows, return_max_logits=True)
    both = tl_attention.distributed.attention(
        rows, rows, rows, return_attn_probs=True, return_max_logits=True
    )
    return out + (lse + largest + both[3]).mT[..., None] * 0


def main() -> None:
    """Run all of it."""
    x = torch.randn(1, 16, 2, 64)
    flash(x, x, x)
    varlen(x[0])
    functions(x.transpose(1, 2))
    research(x.transpose(1, 2))
    sharded(x.bfloat16())
    decode(x[:, :1].bfloat16(), torch.randn(1, 128, 2, 64).bfloat16())


if __name__ == "__main__":
    main()
