// Diagonals of a tile: values and sums of what q_idx - kv_idx determines.
// A warp has 16 rows of a tile, so `cols` columns cross cols + 15 diagonals. Slot u is that of the elements whose column minus row is
// u - 15. A value is computed once per slot, by one lane, and read from shared memory. In the layout of wgmma lane 4 g + c has rows g and
// g + 8, columns 8 n + 2 c and 8 n + 2 c + 1 of each n: two rows and all n share 2 (cols / 8 + 1) slots.
#pragma once
#include <cuda_bf16.h>

// threadIdx.x, from which nvcc keeps nothing in registers through the loop over tiles
static __device__ __forceinline__ int tl_attention_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
// q_idx - kv_idx of a slot of this warp, in a tile of 64 rows whose first query and key these are
template <bool rows_are_keys>
static __device__ __forceinline__ int tl_attention_distance(int query, int key, int slot) {
  int row = tl_attention_thread() / 32 % 4 * 16;
  return rows_are_keys ? query - key - row + (slot - 15) : query - key + row - (slot - 15);
}
static __device__ __forceinline__ int tl_attention_slot_of_lane(int i) { return tl_attention_thread() % 32 + 32 * i; }
// Values of the slots of lanes to shared memory of this warp, twice: once from the first, once from the second on, so that a pair of
// slots is aligned in one of both. 16 floats between them put them in different banks
template <int slots>
static __device__ __forceinline__ void tl_attention_keep_diagonals(void* shared, const void* values) {
  float* first = (float*)shared + (threadIdx.x + threadIdx.y * blockDim.x) / 32 * (2 * slots + 16) + threadIdx.x % 32;
  float* second = first + slots + 15;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < slots / 32; ++i) first[32 * i] = second[32 * i] = ((const float*)values)[i];
  __syncwarp();
}
// Value of the diagonal of an element: `place` is 2 (n - b + 1) plus the parity of its column, where it has row g + 8 b
template <int slots>
static __device__ __forceinline__ float tl_attention_diagonal(const void* shared, int place) {
  int first = 7 + threadIdx.x % 4 * 2 - threadIdx.x % 32 / 4;
  const float* of_warp = (const float*)shared + (threadIdx.x + threadIdx.y * blockDim.x) / 32 * (2 * slots + 16);
  unsigned long long pair = *(const unsigned long long*)(of_warp + (first & 1 ? slots + 15 + first : first) + place / 2 * 8);
  return __uint_as_float(place % 2 ? pair >> 32 : pair);
}
// Sums of this thread by place, in pairs, of its bf16 elements of a tile of 64 rows
template <int cols>
static __device__ __forceinline__ void tl_attention_add_tile(void* x, const void* tile) {
  const __nv_bfloat162* pairs = (const __nv_bfloat162*)tile;  // of columns 2 c and 2 c + 1, in two rows of each 8 columns
  __nv_bfloat162* sums = (__nv_bfloat162*)x;
  sums[0] = pairs[1];
  sums[cols / 8] = pairs[cols / 4 - 2];
#pragma unroll
  for (int n = 1; n < cols / 8; ++n) sums[n] = __hadd2(pairs[2 * n - 2], pairs[2 * n + 1]);
}
// Sums of this thread by place, of its bf16 elements of a tile of 64 rows; rows from `rows` on count as 0
template <int cols>
static __device__ __forceinline__ void tl_attention_add_rows(void* x, const void* tile, int rows) {
  const unsigned* pairs = (const unsigned*)tile;  // of columns 2 c and 2 c + 1, in two rows of each 8 columns
  int thread = tl_attention_thread(), row = thread / 32 % 4 * 16 + thread % 32 / 4;
  bool is_row = row < rows, is_next = row + 8 < rows;
  unsigned even = is_row ? 0x10000 : 0, odd = is_row ? 0xffff0000 : 0;
  unsigned next_even = is_next ? 0x10000 : 0, next_odd = is_next ? 0xffff0000 : 0;
#pragma unroll
  for (int n = 0; n <= cols / 8; ++n) {
    unsigned next = n < cols / 8 ? pairs[2 * n + 1] : 0, same = n > 0 ? pairs[2 * n - 2] : 0;
    float low = __uint_as_float(next * next_even), high = __uint_as_float(next & next_odd);
    ((float*)x)[2 * n] = n == 0 ? low : low + __uint_as_float(same * even);
    ((float*)x)[2 * n + 1] = n == 0 ? high : high + __uint_as_float(same & odd);
  }
}
// Without the predicate of tl_attention_add, for sums that are rarely 0
static __device__ __forceinline__ void tl_attention_add_sum(void* sums, int offset, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"((float*)sums + offset), "f"(x) : "memory");
}
static __device__ __forceinline__ void tl_attention_add_to_place(void* x, int place, float number) { ((float*)x)[place] += number; }
// Sums along the diagonals of a warp's 16 rows, of slots tl_attention_summed_slot(i). by_block: sums of a lane and of the lane of the next
// row, for the slots of even columns
template <int cols>
static __device__ __forceinline__ void tl_attention_sum_blocks(void* sums, const float* by_block) {
  constexpr int pairs = (cols / 8 + 3) / 2, quads = (pairs + 1) / 2;
  int lane = threadIdx.x % 32, c = lane % 4;
  float by_pair[2 * quads];
  // Rows 4 further and c + 2 have the same slots: one of both lanes takes the even blocks, the other the odd ones
#pragma unroll
  for (int n = 0; n < 2 * quads; ++n) {
    float low = n < pairs ? by_block[n < pairs ? 2 * n : 0] : 0.f, high = n < pairs ? by_block[n < pairs ? 2 * n + 1 : 0] : 0.f;
    by_pair[n] = n < pairs ? (c & 2 ? high : low) + __shfl_xor_sync(0xffffffff, c & 2 ? low : high, 18) : 0.f;
  }
  int partner = (lane + (c & 1 ? -8 : 8) & 28) + (c ^ 1);
#pragma unroll
  for (int n = 0; n < quads; ++n) {
    float low = by_pair[2 * n], high = by_pair[2 * n + 1];
    ((float*)sums)[n] = (c & 1 ? high : low) + __shfl_sync(0xffffffff, c & 1 ? low : high, partner);
  }
}
// x: sums of this thread by place
template <int cols>
static __device__ __forceinline__ void tl_attention_sum_diagonals(void* sums, const void* x) {
  constexpr int blocks = cols / 8 + 2, pairs = (blocks + 1) / 2;  // of 8 slots
  int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const float* of_thread = (const float*)x;
  float by_block[2 * pairs];
  // The slots of a lane are 7 + 2 c + e - g modulo 8: even columns (e = 0), and odd ones of the row after
#pragma unroll
  for (int n = 0; n < 2 * pairs; ++n) {
    float even[2], odd[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      bool is_there = n - k >= 0 && n - k < blocks - 1;
      even[k] = is_there ? of_thread[2 * (n - k)] : 0.f;
      odd[k] = is_there ? of_thread[2 * (n - k) + 1] : 0.f;
    }
    float other = __shfl_sync(0xffffffff, 2 * c >= g ? odd[1] : odd[0], lane + 4 & 31);
    by_block[n] = (2 * c > g ? even[1] : even[0]) + other;
  }
  tl_attention_sum_blocks<cols>(sums, by_block);
}
// x: those of tl_attention_add_tile. One instruction selects the block of an even and of an odd column
template <int cols>
static __device__ __forceinline__ void tl_attention_sum_pairs(void* sums, const void* x) {
  constexpr int blocks = cols / 8 + 2, pairs = (blocks + 1) / 2;
  int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  unsigned select = (2 * c >= g ? 0x7600 : 0x3200) | (2 * c > g ? 0x54 : 0x10);
  const unsigned* of_thread = (const unsigned*)x;
  float by_block[2 * pairs];
#pragma unroll
  for (int n = 0; n < 2 * pairs; n += 2) {
    unsigned before = n > 0 ? of_thread[n - 1] : 0, low = n < blocks - 1 ? of_thread[n] : 0;
    unsigned high = n + 1 < blocks - 1 ? of_thread[n + 1] : 0;
    unsigned first = __byte_perm(low, before, select), second = __byte_perm(high, low, select);
    unsigned other = __shfl_sync(0xffffffff, __byte_perm(first, second, 0x7632), lane + 4 & 31);
    by_block[n] = __uint_as_float(first << 16) + __uint_as_float(other << 16);
    by_block[n + 1] = __uint_as_float(second << 16) + __uint_as_float(other & 0xffff0000);
  }
  tl_attention_sum_blocks<cols>(sums, by_block);
}
// Where all sums of a warp go to one element, their total in place of one of them, and 0 in place of the others. Without a branch
template <int count>
static __device__ __forceinline__ void tl_attention_merge_sums(void* sums, const void* targets) {
  float* x = (float*)sums;
  const int* target = (const int*)targets;
  int first = __shfl_sync(0xffffffff, target[0], 0);
  bool is_first = true;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    is_first &= target[i] == first;
    total += x[i];
  }
  bool are_one = __all_sync(0xffffffff, is_first);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
#pragma unroll
  for (int i = 0; i < count; ++i) x[i] = are_one ? (i == 0 && threadIdx.x % 32 == 0 ? total : 0.f) : x[i];
}
static __device__ __forceinline__ int tl_attention_summed_slot(int i) {
  int lane = tl_attention_thread() % 32, c = lane % 4;
  return (4 * i + 2 * (c & 1) + c / 2) * 8 + (7 + 2 * c - lane / 4 & 7);
}
