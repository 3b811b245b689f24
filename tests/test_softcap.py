"""Softcaps: the polynomial of steps that hold the row max, and on a Hopper GPU the errors that docs/numerics.md states."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention import flash_attn_func, flash_attn_with_kvcache
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.kernels.scores.softcap import COEFFICIENTS, LARGEST, PolynomialCap
from tl_attention.problem.attn_problem import AttnProblem

TANH_RTOL = 2.0**-11  # of tanh.approx, by the PTX manual
ROUNDING = 2.0**-20  # of fp32, in a product and a log-sum-exp


def polynomial(x):
    c0, c1, c2 = COEFFICIENTS
    return x * (c0 + c1 * x**2 + c2 * x**4)


def test_polynomial_is_close_to_tanh_and_increases_beyond_its_range():
    x = torch.linspace(1e-3, LARGEST, 10_001, dtype=torch.float64)
    assert (polynomial(x) / x.tanh() - 1).abs().max() < 2.2e-4
    beyond = torch.cat([x, torch.logspace(math.log10(LARGEST), 9, 10_001, dtype=torch.float64)])
    assert (polynomial(beyond).diff() >= 0).all()


def test_polynomial_serves_steps_that_hold_the_row_max():
    config = FwdConfig(128, 128, hold_max=True, schedule="dynamic")
    assert PolynomialCap.serves(
        AttnProblem("bfloat16", 128, 128, True, ("window", "softcap", "varlen")), config
    )
    assert not PolynomialCap.serves(AttnProblem("bfloat16", 128, 128, True, ("softcap", "alibi")), config)
    assert not PolynomialCap.serves(AttnProblem("float32-high", 128, 128, True, ("softcap",)), config)
    assert not PolynomialCap.serves(
        AttnProblem("bfloat16", 128, 128, True, ("softcap",)), FwdConfig(128, 128)
    )


INPUTS = [
    "normal", "twice", "eight times", "30 times", "some rows", "late steps", "step 0", "one key", "negative", "late negative",
    "negative scale",
]  # fmt: skip


def score_inputs(name, length, width):
    """q, k, v whose scores are within the polynomial's range at cap 50, beyond it, or beyond it in few rows or steps."""
    q, k, v = (torch.randn(1, length, 2, width, device="cuda").bfloat16() for _ in range(3))
    if name in ("twice", "eight times", "30 times"):
        q *= {"twice": 2, "eight times": 8, "30 times": 30}[name]
    elif name == "some rows":
        q[:, ::7] *= 12
    elif name == "late steps":  # those of the first keys, so step 0 predicts that all are in range
        k[:, : length // 2] *= 10
    elif name == "step 0":
        k[:, -100:] *= 10
    elif name == "one key":
        k[:, length // 3] *= 20
    elif name in ("negative", "late negative"):
        q, k = q.abs(), -k.abs()
        if name == "late negative":
            k[:, -128:] *= -1
    elif name == "negative scale":
        k *= -1
    return q, k, v


@pytest.mark.gpu
@pytest.mark.parametrize(
    "widths", [(64, 64), (96, 96), (96, 64), (128, 128), (192, 192), (192, 128), (256, 128)], ids=str
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("name", INPUTS)
def test_softcap_is_right_in_and_out_of_the_range_of_the_polynomial(name, mask, widths):
    torch.manual_seed(0)
    # Windows of d64 hold the row max where there are more than 1024 keys
    length = 2900 if mask == "window" else 1100
    width, width_v = widths
    q, k, v = score_inputs(name, length, width)
    v = v[..., :width_v]
    scale = width**-0.5 * (-1 if name == "negative scale" else 1)
    visible = torch.ones(length, length, device="cuda").bool()
    options = {"causal": mask == "causal"}
    if mask == "causal":
        visible = visible.tril()
    elif mask == "window":
        options["window_size"] = left, right = 777, 30
        visible = visible.triu(-left).tril(right)
    for cap in (5.0, 20.0, 30.0, 50.0, 1000.0):
        named = {"softcap": cap, "softmax_scale": scale, "num_splits": 1, "return_attn_probs": True}
        out, lse, _ = flash_attn_func(q, k, v, **options, **named)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale
        scores = (cap * (scores / cap).tanh()).masked_fill(~visible, -math.inf)
        wanted = scores.softmax(-1) @ v.double().transpose(1, 2)
        error = (out.double().transpose(1, 2) - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
        assert error < 6e-3
        largest = scores.masked_fill(~visible, 0).abs().amax(-1)
        log_sum = scores.logsumexp(-1)
        assert ((lse - log_sum).abs() <= TANH_RTOL * largest + 2e-4 + ROUNDING * log_sum.abs()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_softcap_keeps_nan_and_inf_in_their_rows(bad):
    q, k, v = (torch.randn(1, 900, 2, 128, device="cuda").bfloat16() for _ in range(3))
    clean = flash_attn_func(q, k, v, softcap=50.0, num_splits=1)
    q[0, 300, 0, 0] = bad  # scores of both signs are cap and -cap, or all are NaN
    out = flash_attn_func(q, k, v, softcap=50.0, num_splits=1)
    rows = torch.ones(900, device="cuda").bool()
    rows[300] = False
    assert (out[0, rows] - clean[0, rows]).abs().max() < 2e-2
    assert out[0, 300, 0].isnan().all() if math.isnan(bad) else out[0, 300, 0].isfinite().all()


@pytest.mark.gpu
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


@pytest.mark.gpu
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
