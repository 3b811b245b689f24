"""Rows of packed tensors behind the last sequence: out and gradients 0, log-sum-exp -inf, and their values change nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
LENGTHS = 100, 0, 1, 215
LONGEST = max(LENGTHS)
BEHIND = 1, 44, 700  # rows
HEADS, HEADS_KV = 4, 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(5)
    return request.param


def packed(device, dtype, widths, behind, fill):
    """q, k, v, dout of `behind` rows more than the sequences have, `fill` in these, and cu_seqlens."""
    rows = sum(LENGTHS) + behind
    width, width_v = widths
    made = []
    for heads, columns in ((HEADS, width), (HEADS_KV, width), (HEADS_KV, width_v), (HEADS, width_v)):
        x = torch.randn(rows, heads, columns, device=device, dtype=dtype)
        x[sum(LENGTHS) :] = fill
        made.append(x)
    starts = torch.tensor((0, *LENGTHS), device=device).cumsum(0, dtype=torch.int32)
    return made, starts


def attend(tensors, starts, **options):
    """out, lse and the gradients; freed memory holds NaN before."""
    *qkv, dout = (x.detach() for x in tensors)
    qkv = [x.requires_grad_() for x in qkv]
    if dout.is_cuda:
        torch.full((1 << 22,), math.nan, device="cuda")
    lengths = starts, starts, LONGEST, LONGEST
    out, lse, _ = flash_attn_varlen_func(*qkv, *lengths, return_attn_probs=True, **options)
    if dout.is_cuda:
        torch.full((1 << 22,), math.nan, device="cuda")
    return out, lse, *torch.autograd.grad(out, qkv, dout)


CALLS = {
    "causal": (torch.bfloat16, (64, 64), {"causal": True}),
    "full": (torch.bfloat16, (128, 128), {}),
    "window": (torch.bfloat16, (128, 128), {"window_size": (30, 10)}),
    "sink": (torch.bfloat16, (64, 64), {"causal": True, "learnable_sink": torch.tensor([0.5, -1, 2, 0])}),
    "slopes": (torch.bfloat16, (64, 64), {"alibi_slopes": torch.rand(len(LENGTHS), HEADS)}),
    "dropout": (torch.bfloat16, (128, 128), {"dropout_p": 0.25, "rng_state": torch.tensor([3, 4])}),
    "deterministic": (torch.bfloat16, (128, 128), {"causal": True, "deterministic": True}),
    "splits": (torch.bfloat16, (128, 128), {"causal": True, "num_splits": 3}),
    "used": (torch.bfloat16, (64, 64), {"seqused_q": torch.tensor([90, 0, 1, 200], dtype=torch.int32)}),
    "d96": (torch.bfloat16, (96, 96), {"causal": True}),
    "d192-128": (torch.bfloat16, (192, 128), {"causal": True}),
    "d256": (torch.float16, (256, 256), {"causal": True}),
    "odd width": (torch.bfloat16, (44, 44), {"causal": True}),
    "fp32": (torch.float32, (64, 64), {"causal": True}),
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("name", CALLS)
def test_rows_behind_are_cleared_and_not_read(name, behind, device):
    dtype, widths, options = CALLS[name]
    options = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }
    tensors, starts = packed(device, dtype, widths, behind, math.nan)
    end = sum(LENGTHS)
    out, lse, *grads = attend(tensors, starts, **options)
    for x in (out, *grads):
        assert (x[end:] == 0).all() and x[:end].isfinite().all()
    assert (lse[:, end:] == -math.inf).all() and not lse[:, :end].isnan().any()
    alone = attend([x[:end] for x in tensors], starts, **options)
    exact = "deterministic" in options
    for x, y in zip((out, lse.mT, *grads), (alone[0], alone[1].mT, *alone[2:]), strict=True):
        tolerance = {"rtol": 0, "atol": 0 if exact else 2e-2}
        torch.testing.assert_close(x[:end], y, **tolerance)


def test_rows_behind_are_cleared_in_out(device):
    (q, k, v, _), starts = packed(device, torch.bfloat16, (64, 64), 50, math.nan)
    out = torch.full_like(q, math.nan)
    flash_attn_varlen_func(q, k, v, starts, starts, LONGEST, LONGEST, causal=True, out=out)
    assert (out[sum(LENGTHS) :] == 0).all() and out[: sum(LENGTHS)].isfinite().all()


def test_rows_behind_packed_qkv_are_cleared(device):
    (q, *_), starts = packed(device, torch.bfloat16, (64, 64), 50, math.nan)
    qkv = torch.stack([q, q, q], 1).requires_grad_()
    out = flash_attn_varlen_qkvpacked_func(qkv, starts, LONGEST, causal=True)
    (grad,) = torch.autograd.grad(out[: sum(LENGTHS)].float().sum(), qkv)
    assert (out[sum(LENGTHS) :] == 0).all() and (grad[sum(LENGTHS) :] == 0).all()
    assert grad.isfinite().all()


def test_rows_behind_are_cleared_without_keys(device):
    """With a sink, the log-sum-exp of a query that sees no key is the sink, behind the last sequence -inf."""
    q = torch.randn(9, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(0, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    starts_q, starts_k = (torch.tensor(x, device=device, dtype=torch.int32) for x in ([0, 6], [0, 0]))
    sink = torch.tensor([1.0, -2.0], device=device, requires_grad=True)
    lengths = starts_q, starts_k, 6, 0
    out, lse, _ = flash_attn_varlen_func(q, k, v, *lengths, learnable_sink=sink, return_attn_probs=True)
    assert (out == 0).all() and (lse[:, 6:] == -math.inf).all()
    torch.testing.assert_close(lse[:, :6], sink.detach()[:, None].expand(-1, 6))
    (grad,) = torch.autograd.grad(lse[:, :6].sum(), sink)
    torch.testing.assert_close(grad, torch.full_like(sink, 6.0))
