"""The reference of the derivative of attention along a direction, in plain PyTorch. CPU tensors run it; tests compare to it."""

from __future__ import annotations

import math

import torch

from tl_attention.reference.attention import MAX_SCORES, true_fp32


@torch.no_grad()
def attention_jvp_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tq: torch.Tensor | None,
    tk: torch.Tensor | None,
    tv: torch.Tensor | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    lse_base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention and its derivative along (tq, tk, tv), on any device, in bounded memory.

        P = softmax(S)    tS = scale (tQ Kᵀ + Q tKᵀ)    tLse = rowsum(P * tS)    tP = P * (tS - tLse)    tO = tP V + P tV

    Args:
        q, k, v, softmax_scale, causal: as for attention_reference.
        tq, tk, tv: tangents in the shapes of q, k, v; None is 0.
        dtype: dtype of every product and of S, P, tS and tP, as PyTorch computes them; fp32 never as TF32.
        lse_base2: return the log-sum-exp and its tangent in base 2, else natural.
    Returns:
        out, tout: [batch, seqlen_q, heads_q, head_dim_v], contiguous, in `dtype`.
        lse, tlse: [batch, heads_q, seqlen_q], fp32 (fp64 if dtype is fp64).
    A row with no key has out 0, lse -inf, and both tangents 0.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    sums = torch.promote_types(dtype, torch.float32)
    out = q.new_zeros(batch, seqlen_q, heads_q, v.shape[3], dtype=dtype)
    lse = q.new_full((batch, heads_q, seqlen_q), -math.inf, dtype=sums)
    tout, tlse = torch.zeros_like(out), torch.zeros_like(lse)
    if not out.numel() or not k.numel():
        return out, lse, tout, tlse

    primals, tangents = (q, k, v), (tq, tk, tv)
    tangents = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
    group = heads_q // heads_kv
    chunk = max(MAX_SCORES // (group * seqlen_k), 1)  # rows of a group of heads
    diagonal = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    hidden = torch.arange(seqlen_k, device=q.device) > diagonal if causal else None
    with true_fp32(q.device):
        for b in range(batch):
            for h in range(heads_kv):
                heads = slice(h * group, (h + 1) * group)
                K, V, tK, tV = (x[b, :, h].to(dtype) for x in (k, v, *tangents[1:]))
                for start in range(0, seqlen_q, chunk):
                    rows = slice(start, start + chunk)
                    Q, tQ = (x[b, rows, heads].transpose(0, 1).to(dtype) for x in (q, tangents[0]))
                    S, tS = Q @ K.mT * scale, (tQ @ K.mT + Q @ tK.mT) * scale
                    if hidden is not None:
                        S = S.masked_fill(hidden[rows], -math.inf)
                        tS = tS.masked_fill(hidden[rows], 0)
                    row_lse = S.to(sums).logsumexp(-1)
                    P = S.softmax(-1).masked_fill(row_lse[..., None] == -math.inf, 0)
                    mean = (P * tS).sum(-1, keepdim=True)
                    out[b, rows, heads] = (P @ V).transpose(0, 1)
                    tout[b, rows, heads] = (P * (tS - mean) @ V + P @ tV).transpose(0, 1)
                    lse[b, heads, rows], tlse[b, heads, rows] = row_lse, (P.to(sums) * tS).sum(-1)
    unit = 1 / math.log(2) if lse_base2 else 1.0
    return out, lse * unit, tout, tlse * unit
