"""merge_states: merged attention over parts of the keys equals attention over all keys, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch

from tl_attention import merge_states
from tl_attention.reference import attention_reference

BATCH, HEADS, SEQLEN_Q, HEAD_DIM = 2, 3, 5, 8
PARTS = {"one": [7], "two": [4, 3], "five": [2, 1, 2, 1, 1], "empty": [4, 0, 3]}  # keys per part


def attend(q, k, v, lse_base2=False):
    return attention_reference(q, k, v, dtype=torch.float64, lse_base2=lse_base2)


def inputs(requires_grad=True):
    sizes = ((BATCH, s, HEADS, HEAD_DIM) for s in (SEQLEN_Q, 7, 7))
    return [torch.randn(size, dtype=torch.float64, requires_grad=requires_grad) for size in sizes]


def states(q, k, v, parts, lse_base2=False):
    pairs = zip(k.split(parts, 1), v.split(parts, 1), strict=True)
    return [list(x) for x in zip(*(attend(q, *kv, lse_base2) for kv in pairs), strict=True)]


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("lse_base2", [False, True], ids=["natural", "base2"])
@pytest.mark.parametrize("stacked", [False, True], ids=["sequences", "stacked"])
def test_merged_parts_equal_attention_over_all_keys(parts, lse_base2, stacked):
    q, k, v = inputs()
    outs, lses = states(q, k, v, parts, lse_base2)
    if stacked:
        outs, lses = torch.stack(outs), torch.stack(lses)
    merged, whole = merge_states(outs, lses, lse_base2), attend(q, k, v, lse_base2)
    weights = [torch.randn_like(x) for x in whole]
    grads, expected = (torch.autograd.grad(x, (q, k, v), weights) for x in (merged, whole))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(grads, expected)


def test_varlen_layout():
    q, k, v = inputs(requires_grad=False)
    outs, lses = states(q, k, v, [4, 3])
    expected_out, expected_lse = merge_states(outs, lses)
    out, lse = merge_states([x.flatten(0, 1) for x in outs], [x.transpose(0, 1).flatten(1) for x in lses])
    torch.testing.assert_close(out, expected_out.flatten(0, 1))
    torch.testing.assert_close(lse, expected_lse.transpose(0, 1).flatten(1))


def test_parts_without_keys_contribute_nothing():
    outs = torch.randn(3, BATCH, SEQLEN_Q, HEADS, HEAD_DIM)
    lses = torch.randn(3, BATCH, HEADS, SEQLEN_Q)
    lses[1, :, :, 0] = -math.inf  # one part of three
    lses[:2, :, :, 1] = -math.inf  # two of them
    lses[:, :, :, 2] = -math.inf  # all
    outs[1, :, :3] = math.nan  # unwritten rows
    outs[0, :, 1:3] = math.nan
    outs[2, :, 2] = math.nan
    outs.requires_grad_()
    lses.requires_grad_()
    out, lse = merge_states(outs, lses)
    douts, dlses = torch.autograd.grad(
        (out, lse), (outs, lses), (torch.randn_like(out), torch.randn_like(lse))
    )
    torch.testing.assert_close(out[:, 0], merge_states(outs[::2, :, :1], lses[::2, :, :, :1])[0][:, 0])
    torch.testing.assert_close(out[:, 1], outs[2, :, 1])
    torch.testing.assert_close(lse[:, :, 1], lses[2, :, :, 1])
    assert not out[:, 2].any() and (lse[:, :, 2] == -math.inf).all()
    assert douts.isfinite().all() and dlses.isfinite().all()
    gone = lses == -math.inf
    assert not dlses[gone].any() and not douts[gone.mT].any()
    assert dlses[~gone].any()


def test_large_lses_do_not_overflow():
    outs, lses = torch.randn(2, 1, 1, 1, 4), torch.full((2, 1, 1, 1), 5e4)
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, outs.mean(0))
    torch.testing.assert_close(lse, lses[0] + math.log(2))


def test_sums_are_fp32_for_half_precision_outs():
    outs, lses = torch.randn(3, 1, 4, 2, 8), torch.randn(3, 1, 2, 4)
    out, lse = merge_states(list(outs.bfloat16()), list(lses))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    expected, _ = merge_states(outs.bfloat16().float(), lses)
    assert torch.equal(out, expected.bfloat16())


def test_empty_states():
    out, lse = merge_states([torch.zeros(2, 0, 3, 8)] * 2, [torch.zeros(2, 3, 0)] * 2)
    assert out.shape == (2, 0, 3, 8) and lse.shape == (2, 3, 0)


def test_torch_compile_has_no_graph_break():
    torch._dynamo.reset()
    outs, lses = torch.randn(2, 1, 4, 2, 8), torch.randn(2, 1, 2, 4)
    compiled = torch.compile(merge_states, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(outs, lses), merge_states(outs, lses))


OUT, LSE = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
ERRORS = {
    "no-sequence": (1.0, [LSE], TypeError, r"outs: expected a list of tensors.*got float"),
    "no-tensors": ([OUT], [1.0], TypeError, r"lses\[0\]: expected a torch\.Tensor, got float"),
    "none": ([], [], ValueError, r"outs, lses: expected non-empty lists of equal length, got 0 and 0"),
    "numbers": ([OUT, OUT], [LSE], ValueError, r"outs, lses: expected non-empty lists of equal length, got 2 and 1"),
    "2-dimensions": ([OUT[0, 0]], [LSE], ValueError, r"outs\[0\]: expected \[batch, seqlen, heads, head_dim\] or.*got shape \(2, 8\)"),
    "shapes": ([OUT, OUT[:, :3]], [LSE, LSE], ValueError, r"outs\[1\]: expected the shape of outs\[0\].*got \(1, 3, 2, 8\)"),
    "lse-shape": ([OUT], [LSE.mT], ValueError, r"lses\[0\]: expected shape \(1, 2, 4\) for outs of shape \(1, 4, 2, 8\), got \(1, 4, 2\)"),
    "lse-dtype": ([OUT], [LSE.bfloat16()], TypeError, r"outs\[0\], lses\[0\]: expected a floating-point out.*got torch\.float32 and"),
    "dtypes": ([OUT, OUT.half()], [LSE, LSE], TypeError, r"outs\[1\]: expected the dtype of outs\[0\], torch\.float32, got torch\.float16"),
    "device": ([OUT], [LSE.to("meta")], ValueError, r"outs\[0\], lses\[0\]: expected the device of outs\[0\], cpu, got cpu and meta"),
}  # fmt: skip


@pytest.mark.parametrize(("outs", "lses", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_errors(outs, lses, error, text):
    with pytest.raises(error, match=text):
        merge_states(outs, lses)


@pytest.mark.parametrize("value", [1, 0, None, torch.tensor(True)])
def test_base_is_a_bool(value):
    with pytest.raises(TypeError, match="lse_base2: expected a bool, got"):
        merge_states([OUT], [LSE], lse_base2=value)
