"""flex_attention with values wider than keys: query and key are padded with zeros to the width of the values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tl_attention import create_block_mask, flash_attn_func, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")
BATCH, HEADS, HEADS_KV, ROWS, KEYS = 2, 4, 2, 70, 90
WIDTHS = (16, 32), (60, 64), (64, 128), (1, 3), (128, 256), (100, 130)


def inputs(widths: tuple[int, int], device: str = "cpu", dtype: torch.dtype = torch.float32):
    width, width_v = widths
    sizes = (BATCH, HEADS, ROWS, width), (BATCH, HEADS_KV, KEYS, width), (BATCH, HEADS_KV, KEYS, width_v)
    return [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in sizes]


def causal(b, h, q, k):
    return q >= k


def odd(b, h, q, k):
    return (q * 3 + k + h) % 4 != 0


def compare(
    widths: tuple[int, int],
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    scale: float | None = None,
    mask_mod: Callable | None = None,
    bias: torch.Tensor | None = None,
    listed: bool = False,
) -> None:
    """Compare out, lse and all gradients with fp64. bias: learned, one per head. listed: the mask_mod is that of a BlockMask."""
    qkv = inputs(widths, device, dtype)
    wanted = [*qkv, *([] if bias is None else [bias])]
    exact = [x.detach().double().requires_grad_() for x in wanted]
    q, k, v = exact[0], *(x.repeat_interleave(HEADS // HEADS_KV, 1) for x in exact[1:3])
    scores = q @ k.mT * (widths[0] ** -0.5 if scale is None else scale)
    score_mod = None
    if bias is not None:
        scores = scores + exact[3][:, None, None]
        score_mod = lambda s, b, h, q, k: s + bias[h]  # noqa: E731
    if mask_mod is not None:
        at = [
            torch.arange(n, device=device).view([-1 if i == dim else 1 for i in range(4)])
            for dim, n in enumerate((BATCH, HEADS, ROWS, KEYS))
        ]
        scores = scores.masked_fill(~mask_mod(*at), -math.inf)
    right = [scores.softmax(-1) @ v, scores.logsumexp(-1)]
    masks = {"mask_mod": mask_mod}
    if listed:
        masks = {"block_mask": create_block_mask(mask_mod, BATCH, HEADS, ROWS, KEYS, device=device)}
    found = [*flex_attention(*qkv, score_mod, **masks, scale=scale, enable_gqa=True, return_lse=True)]
    assert found[0].shape == (BATCH, HEADS, ROWS, widths[1]) and found[0].dtype == dtype
    grads = [torch.randn_like(x) for x in found]
    found += torch.autograd.grad(found, wanted, grads)
    right += torch.autograd.grad(right, exact, [x.double() for x in grads])
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dbias"), found, right, strict=False):
        assert x.shape == y.shape
        error = ((x.double() - y).norm() / y.norm()).item()
        assert error < tolerance, f"{name}: expected an error of at most {tolerance}, got {error}"


@pytest.mark.parametrize("mask_mod", [None, causal, odd], ids=["all", "option", "traced"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_wide_values_on_cpu(widths, mask_mod):
    compare(widths, "cpu", torch.float32, 1e-5, mask_mod=mask_mod, listed=mask_mod is odd)
    compare(widths, "cpu", torch.float32, 1e-5, 0.3, mask_mod, torch.randn(HEADS, requires_grad=True))


@pytest.mark.parametrize("cached", [False, True], ids=["batch", "batch of 1"])
def test_wide_values_beside_a_block_mask(cached):
    q, k, v = (x.detach() for x in inputs((16, 48)))
    k, v = (k[:1], v[:1]) if cached else (k, v)
    mask = create_block_mask(odd, 1, HEADS, ROWS, KEYS, device="cpu", BLOCK_SIZE=32)
    found = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    parts = [flex_attention(q, k, x, block_mask=mask, enable_gqa=True) for x in v.split(16, -1)]
    torch.testing.assert_close(found, torch.cat(parts, -1))


def test_wide_values_under_fake_tensors():
    with FakeTensorMode():
        q, k, v = inputs((16, 48))
        out = flex_attention(q, k, v, enable_gqa=True)
        assert out.shape == (BATCH, HEADS, ROWS, 48)
        assert [x.shape for x in torch.autograd.grad(out.sum(), [q, k, v])] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("widths", "error", "words"),
    [
        ((64, 264), NotImplementedError, "^value: expected a head_dim of at most 256, got 264, which is not supported"),
        ((0, 8), ValueError, "^query, key, value: expected head dims of at least 1, got 0"),
    ],
)  # fmt: skip
def test_wide_values_refuse(widths, error, words):
    with pytest.raises(error, match=words):
        flex_attention(*inputs(widths), enable_gqa=True)


def test_wide_values_leave_other_errors():
    q, k, v = inputs((16, 32))
    with pytest.raises(ValueError, match="query and key|key"):
        flex_attention(q, k[..., :8], v, enable_gqa=True)
    with pytest.raises(ValueError, match="^scale: "):
        flex_attention(q, k, v, scale="big", enable_gqa=True)
    with pytest.raises(TypeError, match="^key, value: expected the dtype of query"):
        flex_attention(q, k, v.double().half(), enable_gqa=True)


def test_wide_values_of_flash_attn_func_are_refused():
    q, k, v = (x.transpose(1, 2) for x in inputs((16, 32)))
    with pytest.raises(NotImplementedError, match="v: expected a head_dim of at most that of q and k, 16"):
        flash_attn_func(q, k, v, mask_mod=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [False, True], ids=["option", "listed"])
@pytest.mark.parametrize("widths", [(16, 64), (64, 128), (60, 64)], ids=str)
def test_wide_values(widths, listed):
    mask_mod = odd if listed else causal
    compare(widths, "cuda", torch.bfloat16, 2e-2, mask_mod=mask_mod, listed=listed)
    compare(widths, "cuda", torch.bfloat16, 2e-2, 0.3, mask_mod, listed=listed)
