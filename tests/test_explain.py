"""`tl-attention explain`: what a user sees, one test per question."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from seeds import commit_seed

from tl_attention.config import configs, gpus
from tl_attention.config.gpus import H200
from tl_attention.problem.attn_problem import DECODE, DIRECTIONS
from tl_attention.testing.shapes import Shape, chosen_shapes, sequences
from tl_attention.tools import cli
from tl_attention.tools.explain import command, measured, work
from tl_attention.tools.explain.work import EXPONENTIALS, MEMORY, TENSOR_CORES

SHAPES = chosen_shapes(["*"])
PASSES = (*DIRECTIONS, DECODE)
ARTICLE = "1,16,16,4096,4096,128,causal"


def call(text: str, direction: str = "fwd", gpu: gpus.Gpu = H200, dtype: str = "bfloat16") -> work.Work:
    return work.of_call(Shape.parse(text), direction, dtype, gpu)


@pytest.fixture(autouse=True)
def no_user_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))


def run(capsys, *words: str) -> str:
    """Output of the command, with the line breaks of long lines taken back."""
    assert cli.main(["explain", *words]) == 0
    return re.sub(r"\n {14}(?=\S)", " ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "direction", "gpu", "bound"),
    [
        ("4,16,16,4096,4096,128,full", "fwd", "h200", TENSOR_CORES),
        ("2,8,8,8192,8192,256,causal", "bwd_det", "h200", TENSOR_CORES),
        ("4,16,16,8192,8192,32,causal", "fwd", "h200", EXPONENTIALS),
        ("4,16,16,8192,8192,32,causal", "fwd", "h20", TENSOR_CORES),
        ("32,32,8,1,8192,128,full", DECODE, "h200", MEMORY),
        ("4,16,16,3000,77,64,full", "fwd", "h200", MEMORY),
    ],
)
def test_explain_says_what_bounds_a_call(text, direction, gpu, bound, capsys):
    found = call(text, direction, gpus.resolve(gpu))
    out = run(capsys, text, "--pass", direction, "--gpu", gpu)
    assert f"bound by      {bound}: " in out
    assert (
        f"intensity     {found.intensity:.4g} FLOP per byte; the ridge of this GPU is at {found.ridge:.0f} ("
        in out
    )
    if direction == "fwd":
        high = call(text, direction, gpus.resolve(gpu), "float32-high")
        assert high.ridge == pytest.approx(found.ridge / 3), "three products of bf16 terms"
    assert f"at full rate  {bound} {command.duration(max(found.limits.values()))}, " in out


def visible(shape: Shape) -> int:
    """Visible pairs of a query and a key of one head, drawn pair by pair."""
    left = shape.options.window
    found = 0
    for queries, keys in sequences(shape):
        q, k = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
        seen = np.ones((queries, keys), bool)
        if shape.causal:
            seen &= k <= q
        if left is not None:
            seen &= (k >= q - left) & (k <= q + (0 if shape.causal else left))
        found += int(seen.sum())
    return found


@pytest.mark.parametrize(
    ("text", "direction", "products"),
    [
        ("2,4,2,300,300,128,causal", "fwd", 2),
        ("1,4,4,300,700,128,causal", "bwd", 5),
        ("5,4,4,200,200,128,causal,uneven", "bwd_det", 5),
        ("1,4,4,500,500,128,causal,window=90", "fwd", 2),
        ("1,4,4,500,500,128,full,window=90", "bwd", 5),
        ("4,8,2,1,512,128,full,ragged", DECODE, 2),
        ("4,8,2,3,512,128,causal,window=99", DECODE, 2),
    ],
)
def test_explain_counts_flops_by_visible_pairs(text, direction, products):
    found = call(text, direction)
    assert found.pairs == found.shape.heads_q * visible(found.shape)
    assert found.flops == 2 * products * 128 * found.pairs


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["causal", "window", "prefix-lm", "listed-0.25"])
def test_explain_counts_flops_of_masks_as_functions(name, direction):
    n = 2048
    found = call(f"2,4,2,{n},{n},64,full,function={name}", direction)
    q, k = np.arange(n)[:, None], np.arange(n)
    shown = {"causal": q >= k, "window": (q >= k) & (q - k < 1024), "prefix-lm": (q >= k) | (k < 1024)}
    share = shown[name].mean() if name in shown else 0.25
    assert found.pairs / (2 * 4 * n * n) == pytest.approx(share, abs=0 if name in shown else 0.02)
    assert found.flops == found.pairs * 64 * (4 if direction == "fwd" else 10)


def test_explain_counts_each_tensor_once():
    """4 bytes per element in fp32; the log-sum-exp is fp32; a cache is read up to its window, and once if values are in its keys."""
    q, k, lse = 2 * 4 * 256 * 64, 2 * 2 * 512 * 64, 4 * 2 * 4 * 256
    shape = "2,4,2,256,512,64,full"
    for dtype, size in (("bfloat16", 2), ("float32-high", 4)):
        assert call(shape, "fwd", dtype=dtype).bytes == size * (2 * q + 2 * k) + lse
        assert call(shape, "bwd", dtype=dtype).bytes == size * (4 * q + 4 * k) + lse
    assert call("4,128,1,1,8192,576,512,full", DECODE).bytes == 2 * 4 * (8192 * 576 + 128 * (576 + 512))
    assert call("4,32,8,1,8192,128,causal,window=1023", DECODE).bytes == 2 * 4 * (8 * 1024 + 32) * 256
    plain, bias = (
        call("2,4,2,512,512,64,full", "bwd"),
        call("2,4,2,512,512,64,full,function=bias-of-heads", "bwd"),
    )
    assert bias.bytes == plain.bytes + 2 * 2 * 4 * 512 * 512


def test_explain_prints_the_measured_row(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "nvidia_h200"
    folder.mkdir()
    header = {"pass": "fwd", "dtype": "bf16", "commit": "abc"}
    rows = {"tl_attention": {"ms": 0.1}, "fa3": {"ms": 0.2}}
    lines = [header, {"shape": "article", "problem": str(SHAPES["article"]), "rows": rows, "l2": "warm"}]
    (folder / "fwd.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(measured, "results_dir", lambda: tmp_path)
    out = run(capsys, ARTICLE, "--gpu", "h200")
    assert (
        "measured      100 us, 687.4 TFLOPS, tensor cores busy 70 % at least (nvidia_h200/fwd.jsonl, row article"
        in out
    )
    assert "commit abc, inputs in L2)" in out
    for others in (["--pass", "bwd"], ["--dtype", "fp16"], ["--gpu", "h100"]):
        assert "has no such row for NVIDIA H" in run(capsys, ARTICLE, "--gpu", "h200", *others)
    monkeypatch.setattr(measured, "results_dir", lambda: None)
    assert "an installed package has none; a checkout has them in benchmarks/results" in run(capsys, ARTICLE)


def test_explain_prints_the_config_and_why(capsys):
    choice = configs.choose_config(SHAPES["article"].problem("bfloat16"), "4k", H200.name)
    out = run(capsys, ARTICLE, "--gpu", "h200")
    assert f"\nconfig        {choice.config}\n" in out
    assert out.endswith("from          fwd row 'bf16 d128 causal 4k' of configs/tuned/nvidia_h200.json\n")
    assert "as NVIDIA H100 PCIe has no such row" in run(capsys, ARTICLE, "--gpu", "h100 pcie")
    assert "[options.d128]" in run(capsys, f"{ARTICLE},softcap=20", "--gpu", "h200")
    assert "line 1 of [programs.d64] fwd" in run(capsys, "1,8,8,1024,1024,64,full,function=documents")
    assert "[decode] d128" in run(capsys, "1,64,8,1,4096,128,full,page=64", "--pass", DECODE)
    packed = [call(f"{batch},8,8,64,32768,128,causal,varlen").config.split for batch in (1, 64)]
    assert packed == [True, False], "CTAs share keys where packed sequences have few tiles"
    capped = call("1,8,8,512,512,64,full,function=softcap")
    assert capped.config == call("1,8,8,512,512,64,full,softcap=20").config
    assert capped.served_as == "the option softcap=20"
    unknown = replace(H200, name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", sms=60)
    assert "this GPU is unknown" in re.sub(r"\s+", " ", command.text(call(ARTICLE, gpu=unknown), "bfloat16"))


@pytest.mark.parametrize("direction", PASSES)
def test_explain_serves_every_named_shape(direction):
    for name in list(SHAPES)[commit_seed() % 4 :: 4]:
        shape = SHAPES[name]
        try:
            command.check(shape, direction)
        except ValueError as error:
            assert (direction == DECODE and str(shape) in str(error)) or "head dims" in str(error), name
            continue
        text = command.text(work.of_call(shape, direction, "float16", H200), "float16")
        assert not re.search(r"\bnan\b|\binf\b", text), name


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["articel"], "shape 'articel': not in configs/shapes.toml"),
        (["1,2,3"], "with mask causal or full, got '3'"),
        (["1,8,8,64,64,512,full"], "head dims: expected at most those of one of the kernels of fwd, d32, d64, .*, got d512"),
        (["1,8,8,64,64,128,full,page=16"], "page is an option of --pass decode, got --pass fwd"),
        (["1,8,8,64,64,128,full,page=17", "--pass", "decode"], "N a multiple of 16, got 17"),
        (["1,8,8,4,64,128,full,dropout=0.1", "--pass", "decode"], "expected some of window, .* got dropout"),
        (["1,8,8,64,64,128,full,packed", "--pass", "decode"], "got packed"),
        (["article", "--pass", "decode", "--dtype", "float32-high"], "dtype: expected one of bfloat16, float16"),
        (["article", "--gpu", "A100"], "gpu: expected a Hopper GPU.*got 'A100'"),
        (["99999999,1,1,64,64,64,full"], "expected B x Hq of at most 262144, got 99999999"),
        (["1,1,1,64,99999999999,64,full"], "expected Sk of at most 67108864, got 99999999999"),
        (["1,8,8,64,64,64,full,function=cauasl"], "expected function=causal, .* got function=cauasl"),
        (["1,128,128,131072,131072,64,full,function=half"], "expected at most 67108864 blocks of 128 x 128"),
        (["1,8,8,64,64,64,full,function=alibi", "--pass", "decode"], "for a function, got --pass decode"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_explain_refuses(words, text):
    with pytest.raises(SystemExit, match=f"tl-attention explain: .*{text}"):
        cli.main(["explain", *words])


@pytest.mark.parametrize("word", ["", " ", ";"])
def test_explain_refuses_an_empty_word(word, capsys):
    """As of a variable of a shell that is not set."""
    with pytest.raises(SystemExit) as fault:
        cli.main(["explain", word])
    assert fault.value.code == 2 and "SHAPE: expected" in capsys.readouterr().err


def test_explain_reads_its_files_in_utf_8_in_any_locale():
    """Stored results have signs outside of ASCII."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["-c", f"from tl_attention.tools import cli; cli.main(['explain', '{ARTICLE}'])"]
    done = subprocess.run([sys.executable, *words], env=os.environ | locale, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "measured" in done.stdout


@pytest.mark.parametrize(
    "words", [["explain", ARTICLE], ["doctor"], ["config", "d128"]], ids=lambda words: words[0]
)
def test_commands_run_where_stdout_is_closed(words, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(words) == 0
