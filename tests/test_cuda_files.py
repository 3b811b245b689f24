"""The files of kernels/cuda, each compiled alone for sm_90a. Kernels that call them: test_lowering.py."""

from __future__ import annotations

import re
import subprocess

import pytest

pytest.importorskip("tilelang")

from tl_attention.compilation import pack, toolkit
from tl_attention.compilation.compiler import TEMPLATES
from tl_attention.config.round_configs import ROUND_STAGE_BYTES, ROUNDED_ROWS, ROUNDING_WARPS
from tl_attention.config.term_configs import ITEM_ELEMENTS, STAGE_BYTES
from tl_attention.kernels.backward.dq_sinks import round
from tl_attention.kernels.cuda import FOLDER, fill, source
from tl_attention.kernels.seams.softmax import LOWEST
from tl_attention.problem.attn_problem import TABLE_ROWS

NAMES = sorted(path.stem for path in FOLDER.glob("*.cuh"))
# Names in capitals that kernels fill in
VALUES = {
    "BLOCKS_OF_ROWS": round.BLOCKS_WITH_ROWS,
    "BLOCKS_PER_TILE": round.BLOCKS_PER_TILE,
    "DQ_WARPS": round.DQ_WARPS,
    "ITEM_ELEMENTS": ITEM_ELEMENTS,
    "LOWEST": f"{LOWEST:.1e}f",
    "PAIR": "bf16x2",
    "ROUND_STAGE_BYTES": ROUND_STAGE_BYTES,
    "ROUNDED_ROWS": ROUNDED_ROWS,
    "STAGE_BYTES": STAGE_BYTES,
    "TABLE_ROWS": TABLE_ROWS,
    "ROUNDING_WARPS": ROUNDING_WARPS,
}
# Template -> arguments that it is compiled with
INSTANCES = {
    "add_by_tma": ["64, 8", "64, 8, true"],
    "add_fp32_tile": ["64"],
    "add_fragment": ["64, 8"],
    "add_rows": ["64"],
    "add_tile": ["64"],
    "add_transposed": ["64"],
    "captured": ["float, float", "__half, float"],
    "diagonal": ["96"],
    "distance": ["false", "true"],
    "draw": ["false, 128", "true, 128"],
    "drop_float": ["false, 128", "true, 128"],
    "drop_half": ["false, 128", "true, 128"],
    "extended": ["0", "1"],
    "fetch": ["float, false, 64", "__nv_bfloat16, true, 64"],
    "fetch_bits": ["64", "128"],
    "fetch_shared": ["float, false, 64", "__nv_bfloat16, true, 64"],
    "fetched": ["__nv_bfloat16, float"],
    "floor_divide": ["int"],
    "items_per_head": ["128"],
    "keep_diagonals": ["96"],
    "keep_rest": ["0, false, 64", "1, true, 32"],
    "locate": ["128, 2"],
    "make_first_parts": ["128, 2, 2"],
    "make_parts": ["128, 2, 2"],
    "mask": ["false", "true"],
    "merge_piece": ["128"],
    "merge_sums": ["3"],
    "prefetch": ["float, false, 64", "__nv_bfloat16, true, 64"],
    "prefetch_bits": ["64", "128"],
    "remainder": ["int"],
    "round_dq": ["64, 2"],
    "round_packed_dq": ["64, 2"],
    "round_rows": ["64, 2"],
    "softmax_backward": ["0, false, 64", "1, true, 32"],
    "split": ["128, 2, 2"],
    "split_tile": ["128, 2"],
    "store_fragment": ["64"],
    "store_piece": ["128"],
    "store_rows": ["64"],
    "store_tile": ["float, float, 64", "__nv_bfloat16, float, 64", "__nv_bfloat16, __nv_bfloat16, 64"],
    "sum_blocks": ["64"],
    "sum_diagonals": ["64"],
    "sum_pairs": ["64"],
    "wait_for_parts": ["128"],
    "with_rest": ["0, false", "1, true"],
}  # fmt: skip
FUNCTION = r"^(template <[^\n]*?>\s+)?(?:static __device__ __forceinline__|TL_DEVICE)\s+[\w*]+\s+tl_attention_(\w+)\("
# add_tile of diagonals.cuh has other arguments. Overloads have no address of their own
OTHER_INSTANCES = {"add_transposed": {"add_tile": ["64, true", "64, false"]}}
OVERLOADED = {"index", "pair"}


def instances(name: str) -> list[str]:
    """Functions of a file, templates with arguments."""
    known = INSTANCES | OTHER_INSTANCES.get(name, {})
    found = []
    for template, function in re.findall(FUNCTION, source(name), re.MULTILINE):
        if template:
            found += [f"tl_attention_{function}<{arguments}>" for arguments in known[function]]
        elif function not in OVERLOADED:
            found.append(f"tl_attention_{function}")
    return found


@pytest.mark.skipif(not toolkit.find_nvcc(), reason=toolkit.NO_NVCC)
@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", NAMES)
def test_cuda_file_compiles_alone(name, tmp_path):
    from tilelang.contrib import cc, nvcc

    for path in FOLDER.glob("*.cuh"):
        (tmp_path / path.name).write_text(fill(path.read_text(), **VALUES))
    functions = instances(name)
    addresses = "\n".join(f"  to[{i}] = (void*)&{function};" for i, function in enumerate(functions))
    text = f'#include "{name}.cuh"\n__global__ void functions(void** to) {{\n{addresses}\n}}\n'
    (tmp_path / "alone.cu").write_text(text)
    options = ["--cubin", "-arch=sm_90a", "-w", *nvcc.default_compile_options(["--use_fast_math"])]
    command = [toolkit.find_nvcc()[0], f"-ccbin={cc.get_cplus_compiler()}", *options, "alone.cu"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert functions or name == "elect_one_thread"  # a specialization of a function of TileLang


def test_cuda_files_are_sources_of_every_kernel():
    for template in TEMPLATES.values():
        assert set(FOLDER.iterdir()) - {FOLDER / "__pycache__"} <= set(pack.sources(template.module))


@pytest.mark.parametrize("name", NAMES)
def test_cuda_file_has_a_head_that_kernels_do_not_get(name):
    text = (FOLDER / f"{name}.cuh").read_text()
    head = text.removesuffix(source(name)).splitlines()
    comment = [line for line in head if line.startswith("// ")]
    assert comment and head[len(comment)] == "#pragma once"
    assert all(line.startswith("#include ") for line in head[len(comment) + 1 :])
    assert source(name).startswith("\n") and "\n\n" not in source(name)


def test_cuda_text_is_in_files_only():
    for path in FOLDER.parent.rglob("*.py"):
        assert not re.search(r"TL_DEVICE|\basm\b|#include|#pragma", path.read_text()), (
            f"{path}: move its CUDA C++ to {FOLDER}"
        )


def test_fill_replaces_whole_names_that_the_text_has():
    assert fill("WARPS + DQ_WARPS * 2 f.WARPS.f", WARPS=4, OTHER=1) == "4 + DQ_WARPS * 2 f.4.f"
