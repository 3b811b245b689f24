"""`tl-attention explain` of masks, scores and biases as functions: tiles, FLOPs and bytes against those counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tl_attention import cli
from tl_attention.explain import clocks, model, work
from tl_attention.explain.functions import Asked
from tl_attention.gpus import H200
from tl_attention.testing import counts, functions
from tl_attention.testing.shapes import Shape
from tl_attention.tracing.trace import trace


@pytest.fixture(autouse=True)
def no_user_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))


def call(text: str, direction: str = "fwd") -> work.Work:
    return work.of_call(Shape.parse(text), direction, "bfloat16", H200)


def function(name: str, n: int = 512, direction: str = "fwd") -> work.Work:
    return call(f"2,4,2,{n},{n},64,full,function={name}", direction)


@pytest.mark.parametrize("direction", ["fwd", "bwd", "bwd_det"])
@pytest.mark.parametrize("name", ["causal", "window", "prefix-lm"])
def test_function_of_a_mask_has_the_tiles_of_the_mask(name, direction):
    """Steps are the blocks that a mask drawn pair by pair shows, of 2048 queries and keys."""
    found = function(name, 2048, direction)
    q, k = np.arange(2048)[:, None], np.arange(2048)
    shown = {"causal": q >= k, "window": (q >= k) & (q - k < 1024), "prefix-lm": (q >= k) | (k < 1024)}[name]
    assert (
        found.pairs == 2 * 4 * shown.sum()
        and found.flops == counts.flops(Shape.parse("2,4,2,2048,2048,64,full"), direction) * shown.mean()
    )
    for kernel in found.kernels:
        M, N = kernel.config.block_M, kernel.config.block_N
        rows = min(M, 128)
        seen = shown.reshape(2048 // rows, rows, 2048 // N, N).any((1, 3))
        if M == 192:  # tiles compute what one of the two blocks that they lie in shows
            seen = np.array([seen[3 * i // 2 : (3 * i + 2) // 2 + 1].any(0) for i in range(11)])
        assert kernel.steps == 2 * 4 * seen.sum()
    partial, full = (x.sum() for x in (found.asked.partial, found.asked.full))
    blocks = shown.reshape(16, 128, 16, 128)
    assert (full, partial + full) == (blocks.all((1, 3)).sum(), blocks.any((1, 3)).sum())
    assert found.least_bytes == call("2,4,2,2048,2048,64,full", direction).least_bytes + partial * 2048


def test_docs_count_the_blocks_of_the_documents_that_are_measured():
    asked = call("2,16,16,8192,8192,128,full,function=documents").asked
    partial, listed = int(asked.partial.sum()), int((asked.partial | asked.full).sum())
    ratio = listed * functions.BLOCK**2 / (asked.seen * 8192**2)
    text = " ".join((Path(__file__).parents[1] / "docs/flex.md").read_text().split())
    assert f"hold {ratio:.1f} times the pairs that are shown, and {partial} of their {listed} blocks" in text


def test_function_of_random_blocks_has_the_share_that_it_names():
    listed = function("listed-0.25", 4096)
    share = listed.kernels[0].steps / (2 * 4 * 32 * 32)
    assert share == pytest.approx(0.25, abs=0.02) and listed.pairs == round(share * 2 * 4 * 4096**2)
    by_keys = function("listed-0.25", 4096, "bwd").kernels[0]
    assert by_keys.steps * by_keys.config.block_M * by_keys.config.block_N == pytest.approx(
        listed.pairs, rel=0.02
    )


def test_functions_that_options_compute_are_those_options():
    for name, option in (("softcap", "softcap=20"), ("alibi", "alibi")):
        found, asked = function(name), call(f"2,4,2,512,512,64,full,{option}")
        assert (found.kernels, found.least_bytes, found.config) == (
            asked.kernels,
            asked.least_bytes,
            asked.config,
        )
        assert found.shape.options.function == name


def test_bytes_of_a_dense_bias():
    """bf16, [batch or 1, 4 heads, 512, 512]: read once; in a backward its gradient is stored per batch entry, and summed."""
    plain = {x: call("2,4,2,512,512,64,full", x).least_bytes for x in ("fwd", "bwd")}
    size = 2 * 4 * 512 * 512
    for name, entries in (("bias-of-heads", 1), ("bias-of-batch", 2)):
        for direction, times in (("fwd", 1), ("bwd", 2)):
            found = function(name, 512, direction)
            assert found.least_bytes == plain[direction] + times * entries * size
    shared, own = (function(name, 512, "bwd") for name in ("bias-of-heads", "bias-of-batch"))
    (summed,) = (helper for helper in shared.helpers if "bias" in helper.name)
    assert (summed.bytes, summed.known, shared.again_bytes, own.again_bytes) == (3 * size, size, 2 * size, 0)
    assert model.hbm_bytes(function("bias-of-heads")) == function("bias-of-heads").least_bytes, (
        "the L2 keeps it"
    )


def test_work_of_a_learned_bias_per_distance():
    forward, backward = (function("relative", 4096, x) for x in ("fwd", "bwd"))
    assert (forward.asked.gathers, forward.asked.scatters) == (0, 0)
    unit = "fp32 instructions"
    plain = call("2,4,2,4096,4096,64,full", "fwd")
    assert forward.kernels[0].clocks[unit] > plain.kernels[0].clocks[unit]
    assert all(
        clocks.GATHERING not in x.clocks and clocks.SCATTERING not in x.clocks for x in backward.kernels
    )
    assert [kernel.config.adds_dq for kernel in backward.kernels] == [True]


def test_work_of_a_learned_bias_per_sum_of_positions():
    bias = torch.zeros(4, 64, requires_grad=True)
    program = trace(lambda s, b, h, q, k: s + bias[h, q + k], None, True).program
    asked = Asked(Shape.parse("2,4,2,32,32,64,full"), program)
    assert (asked.gathers, asked.scatters, asked.sum_instructions) == (1, 1, 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["1,8,8,64,64,64,full,function=cauasl"],
            "expected function=causal, .* or listed-SHARE, got function=cauasl",
        ),
        (
            ["1,128,128,131072,131072,64,full,function=half"],
            "expected at most 67108864 blocks of 128 x 128 in all heads, got 134217728",
        ),
        (
            ["1,8,8,64,64,64,full,function=listed-0"],
            "expected function=listed-SHARE, above 0 and at most 1, got",
        ),
        (["1,8,8,64,64,64,causal,function=window"], "expected mask full and no other option .*, got causal"),
        (["1,8,8,64,64,64,full,sink,function=window"], "expected mask full and no other option .*, got sink"),
        (
            ["1,8,8,64,128,64,full,function=window"],
            "as many queries as keys for function=window, got 64 and 128",
        ),
        (["1,8,8,64,64,64,full,function=half"], "a multiple of 128 queries for function=half, got 64"),
        (["1,8,8,4,4,64,full,function=documents"], "at least 8 queries for function=documents, got 4"),
        (
            ["1,8,8,262144,262144,64,full,function=causal"],
            "expected at most 131072 keys with a mask, got 262144",
        ),
        (["1,8,8,64,64,64,full,function=alibi", "--pass", "decode"], "for a function, got --pass decode"),
        (
            ["1,8,8,64,64,64,full,function=alibi", "--dtype", "float32-high"],
            "for a function, got --dtype float32-high",
        ),
        (
            ["1,8,8,64,64,64,full,function=alibi", "--ranks", "2"],
            "without varlen, dropout, alibi and function",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_explain_refuses_functions(words, text):
    with pytest.raises(SystemExit, match=f"tl-attention explain: .*{text}"):
        cli.main(["explain", *words])
