"""The compared libraries without a GPU: argument lists, refusals, and the correctness check."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tl_attention.testing import counts, shapes, timer
from tl_attention.testing.shapes import Shape

pytest.importorskip("rich", reason="the benchmark needs rich")
import fwd_bwd
import library
import options
from libraries import cudnn, fa3, naive
from providers import PROVIDERS

SHAPE = "1,2,2,48,48,32,32,causal"
NAIVE = naive.PROVIDER


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of CPU inputs."""
    for name in ("make_inputs", "make_dout"):
        monkeypatch.setattr(fwd_bwd, name, partial(getattr(fwd_bwd, name), device="cpu"))
    monkeypatch.setattr(timer, "rotation", lambda nbytes: 2)


def empty(direction: str) -> list[library.Inputs]:
    """One copy of inputs that hold nothing."""
    return [tuple(torch.empty(0) for _ in ("q", "k", "v") + ("dout",) * ("bwd" in direction))]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("fa2", "1,1,1,8,8,192,128,full", "one head_dim"),
        ("cudnn", "1,1,1,16,8,64,causal", "top-left"),
        ("naive", "1,64,64,16384,16384,64,full", "would take 32 GiB"),
        ("naive", "1,1,1,16,8,64,causal", "NaN"),
        ("flashinfer", SHAPE, "no fwd pass"),
    ],
)
def test_bench_library_says_why_it_cannot(direction: str, name: str, shape: str, words: str) -> None:
    with pytest.raises(library.Unsupported, match=words):
        library.prepare(PROVIDERS[name], Shape.parse(shape), direction, empty(direction))


@pytest.mark.parametrize(("name", "words"), [("triton", "forward only"), ("flex", "Tensor.backward alone")])
def test_bench_library_says_why_it_has_no_backward(name: str, words: str) -> None:
    with pytest.raises(library.Unsupported, match=words):
        library.prepare(PROVIDERS[name], Shape.parse(SHAPE), "bwd", empty("bwd"))


def test_bench_deterministic_backwards_that_are_absent() -> None:
    for module in (cudnn, fa3):
        with pytest.raises(library.Unsupported, match="no deterministic mode"):
            module.backward(Shape.parse(SHAPE), True)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("alibi", "no alibi"),
        ("dropout=0.1", "no dropout"),
        ("sink", "no sink"),
        ("softcap=30", "without softcap"),
    ],
)
def test_bench_options_that_a_build_of_fa3_lacks(
    option: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), lambda q, k, v, causal: None)
    monkeypatch.setitem(sys.modules, fa3.MODULE, SimpleNamespace(**functions))
    shape = Shape.parse(f"{SHAPE},{option}")
    with pytest.raises(library.Unsupported, match=words):
        fa3.attend_with_options(shape, options.tensors(shape, torch.bfloat16, torch.device("cpu")))


@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
@pytest.mark.parametrize("shape", ["2,4,2,33,33,32,16,full", "1,2,1,20,47,64,causal"])
@pytest.mark.parametrize("name", ["tl_attention", "naive"])
def test_bench_library_is_right(name: str, shape: str, direction: str, on_cpu: None) -> None:
    shape, provider = Shape.parse(shape), PROVIDERS[name]
    copies = fwd_bwd.make_copies(shape, torch.bfloat16, direction)
    transposed = [tuple(x.transpose(1, 2).contiguous() for x in copy) for copy in copies]
    ready, inputs = library.prepare(provider, shape, direction, transposed)
    assert len(inputs) == len(copies) == 2
    for attend in (ready.call, ready.launch):
        for copy, own in zip(copies, inputs, strict=True):
            found = fwd_bwd.verify(name, shape, direction, attend(*own), copy)
            assert found["correct"], found["reason"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotImplementedError("this build of FlashAttention-2 has no {'deterministic': True}"), "has no"),
        (
            RuntimeError("This flash attention build does not support headdim 96.\nat file.cpp"),
            "headdim 96.$",
        ),
        (RuntimeError("this build: head_dim 64, 128, 256 only"), "this build: head_dim"),
        (RuntimeError("CUDA error: an illegal memory access"), None),
    ],
)
def test_bench_refusal_of_a_library_is_no_error(error: Exception, words: str | None) -> None:
    def refuse(*_: object) -> None:
        raise error

    with pytest.raises(library.Unsupported if words else RuntimeError, match=words):
        library.tried(refuse)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
def test_bench_large_problems_are_checked_on_some_heads(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape.parse("3,8,4,24,40,32,16,causal")

    (inputs, _) = fwd_bwd.make_copies(shape, torch.bfloat16, direction)
    ready, (given, _) = library.prepare(
        NAIVE, shape, direction, [tuple(x.transpose(1, 2).contiguous() for x in inputs)] * 2
    )
    result = ready.launch(*given)
    whole = fwd_bwd.verify("naive", shape, direction, result, inputs)
    heads = 8 if direction == "fwd" else 4
    assert fwd_bwd.checked_heads(shape, direction) is None
    monkeypatch.setattr(fwd_bwd, "MAX_CHECKED_SCORES", 5 * counts.visible_pairs(shape) // 3 * 8 // heads)
    chosen, of = fwd_bwd.checked_heads(shape, direction)
    assert (len(chosen), chosen[0], chosen[-1], of) == (5, 0, 3 * heads - 1, heads)
    seen = []
    monkeypatch.setattr(fwd_bwd, "check_fwd", spy(fwd_bwd.check_fwd, seen))
    monkeypatch.setattr(fwd_bwd, "check_bwd", spy(fwd_bwd.check_bwd, seen))
    some = fwd_bwd.verify("naive", shape, direction, result, inputs)
    assert some["correct"]
    assert some["max_err_ratio"] <= 2 * whole["max_err_ratio"]
    assert {len(x) for call in seen for x in call if isinstance(x, torch.Tensor)} == {5}

    for entry, head, reason in ((2, -1, "in 5 checked heads, "), (0, 1, "NaN or inf")):
        broken = [x if x is None else x.clone() for x in result]
        broken[-1 if direction != "fwd" else 0][entry, head, -1] = math.nan
        found = fwd_bwd.verify("naive", shape, direction, broken, inputs, "when timed, ")
        assert found["status"] == "wrong"
        assert found["reason"].startswith("when timed, in 5 checked heads")
        assert reason in found["reason"]


def spy(function: Callable, calls: list) -> Callable:
    def called(*args: object, **options: object) -> object:
        calls.append([y for x in args for y in (x if isinstance(x, tuple) else [x])])
        return function(*args, **options)

    return called


@pytest.mark.parametrize("heads", [8, 2])
def test_bench_heads_bring_what_belongs_to_them(heads: int) -> None:
    batch, heads_q, heads_kv = 3, 8, 2
    q = torch.arange(batch * heads_q).view(batch, 1, heads_q, 1)
    k = torch.arange(batch * heads_kv).view(batch, 1, heads_kv, 1)
    chosen = [0, 1, batch * heads - 1]
    assert fwd_bwd.take_heads(k, chosen, heads).flatten().tolist() == [i * heads_kv // heads for i in chosen]
    each = heads_q // heads
    expected = [[i * each + j for j in range(each)] for i in chosen]
    assert fwd_bwd.take_heads(q, chosen, heads).flatten(1).tolist() == expected
    assert fwd_bwd.take_heads(q.transpose(1, 2)[..., 0], chosen, heads)[..., 0].tolist() == expected
    assert fwd_bwd.take_heads(None, chosen, heads) is None


def test_bench_checks_take_seconds() -> None:
    """The check of a forward computes at most MAX_CHECKED_SCORES or two heads, once in fp32 and once in bf16."""
    for name, shape in shapes.chosen_shapes(["*"]).items():
        chosen = fwd_bwd.checked_heads(shape, "fwd")
        heads = len(chosen[0]) if chosen else shape.batch * shape.heads_q
        flops = counts.fwd_flops(shape) / (shape.batch * shape.heads_q) * heads
        assert flops < 10e12, name  # 0.2 s at 50 TFLOPS
