"""Splitting of fp32 inputs beside attention: warps that have no other work make the bf16 parts that products.py multiplies.

These are the inputs that many CTAs read: K and V of a forward, Q and dO of a backward. split_tile.py splits the others.
The rows of the inputs are cut into items, ordered by heads as the tiles are. first_parts.py makes the first items. The idle warps of the
attention kernel draw the others one by one, and count those of each head that are done. A producer waits for the heads of its tile.
A warp that makes parts never waits, so whatever CTAs run, all items are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_attention.kernels.tiles import strided
from tl_attention.part_configs import (
    ITEM_ELEMENTS,
    MAKERS,
    STAGE_BYTES,
    part_items,
    staging_bytes,
)
from tl_attention.problem import AttnProblem

# Item number -> rows of one head: those of the first input, then those of the second, one head after another
MAKE_PARTS = """
#include <tl_templates/cuda/common.h>
struct tl_attention_input {
  float const *x;
  int64_t per_batch, per_row, per_head;
  int rows, heads, columns;
  char *parts;  // bf16 [batch, rows, heads, parts * width]
};
TL_DEVICE tl_attention_input tl_attention_input_of(void const *x, int64_t per_batch, int64_t per_row, int64_t per_head, int rows,
                                                   int heads, int columns, void *parts) {
  return {(float const *)x, per_batch, per_row, per_head, rows, heads, columns, (char *)parts};
}
struct tl_attention_rows {
  float const *x;
  int64_t per_row;
  char *parts;
  int bytes_per_row, rows, columns, head;  // head: of all batch entries
};
TL_DEVICE int tl_attention_lane() {
  int lane;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
  return lane;
}
template <int width> TL_DEVICE int tl_attention_items_per_head(tl_attention_input input) {
  return 2 * ((input.rows + ITEM_ELEMENTS / width - 1) / (ITEM_ELEMENTS / width));
}
template <int width, int parts>
TL_DEVICE tl_attention_rows tl_attention_locate(unsigned item, tl_attention_input first, tl_attention_input second) {
  asm volatile("" : "+r"(first.rows), "+r"(first.heads));  // or nvcc keeps divisors and reciprocals in registers
  unsigned per_head = tl_attention_items_per_head<width>(first), number = item / per_head, b = number / first.heads;
  unsigned head = number - b * first.heads;
  item -= number * per_head;
  tl_attention_input input = first;
  if (item >= per_head / 2) item -= per_head / 2, input = second;
  unsigned row = item * (ITEM_ELEMENTS / width);
  int bytes_per_row = first.heads * (2 * parts * width);
  return {input.x + b * input.per_batch + row * input.per_row + head * input.per_head, input.per_row,
          input.parts + (int64_t(b) * first.rows + row) * bytes_per_row + head * (2 * parts * width), bytes_per_row,
          min(first.rows - int(row), ITEM_ELEMENTS / width), input.columns, int(number)};
}
// A lane loads 16 bytes twice per stage to shared memory, and reads what it loaded itself, so lanes do not wait for each other
template <int width, int parts, int stages> TL_DEVICE void tl_attention_split(tl_attention_rows rows, void *memory) {
  constexpr int lanes = width / 4, together = 32 / lanes, per_stage = STAGE_BYTES / (4 * width);  // lanes per row, rows per warp and stage
  int lane = tl_attention_lane(), col = lane % lanes * 4, stage = 0;
  uint32_t warp;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(warp));  // or nvcc keeps the address in a register
  uint32_t tile = smem_ptr_to_uint(memory) + (warp / 32 + 3) % 4 * (stages * STAGE_BYTES) + lane * 16;
  rows.x += lane / lanes * rows.per_row + col;
  rows.parts += lane / lanes * rows.bytes_per_row + col * 2;
  auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < per_stage / together; ++i) {
      if (first + lane / lanes + i * together < rows.rows)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(tile + stage + i * 512), "l"(rows.x), "r"(col < rows.columns ? 16 : 0) : "memory");
      rows.x += together * rows.per_row;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    stage = stage == (stages - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
  };
#pragma unroll 1
  for (int i = 0; i < stages; ++i) load(i * per_stage);
#pragma unroll 1
  for (int first = 0; first < rows.rows; first += per_stage) {
    float4 numbers[per_stage / together];
    asm volatile("cp.async.wait_group %0;" :: "n"(stages - 1) : "memory");
#pragma unroll
    for (int i = 0; i < per_stage / together; ++i)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(numbers[i].x), "=f"(numbers[i].y), "=f"(numbers[i].z), "=f"(numbers[i].w)
                   : "r"(tile + stage + i * 512) : "memory");
    load(first + stages * per_stage);
#pragma unroll
    for (int i = 0; i < per_stage / together; ++i) {
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        uint32_t low, high;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(numbers[i].y), "f"(numbers[i].x));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(numbers[i].w), "f"(numbers[i].z));
        numbers[i].x -= __uint_as_float(low << 16);
        numbers[i].y -= __uint_as_float(low & 0xffff0000u);
        numbers[i].z -= __uint_as_float(high << 16);
        numbers[i].w -= __uint_as_float(high & 0xffff0000u);
        if (first + lane / lanes + i * together < rows.rows)
          *reinterpret_cast<uint2 *>(rows.parts + 2 * part * width) = make_uint2(low, high);
      }
      rows.parts += together * rows.bytes_per_row;
    }
  }
}
TL_DEVICE int tl_attention_draw(int *progress) {
  int item = 0;
  if (tl_attention_lane() == 0) item = atomicAdd(progress, 1);
  return item;
}
template <int width, int parts, int stages>
TL_DEVICE void tl_attention_make_parts(int *progress, void *memory, int stop, int batch, tl_attention_input first,
                                       tl_attention_input second) {
  auto items = [&] {  // not kept in a register
    auto input = first;
    asm volatile("" : "+r"(input.rows));
    return batch * first.heads * tl_attention_items_per_head<width>(input);
  };
  stop = min(stop, items());
  int drawn = tl_attention_draw(progress);
#pragma unroll 1
  for (int item; (item = __shfl_sync(~0u, drawn, 0)) < items();) {
    drawn = item < stop ? tl_attention_draw(progress) : INT_MAX;
    tl_attention_rows rows = tl_attention_locate<width, parts>(item, first, second);
    tl_attention_split<width, parts, stages>(rows, memory);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads them
    __syncwarp();
    if (tl_attention_lane() == 0)
      asm volatile("fence.acq_rel.gpu;\\n red.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(progress + 1 + rows.head) : "memory");
  }
}
template <int width, int parts, int stages>
TL_DEVICE void tl_attention_make_first_parts(int *progress, void *memory, int heads, int batch, tl_attention_input first,
                                             tl_attention_input second) {
  int per_head = tl_attention_items_per_head<width>(first);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i <= batch * first.heads; i += gridDim.x * blockDim.x)
    progress[i] = i == 0 ? heads * per_head : i <= heads ? per_head : 0;
  for (int item = blockIdx.x * 4 + threadIdx.x / 32; item < heads * per_head; item += gridDim.x * 4)
    tl_attention_split<width, parts, stages>(tl_attention_locate<width, parts>(item, first, second), memory);
}
template <int width>
TL_DEVICE void tl_attention_wait_for_parts(int const *progress, int head, tl_attention_input first) {
  int done, wanted = tl_attention_items_per_head<width>(first);
  do {  // all lanes, as in tl_attention_merge_piece
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(progress + 1 + head) : "memory");
  } while (__any_sync(0xffffffff, done < wanted));
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
"""
for name, number in (("ITEM_ELEMENTS", ITEM_ELEMENTS), ("STAGE_BYTES", STAGE_BYTES)):
    MAKE_PARTS = MAKE_PARTS.replace(name, str(number))


@dataclass(frozen=True)
class InputParts:
    """Two fp32 inputs of a launch that have one shape but for their columns, and the tensors of their parts.

    Args:
        first, second: pairs of an fp32 tensor [batch, seqlen, heads, columns <= width] and its parts [batch, seqlen, heads, parts * width]:
            K and V of a forward, Q and dO of a backward.
        Progress: int32 [1 + batch * heads], set by first_parts.py: items drawn, then items done per head.
        stages: tiles that a warp loads ahead.
        tiles_ahead: see make_share().
        warps: warps per CTA that make parts.
    """

    problem: AttnProblem
    first: tuple[Any, Any]
    second: tuple[Any, Any]
    Progress: Any
    stages: int
    tiles_ahead: Any = None
    warps: int = MAKERS

    @T.inline
    def make(self, function, number):
        """Call a function of MAKE_PARTS that makes parts."""
        memory = T.alloc_shared([staging_bytes(self.stages, self.warps) // 4], "float32")
        T.evaluate(
            T.call_extern(
                "handle",
                f"tl_attention_{function}<{self.problem.head_dim}, {self.problem.parts}, {self.stages}>",
                T.address_of(self.Progress[0]),
                T.address_of(memory[0]),
                number,
                self.first[0].shape[0],
                _input_of(*self.first),
                _input_of(*self.second),
            )
        )

    def make_share(self, cta: Any, ctas: Any) -> Any:
        """Make parts until those of the first cta + tiles_ahead of ctas tiles have been drawn, if tiles have equal shares of them."""
        batch, seqlen, heads, _ = self.first[0].shape
        items = part_items(self.problem.head_dim, batch * heads, seqlen)
        return self.make("make_parts", T.ceildiv(items, ctas) * (cta + self.tiles_ahead))

    def make_first(self, heads: Any) -> Any:
        """Make the items of the first heads and set Progress; by all CTAs of a kernel."""
        return self.make("make_first_parts", heads)

    def wait(self, batch: Any, head: Any) -> Any:
        """Wait for the parts of a head; called by a warp before it loads them by TMA."""
        head = batch * self.first[0].shape[2] + head
        name = f"tl_attention_wait_for_parts<{self.problem.head_dim}>"
        return T.evaluate(
            T.call_extern("handle", name, T.address_of(self.Progress[0]), head, _input_of(*self.first))
        )


def _input_of(X: Any, parts: Any) -> Any:
    place = (0, 0, 0, 0)
    sizes = *X.strides[:3], *X.shape[1:]
    return T.call_extern(
        "handle", "tl_attention_input_of", T.address_of(X[place]), *sizes, T.address_of(parts[place])
    )


def input_argument(name: str, batch: Any, seqlen: Any, heads: Any) -> Any:
    """Tensor argument of an fp32 input."""
    return strided(name, [batch, seqlen, heads, T.dynamic(f"columns_{name}")], "float32")


@dataclass(frozen=True)
class InputArguments:
    """Types of the last arguments of a kernel that makes parts, see InputParts; False for arguments that a kernel lacks."""

    first: Any = False
    second: Any = False
    Progress: Any = False
    tiles_ahead: Any = False

    @classmethod
    def of(cls, batch: Any, seqlen: Any, heads: Any, makes_parts: bool) -> InputArguments:
        if not makes_parts:
            return cls()
        inputs = (input_argument(name, batch, seqlen, heads) for name in ("first_input", "second_input"))
        return cls(*inputs, T.Tensor([T.dynamic("counters")], "int32"), T.int32)
