"""The CUDA code of dropout, compiled as C++ and run on CPU threads: it drops the elements that reference.dropout_keep drops."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from tl_attention.kernels.cuda import source
from tl_attention.reference import dropout_keep, rounded_dropout

CUDA_BY_THREADS = """
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static thread_local struct { unsigned x; } threadIdx;
static std::barrier<> everyone(32);
static unsigned given[32];
static unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
  given[threadIdx.x % 32] = value;
  everyone.arrive_and_wait();
  value = given[threadIdx.x % 32 ^ distance];
  everyone.arrive_and_wait();
  return value;
}
static unsigned prmt(unsigned low, unsigned high, unsigned selector) {
  unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned bytes = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned digit = selector >> 4 * i & 15, byte = both >> 8 * (digit & 7) & 255;
    bytes |= (digit & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return bytes;
}
"""
# Dropout on a tile of ones: halves and floats are [128 threads, cols / 2]
TILES = """
template <bool rows_are_keys, int cols>
static void drop(unsigned short* halves, float* floats, int row, int col, int head, int offset, int k0, int k1, int below) {
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane)
    lanes.emplace_back([=] {
      for (int thread = 256 + lane; thread < 384; thread += 32) {
        threadIdx.x = thread;
        unsigned keeps[(cols + 63) / 64];
        tl_attention_draw<rows_are_keys, cols>(keeps, row, col, head, offset, k0, k1, below);
        tl_attention_drop_half<rows_are_keys, cols>(halves + (thread - 256) * cols / 2, keeps);
        tl_attention_drop_float<rows_are_keys, cols>(floats + (thread - 256) * cols / 2, keeps);
      }
    });
  for (auto& lane : lanes) lane.join();
}
extern "C" void tile(int rows_are_keys, int cols, unsigned short* halves, float* floats, int row, int col, int head, int offset,
                     int k0, int k1, int below) {
#define CASE(keys, n) if (rows_are_keys == keys && cols == n) drop<keys, n>(halves, floats, row, col, head, offset, k0, k1, below);
  CASE(0, 32) CASE(0, 48) CASE(0, 128) CASE(1, 32) CASE(1, 96) CASE(1, 128)
}
"""

# C++ for each line of PTX
PTX = {
    "prmt.b32": "bytes = prmt(low, high, selector);",
    "mov.u32 %0, %%laneid": "lane = threadIdx.x % 32;",
    "ld.global.nc.u32": "word = ((const int*)state)[half];",
}


@pytest.fixture(scope="module")
def tile(tmp_path_factory):
    if not (compiler := shutil.which("g++")):
        pytest.skip("g++, which runs the kernels' CUDA as C++, is not on PATH")
    text = CUDA_BY_THREADS + source("philox") + TILES
    for start, meaning in PTX.items():
        text, found = re.subn(r'asm(?: volatile)?\("' + re.escape(start) + ".*", meaning, text)
        assert found == 1
    path = tmp_path_factory.mktemp("dropout") / "tile.cpp"
    path.write_text(text)
    command = [compiler, "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", path.with_suffix(".so"), path], check=True)
    return ctypes.CDLL(str(path.with_suffix(".so"))).tile


@pytest.mark.parametrize("rows_are_keys", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5, 255 / 256])
def test_dropout_tile_matches_reference(tile, rows_are_keys, p):
    seed, offset, batch, heads = 2**63 - 12345678912345, 2**31 + 5, 2, 3
    keep = dropout_keep(torch.tensor([seed, offset]), batch, heads, 256, 256, p)
    for cols in (32, 96, 128) if rows_are_keys else (32, 48, 128):
        row, col, b, h = 64, 80, 1, 2
        halves, floats = torch.full((128, cols // 2), 0x3F80, dtype=torch.int16), torch.ones(128, cols // 2)
        tile(
            *(
                int(rows_are_keys),
                cols,
                ctypes.c_void_p(halves.data_ptr()),
                ctypes.c_void_p(floats.data_ptr()),
            ),
            *(
                row,
                col,
                b * heads + h,
                ctypes.c_int(offset),
                ctypes.c_int(seed & 0xFFFFFFFF),
                seed >> 32,
                rounded_dropout(p),
            ),
        )
        # Layout of wgmma accumulators, and of A in registers
        i, j = torch.arange(64)[:, None], torch.arange(cols)
        thread, number = i // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2
        expected = keep[b, h].mT if rows_are_keys else keep[b, h]
        expected = expected[row : row + 64, col : col + cols]
        assert torch.equal(halves[thread, number] != 0, expected), cols
        assert torch.equal(floats[thread, number] != 0, expected), cols
