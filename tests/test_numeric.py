"""The error rule lets through what PyTorch itself gets wrong, and nothing a kernel gets wrong."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention.reference import attention_reference
from tl_attention.testing.bench import Shape
from tl_attention.testing.inputs import GUARD, LAYOUTS, guard_is_untouched, make_inputs, poisoned
from tl_attention.testing.numeric import check_fwd

SHAPES = {
    "square": Shape(2, 4, 2, 128, 128, 64, 64, True),
    "more-keys": Shape(1, 2, 1, 37, 150, 40, 24, True),
    "empty-rows": Shape(1, 2, 2, 60, 50, 32, 32, True),
    "full": Shape(1, 2, 2, 64, 300, 64, 64, False),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request):
    return request.param


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request):
    return request.param


@pytest.fixture
def right(shape, dtype):
    """out, lse of a perfect kernel (fp32 inside, rounded at the end) and the arguments they answer."""
    q, k, v = make_inputs(shape, dtype, device="cpu")
    out, lse = attention_reference(q, k, v, causal=shape.causal)
    return out.to(dtype), lse, (q, k, v, None, shape.causal)


def test_rule_accepts_a_perfect_kernel(right):
    out, lse, args = right
    verdict = check_fwd(out, lse, *args)
    assert verdict.ok and verdict.max_err_ratio < 0.6 and verdict.lse_err_ratio < 0.1, verdict.text


def test_rule_accepts_same_dtype_rounding(right):
    out, lse, args = right
    same_dtype, _ = attention_reference(*args, dtype=out.dtype)
    verdict = check_fwd(same_dtype, lse, *args)
    assert verdict.ok and verdict.max_err_ratio <= 0.5, verdict.text


def test_rule_rejects_one_wrong_element(right):
    out, lse, args = right
    out[0, 33, 1, 5] += 0.1
    verdict = check_fwd(out, lse, *args)
    assert not verdict.ok and verdict.max_err_ratio > 1 >= verdict.lse_err_ratio
    assert "out[0, 33, 1, 5]" in verdict.text


def test_rule_rejects_one_wrong_lse(right):
    out, lse, args = right
    lse[0, 1, 33] += 0.001
    verdict = check_fwd(out, lse, *args)
    assert not verdict.ok and verdict.lse_err_ratio > 1 >= verdict.max_err_ratio
    assert "lse[0, 1, 33]" in verdict.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rule_rejects_a_misplaced_non_finite_value(right, value):
    out, lse, args = right
    out[0, 36, 0, 3] = value
    assert check_fwd(out, lse, *args).max_err_ratio == math.inf


@pytest.mark.parametrize("value", [math.nan, 0.0], ids=["poison", "zeros"])
def test_rule_rejects_an_unwritten_row(right, value):
    out, _, args = right
    out[-1, -1, -1] = value
    assert not check_fwd(out, None, *args).ok


def test_rule_rejects_a_mask_shifted_by_one_key(right):
    out, _, (q, k, v, scale, causal) = right
    shifted, shifted_lse = attention_reference(q, k[:, :-1], v[:, :-1], scale, causal)
    verdict = check_fwd(shifted.to(out.dtype), shifted_lse, q, k, v, scale, causal)
    assert not verdict.ok and verdict.lse_err_ratio > 1 and (verdict.max_err_ratio > 1 or not causal)


def test_rule_rejects_the_other_base(right):
    out, lse, args = right
    assert not check_fwd(out, lse, *args, lse_base2=True).ok
    assert check_fwd(out, lse / math.log(2), *args, lse_base2=True).ok


def test_rule_wants_nan_where_the_reference_has_it(right):
    out, lse, (q, k, v, scale, causal) = right
    q = q.clone()
    q[0, -1, 0] = math.nan
    assert not check_fwd(out, lse, q, k, v, scale, causal).ok
    out[0, -1, 0], lse[0, 0, -1] = math.nan, math.nan
    verdict = check_fwd(out, lse, q, k, v, scale, causal)
    assert verdict.ok, verdict.text


def test_rule_holds_where_the_input_dtype_overflows():
    q, k, v = make_inputs(SHAPES["square"], torch.float16, device="cpu")
    q, k = q * 100, k * 100
    assert attention_reference(q, k, v, 1.0, dtype=torch.float16)[0].isnan().any()
    out, lse = attention_reference(q, k, v, 1.0)
    verdict = check_fwd(out.half(), lse, q, k, v, 1.0)
    assert verdict.ok, verdict.text
    out[0, 0, 0, 0] += 0.1
    assert not check_fwd(out.half(), lse, q, k, v, 1.0).ok


def test_rule_rejects_another_shape(right):
    out, lse, args = right
    assert "shape" in check_fwd(out[:, :-1], lse, *args).text
    assert not check_fwd(out, lse[..., :-1], *args).ok


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 4, 4), (1, 1, 1, 0, 4), (1, 1, 1, 4, 0)], ids=["batch", "seqlen_q", "seqlen_k"]
)
def test_rule_on_empty_tensors(sizes):
    q, k, v = make_inputs(Shape(*sizes, 8, 8, False), torch.float32, device="cpu")
    verdict = check_fwd(*attention_reference(q, k, v), q, k, v)
    assert verdict.ok, verdict.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_are_the_same_values_in_every_layout(layout, shape):
    plain = make_inputs(shape, torch.bfloat16, seed=3, device="cpu")
    inputs = make_inputs(shape, torch.bfloat16, layout, seed=3, device="cpu")
    torch.testing.assert_close(inputs, plain, rtol=0, atol=0)
    assert all(x.stride(-1) == 1 and x.stride(2) % 8 == x.stride(1) % 8 == 0 for x in inputs)
    assert len({x.untyped_storage().data_ptr() for x in inputs}) == (1 if layout == "packed" else 3)


def test_inputs_of_another_seed_are_others(shape):
    one, two = (make_inputs(shape, torch.float16, seed=seed, device="cpu")[0] for seed in (0, 1))
    assert (one != two).float().mean() > 0.9


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_poisoned_output_knows_its_guard(layout):
    whole, view = poisoned(2, 5, 3, 8, dtype=torch.bfloat16, layout=layout, device="cpu")
    assert (
        view.shape == (2, 5, 3, 8) and view.isnan().all() and view.stride(1 if layout == "bhsd" else 2) == 8
    )
    view.zero_()
    assert guard_is_untouched(whole, view) and int((whole == 0).sum()) == view.numel()
    for beyond in (GUARD - 1, GUARD + view.numel()):
        whole[beyond] = 1
        assert not guard_is_untouched(whole, view)
        whole[beyond] = math.nan
