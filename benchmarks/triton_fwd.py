"""FlashAttention-2's forward in Triton, as a Triton user would write it for Hopper, with a small autotune grid.

One program a tile of BLOCK_M queries of one head, the longest first; the keys stream by in blocks of BLOCK_N,
those that need no mask in a loop of their own. Source: Dao 2023 (FlashAttention-2), algorithm 1.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

GRID = [  # BLOCK_M, BLOCK_N, warps, stages
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 4, 3),
    (64, 64, 4, 3),
    (128, 32, 8, 3),
]
SMEM_LIMIT = 232448  # bytes


def _fitting(configs: list[triton.Config], _named_args: dict, **meta: int) -> list[triton.Config]:
    """The configs whose Q tile and ring of K and V blocks fit into shared memory."""

    def smem(config: triton.Config) -> int:
        block_m, block_n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
        return 2 * (block_m * meta["PAD"] + config.num_stages * block_n * (meta["PAD"] + meta["PAD_V"]))

    return [config for config in configs if smem(config) <= SMEM_LIMIT]


@triton.jit
def _load(base, rows, stop, MASKED: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """Rows of a [stop, DIM] matrix as [len(rows), PAD], zeros outside of it; all rows exist if not MASKED."""
    columns = tl.arange(0, PAD)[None, :]
    pointers = base + rows[:, None].to(tl.int64) * DIM + columns
    if MASKED:
        return tl.load(pointers, mask=(rows[:, None] < stop) & (columns < DIM), other=0.0)
    if PAD != DIM:
        return tl.load(pointers, mask=columns < DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend(
    state,  # acc [BLOCK_M, PAD_V], row_max [BLOCK_M] in base 2, row_sum [BLOCK_M]
    q,  # [BLOCK_M, PAD]
    K,
    V,
    start,
    stop,
    seqlen_k,
    last_key,  # [BLOCK_M]: what a query sees last under a causal mask
    scale_log2,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD: tl.constexpr,
    PAD_V: tl.constexpr,
):
    acc, row_max, row_sum = state
    for n in range(start, stop, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        k = _load(K, keys, seqlen_k, MASKED, DIM, PAD)
        scores = tl.dot(q, k.T)
        if MASKED:
            seen = keys[None, :] < seqlen_k
            if CAUSAL:
                seen = seen & (keys[None, :] <= last_key[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key
        p = tl.exp2(scores * scale_log2 - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, 1)
        v = _load(V, keys, seqlen_k, MASKED, DIM_V, PAD_V)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.autotune(
    [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in GRID
    ],
    key=["DIM", "DIM_V", "CAUSAL", "long"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["long"])
def _flash_fwd(
    Q,
    K,
    V,
    Out,
    Lse,
    heads_q,
    group,  # query heads that share a key head
    seqlen_q,
    seqlen_k,
    scale_log2,
    long,  # a length bucket, for the tuner alone
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of batch * heads_q
    head_k = head // heads_q * (heads_q // group) + head % heads_q // group
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    queries = first + tl.arange(0, BLOCK_M)
    offset = seqlen_k - seqlen_q

    q = _load(Q + head * seqlen_q * DIM, queries, seqlen_q, True, DIM, PAD)
    K += head_k * seqlen_k * DIM
    V += head_k * seqlen_k * DIM_V
    stop = seqlen_k
    unmasked = seqlen_k
    if CAUSAL:
        stop = tl.maximum(0, tl.minimum(seqlen_k, first + BLOCK_M + offset))
        unmasked = tl.maximum(0, tl.minimum(seqlen_k, first + 1 + offset))
    unmasked = unmasked // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, PAD_V], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    state = (acc, row_max, row_sum)
    for MASKED in tl.static_range(2):
        start, end = (unmasked, stop) if MASKED else (0, unmasked)
        state = _attend(
            state, q, K, V, start, end, seqlen_k, queries + offset, scale_log2,
            MASKED, CAUSAL, BLOCK_N, DIM, DIM_V, PAD, PAD_V,
        )  # fmt: skip
    acc, row_max, row_sum = state

    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    columns = tl.arange(0, PAD_V)[None, :]
    pointers = Out + head * seqlen_q * DIM_V + queries[:, None].to(tl.int64) * DIM_V + columns
    tl.store(pointers, out.to(Out.dtype.element_ty), mask=(queries[:, None] < seqlen_q) & (columns < DIM_V))
    tl.store(Lse + head * seqlen_q + queries, lse, mask=queries < seqlen_q)


def flash_attn_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    config: triton.Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ / sqrt(head_dim) + mask) v.

    Args:
        q: [batch, heads_q, seqlen_q, head_dim], contiguous, fp16 or bf16; lengths from 1 up.
        k, v: [batch, heads_kv, seqlen_k, head_dim or head_dim_v]; heads_q % heads_kv == 0.
        causal: bottom-right.
        config: the blocks; None tunes over GRID, once a class of head dims, mask and length.
    Returns:
        out [batch, heads_q, seqlen_q, head_dim_v]; lse [batch, heads_q, seqlen_q], fp32, natural log. A row
        with no key: 0 and -inf.
    Raises:
        ValueError: an input is not contiguous.
    """
    if not all(tensor.is_contiguous() for tensor in (q, k, v)):
        raise ValueError("q, k, v: expected contiguous tensors [batch, heads, seqlen, head_dim]")
    batch, heads_q, seqlen_q, dim = q.shape
    _, heads_kv, seqlen_k, dim_v = v.shape
    out = q.new_empty(batch, heads_q, seqlen_q, dim_v)
    lse = q.new_empty(batch, heads_q, seqlen_q, dtype=torch.float32)
    pad, pad_v = (max(16, triton.next_power_of_2(size)) for size in (dim, dim_v))
    kernel, blocks = (_flash_fwd, {}) if config is None else (_flash_fwd.fn, config.all_kwargs())
    kernel[lambda meta: (batch * heads_q * triton.cdiv(seqlen_q, meta["BLOCK_M"]),)](
        *(q, k, v, out, lse),
        *(heads_q, heads_q // heads_kv, seqlen_q, seqlen_k),
        scale_log2=dim**-0.5 * math.log2(math.e),
        long=int(seqlen_k > 2048),
        CAUSAL=causal,
        DIM=dim,
        DIM_V=dim_v,
        PAD=pad,
        PAD_V=pad_v,
        **blocks,
    )
    return out, lse
