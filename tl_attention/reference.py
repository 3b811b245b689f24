"""The one oracle: attention as textbooks write it. CPU tensors run it; tests and benchmarks trust it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

# Elements of S = Q Kᵀ alive at once: 256 MB in fp32, about 1 GB with the temporaries of a softmax.
MAX_SCORES = 2**26


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    lse_base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * q kᵀ + mask) v on any device, differentiable, in bounded memory.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim], any float dtype, any strides.
        k: [batch, seqlen_k, heads_kv, head_dim]; query head h reads head h // (heads_q // heads_kv).
        v: [batch, seqlen_k, heads_kv, head_dim_v].
        softmax_scale: any finite float, default head_dim ** -0.5.
        causal: a query sees key <= query + seqlen_k - seqlen_q (bottom-right).
        dtype: of every product, sum and softmax, as PyTorch computes them in that dtype, fp32 never as TF32.
        lse_base2: the LSE as log2 of the sum of 2 ** (score * log2 e), else natural.
    Returns:
        out: [batch, seqlen_q, heads_q, head_dim_v], contiguous, in `dtype`.
        lse: [batch, heads_q, seqlen_q], fp32 (fp64 where dtype is).
    A row with no key, or no score but -inf, has out 0 and lse -inf. A NaN or +inf score gives NaN in both.
    A key the mask hides has no part in a row, whatever it holds. (A kernel gives it weight 0: there a NaN or
    inf in V turns to NaN in every row that meets the key in a block.)
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    group = heads_q // max(heads_kv, 1)
    pairs = batch * heads_kv
    out = q.new_zeros(pairs, group, seqlen_q, head_dim_v, dtype=dtype)
    lse = q.new_full(out.shape[:3], -math.inf, dtype=torch.promote_types(dtype, torch.float32))

    if lse.numel() and seqlen_k:
        q = q.transpose(1, 2).reshape(pairs, group, seqlen_q, head_dim)
        k = k.transpose(1, 2).reshape(pairs, seqlen_k, head_dim)
        v = v.transpose(1, 2).reshape(pairs, seqlen_k, head_dim_v)
        offset = seqlen_k - seqlen_q if causal else seqlen_k  # a row sees key <= row + offset
        rows_at_once = max(1, min(seqlen_q, MAX_SCORES // (group * seqlen_k)))
        if causal and not v.isfinite().all():
            rows_at_once = 1  # a row alone is given just the keys it sees: no 0 * NaN from the others
        pairs_at_once = max(1, MAX_SCORES // (group * rows_at_once * seqlen_k))
        with _true_fp32(q.device):
            for pair in range(0, pairs, pairs_at_once):
                here = slice(pair, pair + pairs_at_once)
                for row in range(max(0, -offset), seqlen_q, rows_at_once):
                    rows = slice(row, min(row + rows_at_once, seqlen_q))
                    keys = slice(min(rows.stop + offset, seqlen_k))
                    chunk = (x.to(dtype) for x in (q[here, :, rows], k[here, keys], v[here, keys]))
                    out[here, :, rows], lse[here, :, rows] = _attend(*chunk, scale, row + offset)

    out = out.view(batch, heads_q, seqlen_q, head_dim_v).transpose(1, 2).contiguous()
    lse = lse.view(batch, heads_q, seqlen_q)
    return out, lse / math.log(2) if lse_base2 else lse


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, last_key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, group, rows, D], k [n, keys, D], v [n, keys, Dv]; row i sees keys up to last_key + i."""
    scores = ((q * scale).flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])  # [n, group, rows, keys]
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(last_key + 1)
    scores = scores.masked_fill_(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores.softmax(-1).flatten(1, 2) @ v).unflatten(1, q.shape[1:3])
    # PyTorch's softmax of a row of -inf is NaN, its logsumexp of a row with +inf is +inf.
    return out.masked_fill((lse == -math.inf)[..., None], 0), lse.masked_fill(lse == math.inf, math.nan)


@contextlib.contextmanager
def _true_fp32(device: torch.device) -> Iterator[None]:
    """No TF32, bf16 or autocast in fp32 matmuls. Every matmul obeys this setting; reading allow_tf32 could raise."""
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
