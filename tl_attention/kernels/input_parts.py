"""Splitting of fp32 inputs beside attention: warps that have no other work make the bf16 parts that products.py multiplies.

The rows of the inputs are cut into items, ordered by heads as the tiles are. first_parts.py makes the first items. The idle warps of the
attention kernel draw the others one by one, and count those of each head that are done. A producer waits for the heads of its tile.
A warp that makes parts never waits, so whatever CTAs run, all items are made. The parts of a head are read soon after they are
written, from the L2.
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

# Item number -> rows of one head. Of each key head come the items of K, of V, then those of its query heads, one after another. `progress`
# has the number of items drawn, then of items done per query head, then per key head
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
  int bytes_per_row, rows, columns, counter;
};
TL_DEVICE int tl_attention_lane() {
  int lane;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
  return lane;
}
template <int width> TL_DEVICE int tl_attention_items(tl_attention_input input) {
  return (input.rows + ITEM_ELEMENTS / width - 1) / (ITEM_ELEMENTS / width);
}
template <int width, typename... Inputs>
TL_DEVICE int tl_attention_items_per_key_head(tl_attention_input k, tl_attention_input v, tl_attention_input q, Inputs... more) {
  return 2 * tl_attention_items<width>(k) + q.heads / k.heads * (1 + (int)sizeof...(more)) * tl_attention_items<width>(q);
}
template <int width, int parts, typename... Inputs>
TL_DEVICE tl_attention_rows tl_attention_locate(unsigned item, int batch, tl_attention_input k, tl_attention_input v, tl_attention_input q,
                                                Inputs... more) {
  asm volatile("" : "+r"(k.rows), "+r"(k.heads), "+r"(q.rows), "+r"(q.heads));  // or nvcc keeps divisors and reciprocals in registers
  unsigned items_k = tl_attention_items<width>(k), items_q = tl_attention_items<width>(q), all_heads = batch * q.heads;
  unsigned per_key_head = tl_attention_items_per_key_head<width>(k, v, q, more...), group = unsigned(q.heads) / unsigned(k.heads);
  unsigned head = item / per_key_head, counter = 1 + all_heads + head;
  item -= head * per_key_head;
  tl_attention_input input = k;
  if (item >= 2 * items_k) {
    constexpr int inputs = 1 + sizeof...(more);
    item -= 2 * items_k;
    unsigned in_group = item / (inputs * items_q), number = (item -= in_group * inputs * items_q) / items_q;
    head = head * group + in_group, counter = 1 + head;
    item -= number * items_q;
    input = q;
    unsigned i = 0;
    ((++i == number ? void(input = more) : void()), ...);
  } else if (item >= items_k) {
    item -= items_k;
    input = v;
  }
  unsigned b = head / input.heads, first = item * (ITEM_ELEMENTS / width);
  head -= b * input.heads;
  int bytes_per_row = input.heads * (2 * parts * width);
  return {input.x + b * input.per_batch + first * input.per_row + head * input.per_head, input.per_row,
          input.parts + (int64_t(b) * input.rows + first) * bytes_per_row + head * (2 * parts * width), bytes_per_row,
          min(input.rows - int(first), ITEM_ELEMENTS / width), input.columns, int(counter)};
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
template <int width, int parts, int stages, typename... Inputs>
TL_DEVICE void tl_attention_make_parts(int *progress, void *memory, int stop, int batch, tl_attention_input k, Inputs... inputs) {
  auto items = [&] {  // not kept in a register
    auto keys = k;
    asm volatile("" : "+r"(keys.rows));
    return batch * k.heads * tl_attention_items_per_key_head<width>(keys, inputs...);
  };
  stop = min(stop, items());
  int drawn = tl_attention_draw(progress);
#pragma unroll 1
  for (int item; (item = __shfl_sync(~0u, drawn, 0)) < items();) {
    drawn = item < stop ? tl_attention_draw(progress) : INT_MAX;
    tl_attention_rows rows = tl_attention_locate<width, parts>(item, batch, k, inputs...);
    tl_attention_split<width, parts, stages>(rows, memory);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads them
    __syncwarp();
    if (tl_attention_lane() == 0)
      asm volatile("fence.acq_rel.gpu;\\n red.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(progress + rows.counter) : "memory");
  }
}
template <int width, int parts, int stages, typename... Inputs>
TL_DEVICE void tl_attention_make_first_parts(int *progress, void *memory, int key_heads, int batch, tl_attention_input k,
                                             tl_attention_input v, tl_attention_input q, Inputs... more) {
  int per_key_head = tl_attention_items_per_key_head<width>(k, v, q, more...);
  int heads = batch * q.heads, per_head = (1 + (int)sizeof...(more)) * tl_attention_items<width>(q), group = q.heads / k.heads;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i <= heads + batch * k.heads; i += gridDim.x * blockDim.x)
    progress[i] = i == 0           ? key_heads * per_key_head
                  : i <= heads     ? (i <= key_heads * group ? per_head : 0)
                  : i <= heads + key_heads ? 2 * tl_attention_items<width>(k)
                                   : 0;
  for (int item = blockIdx.x * 4 + threadIdx.x / 32; item < key_heads * per_key_head; item += gridDim.x * 4)
    tl_attention_split<width, parts, stages>(tl_attention_locate<width, parts>(item, batch, k, v, q, more...), memory);
}
template <int width, typename... Inputs>
TL_DEVICE void tl_attention_wait_for_parts(int const *progress, int head, int key_head, int batch, tl_attention_input k,
                                           tl_attention_input v, tl_attention_input q, Inputs... more) {
  int wanted_q = (1 + (int)sizeof...(more)) * tl_attention_items<width>(q), wanted_k = 2 * tl_attention_items<width>(k);
  int const *of_queries = progress + 1 + head, *of_keys = progress + 1 + batch * q.heads + key_head;
  int done_q, done_k;
  do {  // all lanes, as in tl_attention_merge_piece
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done_q) : "l"(of_queries) : "memory");
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done_k) : "l"(of_keys) : "memory");
  } while (__any_sync(0xffffffff, done_q < wanted_q || done_k < wanted_k));
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
"""
for name, number in (("ITEM_ELEMENTS", ITEM_ELEMENTS), ("STAGE_BYTES", STAGE_BYTES)):
    MAKE_PARTS = MAKE_PARTS.replace(name, str(number))


@dataclass(frozen=True)
class InputParts:
    """fp32 inputs of a launch and the tensors of their parts.

    Args:
        inputs: pairs of an fp32 tensor [batch, seqlen, heads, columns <= width] and its parts [batch, seqlen, heads, parts * width]: K, V,
            Q, and in a backward dO.
        Progress: int32 [1 + batch * (heads + heads_kv)], set by first_parts.py: see MAKE_PARTS.
        stages: tiles that a warp loads ahead.
        warps: warps per CTA that make parts.
        tiles_ahead: see make_share().
    """

    problem: AttnProblem
    inputs: tuple[tuple[Any, Any], ...]
    Progress: Any
    stages: int
    warps: int = MAKERS
    tiles_ahead: Any = None

    def call(self, function: str, template: tuple[int, ...], *arguments: Any) -> Any:
        """Call of a function of MAKE_PARTS."""
        (K, _), *_ = self.inputs
        return T.call_extern(
            "handle",
            f"tl_attention_{function}<{', '.join(map(str, template))}>",
            T.address_of(self.Progress[0]),
            *arguments,
            K.shape[0],
            *(_input_of(X, parts) for X, parts in self.inputs),
        )

    @property
    def items(self) -> Any:
        """Number of items."""
        (K, _), _, (Q, _), *more = self.inputs
        batch, seqlen_k, heads_kv, _ = K.shape
        _, seqlen_q, heads, _ = Q.shape
        heads_per_kv = T.truncdiv(heads, heads_kv)
        per_key_head = part_items(self.problem.head_dim, heads_per_kv, seqlen_q, seqlen_k, bool(more))
        return batch * heads_kv * per_key_head

    @T.inline
    def make(self, function, number):
        """Call a function of MAKE_PARTS that makes parts."""
        memory = T.alloc_shared([staging_bytes(self.stages, self.warps) // 4], "float32")
        template = self.problem.head_dim, self.problem.parts, self.stages
        T.evaluate(self.call(function, template, T.address_of(memory[0]), number))

    def make_share(self, cta: Any, ctas: Any) -> Any:
        """Make parts until those of the first cta + tiles_ahead of ctas tiles have been drawn, if tiles have equal shares of them."""
        stop = T.ceildiv(self.items, ctas) * (cta + self.tiles_ahead)
        return self.make("make_parts", stop)

    def make_first(self, key_heads: Any) -> Any:
        """Make the items of the first key heads and set Progress; by all CTAs of a kernel."""
        return self.make("make_first_parts", key_heads)

    def wait(self, batch: Any, head: Any, kv_head: Any) -> Any:
        """Wait for the parts of a query head and of a key head; called by a warp before it loads them by TMA."""
        (K, _), _, (Q, _), *_ = self.inputs
        heads = batch * Q.shape[2] + head, batch * K.shape[2] + kv_head
        return T.evaluate(self.call("wait_for_parts", (self.problem.head_dim,), *heads))


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
    """Types of the last arguments of a kernel that makes parts; False for arguments that a kernel lacks.

    Args:
        Q, K, V, Progress: see InputParts. dO: that of a backward.
        tiles_ahead: see InputParts.make_share.
    """

    Q: Any = False
    K: Any = False
    V: Any = False
    dO: Any = False
    Progress: Any = False
    tiles_ahead: Any = False

    @classmethod
    def of(
        cls,
        batch: Any,
        seqlen_q: Any,
        heads: Any,
        seqlen_k: Any,
        heads_kv: Any,
        makes_parts: bool,
        backward: bool = False,
    ) -> InputArguments:
        if not makes_parts:
            return cls()
        return cls(
            input_argument("q_input", batch, seqlen_q, heads),
            input_argument("k_input", batch, seqlen_k, heads_kv),
            input_argument("v_input", batch, seqlen_k, heads_kv),
            input_argument("do_input", batch, seqlen_q, heads) if backward else False,
            T.Tensor([T.dynamic("counters")], "int32"),
            T.int32,
        )
