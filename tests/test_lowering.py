"""Every shipped config, compiled for sm_90a with no GPU: what would make it slow or unable to launch."""

from __future__ import annotations

import importlib.util

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
