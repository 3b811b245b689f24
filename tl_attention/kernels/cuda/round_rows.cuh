// Rounding of rows of sums in the order of RowMajorBlocks.
// dq_sinks/round.py fills in PAIR, bf16x2 or f16x2, BLOCKS_OF_ROWS and ROUND_STAGE_BYTES.
#pragma once

#include <tl_templates/cuda/copy_sm90.h>
TL_DEVICE void tl_attention_await_count(int const *counter, int wanted) {
  int count;
  while (true) {  // all lanes, or nvcc takes the warp for diverged
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    if (__all_sync(0xffffffff, count >= wanted)) break;
    __nanosleep(100);
  }
}
TL_DEVICE void tl_attention_await_rounded(int const *counter, int wanted) {
  tl_attention_await_count(counter, wanted);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds to the zeros
}
TL_DEVICE void tl_attention_count(int *counter, int number) {
  asm volatile("fence.acq_rel.gpu;\n red.relaxed.gpu.global.add.s32 [%0], %1;" :: "l"(counter), "r"(number) : "memory");
}
struct tl_attention_gradient {
  char *x;
  int64_t per_batch, per_row, per_head;  // bytes
  int rows, heads, columns;
};
TL_DEVICE tl_attention_gradient tl_attention_gradient_of(void *x, int64_t per_batch, int64_t per_row, int64_t per_head, int rows,
                                                         int heads, int columns) {
  return {(char *)x, 2 * per_batch, 2 * per_row, 2 * per_head, rows, heads, columns};
}
TL_DEVICE uint32_t tl_attention_pair(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.PAIR.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
TL_DEVICE uint4 tl_attention_round_eight(uint32_t place, float scale) {
  float4 left, right;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(left.x), "=f"(left.y), "=f"(left.z), "=f"(left.w) : "r"(place) : "memory");
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + 16];"
               : "=f"(right.x), "=f"(right.y), "=f"(right.z), "=f"(right.w) : "r"(place) : "memory");
  return make_uint4(tl_attention_pair(left.x * scale, left.y * scale), tl_attention_pair(left.z * scale, left.w * scale),
                    tl_attention_pair(right.x * scale, right.y * scale), tl_attention_pair(right.z * scale, right.w * scale));
}
// rows: of dQ. memory: of the warp, stages * ROUND_STAGE_BYTES. A step is 16 rows of 32 columns. A lane rounds 8 columns of one row, twice
template <int width, int stages>
TL_DEVICE void tl_attention_round_rows(float *sums, char *rows, int64_t per_row, int rows_left, int columns, float scale, uint32_t memory) {
  int lane, steps = BLOCKS_OF_ROWS * (width / 32);
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
  sums += 4 * lane;
  rows_left -= lane % 16;
  columns -= lane / 16 * 8;
  rows += lane % 16 * per_row + lane / 16 * 16;
  auto load = [&](float const *source, int step) {
    uint32_t place = memory + step % stages * ROUND_STAGE_BYTES + lane * 16;
    if (step < steps)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place + i * 512), "l"(source + i * 128) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int step = 0; step < stages - 1; ++step) load(sums + step * 512, step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" :: "n"(stages - 2) : "memory");
    __syncwarp();  // all lanes have loaded this step, and read the one before
    load(sums + (stages - 1) * 512, step + stages - 1);
    uint32_t place = memory + step % stages * ROUND_STAGE_BYTES + lane * 32;
    uint4 first = tl_attention_round_eight(place, scale), second = tl_attention_round_eight(place + 1024, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %1, %1, %1}, %2;"
                   :: "l"(sums + i * 128), "f"(0.0f), "l"(tl::CacheHintSm90::EVICT_LAST) : "memory");
    int column = step % (width / 32) * 32;
    if (rows_left > 0 && column < columns) __stcs(reinterpret_cast<uint4 *>(rows), first);  // not read again
    if (rows_left > 0 && column + 16 < columns) __stcs(reinterpret_cast<uint4 *>(rows + 32), second);
    rows += 64;
    if (column == width - 32) {
      rows += 16 * per_row - 2 * width;
      rows_left -= 16;
    }
    sums += 512;
  }
}
TL_DEVICE int tl_attention_draw_rows(int *progress) {
  int number = 0;
  if (threadIdx.x % 32 == 0)
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(number) : "l"(progress) : "memory");
  return number;
}
