"""Dropout in code that torch computes again in the backward: by torch.compile's partitioner, and in checkpoints. The second run has the
mask of the first one, so out, which is linear in v, has <dout, out> = <dv, v>."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tl_attention import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.filterwarnings("ignore:tl_attention", "ignore:None of the inputs")
PARTITION = "aot_eager_decomp_partition"
DROPOUT = 0.4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch._dynamo.reset()
    torch.manual_seed(1)
    return request.param


def inputs(device, *shape):
    """q, k, v that require gradients; on the CPU in fp32, whose sums are exact enough to compare."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = shape or (1, 64, 2, 64)
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def attend(q, k, v):
    return flash_attn_func(q.sin().cos(), k, v, DROPOUT) * 2


def packed(q, k, v, starts):
    return flash_attn_varlen_func(q.sin().cos(), k, v, starts, starts, 64, 64, DROPOUT, causal=True) * 2


def distance(function, q, k, v):
    """Relative distance between <dout, out> and <dv, v>: 0 if the backward has the mask of the forward; with another one about 0.3."""
    out = function(q, k, v)
    dout = torch.randn_like(out).where(torch.rand_like(out) < 0.1, out.detach())
    (dv,) = torch.autograd.grad(out, v, dout)
    first, second = ((x.double() * y.double()).sum().item() for x, y in ((dout, out), (dv, v)))
    return abs(first - second) / abs(first)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("backend", [PARTITION, "aot_eager"])
def test_memory_budgets_keep_the_mask(budget, backend, device):
    with config.patch(activation_memory_budget=budget):
        compiled = torch.compile(attend, backend=backend, fullgraph=True)
        assert distance(compiled, *inputs(device)) < 0.02


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_memory_budgets_keep_the_mask_of_packed_sequences(budget, device):
    starts = torch.tensor([0, 30, 64], dtype=torch.int32, device=device)
    with config.patch(activation_memory_budget=budget):
        compiled = torch.compile(packed, backend=PARTITION, fullgraph=True)
        assert distance(functools.partial(compiled, starts=starts), *inputs(device, 64, 2, 64)) < 0.02


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="new in torch 2.13"
)
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_memory_budgets_of_regions_keep_the_mask(budget, device):
    def run(q, k, v):
        with torch.autograd.graph.region_activation_memory_budget(budget):
            return attend(q, k, v)

    assert distance(torch.compile(run, backend=PARTITION, fullgraph=True), *inputs(device)) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_memory_budgets_of_inductor_keep_the_mask(budget):
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        assert distance(torch.compile(attend, fullgraph=True), *inputs("cuda")) < 0.02


def policy(saved, context, op, *arguments, **others):
    if saved is None:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if saved in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


# Ops whose results a checkpoint saves; None: none
POLICIES = {"all": None, "draw": "dropout_state", "forward": "tl_attention.fwd", "sine": "aten.sin"}
WAYS = {"plain": {}, **{x: {"context_fn": functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, op))}
                        for x, op in POLICIES.items()}}  # fmt: skip


def checkpointed(asked, q, k, v):
    """Two checkpoints in a row, as layers of a model are."""
    x = checkpoint(attend, q, k, v, use_reentrant=False, **asked)
    return checkpoint(lambda q, k, v: attend(q, k, v) + v, q, k, x, use_reentrant=False, **asked)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("backend", [None, PARTITION, "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_keep_the_mask(way, backend, device):
    function = functools.partial(checkpointed, WAYS[way])
    if backend:
        function = torch.compile(lambda q, k, v: checkpointed(WAYS[way], q, k, v), backend=backend)
    assert distance(function, *inputs(device)) < 0.02


def test_a_reentrant_checkpoint_keeps_the_mask(device):
    q, k, v = inputs(device)
    out = checkpoint(attend, q, k, v, use_reentrant=True)
    out.backward(out.detach())
    assert abs((v.grad.double() * v).sum() / out.double().square().sum() - 1) < 0.02


def test_compiled_code_has_the_mask_of_eager_code(device):
    tensors, results = inputs(device), []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(5)
        results.append([function(*tensors) for _ in range(2)])
    (first, second), (again, again_second) = results
    assert not torch.equal(first, second)
    torch.testing.assert_close(again, first)
    torch.testing.assert_close(again_second, second)


@pytest.mark.parametrize("batched", [(0, 0, 0), (None, None, 0)], ids=["all", "v"])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_vmap_draws_by_its_randomness(compiles, batched, device):
    q, k, v = (x.detach() for x in inputs(device))
    stacked = [torch.stack([x] * 2) if dim == 0 else x for x, dim in zip((q, k, v), batched, strict=True)]

    def run(randomness):
        mapped = torch.vmap(lambda *x: flash_attn_func(*x, DROPOUT), batched, randomness=randomness)
        return torch.compile(mapped, backend="aot_eager")(*stacked) if compiles else mapped(*stacked)

    first, second = run("same")
    assert torch.equal(first, second)
    first, second = run("different")
    assert not torch.equal(first, second)
    with pytest.raises(Exception, match="random"):
        run("error")


def test_opcheck_of_the_draw(device):
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.tl_attention.dropout_state.default, inputs(device)[:1], test_utils=checks)
