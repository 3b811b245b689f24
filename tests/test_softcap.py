"""Error of a softcap on a Hopper GPU: that of tanh.approx, which docs/numerics.md states."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention import flash_attn_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu
TANH_RTOL = 2.0**-11  # of tanh.approx, by the PTX manual
ROUNDING = 2.0**-20  # of fp32, in a product and a log-sum-exp


@pytest.mark.parametrize("cap", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("cached", [False, True])
def test_softcap_scores_have_the_error_of_the_instruction(cap, cached):
    y = torch.cat([torch.logspace(-4, 1.5, 3000), torch.linspace(0.3, 0.7, 3000)]).cuda()
    for sign in (1, -1):
        q = torch.zeros(len(y), 1, 1, 128, device="cuda", dtype=torch.bfloat16)
        q[:, 0, 0, 0] = (sign * cap * y).bfloat16()
        key = torch.zeros_like(q)
        key[..., 0] = 1
        options = {"softmax_scale": 1.0, "softcap": cap, "causal": True, "num_splits": 1}
        if cached:
            _, lse = flash_attn_with_kvcache(q, key, key, cache_seqlens=1, return_softmax_lse=True, **options)
        else:
            _, lse, _ = flash_attn_func(q, key, key, return_attn_probs=True, **options)
        score = q[:, 0, 0, 0].double()  # with one key, its log-sum-exp is the capped score
        error = (lse.flatten().double() / (cap * (score / cap).tanh()) - 1).abs()
        assert error.max() <= TANH_RTOL + ROUNDING


def test_softcap_log_sum_exp_has_the_error_of_the_largest_score():
    q, k, v = (torch.randn(1, 700, 4, 128, device="cuda").bfloat16() for _ in range(3))
    for cap in (5.0, 50.0, 1000.0):
        _, lse, _ = flash_attn_func(q, k, v, causal=True, softcap=cap, num_splits=1, return_attn_probs=True)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 128**-0.5
        scores = cap * (scores / cap).tanh()
        hidden = torch.ones(700, 700, device="cuda").triu(1).bool()
        wanted = scores.masked_fill(hidden, -math.inf).logsumexp(-1)
        largest = scores.masked_fill(hidden, 0).abs().amax(-1)
        assert ((lse - wanted).abs() <= TANH_RTOL * largest + ROUNDING * wanted.abs().clamp(min=1)).all()
