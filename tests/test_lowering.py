"""Every shipped config, compiled for sm_90a with no GPU: what would make it slow or unable to launch."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict

import pytest

from tl_attention import configs, cubin, dispatch
from tl_attention.problem import FwdConfig
from tl_attention.target import SMEM_LIMIT

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    ("problem", "config"),
    configs.shipped_configs(),
    ids=[f"{p}-{c}".replace(" ", "-") for p, c in configs.shipped_configs()],
)
def test_lowering_shipped_config(problem, config):
    if not cubin.find_nvcc():
        pytest.skip(cubin.NO_NVCC)
    report = cubin.report(problem, config)
    assert report.spill_bytes == 0
    assert report.warnings == ()
    assert report.smem_bytes == configs.smem_bytes(problem, config)
    assert report.smem_static <= configs.BARRIER_BYTES
    assert report.smem_bytes + report.smem_static <= SMEM_LIMIT
    assert report.ctas_per_sm >= 1
    assert report.hgmma > 0 and report.tma > 0 and report.tma_stores > 0
    assert report.fault is None


def test_lowering_instructions_are_counted_without_cuobjdump(monkeypatch):
    if not cubin.find_nvcc():
        pytest.skip(cubin.NO_NVCC)
    problem = configs.problems()[0]
    source, smem = dispatch.lower_fwd(problem, FwdConfig(64, 32))
    with_sass = cubin.report_source(source, smem, 256)
    monkeypatch.setattr(cubin, "find_cuobjdump", lambda: None)
    with_ptx = cubin.report_source(source, smem, 256)
    assert with_ptx.counted_in == "PTX"
    assert with_ptx.hgmma and with_ptx.tma and with_ptx.tma_stores
    assert with_ptx.registers == with_sass.registers


REPORT = cubin.Report(168, 0, 1000, 100, 1, (), 8, 4, 1, (400,), "SASS")


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
    monkeypatch.setattr(dispatch, "kernel_path", lambda problem, config: tmp_path / "kernel.so")
    monkeypatch.setattr(cubin, "report_source", lambda source, smem, threads: REPORT)
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
