"""Gradients of traced functions: loads that learn beside loads that do not, choices not taken, ties, and sums of 16-bit tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tl_attention import flex_attention
from tl_attention.reference.flex import new_scores
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors")
HEADS, ROWS = 4, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
of_device = pytest.mark.parametrize("device", DEVICES)


def qkv(device: str, dtype=None) -> list[torch.Tensor]:
    dtype = dtype or {"cpu": torch.float32, "cuda": torch.bfloat16}[device]
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, HEADS, ROWS, 64, generator=generator).to(device, dtype).requires_grad_()
        for _ in range(3)
    ]


def positions(device: str) -> list[torch.Tensor]:
    sizes = 2, HEADS, ROWS, ROWS
    return [
        torch.arange(n, device=device).view([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate(sizes)
    ]


# Loads of one element that learn, and that do not, in both orders
DETACHED = {
    "after": lambda t, s, h, k: s + 2 * t[h, k] + t.detach()[h, k],
    "before": lambda t, s, h, k: s + t.detach()[h, k] + 2 * t[h, k],
    "of an element": lambda t, s, h, k: s * t[h, k].detach() + t[h, k],
    "of a row": lambda t, s, h, k: s + t[h].detach()[k] * t[h, k],
    "of the score": lambda t, s, h, k: s.detach() * t[h, k] + s,
    "of a product": lambda t, s, h, k: (s * t[h, k]).detach() + s * t[h, k],
}


@of_device
@pytest.mark.parametrize("name", DETACHED)
def test_gradients_of_detached_loads_beside_learned_ones(name, device):
    table = torch.randn(HEADS, ROWS, device=device, requires_grad=True)
    q, k, v = inputs = qkv(device)
    function = DETACHED[name]
    out = flex_attention(q, k, v, lambda s, b, h, i, j: function(table, s, h, j))
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (*inputs, table), dout)

    exact = [x.detach().double().requires_grad_() for x in (*inputs, table)]
    scores, whole = exact[0] @ exact[1].mT / 8, exact[3][:, None, :]
    of_whole = {
        "after": lambda: scores + 2 * whole + whole.detach(),
        "before": lambda: scores + whole.detach() + 2 * whole,
        "of an element": lambda: scores * whole.detach() + whole,
        "of a row": lambda: scores + whole.detach() * whole,
        "of the score": lambda: scores.detach() * whole + scores,
        "of a product": lambda: (scores * whole).detach() + scores * whole,
    }
    expected = of_whole[name]().softmax(-1) @ exact[2]
    for x, y in zip(found, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        error = (x.double() - y).norm() / y.norm()
        assert error < (1e-5 if device == "cpu" else 3e-2), error


def test_gradients_of_a_load_that_is_only_detached_are_not_asked_for():
    table = torch.randn(HEADS, requires_grad=True)
    alone = trace(lambda s, b, h, q, k: s + table.detach()[h], None, True)
    assert alone.program.gradients == () and alone.program.slope is None
    assert [x.op for x in alone.program.values].count("load") == 1
    plain = trace(lambda s, b, h, q, k: s + table[h], None, True)
    assert plain.program.forward == alone.program.forward, "one kernel"


# Activations whose formula has a branch that is not taken, or a tie; scores from -200 to 200, and 0
CHOICES = {
    "softplus": F.softplus,
    "elu": F.elu,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardtanh": lambda s: F.hardtanh(s, -3.5, 3.5),
    "hardswish": F.hardswish,
    "clamp": lambda s: torch.clamp(s, -4.0, 4.0),
    "clamp_min": lambda s: s.clamp(min=0.0),
    "clamp_max": lambda s: s.clamp(max=1.0),
    "logaddexp": lambda s: torch.logaddexp(s, s * 0.5),
    "nan_to_num": lambda s: torch.nan_to_num(s),
    "xlogy": lambda s: torch.xlogy(s, s.abs() + 1),
}
AT = torch.cat(
    [torch.linspace(-200, 200, 801), torch.tensor([20.0, -20.0, 1.0, -3.5, 3.5, 4.0, -4.0, 88.5, 120.0])]
)


def slopes_at(function, at: torch.Tensor) -> torch.Tensor:
    call = trace(lambda s, b, h, q, k: function(s), None, True)
    x = at.view(1, 1, 1, -1).clone().requires_grad_()
    (slope,) = torch.autograd.grad(new_scores(x, call).sum(), x)
    return slope.flatten()


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_of_activations_are_those_of_torch(name):
    x = AT.clone().requires_grad_()
    (expected,) = torch.autograd.grad(CHOICES[name](x).sum(), x)
    found = slopes_at(CHOICES[name], AT)
    if name in ("hardtanh", "hardswish"):  # torch counts a bound as beyond it there, and within it in clamp
        is_bound = torch.isin(AT.abs(), torch.tensor([3.0, 3.5]))
        found, expected = found[~is_bound], expected[~is_bound]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_gradients_of_a_branch_that_is_not_taken_are_zero():
    """0 * inf of the other branch is not computed, as in PyTorch's own activations."""
    at = torch.tensor([-5.0, 0.0, 4.0, 100.0, 1e4])
    root = slopes_at(lambda s: torch.where(s > 0, s.sqrt(), 0.0 * s.detach()), at)
    torch.testing.assert_close(root, torch.tensor([0.0, 0.0, 0.25, 0.05, 0.005]))
    nested = slopes_at(
        lambda s: torch.where(s > 0, torch.where(s < 10, s.exp(), s * 2), s.log() * 0 + s * 3), at
    )
    torch.testing.assert_close(nested, torch.tensor([3.0, math.nan, math.exp(4.0), 2.0, 2.0]), equal_nan=True)
    shared = slopes_at(lambda s: torch.where(s > 50, s, (s * s).exp().log()), at)
    torch.testing.assert_close(shared, torch.tensor([-10.0, 0.0, 8.0, 1.0, 1.0]))


@of_device
@pytest.mark.parametrize("name", ["softplus", "elu", "mish"])
def test_gradients_are_finite_where_scores_are_large(name, device):
    q = torch.full((1, 1, 2, 64), 1.5, device=device, dtype=torch.bfloat16, requires_grad=True)
    x = q.detach()
    out = flex_attention(q, x, x, lambda s, *_: CHOICES[name](s), scale=1.0)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


STEPS = {
    "//": lambda s: s // 0.7,
    "floor": lambda s: torch.div(s, 0.7, rounding_mode="floor"),
    "trunc": lambda s: torch.div(s, 0.7, rounding_mode="trunc"),
    "round": torch.round,
    "sign": torch.sign,
    "long": lambda s: s.long() * 1.0,
}


@of_device
@pytest.mark.parametrize("name", STEPS)
def test_gradients_of_steps_are_zero(name, device):
    q, k, v = inputs = qkv(device)
    table = torch.randn(HEADS, device=device, requires_grad=True)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: STEPS[name](s) + STEPS[name](table[h] * j))
    dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert dq.eq(0).all() and dk.eq(0).all() and dv.abs().sum() > 0
    if device == "cpu":  # elsewhere a score beside a step may fall on its other side
        added = STEPS[name](table.detach()[:, None, None] * positions(device)[3])
        scores = STEPS[name](q.detach() @ k.detach().mT / 8) + added
        torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-4)


@of_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_captured_tensors_are_summed_in_fp32(dtype, device):
    """4096 addends of one sign: a sum in bf16 stops growing at 256 times their size."""
    rows = 64
    q, k, v = (torch.randn(1, 1, rows, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    scale = torch.ones(1, device=device, dtype=dtype, requires_grad=True)
    exact = torch.ones(1, device=device, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(
        flex_attention(q, k, v, lambda s, b, h, i, j: s * scale[b]).float().square().sum(), scale
    )
    out = (q.double() @ k.double().mT / 8 * exact).softmax(-1) @ v.double()
    (expected,) = torch.autograd.grad(out.square().sum(), exact)
    assert found.dtype == dtype
    assert abs(found.item() - expected.item()) < 2e-2 * abs(expected.item())


def test_gradients_have_anomaly_detection_of_torch():
    """The trace of a derivative has no values in which it could look for NaN; the backward has."""
    bias = torch.zeros(HEADS, requires_grad=True)
    given = qkv("cpu")

    def score_mod(score, b, h, q, k):
        return torch.sqrt(score.abs() + 2) * 0.375 + bias[h]

    with torch.autograd.set_detect_anomaly(True):
        found = torch.autograd.grad(flex_attention(*given, score_mod).square().sum(), [*given, bias])
        assert torch.is_anomaly_check_nan_enabled()
        with pytest.raises(RuntimeError, match="returned nan values"):
            (flex_attention(*given, score_mod) * math.nan).sum().backward()
    expected = torch.autograd.grad(flex_attention(*given, score_mod).square().sum(), [*given, bias])
    assert all(map(torch.equal, found, expected))


def test_gradient_of_a_gradient_is_refused_on_cpu():
    q, k, v = qkv("cpu")
    (dq,) = torch.autograd.grad(flex_attention(q, k, v, lambda s, *_: s * 2).sum(), q, create_graph=False)
    assert not dq.requires_grad
    for loss in (torch.sum, lambda out: out.square().sum()):  # whose gradient does not depend on q, and does
        out = flex_attention(q, k, v, lambda s, *_: s * 2)
        (grad,) = torch.autograd.grad(loss(out), q, create_graph=True)
        torch.testing.assert_close(grad, dq if loss is torch.sum else grad)
        with pytest.raises(NotImplementedError, match="the gradient of a gradient is not supported"):
            (loss(out) + grad.square().sum()).backward()
