"""Grids of the kernels: one dimension each, of up to 2**31 - 1 CTAs. The others of a grid end at 65,535, which batch * heads may pass."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tl_attention import flash_attn_func, flash_attn_with_kvcache
from tl_attention.compilation import compiler, manifest
from tl_attention.config.kernel_configs import BwdReduce
from tl_attention.problem.attn_problem import AttnProblem
from tl_attention.testing.numeric import check_bwd

SHIPPED = manifest.shipped()
# (kind of config, packed, schedule) -> a kernel
KINDS = {
    (type(config).__name__, problem.has("varlen"), getattr(config, "schedule", str(config))): (
        problem,
        config,
    )
    for problem, config in [*SHIPPED.values(), (AttnProblem("bfloat16", 64, 64, False), BwdReduce())]
}


def dimensions(program) -> set[str]:
    """Dimensions of the grid of a traced kernel."""
    from tvm import tirx

    found = set()

    def visit(node):
        if isinstance(node, tirx.For) and node.thread_binding is not None:
            found.add(str(node.thread_binding.thread_tag))

    tirx.stmt_functor.post_order_visit(program.body, visit)
    return {tag for tag in found if tag.startswith("blockIdx")}


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
@pytest.mark.in_turn(8)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)).replace(" ", "_"))
def test_grid_has_one_dimension(kind):
    assert dimensions(compiler.trace(*KINDS[kind])) <= {"blockIdx.x"}


MANY = 65_537  # batch entries


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_of_many_batch_entries(deterministic):
    q, k, v = (
        torch.randn(MANY, 3, 1, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    dout = torch.randn_like(q)
    grads = torch.autograd.grad(
        flash_attn_func(q, k, v, causal=True, deterministic=deterministic), (q, k, v), dout
    )
    last = slice(MANY - 40, MANY)
    verdict = check_bwd(
        tuple(x[last] for x in grads), *(x.detach()[last] for x in (dout, q, k, v)), causal=True
    )
    assert verdict.ok, verdict.text
    assert all(bool(x.isfinite().all()) for x in grads)


@pytest.mark.gpu
def test_append_to_many_caches():
    k_cache, v_cache = torch.zeros(2, MANY, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = torch.randn(3, MANY, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.ones(MANY, device="cuda", dtype=torch.int32)
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[:, 1:], new)
        assert not cache[:, :1].any()
