"""Tensors made in inference mode as arguments of calls outside it: lengths, options and captured tensors in training, caches and out."""

from __future__ import annotations

import pytest
import torch

from tl_attention import (
    block_masks,
    create_block_mask,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
)
from tl_attention.testing.inputs import make_inputs
from tl_attention.testing.shapes import Shape

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention")
BF16, HEADS = torch.bfloat16, 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(3)
    return request.param


def leaves(device, *shape):
    return [torch.randn(shape, device=device, dtype=BF16, requires_grad=True) for _ in range(3)]


def inferred(x):
    with torch.inference_mode():
        return x.clone()


def packed(q, k, v, starts, used):
    return flash_attn_varlen_func(q, k, v, starts, starts, 50, 50, seqused_k=used, causal=True)


TRAINING = {
    "lengths": (packed, (80, HEADS, 64), lambda on: [torch.tensor([0, 30, 80], **on).int(), torch.tensor([20, 50], **on).int()]),
    "slopes": (lambda q, k, v, x: flash_attn_func(q, k, v, alibi_slopes=x), (2, 40, HEADS, 64), lambda on: [torch.rand(HEADS, **on)]),
    "sink": (lambda q, k, v, x: flash_attn_func(q, k, v, learnable_sink=x), (2, 40, HEADS, 64), lambda on: [torch.rand(HEADS, **on)]),
    "state": (
        lambda q, k, v, x: flash_attn_func(q, k, v, 0.3, rng_state=x), (2, 40, HEADS, 64), lambda on: [torch.tensor([7, 9], **on)],
    ),
    "captured": (
        lambda q, k, v, x: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * x[h] + x[h]),
        (2, HEADS, 40, 64), lambda on: [torch.rand(HEADS, **on)],
    ),
    "mask": (
        lambda q, k, v, x: flex_attention(q, k, v, mask_mod=lambda b, h, i, j: j < x[b]),
        (2, HEADS, 40, 64), lambda on: [torch.tensor([20, 30], **on)],
    ),
    "bias": (
        lambda q, k, v, x: flex_attention(q, k, v, attn_bias=x), (2, HEADS, 40, 64), lambda on: [torch.randn(1, HEADS, 40, 40, **on)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_training_takes_tensors_of_inference_mode(name, device):
    function, shape, make = TRAINING[name]
    qkv, results = leaves(device, *shape), []
    others = make({"device": device})
    for tensors in (others, [inferred(x) for x in others], [inferred(x) for x in others]):
        out = function(*qkv, *tensors)
        results.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out))))
    for again in results[1:]:
        for got, want in zip(again, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_features_of_inference_mode_are_refused_by_torch(device):
    """q, k and v are not copied in silence: torch says that a clone is to be made."""
    q, k, v = leaves(device, 2, 40, HEADS, 64)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        flash_attn_func(q, inferred(k), v, learnable_sink=inferred(torch.rand(HEADS, device=device)))


def test_caches_of_inference_mode_take_new_keys(device):
    q, k, v = (
        x[:, :1] for x in make_inputs(Shape(2, HEADS, HEADS, 1, 1, 64, 64, False), BF16, device=device)
    )
    results = []
    for make in (lambda x: x, inferred):
        caches = [make(torch.zeros(2, 32, HEADS, 64, dtype=BF16, device=device)) for _ in range(2)]
        with torch.no_grad():
            outs = [flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=n) for n in (0, 1)]
        results.append((*outs, *caches))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_out_of_inference_mode_is_written(device):
    q, k, v = (x.detach() for x in leaves(device, 80, HEADS, 64))
    starts = torch.tensor([0, 30, 80], dtype=torch.int32, device=device)
    out = inferred(torch.zeros_like(q))
    want = flash_attn_varlen_func(q, k, v, starts, starts, 50, 50)
    assert flash_attn_varlen_func(q, k, v, starts, starts, 50, 50, out=out) is out
    assert torch.equal(out, want)


MASKS = {
    "constructor": lambda n: block_masks.causal(n, n, device="cpu"),
    "evaluated": lambda n: create_block_mask(lambda b, h, q, k: (q * 5 + k) % 7 > 2, None, None, n, n, device="cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "n"), zip(MASKS.values(), (341, 342), strict=True), ids=MASKS)
def test_masks_of_inference_mode_serve_training(make, n):
    """A mask without captures is kept, so the first one may be made in a validation and others, the same, in compiled training."""
    torch._dynamo.reset()
    with torch.inference_mode():
        first = make(n)
    train = torch.compile(
        lambda q, mask: flex_attention(q, q, q, lambda s, b, h, i, j: s * 0.5, mask),
        fullgraph=True,
        backend="aot_eager",
    )
    q = torch.randn(1, 1, n, 8, requires_grad=True)
    for mask in (first, make(n)):
        assert not mask.kv_indices.is_inference() and not mask.full_kv_indices.is_inference()
        train(q, mask).sum().backward()
