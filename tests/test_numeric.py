"""The error rule accepts PyTorch's own rounding errors and rejects errors of a kernel."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention.reference import attention_backward_reference, attention_reference
from tl_attention.testing.inputs import (
    GUARD,
    LAYOUTS,
    guard_is_untouched,
    make_dlse,
    make_dout,
    make_inputs,
    poisoned,
)
from tl_attention.testing.numeric import check_bwd, check_fwd
from tl_attention.testing.shapes import Shape

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
def ideal_forward(shape, dtype):
    """out and lse of an ideal kernel (fp32, rounded at the end), and its arguments."""
    q, k, v = make_inputs(shape, dtype, device="cpu")
    out, lse = attention_reference(q, k, v, causal=shape.causal)
    return out.to(dtype), lse, (q, k, v, None, shape.causal)


def test_rule_accepts_an_ideal_kernel(ideal_forward):
    out, lse, args = ideal_forward
    result = check_fwd(out, lse, *args)
    assert result.ok and result.max_err_ratio < 0.6 and result.lse_err_ratio < 0.1, result.text


def test_rule_accepts_same_dtype_rounding(ideal_forward):
    out, lse, args = ideal_forward
    same_dtype, _ = attention_reference(*args, dtype=out.dtype)
    result = check_fwd(same_dtype, lse, *args)
    assert result.ok and result.max_err_ratio <= 0.5, result.text


def test_rule_rejects_one_wrong_element(ideal_forward):
    out, lse, args = ideal_forward
    out[0, 33, 1, 5] += 0.1
    result = check_fwd(out, lse, *args)
    assert not result.ok and result.max_err_ratio > 1 >= result.lse_err_ratio
    assert "out[0, 33, 1, 5]" in result.text


def test_rule_rejects_one_wrong_lse(ideal_forward):
    out, lse, args = ideal_forward
    lse[0, 1, 33] += 0.001
    result = check_fwd(out, lse, *args)
    assert not result.ok and result.lse_err_ratio > 1 >= result.max_err_ratio
    assert "lse[0, 1, 33]" in result.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rule_rejects_a_misplaced_non_finite_value(ideal_forward, value):
    out, lse, args = ideal_forward
    out[0, 36, 0, 3] = value
    assert check_fwd(out, lse, *args).max_err_ratio == math.inf


@pytest.mark.parametrize("value", [math.nan, 0.0], ids=["poison", "zeros"])
def test_rule_rejects_an_unwritten_row(ideal_forward, value):
    out, _, args = ideal_forward
    out[-1, -1, -1] = value
    assert not check_fwd(out, None, *args).ok


def test_rule_rejects_a_mask_shifted_by_one_key(ideal_forward):
    out, _, (q, k, v, scale, causal) = ideal_forward
    shifted, shifted_lse = attention_reference(q, k[:, :-1], v[:, :-1], scale, causal)
    result = check_fwd(shifted.to(out.dtype), shifted_lse, q, k, v, scale, causal)
    assert not result.ok and result.lse_err_ratio > 1 and (result.max_err_ratio > 1 or not causal)


def test_rule_rejects_the_other_base(ideal_forward):
    out, lse, args = ideal_forward
    assert not check_fwd(out, lse, *args, lse_base2=True).ok
    assert check_fwd(out, lse / math.log(2), *args, lse_base2=True).ok


def test_rule_requires_nan_where_the_reference_has_it(ideal_forward):
    out, lse, (q, k, v, scale, causal) = ideal_forward
    q = q.clone()
    q[0, -1, 0] = math.nan
    assert not check_fwd(out, lse, q, k, v, scale, causal).ok
    out[0, -1, 0], lse[0, 0, -1] = math.nan, math.nan
    result = check_fwd(out, lse, q, k, v, scale, causal)
    assert result.ok, result.text


def test_rule_holds_where_the_input_dtype_overflows():
    q, k, v = make_inputs(SHAPES["square"], torch.float16, device="cpu")
    q, k = q * 100, k * 100
    assert attention_reference(q, k, v, 1.0, dtype=torch.float16)[0].isnan().any()
    out, lse = attention_reference(q, k, v, 1.0, dtype=torch.float64)
    result = check_fwd(out.half(), lse.float(), q, k, v, 1.0)
    assert result.ok, result.text
    out[0, 0, 0, 0] += 0.1
    assert not check_fwd(out.half(), lse.float(), q, k, v, 1.0).ok


def test_rule_rejects_another_shape(ideal_forward):
    out, lse, args = ideal_forward
    assert "shape" in check_fwd(out[:, :-1], lse, *args).text
    assert not check_fwd(out, lse[..., :-1], *args).ok


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 4, 4), (1, 1, 1, 0, 4), (1, 1, 1, 4, 0)], ids=["batch", "seqlen_q", "seqlen_k"]
)
def test_rule_on_empty_tensors(sizes):
    q, k, v = make_inputs(Shape(*sizes, 8, 8, False), torch.float32, device="cpu")
    result = check_fwd(*attention_reference(q, k, v), q, k, v)
    assert result.ok, result.text


GRADS = ("dq", "dk", "dv")


@pytest.fixture
def ideal_backward(shape, dtype):
    """[dq, dk, dv] of an ideal kernel (fp32, rounded at the end), and its arguments."""
    args = (
        make_dout(shape, dtype, device="cpu"),
        *make_inputs(shape, dtype, device="cpu"),
        None,
        shape.causal,
        make_dlse(shape, dtype, device="cpu"),
    )
    return [x.to(dtype) for x in attention_backward_reference(*args[:-1], dlse=args[-1])], args


def test_backward_rule_accepts_an_ideal_kernel(ideal_backward):
    grads, args = ideal_backward
    result = check_bwd(grads, *args)
    assert result.ok and result.max_err_ratio < 0.6 and tuple(result.ratios) == GRADS, result.text


def test_backward_rule_accepts_same_dtype_rounding(ideal_backward):
    grads, args = ideal_backward
    same_dtype = attention_backward_reference(*args[:-1], dlse=args[-1], dtype=grads[0].dtype)
    result = check_bwd(same_dtype, *args)
    assert result.ok and result.max_err_ratio <= 0.34, result.text


def test_mean_errors_are_relative(ideal_backward):
    """Of results that are off by a factor, and of rounding to the dtype: at most half a unit in the last place."""
    grads, args = ideal_backward
    found = check_bwd([1.5 * x for x in grads], *args).mean_errors
    assert found == pytest.approx(dict.fromkeys(GRADS, 0.5), rel=0.01)
    assert 0 < max(check_bwd(grads, *args).mean_errors.values()) < torch.finfo(grads[0].dtype).eps / 2


@pytest.mark.parametrize("wrong", range(3), ids=GRADS)
def test_backward_rule_names_one_wrong_element(ideal_backward, wrong):
    grads, args = ideal_backward
    grads[wrong][0, 33, 0, 5] += grads[wrong].abs().max()
    result = check_bwd(grads, *args)
    assert not result.ok and result.text.startswith(f"{GRADS[wrong]}[0, 33, 0, 5] is ")
    assert [name for name, ratio in result.ratios.items() if ratio > 1] == [GRADS[wrong]]


def test_backward_rule_reports_the_largest_error_of_each_gradient(ideal_backward):
    grads, args = ideal_backward
    worst_first = check_bwd(grads, *args).text.split("; ")
    assert sorted(text[:2] for text in worst_first) == sorted(GRADS)
    assert all(f"of the allowed error, at {text[:2]}[" in text for text in worst_first)


@pytest.mark.parametrize("wrong", range(3), ids=GRADS)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["poison", "inf"])
def test_backward_rule_rejects_an_unwritten_row(ideal_backward, wrong, value):
    grads, args = ideal_backward
    grads[wrong][-1, -1, -1] = value
    assert check_bwd(grads, *args).ratios[GRADS[wrong]] == math.inf


@pytest.mark.parametrize("wrong", range(3), ids=GRADS)
def test_backward_rule_rejects_zeros_in_the_last_rows(ideal_backward, wrong):
    """Few queries see the last keys of a causal problem, and their probabilities are small."""
    grads, args = ideal_backward
    grads[wrong][-1, -16:, -1] = 0
    result = check_bwd(grads, *args)
    assert result.ratios[GRADS[wrong]] > 1 and result.text.startswith(GRADS[wrong]), result.text


def test_backward_rule_rejects_a_mask_shifted_by_one_key(ideal_backward):
    _, (dout, q, k, v, scale, causal, dlse) = ideal_backward
    dq, dk, dv = attention_backward_reference(dout, q, k[:, :-1], v[:, :-1], scale, causal, dlse=dlse)
    shifted = (dq, *(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (dk, dv)))
    result = check_bwd([x.to(q.dtype) for x in shifted], dout, q, k, v, scale, causal, dlse)
    assert min(result.ratios.values()) > 1, result.text


@pytest.mark.parametrize("wrong", ["missing", "base", "sign"])
def test_backward_rule_rejects_another_gradient_of_the_lse(ideal_backward, wrong):
    grads, (*args, dlse) = ideal_backward
    assert check_bwd(grads, *args, dlse * math.log(2), lse_base2=True).ok
    other = {"missing": (None, False), "base": (dlse, True), "sign": (-dlse, False)}[wrong]
    assert not check_bwd(grads, *args, *other).ok


@pytest.mark.parametrize("value", [1e-30, math.nan])
def test_backward_rule_requires_exact_zeros_for_queries_without_keys(dtype, value):
    shape = SHAPES["empty-rows"]
    args = (make_dout(shape, dtype, device="cpu"), *make_inputs(shape, dtype, device="cpu"), None, True)
    grads = [x.float() for x in attention_backward_reference(*args)]
    assert check_bwd(grads, *args).ok
    grads[0][0, 9, 1, 5] = value  # with 60 queries and 50 keys, query 9 is the last that sees no key
    result = check_bwd(grads, *args)
    assert result.ratios["dq"] > 1e6 and result.text.startswith("dq[0, 9, 1, 5] is ")


def test_backward_rule_allows_fp32_cancellation(dtype):
    """A row with one key has dP equal to delta: dq and dk are 0, and PyTorch may compute exactly 0."""
    shape = Shape(1, 1, 1, 1, 1, 192, 192, False)
    for seed in range(20):
        args = (
            make_dout(shape, dtype, seed=seed, device="cpu"),
            *make_inputs(shape, dtype, seed=seed, device="cpu"),
        )
        dq, dk, dv = attention_backward_reference(*args)
        result = check_bwd((dq, dk, dv.to(dtype)), *args)
        assert result.ok, result.text


def test_backward_rule_rejects_another_shape(ideal_backward):
    (dq, dk, dv), args = ideal_backward
    result = check_bwd((dq, dk[:, :-1], dv), *args)
    assert not result.ok and result.text.startswith("dk has shape")


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 4, 4), (1, 1, 1, 0, 4), (1, 1, 1, 4, 0)], ids=["batch", "seqlen_q", "seqlen_k"]
)
def test_backward_rule_on_empty_tensors(sizes):
    shape = Shape(*sizes, 8, 8, False)
    args = (make_dout(shape, torch.float32, device="cpu"), *make_inputs(shape, torch.float32, device="cpu"))
    result = check_bwd([torch.zeros_like(x) for x in args[1:]], *args)
    assert result.ok, result.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dout_has_the_same_values_in_every_layout(layout, shape):
    dout = make_dout(shape, torch.bfloat16, layout, seed=3, device="cpu")
    torch.testing.assert_close(dout, make_dout(shape, torch.bfloat16, seed=3, device="cpu"), rtol=0, atol=0)
    assert dout.shape == (shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim_v)
    assert dout.is_contiguous() == (layout == "bshd") and dout.stride(-1) == 1
    q, _, _ = make_inputs(shape, torch.bfloat16, seed=3, device="cpu")
    assert not torch.equal(dout, q[..., : shape.head_dim_v])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_have_the_same_values_in_every_layout(layout, shape):
    plain = make_inputs(shape, torch.bfloat16, seed=3, device="cpu")
    inputs = make_inputs(shape, torch.bfloat16, layout, seed=3, device="cpu")
    torch.testing.assert_close(inputs, plain, rtol=0, atol=0)
    assert all(x.stride(-1) == 1 and x.stride(2) % 8 == x.stride(1) % 8 == 0 for x in inputs)
    assert len({x.untyped_storage().data_ptr() for x in inputs}) == (1 if layout == "packed" else 3)


def test_inputs_depend_on_the_seed(shape):
    one, two = (make_inputs(shape, torch.float16, seed=seed, device="cpu")[0] for seed in (0, 1))
    assert (one != two).float().mean() > 0.9


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_guard_of_a_poisoned_output(layout):
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
