"""Shipped kernels, compiled for sm_90a with no GPU: what would make them slow or unable to launch.

A sample is compiled, which differs from commit to commit; `pytest --all-kernels` compiles all. test_manifest.py covers the others by
the hashes of their texts and the numbers recorded for them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from seeds import commit_seed

from tl_attention.compilation import building, compiler, cubin, manifest, store, toolkit
from tl_attention.config import catalog, configs
from tl_attention.config.kernel_configs import BwdPass, BwdSum, FwdConfig, append_kernel
from tl_attention.problem.attn_problem import AttnProblem

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang"),
    pytest.mark.timeout(300),
]


# Kernels beside one per template, of which one commit in seven compiles each; they take a core 5 to 20 s
SAMPLED = 8
SHIPPED = manifest.shipped()
COMMITTED = manifest.Manifest.read()


def pytest_generate_tests(metafunc):
    if "shipped_kernel" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-kernels")
        seed = commit_seed()
        names = list(SHIPPED) if everything else manifest.sample(SHIPPED, seed, SAMPLED)[seed % 7 :: 7]
        metafunc.parametrize("shipped_kernel", names)


def test_lowering_shipped_kernel(shipped_kernel):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    problem, config = SHIPPED[shipped_kernel]
    found = manifest.numbers(problem, config)
    assert manifest.new_faults(shipped_kernel, (problem, config), found) == []
    recorded = COMMITTED.kernels.get(shipped_kernel, {})
    comparable = toolkit.find_cuobjdump() and manifest.compiler_versions() == COMMITTED.versions
    if comparable and recorded.get("source") == found["source"]:
        assert found == {name: value for name, value in recorded.items() if name != "text"}


def test_trace_translates_each_function_once(monkeypatch):
    """TileLang translates a function anew per kernel otherwise; see compiler._parse_functions_once."""
    from tilelang.language.eager.ast import DSLMutator

    kernels = [(AttnProblem("bfloat16", width, width, True), FwdConfig(64, 32)) for width in (64, 128)]
    texts = [manifest.text_hash(*kernel) for kernel in kernels]
    monkeypatch.setattr(DSLMutator, "visit", lambda *args: pytest.fail("translated a second time"))
    assert [manifest.text_hash(*kernel) for kernel in reversed(kernels)] == texts[::-1]
    assert texts[0] != texts[1]


# What only kernels with options have among their arguments or in their text
OF_OPTIONS = (
    "left",
    "right",
    "softcap",
    "Slopes",
    "Sink",
    "Rng",
    "drop_below",
    "Table",
    "tanh",
    "tl_attention_(?!store|fragment)",
)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    "config",
    [
        FwdConfig(128, 64),
        FwdConfig(64, 32, schedule="dynamic"),
        BwdPass("dk+dv", 64, 64),
        BwdPass("dq", 64, 32),
    ],
    ids=str,
)
def test_lowering_of_plain_attention_knows_no_options(config):
    source, _ = compiler.lower(AttnProblem("bfloat16", 64, 64, True), config)
    assert not [word for word in OF_OPTIONS if re.search(rf"\b{word}", source)]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    "options",
    [
        ("added",),
        ("varlen", "added"),
        ("window", "alibi", "placed"),
        ("window", "dropout", "placed"),
        ("window", "dropout", "placed", "added"),
    ],
)
def test_trace_of_calls_on_parts_of_a_sequence(options, direction):
    if direction == "bwd":
        options = tuple("partial" if option == "added" else option for option in options)
    problem = AttnProblem("bfloat16", 128, 128, False, options)
    config, _ = configs.pick_config(problem.served_as, "4k", "NVIDIA H200", direction)
    if direction == "fwd":
        config = config.storing_max if "added" not in options else replace(config, hold_max=False)
    for kernel in config.kernels(problem):
        assert compiler.trace(*kernel).script()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("config", [FwdConfig(64, 32), BwdPass("dq+dk+dv", 64, 64)], ids=str)
def test_lowering_instructions_are_counted_without_cuobjdump(config, monkeypatch):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    problem = catalog.problems()[0]
    source, smem = compiler.lower(problem, config)
    with_sass = cubin.report_source(source, smem, config.threads)
    monkeypatch.setattr(toolkit, "find_cuobjdump", lambda: None)
    with_ptx = cubin.report_source(source, smem, config.threads)
    assert with_ptx.counted_in == "PTX"
    for counts in (with_sass, with_ptx):
        assert counts.hgmma and counts.tma and counts.tma_stores
        assert bool(counts.vector_sums) == isinstance(config, BwdPass)
    assert with_ptx.registers == with_sass.registers


@pytest.mark.parametrize(
    ("kernel", "flags"),
    [
        (append_kernel("bfloat16"), set()),
        ((AttnProblem("bfloat16", 64, 64, True), FwdConfig(64, 32)), {"--use_fast_math"}),
        (
            (AttnProblem("bfloat16", 128, 128, True, ("varlen",)), BwdPass("dq+dk+dv", 64, 128)),
            {"--use_fast_math", "-Xptxas=--register-usage-level=0"},
        ),
    ],
    ids=["append", "forward", "packed backward"],
)
def test_assemble_has_the_flags_of_the_pass_options(kernel, flags, tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(toolkit, "find_nvcc", lambda: (Path("nvcc"), "PATH"))
    monkeypatch.setattr(subprocess, "run", run)
    compiler.assemble("", tmp_path, compiler.pass_configs(*kernel))
    (command,) = commands
    assert {"--use_fast_math", "-Xptxas=--register-usage-level=0"} & {*command} == flags
    assert "-lineinfo" not in command and "-arch=sm_90a" in command


def test_build_makes_a_library_that_loads_and_serves_its_text_again(tmp_path, monkeypatch):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "of_tilelang"))
    problem, config = AttnProblem("bfloat16", 64, 64, False), BwdSum()
    path = store.kernel_path(problem, config)
    new, old = (path.parent / f"{path.stem}-{name}" for name in ("new", "old"))
    for folder in (new, old):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    assert callable(building.compile_kernel(problem, config))
    assert new.exists() and not old.exists(), "left by a process that was killed"
    source, smem = compiler.stored_source(path)
    assert source.count("__global__") >= 1
    assert smem == compiler.lower(problem, config)[1] > 0
    assert path.stat().st_size < 60_000, "without line information"
    assert not list((tmp_path / "of_tilelang").rglob("*.so")), "the cache of TileLang"

    def assemble(*_: object) -> None:
        raise RuntimeError("compiled")

    monkeypatch.setattr(compiler, "assemble", assemble)
    again = path.with_name("again.so")
    compiler.build(problem, config, again)
    assert again.read_bytes() == path.read_bytes()
    assert compiler.stored_source(again) == compiler.stored_source(path)
    with pytest.raises(RuntimeError, match="compiled"):
        compiler.build(problem, BwdSum(rows=32), path.with_name("other.so"))


REPORT = cubin.Report(168, 0, 1000, 100, 1, (), 8, 4, 1, 0, (400,), "SASS")


@pytest.mark.parametrize(
    ("needs_wgmma", "fault"), [(True, "0 wgmma and 2 TMA load instructions"), (False, None)]
)
def test_report_asks_for_wgmma_where_matrices_are_multiplied(needs_wgmma, fault):
    assert replace(REPORT, hgmma=0, tma=2, needs_wgmma=needs_wgmma).fault == fault


@pytest.mark.parametrize(
    "kept",
    [
        None,
        asdict(REPORT) | {"occupancy": 1},
        {key: value for key, value in asdict(REPORT).items() if key != "loops"},
        "{",
    ],
    ids=["none", "unknown field", "missing field", "cut short"],
)
def test_report_compiled_is_made_anew_where_none_fits(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "kernel_path", lambda problem, config: tmp_path / "kernel.so")
    monkeypatch.setattr(cubin, "report_source", lambda *arguments: REPORT)
    (tmp_path / "kernel.cu").write_text(compiler.SMEM_LINE.format(1000))
    if kept is not None:
        (tmp_path / "kernel.json").write_text(kept if isinstance(kept, str) else json.dumps(kept))
    problem = catalog.problems()[0]
    assert cubin.report_compiled(problem, FwdConfig(64, 32)) == REPORT
    monkeypatch.setattr(cubin, "report_source", lambda *args: pytest.fail("made anew though kept"))
    assert cubin.report_compiled(problem, FwdConfig(64, 32)) == REPORT


@pytest.mark.parametrize("stored", [True, False])
def test_report_compiled_has_the_shared_memory_of_the_kernel(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "kernel_path", lambda problem, config: tmp_path / "kernel.so")
    monkeypatch.setattr(cubin, "report_source", lambda source, smem, *_: replace(REPORT, smem_bytes=smem))
    monkeypatch.setattr(compiler, "lower", lambda problem, config: ("", 20_000))
    line = compiler.SMEM_LINE.format(30_000) if stored else ""
    (tmp_path / "kernel.cu").write_text(f"code\n{line}\n")
    found = cubin.report_compiled(catalog.problems()[0], FwdConfig(64, 32))
    assert found.smem_bytes == (30_000 if stored else 20_000)


@pytest.mark.parametrize(
    ("registers", "smem", "threads", "ctas"),
    [
        (168, 163840, 384, 1),
        (128, 90112, 512, 1),
        (106, 40960, 256, 2),
        (32, 0, 1024, 2),
        (32, 1024, 128, 16),
    ],
)
def test_ctas_per_sm(registers, smem, threads, ctas):
    assert cubin.ctas_per_sm(registers, smem, threads) == ctas


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("hold_max", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_lowering_leaves_four_row_sums_per_thread(causal, hold_max):
    """The sums of two columns of two rows; a layout with more would add up numbers that nobody sets."""
    config = FwdConfig(192, 128, schedule="dynamic", q_stages=2, ping_pong=True, hold_max=hold_max)
    source, _ = compiler.lower(AttnProblem("bfloat16", 64, 64, causal), config)
    assert set(re.findall(r"float softmax_partial_sum\w*\[(\d+)\]", source)) == {"4"}
