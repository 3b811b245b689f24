"""Layout inference that sees each tile operation once: TileLang's own, of the whole kernel, gives the same text.

A failure after an update of TileLang: adapt compilation/layouts.py, or leave out `layouts.inferred_once()` in compiler.py.
"""

from __future__ import annotations

import importlib.util

import pytest

from tl_attention.compilation import compiler, layouts
from tl_attention.config.kernel_configs import BwdPass, DecodeConfig, FwdConfig
from tl_attention.problem.attn_problem import AttnProblem

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")

CAUSAL = AttnProblem("bfloat16", 64, 64, True)
# Each repeats loops, has several views of one fragment, or a mask that differs from loop to loop
KERNELS = {
    "forward": (CAUSAL, FwdConfig(128, 64, ping_pong=True, schedule="dynamic", hold_max=True)),
    "forward, dropout": (AttnProblem("bfloat16", 64, 64, True, ("dropout",)), FwdConfig(64, 32)),
    "backward": (CAUSAL, BwdPass("dq+dk+dv", 64, 64)),
    "decode": (AttnProblem("bfloat16", 64, 64, False), DecodeConfig()),
}


def assert_same(found, whole):
    """Two modules are the same, and their blocks list layouts in the same order."""
    from tvm import ir, tirx

    ir.assert_structural_equal(found, whole)
    orders = ([], [])
    for module, order in zip((found, whole), orders, strict=True):

        def collect(node, order=order):
            if isinstance(node, tirx.SBlock):
                order.append([buffer.name for buffer in node.annotations[layouts.LAYOUTS]])

        for function in module.functions.values():
            tirx.stmt_functor.post_order_visit(function.body, collect)
    assert orders[0] == orders[1] != []


class Inferred(Exception):
    """Ends the lowering of a kernel after its layouts."""


def inference(monkeypatch, problem, config, infer):
    """Result of infer(module, TileLang's pass) in the place of the pass."""
    import tilelang
    from tilelang import transform, tvm

    own = transform.LayoutInference

    def run(module):
        raise Inferred(infer(module, own()))

    monkeypatch.setattr(transform, "LayoutInference", lambda: run)
    target = tvm.target.Target(compiler.TARGET)
    context = tvm.transform.PassContext(opt_level=3, config=compiler.pass_configs(problem, config))
    with pytest.raises(Inferred) as found, context, target:
        tilelang.lower(compiler.trace(problem, config), target=target)
    return found.value.args[0]


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("name", KERNELS)
def test_layouts_are_those_of_the_whole_kernel(name, monkeypatch):
    def compare(module, infer_all):
        seen = []

        def infer_shortened(shortened):
            seen.append(shortened.script())
            return infer_all(shortened)

        assert_same(layouts.infer(module, infer_shortened), infer_all(module))
        assert len(seen) == 1  # else an annotated layout is not the inferred one, and the time is double
        assert layouts.REMOVED in seen[0]
        return True

    assert inference(monkeypatch, *KERNELS[name], compare)


def test_annotated_layouts_that_are_not_inferred_are_kept(monkeypatch):
    """A tile that no tensor instruction reads has the layout of its annotation alone."""

    def compare(module, infer_all):
        calls = []

        def infer_but_once(shortened):
            calls.append(shortened)
            if len(calls) == 1:
                raise ValueError("no layout")
            return infer_all(shortened)

        assert_same(layouts.infer(module, infer_but_once), infer_all(module))
        assert len(calls) == 2
        return True

    assert inference(monkeypatch, CAUSAL, FwdConfig(64, 32), compare)


def test_views_of_one_memory_are_different():
    import tilelang  # noqa: F401  # it brings tvm
    from tvm import tirx

    data = tirx.decl_buffer((8, 8), "float32", "data", scope="local.fragment")
    view = tirx.decl_buffer((8, 8), "float32", "view", data=data.data, scope="local.fragment")
    other = tirx.decl_buffer((8, 8), "float32", "view", data=data.data, scope="local.fragment")

    def loop(buffer):
        i = tirx.Var("i", "int32")
        store = tirx.BufferStore(buffer, tirx.FloatImm("float32", 0), [i, 0])
        return tirx.For(i, 0, 8, tirx.ForKind.PARALLEL, store)

    once = layouts._Once()
    once.shortened(tirx.SeqStmt([loop(view), loop(other), loop(view)]))
    assert len(once.removed) == 1
