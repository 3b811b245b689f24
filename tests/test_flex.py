"""flex_attention: the CPU route and the kernels against formulas on whole tensors, errors, and kernels lowered without a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import random
import re

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tl_attention
from tl_attention import flash_attn_func, flex_attention
from tl_attention.api import block_masks
from tl_attention.api.flex_lists import kept_mask
from tl_attention.compilation import building, compiler, toolkit
from tl_attention.config import configs, legality
from tl_attention.config.kernel_configs import BwdPass, FwdConfig
from tl_attention.problem.attn_problem import DIRECTIONS, AttnProblem, tile_widths
from tl_attention.tracing.builtin_options import BuiltinOptions, builtin_options
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention. CPU tensors", "ignore:.*torch.compile")
HEADS, HEADS_KV, MAX = 4, 2, 600
BATCH = {"cpu": 2, "cuda": 8}  # enough tiles that their keys are not split


class Captured:
    """Tensors that the functions below capture, on a device."""

    def __init__(self, device: str):
        on = {"device": device}
        self.slopes = torch.rand(HEADS, **on, requires_grad=True)
        self.temperature = torch.tensor(1.2, **on, requires_grad=True)
        self.relative = torch.randn(HEADS, 2 * MAX, **on, requires_grad=True)
        self.half = torch.randn(HEADS, 2 * MAX, **on, dtype=torch.bfloat16, requires_grad=True)
        self.of_query = torch.randn(BATCH[device], MAX, **on, requires_grad=True)
        self.dense = torch.randn(1, HEADS, MAX, MAX, **on, requires_grad=True)
        self.documents = torch.randint(0, 4, (BATCH[device], MAX), **on).sort(1)[0]
        self.visible = torch.rand(MAX, **on) > 0.3


def causal(b, h, q, k):
    return q >= k


def cases(c: Captured, cap: float = 20.0) -> dict[str, tuple]:
    """Name -> score_mod, mask_mod, captured tensors with gradients."""
    return {
        "causal": (None, causal, ()),
        "documents": (None, lambda b, h, q, k: (c.documents[b, q] == c.documents[b, k]) & (q >= k), ()),
        "prefix": (None, lambda b, h, q, k: (k < 100) | (q >= k), ()),
        "window": (None, lambda b, h, q, k: (q - k).abs() < 17, ()),
        "of_heads": (None, lambda b, h, q, k: (q % (h + 2) == 0) | (q >= k), ()),
        "visible": (None, lambda b, h, q, k: c.visible[k] | (q == k), ()),
        "nothing": (None, lambda b, h, q, k: (q > 40) & (k > 5), ()),
        "softcap": (lambda s, b, h, q, k: cap * torch.tanh(s / cap), causal, ()),
        "alibi": (lambda s, b, h, q, k: s + c.slopes.detach()[h] * (k - q), causal, ()),
        "where": (lambda s, b, h, q, k: torch.where(q >= k, s * 0.5, -math.inf), None, ()),
        "singular": (lambda s, b, h, q, k: s.abs().sqrt(), causal, ()),
        "slopes": (lambda s, b, h, q, k: s + c.slopes[h] * (k - q) * 0.1, None, (c.slopes,)),
        "relative": (lambda s, b, h, q, k: s + c.relative[h, q - k + MAX], causal, (c.relative,)),
        "half": (lambda s, b, h, q, k: s + c.half[h, q - k + MAX], None, (c.half,)),
        "undefined": (lambda s, b, h, q, k: s + c.slopes[h] * torch.sqrt(576.5 - q), None, (c.slopes,)),  # past 577 queries
        "temperature": (lambda s, b, h, q, k: s * c.temperature, causal, (c.temperature,)),
        "of_query": (lambda s, b, h, q, k: s * c.of_query[b, q].sigmoid(), None, (c.of_query,)),
        "dense": (lambda s, b, h, q, k: s + c.dense[0, h, q, k], None, (c.dense,)),
        "together": (
            lambda s, b, h, q, k: cap * torch.tanh((s * c.temperature + c.relative[h, q - k + MAX]) / cap) + c.slopes[h] * (k - q) * 0.1,
            lambda b, h, q, k: (c.documents[b, q] == c.documents[b, k]) & (q >= k),
            (c.temperature, c.relative, c.slopes),
        ),
    }  # fmt: skip


NAMES = tuple(cases(Captured("cpu")))


class Wide(TorchFunctionMode):
    """Mode in which captured tensors are read as fp64, so that their gradients are sums in fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and args[0].is_floating_point():
            args = args[0].double(), *args[1:]
        return func(*args, **(kwargs or {}))


def oracle(
    q, k, v, score_mod, mask_mod, dtype: torch.dtype, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by calling the functions on whole tensors; the products are made in `dtype`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = ((q @ k.mT) * scale).to(torch.promote_types(dtype, torch.float32))
    at = [
        torch.arange(n, device=q.device).view([-1 if i == d else 1 for i in range(4)])
        for d, n in enumerate(scores.shape)
    ]
    if score_mod is not None:
        with Wide() if dtype == torch.float64 else contextlib.nullcontext():
            scores = score_mod(scores, *at)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*at), scores, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0).to(dtype) @ v, scores.logsumexp(-1)


def inputs(
    device: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, head_dim: int
) -> tuple[torch.Tensor, ...]:
    shapes = (HEADS, seqlen_q), (HEADS_KV, seqlen_k), (HEADS_KV, seqlen_k)
    return tuple(
        torch.randn(BATCH[device], heads, n, head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads, n in shapes
    )


def results(function, q, k, v, learned, dout, dlse) -> dict[str, torch.Tensor]:
    """out, lse and all gradients; hidden rows have lse 0 here."""
    out, lse = function()
    hidden = lse == -math.inf
    lse = lse.masked_fill(hidden, 0)
    grads = torch.autograd.grad(
        [out, lse], [q, k, v, *learned], [dout.to(out.dtype), dlse.masked_fill(hidden, 0).to(lse.dtype)]
    )
    names = ["dq", "dk", "dv", *(f"captured {i}" for i in range(len(learned)))]
    return {"out": out, "lse": lse, "hidden": hidden, **dict(zip(names, grads, strict=True))}


def check(q, k, v, score_mod, mask_mod, learned, scale: float | None = None) -> None:
    """Compare with fp64: at most twice the error of the formula in the dtype of q, or of fp64 with rounded outputs.

    Kernels make delta, the sum of dO * O per query, from rounded outputs. Its error is the same for all keys of a query, so it stays in
    a gradient that sums over many scores and nearly cancels, as that of a slope per head.
    """
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3], device=q.device)
    used = q.shape[-1] ** -0.5 if scale is None else scale

    def formula(dtype: torch.dtype, dlse: torch.Tensor) -> dict[str, torch.Tensor]:
        return results(
            lambda: oracle(q, k, v, score_mod, mask_mod, dtype, used), q, k, v, learned, dout, dlse
        )

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return flex_attention(
            q, k, v, score_mod, scale=scale, enable_gqa=True, return_lse=True, mask_mod=mask_mod
        )

    found = results(ours, q, k, v, learned, dout, dlse)
    exact, same = formula(torch.float64, dlse), formula(q.dtype, dlse)
    # An error of delta acts like a gradient of lse
    rounding = (dout.double() * (exact["out"] - exact["out"].to(q.dtype))).sum(-1)
    rounded = formula(torch.float64, dlse + rounding)
    assert torch.equal(found.pop("hidden"), exact["hidden"])
    assert found["out"].dtype == q.dtype and found["lse"].dtype == torch.float32
    for name, x in found.items():
        reference = exact[name].double()
        error, *allowed = (
            (y.double() - reference).abs().max().item() for y in (x, same[name], rounded[name])
        )
        bound = 2 * max(allowed) + 1e-4 * reference.abs().max().item() + 1e-5
        assert error <= bound, f"{name}: expected an error of at most {bound}, got {error}"


@pytest.mark.parametrize("name", NAMES)
def test_flex_on_cpu(name):
    score_mod, mask_mod, learned = cases(Captured("cpu"))[name]
    check(*inputs("cpu", torch.bfloat16, 70, 90, 16), score_mod, mask_mod, learned, scale=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_flex_agrees_with_torch_on_cpu(name):
    """PyTorch's eager function; it has no gradients on the CPU."""
    with torch.no_grad():
        score_mod, mask_mod, _ = cases(Captured("cpu"))[name]
        q, k, v = (x.detach() for x in inputs("cpu", torch.bfloat16, 40, 50, 16))
        block_mask = None if mask_mod is None else create_block_mask(mask_mod, 2, HEADS, 40, 50, device="cpu")
        out, lse = flex_attention(q, k, v, score_mod, block_mask, None, True, True)
        expected, expected_lse = torch_flex_attention(q, k, v, score_mod, block_mask, None, True, True)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_flex_batch_of_one_serves_all():
    q, k, v = inputs("cpu", torch.bfloat16, 8, 8, 16)
    k1, v1 = (x[:1].detach().requires_grad_() for x in (k, v))
    out = flex_attention(q, k1, v1, enable_gqa=True)
    expected = flex_attention(q, *(x.expand(2, -1, -1, -1) for x in (k1, v1)), enable_gqa=True)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert k1.grad.shape == k1.shape


def test_flex_empty():
    q, k, v = inputs("cpu", torch.bfloat16, 3, 0, 16)
    out, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True, mask_mod=causal)
    assert out.eq(0).all() and lse.eq(-math.inf).all()


q8, kv8 = torch.randn(2, 4, 8, 16, dtype=torch.bfloat16), torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
small, wide = torch.rand(7), torch.rand(HEADS, 7)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "key, value: expected the heads of query, 4, got 2; pass enable_gqa=True"),
        ({"query": q8.double()}, TypeError, "query: expected bfloat16, float16 or float32"),
        ({"query": q8.float()}, TypeError, "key, value: expected the dtype of query, torch.float32"),
        ({"key": kv8[:, :, :, :8]}, ValueError, "key: expected the head_dim of query"),
        ({"key": 3}, TypeError, "key: expected a torch.Tensor"),
        ({"scale": math.inf}, ValueError, "scale: expected a finite number"),
        ({"score_mod": 3}, TypeError, "score_mod: expected a function of 0-d tensors or None, got 3"),
        ({"mask_mod": q8}, TypeError, "mask_mod: expected a function.*; pass a tensor as attn_bias"),
        ({"score_mod": create_block_mask(causal, None, None, 8, 8, device="cpu")}, TypeError, "got an object of type BlockMask; pass it"),
        ({"score_mod": causal}, TypeError, "score_mod .*; pass a mask as mask_mod"),
        ({"block_mask": causal}, TypeError, "block_mask: expected a BlockMask .* got function; pass a function as mask_mod"),
        ({"return_lse": 1}, TypeError, "return_lse: expected a bool"),
        ({"enable_gqa": None}, TypeError, "enable_gqa: expected a bool"),
        ({"deterministic": 1}, TypeError, "deterministic: expected a bool"),
        ({"kernel_options": {"BLOCK_M": 64}}, NotImplementedError, "kernel_options: expected None"),
        ({"score_mod": lambda s, b, h, q, k: s + small[q]}, ValueError, "captured tensor 0.*at least 8 entries .* which q_idx"),
        ({"score_mod": lambda s, b, h, q, k: s + small[8]}, IndexError, "score_mod .*: expected indices within what it captures"),
        ({"score_mod": lambda s, b, h, q, k: s + wide[h, 8]}, ValueError, "captured tensor 0.*dimension 1, from -7 to 6, got 8"),
        ({"score_mod": lambda s, b, h, q, k: s + small.to("meta")[h]}, (NotImplementedError, ValueError), "score_mod|captured tensor"),
    ],
)  # fmt: skip
def test_flex_refuses(arguments, error, words):
    defaults = {"query": q8, "key": kv8, "value": kv8, "enable_gqa": bool(arguments)}
    with pytest.raises(error, match=words):
        flex_attention(**defaults | arguments)


def test_flex_refuses_masks_for_other_lengths():
    block_mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    with pytest.raises(ValueError, match=r"block_mask: expected one made for lengths \(8, 8\) .* \(16, 16\)"):
        flex_attention(q8, kv8, kv8, block_mask=block_mask, enable_gqa=True)
    with pytest.raises(ValueError, match="mask_mod: expected None beside block_mask"):
        flex_attention(q8, kv8, kv8, block_mask=block_mask, mask_mod=causal, enable_gqa=True)


def test_flex_refuses_transforms():
    with pytest.raises(NotImplementedError, match="expected a call outside torch.func transforms"):
        torch.vmap(lambda q: flex_attention(q, q, q))(q8[None])


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_refuses_gradients_of_several_samples(compiled):
    def attend(q):
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + i * j)

    q = q8.clone().requires_grad_()
    out = (torch.compile(attend, backend="aot_eager") if compiled else attend)(q)
    with pytest.raises(NotImplementedError, match="^flex_attention: expected gradients of one sample"):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape, dtype=out.dtype), is_grads_batched=True)


fixed_slopes = torch.rand(HEADS)
batch_slopes = torch.rand(2, HEADS)
WINDOW_16, WINDOW_8 = BuiltinOptions(window=(16, 0)), BuiltinOptions(window=(8, 0))
CAUSAL, ALIBI = BuiltinOptions(True), BuiltinOptions(True, alibi_slopes=fixed_slopes)


def alibi(score, b, h, q_idx, kv_idx):
    return score + fixed_slopes[h] * (kv_idx - q_idx)


def hidden_alibi(score, b, h, q_idx, kv_idx):
    return torch.where(kv_idx > q_idx, -math.inf, alibi(score, b, h, q_idx, kv_idx))


# score_mod, mask_mod, what is recognized at equal lengths
RECOGNIZED = [
    (None, None, BuiltinOptions()),
    (None, causal, CAUSAL),
    (None, lambda b, h, q, k: k <= q, CAUSAL),
    (None, lambda b, h, q, k: ~(k > q), CAUSAL),
    (None, lambda b, h, q, k: q - k > -1, CAUSAL),
    (None, lambda b, h, q, k: k - q <= 0, CAUSAL),
    (None, lambda b, h, q, k: k < q + 1, CAUSAL),
    (None, and_masks(causal), CAUSAL),
    (None, and_masks(causal, lambda b, h, q, k: q - k < 17), WINDOW_16),
    (None, lambda b, h, q, k: (q >= k) & (q - k < 17), WINDOW_16),
    (None, lambda b, h, q, k: ~((q < k) | (q - k >= 17)), WINDOW_16),
    (None, lambda b, h, q, k: (k > q - 9) & (k <= q), WINDOW_8),
    (None, lambda b, h, q, k: torch.logical_and(q - k <= 8, q >= k), WINDOW_8),
    (None, lambda b, h, q, k: (q - k).abs() <= 8, BuiltinOptions(window=(8, 8))),
    (None, lambda b, h, q, k: (k - q).abs() < 9, BuiltinOptions(window=(8, 8))),
    (None, lambda b, h, q, k: k - q <= 3, BuiltinOptions(window=(-1, 3))),
    (None, lambda b, h, q, k: q == k, BuiltinOptions(window=(0, 0))),
    (None, lambda b, h, q, k: (q >= 0) & (k + 1 > 0), BuiltinOptions()),
    (None, lambda b, h, q, k: (q > 0) & (q >= k), None),
    (lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), None, CAUSAL),
    (lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf), lambda b, h, q, k: q - k <= 8, WINDOW_8),
    (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0), None, BuiltinOptions(softcap=20.0)),
    (lambda s, b, h, q, k: torch.tanh(s / 30) * 30, causal, CAUSAL._replace(softcap=30.0)),
    (lambda s, b, h, q, k: torch.tanh(s * (1 / 30)) * 30, causal, CAUSAL._replace(softcap=30.0)),
    (alibi, causal, ALIBI),
    (hidden_alibi, None, ALIBI),
    (lambda s, b, h, q, k: 20 * torch.tanh(s / 20) + fixed_slopes[h] * (k - q), causal, ALIBI._replace(softcap=20.0)),
    (lambda s, b, h, q, k: s - fixed_slopes[h] * (q - k), causal, ALIBI),
    (lambda s, b, h, q, k: s - (q - k).abs() * fixed_slopes[h], None, ALIBI._replace(causal=False)),
    (lambda s, b, h, q, k: s + (k - q) * batch_slopes[b, h], causal, CAUSAL._replace(alibi_slopes=batch_slopes)),
    (lambda s, b, h, q, k: s + torch.exp2(-(h + 1) * 2.0) * (k - q), causal, CAUSAL._replace(alibi_slopes=0.25 ** torch.arange(1, 5))),
    (lambda s, b, h, q, k: s - 0.1 * fixed_slopes[h] * (q - k), causal, CAUSAL._replace(alibi_slopes=0.1 * fixed_slopes)),
    (alibi, None, None),  # negative distances
    (lambda s, b, h, q, k: s + fixed_slopes[h] * (k - q + 1), causal, None),
    (lambda s, b, h, q, k: s + fixed_slopes[h] * (k + q), causal, None),
    (lambda s, b, h, q, k: s * fixed_slopes[h], causal, None),
    (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 21.0), None, None),
    (lambda s, b, h, q, k: torch.where(q >= k, s, -1e3), None, None),
    (None, lambda b, h, q, k: q > k, None),
    (None, lambda b, h, q, k: (q >= k) & (q - k > 5), None),
    (None, lambda b, h, q, k: (q >= k) | (q - k < 5), None),
    (None, lambda b, h, q, k: (q - k).abs() >= 5, None),
    (None, lambda b, h, q, k: 2 * q >= k, None),
    (None, lambda b, h, q, k: (q >= k) & (q - k < 17) & (h > 1), None),
]  # fmt: skip


@pytest.mark.parametrize(("score_mod", "mask_mod", "expected"), RECOGNIZED)
def test_flex_recognizes_options(score_mod, mask_mod, expected):
    call = trace(score_mod, mask_mod, True)
    found = builtin_options(call, 40, 40, 2, HEADS)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found[:-1] == expected[:-1]
        assert (found.alibi_slopes is None) == (expected.alibi_slopes is None)
        if found.alibi_slopes is not None:
            torch.testing.assert_close(found.alibi_slopes, expected.alibi_slopes)
    for seqlen_q, seqlen_k in ((40, 40), (40, 60), (60, 40)):  # with other lengths the diagonal is another
        q, k, v = inputs("cpu", torch.bfloat16, seqlen_q, seqlen_k, 16)
        check(q, k, v, score_mod, mask_mod, ())


def test_flex_recognizes_options_of_unequal_lengths():
    """The diagonal of functions is top-left, that of options bottom-right."""
    call = trace(None, lambda b, h, q, k: q + 20 >= k, False)
    assert builtin_options(call, 40, 60) == CAUSAL
    assert builtin_options(trace(None, causal, False), 40, 60) is None
    assert builtin_options(trace(None, causal, False), 60, 40) == BuiltinOptions(window=(-1, 20))
    shifted = trace(
        lambda s, b, h, q, k: s + fixed_slopes[h] * (k - q - 20), lambda b, h, q, k: q + 20 >= k, False
    )
    found = builtin_options(shifted, 40, 60, 1, HEADS)
    assert found.causal and torch.equal(found.alibi_slopes, fixed_slopes)


def test_flex_says_what_it_recognizes(monkeypatch, capsys):
    monkeypatch.setenv("TL_ATTENTION_PRINT_CONFIGS", "1")
    flex_attention(
        q8, kv8, kv8, lambda s, b, h, q, k: 17 * torch.tanh(s / 17), enable_gqa=True, mask_mod=causal
    )
    words = "tl_attention: flex_attention score_mod mask_mod -> causal=True, softcap=17.0 (recognized)"
    assert words in capsys.readouterr().err


def test_flex_knows_lists_that_were_made_from_the_mask():
    made = tl_attention.create_block_mask(causal, None, None, 8, 8, device="cpu")
    assert kept_mask(made).follow(causal)
    assert not kept_mask(made).follow(lambda b, h, q, k: q >= 0)
    made.kv_num_blocks.zero_()
    assert not kept_mask(made).follow(causal)
    assert tl_attention.create_block_mask(causal, None, None, 8, 8, device="cpu").kv_num_blocks.item() == 1


def test_flex_keeps_lists_when_a_captured_number_changes():
    """Blocks that are not listed are hidden, also where the mask_mod is an option that would show them."""
    width, added = [40], torch.tensor(0)
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))

    def band(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= width[0] + added)

    def windowed(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= limit)

    def run(mask):
        i = torch.arange(512)
        listed = mask.to_dense().repeat_interleave(128, -1).repeat_interleave(128, -2).bool()
        shown = listed & mask.mask_mod(0, 0, i[:, None], i)
        expected = torch.softmax((q @ k.mT / 4).masked_fill(~shown, -math.inf), -1) @ v
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected, rtol=1e-4, atol=1e-5)
        return kept_mask(mask).follow(mask.mask_mod)

    mask = tl_attention.create_block_mask(band, None, None, 512, 512, device="cpu")
    assert run(mask)
    width[0] = 300
    assert not run(mask)
    width[0] = 40
    assert run(mask)
    added.fill_(260)  # a 0-d CPU tensor is a number
    assert not run(mask)
    added.fill_(0)
    limit = 30
    other = tl_attention.create_block_mask(windowed, None, None, 512, 512, device="cpu")
    assert run(other)
    limit = 250
    assert not run(other)
    again = tl_attention.create_block_mask(windowed, None, None, 512, 512, device="cpu")
    assert run(again) and not run(other), "one function, lists of two widths"
    constructed = block_masks.sliding_window(512, 512, (20, 0), device="cpu")
    assert run(constructed)
    constructed.mask_mod.__setstate__((constructed.mask_mod.func, (400, 0), {}, {}))
    assert not run(constructed)


class Width:
    """A mask_mod whose attributes nobody can compare."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= self.width)


def test_flex_keeps_lists_of_an_object_that_changes():
    mask_mod, (q, k, v) = Width(40), (torch.randn(1, 2, 512, 16) for _ in range(3))
    mask = tl_attention.create_block_mask(mask_mod, None, None, 512, 512, device="cpu")
    mask_mod.width = 300
    i = torch.arange(512)
    listed = mask.to_dense().repeat_interleave(128, -1).repeat_interleave(128, -2).bool()
    expected = (q @ k.mT / 4).masked_fill(~(listed & mask_mod(0, 0, i[:, None], i)), -math.inf)
    found = flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(found, expected.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


def near(b, h, q, k):
    return (q - k >= 0) & (q - k < 300)


@pytest.mark.parametrize("mask_mod", [causal, near])
@pytest.mark.parametrize("lengths", [(512, 512), (300, 700), (700, 300)], ids=str)
@pytest.mark.parametrize("separate", [True, False])
def test_flex_compares_lists_of_another_origin_with_the_mask(mask_mod, lengths, separate):
    theirs = create_block_mask(mask_mod, 2, None, *lengths, device="cpu")
    if not separate:  # full blocks in the lists of partial ones
        listed = theirs.to_dense()
        order = listed.argsort(dim=-1, descending=True, stable=True).int()
        theirs = BlockMask.from_kv_blocks(listed.sum(-1).int(), order, mask_mod=mask_mod, seq_lengths=lengths)
    assert kept_mask(theirs).follow(mask_mod)
    assert not kept_mask(theirs).follow(lambda b, h, q, k: q >= k - 200)  # shows blocks that are not listed
    assert kept_mask(theirs).follow(lambda b, h, q, k: (q >= k) & (q - k < 10)) == (
        not separate
    )  # full blocks
    theirs.kv_num_blocks[0, 0, 0] -= 1
    assert not kept_mask(theirs).follow(mask_mod)


def test_flex_keeps_the_lists_of_other_masks():
    document = torch.arange(512) // 100
    for mask_mod in (
        lambda b, h, q, k: document[q] == document[k],
        lambda b, h, q, k: (q >= k) | (k < 70),
    ):
        theirs = create_block_mask(mask_mod, None, None, 512, 512, device="cpu")
        assert not kept_mask(theirs).follow(mask_mod)
    causal_blocks = create_block_mask(causal, None, None, 512, 512, device="cpu")
    causal_blocks.seq_lengths = (512, 256)
    assert not kept_mask(causal_blocks).follow(causal)  # its lists name blocks past the last key
    all_shown = BlockMask.from_kv_blocks(causal_blocks.kv_num_blocks, causal_blocks.kv_indices)
    assert not kept_mask(all_shown).follow(all_shown.mask_mod)


def test_flex_runs_a_mask_of_torch_as_an_option(monkeypatch, capsys):
    monkeypatch.setenv("TL_ATTENTION_PRINT_CONFIGS", "1")
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    block_mask = create_block_mask(causal, None, None, 300, 300, device="cpu")
    found = flex_attention(q, k, v, block_mask=block_mask, precision="highest")
    assert "-> causal=True (recognized)" in capsys.readouterr().err
    torch.testing.assert_close(found, flex_attention(q, k, v, mask_mod=causal, precision="highest"))


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: q.float() + 2.0**25 >= k.float() + 2.0**25,
        lambda b, h, q, k: (q + 2**25).float() >= (k + 2**25).float(),
    ],
    ids=["float", "cast"],
)
def test_flex_does_not_recognize_positions_that_round(mask_mod):
    assert builtin_options(trace(None, mask_mod, False), 8, 8) is None
    sizes = None, None, 8, 8, "cpu", 1
    ours = tl_attention.create_block_mask(mask_mod, *sizes)
    assert torch.equal(ours.to_dense(), create_block_mask(mask_mod, *sizes).to_dense())


def test_flex_does_not_recognize_what_rounds():
    assert (
        builtin_options(trace(lambda s, b, h, q, k: 20 * torch.tanh(s.long() / 20), None, False), 8, 8)
        is None
    )


def test_flex_does_not_recognize_what_learns():
    learned = torch.rand(HEADS, requires_grad=True)
    assert builtin_options(trace(lambda s, b, h, q, k: s + learned[h] * (k - q), causal, True), 8, 8) is None


PROGRAMS = {name: trace(*cases(Captured("cpu"))[name][:2], True).program for name in NAMES}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["causal", "softcap", "relative", "together"])
def test_flex_every_width_has_a_legal_config(name, direction):
    for width in tile_widths(direction):
        program = PROGRAMS[name].forward if direction == "fwd" else PROGRAMS[name]
        for bucket in ("1k", "split") if direction == "fwd" else ("1k",):
            problem = AttnProblem.of("bfloat16", *width, False, direction, program=program)
            config, source = configs.pick_config(problem, bucket, "NVIDIA H200", direction)
            assert legality.fault(problem, config, direction) is None, source
            assert getattr(config, "split", False) == (bucket == "split")


def test_flex_bounds_scores_that_may_be_undefined_past_the_last_query():
    table = torch.rand(HEADS, 2 * MAX)
    for score_mod, may_be_undefined in (
        (lambda s, b, h, q, k: s * torch.sqrt(600.5 - q), True),
        (lambda s, b, h, q, k: s / (600.0 - q), True),
        (lambda s, b, h, q, k: s + torch.where(q < 600, torch.log(600 - q), 0.0), True),
        (lambda s, b, h, q, k: 1 / s, True),
        (lambda s, b, h, q, k: s * torch.sqrt(k + 1.0), False),  # keys past the last are hidden
        (lambda s, b, h, q, k: s + table[h, (40 * torch.log(600.5 - q)).long()], False),  # within the table
        (lambda s, b, h, q, k: (s / 3) ** 2 + (q - k) ** 2, False),
    ):
        assert trace(score_mod, None, False).program.may_be_undefined == may_be_undefined
    assert {name for name, program in PROGRAMS.items() if program.may_be_undefined} == {
        "singular",
        "undefined",
    }


LOWERED = [  # with the most bytes of spills
    ("relative", FwdConfig(128, 128, schedule="dynamic"), 0),
    ("relative", BwdPass("dq+dk+dv", 64, 128, reuse_registers=True), 0),
    ("together", BwdPass("dk+dv", 64, 128, reuse_registers=True), 56),
    ("slopes", BwdPass("dq", 128, 64), 0),
    ("undefined", BwdPass("dk+dv", 64, 128, reuse_registers=True), 0),
]


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
@pytest.mark.timeout(300)
@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("name", "config", "most"), LOWERED, ids=lambda x: str(x).replace(" ", "-"))
def test_flex_kernels_compile_without_spills(name, config, most, tmp_path):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    program = PROGRAMS[name].forward if isinstance(config, FwdConfig) else PROGRAMS[name]
    problem = AttnProblem("bfloat16", 128, 128, False, (), program)
    source, _ = compiler.lower(problem, config)
    assert "tl_attention_new_score" in source
    output, _ = compiler.assemble(
        source, tmp_path, compiler.pass_configs(problem, config), ["-Xptxas=-v", "-w"]
    )
    assert int(re.search(r"(\d+) bytes spill stores", output)[1]) <= most and "C75" not in output


UNARY = (
    torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.abs, torch.square, torch.erf, torch.atan, torch.relu, torch.floor,
    torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.softplus, lambda x: torch.exp(-x.abs()),
    lambda x: torch.log1p(x.abs()), lambda x: torch.sqrt(x.abs() + 0.5), lambda x: torch.rsqrt(x.abs() + 1), lambda x: x**3 * 0.1,
    lambda x: x.abs() ** 1.5, lambda x: torch.clamp(x, -2, 2), lambda x: torch.expm1(x.clamp(max=1)), lambda x: torch.round(x) * 0.5 + x,
)  # fmt: skip
BINARY = (
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda x, y: x / (y.abs() + 1), 
    lambda x, y: torch.where(x > y, x, y * 0.5),
)  # fmt: skip


def random_score_mod(seed: int, c: Captured):
    """A composition of 2 to 6 operations on the score, positions and captured tensors."""
    draw = random.Random(seed)

    def operand(s, b, h, q, k):
        choices = (
            lambda: s, lambda: (q - k) * 0.01, lambda: c.slopes[h], lambda: c.relative[h, q - k + MAX], lambda: c.of_query[b, q],
            lambda: draw.uniform(-2, 2) + 0 * s, lambda: (k % 7).float() * 0.2, lambda: c.temperature * s,
        )  # fmt: skip
        return draw.choice(choices)()

    def score_mod(s, b, h, q, k):
        draw.seed(seed)
        x = s
        for _ in range(draw.randint(2, 6)):
            x = (
                draw.choice(UNARY)(x)
                if draw.random() < 0.4
                else draw.choice(BINARY)(x, operand(s, b, h, q, k))
            )
        return torch.clamp(x, -30, 30) + s * 0.1

    return score_mod


@pytest.mark.in_turn(10)
@pytest.mark.parametrize("seed", range(40))
def test_flex_random_functions_on_cpu(seed):
    c = Captured("cpu")
    score_mod = random_score_mod(seed, c)
    learned = [x for x in trace(score_mod, None, True).tensors if x.requires_grad]
    check(*inputs("cpu", torch.bfloat16, 30, 40, 16), score_mod, causal, learned)


SEEDS = range(4), range(4, 8), range(8, 12)


def several(seeds: range, c: Captured):
    """One function that computes random_score_mod of another seed in each head."""
    functions = [random_score_mod(seed, c) for seed in seeds]

    def score_mod(s, b, h, q, k):
        x = functions[0](s, b, h, q, k)
        for i, function in enumerate(functions[1:], 1):
            x = torch.where(h == i, function(s, b, h, q, k), x)
        return x

    return score_mod


# Kernels. Each program has two or three, so there are few programs


@pytest.fixture(scope="module")
def built():
    """The kernels of the GPU tests, built at the same time."""
    c = Captured("cuda")
    made = cases(c)
    functions = [
        *((*made["together"][:2], torch.bfloat16, 128), (*made["documents"][:2], torch.bfloat16, 128)),
        (*made["softcap"][:2], torch.float16, 64),
        (*made["undefined"][:2], torch.bfloat16, 64),
        *((several(seeds, c), causal, torch.bfloat16, 64) for seeds in SEEDS),
    ]
    kernels = []
    for score_mod, mask_mod, dtype, head_dim in functions:
        program = trace(score_mod, mask_mod, True).program
        for direction in ("fwd", "bwd"):
            its_program = program.forward if direction == "fwd" else program
            problem = AttnProblem(
                str(dtype).removeprefix("torch."), head_dim, head_dim, False, (), its_program
            )
            config, _ = configs.pick_config(problem, "1k", torch.cuda.get_device_name(), direction)
            kernels += config.kernels(problem)
    failed = {kernel: error for kernel, error in building.build_all(kernels).items() if error}
    assert not failed, failed


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "seqlen_q", "seqlen_k"),
    [
        ("together", 128, torch.bfloat16, 577, 600),
        ("together", 128, torch.bfloat16, 70, 333),
        ("documents", 128, torch.bfloat16, 600, 577),
        ("softcap", 64, torch.float16, 577, 580),
        ("causal", 128, torch.bfloat16, 600, 600),  # a kernel with causal=True
        ("softcap", 40, torch.float16, 600, 1),
        ("undefined", 64, torch.bfloat16, 577, 600),
    ],
)
def test_flex_matches_the_formula(name, head_dim, dtype, seqlen_q, seqlen_k):
    score_mod, mask_mod, learned = cases(Captured("cuda"))[name]
    check(*inputs("cuda", dtype, seqlen_q, seqlen_k, head_dim), score_mod, mask_mod, learned)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_flex_random_functions(seeds):
    c = Captured("cuda")
    score_mod = several(seeds, c)
    learned = [x for x in trace(score_mod, None, True).tensors if x.requires_grad]
    check(*inputs("cuda", torch.bfloat16, 577, 600, 64), score_mod, causal, learned)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_flex_matches_torch():
    """PyTorch's eager function. Its gradients of captured tensors fail in PyTorch 2.11, so the formula's stand for them."""
    score_mod, mask_mod, _ = cases(Captured("cuda"))["together"]
    q, k, v = inputs("cuda", torch.bfloat16, 256, 256, 128)
    block_mask = create_block_mask(mask_mod, len(q), HEADS, 256, 256)
    with torch.no_grad():
        ours, theirs = (
            f(q, k, v, score_mod, block_mask, None, True, True)
            for f in (flex_attention, torch_flex_attention)
        )
    for name, mine, x in zip(("out", "lse"), ours, theirs, strict=True):
        scale = x.float().abs().max().item()
        assert (mine.float() - x.float()).abs().max().item() <= 0.03 * scale + 1e-3, name


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_flex_new_lengths_and_values_build_nothing():
    def call(length, cap):
        c = Captured("cuda")
        score_mod, mask_mod, learned = cases(c, cap)["together"]
        q = torch.randn(
            len(c.documents), HEADS, length, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        flex_attention(q, q, q, score_mod, mask_mod=mask_mod).sum().backward()
        assert all(x.grad.isfinite().all() for x in learned)

    for length in (64, 600):
        call(length, 20.0)
    built = building.compile_count()
    for length in range(17, 600, 12):
        call(length, 10.0 + length)
    assert building.compile_count() == built


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_flex_deterministic():
    made = cases(Captured("cuda"))
    q, k, v = inputs("cuda", torch.float16, 577, 580, 64)
    runs = []
    for _ in range(3):
        out = flex_attention(
            q, k, v, made["softcap"][0], mask_mod=causal, enable_gqa=True, deterministic=True
        )
        runs.append(torch.autograd.grad(out.sum(), [q, k, v]))
    assert all(torch.equal(x, y) for run in runs for x, y in zip(run, runs[0], strict=True))


@pytest.mark.gpu
def test_flex_captured_tensors_of_another_device_are_refused():
    q = torch.randn(1, 4, 8, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="captured tensor 0.*expected the device of query, cuda:0"):
        flex_attention(q, q, q, lambda s, b, h, q, k: s + small[h])


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("of", ["query", "dout"])
def test_flex_nan_reaches_gradients_of_captured_tensors(of):
    """NaN in a row of one head: in its gradients, and in none of another head."""
    score_mod, mask_mod, (temperature, relative, slopes) = cases(Captured("cuda"))["together"]
    q, k, v = inputs("cuda", torch.bfloat16, 577, 600, 128)
    dout = torch.randn_like(q)
    (q if of == "query" else dout).data[0, 1, 20] = math.nan
    out = flex_attention(q, k, v, score_mod, mask_mod=mask_mod, enable_gqa=True)
    found = torch.autograd.grad(out, [temperature, relative, slopes], dout)
    assert found[0].isnan()
    for x in found[1:]:
        assert x.view(HEADS, -1).isnan().any(1).tolist() == [False, True, False, False]


def test_a_sink_is_a_factor_of_the_output():
    """The recipe of docs/flex.md beside a mask, at queries that see no key, too: results and gradients of learnable_sink."""
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (9, 5, 5))
    sink = torch.randn(4, requires_grad=True)
    out, lse = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: i - 4 >= j, return_lse=True)
    out, lse = (
        out * torch.sigmoid(lse - sink[:, None])[..., None],
        torch.logaddexp(lse, sink[:, None]),
    )
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected, its_lse, _ = flash_attn_func(*turned, causal=True, learnable_sink=sink, return_attn_probs=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, its_lse)
    grads = [
        torch.autograd.grad(x.sin().sum() + y.sin().sum(), (q, k, v, sink))
        for x, y in ((out, lse), (expected, its_lse))
    ]
    for mine, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(mine, wanted)


def saved_by(pack, unpack):
    def attend(function, tensors):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return function(*tensors)

    return attend


SAVING = {
    "checkpoint": lambda function, tensors: checkpoint(function, *tensors, use_reentrant=False),
    "checkpoints": lambda function, tensors: checkpoint(
        lambda *x: checkpoint(function, *x, use_reentrant=False), *tensors, use_reentrant=False
    ),
    "hooks": saved_by(lambda x: x.numpy(), torch.from_numpy),
}


@pytest.mark.parametrize(
    ("save", "factor"), zip(SAVING.values(), (1.25, 1.75, 2.25), strict=True), ids=SAVING
)
def test_flex_traces_apart_from_hooks_of_saved_tensors(save, factor):
    """The first call of a learned function that is not linear: autograd saves tensors of the trace, which no hook of the caller may get."""
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, requires_grad=True)

    def attend(q, k, v):
        return flex_attention(
            q, k, v, lambda s, b, h, i, j: torch.tanh(s * slopes[h]) * factor, mask_mod=causal
        )

    out = save(attend, (q, k, v))
    dout, leaves = torch.randn_like(out), (q, k, v, slopes)
    grads = torch.autograd.grad(out, leaves, dout)
    for mine, wanted in zip(grads, torch.autograd.grad(attend(q, k, v), leaves, dout), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_flex_in_selective_checkpoints_at_the_first_call():
    """Such a checkpoint counts operations, and those of a trace and of the lists of a mask come once alone, in the forward."""
    q, k, v = (torch.randn(1, 2, 39, 16, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, requires_grad=True)

    def attend(q, k, v):
        mask = block_masks.sliding_window(39, 39, (11, 2), device="cpu", block_size=16)
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s * slopes[h]) * 1.375, mask)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(attend, q, k, v, use_reentrant=False, context_fn=contexts)
    dout, leaves = torch.randn_like(out), (q, k, v, slopes)
    grads = torch.autograd.grad(out, leaves, dout)
    for mine, wanted in zip(grads, torch.autograd.grad(attend(q, k, v), leaves, dout), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_flex_under_anomaly_detection_has_queries_without_keys():
    q = torch.randn(1, 2, 9, 16, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        out = flex_attention(q, q, q, lambda s, b, h, i, j: torch.tanh(s), mask_mod=lambda b, h, i, j: i > j)
        out.sum().backward()
    assert q.grad.isfinite().all() and not out[:, :, 0].any()
