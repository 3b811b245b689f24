"""Gradients where dP - delta cancels: the bound of docs/numerics.md, for an emulation of the kernels' arithmetic and for the kernels."""

from __future__ import annotations

import pytest
import torch

from tl_attention import mha_bwd_interface, mha_fwd_interface
from tl_attention.reference import attention_backward_reference

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16, FP16 = torch.bfloat16, torch.float16
UNIT = {BF16: 2**-8, FP16: 2**-11}  # largest relative error of rounding
TINY = {BF16: 0.0, FP16: 2**-25}  # largest absolute error of rounding a number below the normal ones
SLACK = 1.05  # second-order terms, and sums in fp32
HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 3, 50, 200, 64
SCALE = HEAD_DIM**-0.5


def inputs(case, dtype):
    """dout, q, k, v [1, heads, seqlen, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    sizes = [SEQLEN_Q, SEQLEN_Q, SEQLEN_K, SEQLEN_K]
    dout, q, k, v = (torch.randn(1, HEADS, n, HEAD_DIM, generator=generator) for n in sizes)
    if case == "equal-values":  # O = v is exact, and dP = delta for every key: dq and dk are 0
        v = v[:, :, :1].expand_as(v)
    elif case == "nearly-equal-values":
        v = v[:, :, :1] + v / 64
    elif case == "one-key":  # P is nearly 1 for one key, where dP = delta
        q = k[:, :, :SEQLEN_Q] * 2
    elif case == "average":  # P = 1 / seqlen_k, and v and k have means far from 0
        q, k, v = q / 1000, k + 3, v + 3
    elif case == "large-average":
        q, k, v = q / 1000, k + 30, v + 30
    return [x.to(dtype) for x in (dout, q, k, v)]


def rounded(x, dtype):
    return x.to(dtype).float()


def emulated(dout, q, k, v):
    """dq and dk by the kernels' arithmetic: P for O, O, and dS are rounded, P for dS is not."""
    dtype, (dout, q, k, v) = q.dtype, (x.float() for x in (dout, q, k, v))
    scores = SCALE * (q @ k.mT)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = rounded((rounded(weights, dtype) @ v) / weights.sum(-1, keepdim=True), dtype)
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = rounded((scores - lse).exp() * (dout @ v.mT - delta), dtype)
    return [rounded(SCALE * x, dtype) for x in (dscores @ k, dscores.mT @ q)]


def exact_and_bounds(dout, q, k, v):
    """(dq, dk) in fp64, and the bounds of their errors."""
    u, tiny = UNIT[q.dtype], TINY[q.dtype]
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    weights = (SCALE * (q @ k.mT)).softmax(-1)
    delta = (dout * (weights @ v)).sum(-1, keepdim=True)
    differences = dout @ v.mT - delta
    dscores = weights * differences
    of_delta = 2 * u * (dout.abs() * (weights @ v.abs())).sum(-1, keepdim=True)
    of_delta += tiny * (dout.abs() * v.abs().sum(2, keepdim=True)).sum(-1, keepdim=True)  # P of small weights
    of_scores = weights * of_delta + u * dscores.abs() + tiny
    dq, dk = SCALE * dscores @ k, SCALE * dscores.mT @ q
    bounds = SCALE * of_scores @ k.abs(), SCALE * of_scores.mT @ q.abs()
    # fp32 sums of dP and scores, which matter where a term above is 0
    small = 2**-20 * SCALE * (dout.abs() @ v.abs().mT * weights)
    floors = small @ k.abs(), small.mT @ q.abs()
    return (dq, dk), [
        SLACK * (bound + u * x.abs()) + floor
        for x, bound, floor in zip((dq, dk), bounds, floors, strict=True)
    ]


CASES = ["random", "equal-values", "nearly-equal-values", "one-key", "average", "large-average"]
cases = pytest.mark.parametrize("case", CASES)
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def assert_within(grads, exact, bounds):
    for name, x, y, bound in zip(("dq", "dk"), grads, exact, bounds, strict=True):
        excess = ((x.double() - y).abs() / bound).max()
        assert excess <= 1, f"{name}: error {excess:.2f} of the bound"


@cases
@dtypes
def test_cancellation_of_the_emulated_kernels(case, dtype):
    tensors = inputs(case, dtype)
    assert_within(emulated(*tensors), *exact_and_bounds(*tensors))


def test_cancellation_may_exceed_the_gradient():
    """The bound is not pessimistic: with bf16 values far from 0 no digit is correct, in FlashAttention-2's arithmetic either."""
    tensors = inputs("large-average", BF16)
    (dq, _), (bound, _) = exact_and_bounds(*tensors)
    error = (emulated(*tensors)[0].double() - dq).abs()
    assert error.max() > dq.abs().max() and (error / bound).max() > 0.03


@cases
@dtypes
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cancellation_of_the_public_backward(case, dtype, deterministic, device):
    """Kernels on a GPU; the reference, which does not round O, on the CPU."""
    dout, q, k, v = tensors = [x.to(device) for x in inputs(case, dtype)]
    out, lse = mha_fwd_interface(q, k, v)
    grads = mha_bwd_interface(dout, q, k, v, out, lse, deterministic=deterministic)
    assert_within(grads[:2], *exact_and_bounds(*tensors))


def test_cancellation_formula_is_that_of_the_reference():
    tensors = inputs("random", BF16)
    (dq, dk), _ = exact_and_bounds(*tensors)
    views = (x.transpose(1, 2) for x in tensors)
    wanted = [x.transpose(1, 2) for x in attention_backward_reference(*views, dtype=torch.float64)]
    torch.testing.assert_close((dq, dk), tuple(wanted[:2]), rtol=1e-9, atol=1e-12)
