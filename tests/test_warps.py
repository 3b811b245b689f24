"""Values and sums along diagonals in the CUDA of the kernels, compiled for the CPU, where a lane is a thread (native/warp.h)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from subprocess import check_output

import numpy as np
import pytest

pytest.importorskip("tilelang")

from tl_attention.kernels.cuda import source
from tl_attention.kernels.scores.diagonals import sums_per_lane
from tl_attention.problem.program import diagonal_slots

NATIVE = Path(__file__).parent / "native"

# Sums of tiles [64 keys, cols] of bf16, as the consumers have them: a line per sum of a lane, slot and number
CONSUMERS = """
int main(int, char** files) {
  static uint16_t tile[64 * COLS];
  if (std::fread(tile, sizeof tile, 1, std::fopen(files[1], "rb")) != 1) return 1;
  static float found[128][SUMS];
  static int slots[128][SUMS];
  run(4, [&] {
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 4;
    uint32_t pairs[COLS / 4];
    uint32_t by_place[COLS / 8 + 1];
    float sums[SUMS];
    for (int n = 0; n < COLS / 8; ++n)
      for (int row = 0; row < 2; ++row) std::memcpy(&pairs[2 * n + row], tile + (first + 8 * row) * COLS + 8 * n + lane % 4 * 2, 4);
    tl_attention_add_tile<COLS>(by_place, pairs);
    tl_attention_sum_pairs<COLS>(sums, by_place);
    for (int i = 0; i < SUMS; ++i) found[threadIdx.x][i] = sums[i], slots[threadIdx.x][i] = tl_attention_summed_slot(i);
  });
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < SUMS; ++i) std::printf("%d %.9g\\n", slots[thread][i] - 15 - thread / 32 * 16, found[thread][i]);
}
"""
# Values of the elements of 64 rows where that of slot u is u: a line per row. Slots of a warp begin at its last row
VALUES = """
int main() {
  static float values[64][COLS];
  run(4, [&] {
    float of_lane[SLOTS / 32];
    for (int i = 0; i < SLOTS / 32; ++i) of_lane[i] = tl_attention_slot_of_lane(i);
    tl_attention_keep_diagonals<SLOTS>(shared_memory, of_lane);
    int lane = threadIdx.x % 32;
    for (int n = 0; n < COLS / 8; ++n)
      for (int b = 0; b < 2; ++b)
        for (int odd = 0; odd < 2; ++odd) {
          int place = 2 * (n - b + 1) + odd, row = threadIdx.x / 32 * 16 + 8 * b + lane / 4, column = 8 * n + lane % 4 * 2 + odd;
          values[row][column] = tl_attention_diagonal<SLOTS>(shared_memory, place);
        }
  });
  for (auto& row : values) {
    for (float x : row) std::printf("%g ", x);
    std::printf("\\n");
  }
}
"""


def for_cpu(code: str) -> str:
    """The code with the thread's number in place of the PTX that reads it, and without additions to global memory."""

    def call(match: re.Match) -> str:
        number = re.search(r'mov\.u32.*"=r"\((\w+)\)', match[0])
        return f"{number[1]} = threadIdx.x;" if number else ";"

    return re.sub(r"asm volatile\(.*?\);(?=\s*\n|\s*[}])", call, code, flags=re.DOTALL)


def output(tmp_path: Path, main: str, sizes: dict[str, int], *arguments: Path) -> np.ndarray:
    """Numbers that `main` prints, one row per line."""
    if not shutil.which("g++") or int(check_output(["g++", "-dumpversion"]).split(b".")[0]) < 11:
        pytest.skip("needs g++ 11 or later, which has std::barrier")
    constants = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
    file, program = tmp_path / "main.cc", tmp_path / "main"
    code = for_cpu(source("diagonals"))
    file.write_text(f'#include "{NATIVE / "warp.h"}"\n{constants}{code}{main}')
    subprocess.run(["g++", "-std=c++20", "-O1", "-w", "-pthread", file, "-o", program], check=True)
    text = check_output([program, *arguments], text=True)
    return np.array([[float(x) for x in line.split()] for line in text.splitlines()])


def sums(tmp_path: Path, main: str, sizes: dict[str, int], tiles: np.ndarray) -> dict[int, float]:
    """Sums by what the lines of `main` say; tiles: bf16 numbers as fp32."""
    (tiles.view(np.uint32) >> 16).astype(np.uint16).tofile(tmp_path / "tiles")
    found: dict[int, float] = {}
    for distance, x in output(tmp_path, main, sizes, tmp_path / "tiles"):
        found[int(distance)] = found.get(int(distance), 0.0) + x
    return found


def check(found: dict[int, float], tiles: np.ndarray, rtol: float) -> None:
    """tiles: [steps, keys, queries]; distances are query minus key, with steps behind each other."""
    steps, keys, queries = tiles.shape
    whole = np.concatenate(list(tiles.astype(np.float64)), axis=1)
    for distance in range(1 - keys, steps * queries):
        diagonal = np.diagonal(whole, distance)
        assert abs(found.pop(distance) - diagonal.sum()) <= rtol * np.abs(diagonal).sum(), distance
    assert not any(found.values())


def bf16(*shape: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("cols", [64, 128])
def test_values_are_those_of_the_diagonals_of_their_elements(cols, tmp_path):
    rows = np.arange(64)[:, None]
    found = output(tmp_path, VALUES, {"COLS": cols, "SLOTS": diagonal_slots(cols)})
    assert (found == np.arange(cols) - rows % 16 + 15).all()


@pytest.mark.parametrize("cols", [64, 128])
def test_consumers_sum_the_diagonals_of_a_tile(cols, tmp_path):
    tile = bf16(1, 64, cols)
    found = sums(tmp_path, CONSUMERS, {"COLS": cols, "SUMS": sums_per_lane(cols)}, tile)
    check(found, tile, 2**-8)  # pairs are added in bf16
