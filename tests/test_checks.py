"""Errors of the public functions, and their behaviour without a kernel: empty tensors, CPU tensors, torch.compile."""

from __future__ import annotations

import math
import runpy
import warnings

import pytest
import torch

import tl_attention
from tl_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flex_attention,
    launch,
    mha_bwd_interface,
    mha_fwd_interface,
    ref_mha_fwd_interface,
)
from tl_attention.problem import options as problem_options
from tl_attention.problem.switches import switch


def qkv(
    batch=2, heads=4, heads_kv=2, seqlen_q=5, seqlen_k=7, head_dim=64, head_dim_v=64, dtype=torch.bfloat16
):
    """Random q, k, v, [batch, heads, seqlen, head_dim]."""
    return [
        torch.randn(batch, h, s, d, dtype=dtype)
        for h, s, d in (
            (heads, seqlen_q, head_dim),
            (heads_kv, seqlen_k, head_dim),
            (heads_kv, seqlen_k, head_dim_v),
        )
    ]


def with_k(**changes):
    return [qkv()[0], *qkv(**changes)[1:]]


ERRORS = {
    "q-is-no-tensor": (lambda: [[1.0], *qkv()[1:]], {}, TypeError, r"q: expected a torch\.Tensor, got list"),
    "fp64": (lambda: qkv(dtype=torch.float64), {}, TypeError, r"q: expected bfloat16, float16 or float32, got torch\.float64; cast it"),
    "mixed-dtypes": (lambda: with_k(dtype=torch.float16), {}, TypeError, r"k, v: expected the dtype of q, torch\.bfloat16, got"),
    "3-dimensions": (lambda: [x[0] for x in qkv()], {}, ValueError, r"q: expected 4 dimensions \[batch, heads, seqlen, head_dim\]"),
    "last-dimension-strided": (
        lambda: [x.mT.contiguous().mT for x in qkv()], {}, ValueError, r"q: expected a contiguous last dimension.*contiguous\(\)",
    ),
    "devices": (lambda: [qkv()[0], *(x.to("meta") for x in qkv()[1:])], {}, ValueError, r"k, v: expected the device of q, cpu, got meta"),
    "batch": (lambda: with_k(batch=3), {}, ValueError, r"k, v: expected the batch size of q, 2, got 3 and 3"),
    "v-seqlen": (lambda: [*qkv()[:2], qkv(seqlen_k=8)[2]], {}, ValueError, r"v: expected the heads and seqlen of k, 2 and 7, got 2 and 8"),
    "heads": (lambda: with_k(heads_kv=3), {}, ValueError, r"k, v: expected a number of heads that divides the 4 of q, got 3; tensors"),
    "no-kv-heads": (lambda: with_k(heads_kv=0), {}, ValueError, r"k, v: expected a number of heads that divides the 4 of q, got 0"),
    "k-head-dim": (lambda: with_k(head_dim=72), {}, ValueError, r"k: expected the head_dim of q, 64, got 72"),
    "head-dim-0": (lambda: qkv(head_dim=0, head_dim_v=0), {}, ValueError, r"q, k, v: expected head dims of at least 1, got 0 for"),
    "head-dim-large": (lambda: qkv(head_dim=264), {}, NotImplementedError, r"q, k: expected a head_dim of at most 256, got 264.*; call"),
    "head-dim-v-larger": (lambda: qkv(head_dim_v=128), {}, NotImplementedError, r"v: expected a head_dim of at most that of q and k, 64"),
    "scale-inf": (qkv, {"sm_scale": math.inf}, ValueError, r"sm_scale: expected a finite number, or None.*got inf"),
    "scale-nan": (qkv, {"sm_scale": math.nan}, ValueError, r"sm_scale: expected a finite number"),
    "causal-is-no-bool": (qkv, {"is_causal": torch.tensor(True)}, TypeError, r"is_causal: expected a bool, got"),
    "scale-text": (qkv, {"sm_scale": "1"}, ValueError, r"sm_scale: expected a finite number, or None.*got '1'"),
    "scale-minus-inf": (qkv, {"sm_scale": -math.inf}, ValueError, r"sm_scale: expected a finite number, or None.*got -inf"),
    "scale-inf-in-fp32": (qkv, {"sm_scale": 1e39}, ValueError, r"sm_scale: expected at most 2 \*\* 60 in magnitude.*got 1e\+39"),
    "scale-near-fp32-max": (qkv, {"sm_scale": -3e38}, ValueError, r"sm_scale: expected at most 2 \*\* 60 in magnitude.*got -3e\+38"),
    "scale-int-of-401-digits": (qkv, {"sm_scale": 10**400}, ValueError, r"sm_scale: expected at most 2 \*\* 60.*got an int of 1329 bits"),
    "scale-int-without-repr": (qkv, {"sm_scale": -(10**5000)}, ValueError, r"sm_scale: expected at most 2 \*\* 60.*an int of \d+ bits"),
    "scale-bool": (qkv, {"sm_scale": True}, ValueError, r"sm_scale: expected a finite number, or None.*got True"),
    "scale-0-d": (qkv, {"sm_scale": torch.tensor(0.5)}, ValueError, r"sm_scale: .*got \(\) torch\.float32 on cpu; multiply it into q"),
    "return-kernel-is-no-bool": (qkv, {"return_kernel": 1}, TypeError, r"return_kernel: expected a bool, got 1"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "options", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_forward_errors(inputs, options, error, text):
    with pytest.raises(error, match=text):
        mha_fwd_interface(*inputs(), **options)


@pytest.mark.parametrize(("inputs", "options", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_wrong_calls_have_their_own_plan_key(inputs, options, error, text, monkeypatch):
    """A repeated call skips the checks, so no wrong call may share the plan key of a right one. Plans are of a GPU, here the CPU."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: -1 if x.is_meta else 0)
    tensors = inputs()
    if not options and all(isinstance(x, torch.Tensor) for x in tensors):
        assert launch.common.qkv_key(*tensors, False, True) != launch.common.qkv_key(*qkv(), False, True)


@pytest.mark.parametrize(
    ("heads_kv", "hint"), [(8, True), (4, True), (3, False)], ids=["equal", "grouped", "no-divisor"]
)
def test_hint_to_transpose_where_it_helps(heads_kv, hint):
    """Tensors [batch, heads, seqlen, head_dim] of 8 query heads in a function that takes [batch, seqlen, heads, head_dim]."""
    q, k = torch.zeros(2, 8, 100, 64).bfloat16(), torch.zeros(2, heads_kv, 128, 64).bfloat16()
    with pytest.raises(
        ValueError, match="k, v: expected a number of heads that divides the 100 of q"
    ) as error:
        flash_attn_func(q, k, k)
    assert ("call transpose(1, 2)" in str(error.value)) == hint


@pytest.mark.parametrize("window", [(3, 0), [3, 0], range(3, -3, -3)], ids=["tuple", "list", "range"])
def test_window_is_any_sequence_of_two(window):
    q, k, v = (x.transpose(1, 2) for x in qkv())
    assert torch.equal(
        flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v, window_size=(3, 0))
    )


def test_dropout_is_of_dropout_p_whatever_the_grad_mode():
    q, k, v = (x.transpose(1, 2) for x in qkv())
    state = torch.tensor([1, 2])
    out = flash_attn_func(q.requires_grad_(), k, v, dropout_p=0.5, rng_state=state)
    with torch.no_grad():
        assert torch.equal(out, flash_attn_func(q, k, v, dropout_p=0.5, rng_state=state))


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "options", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_forward_errors_after_a_correct_call(inputs, options, error, text):
    def on_gpu(tensors):
        return [x.cuda() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for x in tensors]

    for _ in range(2):
        mha_fwd_interface(*on_gpu(qkv()))
        with pytest.raises(error, match=text.replace("got meta", "got").replace(", cpu,", ", cuda:0,")):
            mha_fwd_interface(*on_gpu(inputs()), **options)


@pytest.mark.gpu
def test_int_switches_are_errors_after_a_correct_call():
    q, k, v = (x.cuda() for x in qkv())
    out, lse = mha_fwd_interface(q, k, v, is_causal=True)
    mha_bwd_interface(out, q, k, v, out, lse, is_causal=True, deterministic=True)
    with pytest.raises(TypeError, match="is_causal: expected a bool, got 1"):
        mha_fwd_interface(q, k, v, is_causal=1)
    with pytest.raises(TypeError, match="deterministic: expected a bool, got 1"):
        mha_bwd_interface(out, q, k, v, out, lse, is_causal=True, deterministic=1)
    with pytest.raises(ValueError, match="sm_scale: expected a finite number"):
        mha_fwd_interface(q, k, v, sm_scale=math.nan, is_causal=True)


def cu(*ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype)


OPTION_ERRORS = {
    "window-is-no-pair": ({"window_size": 128}, TypeError, r"window_size: expected a pair \(left, right\), got 128; pass \(128, 0\)"),
    "window-float": ({"window_size": (1.5, 0)}, TypeError, r"window_size: expected ints, with -1 or None for no limit, got 1\.5"),
    "window-bool": ({"window_size": (True, 0)}, TypeError, r"window_size: expected ints, with -1 or None for no limit, got True"),
    "window-negative": ({"window_size": (-2, 0)}, ValueError, r"window_size: expected bounds of at least 0.*got \(-2, 0\)"),
    "softcap-negative": ({"softcap": -1.0}, ValueError, r"softcap: expected 0 for no cap.*got -1\.0"),
    "softcap-inf": ({"softcap": math.inf}, ValueError, r"softcap: expected 0 for no cap.*got inf"),
    "softcap-tensor": ({"softcap": torch.ones(2)}, ValueError, r"softcap: expected 0 for no cap.*got \(2,\) torch\.float32 on cpu"),
    "dropout-1": ({"dropout_p": 1.0}, ValueError, r"dropout_p: expected a number from 0 to 255/256.*got 1\.0"),
    "dropout-nearly-1": ({"dropout_p": 0.999}, ValueError, r"dropout_p: expected a number from 0 to 255/256"),
    "dropout-nan": ({"dropout_p": math.nan}, ValueError, r"dropout_p: expected a number"),
    "dropout-text": ({"dropout_p": "0.1"}, ValueError, r"dropout_p: expected a number.*got '0\.1'"),
    "dropout-true": ({"dropout_p": True}, ValueError, r"dropout_p: expected a number.*got True; the parameters after v"),
    "dropout-tensor": ({"dropout_p": torch.tensor(0.1)}, ValueError, r"dropout_p: expected a number.*; pass float\(dropout_p\)"),
    "rng-shape": ({"dropout_p": 0.1, "rng_state": torch.zeros(3).long()}, ValueError, r"rng_state: expected shape \(2,\), got \(3,\)"),
    "rng-dtype": ({"dropout_p": 0.1, "rng_state": torch.zeros(2)}, TypeError, r"rng_state: expected torch\.int64, got torch\.float32"),
    "slopes-are-no-tensor": ({"alibi_slopes": [1.0] * 4}, TypeError, r"alibi_slopes: expected a torch\.Tensor, got list"),
    "slopes-shape": ({"alibi_slopes": torch.ones(2)}, ValueError, r"alibi_slopes: expected shape \(4,\) or \(2, 4\), got \(2,\)"),
    "slopes-dtype": ({"alibi_slopes": torch.ones(4).bfloat16()}, TypeError, r"alibi_slopes: expected torch\.float32, got.*cast it"),
    "slopes-device": ({"alibi_slopes": torch.ones(4, device="meta")}, ValueError, r"alibi_slopes: expected the device of q, cpu, got"),
    "slopes-grad": ({"alibi_slopes": torch.ones(4).requires_grad_()}, NotImplementedError, r"alibi_slopes: expected a tensor.*detach\(\)"),
    "sink-shape": ({"learnable_sink": torch.ones(1, 4)}, ValueError, r"learnable_sink: expected shape \(4,\), got \(1, 4\); pass a number"),
    "sink-dtype": ({"learnable_sink": torch.ones(4).int()}, TypeError, r"learnable_sink: expected torch\.float32 or torch\.bfloat16"),
    "causal-is-no-bool": ({"causal": 1, "softcap": 1.0}, TypeError, r"causal: expected a bool, got 1"),
    "deterministic-is-no-bool": ({"deterministic": 1, "softcap": 1.0}, TypeError, r"deterministic: expected a bool, got 1"),
    "scale-nan": ({"softmax_scale": math.nan, "softcap": 1.0}, ValueError, r"softmax_scale: expected a finite number"),
    "scale-inf-in-fp32": ({"softmax_scale": 1e39}, ValueError, r"softmax_scale: expected at most 2 \*\* 60 in magnitude.*got 1e\+39"),
    "scale-bool": ({"softmax_scale": False}, ValueError, r"softmax_scale: expected a finite number, or None.*got False"),
    "softcap-bool": ({"softcap": True}, ValueError, r"softcap: expected 0 for no cap.*got True"),
    "softcap-inf-in-fp32": ({"softcap": 1e39}, ValueError, r"softcap: .*2 \*\* -60 to 2 \*\* 60, got 1e\+39"),
    "softcap-0-in-fp32": ({"softcap": 1e-46}, ValueError, r"softcap: expected 0 for no cap, or a number from 2 \*\* -60.*got 1e-46"),
    "softcap-int-of-401-digits": ({"softcap": 10**400}, ValueError, r"softcap: expected 0 for no cap.*got an int of 1329 bits"),
    "probs-is-no-bool": ({"return_attn_probs": 1}, TypeError, r"return_attn_probs: expected a bool, got 1"),
    "window-tensor": ({"window_size": torch.tensor([3, 0])}, TypeError, r"window_size: .*got \(2,\) torch\.int64.*\.tolist\(\)"),
    "window-of-tensors": ({"window_size": [torch.tensor(3), 0]}, TypeError, r"window_size: expected ints.*got \(\) .*; pass int"),
    "window-negative-list": ({"window_size": [-3, 5]}, ValueError, r"window_size: .*got \[-3, 5\]; .*does not shift a window"),
    "sink-fp64": ({"learnable_sink": torch.ones(4).double()}, TypeError, r"learnable_sink: expected torch\.float32 or .*float64"),
    "splits-bool": ({"num_splits": True}, TypeError, r"num_splits: expected an int, with 0 for an automatic choice, got True"),
    "splits-wide": ({"num_splits": 10**30}, ValueError, r"num_splits: expected 0 to 2 \*\* 31 - 1, got 10{30}; leave it out"),
    "splits-negative": ({"num_splits": -1}, ValueError, r"num_splits: expected at least 0, with 0 for an automatic.*got -1"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), OPTION_ERRORS.values(), ids=OPTION_ERRORS)
def test_option_errors(options, error, text):
    with pytest.raises(error, match=text):
        flash_attn_func(*(x.transpose(1, 2) for x in qkv()), **options)


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_sink", [torch.float32, torch.bfloat16, torch.float16])
def test_sink_of_any_dtype_beside_q(dtype, of_sink, device):
    """Results are those of the sink in fp32; its gradient has its dtype."""
    q, k, v = (x.transpose(1, 2).to(device) for x in qkv(dtype=dtype))
    sink = torch.randn(4).to(of_sink).to(device).requires_grad_()
    exact = sink.detach().float().requires_grad_()
    outs = []
    for x in (sink, exact):
        out, lse, _ = flash_attn_func(q, k, v, learnable_sink=x, return_attn_probs=True)
        (out.sum() + lse.sum()).backward()
        outs += [out, lse]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert sink.grad.dtype == of_sink
    torch.testing.assert_close(sink.grad, exact.grad.to(of_sink))


@pytest.mark.filterwarnings("ignore:tl_attention")
def test_window_may_be_a_list():
    q, k, v = (x.transpose(1, 2) for x in qkv())
    for window in ((2, 1), (-1, None), (None, 0)):
        assert torch.equal(
            flash_attn_func(q, k, v, window_size=list(window)), flash_attn_func(q, k, v, window_size=window)
        )


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_largest_numbers_give_finite_results(device):
    """Scores are 0. The first queries of a tile see no key of the first blocks, and with a causal mask none at all."""
    tensors = (x.transpose(1, 2).to(device) for x in qkv(seqlen_q=400, seqlen_k=300))
    q, k, v = (x.requires_grad_() for x in tensors)
    largest = [
        {"softmax_scale": 2.0**60},
        {"softmax_scale": -(2.0**60)},
        {"softcap": 2.0**60},
        {"softcap": 2.0**-60},
    ]
    for options in (*largest, largest[0] | {"softcap": 2.0**-60}):
        for mask in ({}, {"causal": True}, {"window_size": (5, 5)}):
            out, lse, _ = flash_attn_func(0 * q, k, v, return_attn_probs=True, **mask, **options)
            seen = lse > -math.inf
            assert out.isfinite().all() and lse[seen].isfinite().all() and seen[..., 100:].all(), (
                options,
                mask,
            )
            assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.filterwarnings("ignore:tl_attention")
def test_scale_of_a_compiled_call_is_checked():
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager", dynamic=True)
    q, k, v = (x.transpose(1, 2) for x in qkv())
    for scale in (0.5, 0.25, -3.0):
        out = compiled(q, k, v, softmax_scale=scale)
        assert torch.equal(out, flash_attn_func(q, k, v, softmax_scale=scale))
    with pytest.raises(ValueError, match="softmax_scale: expected at most"):
        torch.compile(flash_attn_func, backend="aot_eager")(q, k, v, softmax_scale=1e39)


LENGTH_ERRORS = {
    "4-dimensions": ({"q": torch.zeros(1, 5, 4, 64).bfloat16()}, ValueError, r"q: expected 3 dimensions \[total, heads, head_dim\]"),
    "heads": ({"q": torch.zeros(5, 3, 64).bfloat16()}, ValueError, r"k, v: expected a number of heads that divides the 3 of q, got 2"),
    "v-rows": ({"v": torch.zeros(6, 2, 64).bfloat16()}, ValueError, r"v: expected the heads and seqlen of k, 2 and 7, got 2 and 6"),
    "cu-is-no-tensor": ({"cu_seqlens_q": [0, 5]}, TypeError, r"cu_seqlens_q: expected a torch\.Tensor, got list"),
    "cu-missing": ({"cu_seqlens_k": None}, TypeError, r"cu_seqlens_k: expected a torch\.Tensor, got NoneType"),
    "cu-empty": ({"cu_seqlens_q": cu()}, ValueError, r"cu_seqlens_q: expected shape \[batch \+ 1\], got \(0,\)"),
    "cu-2-d": ({"cu_seqlens_q": cu(0, 2, 5)[None]}, ValueError, r"cu_seqlens_q: expected shape.*\(1, 3\); pass cu_seqlens_q\.flatten\(\)"),
    "cu-0-d": ({"cu_seqlens_q": torch.tensor(5)}, ValueError, r"cu_seqlens_q: expected shape \[batch \+ 1\], got \(\)"),
    "cu-long": ({"cu_seqlens_q": cu(0, 2, 5, dtype=torch.int64)}, TypeError, r"cu_seqlens_q: expected torch\.int32.*cast it with"),
    "cu-batches": ({"cu_seqlens_k": cu(0, 7)}, ValueError, r"cu_seqlens_k: expected shape \(3,\), got \(2,\)"),
    "cu-strided": ({"cu_seqlens_q": cu(0, 9, 2, 9, 5)[::2]}, ValueError, r"cu_seqlens_q: expected a contiguous tensor.*contiguous\(\)"),
    "cu-device": ({"cu_seqlens_q": cu(0, 2, 5).to("meta")}, ValueError, r"cu_seqlens_q: expected the device of q, cpu, got meta"),
    "seqused-shape": ({"seqused_q": cu(2, 3, 4)}, ValueError, r"seqused_q: expected shape \(2,\), got \(3,\)"),
    "seqused-dtype": ({"seqused_k": cu(2, 3).float()}, TypeError, r"seqused_k: expected torch\.int32, got torch\.float32"),
    "max-float": ({"max_seqlen_q": 3.0}, TypeError, r"max_seqlen_q: expected an int or a 0-d integer tensor, got 3\.0"),
    "max-1-d": ({"max_seqlen_k": cu(3)}, TypeError, r"max_seqlen_k: expected an int or a 0-d integer tensor, got \(1,\) torch\.int32"),
    "max-0-d-bool": ({"max_seqlen_q": torch.tensor(True)}, TypeError, r"max_seqlen_q: .*0-d integer.*got \(\) torch\.bool"),
    "max-bool": ({"max_seqlen_q": True}, TypeError, r"max_seqlen_q: expected an int or a 0-d integer tensor, got True"),
    "max-0-d-complex": ({"max_seqlen_k": torch.tensor(1j)}, TypeError, r"max_seqlen_k: .*0-d integer.*got \(\) torch\.comp"),
    "max-negative": ({"max_seqlen_k": -1}, ValueError, r"max_seqlen_k: expected the length of the longest sequence.*got -1"),
    "slopes": ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes: expected shape \(4,\) or \(2, 4\), got \(3, 4\)"),
    "max-wide": ({"max_seqlen_k": 10**30}, ValueError, r"max_seqlen_k: expected .*at most 2 \*\* 31 - 1, got 10{30}"),
    "splits-wide": ({"num_splits": 2**31}, ValueError, r"num_splits: expected 0 to 2 \*\* 31 - 1, got 2147483648; leave it out"),
    "splits": ({"num_splits": -2}, ValueError, r"num_splits: expected at least 0, with 0 for an automatic choice, got -2"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), LENGTH_ERRORS.values(), ids=LENGTH_ERRORS)
def test_length_errors(changes, error, text):
    q, k, v = (x[0].transpose(0, 1) for x in qkv())
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu(0, 2, 5), "cu_seqlens_k": cu(0, 3, 7)}
    with pytest.raises(error, match=text):
        flash_attn_varlen_func(**arguments | {"max_seqlen_q": 3, "max_seqlen_k": 4} | changes)


PACKED_ERRORS = {
    "qkv-list": (flash_attn_qkvpacked_func, ([1.0],), TypeError, r"qkv: expected a torch\.Tensor, got list"),
    "qkv": (flash_attn_qkvpacked_func, (torch.zeros(2, 5, 2, 4, 64),), ValueError, r"qkv: expected shape \[batch, seqlen, 3, heads,"),
    "kv": (flash_attn_kvpacked_func, (None, torch.zeros(2, 5, 4, 64)), ValueError, r"kv: expected shape \[batch, seqlen_k, 2, heads_kv,"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "inputs", "error", "text"), PACKED_ERRORS.values(), ids=PACKED_ERRORS)
def test_packed_errors(function, inputs, error, text):
    with pytest.raises(error, match=text):
        function(*inputs)


@pytest.mark.filterwarnings("ignore:tl_attention")
def test_reference_ignores_autocast():
    q, k, v = qkv()
    expected, _ = ref_mha_fwd_interface(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ref_mha_fwd_interface(q, k, v)[0], expected)


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("causal", [False, True])
def test_cpu_tensors_run_the_reference(causal):
    q, k, v = qkv()
    out, lse = mha_fwd_interface(q, k, v, is_causal=causal)
    expected, expected_lse = ref_mha_fwd_interface(q, k, v, is_causal=causal)
    assert out.dtype == q.dtype and out.is_contiguous()
    torch.testing.assert_close(out.float(), expected, atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse, expected_lse)
    flash, flash_lse, probs = flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=causal, return_attn_probs=True
    )
    assert torch.equal(flash.transpose(1, 2), out) and probs is None and flash.is_contiguous()
    torch.testing.assert_close(flash_lse, lse * math.log(2))


def test_cpu_tensors_warn_once(monkeypatch):
    monkeypatch.setattr(tl_attention.checks.transforms, "_warned_about_cpu", False)
    with pytest.warns(UserWarning, match="CPU tensors run the plain PyTorch reference"):
        mha_fwd_interface(*qkv())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mha_fwd_interface(*qkv())


@pytest.mark.parametrize("call", [mha_fwd_interface, flash_attn_func, flex_attention])
def test_cpu_tensors_warn_at_the_line_of_the_caller(call, monkeypatch):
    monkeypatch.setattr(tl_attention.checks.transforms, "_warned_about_cpu", False)
    with pytest.warns(UserWarning, match="CPU tensors run the plain PyTorch reference") as caught:
        call(*[torch.zeros(1, 2, 2, 8)] * 3)
    assert caught[0].filename == __file__


EMPTY = {
    "batch": {"batch": 0},
    "heads": {"heads": 0, "heads_kv": 0},
    "seqlen_q": {"seqlen_q": 0},
    "seqlen_k": {"seqlen_k": 0},
}


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("changes", EMPTY.values(), ids=EMPTY)
def test_empty_tensors_give_empty_or_zero_outputs(changes):
    q, k, v = qkv(**changes)
    out, lse = mha_fwd_interface(q, k, v, is_causal=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert not out.any() and (lse == -math.inf).all()


BWD_ERRORS = {
    "do-is-no-tensor": ({"do": None}, TypeError, r"do: expected a torch\.Tensor, got NoneType"),
    "do-shape": ({"do": torch.zeros(2, 4, 5, 72).bfloat16()}, ValueError, r"do: expected shape \(2, 4, 5, 64\), got \(2, 4, 5, 72\)"),
    "out-dtype": ({"out": torch.zeros(2, 4, 5, 64)}, TypeError, r"out: expected torch\.bfloat16, got torch\.float32; cast it with out\.to"),
    "lse-shape": ({"lse": torch.zeros(2, 5, 4)}, ValueError, r"lse: expected shape \(2, 4, 5\), got \(2, 5, 4\)"),
    "lse-dtype": ({"lse": torch.zeros(2, 4, 5).bfloat16()}, TypeError, r"lse: expected torch\.float32, got torch\.bfloat16"),
    "lse-device": ({"lse": torch.zeros(2, 4, 5, device="meta")}, ValueError, r"lse: expected the device of q, cpu, got meta"),
    "deterministic-is-no-bool": ({"deterministic": 1}, TypeError, r"deterministic: expected a bool, got 1"),
    "q-is-fp32": ({"q": torch.zeros(2, 4, 5, 64)}, TypeError, r"k, v: expected the dtype of q, torch\.float32, got torch\.bfloat16"),
    "q-is-fp64": ({"q": torch.zeros(2, 4, 5, 64).double()}, TypeError, r"q: expected bfloat16, float16 or float32"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), BWD_ERRORS.values(), ids=BWD_ERRORS)
def test_backward_errors(changes, error, text):
    q, k, v = qkv()
    arguments = {"do": torch.zeros_like(q), "q": q, "k": k, "v": v, "out": q, "lse": torch.zeros(2, 4, 5)}
    with pytest.raises(error, match=text):
        mha_bwd_interface(**arguments | changes)


def test_return_kernel_of_the_backward_is_a_bool():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="return_kernel: expected a bool, got 1"):
        mha_bwd_interface(q, q, k, v, q, torch.zeros(2, 4, 5), return_kernel=1)


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("changes", EMPTY.values(), ids=EMPTY)
def test_empty_tensors_give_zero_gradients(changes):
    q, k, v = qkv(**changes)
    out, lse = mha_fwd_interface(q, k, v, is_causal=True)
    for grad, x in zip(mha_bwd_interface(out, q, k, v, out, lse, is_causal=True), (q, k, v), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.filterwarnings("ignore:tl_attention")
def test_torch_compile_traces_both_functions_without_a_break():
    torch._dynamo.reset()
    q, k, v = qkv()

    def both(q, k, v):
        out, lse = mha_fwd_interface(q, k, v, is_causal=True)
        return out * 2, lse, flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for mine, expected in zip(compiled(q, k, v), both(q, k, v), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("value, expected", [(None, False), ("", False), ("0", False), ("1", True)])
def test_switch_of_the_environment(value, expected, monkeypatch):
    if value is None:
        monkeypatch.delenv("TL_ATTENTION_QUIET", raising=False)
    else:
        monkeypatch.setenv("TL_ATTENTION_QUIET", value)
    assert switch("TL_ATTENTION_QUIET") is expected
    assert switch("TL_ATTENTION_QUIET", default=True) is (expected or not value)


def test_switch_of_the_environment_refuses_other_values(monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_BATCH_INVARIANT", "true")
    text = "TL_ATTENTION_BATCH_INVARIANT: expected 0 or 1 in the environment, got 'true'; set one of them"
    with pytest.raises(ValueError, match=text):
        runpy.run_path(problem_options.__file__)
