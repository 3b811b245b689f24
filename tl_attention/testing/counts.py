"""FLOP, byte and roofline formulas of an attention problem."""

from __future__ import annotations

import math
from collections.abc import Callable

from tl_attention.problem.attn_problem import DECODE
from tl_attention.testing.shapes import Shape, sequences

PEAK_TFLOPS = 1071  # dense bf16 of an H200: 132 SMs x 4096 FLOP per clock x 1.98 GHz


def bounds(shape: Shape) -> tuple[float, float]:
    """Visible keys before and after the diagonal of a query, which is at key query + seqlen_k - seqlen_q."""
    window = math.inf if shape.options.window is None else shape.options.window
    return window, 0 if shape.causal else window


def visible_pairs(shape: Shape) -> int:
    """Visible (query, key) pairs of one head in all batch entries; causal and windows are bottom-right."""
    left, right = bounds(shape)
    return sum(
        _pairs_up_to(*lengths, right) - _pairs_up_to(*lengths, -left - 1) for lengths in sequences(shape)
    )


def _pairs_up_to(seqlen_q: int, seqlen_k: int, far: float) -> int:
    """Pairs whose key is at most `far` keys after the diagonal of the query."""

    if far >= seqlen_q:
        return seqlen_q * seqlen_k
    if far <= -seqlen_k:
        return 0

    def rising(start: int) -> int:
        """Sum of max(0, start + i) over the queries i = 1 .. seqlen_q."""
        first, last = max(0, start), max(0, start + seqlen_q)
        return (last * (last + 1) - first * (first + 1)) // 2

    return rising(seqlen_k - seqlen_q + int(far)) - rising(int(far) - seqlen_q)


def visible_blocks(shape: Shape, block_M: int = 128, block_N: int = 128) -> int:
    """Tiles of block_M queries x block_N keys with a visible pair, of one head in all batch entries."""
    left, right = bounds(shape)
    blocks = 0
    for seqlen_q, seqlen_k in sequences(shape):
        for first in range(0, seqlen_q, block_M):
            last = min(first + block_M, seqlen_q) - 1
            offset = seqlen_k - seqlen_q
            begin, end = max(0, first + offset - left), min(seqlen_k, last + offset + right + 1)
            if begin < end:
                blocks += math.ceil(end / block_N) - int(begin // block_N)
    return blocks


def share_of_blocks(shape: Shape) -> float:
    """Visible tiles over visible tiles of the plain problem: the ideal share of its time."""
    return visible_blocks(shape) / visible_blocks(shape.plain)


def fwd_flops(shape: Shape) -> int:
    """FLOPs of S = QKᵀ and O = PV, 2 per multiply-add, over the visible pairs of all batch entries and heads."""
    return 2 * visible_pairs(shape) * (shape.head_dim + shape.head_dim_v) * shape.heads_q


def bwd_flops(shape: Shape) -> int:
    """FLOPs of S = QKᵀ, dQ = dS K and dK = dSᵀQ over head_dim, and of dP = dO Vᵀ and dV = PᵀdO over head_dim_v."""
    return 2 * visible_pairs(shape) * (3 * shape.head_dim + 2 * shape.head_dim_v) * shape.heads_q


def flops(shape: Shape, direction: str) -> int:
    """FLOPs of a direction: one of shapes.DIRECTIONS, or DECODE."""
    if direction == DECODE:
        return fwd_flops(shape)
    return _of_passes(fwd_flops, bwd_flops, shape, direction)


def _qkv_bytes(shape: Shape) -> int:
    """Bytes of q, k and v, or of their gradients, 2 per element."""
    q = shape.heads_q * shape.seqlen_q * shape.head_dim
    kv = shape.heads_kv * shape.seqlen_k * (shape.head_dim + shape.head_dim_v)
    return 2 * shape.batch * (q + kv)


def _out_bytes(shape: Shape) -> int:
    """Bytes of out, or of its gradient, 2 per element."""
    return 2 * shape.batch * shape.heads_q * shape.seqlen_q * shape.head_dim_v


def _lse_bytes(shape: Shape) -> int:
    """Bytes of the fp32 log-sum-exp."""
    return 4 * shape.batch * shape.heads_q * shape.seqlen_q


def input_bytes(shape: Shape, direction: str = "fwd") -> int:
    """Bytes of the inputs of a call: q, k, v; for a backward also dout, and for a backward alone out and lse, too."""
    given = _qkv_bytes(shape)
    if "bwd" in direction:
        given += _out_bytes(shape)
    if "fwd" not in direction:
        given += _out_bytes(shape) + _lse_bytes(shape)
    return given


def fwd_bytes(shape: Shape) -> int:
    """Bytes of a forward: q, k, v read once, out and lse written once."""
    return _qkv_bytes(shape) + _out_bytes(shape) + _lse_bytes(shape)


def bwd_bytes(shape: Shape) -> int:
    """Bytes of a backward: dout, q, k, v, out and lse read once, dq, dk and dv written once."""
    return 2 * _qkv_bytes(shape) + 2 * _out_bytes(shape) + _lse_bytes(shape)


def decode_bytes(shape: Shape) -> int:
    """Bytes of a decode: keys and values of all sequences and q read once, out written once."""
    keys = shape.heads_kv * sum(seqlen_k for _, seqlen_k in sequences(shape))
    queries = shape.heads_q * shape.batch * shape.seqlen_q
    return 2 * (keys + queries) * (shape.head_dim + shape.head_dim_v)


def traffic(shape: Shape, direction: str) -> int:
    """Bytes of a direction: one of shapes.DIRECTIONS, or DECODE."""
    if direction == DECODE:
        return decode_bytes(shape)
    return _of_passes(fwd_bytes, bwd_bytes, shape, direction)


def _of_passes(fwd: Callable[[Shape], int], bwd: Callable[[Shape], int], shape: Shape, direction: str) -> int:
    return ("fwd" in direction) * fwd(shape) + ("bwd" in direction) * bwd(shape)


def intensity(shape: Shape, direction: str) -> float:
    """FLOPs per byte."""
    return flops(shape, direction) / traffic(shape, direction)


def fwd_ceiling(shape: Shape, block_M: int, block_N: int) -> tuple[float, float]:
    """Upper bounds in TFLOPS for a kernel with these tiles: (exponentials after the MMAs, exponentials overlapped with them).

    An SM does 4096 tensor FLOPs or 16 exp2 per clock. A tile with a visible pair is computed whole.
    Source: Shah et al. 2024 (FlashAttention-3), section 3.1, with the numbers of an H200 at its boost clock.
    """
    mma = 2 * (shape.head_dim + shape.head_dim_v) / 4096  # clocks per score
    exp = 1 / 16
    executed = visible_blocks(shape, block_M, block_N) * block_M * block_N
    useful = PEAK_TFLOPS * visible_pairs(shape) / executed if executed else 0.0
    return useful * mma / (mma + exp), useful * mma / max(mma, exp)
