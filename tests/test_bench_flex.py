"""Rows of scores and masks as functions without a GPU: the command, the reference, and the page."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tl_attention import block_masks
from tl_attention.testing import functions, timer
from tl_attention.testing.shapes import Shape

pytest.importorskip("rich", reason="the benchmark needs rich")
import flex
import library
import rows as row_files
import run
from test_bench import gpu_stub  # noqa: F401

CPU = torch.device("cpu")


def shape_of(function: str, n: int = 256) -> Shape:
    return Shape.parse(f"2,2,2,{n},{n},32,32,full,function={function}")


@pytest.mark.usefixtures("gpu_stub")
@pytest.mark.filterwarnings("ignore:tl_attention")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bench_flex_compares_options_and_biases(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "on_capture_stream", contextlib.nullcontext)
    monkeypatch.setattr(flex, "kernels_of", lambda shape, direction: [])
    names = ["tl_attention", "option", "efficient"]
    asked = "documents", "half", "relative", "bias-of-heads", "shared-prompt"
    shapes = [str(shape_of(function)) for function in asked]
    argv = ["--set", "flex", "--pass", direction, "--shapes", *shapes, "--providers", *names]
    assert run.main([*argv, "--out", str(tmp_path), "--rounds", "3"]) == 0
    rows, _ = row_files.read(tmp_path / f"{direction}_flex.jsonl")
    found = {(row["options"][0].partition("=")[2], row["provider"]): row for row in rows}
    for name, statuses in {
        "documents": ["ok", "ok", "skipped"],
        "half": ["ok", "skipped", "skipped"],
        "relative": ["ok", "ok", "skipped"],
        "shared-prompt": ["ok", "ok", "skipped"],
    }.items():
        assert [found[name, provider]["status"] for provider in names] == statuses
    assert found["bias-of-heads", "tl_attention"]["status"] == "ok"
    assert found["documents", "tl_attention"]["tflops"] < 0.5 * found["relative", "tl_attention"]["tflops"]
    page = (tmp_path / "performance.md").read_text()
    title = "Forward" if direction == "fwd" else "Backward"
    assert f"### {title} with functions" in page
    assert "| our option | memory-efficient | over our option | over memory-efficient |" in page


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_bench_flex_functions_show_the_pairs_that_they_say(name: str) -> None:
    shape = shape_of(name, 2048)
    asked = flex.function_of(shape, CPU)
    if asked.block_mask is None:
        assert asked.seen == (1, 1)
        return
    queries, keys = (torch.arange(2048).view(size) for size in ((-1, 1), (-1,)))
    for as_option, share in enumerate(asked.seen[: 1 if asked.option is None else 2]):
        seen = flex.shown(shape, asked, (0, 0, queries, keys), bool(as_option)).float().mean()
        assert abs(seen - share) < (0.1 if asked.option is None else 1e-4)


def test_bench_flex_shared_prompt_is_a_prefix_tree() -> None:
    lengths = [4096, *[2048] * 8]
    asked = functions.of_shape(shape_of("shared-prompt", sum(lengths)), CPU)
    mask = block_masks.prefix_tree([-1] + [0] * 8, lengths, device="cpu")
    queries, keys = (torch.arange(0, sum(lengths), 31).view(size) for size in ((-1, 1), (-1,)))
    assert torch.equal(asked.mask_mod(0, 0, queries, keys), mask.mask_mod(0, 0, queries, keys))
    with pytest.raises(ValueError, match="at least 32 queries for function=tree, got 31"):
        functions.check(shape_of("tree", 31))


def test_bench_flex_says_what_it_cannot() -> None:
    needs = flex.options.tensors(shape_of("half"), torch.bfloat16, CPU)
    with pytest.raises(library.Unsupported, match="no option computes the same"):
        flex.option(shape_of("half"), needs)
    with pytest.raises(library.Unsupported, match="compared for biases alone"):
        flex.efficient(shape_of("half"), needs)


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "flex", "--shapes", "1,1,1,128,128,64,64,full"],
        ["--shapes", "1,1,1,128,128,64,64,full,function=causal"],
        ["--set", "flex", "--dtype", "fp16"],
    ],
)
def test_bench_flex_bad_arguments_end_with_a_message(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run.parse_args(words)
    assert "expected" in capsys.readouterr().err
