"""Backward kernels on a Hopper GPU, compared with the reference by the error rule. Each curated case covers a path of a kernel."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fwd import COPIED, TAKEN_AS_IT_IS, problems, requested_bytes
from test_fwd import CURATED as FORWARD_CASES

from tl_attention import flash_attn_func, launch
from tl_attention.compilation import building
from tl_attention.config.buckets import bwd_bucket
from tl_attention.config.catalog import problems as problems_of
from tl_attention.config.configs import candidates, pick_config
from tl_attention.launch.common import PlanCache, device_costs
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.problem.target import sm_count
from tl_attention.testing.inputs import (
    LAYOUTS,
    guard_is_untouched,
    make_dlse,
    make_dout,
    make_inputs,
    poisoned,
)
from tl_attention.testing.numeric import check_bwd
from tl_attention.testing.shapes import Shape
from tl_attention.testing.timer import speedup, time_interleaved

BF16, FP16 = torch.bfloat16, torch.float16
both_modes = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def run(
    shape: Shape,
    dtype=BF16,
    layout="bshd",
    dout_layout=None,
    scale=None,
    lse_base2=False,
    with_dlse=False,
    deterministic=False,
    seed=0,
    config=None,
):
    """Launch on poisoned, guarded gradients and check them by the error rule; dout_layout is layout by default."""
    q, k, v = make_inputs(shape, dtype, layout, seed)
    dout = make_dout(shape, dtype, dout_layout or layout, seed)
    dlse = make_dlse(shape, dtype, seed) if with_dlse else None
    heads_first = layout == "bhsd"
    verdict = check_launch(
        dout, q, k, v, scale, shape.causal, lse_base2, dlse, deterministic, heads_first, config
    )
    assert verdict.ok, verdict.text


def forward(q, k, v, scale, causal, lse_base2, layout="bshd"):
    """(out, lse) of tensors in a layout; out is a [batch, seqlen, heads, head_dim] view."""
    if layout != "bhsd":
        return launch.forward(q, k, v, scale, causal, lse_base2)
    out, lse = launch.forward(*(x.transpose(1, 2) for x in (q, k, v)), scale, causal, lse_base2, True)
    return out.transpose(1, 2), lse


def check_launch(
    dout,
    q,
    k,
    v,
    scale,
    causal,
    lse_base2=False,
    dlse=None,
    deterministic=False,
    heads_first=False,
    config=None,
):
    softmax_scale = q.shape[3] ** -0.5 if scale is None else scale
    layout = "bhsd" if heads_first else "bshd"
    out, lse = forward(q, k, v, softmax_scale, causal, lse_base2, layout)
    wholes, grads = zip(*(poisoned(*x.shape, dtype=x.dtype, layout=layout) for x in (q, k, v)), strict=True)
    plan = launch.bwd.BwdPlan(dout, q, k, v, out, *grads, causal, False, deterministic, config=config)
    poison_free_memory()
    plan(dout, q, k, v, out, lse, softmax_scale, lse_base2, dlse, None, None, *grads)
    for name, whole, grad in zip(("dq", "dk", "dv"), wholes, grads, strict=True):
        assert guard_is_untouched(whole, grad), f"{name}: written outside its bounds"
    return check_bwd(grads, dout, q, k, v, scale, causal, dlse, lse_base2)


def poison_free_memory():
    """Fill the memory that PyTorch allocates next with NaN: a backward must write its workspace before it reads it."""
    torch.cuda.empty_cache()
    sizes = (*[2**17] * 8, 2**26)  # PyTorch has a separate pool for blocks below 1 MB
    blocks = [torch.full((size,), math.nan, device="cuda") for size in sizes]
    del blocks


FORWARD_ONLY = {  # paths of the schedules and the softmax of the forward
    "many-tiles-a-cta",
    "many-tiles-a-cta-full",
    "d256-128-many-tiles",
    "scale-negative-d64-many-tiles",
    "scale-1e4",
}
CURATED = {name: case for name, case in FORWARD_CASES.items() if name not in FORWARD_ONLY} | {
    "one-past-a-step": ("1,4,4,65,65,128,causal", {}),
    "queries-without-keys-dlse": ("2,4,2,1000,300,128,causal", {"with_dlse": True}),
    "more-queries-than-keys": ("2,4,4,1000,59,128,full", {}),
    "long-queries": ("1,2,2,9000,1000,128,full", {}),
    "many-tiles": ("5,16,16,1111,1111,128,causal", {}),
    "many-tiles-full": ("5,16,16,1111,1111,128,full", {}),
    "last-tiles-shared": ("1,5,5,3333,3333,128,full", {}),
    "last-tiles-shared-gqa": ("2,12,3,1300,5700,128,full", {"layout": "bhsd", "with_dlse": True}),
    "last-tiles-shared-d64": ("1,7,7,6001,5003,64,full", {"dtype": FP16}),
    "gqa-7-in-unequal-shares": ("1,28,4,600,3500,128,causal", {}),
    "gqa-of-one-sharer": ("4,32,16,1200,1200,128,full", {}),
    "gqa-4-d192-128": ("2,8,2,777,1000,192,128,causal", {}),
    "gqa-2-d160": ("2,4,2,555,333,160,causal", {}),
    "fp16-d136-dlse": ("2,3,3,300,777,136,full", {"with_dlse": True, "dtype": FP16}),
    "gqa-4-d256": ("1,8,2,300,400,256,causal", {}),
    "mqa-long": ("1,16,1,8192,8192,128,causal", {}),
    "mqa-long-d64": ("1,32,1,5000,5000,64,full", {}),
    "dout-bhsd": ("2,4,4,333,555,128,causal", {"dout_layout": "bhsd"}),
    "dout-packed": ("2,4,4,333,555,128,full", {"dout_layout": "packed"}),
    "bhsd-dout-bshd": ("2,4,2,333,555,64,causal", {"layout": "bhsd", "dout_layout": "bshd"}),
    "packed-dout-bhsd-d192-128": (
        "2,4,4,333,555,192,128,causal",
        {"layout": "packed", "dout_layout": "bhsd"},
    ),
    "d256-many-tiles": ("3,8,8,1111,1111,256,causal", {}),
    "d256-128-full": ("2,4,2,700,500,256,128,full", {}),
    "fp16-d96-gqa": ("2,8,2,300,500,96,causal", {"dtype": FP16}),
    "dlse": ("2,4,4,333,555,128,causal", {"with_dlse": True}),
    "dlse-of-base-2": ("2,4,4,333,555,128,full", {"with_dlse": True, "lse_base2": True}),
    "dlse-gqa-d192-128": ("2,8,2,333,555,192,128,causal", {"with_dlse": True}),
    "dlse-fp16-d256": ("1,4,4,300,333,256,causal", {"with_dlse": True, "dtype": FP16}),
}


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize(("shape", "options"), CURATED.values(), ids=CURATED)
def test_bwd_matches_reference(shape, options, deterministic):
    run(Shape.parse(shape), **options, deterministic=deterministic)


SUMMING = [
    (problem, config)
    for problem in problems_of("bwd")
    for config in candidates(problem, "4k", "bwd")
    if problem.dtype == "bfloat16" and any(one.adds_dq for one in config.passes)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("problem", "config"), SUMMING, ids=str)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 333, 555), (1, 8, 1, 900, 300), (3, 5, 5, 1100, 1111)], ids=str)
def test_bwd_that_sums_dq_in_global_memory_matches_reference(problem, config, sizes):
    """Independent of the tuned table."""
    run(Shape(*sizes, problem.head_dim, problem.head_dim_v, problem.causal), config=config, with_dlse=True)


@pytest.mark.gpu
@settings(max_examples=240)
@given(
    shape=problems(),
    dtype=st.sampled_from([BF16, FP16]),
    layout=st.sampled_from(LAYOUTS),
    dout_layout=st.sampled_from(LAYOUTS),
    scale=st.none() | st.floats(-2, 2),
    lse_base2=st.booleans(),
    with_dlse=st.booleans(),
    deterministic=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_bwd_matches_reference_on_random_problems(shape, **options):
    run(shape, **options)


@pytest.mark.gpu
@both_modes
@both_masks
def test_bwd_compiles_once_per_length_class(causal, deterministic, monkeypatch):
    """Many lengths, batches, heads, scales and layouts in shuffled order. Each is right and has the kernels of its class alone."""
    monkeypatch.setattr(building, "_compiled", {})
    for module in (launch.fwd, launch.bwd_kernels):
        monkeypatch.setattr(module, "_kernels", {})
    for module in (launch.fwd, launch.bwd):
        monkeypatch.setattr(module, "plan_cache", PlanCache())
    gpu, costs, kernels = torch.cuda.get_device_name(), device_costs(torch.cuda.current_device()), set()
    lengths = [*range(1, 400, 11), *range(1000, 3200, 150), 9000, 9001, 12345]
    random.Random(0).shuffle(lengths)
    for i, seqlen_k in enumerate(lengths):
        seqlen_q = lengths[-i] if seqlen_k < 4000 else 100
        width = 128 - 8 * (i % 3)
        shape = Shape(1 + i % 3, 4, 1 + i % 2, seqlen_q, seqlen_k, width, width, causal)
        run(
            shape,
            layout=LAYOUTS[i % 3],
            scale=0.1 + i / 1000,
            lse_base2=bool(i % 2),
            with_dlse=bool(i % 5),
            deterministic=deterministic,
            seed=i,
        )
        shares = launch.splits.sharing(AttnProblem("bfloat16", 128, 128, causal), gpu)
        fwd_bucket = launch.fwd_bucket(shape.batch, shape.heads_q, seqlen_q, seqlen_k, costs, shares)
        direction = "bwd_det" if deterministic else "bwd"
        of_gradients = bwd_bucket(deterministic, shape.heads_q, shape.heads_kv, seqlen_k)
        for name, bucket in (("fwd", fwd_bucket), (direction, of_gradients)):
            problem = AttnProblem.of("bfloat16", 128, 128, causal, name)
            kernels |= {*pick_config(problem, bucket, gpu, name)[0].kernels(problem)}
        assert building.compile_count() == len(kernels)


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_bwd_of_queries_without_keys_is_zero_for_any_dlse(value, deterministic):
    shape = Shape(
        2, 4, 2, 300, 170, 128, 128, True
    )  # the last of these queries share a block with queries that see keys
    q, k, v = make_inputs(shape, BF16)
    dout, dlse = make_dout(shape, BF16), make_dlse(shape, BF16)
    dlse[:, :, :130] = value
    finite = dlse.nan_to_num(0.0, 0.0, 0.0)
    out, lse = launch.forward(q, k, v, 0.1, True, False)
    grads = tuple(
        launch.backward(dout, q, k, v, out, lse, 0.1, True, False, False, deterministic, dlse).values()
    )
    verdict = check_bwd(grads, dout, q, k, v, 0.1, True, finite)
    assert verdict.ok, verdict.text


DOUT_ALONE = {
    "of-a-sum": lambda x: x.new_ones(()).expand_as(x),
    "last-dimension-strided": lambda x: x.mT.contiguous().mT,
    "columns-expanded": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize("view", [*COPIED.values(), *TAKEN_AS_IT_IS.values()], ids=[*COPIED, *TAKEN_AS_IT_IS])
def test_bwd_takes_any_strides(view, deterministic):
    shape = Shape(2, 4, 4, 300, 300, 64, 64, True)
    q, k, v, dout = (view(x) for x in (*make_inputs(shape, BF16), make_dout(shape, BF16)))
    verdict = check_launch(dout, q, k, v, None, True, deterministic=deterministic)
    assert verdict.ok, verdict.text


@pytest.mark.gpu
@pytest.mark.parametrize("view", [*COPIED.values(), *DOUT_ALONE.values()], ids=[*COPIED, *DOUT_ALONE])
def test_bwd_takes_any_strides_of_dout(view):
    shape = Shape(2, 4, 4, 300, 300, 64, 64, True)
    q, k, v = make_inputs(shape, BF16, "bhsd")
    verdict = check_launch(view(make_dout(shape, BF16)), q, k, v, None, True)
    assert verdict.ok, verdict.text


MEMORY = {
    "d128": "2,8,8,2000,2111,128,causal",
    "d64": "2,8,8,2000,2111,64,full",
    "d72-64": "2,8,8,2000,2111,72,64,full",
    "d192-128": "2,8,8,2000,2111,192,128,causal",
    "d160": "2,8,8,2000,2111,160,causal",
    "d192": "2,8,8,2000,2111,192,full",
    "d256": "1,8,8,2000,2111,256,causal",
    "gqa-4": "2,8,2,2000,2111,128,causal",
    "gqa-4-d192-128": "2,8,2,2000,2111,192,128,causal",
    "mqa-long": "1,16,1,8192,8192,128,causal",
    "gqa-of-one-sharer": "4,32,16,1200,1200,128,full",
}


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize(
    "layouts", [("bshd", "bshd"), ("bshd", "bhsd"), ("bhsd", "bhsd"), ("packed", "packed")], ids="-".join
)
@pytest.mark.parametrize("shape", MEMORY.values(), ids=MEMORY)
def test_bwd_allocates_rows_and_sums_only(shape, layouts, deterministic):
    """Memory beside the gradients, all fp32, with seqlen_q rounded up to 128 and tile widths for head dims:

        lse and delta  2 * batch * heads_q * seqlen_q
        dq             batch * heads_q * seqlen_q * head_dim, if one pass computes it with dk and dv; in a fixed order also a
                       number per 16 queries, rounded up
        dk and dv      sharers * batch * heads_kv * seqlen_k * (head_dim + head_dim_v), if several CTAs (sharers) share the
                       query heads of a key head; of the last tiles alone, if they share those

    A tensor that TMA can address is never copied.
    """
    shape, (layout, dout_layout) = Shape.parse(shape), layouts
    q, k, v = make_inputs(shape, BF16, layout)
    dout = make_dout(shape, BF16, dout_layout)
    heads_first = layout == "bhsd"
    if heads_first:
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    out, lse = launch.forward(q, k, v, 0.1, shape.causal, False, heads_first)
    options = (0.1, shape.causal, False, heads_first, deterministic)
    launch.backward(dout, q, k, v, out, lse, *options)  # compiles the kernels
    peak, grads = requested_bytes(lambda: tuple(launch.backward(dout, q, k, v, out, lse, *options).values()))

    direction = "bwd_det" if deterministic else "bwd"
    problem = shape.problem("bfloat16", direction)
    bucket = bwd_bucket(deterministic, shape.heads_q, shape.heads_kv, shape.seqlen_k)
    config, _ = pick_config(problem, bucket, torch.cuda.get_device_name(), direction)
    sizes = (shape.batch, shape.heads_q, shape.heads_kv, shape.seqlen_q, shape.seqlen_k)
    workspace = launch.bwd_workspace_bytes(*sizes, problem, config, device_costs(0))
    assert peak <= sum(x.nbytes for x in grads) + workspace + 2**20

    rows = shape.batch * shape.heads_q * -(-shape.seqlen_q // 128) * 128
    stated = 8 * rows
    for one in config.passes:
        if one.adds_dq:
            turns = math.ceil(rows / 16 / (16 * problem.head_dim)) * 16 * problem.head_dim
            stated += 4 * (rows * problem.head_dim + turns * one.is_ordered)
    keys = shape.batch * shape.heads_q * (shape.seqlen_k + 192)  # rounded up to a tile
    if shape.heads_q == shape.heads_kv:
        keys = (
            128 * 16 * sm_count(0) * any(one.is_stream_k for one in config.passes)
        )  # at most a tile per SM, by 16 sharers
    partials = 4 * keys * (problem.head_dim + problem.head_dim_v)
    assert stated <= workspace <= stated + partials


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", ["4,16,16,1111,1111,128,full", "4,16,16,1111,1111,128,causal", "2,16,16,2222,2222,64,full",
              "2,16,16,2222,2222,64,causal", "2,16,16,1111,1111,192,128,causal", "2,28,4,1111,1111,128,causal",
              "1,16,1,4096,4096,128,causal", "2,28,4,2222,1111,128,full", "2,12,12,1300,2222,96,causal",
              "2,24,8,2222,2222,96,full", "2,8,8,700,700,256,causal",
              "8,8,8,2048,2048,256,causal", "4,10,10,4096,4096,192,causal"],
)  # fmt: skip
def test_bwd_deterministic_is_bitwise_equal(shape):
    shape = Shape.parse(shape)
    q, k, v = make_inputs(shape, BF16)
    dout = make_dout(shape, BF16)
    out, lse = launch.forward(q, k, v, 0.1, shape.causal, False)
    backward = partial(launch.backward, dout, q, k, v, out, lse, 0.1, shape.causal, False, deterministic=True)
    expected = backward()
    for _ in range(50):
        assert all(map(torch.equal, backward().values(), expected.values()))


@pytest.fixture
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@both_masks
@pytest.mark.parametrize("heads_kv", [16, 4])
def test_bwd_follows_use_deterministic_algorithms(causal, heads_kv, deterministic_algorithms):
    """In this mode PyTorch also fills allocated memory with NaN."""
    shape = Shape(2, 16, heads_kv, 1111, 1111, 128, 128, causal)
    q, k, v = (x.requires_grad_() for x in make_inputs(shape, BF16))
    dout = make_dout(shape, BF16)
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    expected = tuple(
        launch.backward(
            dout, *(x.detach() for x in (q, k, v, out, lse)), 128**-0.5, causal, False, deterministic=True
        ).values()
    )
    for _ in range(50):
        grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(map(torch.equal, grads, expected))


@pytest.mark.gpu
@both_masks
def test_bwd_deterministic_takes_at_most_a_third_longer(causal):
    shape = Shape(4, 16, 16, 4096, 4096, 128, 128, causal)
    q, k, v = make_inputs(shape, BF16)
    dout = make_dout(shape, BF16)
    out, lse = launch.forward(q, k, v, 128**-0.5, causal, False)
    calls = {
        mode: partial(launch.backward, dout, q, k, v, out, lse, 128**-0.5, causal, False, deterministic=mode)
        for mode in (False, True)
    }
    timings = time_interleaved(calls)
    assert speedup(timings[False], timings[True]).median <= 1.35


@pytest.mark.gpu
@both_modes
def test_bwd_of_keys_with_more_than_2_31_elements(deterministic):
    """Offsets of keys, values and their gradients need 64 bits; the last head is checked."""
    q, dout = (torch.randn(3, 70, 64, 128, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(3, 100_003, 64, 128, device="cuda", dtype=BF16) for _ in range(2))
    assert k.numel() > 2**31
    check_last_head(dout, q, k, v, True, deterministic)


@pytest.mark.gpu
@both_modes
def test_bwd_of_queries_with_more_than_2_31_elements(deterministic):
    """Offsets of queries, outputs, their gradients and the sums of dq need 64 bits; the last head is checked."""
    q, dout = (torch.randn(3, 100_003, 64, 128, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(3, 70, 64, 128, device="cuda", dtype=BF16) for _ in range(2))
    check_last_head(dout, q, k, v, False, deterministic)


def check_last_head(dout, q, k, v, causal, deterministic):
    out, lse = launch.forward(q, k, v, 0.1, causal, False)
    grads = tuple(
        launch.backward(dout, q, k, v, out, lse, 0.1, causal, False, deterministic=deterministic).values()
    )
    verdict = check_bwd(
        [x[2:, :, 63:] for x in grads], *(x[2:, :, 63:] for x in (dout, q, k, v)), 0.1, causal
    )
    assert verdict.ok, verdict.text


def assert_same(grads, expected, deterministic):
    """Compare bitwise; dq of the fast mode is summed in any order and may round to a neighbouring number."""
    if deterministic:
        assert all(map(torch.equal, grads, expected))
    else:
        torch.testing.assert_close(grads, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_bwd_of_a_batch_too_large_for_a_grid_is_launched_in_chunks(with_dlse, monkeypatch):
    batches = []

    class Plan:
        def __init__(
            self,
            dout,
            q,
            k,
            v,
            out,
            dq,
            dk,
            dv,
            causal,
            heads_first,
            deterministic,
            options,
            traced,
            partial,
            config,
        ):
            batches.append(len(q))
            assert all(len(x) == len(q) for x in (dout, out, dq, dk, dv))

        def __call__(self, dout, q, k, v, out, lse, scale, lse_base2, dlse, options, traced, dq, dk, dv):
            assert len(lse) == len(q) and with_dlse == (dlse is not None)
            assert dlse is None or len(dlse) == len(q)
            for grad, x in ((dq, q), (dk, k), (dv, v)):
                grad.copy_(x)

    monkeypatch.setattr(launch.bwd, "MAX_BATCH", 3)
    monkeypatch.setattr(launch.bwd, "BwdPlan", Plan)
    monkeypatch.setattr(launch.bwd, "empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the tensors are on the CPU
    q, k, v = make_inputs(Shape(7, 2, 1, 5, 6, 64, 64, False), BF16, device="cpu")
    lse = torch.zeros(7, 2, 5)
    grads = tuple(
        launch.backward(q, q, k, v, q, lse, 0.1, False, False, dlse=lse if with_dlse else None).values()
    )
    assert batches == [3, 3, 1] and all(map(torch.equal, grads, (q, k, v)))


STREAMED = Shape(2, 16, 4, 1500, 1500, 128, 128, True)


def forward_and_backward(dout, q, k, v, deterministic):
    out, lse = launch.forward(q, k, v, 0.1, True, False)
    return tuple(
        launch.backward(dout, q, k, v, out, lse, 0.1, True, False, deterministic=deterministic).values()
    )


def streamed_inputs(seed):
    return make_dout(STREAMED, BF16, seed=seed), *make_inputs(STREAMED, BF16, seed=seed)


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize("heads_first", [False, True], ids=["bshd", "bhsd"])
def test_bwd_with_a_cached_plan_equals_a_first_call(heads_first, deterministic, monkeypatch):
    """Calls with other values, and with an address that TMA cannot use."""
    q, k, v = make_inputs(STREAMED, BF16, "bhsd" if heads_first else "bshd")
    dout = make_dout(STREAMED, BF16, "bhsd" if heads_first else "bshd")
    tensors = [x.transpose(1, 2) if heads_first else x for x in (dout, q, k, v)]
    for step in range(4):
        dout, q, k, v = others = [
            torch.stack([x, x], 0).flatten()[step % 2 * 4 :][: x.numel()].view_as(x).copy_(x + step)
            for x in tensors
        ]
        assert any(x.data_ptr() % 16 for x in others) == (step % 2 == 1)
        out, lse = launch.forward(q, k, v, 0.1, True, False, heads_first)
        options = (0.1, True, False, heads_first, deterministic)
        assert step == 0 or launch.bwd_plan(dout, q, k, v, out, lse, True, heads_first, deterministic)
        grads = tuple(launch.backward(dout, q, k, v, out, lse, *options).values())
        with monkeypatch.context() as patch:
            patch.setattr(launch.bwd, "plan_cache", PlanCache())
            first = tuple(launch.backward(*(x.clone() for x in (dout, q, k, v)), out, lse, *options).values())
        assert_same(grads, first, deterministic)


@pytest.mark.gpu
@both_modes
def test_bwd_on_two_streams_at_once(deterministic):
    inputs = [streamed_inputs(seed) for seed in range(2)]
    expected = [forward_and_backward(*x, deterministic) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(forward_and_backward(*inputs[i], deterministic))
    torch.cuda.synchronize()
    for several, want in zip(found, expected, strict=True):
        for grads in several:
            assert_same(grads, want, deterministic)


@pytest.mark.gpu
@both_modes
def test_bwd_in_graphs_replayed_concurrently(deterministic):
    inputs = [streamed_inputs(seed) for seed in range(2)]
    for x in inputs:
        forward_and_backward(*x, deterministic)
    torch.cuda.synchronize()
    graphs, found = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(forward_and_backward(*x, deterministic))
        graphs.append(graph)
    for seed in (7, 8):  # new values in the captured inputs
        fresh = [streamed_inputs(seed + s) for s in range(2)]
        expected = [forward_and_backward(*x, deterministic) for x in fresh]
        for old, new in zip(inputs, fresh, strict=True):
            for old_tensor, new_tensor in zip(old, new, strict=True):
                old_tensor.copy_(new_tensor)
        torch.cuda.synchronize()
        for _ in range(10):
            for graph in graphs:
                with torch.cuda.stream(torch.cuda.Stream()):
                    graph.replay()
        torch.cuda.synchronize()
        for grads, want in zip(found, expected, strict=True):
            assert_same(grads, want, deterministic)


@pytest.mark.gpu
@both_masks
@pytest.mark.parametrize(
    "sizes",
    [(0, 2, 2, 3, 4), (2, 0, 0, 3, 4), (2, 2, 1, 0, 4), (2, 2, 1, 3, 0)],
    ids=["batch", "heads", "seqlen_q", "seqlen_k"],
)
def test_bwd_of_empty_tensors_is_zero(sizes, causal):
    shape = Shape(*sizes, 64, 32, causal)
    q, k, v = make_inputs(shape, BF16)
    out, lse = launch.forward(q, k, v, 0.1, causal, False)
    grads = tuple(launch.backward(make_dout(shape, BF16), q, k, v, out, lse, 0.1, causal, False).values())
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]
    assert not any(x.any() for x in grads)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
def test_gradient_of_a_sink_is_that_of_its_formula(dtype):
    """Minus the sum of exp(sink - lse) * delta; padding has an lse of inf and a delta of 0."""
    sink, others = (30 * torch.randn(8)).to(dtype), 30 * torch.randn(3, 8, 1000).double()
    lse, delta = torch.logaddexp(sink.double()[:, None], others), torch.randn(3, 8, 1000).double()
    expected = -((sink.double()[:, None] - lse).exp() * delta).sum((0, 2))
    pad = torch.nn.functional.pad
    padded = pad(lse / math.log(2), (0, 24), value=math.inf).float(), pad(delta, (0, 24)).float()
    found = launch.bwd._sink_gradient(sink, *padded)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, expected.to(dtype), rtol=1e-4 if dtype == torch.float32 else 0.01, atol=1e-3
    )
