"""The error rule lets through what PyTorch itself gets wrong, and nothing a kernel gets wrong."""

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


GRADS = ("dq", "dk", "dv")


@pytest.fixture
def right_backward(shape, dtype):
    """[dq, dk, dv] of a perfect kernel (fp32 inside, rounded at the end) and the arguments they answer."""
    args = (
        make_dout(shape, dtype, device="cpu"),
        *make_inputs(shape, dtype, device="cpu"),
        None,
        shape.causal,
        make_dlse(shape, dtype, device="cpu"),
    )
    return [x.to(dtype) for x in attention_backward_reference(*args[:-1], dlse=args[-1])], args


def test_backward_rule_accepts_a_perfect_kernel(right_backward):
    grads, args = right_backward
    verdict = check_bwd(grads, *args)
    assert verdict.ok and verdict.max_err_ratio < 0.6 and tuple(verdict.ratios) == GRADS, verdict.text


def test_backward_rule_accepts_same_dtype_rounding(right_backward):
    grads, args = right_backward
    same_dtype = attention_backward_reference(*args[:-1], dlse=args[-1], dtype=grads[0].dtype)
    verdict = check_bwd(same_dtype, *args)
    assert verdict.ok and verdict.max_err_ratio <= 0.34, verdict.text


@pytest.mark.parametrize("wrong", range(3), ids=GRADS)
def test_backward_rule_names_one_wrong_element(right_backward, wrong):
    grads, args = right_backward
    grads[wrong][0, 33, 0, 5] += grads[wrong].abs().max()
    verdict = check_bwd(grads, *args)
    assert not verdict.ok and verdict.text.startswith(f"{GRADS[wrong]}[0, 33, 0, 5] is ")
    assert [name for name, ratio in verdict.ratios.items() if ratio > 1] == [GRADS[wrong]]


def test_backward_rule_says_where_a_right_gradient_is_worst(right_backward):
    grads, args = right_backward
    worst_first = check_bwd(grads, *args).text.split("; ")
    assert sorted(text[:2] for text in worst_first) == sorted(GRADS)
    assert all(f"of what is allowed, most at {text[:2]}[" in text for text in worst_first)


@pytest.mark.parametrize("wrong", range(3), ids=GRADS)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["poison", "inf"])
def test_backward_rule_rejects_an_unwritten_row(right_backward, wrong, value):
    grads, args = right_backward
    grads[wrong][-1, -1, -1] = value
    assert check_bwd(grads, *args).ratios[GRADS[wrong]] == math.inf


@pytest.mark.parametrize("wrong", range(3), ids=GRADS)
def test_backward_rule_rejects_zeros_in_the_last_rows(right_backward, wrong):
    """Where causality leaves few queries to a key, and their probabilities are small."""
    grads, args = right_backward
    grads[wrong][-1, -16:, -1] = 0
    verdict = check_bwd(grads, *args)
    assert verdict.ratios[GRADS[wrong]] > 1 and verdict.text.startswith(GRADS[wrong]), verdict.text


def test_backward_rule_rejects_a_mask_shifted_by_one_key(right_backward):
    _, (dout, q, k, v, scale, causal, dlse) = right_backward
    dq, dk, dv = attention_backward_reference(dout, q, k[:, :-1], v[:, :-1], scale, causal, dlse=dlse)
    shifted = (dq, *(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (dk, dv)))
    verdict = check_bwd([x.to(q.dtype) for x in shifted], dout, q, k, v, scale, causal, dlse)
    assert min(verdict.ratios.values()) > 1, verdict.text


@pytest.mark.parametrize("wrong", ["missing", "base", "sign"])
def test_backward_rule_rejects_another_gradient_of_the_lse(right_backward, wrong):
    grads, (*args, dlse) = right_backward
    assert check_bwd(grads, *args, dlse * math.log(2), lse_base2=True).ok
    other = {"missing": (None, False), "base": (dlse, True), "sign": (-dlse, False)}[wrong]
    assert not check_bwd(grads, *args, *other).ok


@pytest.mark.parametrize("value", [1e-30, math.nan])
def test_backward_rule_wants_exact_zeros_where_a_query_sees_no_key(dtype, value):
    shape = SHAPES["empty-rows"]
    args = (make_dout(shape, dtype, device="cpu"), *make_inputs(shape, dtype, device="cpu"), None, True)
    grads = [x.float() for x in attention_backward_reference(*args)]
    assert check_bwd(grads, *args).ok
    grads[0][0, 9, 1, 5] = value  # query 9 of 60 over 50 keys is the last that sees none
    verdict = check_bwd(grads, *args)
    assert verdict.ratios["dq"] > 1e6 and verdict.text.startswith("dq[0, 9, 1, 5] is ")


def test_backward_rule_allows_what_fp32_leaves_of_a_difference(dtype):
    """With one key dP is delta, so that dq and dk are 0, in PyTorch's sums perhaps exactly."""
    shape = Shape(1, 1, 1, 1, 1, 192, 192, False)
    for seed in range(20):
        args = (
            make_dout(shape, dtype, seed=seed, device="cpu"),
            *make_inputs(shape, dtype, seed=seed, device="cpu"),
        )
        dq, dk, dv = attention_backward_reference(*args)
        verdict = check_bwd((dq, dk, dv.to(dtype)), *args)
        assert verdict.ok, verdict.text


def test_backward_rule_rejects_another_shape(right_backward):
    (dq, dk, dv), args = right_backward
    verdict = check_bwd((dq, dk[:, :-1], dv), *args)
    assert not verdict.ok and verdict.text.startswith("dk has shape")


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 4, 4), (1, 1, 1, 0, 4), (1, 1, 1, 4, 0)], ids=["batch", "seqlen_q", "seqlen_k"]
)
def test_backward_rule_on_empty_tensors(sizes):
    shape = Shape(*sizes, 8, 8, False)
    args = (make_dout(shape, torch.float32, device="cpu"), *make_inputs(shape, torch.float32, device="cpu"))
    verdict = check_bwd([torch.zeros_like(x) for x in args[1:]], *args)
    assert verdict.ok, verdict.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dout_is_the_same_values_in_every_layout(layout, shape):
    dout = make_dout(shape, torch.bfloat16, layout, seed=3, device="cpu")
    torch.testing.assert_close(dout, make_dout(shape, torch.bfloat16, seed=3, device="cpu"), rtol=0, atol=0)
    assert dout.shape == (shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim_v)
    assert dout.is_contiguous() == (layout == "bshd") and dout.stride(-1) == 1
    q, _, _ = make_inputs(shape, torch.bfloat16, seed=3, device="cpu")
    assert not torch.equal(dout, q[..., : shape.head_dim_v])


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
