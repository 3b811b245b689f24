"""Forward kernel on a Hopper GPU, compared with the reference by the error rule. Each curated case covers a path of the kernel."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_attention import flash_attn_func, launch, mha_fwd_interface, ref_mha_fwd_interface
from tl_attention.compilation import building
from tl_attention.config.configs import candidates, default_config, pick_config
from tl_attention.config.kernel_configs import SCHEDULES, FwdConfig
from tl_attention.launch.arrays import tma_ready
from tl_attention.launch.common import PlanCache, device_costs
from tl_attention.problem.attn_problem import SPLIT_BUCKET, AttnProblem, tile_width
from tl_attention.problem.target import DTYPE_NAMES
from tl_attention.reference import attention_reference
from tl_attention.testing.inputs import LAYOUTS, guard_is_untouched, make_inputs, poisoned
from tl_attention.testing.numeric import check_fwd
from tl_attention.testing.shapes import Shape

BF16, FP16 = torch.bfloat16, torch.float16


def run(shape: Shape, dtype=BF16, layout="bshd", scale=None, lse_base2=False, config=None, seed=0):
    """Launch on poisoned, guarded outputs and check out and lse by the error rule."""
    q, k, v = make_inputs(shape, dtype, layout, seed)
    verdict = check_launch(
        q, k, v, scale, shape.causal, lse_base2, "bhsd" if layout == "bhsd" else "bshd", config
    )
    assert verdict.ok, verdict.text


def check_launch(q, k, v, scale, causal, lse_base2=False, out_layout="bshd", config=None):
    batch, seqlen_q, heads, _ = q.shape
    whole_out, out = poisoned(batch, seqlen_q, heads, v.shape[3], dtype=q.dtype, layout=out_layout)
    whole_lse, lse = poisoned(batch, heads, seqlen_q, dtype=torch.float32)
    plan = launch.fwd.FwdPlan(q, k, v, out, causal, False, config=config)
    plan(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, lse_base2, out=out, lse=lse)
    assert guard_is_untouched(whole_out, out), "out: written outside its bounds"
    assert guard_is_untouched(whole_lse, lse), "lse: written outside its bounds"
    return check_fwd(out, lse, q, k, v, scale, causal, lse_base2)


CURATED = {
    # id: (B,Hq,Hkv,Sq,Sk,D[,Dv],mask, options)
    "one-tile": ("2,4,4,128,128,128,full", {}),
    "one-tile-causal": ("2,4,4,128,128,128,causal", {}),
    "tails-of-both": ("2,4,4,333,555,128,full", {}),
    "tails-of-both-causal": ("2,4,4,333,555,128,causal", {}),
    "one-past-a-tile": ("1,4,4,129,129,128,causal", {}),
    "one-before-a-tile": ("1,4,4,127,127,128,causal", {}),
    "one-query-one-key": ("1,2,2,1,1,128,full", {}),
    "one-query": ("3,4,1,1,1000,128,causal", {}),
    "one-key": ("2,4,4,300,1,128,full", {}),
    "one-key-causal": ("2,4,4,300,1,128,causal", {}),
    "queries-without-keys": ("2,4,2,1000,300,128,causal", {}),
    "tiles-without-keys": ("1,2,2,2000,59,128,causal", {}),
    "more-keys-than-queries": ("2,4,4,59,1000,128,causal", {}),
    "long-causal": ("1,2,1,8191,8191,128,causal", {}),
    "long-full": ("1,2,1,1000,9000,128,full", {}),
    "many-tiles-a-cta": ("5,16,16,1111,1111,128,causal", {}),
    "many-tiles-a-cta-full": ("5,16,16,1111,1111,128,full", {}),
    "heads-of-several-l2-groups": ("1,13,13,9000,9000,64,causal", {}),
    "gqa-4": ("2,8,2,777,1000,128,causal", {}),
    "gqa-7": ("2,28,4,400,500,128,causal", {}),
    "mqa": ("2,6,1,500,700,128,full", {}),
    "bhsd": ("2,4,4,384,640,128,full", {"layout": "bhsd"}),
    "bhsd-gqa-causal": ("2,8,2,777,1000,128,causal", {"layout": "bhsd"}),
    "packed": ("2,6,6,1000,1000,128,full", {"layout": "packed"}),
    "packed-gqa-causal": ("3,8,2,555,555,64,causal", {"layout": "packed"}),
    "d64": ("2,4,2,1000,777,64,full", {}),
    "d64-causal": ("2,4,2,777,1000,64,causal", {"layout": "bhsd"}),
    "d96": ("2,4,2,333,555,96,full", {}),
    "d96-causal": ("2,4,2,555,555,96,causal", {"layout": "packed"}),
    "d192": ("1,4,2,333,555,192,full", {}),
    "d192-causal": ("1,4,2,555,333,192,causal", {}),
    "d256": ("2,2,2,333,555,256,full", {"layout": "bhsd"}),
    "d256-causal": ("2,4,2,700,555,256,causal", {}),
    "d192-128": ("2,4,4,500,700,192,128,full", {}),
    "d192-128-causal-gqa": ("2,4,1,500,700,192,128,causal", {}),
    "d192-128-many-tiles": ("3,16,16,1111,1111,192,128,causal", {}),
    "d128-64-causal": ("2,4,4,500,700,128,64,causal", {}),
    "d96-64-causal": ("2,4,4,500,700,96,64,causal", {"layout": "bhsd"}),
    "d256-128-causal": ("2,4,4,500,700,256,128,causal", {}),
    "d256-128-many-tiles": ("3,16,16,1111,1111,256,128,full", {}),
    "d72-64-causal": ("2,4,4,500,700,72,64,causal", {}),
    "d8": ("2,4,4,300,333,8,causal", {}),
    "d40-16": ("2,4,4,300,333,40,16,full", {}),
    "d80-causal": ("2,4,2,300,333,80,causal", {"layout": "packed"}),
    "d160": ("1,4,4,300,333,160,full", {}),
    "d200-8-causal": ("1,4,4,300,333,200,8,causal", {}),
    "d248-causal": ("1,2,2,300,333,248,causal", {}),
    "fp16": ("2,4,4,333,555,128,full", {"dtype": FP16}),
    "fp16-d64-causal-packed": ("2,4,4,700,700,64,causal", {"dtype": FP16, "layout": "packed"}),
    "fp16-d192-128-causal": ("2,4,4,333,555,192,128,causal", {"dtype": FP16}),
    "fp16-d256-causal": ("1,2,2,333,555,256,causal", {"dtype": FP16}),
    "lse-base-2": ("2,4,4,333,555,128,causal", {"lse_base2": True}),
    "scale-0": ("2,4,4,300,333,128,causal", {"scale": 0.0}),
    "scale-0-rows-without-keys": ("2,2,2,300,59,128,causal", {"scale": 0.0}),
    "scale-negative": ("2,4,4,300,333,128,causal", {"scale": -0.2}),
    "scale-negative-packed": ("2,4,4,300,333,128,full", {"scale": -0.1, "layout": "packed"}),
    "scale-negative-d64-many-tiles": ("3,16,16,1111,1111,64,causal", {"scale": -0.1}),
    "scale-negative-d192-128": ("2,16,16,1111,1111,192,128,causal", {"scale": -0.1}),
    "scale-3": ("2,4,4,300,333,128,full", {"scale": 3.0}),
    "scale-1e4": ("2,4,4,300,333,128,causal", {"scale": 1e4}),
    "scale-1e-30": ("2,4,4,300,333,128,causal", {"scale": 1e-30}),
}

MASKED_SCHEDULES = [
    pytest.param(schedule, causal, id=f"{schedule}-{'causal' if causal else 'full'}")
    for schedule in SCHEDULES
    for causal in (False, True)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "options"), CURATED.values(), ids=CURATED)
def test_fwd_matches_reference(shape, options):
    run(Shape.parse(shape), **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "causal"), MASKED_SCHEDULES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=lambda d: f"d{d[0]}-{d[1]}")
def test_fwd_every_schedule_matches_reference(schedule, causal, dims):
    """Every schedule, independent of the tuned table, with fewer tiles than SMs, as many, and many more."""
    problem = AttnProblem("bfloat16", *dims, causal)
    holds = schedule != "grid" and not (causal and schedule == "stream-K")
    config = replace(default_config(problem), schedule=schedule, q_stages=1, hold_max=holds)
    for batch, heads, seqlen in ((1, 1, 100), (1, 132, 100), (4, 12, 1500)):
        run(Shape(batch, heads, heads, seqlen, seqlen + 30, *dims, causal), config=config)


SPLIT = {
    # id: (B,Hq,Hkv,Sq,Sk,D[,Dv],mask, options); splits: their number, by default that of launch.splits.key_splits
    "chunk": ("1,8,1,128,16384,128,causal", {}),
    "chunk-full": ("1,4,4,128,5000,128,full", {}),
    "one-query": ("1,8,1,1,5003,128,causal", {}),
    "one-key": ("1,2,2,100,1,128,full", {"splits": 5}),
    "tails-of-both": ("2,4,2,333,3555,128,causal", {"splits": 7}),
    "tails-of-both-full": ("2,4,2,333,3555,128,full", {"splits": 3}),
    "one-split": ("1,4,2,200,1000,128,causal", {"splits": 1}),
    "more-splits-than-blocks": ("1,4,2,200,300,128,causal", {"splits": 128}),
    "diagonal-over-several-splits": ("1,4,4,1500,1500,128,causal", {"splits": 9}),
    "rows-without-keys": ("2,4,2,1000,300,128,causal", {"splits": 3}),
    "tiles-without-keys": ("1,2,2,2000,59,128,causal", {"splits": 2}),
    "many-tiles": ("3,16,4,700,900,128,causal", {"splits": 4}),
    "heads-of-several-l2-groups": ("1,13,13,64,70000,64,full", {"splits": 3}),
    "bhsd-lse-base-2": ("1,8,2,300,4000,128,causal", {"layout": "bhsd", "lse_base2": True}),
    "packed": ("2,6,6,1000,1000,64,causal", {"layout": "packed", "splits": 5}),
    "d64-full": ("1,4,2,300,4000,64,full", {}),
    "d64-causal": ("1,4,2,300,4000,64,causal", {}),
    "d96-causal": ("1,4,2,300,4000,96,causal", {}),
    "d192-full": ("1,4,2,300,4000,192,full", {}),
    "d192-128-causal": ("1,4,4,300,4000,192,128,causal", {}),
    "d128-64-full": ("1,4,4,300,4000,128,64,full", {}),
    "d256-128-causal": ("1,4,4,300,4000,256,128,causal", {}),
    "d256-causal": ("1,4,2,300,4000,256,causal", {"lse_base2": True}),
    "d200-72-causal": ("1,4,4,300,4000,200,72,causal", {}),
    "d40-16": ("1,4,4,300,4000,40,16,full", {}),
    "fp16": ("1,4,4,333,4001,128,full", {"dtype": FP16}),
    "scale-0-rows-without-keys": ("1,2,2,300,59,128,causal", {"scale": 0.0, "splits": 2}),
    "scale-negative": ("1,4,4,300,3333,128,causal", {"scale": -0.2}),
    "scale-1e4": ("1,4,4,300,3333,128,causal", {"scale": 1e4}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "options"), SPLIT.values(), ids=SPLIT)
def test_fwd_with_split_keys_matches_reference(shape, options, monkeypatch):
    if splits := options.get("splits"):
        monkeypatch.setattr(launch.splits, "key_splits", lambda tiles, steps, costs: splits)
    shape, options = Shape.parse(shape), {name: value for name, value in options.items() if name != "splits"}
    dtype = DTYPE_NAMES[options.get("dtype", BF16)]
    problem = AttnProblem.of(dtype, shape.head_dim, shape.head_dim_v, shape.causal)
    run(shape, config=default_config(problem, bucket=SPLIT_BUCKET), **options)


FEW_TILES = Shape(1, 8, 1, 300, 9001, 128, 128, True)


@pytest.mark.gpu
def test_fwd_with_split_keys_is_deterministic():
    sizes = FEW_TILES.batch, FEW_TILES.heads_q, FEW_TILES.seqlen_q, FEW_TILES.seqlen_k
    assert launch.fwd_bucket(*sizes, device_costs(0)) == SPLIT_BUCKET
    run(FEW_TILES)
    q, k, v = make_inputs(FEW_TILES, BF16)
    out, lse = launch.forward(q, k, v, 0.1, True, False)
    for _ in range(50):
        again, lse_again = launch.forward(q, k, v, 0.1, True, False)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("target", ["q", "k", "v"])
def test_fwd_with_split_keys_propagates_inf_and_nan(value, target):
    q, k, v = make_inputs(FEW_TILES, BF16)
    {"q": q, "k": k, "v": v}[target][0, 17, 0, 5] = value
    verdict = check_launch(q, k, v, None, True)
    assert verdict.ok, verdict.text


@pytest.mark.gpu
def test_fwd_with_split_keys_in_a_graph():
    q, k, v = make_inputs(FEW_TILES, BF16)
    launch.forward(q, k, v, 0.1, True, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch.forward(q, k, v, 0.1, True, False)
    for seed in (1, 2):
        for old, new in zip((q, k, v), make_inputs(FEW_TILES, BF16, seed=seed), strict=True):
            old.copy_(new)
        expected = launch.forward(q, k, v, 0.1, True, False)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


DIMS = st.integers(1, 32).map(lambda n: 8 * n)


@st.composite
def problems(draw):
    head_dim = draw(st.sampled_from([64, 128, 64, 128, 96, 192, 256]) | DIMS)
    head_dim_v = draw(st.just(head_dim) | st.sampled_from([64, 128]) | DIMS)
    heads_kv = draw(st.integers(1, 5))
    lengths = st.integers(1, 300) | st.integers(1, 3000) | st.sampled_from([1, 64, 127, 128, 129, 192, 1024])
    return Shape(
        batch=draw(st.integers(1, 4)),
        heads_q=heads_kv * draw(st.sampled_from([1, 1, 2, 3, 4, 8])),
        heads_kv=heads_kv,
        seqlen_q=draw(lengths),
        seqlen_k=draw(lengths),
        head_dim=head_dim,
        head_dim_v=min(head_dim_v, head_dim),
        causal=draw(st.booleans()),
    )


@pytest.mark.gpu
@settings(max_examples=400)
@given(
    shape=problems(),
    dtype=st.sampled_from([BF16, FP16]),
    layout=st.sampled_from(["bshd", "bhsd", "packed"]),
    scale=st.none() | st.floats(-2, 2),
    lse_base2=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_fwd_matches_reference_on_random_problems(shape, dtype, layout, scale, lse_base2, seed):
    run(shape, dtype, layout, scale, lse_base2, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fwd_compiles_once_per_length_class(causal, monkeypatch):
    """Hundreds of lengths, batches, heads, scales and layouts in shuffled order. Each is right and has the kernels of its class alone."""
    monkeypatch.setattr(building, "_compiled", {})
    monkeypatch.setattr(launch.fwd, "_kernels", {})
    monkeypatch.setattr(launch.fwd, "plan_cache", PlanCache())
    problem, kernels = AttnProblem("bfloat16", 128, 128, causal), set()
    gpu, costs = torch.cuda.get_device_name(), device_costs(torch.cuda.current_device())
    lengths = [*range(1, 400, 3), *range(1000, 3200, 37), 9000, 9001, 12345]
    random.Random(0).shuffle(lengths)
    for i, seqlen_k in enumerate(lengths):
        seqlen_q = lengths[-i] if seqlen_k < 4000 else 100
        shape = Shape(
            1 + i % 3, 4, 1 + i % 2, seqlen_q, seqlen_k, 128 - 8 * (i % 3), 128 - 8 * (i % 3), causal
        )
        run(shape, layout=LAYOUTS[i % 3], scale=0.1 + i / 1000, lse_base2=bool(i % 2), seed=i)
        shares = launch.splits.sharing(problem, gpu)
        bucket = launch.fwd_bucket(shape.batch, shape.heads_q, seqlen_q, seqlen_k, costs, shares)
        kernels |= {*pick_config(problem, bucket, gpu)[0].kernels(problem)}
        assert building.compile_count() == len(kernels)


def requested_bytes(call):
    """(peak of the bytes requested from the allocator during a call, result)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, result


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_fwd_allocates_its_outputs_only(layout):
    shape = Shape(2, 8, 2, 1000, 1111, 128, 128, True)
    q, k, v = make_inputs(shape, BF16, layout)
    out, lse = launch.forward(q, k, v, 0.1, True, False)  # compiles the kernels and allocates the tickets
    peak, kept = requested_bytes(lambda: launch.forward(q, k, v, 0.1, True, False))
    assert peak <= out.nbytes + lse.nbytes + 1024
    assert torch.equal(kept[0], out)


COPIED = {
    "expanded-heads": lambda x: x[:, :, :1].expand_as(x),
    "expanded-batch": lambda x: x[:1].expand_as(x),
    "odd-column": lambda x: torch.cat([x, x], -1)[..., 3 : 3 + x.shape[-1]],
    "odd-row-stride": lambda x: torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]],
}
TAKEN_AS_IT_IS = {
    "bshd": lambda x: x,
    "bhsd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed": lambda x: torch.cat([x, x, x], 2)[:, :, x.shape[2] : 2 * x.shape[2]],
    "every-other-row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "columns-of-a-wider-tensor": lambda x: torch.cat([x, x], -1)[..., 8 : 8 + x.shape[-1]],
    "one-head-of-odd-stride": lambda x: x[:, :, :1].as_strided(
        (*x.shape[:2], 1, x.shape[3]), (*x.stride()[:2], 3, 1)
    ),
    "one-batch-expanded": lambda x: x[0].expand(1, *x.shape[1:]),
}


@pytest.mark.parametrize("view", TAKEN_AS_IT_IS.values(), ids=TAKEN_AS_IT_IS)
def test_tma_ready_does_not_copy(view):
    x = view(torch.randn(2, 10, 4, 64, dtype=BF16))
    ready = tma_ready(x)
    assert ready.data_ptr() == x.data_ptr() and torch.equal(ready, x)
    assert all(s and s % 8 == 0 for s in ready.stride()[:3])


@pytest.mark.parametrize("view", COPIED.values(), ids=COPIED)
def test_tma_ready_copies_what_tma_cannot_address(view):
    x = view(torch.randn(2, 10, 4, 64, dtype=BF16))
    ready = tma_ready(x)
    assert ready.is_contiguous() and ready.data_ptr() != x.data_ptr() and torch.equal(ready, x)


@pytest.mark.gpu
@pytest.mark.parametrize("view", [*COPIED.values(), *TAKEN_AS_IT_IS.values()], ids=[*COPIED, *TAKEN_AS_IT_IS])
def test_fwd_takes_any_strides(view):
    q, k, v = (view(x) for x in make_inputs(Shape(2, 4, 4, 300, 300, 64, 64, True), BF16))
    verdict = check_launch(q, k, v, None, True)
    assert verdict.ok, verdict.text


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True], ids=["bshd", "bhsd"])
def test_fwd_with_a_cached_plan_equals_a_first_call(heads_first, monkeypatch):
    """Calls with other values, and with an address that TMA cannot use."""
    tensors = make_inputs(Shape(2, 4, 2, 300, 333, 64, 64, True), BF16)
    if heads_first:
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    for step in range(4):
        q, k, v = others = [
            torch.stack([x, x], 0).flatten()[step % 2 * 4 :][: x.numel()].view_as(x).copy_(x + step)
            for x in tensors
        ]
        assert any(x.data_ptr() % 16 for x in others) == (step % 2 == 1)
        known = len(launch.fwd.plan_cache.plans)
        out, lse = launch.forward(q, k, v, 0.1, True, False, heads_first)
        assert step == 0 or len(launch.fwd.plan_cache.plans) == known
        with monkeypatch.context() as patch:
            patch.setattr(launch.fwd, "plan_cache", PlanCache())
            first, first_lse = launch.forward(*(x.clone() for x in others), 0.1, True, False, heads_first)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)
        assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.gpu
def test_fwd_in_two_threads_at_once():
    """Each thread has its own plans: the GIL is released while a kernel is launched."""
    inputs = [
        make_inputs(Shape(2, 4, 4, 300, 300, 64, 64, True), BF16, "bhsd", seed=seed) for seed in range(4)
    ]
    inputs = [[x.transpose(1, 2) for x in tensors] for tensors in inputs]
    expected = [launch.forward(*tensors, 0.1, True, False, True)[0] for tensors in inputs]
    torch.cuda.synchronize()

    def many(i: int) -> bool:
        outs = [launch.forward(*inputs[i], 0.1, True, False, True)[0] for _ in range(300)]
        torch.cuda.synchronize()
        return all(torch.equal(out, expected[i]) for out in outs)

    with ThreadPoolExecutor(len(inputs)) as threads:
        assert all(threads.map(many, range(len(inputs))))


@pytest.mark.gpu
def test_plans_hold_no_tensor_and_are_bounded(monkeypatch):
    monkeypatch.setattr(launch.common, "MAX_PLANS", 8)
    for module in (launch.fwd, launch.bwd):
        monkeypatch.setattr(module, "plan_cache", PlanCache())
    q, k, v = make_inputs(Shape(1, 2, 2, 64, 64, 64, 64, False), BF16)
    launch.forward(q, k, v, 0.1, False, False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seqlen in range(1, 50):
        x = torch.randn(1, 2, seqlen, 64, device="cuda", dtype=BF16)
        for tensors in ((x, x, x), (x[:, :1].expand_as(x), x, x)):
            out, lse = launch.forward(*tensors, 0.1, False, False, True)
            launch.backward(out, *tensors, out, lse, 0.1, False, False, True)
        assert len(launch.fwd.plan_cache.plans) <= 8 and len(launch.bwd.plan_cache.plans) <= 8
    del x, tensors, out, lse
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fwd_on_another_device_than_the_current_one():
    shape = Shape(2, 4, 2, 300, 333, 64, 64, True)
    q, k, v = make_inputs(shape, BF16, device="cuda:1")
    expected = launch.forward(*(x.to("cuda:0") for x in (q, k, v)), 0.1, True, False)
    for _ in range(2):  # a first call, and one with a cached plan
        found = launch.forward(q, k, v, 0.1, True, False)
        assert torch.cuda.current_device() == 0
        for x, want in zip(found, expected, strict=True):
            assert x.device.index == 1 and torch.equal(x.to("cuda:0"), want)


@pytest.mark.gpu
def test_fwd_of_tensors_with_more_than_2_31_elements():
    """Offsets of keys, values, queries and outputs need 64 bits; the last of each is checked."""
    k, v = (torch.randn(3, 100_003, 64, 128, device="cuda", dtype=BF16) for _ in range(2))
    assert k.numel() > 2**31
    q = torch.randn(3, 70, 64, 128, device="cuda", dtype=BF16)
    out, lse = launch.forward(q, k, v, 0.1, True, False)
    verdict = check_fwd(out[2:, :, 63:], lse[2:, 63:], q[2:, :, 63:], k[2:, :, 63:], v[2:, :, 63:], 0.1, True)
    assert verdict.ok, verdict.text
    del v, out
    out, lse = launch.forward(k, q, q, 0.1, False, False)
    verdict = check_fwd(
        out[2:, -500:, 63:], lse[2:, 63:, -500:], k[2:, -500:, 63:], q[2:, :, 63:], q[2:, :, 63:], 0.1, False
    )
    assert verdict.ok, verdict.text


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("target", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fwd_propagates_inf_and_nan(value, target, causal):
    q, k, v = make_inputs(Shape(1, 2, 2, 200, 300, 64, 64, causal), BF16)
    # in v at a key that every query sees: a causal kernel also spreads it to queries of its block that do not see the key
    {"q": q, "k": k, "v": v}[target][0, 17, 1, 5] = value
    verdict = check_launch(q, k, v, None, causal)
    assert verdict.ok, verdict.text


def longer_first_keys(q, k):
    k[:, :200] *= 100


def one_longer_key_of_one_sequence(q, k):
    k[1:2, 77] *= 100


def longer_keys_of_one_head_but_the_last(q, k):
    k[:, :1000, 3] *= 50


def a_key_along_one_query(q, k):
    k[:, 5] = 50 * q[:, 333]


def growth(q, k, scale, causal):
    """Largest excess of a score over those of the last 128 keys that the query sees."""
    scores = scale * q.float() @ k.float().T
    keys = torch.arange(scores.shape[1], device=q.device)
    end = (keys[-scores.shape[0] :] if causal else keys[-1:])[:, None]
    last = scores.masked_fill((keys > end) | (keys <= end - 128), -math.inf).amax(-1)
    return (scores.masked_fill(keys > end, -math.inf).amax(-1) - last).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "grow",
    [
        longer_first_keys,
        one_longer_key_of_one_sequence,
        longer_keys_of_one_head_but_the_last,
        a_key_along_one_query,
    ],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fwd_recomputes_tiles_that_outgrow_a_held_row_max(head_dim, causal, grow):
    """In the middle of the tiles of a CTA, and where a CTA has one tile."""
    problem = AttnProblem("bfloat16", head_dim, head_dim, causal)
    config = next(c for c in candidates(problem, "4k") if c.hold_max)
    for batch, heads in ((2, 5), (9, 20)):
        q, k, v = make_inputs(Shape(batch, heads, heads, 1111, 1234, head_dim, head_dim, causal), BF16)
        grow(q, k)
        assert growth(q[1, :, 3], k[1, :, 3], 0.1, causal) > 64
        verdict = check_launch(q, k, v, 0.1, causal, config=config)
        assert verdict.ok, verdict.text
        out, lse = launch.forward(q, k, v, 0.1, causal, False, config=config)
        again, lse_again = launch.forward(q, k, v, 0.1, causal, False, config=config)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.gpu
def test_fwd_terminates_with_huge_scores():
    """Termination with a held and with a followed row max, whose product with the scale has rounding errors above 128."""
    q, k, v = make_inputs(Shape(2, 5, 5, 1111, 1234, 64, 64, True), BF16)
    k[:, :200] *= 2.0**60
    config = next(c for c in candidates(AttnProblem("bfloat16", 64, 64, True), "4k") if c.hold_max)
    launch.forward(q, k, v, 0.1, True, False, config=config)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_fwd_is_deterministic():
    shape = Shape(4, 16, 16, 1111, 1111, 128, 128, True)
    for causal in (False, True):
        q, k, v = make_inputs(shape, BF16)
        out, lse = launch.forward(q, k, v, 0.1, causal, False)
        for _ in range(50):
            again, lse_again = launch.forward(q, k, v, 0.1, causal, False)
            assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "causal"), MASKED_SCHEDULES)
def test_fwd_on_two_streams_at_once(schedule, causal):
    config = FwdConfig(128, 128, schedule=schedule)
    inputs = [make_inputs(Shape(2, 16, 16, 1500, 1500, 128, 128, causal), BF16, seed=s) for s in range(2)]
    expected = [launch.forward(*x, 0.1, causal, False, config=config)[0] for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(launch.forward(*inputs[i], 0.1, causal, False, config=config)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for got, want in zip(outs, expected, strict=True) for out in got)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "causal"), MASKED_SCHEDULES)
def test_fwd_in_graphs_replayed_concurrently(schedule, causal):
    config = FwdConfig(128, 128, schedule=schedule)
    inputs = [make_inputs(Shape(2, 16, 16, 1500, 1500, 128, 128, causal), BF16, seed=s) for s in range(2)]
    for x in inputs:
        launch.forward(*x, 0.1, causal, False, config=config)
    torch.cuda.synchronize()
    graphs, outs = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(launch.forward(*x, 0.1, causal, False, config=config)[0])
        graphs.append(graph)
    for seed in (7, 8):  # new values in the captured inputs
        fresh = [
            make_inputs(Shape(2, 16, 16, 1500, 1500, 128, 128, causal), BF16, seed=seed + s) for s in range(2)
        ]
        expected = [launch.forward(*x, 0.1, causal, False, config=config)[0] for x in fresh]
        for x, new in zip(inputs, fresh, strict=True):
            for old_tensor, new_tensor in zip(x, new, strict=True):
                old_tensor.copy_(new_tensor)
        torch.cuda.synchronize()
        for _ in range(10):
            for graph in graphs:
                with torch.cuda.stream(torch.cuda.Stream()):
                    graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))


FIRST_CALL = """
import sys, time
import torch
q, k, v = (torch.randn(1, 300, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
start = time.process_time()
from tl_attention import flash_attn_func
flash_attn_func(q, k, v, causal=True)
torch.cuda.synchronize()
assert "tilelang" not in sys.modules
print(time.process_time() - start)
"""


@pytest.mark.gpu
def test_first_call_of_a_second_process_is_fast():
    def first_call() -> float:
        """CPU seconds of a process that builds nothing: other processes do not count."""
        environment = {name: x for name, x in os.environ.items() if name != "TL_ATTENTION_QUIET"}
        command = [sys.executable, "-c", FIRST_CALL]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert "tl_attention: building" not in done.stderr
        return float(done.stdout)

    mha_fwd_interface(
        *(torch.randn(1, 4, 300, 128, device="cuda", dtype=BF16) for _ in range(3)), is_causal=True
    )
    assert min(first_call() for _ in range(2)) <= 0.5


@pytest.mark.gpu
def test_public_functions_agree_with_the_reference():
    q, k, v = (x.transpose(1, 2) for x in make_inputs(Shape(2, 8, 2, 333, 555, 128, 64, True), BF16, "bhsd"))
    out, lse = mha_fwd_interface(q, k, v, sm_scale=0.07, is_causal=True)
    expected, expected_lse = ref_mha_fwd_interface(q, k, v, sm_scale=0.07, is_causal=True)
    assert out.shape == (2, 8, 333, 64) and out.is_contiguous() and out.dtype == BF16
    torch.testing.assert_close(out.float(), expected, atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
    kernel = mha_fwd_interface(q, k, v, sm_scale=0.07, is_causal=True, return_kernel=True)
    assert all(torch.equal(a, b) for a, b in zip(kernel(q, k, v), (out, lse), strict=True))

    flash, flash_lse, _ = flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=0.07, causal=True, return_attn_probs=True
    )
    assert flash.is_contiguous() and torch.equal(flash.transpose(1, 2), out)
    torch.testing.assert_close(flash_lse, lse * math.log(2), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_public_functions_compile_with_dynamic_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True) * 2, fullgraph=True, dynamic=True
    )
    for seqlen in (100, 200, 333):
        q, k, v = make_inputs(Shape(2, 4, 2, seqlen, seqlen, 64, 64, True), BF16)
        expected, _ = attention_reference(q, k, v, None, True)
        torch.testing.assert_close(compiled(q, k, v).float(), expected * 2, atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_public_functions_compile_into_graph_trees():
    """reduce-overhead warms up and captures in its own memory pools, which must not own the tickets."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True), mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(5):
            q, k, v = make_inputs(Shape(2, 16, 16, 1000, 1000, 128, 128, True), BF16, seed=seed)
            expected = launch.forward(q, k, v, 128**-0.5, True, False)[0]
            assert torch.equal(compiled(q, k, v), expected)


@pytest.mark.gpu
def test_fwd_head_groups_of_short_sequences_are_those_of_2048_keys():
    groups = []
    for seqlen in (300, 512, 1024, 2048, 4096):
        q, k, v, out = (torch.empty(4, 16, seqlen, 128, device="cuda", dtype=BF16) for _ in range(4))
        _, _, group_heads, _ = launch.fwd.FwdPlan(q, k, v, out, True, True).arguments
        groups.append(group_heads)
    assert groups == [32, 32, 32, 32, 16]


FIRST_CALL_IN_A_GRAPH = """
import torch
from tl_attention import launch
from tl_attention.compilation import building
from tl_attention.config.kernel_configs import FwdConfig
from tl_attention.problem.attn_problem import AttnProblem
q, k, v = (torch.randn(2, 1500, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
config = FwdConfig(128, 128, schedule="dynamic")
if {ahead}:
    building.compile_kernel(AttnProblem("bfloat16", 128, 128, True), config)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="relaxed"):
    out, _ = launch.forward(q, k, v, 0.1, True, False, config=config)
for _ in range(3):
    graph.replay()
assert torch.equal(out, launch.forward(q, k, v, 0.1, True, False, config=config)[0])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [True, False], ids=["built ahead", "built inside"])
def test_first_launch_of_a_process_may_be_captured(ahead, tmp_path):
    environment = dict(os.environ) | (
        {}
        if ahead
        else {"TL_ATTENTION_CACHE_DIR": str(tmp_path), "TL_ATTENTION_PACK": "0", "TL_ATTENTION_QUIET": "0"}
    )
    command = [sys.executable, "-c", FIRST_CALL_IN_A_GRAPH.format(ahead=ahead)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert ahead or "inside a CUDA graph capture (call once before capturing)" in done.stderr


@pytest.mark.gpu
def test_dispatch_modes_see_the_op():
    q, k, v = make_inputs(Shape(1, 2, 2, 100, 100, 64, 64, False), BF16)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        flash_attn_func(q, k, v)
    assert "tl_attention.fwd.default" in seen


@pytest.mark.gpu
def test_config_that_cannot_run_is_refused():
    q, k, v = make_inputs(Shape(1, 2, 2, 100, 100, 256, 256, True), BF16)
    with pytest.raises(ValueError, match="config: .*shared memory"):
        launch.forward(q, k, v, 0.1, True, False, config=FwdConfig(block_M=128, block_N=128))
    assert tile_width(200, 8) == (256, 128)
