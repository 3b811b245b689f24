"""The reference: attention by the textbook formula in plain PyTorch. CPU tensors run it; tests and benchmarks compare to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Maximum number of scores in memory at once: 256 MB in fp32, about 1 GB with the temporaries of a softmax, 2 GB with every option
MAX_SCORES = 2**26
LOW_HALF = 0xFFFFFFFF  # of an int64


@dataclass(frozen=True)
class ReferenceOptions:
    """Keyword options of the reference functions, in the order in which they apply to a score.

    Attributes:
        softcap: score -> softcap * tanh(score / softcap); 0: none.
        alibi_slopes: [heads_q] or [batch, heads_q]; score -> score - slope * |key - diagonal|. The diagonal of a query is
            key query + seqlen_k - seqlen_q.
        window: (left, right); a query sees diagonal - left <= key <= diagonal + right; -1: no bound.
        sink: [heads_q]; score of one extra key per query, which has no value. It is neither scaled nor capped.
        keep: bool [batch, heads_q, seqlen_q, seqlen_k]; False: P is dropped (set to 0).
        dropout_p: kept P are divided by 1 - rounded_dropout(dropout_p) / 256.
        diagonal: key on the diagonal of the first query; None: seqlen_k - seqlen_q.
        hidden_keys: number of keys, from the first on, that no query sees.
        tree_mask: int64 [seqlen_q], at most 64: key seqlen_k - seqlen_q + j is hidden from the queries without bit j.
    """

    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    window: tuple[int, int] = (-1, -1)
    sink: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    dropout_p: float = 0.0
    diagonal: int | None = None
    hidden_keys: int = 0
    tree_mask: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.dropout_p and self.keep is None:
            raise ValueError(
                f"keep: expected a mask with dropout_p {self.dropout_p}, got None; make one with dropout_keep"
            )


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    lse_base2: bool = False,
    max_logits: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """softmax(softmax_scale * q kᵀ + mask) v on any device, differentiable, in bounded memory.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim], any float dtype, any strides.
        k: [batch, seqlen_k, heads_kv, head_dim]; query head h reads head h // (heads_q // heads_kv).
        v: [batch, seqlen_k, heads_kv, head_dim_v].
        softmax_scale: any finite float, default head_dim ** -0.5.
        causal: a query sees key <= query + seqlen_k - seqlen_q (bottom-right), within the window if there is one.
        dtype: dtype of every product, sum and softmax, as PyTorch computes them; fp32 never as TF32.
        lse_base2: return the LSE in base 2, log2 of the sum of 2 ** (score * log2 e), else natural.
        max_logits: return the largest score of each row, too.
        options: fields of ReferenceOptions.
    Returns:
        out: [batch, seqlen_q, heads_q, head_dim_v], contiguous, in `dtype`.
        lse: [batch, heads_q, seqlen_q], fp32 (fp64 if dtype is fp64), before dropout, including the sink.
        max_logits: as lse, natural, without the sink and not differentiable; -inf for a row with no key.
    A row with no key, or with all scores -inf, has out 0 and lse -inf, or lse = sink. A NaN or +inf score makes both NaN.
    A masked key never contributes, even if it holds NaN. (In a kernel its weight is 0, so NaN or inf in V may reach other rows of the
    tile, as 0 * NaN.)
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    heads_kv = k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (_by_kv_head(x, heads_kv) for x in (q, k, v))
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(dtype, torch.float32))
    largest = lse.clone() if max_logits else None

    with true_fp32(q.device):
        for pairs, rows, keys, chunk in _chunks(q, k, scale, causal, ReferenceOptions(**options), [v]):
            inputs = (x.to(dtype) for x in (q[pairs, :, rows], k[pairs, :, keys], v[pairs, :, keys]))
            q_rows, k_rows, v_rows = inputs
            out[pairs, :, rows], lse[pairs, :, rows], *_ = _forward_of_chunk(q_rows, k_rows, v_rows, chunk)
            if largest is not None and k_rows.shape[2]:
                largest[pairs, :, rows] = _scores(q_rows.detach(), k_rows.detach(), chunk)[0].amax(-1)

    lse = lse.view(batch, heads_q, seqlen_q)
    results = _by_batch(out, batch, heads_q), lse / math.log(2) if lse_base2 else lse
    return results if largest is None else (*results, largest.view(batch, heads_q, seqlen_q))


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
    rounds_to: torch.dtype | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of sum(dout * out) + sum(dlse * lse), on any device, in bounded memory.

        P = exp(scale S - lse)    dP = dO Vᵀ    delta = rowsum(dO * O) - dlse    dS = P * (dP - delta)
        dQ = scale dS K           dK = scale dSᵀ Q                               dV = Pᵀ dO

    Dropout multiplies P in dV and dP in dS by keep / (1 - p). A softcap multiplies dS by 1 - tanh². dsink is
    -colsum(exp(sink - lse) * delta).

    Args:
        dout: [batch, seqlen_q, heads_q, head_dim_v], any float dtype, any strides.
        q, k, v, softmax_scale, causal, options: as for attention_reference; P and O are recomputed.
        dtype: dtype of every product and of S, P, O, dP, delta and dS; sums over chunks of queries are at least fp32.
        dlse: [batch, heads_q, seqlen_q], the gradient of the LSE that attention_reference returns with this lse_base2;
            None is 0.
        rounds_to: dtype to which O in delta, P in dV, and dS in dQ and dK are rounded, as a kernel with 16-bit operands does; None: none.
    Returns:
        dq, dk, dv: in the shapes of q, k, v, contiguous, in `dtype`; dk and dv summed over the heads of a group.
        dsink: [heads_q], in `dtype`, only with a sink.
    A row with no key, or with all scores -inf, has dq 0 and contributes nothing to dk and dv, for any dlse.
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

    with true_fp32(q.device):
        multiplied = [dout, q, k, v, dlse]
        for pairs, rows, keys, chunk in _chunks(q, k, scale, causal, ReferenceOptions(**options), multiplied):
            by_row = (x[pairs, :, rows].to(dtype) for x in (dout, dlse, q))
            by_key = (x[pairs, :, keys].to(dtype) for x in (k, v))
            partial_dq, partial_dk, partial_dv, partial_dsink = _backward_of_chunk(
                *by_row, *by_key, chunk, rounds_to
            )
            dq[pairs, :, rows] += partial_dq
            dk[pairs, :, keys] += partial_dk
            dv[pairs, :, keys] += partial_dv
            dsink[pairs] += partial_dsink

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
    max_logits: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """attention_reference for each sequence of a packed (varlen) batch.

    Args:
        q, k, v: [total, heads, columns]; else as for attention_reference, like softmax_scale and causal.
        cu_seqlens_q, cu_seqlens_k: [batch + 1]; sequence i has rows cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        seqused_q, seqused_k: [batch]; number of these rows in use, from the first; None: all.
        options: as for attention_reference; keep counts queries and keys from the start of a sequence. tree_mask may be [batch, seqlen_q].
    Returns:
        out: [total_q, heads_q, head_dim_v].
        lse: [heads_q, total_q]. With max_logits also these, in the same shape.
    A row outside all sequences has out 0 and lse and max_logits -inf, even with a sink.
    """
    dtype = options.get("dtype", torch.float32)
    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=dtype)
    lse = q.new_full(q.shape[1::-1], -math.inf, dtype=torch.promote_types(dtype, torch.float32))
    numbers = (lse, lse.clone()) if max_logits else (lse,)
    for rows, keys, its_options in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, options):
        inputs = (x[None] for x in (q[rows], k[keys], v[keys]))
        (out[rows],), *found = attention_reference(
            *inputs, softmax_scale, causal, max_logits=max_logits, **its_options
        )
        for x, (of_rows,) in zip(numbers, found, strict=True):
            x[:, rows] = of_rows
    return out, *numbers


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
    """attention_backward_reference for each sequence of varlen_reference; rows outside all sequences have gradient 0.

    Args:
        dout: [total_q, heads_q, head_dim_v].
        dlse: [heads_q, total_q]; None is 0.
        options: as for attention_backward_reference and varlen_reference.
    Returns:
        dq, dk, dv: in the shapes of q, k, v.
        dsink: [heads_q], only with a sink.
    """
    dtype, sink = options.get("dtype", torch.float32), options.get("sink")
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink, dtype=dtype)
    if dlse is None:
        dlse = q.new_zeros(q.shape[1::-1])
    for rows, keys, its_options in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, options):
        inputs = (x[None] for x in (dout[rows], q[rows], k[keys], v[keys]))
        grads = attention_backward_reference(
            *inputs, softmax_scale, causal, dlse=dlse[None, :, rows], **its_options
        )
        (dq[rows],), (dk[keys],), (dv[keys],) = grads[:3]
        if dsink is not None:
            dsink += grads[3]
    return (dq, dk, dv) if dsink is None else (dq, dk, dv, dsink)


def rounded_dropout(p: float) -> int:
    """Dropout probability in 1/256: p rounded to the nearest multiple, at least 1 if p > 0."""
    return max(1, round(256 * p)) if p > 0 else 0


def dropout_keep(
    rng_state: torch.Tensor,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    first: tuple[int, int, int] = (0, 0, 0),
) -> torch.Tensor:
    """Dropout mask: bool [batch, heads, seqlen_q, seqlen_k], True where dropout keeps P, on the device of rng_state.

    Each element has a random number of 8 bits from Philox. It is kept if the number is at least rounded_dropout(dropout_p).

    Two Philox calls make the 8 words for 32 elements: word i holds bit i of each. The 32 elements are those of a block of 16 rows and
    16 keys with equal row // 2 % 4 and key // 4 % 2. The counter of a call is (row // 16 * 4 + row // 2 % 4,
    key // 16 * 4 + key // 4 % 2 * 2 + call, batch * heads + head, offset). The bit of an element within a word is
    16 * (key // 2 % 2) + 8 * (row % 2) + 4 * (key % 2) + 2 * (row // 8 % 2) + key // 8 % 2. With this order a kernel thread, which
    holds 8 of the elements, needs few instructions per mask.

    Args:
        rng_state: int64 [2]: the seed, which is the Philox key, and the offset, whose low half is in every counter.
        first: (row, key, batch * heads + head) of the first element; row and key are multiples of 16.
    """
    seed, offset = rng_state
    blocks_q, blocks_k = (-(-seqlen // 16) for seqlen in (seqlen_q, seqlen_k))
    row, key, head = (
        torch.arange(start, start + n, device=rng_state.device)
        for start, n in (
            (first[0] // 4, blocks_q * 4),
            (first[1] // 4, blocks_k * 4),
            (first[2], batch * heads),
        )
    )
    counter = (row[:, None], key, head[:, None, None], offset & LOW_HALF)
    philox_key = (seed & LOW_HALF, (seed >> 32) & LOW_HALF)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, philox_key)), -1)
    words = words.view(batch, heads, blocks_q, 4, blocks_k, 2, 8, 1)
    bits = torch.arange(32, device=rng_state.device)
    numbers = sum((words[..., i, :] >> bits & 1) << i for i in range(8))
    keep = (numbers >= rounded_dropout(dropout_p)).view(batch, heads, blocks_q, 4, blocks_k, 2, 2, 2, 2, 2, 2)
    # Order of the row parts: block, // 8 % 2, // 2 % 4, % 2; of the key parts: block, // 8 % 2, // 4 % 2, // 2 % 2, % 2
    keep = keep.permute(0, 1, 2, 9, 3, 7, 4, 10, 5, 6, 8)
    return keep.reshape(batch, heads, blocks_q * 16, blocks_k * 16)[:, :, :seqlen_q, :seqlen_k]


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...], rounds: int = 7
) -> tuple[torch.Tensor, ...]:
    """Philox-4x32 (Salmon et al. 2011): 4 words from 4 words of counter and 2 of key, unsigned in int64, broadcast."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits each, the sign bit included
        high0, high1 = p0 >> 32 & LOW_HALF, p1 >> 32 & LOW_HALF
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & LOW_HALF, high0 ^ c3 ^ k1, p0 & LOW_HALF
        k0, k1 = (k0 + 0x9E3779B9) & LOW_HALF, (k1 + 0xBB67AE85) & LOW_HALF
    return c0, c1, c2, c3


def _sequences(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    options: dict[str, Any],
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield the rows, the keys and the options of each sequence."""
    slopes, keep, tree = (options.get(name) for name in ("alibi_slopes", "keep", "tree_mask"))
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = (
            slice(int(cu[i]), int(cu[i + 1] if used is None else cu[i] + used[i]))
            for cu, used in ((cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k))
        )
        its_options = dict(options)
        if slopes is not None and slopes.dim() == 2:
            its_options["alibi_slopes"] = slopes[i]
        if tree is not None and tree.dim() == 2:
            its_options["tree_mask"] = tree[i]
        if keep is not None:
            its_options["keep"] = keep[i : i + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        yield rows, keys, its_options


def _by_kv_head(x: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """Reshape [batch, seqlen, heads, columns] to [batch * heads_kv, group, seqlen, columns], group = heads // heads_kv."""
    batch, seqlen, heads, columns = x.shape
    return x.transpose(1, 2).reshape(batch * heads_kv, heads // max(heads_kv, 1), seqlen, columns)


def _by_batch(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """Reshape [batch * heads_kv, group, seqlen, columns] to [batch, seqlen, heads, columns], contiguous."""
    return x.reshape(batch, heads, *x.shape[2:]).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Chunk:
    """The options of a block of scores: n (batch, kv head) pairs, some rows and some keys."""

    scale: float
    softcap: float
    bias: torch.Tensor | None  # [n, group, rows, keys]
    masked: torch.Tensor  # bool [rows, keys]
    sink: torch.Tensor | None  # [n, group, 1, 1]
    keep: torch.Tensor | None  # bool [n, group, rows, keys]
    keep_scale: float  # 1 / (1 - rounded dropout_p)

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        """Apply dropout to P or dP."""
        return x if self.keep is None else (x * self.keep_scale).masked_fill_(~self.keep, 0)


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    causal: bool,
    options: ReferenceOptions,
    multiplied: list[torch.Tensor],
) -> Iterator[tuple[slice, slice, slice | torch.Tensor, _Chunk]]:
    """Yield (pairs, rows, keys, chunk) with at most about MAX_SCORES scores each.

    Args:
        q, k: by kv head, see _by_kv_head.
        multiplied: tensors that are multiplied by the weight 0 of masked keys. If one is not finite, a chunk is one row with just the keys
            that it sees, so that no 0 * NaN reaches it.
    Rows that see no key are in no chunk, unless there is a sink.
    """
    (pairs, group, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    if not pairs * group * seqlen_q or (not seqlen_k and options.sink is None):
        return
    offset = seqlen_k - seqlen_q if options.diagonal is None else options.diagonal
    # A row sees row + offset - left <= key <= row + offset + right
    reach = max(offset + seqlen_q, 0), max(seqlen_k - offset, 0)  # left, right of all rows
    left, right = (
        size if 0 <= size < most else most for size, most in zip(options.window, reach, strict=True)
    )
    right = 0 if causal else right
    slopes, sink = (
        None if x is None else x.reshape(-1, group, 1, 1).repeat(pairs * group // x.numel(), 1, 1, 1)
        for x in (options.alibi_slopes, options.sink)
    )
    keep = None if options.keep is None else options.keep.reshape(pairs, group, seqlen_q, seqlen_k)
    keep_scale = 256 / max(1, 256 - rounded_dropout(options.dropout_p))

    rows_per_chunk = max(1, min(seqlen_q, MAX_SCORES // max(1, group * seqlen_k)))
    hides = (left, right) != reach or options.hidden_keys or options.tree_mask is not None
    if hides and not all(bool(x.isfinite().all()) for x in multiplied):
        rows_per_chunk = 1
    pairs_per_chunk = max(1, MAX_SCORES // max(1, group * rows_per_chunk * seqlen_k))
    first = max(0, -offset - right) if sink is None else 0
    for pair in range(0, pairs, pairs_per_chunk):
        for row in range(first, seqlen_q, rows_per_chunk):
            pair_slice = slice(pair, pair + pairs_per_chunk)
            rows = slice(row, min(row + rows_per_chunk, seqlen_q))
            stop = min(max(0, rows.stop + offset + right), seqlen_k)
            keys = slice(min(max(options.hidden_keys, row + offset - left), stop), stop)
            diagonal = torch.arange(row + offset, rows.stop + offset, device=q.device)[:, None]
            key = torch.arange(keys.start, keys.stop, device=q.device)
            masked = (key < diagonal - left) | (key > diagonal + right)
            if options.tree_mask is not None:
                masked |= ~_sees_nodes(options.tree_mask[rows, None], key - (seqlen_k - seqlen_q))
                if rows_per_chunk == 1:
                    keys = key = key[~masked[0]]
                    masked = masked[:, ~masked[0]]
            chunk = _Chunk(
                scale,
                options.softcap,
                None if slopes is None else -slopes[pair_slice].double() * (diagonal - key).abs(),
                masked,
                None if sink is None else sink[pair_slice],
                None if keep is None else keep[pair_slice, :, rows, keys],
                keep_scale,
            )
            yield pair_slice, rows, keys, chunk


def _sees_nodes(bits: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """True where a query with these bits sees a node of a tree, by its number; negative numbers are those of the keys before the tree."""
    return (nodes < 0) | (bits >> nodes.clamp(min=0) & 1 != 0)


def _forward_of_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: _Chunk
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return out, lse, P and the tanh of the softcap.

    Args:
        q: [n, group, rows, head_dim].
        k, v: [n, 1, keys, head_dim or head_dim_v].
    Returns:
        P [n, group, rows, keys], with one more column if there is a sink.
    """
    scores, tanh = _scores(q, k, chunk)
    if chunk.sink is not None:
        sink = chunk.sink.to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    out = _times(chunk.dropout(weights[..., : k.shape[2]]), v)
    # In PyTorch the softmax of a row of -inf is NaN, and the logsumexp of a row with +inf is +inf
    out = out.masked_fill((lse == -math.inf)[..., None], 0)
    return out, lse.masked_fill(lse == math.inf, math.nan), weights, tanh


def _scores(q: torch.Tensor, k: torch.Tensor, chunk: _Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [n, group, rows, keys] of the softmax, without the sink, and the tanh of the softcap. Arguments: as for _forward_of_chunk."""
    scores, tanh = _times(q * chunk.scale, k.mT), None
    if chunk.softcap:
        tanh = (scores / chunk.softcap).tanh()
        scores = tanh * chunk.softcap
    if chunk.bias is not None:
        scores += chunk.bias
    return scores.masked_fill_(chunk.masked, -math.inf), tanh


def _backward_of_chunk(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunk: _Chunk,
    rounds_to: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq of these rows and their contribution to dk, dv and dsink.

    Args:
        dout: [n, group, rows, head_dim_v].
        dlse: [n, group, rows, 1].
        q, k, v: as for _forward_of_chunk.
        rounds_to: as for attention_backward_reference.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if rounds_to is None else x.to(rounds_to).to(x.dtype)

    out, lse, weights, tanh = _forward_of_chunk(q, k, v, chunk)
    weights.masked_fill_((lse == -math.inf)[..., None], 0)
    weights, sink_weight = weights.tensor_split([k.shape[2]], -1)  # [n, group, rows, keys] and 1 or 0 columns
    delta = (dout * rounded(out)).sum(-1, keepdim=True) - dlse
    dsink = -(sink_weight * delta).sum((2, 3), keepdim=True)
    dv = _times_over_rows(rounded(chunk.dropout(weights)), dout)
    dscores = chunk.dropout(_times(dout, v.mT)).sub_(delta).mul_(weights)
    if tanh is not None:
        dscores *= 1 - tanh.square()
    dscores = rounded(dscores)
    return _times(dscores, k) * chunk.scale, _times_over_rows(dscores, q) * chunk.scale, dv, dsink


def _times(x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Multiply x [n, group, rows, a] by shared [n, 1, a, b], in one matmul per group: [n, group, rows, b]."""
    return (x.flatten(1, 2) @ shared.squeeze(1)).unflatten(1, x.shape[1:3])


def _times_over_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum xᵀ y over the rows of a group: [n, group, rows, a] and [n, group, rows, b] to [n, 1, a, b]."""
    return (x.flatten(1, 2).mT @ y.flatten(1, 2)).unsqueeze(1)


@contextlib.contextmanager
def true_fp32(device: torch.device) -> Iterator[None]:
    """Disable TF32, bf16 and autocast in fp32 matmuls. fp32_precision covers all matmuls; reading allow_tf32 could raise."""
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
