// Items of fp32 inputs, and their bf16 terms, see input_terms.py, which fills in ITEM_ELEMENTS and STAGE_BYTES.
// Item number -> rows of one head: those of the first input, then those of the second, one head after another.
#pragma once

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
      asm volatile("fence.acq_rel.gpu;\n red.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(progress + 1 + rows.head) : "memory");
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
