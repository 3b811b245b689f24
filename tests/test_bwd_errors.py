"""Mean errors of gradients against fp64: those of the formula whose operands alone are rounded, and of FlashAttention-2."""

from __future__ import annotations

import pytest
import torch
from matrix.calls import AttentionTrial
from matrix.classes import CallClass, shipped_classes
from matrix.draws import Draw

from tl_attention import flash_attn_func
from tl_attention.config.kernel_configs import BwdConfig
from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    varlen_backward_reference,
)
from tl_attention.testing.inputs import make_dout, make_inputs
from tl_attention.testing.numeric import mean_error
from tl_attention.testing.shapes import Shape

MOST = 1.05  # errors over those of rounded operands, or of FlashAttention-2
MOST_OF_OUT = {150: 1.11, 2000: 1.06}  # by number of keys, see docs/numerics.md
NAMES = ("dq", "dk", "dv")
BOTH = (torch.bfloat16, torch.float16)
CLASSES = [
    one
    for one in shipped_classes()
    if one.kind.startswith("bwd") and not one.problem.is_fp32 and one.problem.program is None
]


def draw_of(call_class: CallClass, scale: float | None) -> Draw:
    """A call of some thousand rows, which a class with one key tile has in several heads."""
    config, causal = call_class.config, call_class.problem.causal
    assert isinstance(config, BwdConfig)
    keys = min((one.block_N for one in config.passes if one.one_tile), default=1000)
    packed = call_class.problem.has("varlen")
    lengths = ((keys, keys), (300, min(411, keys))) if packed else ((keys, keys),)
    return Draw(
        0,
        seed=0,
        lengths=lengths,
        batch=len(lengths) if packed else 1,
        heads_kv=4 if keys == 1000 else 16,
        causal=causal,
        scale=scale,
        window=(400, 0 if causal else 100),
        softcap=15.0,
        dropout_p=0.1,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.5], ids=["plain", "small-weights"])
@pytest.mark.parametrize("call_class", CLASSES, ids=lambda one: one.id)
def test_errors_are_those_of_rounded_operands(call_class, scale):
    trial = AttentionTrial(call_class, draw_of(call_class, scale), "cuda")
    grads = trial._heads_first(*trial.run())
    reference = varlen_backward_reference if trial.packed else attention_backward_reference
    given = trial.dout, trial.q, trial.k, trial.v
    named = {"softmax_scale": trial.scale, "causal": trial.problem.causal, **trial.of_reference}
    exact = reference(*given, dtype=torch.float64, **named)
    rounded = reference(*given, dtype=torch.float64, rounds_to=trial.dtype, **named)
    for name, grad, ideal, wanted in zip(NAMES, grads, rounded, exact, strict=False):
        error, least = (mean_error(x.to(trial.dtype).double(), wanted) for x in (grad, ideal))
        assert error <= MOST * least, f"{name}: {error / least:.3f} times the error of rounded operands"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOTH, ids=["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("keys", [150, 2000])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 192, 256])
def test_errors_are_those_of_flash_attention_2(head_dim, keys, deterministic, causal, dtype):
    shape = Shape(2, 8, 8, keys, keys, head_dim, head_dim, causal)
    q, k, v = (x.requires_grad_() for x in make_inputs(shape, dtype))
    dout = make_dout(shape, dtype)
    out = flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)
    ours = out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
    (its_out, *_) = torch.ops.aten._scaled_dot_product_flash_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal
    )
    peers = its_out.detach(), *torch.autograd.grad(its_out, (q, k, v), dout.transpose(1, 2))
    exact = attention_reference(q, k, v, causal=causal, dtype=torch.float64)[0]
    wanted = exact, *attention_backward_reference(dout, q, k, v, causal=causal, dtype=torch.float64)
    peers = peers[0].transpose(1, 2), *peers[1:]
    for name, x, peer, ref in zip(("out", *NAMES), ours, peers, wanted, strict=True):
        error, least = (mean_error(y.double(), ref) for y in (x, peer))
        most = MOST_OF_OUT[keys] if name == "out" else MOST
        assert error <= most * least, f"{name}: {error / least:.3f} times the error of FlashAttention-2"
