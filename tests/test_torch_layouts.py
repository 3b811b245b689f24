"""Strides of the results of replaced aten ops: those of PyTorch's own functions for meta tensors, which compiled code assumes."""

from __future__ import annotations

import pytest
import torch

from tl_attention.integrations import torch_backend, torch_masks

pytestmark = [
    pytest.mark.filterwarnings("ignore:tl_attention"),
    pytest.mark.usefixtures("highest_precision"),
]
BATCH, HEADS, ROWS, DIM = 2, 3, 5, 16
ATEN = torch.ops.aten
# Memory of a view [batch, heads, seqlen, head_dim]: names of dimensions from the outer to the inner one, 1 for one that is expanded
LAYOUTS = ["bhsd", "bshd", "sbhd", "hbsd", "shbd", "1hsd", "b1sd"]


def tensor(layout, dim=DIM, dtype=torch.bfloat16):
    sizes = {"b": BATCH, "h": HEADS, "s": ROWS, "d": dim}
    if "1" in layout:
        shape = [1 if name == "1" else sizes[name] for name in layout]
        return torch.randn(shape).to(dtype).expand(BATCH, HEADS, ROWS, dim)
    x = torch.randn([sizes[name] for name in layout]).to(dtype)
    return x.permute([layout.index(name) for name in "bhsd"])


def on_meta(x):
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def assert_like(found, op, *arguments):
    """Assert that results have the shapes, dtypes and strides of an op on meta tensors, but for the state of dropout."""
    expected = op(*map(on_meta, arguments))
    for x, y in zip(found, expected, strict=True):
        if isinstance(y, torch.Tensor) and y.numel() > 2:
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def refused(*_, **__):
    raise AssertionError("PyTorch's kernel was called")


@pytest.mark.parametrize("of_keys", ["bhsd", "bshd", "b1sd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_layouts_of_the_flash_ops(layout, of_keys):
    q, k, v = tensor(layout), tensor(of_keys), tensor(of_keys)
    found = torch_backend.sdpa_forward(q, k, v)
    assert_like(found, ATEN._scaled_dot_product_flash_attention, q, k, v)
    out, lse, *_, state, unused, _ = found
    saved = q, q, k, v, out, lse, None, None, ROWS, ROWS, 0.0, False, state, unused
    assert_like(
        torch_backend.sdpa_backward(*saved), ATEN._scaled_dot_product_flash_attention_backward, *saved
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("columns", [DIM, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_layouts_of_the_other_ops(layout, columns, masked):
    q, k, v = tensor(layout), tensor(layout), tensor(layout, columns)
    mask = torch.randn(ROWS, ROWS).bfloat16() if masked else None
    with torch.no_grad():
        found = torch_masks.cudnn_forward(refused, None, q, k, v, mask, True)
        assert_like(found, ATEN._scaled_dot_product_cudnn_attention, q, k, v, mask, True)
        saved = v, q, k, v, found[0], found[1], *found[6:8], mask, None, None, ROWS, ROWS, 0.0, False
        grads = torch_masks.cudnn_backward(refused, None, *saved)
        assert_like(grads, ATEN._scaled_dot_product_cudnn_attention_backward, *saved)

        mask = mask if mask is None else mask.expand(BATCH, HEADS, ROWS, ROWS)
        found = torch_masks.efficient_forward(refused, None, q, k, v, mask, True)
        assert_like(found, ATEN._scaled_dot_product_efficient_attention, q, k, v, mask, True)
        saved = v, q, k, v, mask, *found, 0.0, [True, True, True, masked]
        grads = torch_masks.efficient_backward(refused, None, *saved)
        assert_like(grads, ATEN._scaled_dot_product_efficient_attention_backward, *saved)
