"""Softcaps: the polynomial of steps that hold the row max, and on a Hopper GPU the errors that docs/numerics.md states."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tl_attention import configs, flash_attn_func, flash_attn_with_kvcache, legality
from tl_attention.compilation import compiler
from tl_attention.kernel_configs import FwdConfig
from tl_attention.kernels.softcap import (
    COEFFICIENTS,
    LARGEST,
    LARGEST_CUBIC,
    PolynomialCap,
    cubic_coefficients,
)
from tl_attention.problem import AttnProblem

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


@pytest.mark.parametrize("cap", [19.7, 20.0, 30.0, 50.0, 1000.0, 1e6])
def test_cubic_is_close_to_tanh_and_increases_beyond_its_range(cap):
    largest = (LARGEST_CUBIC / cap) ** 0.2
    b0, b1 = cubic_coefficients(largest**2)
    x = torch.linspace(1e-3, 1, 10_001, dtype=torch.float64) * largest
    error = x * (b0 + b1 * x**2) / x.tanh() - 1
    assert error.abs().max() <= 1.01 * (1 - b0) + 2e-8 and 1 - b0 < 6e-4
    assert (error * x.tanh()).abs().max() * cap < 6e-3
    for limit in (0.5, 0.7, 1.0):  # of |x|, by the unit of raw scores
        beyond = torch.cat([x, torch.logspace(math.log10(largest), 9, 10_001, dtype=torch.float64)])
        assert (
            (beyond * (b0 + b1 * (beyond / limit).square().clamp(max=1) * limit**2)).diff() > -1e-15
        ).all()


def test_cubic_serves_long_sequences_of_d64_and_d128_in_bf16():
    for problem, bucket, expected in (
        (AttnProblem("bfloat16", 64, 64, True, ("softcap",)), "4k", True),
        (AttnProblem("bfloat16", 128, 128, False, ("softcap",)), "long", True),
        (AttnProblem("bfloat16", 128, 128, True, ("softcap",)), "1k", False),
        (AttnProblem("bfloat16", 128, 128, True, ("softcap",)), "split", False),
        (AttnProblem("bfloat16", 128, 128, True, ("window", "softcap")), "long", False),
        (AttnProblem("float16", 128, 128, True, ("softcap",)), "long", False),
        (AttnProblem("bfloat16", 256, 256, True, ("softcap",)), "long", False),
    ):
        assert configs.pick_config(problem, bucket, "NVIDIA H200", "fwd")[0].cubic_cap == expected


def test_cubic_needs_a_softcap_alone_and_a_held_row_max():
    config = FwdConfig(128, 128, hold_max=True, schedule="dynamic", cubic_cap=True)
    assert legality.fault(AttnProblem("bfloat16", 128, 128, True, ("softcap",)), config) is None
    for options in ((), ("softcap", "alibi")):
        assert "cubic_cap" in legality.fault(AttnProblem("bfloat16", 128, 128, True, options), config)
    problem = AttnProblem("bfloat16", 128, 128, True, ("softcap", "varlen"))
    assert "cubic_cap" in legality.fault(problem, FwdConfig(128, 128, schedule="dynamic", cubic_cap=True))
    assert legality.fault(problem, config.paged(problem, 16)) is None
    assert not config.paged(problem, 16).cubic_cap and config.paged(problem, 0) == config
    assert not config.without_hold_max().cubic_cap


def test_cubic_adds_no_fence_beside_that_of_the_scaled_tile():
    problem = AttnProblem("bfloat16", 64, 64, False, ("softcap",))
    config = FwdConfig(192, 128, schedule="dynamic", q_stages=2, ping_pong=True, hold_max=True)
    plain, cubic = (
        compiler.lower(problem, replace(config, cubic_cap=cubic_cap))[0] for cubic_cap in (False, True)
    )
    assert "__saturatef" in cubic and "__saturatef" not in plain
    assert "tl_attention_scale_tile<4>((" in cubic
    assert cubic.count("tl::fence_proxy_async()") <= plain.count("tl::fence_proxy_async()")


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
    "normal", "twice", "eight times", "30 times", "some rows", "late steps", "step 0", "one key", "five times one key", "negative",
    "late negative", "negative scale",
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
    elif name == "five times one key":  # beyond the range of the cubic alone
        k[:, length // 3] *= 5
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
        rtol = max(TANH_RTOL, 1 - cubic_coefficients((LARGEST_CUBIC / max(cap, 20)) ** 0.4)[0])
        assert ((lse - log_sum).abs() <= rtol * largest + 2e-4 + ROUNDING * log_sum.abs()).all()


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
