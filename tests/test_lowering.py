"""Every shipped config, compiled for sm_90a with no GPU: what would make it slow or unable to launch."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import asdict, replace

import pytest

from tl_attention import compiler, configs, cubin, legality, toolkit
from tl_attention.kernel_configs import BwdDelta, BwdPass, FwdConfig, append_kernel
from tl_attention.problem import DECODE_TILE_WIDTHS, SPLIT_BUCKET, AttnProblem
from tl_attention.target import SMEM_LIMIT

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang"),
    pytest.mark.timeout(300),
]


# Both dtypes share all configs; fp16, which differs by the type of an element, is compiled for the causal forwards of the commonest
# width alone, as a kernel takes two cores 4 s. `tl-attention compile` compiles and judges all.
SHIPPED = [
    (problem, config)
    for problem, config in configs.shipped_kernels()
    if problem.dtype == "bfloat16"
    or (problem.head_dim == problem.head_dim_v == 128 and problem.causal and isinstance(config, FwdConfig))
]
# Each line of the grid for options, with all options that it is for, at the commonest width, but those with less options than another
# of the same config; and one whose keys are split
OPTION_KERNELS = [
    (problem, config)
    for direction in ("fwd", "bwd")
    for one, config in configs.option_problems(direction)
    if one.head_dim == one.head_dim_v == 128
    for problem, config in config.kernels(one)
    if isinstance(config, FwdConfig | BwdPass)
]
PACKED = AttnProblem("bfloat16", 128, 128, True, ("varlen",))
OPTION_KERNELS.append((PACKED, configs.option_config(PACKED, SPLIT_BUCKET)))
OPTION_KERNELS = [
    (problem, config)
    for problem, config in dict.fromkeys(OPTION_KERNELS)
    if not any(config == other and {*problem.options} < {*more.options} for more, other in OPTION_KERNELS)
]

# Each width for caches, with pages of 16 keys and all options; of those for more rows than 64, the commonest and the largest
DECODE_KERNELS = [
    (AttnProblem("bfloat16", *width, False, ("window", "softcap", "alibi", "sink")), configs.DECODE_ROWS[0])
    for width in DECODE_TILE_WIDTHS
] + [
    (AttnProblem("bfloat16", width, width, False, ("window",)), configs.DECODE_ROWS[1])
    for width in (128, 256)
]
DECODE_KERNELS = [(problem, configs.decode_config(problem, rows, 16)) for problem, rows in DECODE_KERNELS]


@pytest.mark.parametrize(
    ("problem", "config"), SHIPPED, ids=["{}-{}".format(*kernel).replace(" ", "-") for kernel in SHIPPED]
)
def test_lowering_shipped_kernel(problem, config):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    report = cubin.report(problem, config)
    assert report.spill_bytes == 0
    assert report.warnings == ()
    assert report.smem_bytes == legality.smem_bytes(problem, config)
    assert report.smem_static <= legality.BARRIER_BYTES
    assert report.smem_bytes + report.smem_static <= SMEM_LIMIT
    assert report.ctas_per_sm >= 1
    assert report.fault is None
    multiplies = isinstance(config, FwdConfig | BwdPass)
    assert report.needs_wgmma == multiplies == (report.hgmma > 0)
    assert (report.tma > 0) == (multiplies or isinstance(config, BwdDelta))
    # Of O or a gradient; parts of O leave from registers
    parts = isinstance(config, FwdConfig) and config.split
    assert (report.tma_stores > 0) == (not isinstance(config, BwdDelta) and not parts)
    assert (report.vector_sums > 0) == (isinstance(config, BwdPass) and config.adds_dq)


@pytest.mark.parametrize(
    ("problem", "config"),
    OPTION_KERNELS,
    ids=["{}-{}".format(*one).replace(" ", "-") for one in OPTION_KERNELS],
)
def test_lowering_kernel_with_options(problem, config):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    report = cubin.report(problem, config)
    assert report.fault is None and report.warnings == ()
    assert report.smem_bytes == legality.smem_bytes(problem, config)


@pytest.mark.parametrize(
    ("problem", "config"),
    DECODE_KERNELS,
    ids=["{}-{}".format(*one).replace(" ", "-") for one in DECODE_KERNELS],
)
def test_lowering_decode_kernel(problem, config):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    report = cubin.report(problem, config)
    assert report.spill_bytes == 0 and report.warnings == () and report.hgmma and report.tma
    assert report.ctas_per_sm >= config.ctas_per_sm
    assert report.smem_bytes == legality.smem_bytes(problem, config)
    assert report.fault is None


@pytest.mark.parametrize(
    "kernel", [append_kernel("bfloat16"), DECODE_KERNELS[2][1].combine(DECODE_KERNELS[2][0])], ids=str
)
def test_lowering_kernel_beside_a_decode(kernel):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    problem, config = kernel
    report = cubin.report(problem, config)
    assert report.fault is None and report.smem_bytes == legality.smem_bytes(problem, config)


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
    "tl_attention_",
)


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


@pytest.mark.parametrize("config", [FwdConfig(64, 32), BwdPass("dq+dk+dv", 64, 64)], ids=str)
def test_lowering_instructions_are_counted_without_cuobjdump(config, monkeypatch):
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    problem = configs.problems()[0]
    source, smem = compiler.lower(problem, config)
    with_sass = cubin.report_source(source, smem, config.threads)
    monkeypatch.setattr(toolkit, "find_cuobjdump", lambda: None)
    with_ptx = cubin.report_source(source, smem, config.threads)
    assert with_ptx.counted_in == "PTX"
    for counts in (with_sass, with_ptx):
        assert counts.hgmma and counts.tma and counts.tma_stores
        assert bool(counts.vector_sums) == isinstance(config, BwdPass)
    assert with_ptx.registers == with_sass.registers


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
    monkeypatch.setattr(compiler, "kernel_path", lambda problem, config: tmp_path / "kernel.so")
    monkeypatch.setattr(cubin, "report_source", lambda *arguments: REPORT)
    (tmp_path / "kernel.cu").write_text("")
    if kept is not None:
        (tmp_path / "kernel.json").write_text(kept if isinstance(kept, str) else json.dumps(kept))
    problem = configs.problems()[0]
    assert cubin.report_compiled(problem, FwdConfig(64, 32)) == REPORT
    monkeypatch.setattr(cubin, "report_source", lambda *args: pytest.fail("made anew though kept"))
    assert cubin.report_compiled(problem, FwdConfig(64, 32)) == REPORT


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
