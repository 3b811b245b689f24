"""The reference compared to plain arithmetic and to PyTorch's SDPA, and general properties of attention."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_attention.reference import attention, attention_backward_reference, attention_reference

# batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal
CASES = {
    "one-key": (1, 1, 1, 1, 1, 2, 2, False),
    "full": (2, 2, 2, 3, 5, 4, 4, False),
    "causal-square": (1, 2, 2, 5, 5, 4, 4, True),
    "causal-more-keys": (2, 1, 1, 3, 7, 4, 4, True),
    "causal-empty-rows": (1, 2, 2, 7, 3, 4, 4, True),
    "gqa-causal": (2, 6, 2, 4, 6, 3, 3, True),
    "mqa-tail-dim": (1, 4, 1, 4, 4, 6, 2, True),
    "value-wider": (1, 2, 1, 3, 4, 2, 5, False),
}


def draw(batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, *, dtype=torch.float64):
    """Random normal q, k, v, [batch, seqlen, heads, head_dim]."""
    return (
        torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim_v, dtype=dtype),
    )


def exact(q, k, v, softmax_scale=None, causal=False, **options):
    return attention_reference(q, k, v, softmax_scale, causal, dtype=torch.float64, **options)


def exact_backward(*args, **options):
    return attention_backward_reference(*args, dtype=torch.float64, **options)


def draw_dout(q, v):
    return torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype)


def draw_dlse(q):
    return torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype)


def autograd_of_reference(dout, q, k, v, scale, causal, dlse=None, lse_base2=False):
    """dq, dk, dv of attention_reference in fp64, by autograd."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = exact(*inputs, scale, causal, lse_base2=lse_base2)
    if not out.requires_grad:  # no row sees a key
        return tuple(torch.zeros_like(x) for x in inputs)
    outputs, grads = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return torch.autograd.grad(outputs, inputs, grads)


def in_floats(q, k, v, scale, causal):
    """out and lse of finite inputs, computed per query in Python floats."""
    batch, seqlen_q, heads_q, _ = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    out = torch.zeros(batch, seqlen_q, heads_q, head_dim_v, dtype=torch.float64)
    lse = torch.full((batch, heads_q, seqlen_q), -math.inf, dtype=torch.float64)
    for b, h, i in product(range(batch), range(heads_q), range(seqlen_q)):
        g = h // (heads_q // heads_kv)
        keys = [j for j in range(seqlen_k) if not causal or j <= i + seqlen_k - seqlen_q]
        weights = [
            math.exp(
                scale * sum(x * y for x, y in zip(q[b, i, h].tolist(), k[b, j, g].tolist(), strict=True))
            )
            for j in keys
        ]
        if keys:
            lse[b, h, i] = math.log(sum(weights))
            for d in range(head_dim_v):
                total = sum(weight * float(v[b, j, g, d]) for j, weight in zip(keys, weights, strict=True))
                out[b, i, h, d] = total / sum(weights)
    return out, lse


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_reference_matches_sdpa(case):
    *sizes, causal = case
    q, k, v = draw(*sizes, dtype=torch.float32)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    sees = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        sees = sees.tril(seqlen_k - seqlen_q)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=sees, enable_gqa=True)
    out, _ = attention_reference(q, k, v, causal=causal)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, sdpa.transpose(1, 2).masked_fill(~sees.any(-1)[:, None, None], 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_in_half_precision_computes_in_it(dtype):
    q, k, v = draw(2, 4, 2, 33, 40, 16, 16, dtype=dtype)
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q * 0.25, k).softmax(-1)
    out, lse = attention_reference(q, k, v, 0.25, dtype=dtype)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", weights, v), rtol=2e-2, atol=2e-2)


def test_reference_default_scale_uses_head_dim_of_q():
    q, k, v = draw(1, 2, 2, 4, 4, 16, 8)
    torch.testing.assert_close(exact(q, k, v), exact(q, k, v, 0.25), rtol=0, atol=0)


EMPTY = {
    "batch": (0, 2, 2, 3, 4),
    "heads": (2, 0, 0, 3, 4),
    "seqlen_q": (2, 2, 1, 0, 4),
    "seqlen_k": (2, 2, 1, 3, 0),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY.keys())
def test_reference_empty_tensors(sizes, causal):
    batch, heads_q, _, seqlen_q, _ = sizes
    out, lse = attention_reference(*draw(*sizes, 8, 4), causal=causal, lse_base2=True)
    assert out.shape == (batch, seqlen_q, heads_q, 4) and lse.shape == (batch, heads_q, seqlen_q)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_reference_row_without_keys_is_zero():
    out, lse = exact(*draw(1, 2, 1, 5, 2, 4, 4), causal=True)
    assert (out[:, :3] == 0).all() and (lse[..., :3] == -math.inf).all()
    assert (out[:, 3:] != 0).all() and lse[..., 3:].isfinite().all()


def test_reference_row_with_scores_of_minus_infinity_is_zero():
    q, k, v = draw(1, 1, 1, 2, 3, 4, 4)
    q[:, 0] = -math.inf
    out, lse = exact(q, k.abs(), v)
    assert (out[:, 0] == 0).all() and lse[0, 0, 0] == -math.inf and lse[0, 0, 1].isfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reference_non_finite_query_affects_its_row_only(value):
    q, k, v = draw(1, 1, 1, 3, 4, 4, 4)
    q[0, 1, 0, 0] = value
    out, lse = exact(q, k.abs(), v)
    assert out[:, 1].isnan().all() and lse[..., 1].isnan().all()
    assert out[:, ::2].isfinite().all() and lse[..., ::2].isfinite().all()


def test_reference_infinite_values_stay_infinite():
    q, k, v = draw(1, 1, 1, 2, 3, 4, 4)
    v[0, 0, 0, 1], v[0, 1, 0, 2], v[0, :2, 0, 3] = math.inf, -math.inf, torch.tensor([math.inf, -math.inf])
    out, lse = exact(q, k, v)
    assert (out[..., 1] == math.inf).all() and (out[..., 2] == -math.inf).all() and out[..., 3].isnan().all()
    assert out[..., 0].isfinite().all() and lse.isfinite().all()


def test_reference_accepts_any_strides():
    q, k, v = draw(2, 4, 2, 5, 6, 4, 4)
    strided = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
    torch.testing.assert_close(exact(*strided, causal=True), exact(q, k, v, causal=True), rtol=0, atol=0)


def test_reference_has_gradients():
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 1, 4, 3, 3, 2))
    assert torch.autograd.gradcheck(lambda *x: exact(*x, causal=True)[0], (q, k, v))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY.keys())
def test_backward_empty_tensors(sizes, causal):
    q, k, v = draw(*sizes, 8, 4)
    grads = exact_backward(draw_dout(q, v), q, k, v, causal=causal)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert not any(x.any() for x in grads)


def test_backward_row_without_keys_is_zero():
    q, k, v = draw(1, 2, 1, 5, 2, 4, 4)
    dout, dlse = draw_dout(q, v), draw_dlse(q)
    expected = exact_backward(dout[:, 3:], q[:, 3:], k, v, causal=True, dlse=dlse[..., 3:])
    dout[:, :3], dlse[..., :3] = math.nan, math.inf
    dq, dk, dv = exact_backward(dout, q, k, v, causal=True, dlse=dlse)
    assert (dq[:, :3] == 0).all()
    torch.testing.assert_close((dq[:, 3:], dk, dv), expected)


def test_backward_row_with_scores_of_minus_infinity_is_zero():
    q, k, v = draw(1, 1, 1, 2, 3, 4, 4)
    dout, k = draw_dout(q, v), k.abs()
    expected = exact_backward(dout[:, 1:], q[:, 1:], k, v)
    q[:, 0] = -math.inf
    dq, _, dv = exact_backward(dout, q, k, v)
    assert (dq[:, 0] == 0).all()
    torch.testing.assert_close((dq[:, 1:], dv), (expected[0], expected[2]))


@pytest.mark.parametrize("name", ["dout", "q", "dlse"])
def test_backward_of_a_query_does_not_reach_masked_keys(name):
    q, k, v = draw(1, 2, 1, 4, 5, 4, 4)
    dout, dlse = draw_dout(q, v), draw_dlse(q)
    _, *expected = exact_backward(dout, q, k, v, causal=True, dlse=dlse)
    {"dout": dout, "q": q, "dlse": dlse.mT}[name][:, 0] = math.nan  # query 0 sees keys 0 and 1
    _, dk, dv = exact_backward(dout, q, k, v, causal=True, dlse=dlse)
    torch.testing.assert_close([dk[:, 2:], dv[:, 2:]], [x[:, 2:] for x in expected])
    assert dk[:, :2].isnan().all() and dv[:, :2].isnan().all() == (name != "dlse")


def test_backward_accepts_any_strides_and_returns_dense_gradients():
    q, k, v = draw(2, 4, 2, 5, 6, 4, 4)
    dout = draw_dout(q, v)
    expected = exact_backward(dout, q, k, v, causal=True)
    strided = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (dout, q, k, v))
    grads = exact_backward(*strided, causal=True)
    assert all(x.is_contiguous() for x in grads)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)
    expanded = torch.ones((), dtype=torch.float64).expand_as(dout)
    torch.testing.assert_close(
        exact_backward(expanded, q, k, v), exact_backward(expanded.contiguous(), q, k, v), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_backward_computes_in_the_given_dtype(dtype):
    q, k, v = draw(2, 4, 2, 33, 40, 16, 16, dtype=dtype)
    dout = draw_dout(q, v)
    grads = attention_backward_reference(dout, q, k, v, causal=True, dtype=dtype)
    expected = exact_backward(dout, q, k, v, causal=True)
    error = max(float((x - y).abs().max()) for x, y in zip(grads, expected, strict=True))
    assert {x.dtype for x in grads} == {dtype}
    assert torch.finfo(dtype).eps / 8 < error < 30 * torch.finfo(dtype).eps


@pytest.fixture
def tf32():
    """Enable TF32 during a test."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    yield
    matmul.fp32_precision = before


def test_reference_restores_the_matmul_precision(tf32, monkeypatch):
    inside = []
    monkeypatch.setattr(
        attention, "_forward_of_chunk", lambda *_: inside.append(torch.backends.cuda.matmul.fp32_precision)
    )
    with pytest.raises(TypeError):
        attention_reference(*draw(1, 1, 1, 2, 2, 4, 4))
    assert inside == ["ieee"] and torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.gpu
def test_backward_memory_is_bounded():
    q, k, v, dout = (torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention_backward_reference(dout, q, k, v, causal=True)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30


@pytest.mark.gpu
def test_reference_ignores_tf32(tf32):
    q, k, v = (x.cuda() for x in draw(1, 2, 1, 256, 256, 128, 128))
    torch.testing.assert_close(
        attention_reference(q, k, v), exact(q, k, v), check_dtype=False, rtol=1e-5, atol=1e-5
    )


SIZES = st.tuples(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    *[st.integers(1, 12)] * 2,
    *[st.integers(1, 5)] * 2,
).map(lambda s: (s[0], *s[1], *s[2:]))
SCALES = st.sampled_from([0.8, 0.0, -0.7])
SEEDS = st.integers(0, 2**32 - 1)


@given(sizes=SIZES, causal=st.booleans(), scale=SCALES, seed=SEEDS)
@settings(max_examples=80)
def test_reference_matches_arithmetic_on_any_shape(sizes, causal, scale, seed):
    torch.manual_seed(seed)
    q, k, v = draw(*sizes)
    torch.testing.assert_close(exact(q, k, v, scale, causal), in_floats(q, k, v, scale, causal))


@given(sizes=SIZES, causal=st.booleans(), scale=SCALES, lse_base2=st.booleans(), seed=SEEDS)
@settings(max_examples=80)
def test_backward_matches_autograd_on_any_shape(sizes, causal, scale, lse_base2, seed):
    torch.manual_seed(seed)
    q, k, v = draw(*sizes)
    dout, dlse = draw_dout(q, v), draw_dlse(q)
    torch.testing.assert_close(
        exact_backward(dout, q, k, v, scale, causal, dlse=dlse, lse_base2=lse_base2),
        autograd_of_reference(dout, q, k, v, scale, causal, dlse, lse_base2),
    )


@given(sizes=SIZES, cut=st.integers(0, 12), seed=SEEDS)
def test_reference_halves_of_the_keys_merge_through_the_lse(sizes, cut, seed):
    torch.manual_seed(seed)
    q, k, v = draw(*sizes)
    parts = [exact(q, k[:, keys], v[:, keys], 1.0) for keys in (slice(cut), slice(cut, None))]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = exact(q, k, v, 1.0)
    torch.testing.assert_close(lses.logsumexp(0), lse)
    torch.testing.assert_close(((lses - lse).exp().transpose(2, 3)[..., None] * outs).sum(0), out)
