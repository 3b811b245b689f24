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
    seqlen_k, heads_kv = k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (_by_kv_head(x, heads_kv) for x in (q, k, v))
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(dtype, torch.float32))

    with _true_fp32(q.device):
        for pairs, rows, keys, last_key in _chunks(q, seqlen_k, causal, rows_alone=causal and not _finite(v)):
            chunk = (x.to(dtype) for x in (q[pairs, :, rows], k[pairs, :, keys], v[pairs, :, keys]))
            out[pairs, :, rows], lse[pairs, :, rows], _ = _attend(*chunk, scale, last_key)

    lse = lse.view(batch, heads_q, seqlen_q)
    return _by_batch(out, batch, heads_q), lse / math.log(2) if lse_base2 else lse


@torch.no_grad()
def attention_backward_reference(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    dlse: torch.Tensor | None = None,
    lse_base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of sum(dout * out) + sum(dlse * lse), on any device, in bounded memory.

        P = exp(scale S - lse)    dP = dO Vᵀ    delta = rowsum(dO * O) - dlse    dS = P * (dP - delta)
        dQ = scale dS K           dK = scale dSᵀ Q                               dV = Pᵀ dO

    Args:
        dout: [batch, seqlen_q, heads_q, head_dim_v], any float dtype, any strides.
        q, k, v, softmax_scale, causal: as for attention_reference, whose P and O are computed again.
        dtype: of every product and of S, P, O, dP, delta and dS; sums over chunks of queries are fp32 at least.
        dlse: [batch, heads_q, seqlen_q], by the LSE that attention_reference returns with this lse_base2; None is 0.
    Returns:
        dq, dk, dv: in the shapes of q, k, v, contiguous, in `dtype`; dk and dv summed over the heads of a group.
    A row with no key, or no score but -inf, has dq 0 and no part in dk and dv, whatever its dlse.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if dlse is None:
        dlse = q.new_zeros(batch, heads_q, seqlen_q)
    if lse_base2:
        dlse = dlse / math.log(2)
    rows_alone = causal and not _finite(dout, q, k, v, dlse)
    dout, q, k, v, dlse = (_by_kv_head(x, heads_kv) for x in (dout, q, k, v, dlse.mT[..., None]))
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(dtype, torch.float32)) for x in (q, k, v))

    with _true_fp32(q.device):
        for pairs, rows, keys, last_key in _chunks(q, seqlen_k, causal, rows_alone):
            by_row = (x[pairs, :, rows].to(dtype) for x in (dout, dlse, q))
            by_key = (x[pairs, :, keys].to(dtype) for x in (k, v))
            grads = _attend_backward(*by_row, *by_key, scale, last_key)
            for grad, share, where in zip((dq, dk, dv), grads, (rows, keys, keys), strict=True):
                grad[pairs, :, where] += share

    heads = (heads_q, heads_kv, heads_kv)
    return tuple(_by_batch(x.to(dtype), batch, h) for x, h in zip((dq, dk, dv), heads, strict=True))


def _by_kv_head(x: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """[batch, seqlen, heads, columns] to [batch * heads_kv, group, seqlen, columns], a group being heads // heads_kv."""
    batch, seqlen, heads, columns = x.shape
    return x.transpose(1, 2).reshape(batch * heads_kv, heads // max(heads_kv, 1), seqlen, columns)


def _by_batch(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """[batch * heads_kv, group, seqlen, columns] to [batch, seqlen, heads, columns], contiguous."""
    return x.reshape(batch, heads, *x.shape[2:]).transpose(1, 2).contiguous()


def _finite(*tensors: torch.Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def _chunks(
    q: torch.Tensor, seqlen_k: int, causal: bool, rows_alone: bool
) -> Iterator[tuple[slice, slice, slice, int]]:
    """(pairs, rows, keys, last key of the first row) of chunks of at most about MAX_SCORES scores.

    q is by kv head. Rows that see no key are in no chunk. rows_alone: one row at once, with just the keys it sees,
    so that no 0 * NaN of another key gets into it.
    """
    pairs, group, seqlen_q, _ = q.shape
    if not pairs * group * seqlen_q * seqlen_k:
        return
    offset = seqlen_k - seqlen_q if causal else seqlen_k  # a row sees key <= row + offset
    rows_at_once = max(1, min(seqlen_q, MAX_SCORES // (group * seqlen_k)))
    if rows_alone:
        rows_at_once = 1
    pairs_at_once = max(1, MAX_SCORES // (group * rows_at_once * seqlen_k))
    for pair in range(0, pairs, pairs_at_once):
        for row in range(max(0, -offset), seqlen_q, rows_at_once):
            stop = min(row + rows_at_once, seqlen_q)
            keys = slice(min(stop + offset, seqlen_k))
            yield slice(pair, pair + pairs_at_once), slice(row, stop), keys, row + offset


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, last_key: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and P; q [n, group, rows, D], k [n, 1, keys, D], v [n, 1, keys, Dv]; row i sees keys up to last_key + i."""
    scores = _times(q * scale, k.mT)  # [n, group, rows, keys]
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(last_key + 1)
    scores = scores.masked_fill_(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    out = _times(weights, v)
    # PyTorch's softmax of a row of -inf is NaN, its logsumexp of a row with +inf is +inf.
    out = out.masked_fill((lse == -math.inf)[..., None], 0)
    return out, lse.masked_fill(lse == math.inf, math.nan), weights


def _attend_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    last_key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq of these rows and their share of dk and dv; dout [n, group, rows, Dv], dlse [n, group, rows, 1], else as _attend."""
    out, lse, weights = _attend(q, k, v, scale, last_key)
    weights.masked_fill_((lse == -math.inf)[..., None], 0)
    delta = (dout * out).sum(-1, keepdim=True) - dlse
    dv = _times_over_rows(weights, dout)
    dscores = _times(dout, v.mT).sub_(delta).mul_(weights)
    return _times(dscores, k) * scale, _times_over_rows(dscores, q) * scale, dv


def _times(x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """x [n, group, rows, a] by shared [n, 1, a, b], in one matmul of all rows of a group: [n, group, rows, b]."""
    return (x.flatten(1, 2) @ shared.squeeze(1)).unflatten(1, x.shape[1:3])


def _times_over_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """xᵀ y, summed over the rows of a group: [n, group, rows, a] and [n, group, rows, b] to [n, 1, a, b]."""
    return (x.flatten(1, 2).mT @ y.flatten(1, 2)).unsqueeze(1)


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
