"""F.scaled_dot_product_attention without a mask, outside its flash op: aten ops called on CPU tensors, and through PyTorch on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tl_attention.integrations import torch_backend, torch_masks, torch_unmasked
from tl_attention.integrations.torch_modes import MODES

pytestmark = [
    pytest.mark.filterwarnings("ignore:tl_attention", "ignore:.*Overriding a previously"),
    pytest.mark.usefixtures("highest_precision"),
]


def inputs(device="cpu", rows=40, keys=50, dim=16, dim_v=16):
    sizes = (rows, dim), (keys, dim), (keys, dim_v)
    return [torch.randn(2, 3, *size, device=device, requires_grad=True) for size in sizes]


def refused(*_, **__):
    raise AssertionError("PyTorch's kernel was called")


def assert_close(found, expected):
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize(
    ("causal", "keys", "dim_v"),
    [(False, 50, 8), (True, 40, 16), (True, 50, 16), (True, 30, 8), (True, 3, 16)],
)
def test_torch_unmasked_ops_match_the_formula(causal, keys, dim_v, precision):
    torch.set_float32_matmul_precision(precision)
    q, k, v = inputs(keys=keys, dim_v=dim_v)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, scale=0.2)
    dout = torch.randn(exact.shape)
    expected = torch.autograd.grad(exact, [q, k, v], dout.double())
    with torch.no_grad():
        found = torch_masks.efficient_forward(refused, None, q, k, v, None, True, 0.0, causal, scale=0.2)
        out, lse, *_ = found
        assert lse.shape == (2, 3, 64) and lse[..., 40:].eq(torch.inf).all()
        saved = *found, 0.0, [True] * 4, causal
        *grads, none = torch_masks.efficient_backward(refused, None, dout, q, k, v, None, *saved, scale=0.2)
    scores = 0.2 * q.double() @ k.double().mT
    if causal:
        scores = scores.masked_fill(torch.ones(40, keys).triu(1).bool(), -torch.inf)
    assert_close(lse[..., :40], scores.logsumexp(-1))
    assert none is None
    for actual, want in zip((out, *grads), (exact, *expected), strict=True):
        assert_close(actual, want)
        assert actual.transpose(1, 2).is_contiguous()  # the strides that compiled code expects


@pytest.mark.parametrize("heads_last", [False, True], ids=["bhsd", "bshd"])
@pytest.mark.parametrize(("causal", "keys"), [(False, 40), (True, 40), (True, 57), (True, 23)])
def test_torch_unmasked_values_may_be_narrower(causal, keys, heads_last):
    """bf16 with unequal head dims, and grouped heads, which PyTorch gives to cuDNN or to the memory-efficient op."""
    sizes = (40, 4, 24), (keys, 2, 24), (keys, 2, 16)
    if heads_last:
        q, k, v = (torch.randn(2, *size).bfloat16().transpose(1, 2).requires_grad_() for size in sizes)
    else:
        q, k, v = (torch.randn(2, heads, rows, dim).bfloat16().requires_grad_() for rows, heads, dim in sizes)
    double = [x.double() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*double, is_causal=causal, enable_gqa=True)
    dout = torch.randn(exact.shape).bfloat16()
    expected = torch.autograd.grad(exact, [q, k, v], dout.double())
    call = q, k, v, None, True, 0.0, causal
    with torch.no_grad():
        found = torch_masks.cudnn_forward(refused, None, *call)
        saved = found[0], found[1], found[6], found[7], None, None, None, 40, keys, 0.0, causal
        grads = torch_masks.cudnn_backward(refused, None, dout, q, k, v, *saved)
        assert found[0].transpose(1, 2).is_contiguous() == heads_last
        others = torch_masks.efficient_forward(refused, None, *call)
    assert torch.equal(others[0], found[0])
    for actual, want, x in zip((found[0], *grads), (exact, *expected), (q, q, k, v), strict=True):
        assert actual.dtype == torch.bfloat16 and actual.shape == want.shape
        assert (actual.double() - want).abs().max() <= 0.02 * want.abs().max()
        assert actual is found[0] or actual.stride() == torch.empty_like(x).stride()


X = torch.zeros(1, 2, 3, 8)
OTHERS = {
    "mask": {"attn_bias": torch.zeros(1, 2, 3, 3)},
    "dropout": {"dropout_p": 0.1},
    "bf16 with odd head dims": {
        name: torch.zeros(1, 2, 3, 12).bfloat16() for name in ("query", "key", "value")
    },
    "fp64": {name: X.double() for name in ("query", "key", "value")},
    "two dtypes": {"value": X.bfloat16()},
    "wide": {name: torch.zeros(1, 2, 3, 264) for name in ("query", "key", "value")},
    "gradients without kernels": {name: torch.zeros(1, 2, 3, 200) for name in ("query", "key", "value")},
    "wide value": {"value": torch.zeros(1, 2, 3, 16)},
    "heads without groups": {"query": torch.zeros(1, 3, 3, 8)},
    "3-d": {name: X[0] for name in ("query", "key", "value")},
    "empty": {"key": torch.zeros(1, 2, 0, 8), "value": torch.zeros(1, 2, 0, 8)},
    "columns apart": {"value": torch.zeros(1, 2, 8, 3).mT},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_torch_unmasked_leaves_other_calls_to_pytorch(changes):
    call = {"query": X, "key": X, "value": X, "attn_bias": None, "dropout_p": 0.0, "causal": False}
    assert torch_unmasked.serves(**call)
    assert not torch_unmasked.serves(**call | changes)


def test_torch_unmasked_leaves_more_queries_than_keys_if_bits_may_not_depend_on_the_batch(monkeypatch):
    """They take the kernel of a window, whose key blocks are not those of other causal calls."""
    monkeypatch.setattr(MODES, "batch_invariant", True)
    few, many = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 5, 8)
    assert torch_unmasked.serves(few, many, many, None, 0.0, True)
    assert torch_unmasked.serves(many, few, few, None, 0.0, False)
    assert not torch_unmasked.serves(many, few, few, None, 0.0, True)


def test_torch_unmasked_leaves_settings_that_differ_to_pytorch(monkeypatch):
    def fail():
        raise RuntimeError("mixed settings")

    assert torch_unmasked.serves(X, X, X, None, 0.0, False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", fail)
    assert not torch_unmasked.serves(X, X, X, None, 0.0, False)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("causal", "keys"), [(False, 333), (True, 300), (True, 333), (True, 77), (True, 3)])
def test_torch_unmasked_serves_sdpa(causal, keys, compiled, monkeypatch):
    served, real = [], torch_unmasked.forward
    monkeypatch.setattr(torch_unmasked, "forward", lambda *args: served.append(args) or real(*args))
    q, k, v = inputs("cuda", 300, keys, 64, 64)
    dout = torch.randn_like(q)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    expected = torch.autograd.grad(exact, [q, k, v], dout.double())

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    handle = torch_backend.register()
    try:
        out = (torch.compile(attend, fullgraph=True) if compiled else attend)(q, k, v)
        grads = torch.autograd.grad(out, [q, k, v], dout)
    finally:
        handle.remove()
    assert len(served) == 1
    for found, want in zip((out, *grads), (exact, *expected), strict=True):
        assert_close(found, want)
