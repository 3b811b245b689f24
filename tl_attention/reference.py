"""The one oracle: attention as textbooks write it. CPU tensors run it; tests and benchmarks trust it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Elements of S = Q Kᵀ alive at once: 256 MB in fp32, about 1 GB with the temporaries of a softmax, 2 GB with every option.
MAX_SCORES = 2**26
LOW = 0xFFFFFFFF  # the low half of an int64


@dataclass(frozen=True)
class ReferenceOptions:
    """What the references take, as keywords, beside plain and causal attention; a score meets them in this order.

    Attributes:
        softcap: score -> softcap * tanh(score / softcap); 0: none.
        alibi_slopes: [heads_q] or [batch, heads_q]; score -> score - slope * |key - diagonal|, where the diagonal of a
            query is key query + seqlen_k - seqlen_q.
        window: (left, right); a query sees diagonal - left <= key <= diagonal + right; -1: no bound.
        sink: [heads_q], the score, neither scaled nor capped, of one more key, of no value, that every query sees.
        keep: bool [batch, heads_q, seqlen_q, seqlen_k]; P -> 0 where dropout keeps it not.
        dropout_p: P that is kept is divided by 1 - rounded_dropout(dropout_p) / 256.
    """

    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    window: tuple[int, int] = (-1, -1)
    sink: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        if self.dropout_p and self.keep is None:
            raise ValueError(f"keep: dropout_p {self.dropout_p} needs a mask, got None: see dropout_keep")


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    lse_base2: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * q kᵀ + mask) v on any device, differentiable, in bounded memory.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim], any float dtype, any strides.
        k: [batch, seqlen_k, heads_kv, head_dim]; query head h reads head h // (heads_q // heads_kv).
        v: [batch, seqlen_k, heads_kv, head_dim_v].
        softmax_scale: any finite float, default head_dim ** -0.5.
        causal: a query sees key <= query + seqlen_k - seqlen_q (bottom-right), within the window if there is one.
        dtype: of every product, sum and softmax, as PyTorch computes them in that dtype, fp32 never as TF32.
        lse_base2: the LSE as log2 of the sum of 2 ** (score * log2 e), else natural.
        options: of ReferenceOptions.
    Returns:
        out: [batch, seqlen_q, heads_q, head_dim_v], contiguous, in `dtype`.
        lse: [batch, heads_q, seqlen_q], fp32 (fp64 where dtype is); of P before dropout, the sink among its scores.
    A row with no key, or no score but -inf, has out 0 and lse -inf, with a sink lse = sink. A NaN or +inf score gives
    NaN in both. A key the mask hides has no part in a row, whatever it holds. (A kernel gives it weight 0: there a NaN
    or inf in V turns to NaN in every row that meets the key in a block.)
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    heads_kv = k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (_by_kv_head(x, heads_kv) for x in (q, k, v))
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(dtype, torch.float32))

    with _true_fp32(q.device):
        for pairs, rows, keys, chunk in _chunks(q, k, scale, causal, ReferenceOptions(**options), [v]):
            inputs = (x.to(dtype) for x in (q[pairs, :, rows], k[pairs, :, keys], v[pairs, :, keys]))
            out[pairs, :, rows], lse[pairs, :, rows], *_ = _attend(*inputs, chunk)

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
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of sum(dout * out) + sum(dlse * lse), on any device, in bounded memory.

        P = exp(scale S - lse)    dP = dO Vᵀ    delta = rowsum(dO * O) - dlse    dS = P * (dP - delta)
        dQ = scale dS K           dK = scale dSᵀ Q                               dV = Pᵀ dO

    With dropout, dV has P and dS has dP times keep / (1 - p); with a softcap, dS is multiplied by 1 - tanh²;
    dsink is -colsum(exp(sink - lse) * delta).

    Args:
        dout: [batch, seqlen_q, heads_q, head_dim_v], any float dtype, any strides.
        q, k, v, softmax_scale, causal, options: as for attention_reference, whose P and O are computed again.
        dtype: of every product and of S, P, O, dP, delta and dS; sums over chunks of queries are fp32 at least.
        dlse: [batch, heads_q, seqlen_q], by the LSE that attention_reference returns with this lse_base2; None is 0.
    Returns:
        dq, dk, dv: in the shapes of q, k, v, contiguous, in `dtype`; dk and dv summed over the heads of a group.
        dsink: [heads_q], in `dtype`, if there is a sink.
    A row with no key, or no score but -inf, has dq 0 and no part in dk and dv, whatever its dlse.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    heads_kv = k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if dlse is None:
        dlse = q.new_zeros(batch, heads_q, seqlen_q)
    if lse_base2:
        dlse = dlse / math.log(2)
    dout, q, k, v, dlse = (_by_kv_head(x, heads_kv) for x in (dout, q, k, v, dlse.mT[..., None]))
    sums = torch.promote_types(dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=sums) for x in (q, k, v))
    dsink = q.new_zeros(*q.shape[:2], 1, 1, dtype=sums)

    with _true_fp32(q.device):
        everything = [dout, q, k, v, dlse]
        for pairs, rows, keys, chunk in _chunks(q, k, scale, causal, ReferenceOptions(**options), everything):
            by_row = (x[pairs, :, rows].to(dtype) for x in (dout, dlse, q))
            by_key = (x[pairs, :, keys].to(dtype) for x in (k, v))
            shares = _attend_backward(*by_row, *by_key, chunk)
            wheres = (rows, keys, keys, slice(None))
            for grad, share, where in zip((dq, dk, dv, dsink), shares, wheres, strict=True):
                grad[pairs, :, where] += share

    heads = (heads_q, heads_kv, heads_kv)
    grads = (_by_batch(x.to(dtype), batch, h) for x, h in zip((dq, dk, dv), heads, strict=True))
    if options.get("sink") is None:
        return tuple(grads)
    return *grads, dsink.view(batch, heads_q).sum(0).to(dtype)


def varlen_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """attention_reference of each sequence of a batch whose sequences lie one after another.

    Args:
        q, k, v: [total, heads, columns], else as for attention_reference, as are softmax_scale and causal.
        cu_seqlens_q, cu_seqlens_k: [batch + 1]; sequence i has the rows from cu_seqlens[i] to before cu_seqlens[i + 1].
        seqused_q, seqused_k: [batch], how many of these rows, from the first, it uses; None is all.
        options: of attention_reference; in keep, query and key numbers are those within a sequence.
    Returns:
        out: [total_q, heads_q, head_dim_v].
        lse: [heads_q, total_q].
    A row in no sequence has out 0 and lse -inf, with a sink too.
    """
    dtype = options.get("dtype", torch.float32)
    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=dtype)
    lse = q.new_full(q.shape[1::-1], -math.inf, dtype=torch.promote_types(dtype, torch.float32))
    for rows, keys, own in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, options):
        inputs = (x[None] for x in (q[rows], k[keys], v[keys]))
        (out[rows],), (lse[:, rows],) = attention_reference(*inputs, softmax_scale, causal, **own)
    return out, lse


@torch.no_grad()
def varlen_backward_reference(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """attention_backward_reference of each sequence of varlen_reference; rows in no sequence have gradients 0.

    Args:
        dout: [total_q, heads_q, head_dim_v].
        dlse: [heads_q, total_q]; None is 0.
        options: of attention_backward_reference, as for varlen_reference.
    Returns:
        dq, dk, dv: in the shapes of q, k, v; dsink: [heads_q], if there is a sink.
    """
    dtype, sink = options.get("dtype", torch.float32), options.get("sink")
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink, dtype=dtype)
    if dlse is None:
        dlse = q.new_zeros(q.shape[1::-1])
    for rows, keys, own in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, options):
        inputs = (x[None] for x in (dout[rows], q[rows], k[keys], v[keys]))
        grads = attention_backward_reference(*inputs, softmax_scale, causal, dlse=dlse[None, :, rows], **own)
        (dq[rows],), (dk[keys],), (dv[keys],) = grads[:3]
        if dsink is not None:
            dsink += grads[3]
    return (dq, dk, dv) if dsink is None else (dq, dk, dv, dsink)


def rounded_dropout(p: float) -> int:
    """The t of the dropout probability t / 256 that a call with p uses: the nearest, at least 1 if p > 0."""
    return max(1, round(256 * p)) if p > 0 else 0


def dropout_keep(
    rng_state: torch.Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float
) -> torch.Tensor:
    """Which probabilities dropout keeps: bool [batch, heads, seqlen_q, seqlen_k], on the device of rng_state.

    An element is kept iff its 8 bits of Philox, as a number, are rounded_dropout(dropout_p) at least. Two calls give 8 words,
    word i bit i of the numbers of 32 elements: those of a block of 16 rows and 16 keys whose row // 2 % 4 and key // 4 % 2 are the
    same. The two calls' counters are (row // 16 * 4 + row // 2 % 4, key // 16 * 4 + key // 4 % 2 * 2 + call, batch * heads + head,
    offset). In a word, the place of an element is 16 * (key // 2 % 2) + 8 * (row % 2) + 4 * (key % 2) + 2 * (row // 8 % 2) +
    key // 8 % 2. (So a thread of a kernel, which has 8 of the elements, makes a mask of few instructions.)

    Args:
        rng_state: int64 [2]: the seed, which is Philox's key, and the offset, whose low half is in every counter.
    """
    seed, offset = rng_state
    blocks_q, blocks_k = (-(-seqlen // 16) for seqlen in (seqlen_q, seqlen_k))
    row, key, head = (
        torch.arange(n, device=rng_state.device) for n in (blocks_q * 4, blocks_k * 4, batch * heads)
    )
    counter = (row[:, None], key, head[:, None, None], offset & LOW)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & LOW, (seed >> 32) & LOW))), -1)
    words = words.view(batch, heads, blocks_q, 4, blocks_k, 2, 8, 1)
    places = torch.arange(32, device=rng_state.device)
    numbers = sum((words[..., i, :] >> places & 1) << i for i in range(8))
    keep = (numbers >= rounded_dropout(dropout_p)).view(batch, heads, blocks_q, 4, blocks_k, 2, 2, 2, 2, 2, 2)
    # Of a row: block, // 8 % 2, // 2 % 4, % 2; of a key: block, // 8 % 2, // 4 % 2, // 2 % 2, % 2
    keep = keep.permute(0, 1, 2, 9, 3, 7, 4, 10, 5, 6, 8)
    return keep.reshape(batch, heads, blocks_q * 16, blocks_k * 16)[:, :, :seqlen_q, :seqlen_k]


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...], rounds: int = 7
) -> tuple[torch.Tensor, ...]:
    """The 4 words of Philox-4x32 (Salmon et al. 2011) of 4 words of counter and 2 of key, unsigned in int64, broadcast."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits each, the sign bit one of them
        c0, c1, c2, c3 = (p1 >> 32 & LOW) ^ c1 ^ k0, p1 & LOW, (p0 >> 32 & LOW) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def _sequences(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    options: dict[str, Any],
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """(rows, keys, options for a batch of it alone) of each sequence."""
    slopes, keep = options.get("alibi_slopes"), options.get("keep")
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = (
            slice(int(cu[i]), int(cu[i + 1] if used is None else cu[i] + used[i]))
            for cu, used in ((cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k))
        )
        own = dict(options)
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[i]
        if keep is not None:
            own["keep"] = keep[i : i + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        yield rows, keys, own


def _by_kv_head(x: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """[batch, seqlen, heads, columns] to [batch * heads_kv, group, seqlen, columns], a group being heads // heads_kv."""
    batch, seqlen, heads, columns = x.shape
    return x.transpose(1, 2).reshape(batch * heads_kv, heads // max(heads_kv, 1), seqlen, columns)


def _by_batch(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """[batch * heads_kv, group, seqlen, columns] to [batch, seqlen, heads, columns], contiguous."""
    return x.reshape(batch, heads, *x.shape[2:]).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Chunk:
    """What makes probabilities of q kᵀ, for n pairs of a batch and a kv head, some rows and some keys."""

    scale: float
    softcap: float
    bias: torch.Tensor | None  # [n, group, rows, keys]
    hidden: torch.Tensor  # bool [rows, keys]
    sink: torch.Tensor | None  # [n, group, 1, 1]
    keep: torch.Tensor | None  # bool [n, group, rows, keys]
    kept: float  # what dropout multiplies by where it keeps

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        """P or dP after dropout."""
        return x if self.keep is None else (x * self.kept).masked_fill_(~self.keep, 0)


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    causal: bool,
    options: ReferenceOptions,
    weighed: list[torch.Tensor],
) -> Iterator[tuple[slice, slice, slice, _Chunk]]:
    """(pairs, rows, keys, chunk) of at most about MAX_SCORES scores each.

    q and k are by kv head. Without a sink, rows that see no key are in no chunk. Where something of `weighed` (what a
    hidden key or its query multiplies by 0) is not finite, one row at once with just the keys it sees, so that no
    0 * NaN of another key gets into it.
    """
    (pairs, group, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    if not pairs * group * seqlen_q or (not seqlen_k and options.sink is None):
        return
    offset = seqlen_k - seqlen_q
    # A row sees row + offset - left <= key <= row + offset + right.
    left, right = (
        size if 0 <= size < most else most
        for size, most in zip(options.window, (seqlen_k, seqlen_q), strict=True)
    )
    right = 0 if causal else right
    slopes, sink = (
        None if x is None else x.reshape(-1, group, 1, 1).repeat(pairs * group // x.numel(), 1, 1, 1)
        for x in (options.alibi_slopes, options.sink)
    )
    keep = None if options.keep is None else options.keep.reshape(pairs, group, seqlen_q, seqlen_k)
    kept = 256 / max(1, 256 - rounded_dropout(options.dropout_p))

    rows_at_once = max(1, min(seqlen_q, MAX_SCORES // max(1, group * seqlen_k)))
    if (left < seqlen_k or right < seqlen_q) and not all(bool(x.isfinite().all()) for x in weighed):
        rows_at_once = 1
    pairs_at_once = max(1, MAX_SCORES // max(1, group * rows_at_once * seqlen_k))
    first = max(0, -offset - right) if sink is None else 0
    for pair in range(0, pairs, pairs_at_once):
        for row in range(first, seqlen_q, rows_at_once):
            some, rows = slice(pair, pair + pairs_at_once), slice(row, min(row + rows_at_once, seqlen_q))
            stop = min(max(0, rows.stop + offset + right), seqlen_k)
            keys = slice(min(max(0, row + offset - left), stop), stop)
            diagonal = torch.arange(row + offset, rows.stop + offset, device=q.device)[:, None]
            key = torch.arange(keys.start, keys.stop, device=q.device)
            chunk = _Chunk(
                scale,
                options.softcap,
                None if slopes is None else -slopes[some].double() * (diagonal - key).abs(),
                (key < diagonal - left) | (key > diagonal + right),
                None if sink is None else sink[some],
                None if keep is None else keep[some, :, rows, keys],
                kept,
            )
            yield some, rows, keys, chunk


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: _Chunk
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out, lse, P (of the sink in a last column) and tanh of the softcap; q [n, group, rows, D], k, v [n, 1, keys, ..]."""
    scores, tanh = _times(q * chunk.scale, k.mT), None  # [n, group, rows, keys]
    if chunk.softcap:
        tanh = (scores / chunk.softcap).tanh()
        scores = tanh * chunk.softcap
    if chunk.bias is not None:
        scores += chunk.bias
    scores = scores.masked_fill_(chunk.hidden, -math.inf)
    if chunk.sink is not None:
        sink = chunk.sink.to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    out = _times(chunk.dropped(weights[..., : k.shape[2]]), v)
    # PyTorch's softmax of a row of -inf is NaN, its logsumexp of a row with +inf is +inf.
    out = out.masked_fill((lse == -math.inf)[..., None], 0)
    return out, lse.masked_fill(lse == math.inf, math.nan), weights, tanh


def _attend_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunk: _Chunk,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq of these rows, their share of dk, dv and dsink; dout [n, group, rows, Dv], dlse [n, group, rows, 1], else as _attend."""
    out, lse, weights, tanh = _attend(q, k, v, chunk)
    weights.masked_fill_((lse == -math.inf)[..., None], 0)
    weights, sink_weight = weights.tensor_split([k.shape[2]], -1)  # [n, group, rows, keys] and 1 or 0 columns
    delta = (dout * out).sum(-1, keepdim=True) - dlse
    dsink = -(sink_weight * delta).sum((2, 3), keepdim=True)
    dv = _times_over_rows(chunk.dropped(weights), dout)
    dscores = chunk.dropped(_times(dout, v.mT)).sub_(delta).mul_(weights)
    if tanh is not None:
        dscores *= 1 - tanh.square()
    return _times(dscores, k) * chunk.scale, _times_over_rows(dscores, q) * chunk.scale, dv, dsink


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
