"""The console script on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tl_attention import __version__, flash_attn_with_kvcache, launch
from tl_attention.compilation import cubin, manifest, pack, toolkit
from tl_attention.config import catalog, configs
from tl_attention.config.buckets import option_buckets
from tl_attention.config.kernel_configs import (
    AppendConfig,
    BwdDelta,
    BwdPass,
    BwdSum,
    DecodeCombine,
    DecodeConfig,
    FwdConfig,
    JvpConfig,
)
from tl_attention.problem import arguments
from tl_attention.problem.attn_problem import (
    DECODE,
    DECODE_TILE_WIDTHS,
    DIRECTIONS,
    SPLIT_BUCKET,
    AttnProblem,
)
from tl_attention.problem.options import Cache, Options
from tl_attention.problem.target import DEFAULT_GPU
from tl_attention.tools import cli, doctor
from tl_attention.tools import text as printed
from tl_attention.tuning import autotune, question
from tl_attention.tuning.results import REPORT_COLUMNS, Attempt, print_reports, report_cells


@pytest.mark.parametrize(
    "command",
    [[], ["tune"], ["compile"], ["config"], ["explain"], ["manifest"], ["doctor"], ["pack"]],
    ids=" ".join,
)
def test_cli_help(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    assert "usage: tl-attention" in capsys.readouterr().out


def test_cli_without_a_command_prints_the_commands(capsys):
    assert cli.main([]) == 2
    assert "explain" in capsys.readouterr().out


def test_cli_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tl-attention {__version__}\n"


def test_other_names_of_dtypes_are_accepted():
    assert list(map(arguments.dtype_name, ("fp16", "half", "fp32", "torch.bfloat16", "fp32-high", "fp8"))) == [
        "float16", "float16", "float32-highest", "bfloat16", "float32-high", "fp8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "hint"),
    [("causl", "; did you mean causal?"), ("d192/128", "; did you mean d192-128?"), ("xyz", "")],
)
def test_config_suggests_a_word(word, hint, capsys):
    with pytest.raises(SystemExit):
        cli.main(["config", "d128", word])
    assert capsys.readouterr().err.endswith(f" got {word!r}{hint}\n")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("128", "d128"),
        ("hdim64", "d64"),
        ("head_dim=96", "d96"),
        ("4096", "seqlen_k=4096"),
        ("seqlen=4096", "seqlen_k=4096"),
        ("heads_q=8", "heads=8"),
        ("decod", "decode"),
    ],
)
def test_config_understands_what_a_word_means(word, meant):
    with pytest.raises(SystemExit, match=f"got '{word}'; did you mean {meant}\\?"):
        cli.main(["config", "d128", word])


@pytest.mark.parametrize(
    "words",
    [
        "d128 causal 4k --pass bwd",
        "--pass bwd d128 causal 4k",
        "d128 --pass bwd causal 4k",
        "d128 --pass bwd causal --gpu h200 4k",
        "d128 --gpu h200 causal --pass bwd 4k",
        "--gpu h200 4k causal bwd d128",
        "4k bwd d128 torch.bfloat16 causal --tried",
    ],
)
def test_config_takes_its_words_in_any_order(words, no_user_tables, capsys):
    lines = run_config(capsys, *words.split())
    assert lines[0].startswith(f"bwd bf16 d128 causal 4k on {DEFAULT_GPU}: ")


def test_config_takes_its_words_as_one(no_user_tables, capsys):
    assert run_config(capsys, "bf16 d128 causal 4k")[0].startswith("fwd bf16 d128 causal 4k on ")


def test_words_are_in_any_order_in_other_commands(compiled, capsys):
    assert cli.main(["compile", "--jobs", "1", "bfloat16", "--pass", "bwd", "d256", "dq"]) == 0
    assert compiled and {str(problem).split()[0] for problem, _ in compiled} == {"bf16"}
    for words in (
        ["--pass", "bwd", "article", "--gpu", "h200"],
        ["--gpu", "h200", "article", "--pass", "bwd"],
    ):
        assert cli.main(["explain", *words]) == 0
        assert "\nbackward of 1,16," in "\n" + capsys.readouterr().out.split("\n\n")[-1]


def test_support_table_in_the_docs_is_current(capsys):
    assert cli.main(["support", "--markdown"]) == 0
    page = (Path(__file__).parents[1] / "docs" / "options.md").read_text()
    between = page.split("<!-- support -->")[1].split("<!-- /support -->")[0]
    assert between.strip() == capsys.readouterr().out.strip()


def test_doctor_lists_findings_and_advice(capsys, monkeypatch):
    monkeypatch.setattr(toolkit, "find_cuobjdump", lambda: None)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in (
        "python",
        "torch",
        "GPU",
        "tilelang",
        "nvcc",
        "cuobjdump",
        "cache",
        "tuned table",
        "triton",
        "fa2",
    ):
        assert name in out
    assert "pip install triton" in out


@pytest.mark.parametrize("found", [None, object()])
def test_doctor_says_what_optional_packages_are_for(found, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: found)
    checks = {name: check for _, name, check in doctor.CHECKS}
    for name in ("triton", "fa2", "fa3", "fa4", "flashinfer"):
        good, text = checks[name]()
        assert "; only for benchmarks" in text
        assert good != text.startswith("not installed; ")
    assert "for pictures of masks" in checks["matplotlib"]()[1]


def test_support_has_a_line_per_group_of_dtypes(capsys, monkeypatch):
    monkeypatch.setattr(printed, "columns", lambda: 80)
    assert cli.main(["support"]) == 0
    out = capsys.readouterr().out
    assert (
        "  backward                bf16, fp16, fp32-high: every width\n"
        + " " * 26
        + "fp32-highest: d64, d128\n"
        in out
    )


def test_doctor_counts_the_rows_of_each_direction(monkeypatch, tmp_path):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))
    path, _ = configs.tuned_paths(DEFAULT_GPU)
    path.parent.mkdir()
    path.write_text(json.dumps({"gpu": DEFAULT_GPU, "fwd": {"a": {}, "b": {}}, "bwd_det": {"a": {}}}))
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)
    good, text = doctor._check_table()
    assert good and text.startswith(f"{path}, rows: 2 fwd, 1 bwd_det; then ")


@pytest.mark.parametrize(("version", "good"), [(13000, True), (13020, False)])
def test_doctor_compares_nvcc_with_its_headers(monkeypatch, tmp_path, version, good):
    nvcc, header = tmp_path / "bin/nvcc", tmp_path / "include/cuda_runtime_api.h"
    for path, text in (
        (nvcc, "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\necho Build\n"),
        (header, f"#define CUDART_VERSION  {version}\n"),
    ):
        path.parent.mkdir()
        path.write_text(text)
    nvcc.chmod(0o755)
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: (nvcc, "PATH"))
    found, text = doctor._check_nvcc()
    assert found == good and text.startswith("V13.0.88")
    assert ("headers are of CUDA 13.2" in text) != good


def test_doctor_says_whose_table_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "gpu_name", lambda: "NVIDIA GH200 144G HBM3e")
    good, text = doctor._check_table()
    table = configs.data_dir() / "tuned" / "nvidia_h200.json"
    assert not good and f"none for NVIDIA GH200 144G HBM3e, so that of NVIDIA H200 serves, {table}" in text


def test_doctor_strict_fails_for_what_is_needed(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "CHECKS", ((True, "nvcc", lambda: (False, "gone")), (False, "rich", lambda: 1 / 0))
    )
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--strict"]) == 1
    out = capsys.readouterr().out
    assert "MISSING nvcc" in out and "ZeroDivisionError" in out


def test_doctor_asks_for_a_compiler_unless_the_pack_has_every_kernel(monkeypatch):
    monkeypatch.setattr(pack, "installed", lambda: object())
    for coverage, compiles in (((0, 9), True), ((8, 9), True), ((9, 9), False)):
        monkeypatch.setattr(doctor, "_pack_coverage", lambda coverage=coverage: coverage)
        assert doctor._compiles() == compiles
    monkeypatch.setattr(pack, "installed", lambda: None)
    assert doctor._compiles()


def test_tune_without_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cli, "is_hopper", lambda device: False)
    assert cli.main(["tune"]) == 2
    assert "Hopper" in capsys.readouterr().out


def test_tune_reports_an_unwritable_table_before_it_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "is_hopper", lambda device: True)
    (tmp_path / "file").touch()
    table = tmp_path / "file" / "table.json"
    assert cli.main(["tune", "--table", str(table), "--log", str(tmp_path / "log.jsonl")]) == 2
    assert f"cannot write {table}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "shapes", "directions"),
    [
        ([], None, DIRECTIONS),
        (["--pass", "bwd", "bwd_det", "--shapes", "1,8,8,64,64,64,full"], 1, ["bwd", "bwd_det"]),
    ],
    ids=["everything", "chosen"],
)
def test_tune_forwards_its_arguments(words, shapes, directions, monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr(cli, "is_hopper", lambda device: True)
    config = FwdConfig(128, 64)
    found = {"first": [Attempt(config, "winner")], "second": [Attempt(config)]}
    monkeypatch.setattr(
        autotune, "tune", lambda shapes, budget_s, **options: calls.append((shapes, options)) or found
    )
    assert (
        cli.main(["tune", "--table", str(tmp_path / "table.json"), "--log", str(tmp_path / "log"), *words])
        == 0
    )
    ((given, options),) = calls
    assert (given and len(given)) == shapes
    assert list(options["directions"]) == list(directions)
    printed = capsys.readouterr().out
    assert "no winner, left as they were: second" in printed and "1 rows tuned" in printed


def test_bench_outside_a_checkout_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "tl_attention" / "tools" / "cli.py"))
    assert cli.main(["bench", "--shapes", "article"]) == 2
    assert "checkout" in capsys.readouterr().out


def test_bench_forwards_its_arguments(monkeypatch):
    seen = []
    monkeypatch.setitem(sys.modules, "run", types.SimpleNamespace(main=seen.append))
    assert cli.main(["bench", "--shapes", "article", "--help"]) == 0
    assert seen == [["--shapes", "article", "--help"]]


@pytest.mark.parametrize(("text", "expected"), [("90", 90), ("90s", 90), ("10m", 600), ("0.5h", 1800)])
def test_seconds(text, expected):
    assert arguments.seconds(text) == expected


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["tune", "--budget", "soon"],
            "argument --budget: expected a time such as 90s, 10m or 1h, above 0, got 'soon'",
        ),
        (["tune", "--budget", "0s"], "argument --budget: expected .*, got '0s'"),
        (["tune", "--budget", "nan"], "argument --budget: expected .*, got 'nan'"),
        (["tune", "--jobs", "0"], "argument --jobs: expected a whole number, at least 1, got '0'"),
        (["compile", "--jobs", "-3"], "argument --jobs: expected a whole number, at least 1, got '-3'"),
        (["pack", "--jobs", "0"], "argument --jobs: expected a whole number, at least 1, got '0'"),
        (["manifest", "--check", "--every", "0"], "argument --every: expected .*, got '0'"),
        (["manifest", "--jobs", "many", "--check"], "argument --jobs: expected .*, got 'many'"),
        (["pack", "--out", ""], "argument --out: expected a folder, '.' for the current one, got ''"),
        (["tune", "--shapes", "articel"], "--shapes: shape 'articel': not in configs/shapes.toml"),
        (["config", "d128", "sideways"], "tl-attention config: WORD: expected a dtype .*; got 'sideways'"),
        (["explain", "articel"], "tl-attention explain: shape 'articel': not in configs/shapes.toml"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(words, text, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert re.search(text, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full of Linux, which is always full")
@pytest.mark.parametrize("words", [["config", "d128"], ["support"], ["doctor", "--json"]])
def test_a_full_disk_under_the_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "tl_attention.tools.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    line = f"tl-attention {words[0]}: cannot write the output: No space left on device"
    assert found.returncode == 2 and found.stderr.splitlines()[-1] == line, found.stderr
    assert "Traceback" not in found.stderr


def test_errors_of_other_files_than_the_output_are_raised(monkeypatch):
    monkeypatch.setattr(doctor, "report", lambda *_: Path("/nowhere/at/all").read_text())
    with pytest.raises(FileNotFoundError):
        cli.main(["doctor"])


def test_shapes_to_tune_have_no_options():
    with pytest.raises(SystemExit, match="option-sink has options"):
        cli.plain_shapes(["article", "option-sink"])


def test_parse_shapes_accepts_names_patterns_and_sizes():
    shapes = cli.plain_shapes(["article", "paper-d64-full-*", "1,8,2,333,517,192,128,causal"])
    assert len(shapes) == 8
    assert shapes[0].seqlen_q == 4096
    assert shapes[-1].head_dim_v == 128


@pytest.fixture
def no_user_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(tmp_path))


def run_config(capsys, *words: str) -> list[str]:
    assert cli.main(["config", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_config_of_options_names_the_line_and_why(no_user_tables, capsys):
    lines = run_config(capsys, "bf16", "d128", "causal", "window=127", "sink", "4k")
    problem = AttnProblem("bfloat16", 128, 128, False, ("window", "sink"))
    config = configs.option_config(problem, "4k")
    assert lines[0] == f"fwd bf16 d128 causal window sink 4k on {DEFAULT_GPU}: {config}"
    assert (
        lines[1] == f"  runs as {problem}: causal is the right bound of the window, an argument of the launch"
    )
    assert lines[2].startswith("  block_M=128, block_N=128, ") and f"schedule={config.schedule}" in lines[2]
    assert lines[3].startswith("  from line 2 of [options.d128] fwd of configs/grid.toml, for ")
    assert lines[4:] == ["Bucket of calls:", "  4k: at most 4096 keys"]
    tried = run_config(capsys, "bf16", "d128", "causal", "window=127", "sink", "4k", "--tried")
    assert tried[4] == "  tried before: line 1 of [options.d128] fwd does not serve window sink"


def test_config_of_a_tuned_row(no_user_tables, capsys):
    lines = run_config(capsys, "fp16", "d128", "causal", "4k", "--gpu", "NVIDIA H200", "--tried")
    assert lines[2] == "  from fwd row 'bf16 d128 causal 4k' of configs/tuned/nvidia_h200.json"
    assert lines[3] == "Bucket of calls:", "a user without a table of their own misses no row in it"


def test_config_says_that_head_dims_are_padded(no_user_tables, capsys):
    lines = run_config(capsys, "d100", "causal", "sink", "4k", "bwd")
    assert lines[0].startswith("bwd bf16 d100 causal sink 4k on ")
    assert lines[1] == (
        "  runs as bf16 d128 causal: d100 takes tiles of d128, whose other columns are zeros; a sink changes no backward kernel"
    )


def test_config_says_which_calls_have_a_bucket(no_user_tables, capsys):
    for direction in DIRECTIONS:
        asked = run_config(capsys, "d64", "window", "softcap", direction)
        start = asked.index("Buckets of calls, the first that fits:")
        shown = {line.strip().partition(":")[0] for line in asked[start + 1 :]}
        problem = AttnProblem("bfloat16", 64, 64, False, ("window", "softcap"))
        assert shown == {*option_buckets(direction, problem.options)} - (
            {"few"} if direction == "fwd" else set()
        )
    assert "  wide: of 4k and long, those with a window of at least 129 keys" in run_config(
        capsys, "d64", "window"
    )


@pytest.mark.parametrize(
    ("window", "wide"), [("causal window=127", False), ("full window=64", True), ("window=100,28", True)]
)
def test_config_counts_the_keys_of_a_window(window, wide, no_user_tables, capsys):
    lines = run_config(capsys, "d128", *window.split(), "seqlen_k=3000")
    assert ("wide" in lines[0]) == wide and ("4k" in lines[0].partition(" on ")[0]) != wide


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("softcap=0", "full"),
        ("dropout=0.0", "full"),
        ("window=-1", "full"),
        ("causal window=-1,-1", "causal"),
        ("window=-1,0", "causal"),
        ("sink=0", "full sink"),
    ],
)
def test_config_of_a_value_that_turns_an_option_off_is_that_without_it(value, meant, no_user_tables, capsys):
    assert run_config(capsys, "d128", *value.split()) == run_config(capsys, "d128", *meant.split())


def test_config_of_a_default_names_the_rows_it_missed(no_user_tables, capsys, monkeypatch):
    monkeypatch.setattr(configs, "near_tables", lambda gpu_name: {})
    users, _ = configs.tuned_paths("NVIDIA GH200 480GB")
    users.parent.mkdir()
    users.write_text(json.dumps({"gpu": "NVIDIA GH200 480GB"}))
    lines = run_config(capsys, "d72", "full", "1k", "--gpu", "GH200", "--pass", "bwd_det", "--tried")
    assert lines[0].startswith(
        "bwd_det bf16 d72 full 1k on NVIDIA GH200 480GB: dk+dv 64x128x2x2, dq 128x128x2x2"
    )
    assert lines[4] == "  from bwd_det default of configs/grid.toml"
    for section in ("bwd_det", "bwd"):
        assert f"  tried before: {users} has no {section} row 'bf16 d96 full 1k'" in lines


def test_config_without_a_length_has_every_bucket(no_user_tables, capsys):
    lines = run_config(capsys, "d64", "dropout", "--pass", "fwd", "bwd")
    heads = [line.partition(" on ")[0] for line in lines if " on " in line]
    assert heads == [
        "fwd bf16 d64 full dropout 1k, 4k, long, short, 256, fit-192",
        "fwd bf16 d64 full dropout split",
        "bwd bf16 d64 full dropout 1k, 4k, long, tile, tile192, 1k-shared, 4k-shared, long-shared",
    ]


@pytest.mark.parametrize(
    ("batch", "gpu", "bucket"),
    [(1, "h200", "split"), (64, "h200", "long"), (10, "h200", "few"), (9, "h20", "long"), (10, "h20", "few")],
)
def test_config_finds_buckets_of_few_tiles_by_the_sizes(batch, gpu, bucket, no_user_tables, capsys):
    sizes = (f"batch={batch}", "heads=8", "seqlen_q=128", "seqlen_k=16384")
    lines = run_config(capsys, "d128", "full", *sizes, "--gpu", gpu)
    assert lines[0].startswith(f"fwd bf16 d128 full {bucket} on ")


@pytest.mark.parametrize(
    ("words", "buckets"),
    [
        (("d128", "seqlen_k=64"), ["short"]),
        (("d128", "seqlen_k=64", "seqlen_q=65"), ["256", "split", "few"]),
        (("d128", "softcap", "seqlen_k=9000"), ["softcap long", "softcap split"]),
        (("d128", "seqlen_k=5000", "--pass", "bwd"), ["long", "long-shared"]),
        (("d128", "seqlen_k=700", "--pass", "bwd"), ["1k", "1k-shared"]),
        (("d128", "seqlen_k=1700", "heads=8", "heads_kv=2", "--pass", "bwd"), ["4k-shared"]),
        (("d128", "seqlen_k=700", "heads=8", "heads_kv=2", "--pass", "bwd"), ["1k-shared"]),
        (("d128", "seqlen_k=128", "--pass", "bwd_det"), ["tile"]),
        (("d64", "seqlen_k=150", "--pass", "bwd"), ["tile192"]),
        (("d64", "seqlen_k=150", "--pass", "bwd_det"), ["tile192", "shared"]),
        (("d128", "seqlen_k=5000", "--pass", "bwd_det"), ["long", "shared"]),
        (("d128", "seqlen_k=5000", "heads=8", "heads_kv=8", "--pass", "bwd_det"), ["long"]),
        (("d128", "seqlen_k=5000", "heads=8", "heads_kv=2", "--pass", "bwd_det"), ["shared"]),
    ],
)
def test_config_has_every_bucket_that_the_sizes_leave(words, buckets, no_user_tables, capsys):
    lines = run_config(capsys, "bf16", "causal", *words)
    heads = [line.partition(" on ")[0] for line in lines if " on " in line]
    assert [bucket for head in heads for bucket in head.partition("causal ")[2].split(", ")] == buckets


def test_config_of_decode(capsys):
    lines = run_config(capsys, "d128", "softcap", "--pass", "decode")
    few, many, tall = (line.config for line in configs.decode_lines("d128"))
    heads = [f"decode bf16 d128 full softcap: {config}" for config in (few, many, tall)]
    assert [line for line in lines if not line.startswith(" ")] == heads
    sizes = ("heads=64", "heads_kv=8", "seqlen_q=9", "page_size=48")
    paged = run_config(capsys, "d128", *sizes, "--pass", "decode")
    assert paged[0] == f"decode bf16 d128 full: {replace(tall, page_rows=16)}"
    assert paged[1].startswith("  runs as bf16 d128 full window: each decode kernel has a window, ")


@pytest.mark.parametrize(
    ("words", "found"),
    [(("batch=16",), [0]), (("batch=17",), [1]), ((), [0, 1]), (("batch_invariant",), [1])],
)
def test_config_of_decode_follows_from_the_number_of_items(words, found, capsys):
    lines = run_config(capsys, "d128", "heads=32", "heads_kv=8", *words, "--pass", "decode", "--gpu", "H200")
    configs_of = [line.config for line in configs.decode_lines("d128")]
    heads = [line for line in lines if not line.startswith(" ")]
    assert len(heads) == len(found)
    for head, number in zip(heads, found, strict=True):
        config = configs_of[number]
        if "batch_invariant" in words:
            assert f"decode {config.warpgroups}x128x" in head
        else:
            assert head == f"decode bf16 d128 full: {config}"


def test_config_says_what_cannot_run(no_user_tables, capsys, monkeypatch):
    monkeypatch.setattr(question.legality, "fault", lambda *_: "shared memory: expected less")
    lines = run_config(capsys, "d128", "causal", "4k")
    assert "  cannot run: shared memory: expected less" in lines


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["d128", "sideways"], r"a mask \(full, causal\), options \(window, softcap.*got 'sideways'"),
        (["d128", "window=wide"], "window: expected whole numbers, .*got window=wide"),
        (["d128", "window=1.5"], "window: expected whole numbers, .*got window=1.5"),
        (["d128", "softcap=much"], "softcap: expected softcap or softcap=NUMBER, got softcap=much"),
        (
            ["d128", "seqlen_k=long"],
            "seqlen_k: expected seqlen_k=N, a whole number above 0, got seqlen_k=long",
        ),
        (["d128", "batch=0"], "batch: expected batch=N, .*got batch=0"),
        (["d128", "fp16", "bf16"], "dtype: expected one word, got fp16 and bf16"),
        (["d128", "d64"], "head dims: expected one word, got d128 and d64"),
        (["d128", "full", "causal"], "mask: expected one word, got full and causal"),
        (["d0"], "head dims: expected numbers above 0, got d0"),
        (
            ["d128", "1k", "seqlen_k=9000"],
            "bucket: expected a bucket or seqlen_k, .* got 1k and seqlen_k=9000",
        ),
        (["bf16", "causal"], "head dims: expected a word such as d128"),
        (
            ["d320"],
            "head dims: expected at most those of one of the kernels of fwd, d32, d64, .*d256, got d320",
        ),
        (
            ["d256", "fp32-highest", "--pass", "bwd"],
            "head dims: .*kernels of bwd, d64, d128, got d256; PyTorch's formula computes it",
        ),
        (
            ["d128", "split", "--pass", "bwd"],
            "bucket: expected one of 1k, 4k, long, tile, tile192, 1k-shared, 4k-shared, long-shared for bwd, got split",
        ),
        (
            ["d128", "dropout", "--pass", "decode"],
            "expected some of window, softcap, alibi, sink, tree for decode",
        ),
        (["d128", "tree"], "expected some of .* for fwd, got tree; add the word decode"),
        (["d128", "alibi", "tree", "decode"], "tree: expected neither window nor alibi beside it, got alibi"),
        (["d128", "max_logits", "decode"], "max_logits: expected a forward"),
        (["d128", "dropout", "batch_invariant"], "dropout: expected none with batch_invariant"),
        (
            ["d576-512", "decode", "sink", "batch_invariant"],
            "sink: expected none with batch_invariant and d576-512, got sink",
        ),
        (["d128", "window=-3"], "window: expected bounds of at least 0, with -1 for no limit, got window=-3"),
        (
            ["d128", "window=7,-2"],
            "window: expected bounds of at least 0, with -1 for no limit, got window=7,-2",
        ),
        (["d128", "softcap=-1"], r"softcap: expected 0 for no cap, or a number from 2 \*\* -60.*got -1.0"),
        (["d128", "dropout=7"], "dropout: expected a number from 0 to 255/256 .*got 7.0"),
        (["d128", "page_size=16"], "page_size: expected none for fwd, .*got page_size=16"),
        (["d128", "4k", "--pass", "decode"], "bucket: expected none for decode"),
        (["d128", "page_size=15", "decode"], "page_size: expected a multiple of 16, got page_size=15"),
        (["d12", "decode"], "head dims: expected multiples of 8 for decode, .*got d12"),
        (["d64-128", "decode"], "head dims: .*values no wider than keys, got d64-128"),
        (["d320", "decode"], "head dims: expected at most d256, or d576-512, for decode, got d320"),
        (["d128", "heads=3", "heads_kv=2"], "heads_kv: expected a divisor of heads, 3, got heads_kv=2"),
        (["d128", "--gpu", "A100"], "gpu: expected a Hopper GPU, one of .*H20, .*got 'A100'"),
        (["d128", "--gpu", "GTX"], "gpu: expected a Hopper GPU.*got 'GTX'"),
    ],
)
def test_config_refuses_words(words, text):
    with pytest.raises(SystemExit, match=f"tl-attention config: .*{text}"):
        cli.main(["config", *words])


REPORT = cubin.Report(168, 0, 1000, 100, 1, (), 8, 4, 1, 0, (400,), "SASS")


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that `compile` was asked for, without tuned tables."""
    kernels = []
    monkeypatch.setattr(configs, "tuned_paths", lambda gpu_name: ())
    configs.pick_config.cache_clear()

    def compile_all(wanted, jobs, limit):
        kernels.extend(wanted)
        return ((*kernel, REPORT) for kernel in kernels)

    monkeypatch.setattr(autotune, "compile_all", compile_all)
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: ("nvcc", "PATH"))
    yield kernels
    configs.pick_config.cache_clear()


def test_compile_of_shapes(compiled, capsys):
    shapes = ["--shapes", "1,8,8,64,64,128,full", "1,8,8,9000,9000,128,full"]
    assert cli.main(["compile", "--pass", "bwd", *shapes]) == 0
    problem = AttnProblem("bfloat16", 128, 128, False)
    found = (configs.default_config(problem, "bwd", bucket) for bucket in ("1k", "tile"))
    assert compiled == list(dict.fromkeys(kernel for config in found for kernel in config.kernels(problem)))
    out = capsys.readouterr().out
    for _, config in compiled:
        assert str(config) in out


def test_compile_of_shapes_covers_all_lengths(compiled):
    shapes = ["--shapes", "1,64,8,8192,8192,64,64,causal,window=127,sink"]
    assert cli.main(["compile", "--pass", "fwd", "bwd", *shapes]) == 0
    problem = AttnProblem("bfloat16", 64, 64, False, ("window", "sink"))
    without_sink = replace(problem, options=("window",))
    expected = [
        *configs.option_config(problem, "1k").kernels(problem),
        *configs.option_config(problem, "4k").kernels(problem),
        *configs.option_config(problem, SPLIT_BUCKET).kernels(problem),
        *configs.option_config(problem, "wide").kernels(problem),
        *configs.option_config(without_sink, "1k", "bwd").kernels(without_sink),
    ]
    assert compiled == expected


def test_compile_of_option_lines(compiled):
    assert cli.main(["compile", "d192-128", "--options", "--pass", "fwd"]) == 0
    expected = [
        kernel
        for kernel in catalog.option_kernels(["fwd"])
        if (kernel[0].head_dim, kernel[0].head_dim_v) == (192, 128)
    ]
    assert compiled == expected and any(problem.has("dropout") for problem, _ in compiled)


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (["--pass", "bwd", "--dtype", "float16"], {BwdPass, BwdDelta, BwdSum}),
        (["d256", "dq"], {BwdPass}),
        (["delta"], {BwdDelta}),
        (["--pass", "decode"], {DecodeConfig, DecodeCombine, AppendConfig}),
        (["pages", "--pass", "fwd", "decode", "--dtype", "bfloat16"], {DecodeConfig}),
        (["--pass", "jvp"], {JvpConfig}),
    ],
    ids=["bwd", "dq", "delta", "decode", "pages", "jvp"],
)
def test_compile_of_shipped_kernels_with_all_words(words, kinds, compiled):
    assert cli.main(["compile", *words]) == 0
    assert {type(config) for _, config in compiled} == kinds
    assert set(compiled) <= set(catalog.shipped_kernels((*DIRECTIONS, "decode", "jvp")))


def test_compile_skips_decode_by_default(compiled):
    assert cli.main(["compile"]) == 0
    assert compiled == catalog.shipped_kernels()


def test_compile_of_decode_shapes(compiled):
    shapes = ["--shapes", "8,64,8,1,8192,128,full", "1,8,8,4,100,112,causal"]
    assert cli.main(["compile", "--pass", "decode", *shapes]) == 0
    assert compiled == catalog.decode_kernels(["bfloat16"], [(128, 128)])
    assert len(compiled) == 3 * 3 - 1 + 3  # by rows, items and pages; two that merge, one that appends


def test_compile_of_jvp_shapes(compiled, capsys):
    shapes = ["--shapes", "2,8,8,1024,1024,80,full", "1,8,8,4,100,112,causal"]
    assert cli.main(["compile", "--pass", "jvp", *shapes]) == 0
    assert [str(problem) for problem, _ in compiled] == ["bf16 d96 full", "bf16 d128 causal"]
    for shape, text in (
        ("1,8,8,4,100,192,full", "expected head dims within"),
        ("1,8,8,4,100,64,full,softcap=30", "expected no options"),
    ):
        with pytest.raises(SystemExit, match=text):
            cli.main(["compile", "--pass", "jvp", "--shapes", shape])


def test_compile_of_decode_shapes_with_options(compiled):
    assert cli.main(["compile", "--pass", "decode", "--shapes", "8,64,8,1,8192,576,512,full,softcap=30"]) == 0
    problems = {problem for problem, config in compiled if isinstance(config, DecodeConfig)}
    assert problems == {AttnProblem("bfloat16", 576, 512, False, ("window", "softcap"))}


@pytest.fixture
def one_kernel(monkeypatch, tmp_path):
    """A manifest, and two shipped kernels, one with the hash of the file, one that is new; and a shadow kernel, which is new."""
    kernel = catalog.shipped_kernels(["bwd"])[0]
    monkeypatch.setattr(manifest, "shipped", lambda: {"a": kernel, "b": kernel})
    monkeypatch.setattr(manifest, "traced_kernels", lambda: dict.fromkeys(("a", "b", "c: c"), kernel))
    monkeypatch.setattr(manifest, "texts_path", lambda: tmp_path / "texts.json")
    monkeypatch.setattr(manifest, "trace_all", lambda kernels, jobs: dict.fromkeys(kernels, "1234"))
    monkeypatch.setattr(manifest, "entry", lambda *kernel: {"text": "1234", "registers": 2})
    monkeypatch.setattr(
        manifest, "new_faults", lambda name, kernel, found: ["spills"] * (found["registers"] > 1)
    )
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: None)
    monkeypatch.setattr(toolkit, "find_cuobjdump", lambda: None)
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(manifest, "manifest_path", lambda: path)
    versions = {"tilelang": "1", "nvcc": "2"}
    monkeypatch.setattr(manifest, "compiler_versions", lambda: versions)
    path.write_text(manifest.Manifest(versions, {"a": {"text": "1234", "registers": 1}}).format())
    return path


def test_manifest_check_prints_what_differs(one_kernel, capsys):
    before = one_kernel.read_text()
    for sample in ([], ["--every", "2"], ["--every", "3"]):
        assert cli.main(["manifest", "--check", *sample]) == 1
        assert "new: b\nnew: c: c\n" in capsys.readouterr().out
    assert one_kernel.read_text() == before


def test_manifest_every_is_of_a_check(one_kernel, capsys):
    before = one_kernel.read_text()
    assert cli.main(["manifest", "--every", "2"]) == 2
    assert "--every: expected with --check" in capsys.readouterr().out
    assert one_kernel.read_text() == before


def test_manifest_writes_what_is_new(one_kernel, capsys, monkeypatch):
    assert cli.main(["manifest", "--jobs", "1"]) == 2
    assert toolkit.NO_NVCC in capsys.readouterr().out
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: ("nvcc", "PATH"))
    assert cli.main(["manifest", "--jobs", "1"]) == 2
    assert "needs cuobjdump" in capsys.readouterr().out
    monkeypatch.setattr(toolkit, "find_cuobjdump", lambda: "cuobjdump")
    assert cli.main(["manifest", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 kernels to compile" in out and "fault: b: spills" in out
    monkeypatch.setattr(manifest, "new_faults", lambda name, kernel, found: [])
    assert cli.main(["manifest", "--jobs", "1"]) == 0
    assert cli.main(["manifest", "--check"]) == 0
    assert "no hash changed: 3 the same" in capsys.readouterr().out
    assert (one_kernel.parent / "texts.json").read_text() == '{\n "c: c": "1234"\n}\n'
    monkeypatch.setattr(configs, "installed", lambda: True)
    assert cli.main(["manifest"]) == 2


def test_tune_refuses_decode(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tune", "--pass", "decode"])
    assert "argument --pass: expected some of fwd, bwd, bwd_det, got 'decode'" in capsys.readouterr().err


@pytest.mark.parametrize("page_size", [None, 16, 48, 64, 256])
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("width", DECODE_TILE_WIDTHS, ids=str)
def test_compile_of_decode_covers_every_call(width, queries, page_size, monkeypatch):
    asked = []

    def compile_kernels(kernels, where):
        asked.extend(kernels)
        return kernels

    monkeypatch.setattr(launch.common, "compile_kernels", compile_kernels)
    monkeypatch.setattr(launch.decode, "sm_count", lambda device: 132)
    for module in (launch.common, launch.decode):
        monkeypatch.setattr(module, "unused_tensor", lambda device, dtype, *shape: torch.zeros(shape))
    q, k, v = (
        torch.zeros(1, rows, 4, n, dtype=torch.float16)
        for rows, n in ((queries, width[0]), (256, width[0]), (256, width[1]))
    )
    table = None
    if page_size:
        k, v = (
            x.view(-1, page_size, 4, x.shape[3]) if 256 % page_size == 0 else x[:, :page_size] for x in (k, v)
        )
        table = torch.zeros(1, k.shape[0], dtype=torch.int32)
    cache = Cache(k, v, k.shape[1], block_table=table)
    launch.decode.DecodePlan(q, cache, Options())
    assert set(asked) <= set(catalog.decode_kernels(["float16"], [width]))


@pytest.mark.parametrize("other", [["--shapes", "article"], ["--dtype", "float16"]], ids=" ".join)
def test_compile_of_option_lines_refuses_shapes_and_dtype(other, compiled, capsys):
    assert cli.main(["compile", "--options", *other]) == 2
    assert "expected no --shapes and no --dtype" in capsys.readouterr().out
    assert not compiled


@pytest.mark.parametrize("direction", ["bwd", "decode"])
def test_compile_refuses_head_dims_that_have_no_kernels(direction, compiled):
    with pytest.raises(
        SystemExit, match=f"1,8,8,64,64,640,512,full: expected head dims within one of .* --pass {direction}"
    ):
        cli.main(["compile", "--pass", direction, "--shapes", "1,8,8,64,64,640,512,full"])


def test_compile_fails_if_no_kernel_has_the_words(compiled):
    with pytest.raises(SystemExit, match="tl-attention compile: expected words of a kernel, .* all of: fp8"):
        cli.main(["compile", "fp8"])


@pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang")
@pytest.mark.timeout(300)
def test_compile_one_config(capsys, monkeypatch, tmp_path):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    monkeypatch.delenv("TL_ATTENTION_CACHE_DIR", raising=False)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    problem, config = next(kernel for kernel in catalog.shipped_kernels() if isinstance(kernel[1], BwdSum))
    assert cli.main(["compile", *f"{problem} {config}".split(), "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert str(problem) in out and "ok" in out
    assert list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    "words",
    [
        ("config", "d128", "causal", "--pass", "fwd", "bwd", "decode"),
        ("explain", "1,8,8,1024,1024,64,full", "--pass", "fwd", "bwd"),
        ("support",),
        ("doctor",),
    ],
    ids=lambda words: words[0],
)
def test_commands_fit_a_terminal_and_print_json(words, capsys, monkeypatch):
    monkeypatch.setattr(printed, "columns", lambda: 80)
    assert cli.main(list(words)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and not [line for line in lines if len(line) > 80 and len(max(line.split(), key=len)) < 50]
    assert not re.search(r"Config\(|BwdPass\(|^\|", "\n".join(lines))
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("width, form", [(100, "lines"), (400, "table")])
def test_reports_are_lines_where_a_table_does_not_fit(width, form):
    console = Console(width=width, file=io.StringIO())
    columns = ("problem", "kernel", *REPORT_COLUMNS, "result")
    row = ("bf16 d128 full window sink", "dq+dk+dv 64x128x2x2 reuse apart [x]", *report_cells(REPORT), "ok")
    print_reports(console, columns, [row])
    printed_lines = console.file.getvalue().splitlines()
    assert max(map(len, printed_lines)) <= width
    assert (printed_lines[0] == f"{row[0]}, {row[1]}: ok") == (form == "lines")
    assert row[1] in console.file.getvalue()


def test_compile_prints_json(compiled, capsys):
    assert cli.main(["compile", "--pass", "fwd", "--shapes", "1,8,8,9000,9000,128,full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [record["kernel"] for record in found] == [str(config) for _, config in compiled]
    assert all(record["fault"] is None for record in found)


@pytest.mark.parametrize("head_dim_v", [8, 12, 64, 256, 320, 512])
@pytest.mark.parametrize("head_dim", [8, 12, 64, 256, 320, 512, 576])
def test_config_takes_the_head_dims_of_caches_that_calls_take(head_dim, head_dim_v):
    q, k = (torch.zeros(1, 1, 1, head_dim, dtype=torch.bfloat16) for _ in range(2))
    latent = (head_dim, head_dim_v) == (576, 512)  # its values are columns of its keys
    v = k[..., :head_dim_v] if latent else torch.zeros(1, 1, 1, head_dim_v, dtype=torch.bfloat16)
    fails = []
    for check in (
        lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=1),
        lambda: question.check_head_dims(head_dim, head_dim_v, DECODE),
    ):
        try:
            check()
            fails.append(False)
        except (ValueError, NotImplementedError):
            fails.append(True)
    assert fails[0] == fails[1]
