"""Scores so large that exponents of fp32 have no fraction: no NaN from finite input, and a key alone has the whole weight."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
HUGE = 133120.0  # a score is 2^31 * 528 at d64
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 40)},
    "sink": {"learnable_sink": torch.zeros(2)},
    "slopes": {"alibi_slopes": torch.full((2,), 0.5), "causal": True},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(7)
    return request.param


def moved(options, device):
    return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_scores_of_one_key(head_dim, dtype, device):
    x = torch.full((1, 1, 1, head_dim), HUGE, device=device, dtype=dtype, requires_grad=True)
    out = flash_attn_func(x, x, x)
    torch.testing.assert_close(out, x)
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("seqlen_k", [70, 300, 1300])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_large_scores_of_many_keys(head_dim, name, seqlen_k, device):
    """Keys of all magnitudes from 1 to HUGE, so that the row max grows into the range from block to block."""
    size = torch.logspace(0, math.log10(HUGE), seqlen_k, device=device).bfloat16()[None, :, None, None]
    q = torch.full((1, 65, 2, head_dim), HUGE, device=device, dtype=torch.bfloat16, requires_grad=True)
    k = (size * torch.ones(2, head_dim, device=device, dtype=torch.bfloat16)).requires_grad_()
    v = torch.randn(1, seqlen_k, 2, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **moved(CALLS[name], device))
    assert out.isfinite().all() and lse.isfinite().all()
    for grad in torch.autograd.grad(out.float().sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_scores_of_one_outlier(dtype, device):
    """A key whose score is 2^22 above all others has the whole weight; packed, and with a cache."""
    q, k, v = (torch.randn(200, 2, 64, device=device, dtype=dtype) for _ in range(3))
    q[:], k[77] = 512.0, 1024.0
    starts = torch.tensor([0, 200], device=device, dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, starts, starts, 200, 200)
    torch.testing.assert_close(out, v[77].expand_as(out))
    lengths = torch.tensor([200], device=device, dtype=torch.int32)
    out = flash_attn_with_kvcache(q[:1][None], k[None], v[None], cache_seqlens=lengths)
    torch.testing.assert_close(out[0, 0], v[77])
