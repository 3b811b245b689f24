"""Gradients in fp32 on a Hopper GPU: errors against fp64, options, lengths, training. Without one: wide heads on the CPU."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from test_fp32 import (
    FP64,
    GPU_SHAPES,
    RELATIVE_ERROR,
    default_precision,  # noqa: F401
    draw,
    draw_qkv,
    efficient,
    error,
)

from tl_attention import flash_attn_func, flash_attn_varlen_func, fp32_workspace_bytes, mha_bwd_interface
from tl_attention.compilation import building
from tl_attention.config import configs
from tl_attention.config.buckets import bwd_bucket
from tl_attention.launch import bwd_kernels
from tl_attention.problem.attn_problem import FP32_DTYPES, PRECISIONS, AttnProblem, tile_widths
from tl_attention.problem.options import Options
from tl_attention.reference import (
    attention_backward_reference,
    attention_reference,
    dropout_keep,
    varlen_backward_reference,
)
from tl_attention.testing.shapes import Shape
from tl_attention.tuning import steps


def check_gradient(precision, name, grad, ref, peer):
    """Bound a gradient by three times the error of a peer in fp32 and 2^-21 of the largest value; at lower precisions by a share of it."""
    assert grad.dtype == torch.float32
    largest = float(ref.abs().max())
    allowed = RELATIVE_ERROR.get(precision, 0) * largest
    if precision == "highest":
        allowed = 3 * error(peer, ref) + 2.0**-21 * largest
    got = error(grad, ref)
    assert got <= allowed, f"{name} at {precision}: expected an error of at most {allowed:.2e}, got {got:.2e}"


def rms_error(x, ref):
    return float(((x.double() - ref).square().mean() / ref.square().mean()).sqrt())


def test_fp32_workspace_of_wide_gradients_is_that_of_their_kernels():
    q, k, v = draw_qkv(1, 2, 1, 10, 20, 200)
    assert fp32_workspace_bytes(q, k, v, "highest", backward=True) == 0
    assert fp32_workspace_bytes(q, k, v, "high", backward=True) == 2 * 2 * 256 * (2 * 20 + 2 * 20)


@pytest.mark.parametrize("head_dim", [128, 200])
def test_fp32_forward_builds_no_backward_that_has_no_kernels(head_dim, monkeypatch):
    """The gradients of wide heads at highest are those of a formula, so that no tile serves them."""
    asked = []
    monkeypatch.setattr(bwd_kernels, "build_ahead", lambda *arguments: asked.append(arguments))
    q, k, v = draw_qkv(1, 2, 1, 10, 20, head_dim)
    bwd_kernels.build_backward_ahead(q, k, v, False, False, False, Options(parts=PRECISIONS["highest"]), None)
    assert len(asked) == (head_dim == 128)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_fp32_tuner_compares_with_fp64(direction, monkeypatch):
    """A candidate is right with an rms error of at most 1e-4; here the reference in fp32 stands for it, at half the values if wrong."""
    shape = Shape.parse("2,4,2,17,15,64,64,causal")  # two queries see no key
    row = steps.Row(direction, AttnProblem("float32-high", 64, 64, True), "1k")
    make_inputs = functools.partial(steps.make_inputs, device="cpu")
    monkeypatch.setattr(steps, "make_inputs", make_inputs)
    asked = []

    def run(factor, row, inputs, shape, config):
        asked.append((row.problem.terms, inputs[0].dtype))
        if row.direction == "fwd":
            out, lse = attention_reference(*inputs, causal=True)
            return factor * out, lse
        return tuple(factor * x for x in attention_backward_reference(*inputs[:4], causal=True))

    for factor, words in (
        (1.0, None),
        (0.5, "has an rms error of 5.0e-01 of its values, expected at most 0.0001"),
    ):
        monkeypatch.setattr(steps, "_run", functools.partial(run, factor))
        error_text = steps.check_candidate(row, None, [shape])
        assert error_text is words or words in error_text
    assert asked == [(2, torch.float32)] * 2
    assert {shape.head_dim for shape in steps.default_shapes("bwd", "float32-highest")} == {64, 128}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("direction", ["bwd", "bwd_det"])
def test_fp32_gradients_of_few_rows_alone_have_one_sum(direction, head_dim):
    def has_one_sum(seqlen_q, seqlen_k, heads_kv=4):
        bucket = bwd_bucket(direction == "bwd_det", 4, heads_kv, seqlen_k, seqlen_q=seqlen_q)
        config, _ = configs.pick_config(problem, bucket, configs.DEFAULT_GPU, direction)
        assert config.deterministic or direction == "bwd"
        return any(one.one_sum for one in config.passes)

    problem = AttnProblem("float32-high", head_dim, head_dim, True)
    # d64 makes all gradients in one pass, which is not deterministic
    assert has_one_sum(1024, 1024) == (direction == "bwd" or head_dim == 128)
    assert not any(itertools.starmap(has_one_sum, [(1025, 900), (900, 1025), (900, 900, 2), (1025, 100)]))


# The rest needs a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "shape", [*GPU_SHAPES[:5], (1, 4, 2, 130, 257, 200, 200)], ids=lambda shape: "x".join(map(str, shape))
)
def test_fp32_backward_matches_fp64(shape, causal, precision):
    q, k, v = (x.requires_grad_() for x in draw_qkv(*shape, device="cuda"))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, precision=precision, return_attn_probs=True)
    dout, dlse = draw(out.shape, lse.shape, device="cuda")
    dlse = dlse.where(lse > -math.inf, 0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    tensors = dout, *(x.detach() for x in (q, k, v))
    options = {"causal": causal, "dlse": dlse}
    ref = attention_backward_reference(*(x.double() for x in tensors), dtype=FP64, **options)
    plain = attention_backward_reference(*tensors, **options)
    for name, grad, wanted, peer in zip(("dq", "dk", "dv"), grads, ref, plain, strict=True):
        check_gradient(precision, name, grad, wanted, peer)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp32_gradients_are_equal_from_run_to_run(precision):
    q, k, v = (x.requires_grad_() for x in draw_qkv(1, 8, 2, 700, 700, 128, device="cuda"))
    out = flash_attn_func(q, k, v, causal=True, precision=precision, deterministic=True)
    (dout,) = draw(out.shape, device="cuda")
    first, second = (torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_fp32_gradients_pass_a_numerical_check():
    """The derivative along a random direction, from differences of an fp64 loss of the kernel's out."""
    tensors = draw_qkv(1, 2, 1, 70, 90, 64, device="cuda")
    directions = [torch.randn_like(x) for x in tensors]
    weights = torch.randn(1, 70, 2, 64, device="cuda", dtype=FP64)

    def loss(step):
        moved = (x + step * d for x, d in zip(tensors, directions, strict=True))
        return float((flash_attn_func(*moved, causal=True, precision="highest").double() * weights).sum())

    leaves = [x.clone().requires_grad_() for x in tensors]
    out = flash_attn_func(*leaves, causal=True, precision="highest")
    grads = torch.autograd.grad(out, leaves, weights.float())
    derivative = sum(float((g.double() * d).sum()) for g, d in zip(grads, directions, strict=True))
    step = 2.0**-8
    assert derivative == pytest.approx((loss(step) - loss(-step)) / (2 * step), rel=1e-3)


@pytest.mark.gpu
def test_fp32_training_follows_the_math_path():
    """100 steps of a small transformer: the loss stays within 1e-5 of that with the plain formula."""

    def train(attention):
        generator = torch.Generator("cuda").manual_seed(3)
        at = {"device": "cuda", "generator": generator}
        weights = [(torch.randn(64, 64, **at) / 8).requires_grad_() for _ in range(8)]
        x, y = torch.randn(2, 96, 64, **at), torch.randn(2, 96, 64, **at)
        losses = []
        for _ in range(100):
            hidden = x
            for wq, wk, wv, wo in (weights[:4], weights[4:]):
                q, k, v = ((hidden @ w).unflatten(-1, (2, 32)) for w in (wq, wk, wv))
                hidden = hidden + attention(q, k, v).flatten(-2) @ wo
            loss = (hidden - y).square().mean()
            losses.append(float(loss.detach()))
            for w, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                w.data -= 0.1 * grad
        return losses

    ours = train(lambda q, k, v: flash_attn_func(q, k, v, causal=True, precision="highest"))
    plain = train(lambda q, k, v: attention_reference(q, k, v, causal=True)[0])
    assert plain[-1] < 0.9 * plain[0]
    assert max(abs(a - b) / b for a, b in zip(ours, plain, strict=True)) <= 1e-5


GRADIENT_OPTIONS = {
    "window": {"window_size": (90, 3)},
    "softcap": {"softcap": 20.0, "causal": True},
    "alibi": {"alibi_slopes": 0.2, "causal": True},
    "dropout": {"dropout_p": 0.25},
    "sink": {"learnable_sink": 0.5, "causal": True},
    "all": {
        "window_size": (70, 9),
        "softcap": 20.0,
        "alibi_slopes": 0.2,
        "dropout_p": 0.25,
        "learnable_sink": 0.5,
    },
}
# Each option in one of the kernels of a width, all in each of them
DENSE_CASES = [("window", 64), ("softcap", 128), ("alibi", 64), ("dropout", 128), ("sink", 64)]
PACKED_CASES = [("plain", 64), ("all", 64), ("all", 128), ("all", 256)]
REFERENCE_NAMES = {"window_size": "window", "learnable_sink": "sink"}


@pytest.fixture(scope="module")
def kernels_of_options():
    """Build the kernels of the two tests at once."""
    cases = [(name, width, ()) for name, width in DENSE_CASES]
    cases += [(name, width, ("varlen",)) for name, width in PACKED_CASES]
    found = []
    for (name, width, others), dtype in itertools.product(cases, FP32_DTYPES):
        options = {"all": ("window", "softcap", "alibi", "sink", "dropout"), "plain": ()}.get(name, (name,))
        for direction in ("fwd", "bwd"):
            if width in dict(tile_widths(direction, dtype)):
                names = [x for x in (*options, *others) if direction == "fwd" or x != "sink"]
                causal = "causal" in GRADIENT_OPTIONS.get(name, {"causal": True})
                problem = AttnProblem(dtype, width, width, causal, tuple(names))
                config, _ = configs.pick_config(problem, "1k", torch.cuda.get_device_name(), direction)
                found += config.kernels(problem)
    building.build_all(list(dict.fromkeys(found)))


def arguments_of(options, heads, sizes):
    """(arguments of a call, those of the reference)"""
    call = dict(options)
    for name in ("alibi_slopes", "learnable_sink"):
        if name in call:
            call[name] = call[name] * torch.rand(heads, device="cuda")
    reference = {REFERENCE_NAMES.get(name, name): value for name, value in call.items()}
    if "dropout_p" in call:
        call["rng_state"] = torch.tensor([7, 11], device="cuda")
        reference["keep"] = dropout_keep(call["rng_state"], *sizes, call["dropout_p"])
    return call, reference


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(("name", "head_dim"), DENSE_CASES)
@pytest.mark.usefixtures("kernels_of_options")
def test_fp32_gradients_with_options_match_fp64(name, head_dim, precision):
    sizes = 2, 4, 200, 310
    q, k, v = (x.requires_grad_() for x in draw_qkv(2, 4, 2, 200, 310, head_dim, device="cuda"))
    call, options = arguments_of(GRADIENT_OPTIONS[name], 4, sizes)
    sinks = [call["learnable_sink"].requires_grad_()] if "learnable_sink" in call else []
    out = flash_attn_func(q, k, v, precision=precision, num_splits=1, **call)
    (dout,) = draw(out.shape, device="cuda")
    grads = torch.autograd.grad(out, (q, k, v, *sinks), dout, retain_graph=True)
    tensors = dout, *(x.detach() for x in (q, k, v))
    options = {key: value.detach() if key == "sink" else value for key, value in options.items()}
    ref = attention_backward_reference(*(x.double() for x in tensors), dtype=FP64, **options)
    plain = attention_backward_reference(*tensors, **options)
    for which, grad, wanted, peer in zip(("dq", "dk", "dv", "dsink"), grads, ref, plain, strict=False):
        check_gradient(precision, which, grad, wanted, peer)
    again = torch.autograd.grad(out, (q, k, v, *sinks), dout)
    if name == "sink":  # the kernels without options, which add dq in any order
        grads, again = grads[1:], again[1:]
    assert all(map(torch.equal, grads, again))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(("name", "head_dim"), PACKED_CASES)
@pytest.mark.usefixtures("kernels_of_options")
def test_fp32_gradients_of_packed_sequences_match_fp64(name, head_dim, precision):
    lengths = torch.tensor([[100, 0, 333, 1, 65], [100, 20, 333, 400, 65]])
    cu = [torch.tensor([0, *x.cumsum(0)], dtype=torch.int32, device="cuda") for x in lengths]
    total_q, total_k = lengths.sum(1).tolist()
    kv = total_k, 2, head_dim
    q, k, v = (x.requires_grad_() for x in draw((total_q, 4, head_dim), kv, kv, device="cuda"))
    call, options = arguments_of(GRADIENT_OPTIONS.get(name, {"causal": True}), 4, (5, 4, 333, 400))
    out = flash_attn_varlen_func(q, k, v, *cu, 333, 400, precision=precision, num_splits=1, **call)
    (dout,) = draw(out.shape, device="cuda")
    grads = torch.autograd.grad(out, (q, k, v), dout)
    tensors = dout, *(x.detach() for x in (q, k, v))
    ref = varlen_backward_reference(*(x.double() for x in tensors), *cu, dtype=FP64, **options)
    plain = varlen_backward_reference(*tensors, *cu, **options)
    for which, grad, wanted, peer in zip(("dq", "dk", "dv"), grads, ref, plain, strict=False):
        check_gradient(precision, which, grad, wanted, peer)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen", [1024, 16384])
def test_fp32_errors_do_not_grow_with_length(seqlen, head_dim):
    """rms errors at highest are at most twice those of memory-efficient attention, plus 2^-22."""
    tensors = draw_qkv(1, 1, 1, seqlen, seqlen, head_dim, device="cuda")
    (dout,) = draw(tensors[0].shape, device="cuda")
    ref = (
        attention_reference(*(x.double() for x in tensors), dtype=FP64)[0],
        *attention_backward_reference(*(x.double() for x in (dout, *tensors)), dtype=FP64),
    )
    found = []
    for attend in (efficient, lambda *qkv: flash_attn_func(*qkv, precision="highest")):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        found.append([rms_error(x.detach(), exact) for x, exact in zip((out, *grads), ref, strict=True)])
    for name, peer, ours in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert ours <= 2 * peer + 2.0**-22, f"{name}: expected at most twice {peer:.1e}, got {ours:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "lengths", [(1024, 1024), (999, 777), (130, 1001), (5000, 900), (4000, 4000)], ids=str
)
def test_fp32_errors_at_high_are_those_of_the_terms(lengths, head_dim, causal):
    """rms errors of gradients are at most 1.1e-5: 8e-6 of the terms, the rest of one_sum, which many rows have not."""
    tensors = draw_qkv(1, 2, 2, *lengths, head_dim, device="cuda")
    (dout,) = draw(tensors[0].shape, device="cuda")
    ref = attention_backward_reference(*(x.double() for x in (dout, *tensors)), causal=causal, dtype=FP64)
    leaves = [x.clone().requires_grad_() for x in tensors]
    grads = torch.autograd.grad(flash_attn_func(*leaves, causal=causal, precision="high"), leaves, dout)
    for name, grad, exact in zip(("dq", "dk", "dv"), grads, ref, strict=True):
        assert rms_error(grad, exact) <= 1.1e-5, name


# Factors of the allowed error at high, where scores are large, and where dP is much larger than its distance from delta
LOST = {"peaky": 3, "cancelling": 5}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("values", ["peaky", "large", "small", "cancelling"])
def test_fp32_gradients_of_extreme_values(values, precision):
    """cancelling: dP is nearly delta for every key."""
    factor = {"large": 1e4, "small": 1e-6}.get(values, 1)
    q, k, v = draw_qkv(1, 2, 2, 300, 333, 128, device="cuda", scale=factor)
    scale = 128**-0.5 * {"large": 1e-8, "peaky": 16}.get(values, 1)
    if values == "cancelling":
        v += 30
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, softmax_scale=scale, precision=precision)
    (dout,) = draw(out.shape, device="cuda")
    grads = torch.autograd.grad(out, leaves, dout)
    tensors = dout, *(x.detach() for x in leaves)
    ref = attention_backward_reference(*(x.double() for x in tensors), scale, dtype=FP64)
    plain = attention_backward_reference(*tensors, scale)
    for name, grad, wanted, peer in zip(("dq", "dk", "dv"), grads, ref, plain, strict=True):
        if precision == "high" and values in LOST:
            assert error(grad, wanted) <= LOST[values] * RELATIVE_ERROR["high"] * float(wanted.abs().max())
        else:
            check_gradient(precision, name, grad, wanted, peer)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fp32_gradients_never_hide_nan_or_inf(value):
    q, k, v = (x.requires_grad_() for x in draw_qkv(1, 1, 1, 100, 200, 64, device="cuda"))
    out = flash_attn_func(q, k, v, precision="highest")
    (dout,) = draw(out.shape, device="cuda")
    dout[0, 60, 0, 3] = value
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert not dq[0, 60].isfinite().any() and dq[0, :60].isfinite().all()
    assert not dk.isfinite().any() and not dv[..., 3].isfinite().any() and dv[..., :3].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_fp32_launches_without_checks_agree(precision):
    q, k, v = draw_qkv(1, 2, 2, 256, 90, 100, device="cuda")  # heads first: [batch, heads, seqlen, head_dim]
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = (x.to("cuda") for x in attention_base2(q, k, v))
    dout = torch.randn_like(out)
    given = dout, q, k, v, out, lse
    kernel = mha_bwd_interface(*given, precision=precision, return_kernel=True)
    assert all(map(torch.equal, kernel(*given), mha_bwd_interface(*given, precision=precision)))


def attention_base2(q, k, v):
    """(out, lse) of the reference for heads first, lse in base 2."""
    out, lse = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), lse_base2=True)
    return out.transpose(1, 2).contiguous(), lse
