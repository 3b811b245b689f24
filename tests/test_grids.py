"""Grids of the kernels: one dimension each, of up to 2**31 - 1 CTAs. The others of a grid end at 65,535, which batch * heads may pass."""

from __future__ import annotations

import importlib.util

import pytest

from tl_attention.compilation import compiler, manifest
from tl_attention.kernel_configs import BwdReduce
from tl_attention.problem import AttnProblem

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")

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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)).replace(" ", "_"))
def test_grid_has_one_dimension(kind):
    assert dimensions(compiler.trace(*KINDS[kind])) <= {"blockIdx.x"}
