"""Headers with what a source calls: nvcc makes the same code of it, and other sources get all headers."""

from __future__ import annotations

import subprocess

import pytest

from tl_attention.compilation import compiler, headers, toolkit

KERNEL = """#include <tl_templates/cuda/instruction/wgmma.h>
{define}
extern "C" __global__ void product(uint64_t a, uint64_t b, uint32_t* out) {{
  uint32_t sums[{n} / 2] = {{}};
  tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, {n}, 16, false, false, 1, 1>(a, b, sums, true);
  for (int i = 0; i < {n} / 2; ++i) out[i * 128 + threadIdx.x] = sums[i];
}}
"""
ATOMIC = """#include <tl_templates/cuda/atomic.h>
extern "C" __global__ void draw(int* tickets) { tickets[1] = AtomicAddRet(tickets, 1); }
"""


def count(text: str) -> int:
    return text.count("\nstruct MMA_")


@pytest.mark.parametrize("n", [8, 24, 256])
def test_headers_keep_the_shapes_of_the_source_alone(n, tmp_path):
    from tilelang.env import CUTLASS_INCLUDE_DIR

    assert headers.write_narrowed(KERNEL.format(define="", n=n), tmp_path)
    fault = "headers.py does not fit this TileLang: adapt its patterns of wgmma to the headers"
    whole = narrowed = ""
    for name in headers.STRUCTS:
        with open(f"{CUTLASS_INCLUDE_DIR}/{name}") as file:
            whole += file.read()
        narrowed += (tmp_path / name).read_text()
    assert count(narrowed) == whole.count(f"\nstruct MMA_64x{n}x16_") > 0, fault
    assert count(whole) > 100 * count(narrowed), fault
    calls = (tmp_path / headers.CALLS).read_text()
    assert f"OP({n})" in calls and "OP(64)" not in calls and "../common.h" not in calls, fault
    assert "##x16_" in calls and "##x8_" not in calls and "##x32_" not in calls, fault


def test_a_source_without_wgmma_gets_no_headers(tmp_path):
    assert not headers.write_narrowed("__global__ void empty() {}", tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not toolkit.find_nvcc(), reason=toolkit.NO_NVCC)
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("atomic", [False, True])
def test_code_is_that_of_all_headers(atomic, tmp_path, monkeypatch):
    cubins, runs, run = [], [], subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: (runs.append(args), run(*args, **kwargs))[1]
    )
    source = KERNEL.format(define="", n=24) + ATOMIC * atomic
    for name in ("narrowed", "whole"):
        (tmp_path / name).mkdir()
        cubins.append(compiler.assemble(source, tmp_path / name, {})[1].read_bytes())
        monkeypatch.setattr(headers, "write_narrowed", lambda *_: False)
    assert (tmp_path / "narrowed/headers").exists() and not (tmp_path / "whole/headers").exists()
    assert cubins[0] == cubins[1]
    assert len(runs) == 2  # nvcc rejected nothing
    empty = (tmp_path / "narrowed/headers/tl_templates/cuda/atomic.h").exists()
    assert empty != atomic


@pytest.mark.skipif(not toolkit.find_nvcc(), reason=toolkit.NO_NVCC)
def test_a_width_that_a_macro_hides_is_compiled_with_all_headers(tmp_path):
    source = KERNEL.format(define="#define N 32\n// also wgmma_ss<A, B, C, 64, 16, 16>", n="N")
    assert headers.write_narrowed(source, tmp_path / "of the comment")
    _, cubin = compiler.assemble(source, tmp_path, {})
    assert cubin.exists()
