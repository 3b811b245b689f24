// Dense captured tensors: matrices [queries, keys], read and written by tiles that a warp owns.
// A tile in shared memory has one row per query. Rows that a warp reads at once are in different banks: rows have 16 bytes of padding, or,
// where they hold 16 keys of 2 bytes, every other four rows have their halves exchanged.
#pragma once
#include <cuda_bf16.h>

template <int bytes> struct tl_attention_words {};
template <> struct tl_attention_words<1> { typedef unsigned short type; };
template <> struct tl_attention_words<2> { typedef unsigned type; };
template <> struct tl_attention_words<4> { typedef uint2 type; };
template <> struct tl_attention_words<8> { typedef ulonglong2 type; };
// Tile with rows of `width` elements: bytes from row to row, and where in a row a chunk of 16 bytes is
template <typename Stored, bool rows_are_keys, int width> struct tl_attention_rows {
  static constexpr bool swaps = sizeof(Stored) == 2 && rows_are_keys;
  static constexpr int pitch = width * sizeof(Stored) + (swaps ? 0 : 16);
  static __device__ __forceinline__ int place(int row, int chunk) { return row * pitch + 16 * (swaps ? chunk ^ row / 4 % 2 : chunk); }
};
// Shared memory of this warp, which has so many bytes
static __device__ __forceinline__ char* tl_attention_of_warp(void* shared, int bytes) {
  return (char*)shared + (threadIdx.x + threadIdx.y * blockDim.x) / 32 * bytes;
}
// Starts to copy the rows of a warp from a matrix to shared memory: of a tile of 64 queries and `columns` keys, or transposed
template <typename Stored, bool rows_are_keys, int columns>
static __device__ __forceinline__ void tl_attention_prefetch(
    void* shared, int bytes_of_warp, const void* tensor, int base, int stride, int queries, int keys, int query, int key, bool is_needed) {
  constexpr int rows = rows_are_keys ? columns : 16, width = rows_are_keys ? 16 : columns;
  constexpr int chunk = 16 / sizeof(Stored), chunks = width / chunk;
  int lane = threadIdx.x % 32, of_warp = threadIdx.x / 32 % 4 * 16;
  unsigned to = (unsigned)__cvta_generic_to_shared(tl_attention_of_warp(shared, bytes_of_warp));
  query += rows_are_keys ? 0 : of_warp;
  key += rows_are_keys ? of_warp : 0;
  asm volatile("cp.async.wait_all;" ::: "memory");  // for zeros of a step past the last of the tile before
#pragma unroll
  for (int i = 0; i < rows * chunks / 32; ++i) {
    int row = (lane + 32 * i) / chunks, part = (lane + 32 * i) % chunks, first = key + part * chunk;
    bool is_inside = is_needed & first < keys;
    int offset = is_inside ? base + min(query + row, queries - 1) * stride + first : 0;
    unsigned place = to + tl_attention_rows<Stored, rows_are_keys, width>::place(row, part);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place),
                 "l"((const Stored*)tensor + offset), "r"(is_inside ? 16 : 0)
                 : "memory");
  }
}
static __device__ __forceinline__ void tl_attention_wait_for_prefetch() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}
// Reads the elements of a tile in the order of an accumulator, after the prefetch
template <typename Stored, bool rows_are_keys, int columns>
static __device__ __forceinline__ void tl_attention_fetch_shared(void* tile, void* shared, int bytes_of_warp) {
  typedef typename tl_attention_words<sizeof(Stored)>::type Pair;
  typedef tl_attention_rows<Stored, rows_are_keys, rows_are_keys ? 16 : columns> Rows;
  constexpr int pitch = Rows::pitch;
  const char* from = tl_attention_of_warp(shared, bytes_of_warp);
  if constexpr (sizeof(Stored) == 2 && rows_are_keys) {
    // Four transposed blocks of 8 x 8 at a time: keys 0 to 7 and 8 to 15 of 16 queries. Not for rows of queries: the forward took 3 to 10 %
    // longer with it than with a load per pair (biases of 384 to 2048 keys, H200, 2026-11-23)
    int lane = threadIdx.x % 32;
    unsigned at = (unsigned)__cvta_generic_to_shared(from) + Rows::place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < columns / 16; ++n) {
      unsigned* to = (unsigned*)tile + 4 * n;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at + n * 16 * pitch) : "memory");
    }
    return;
  }
  int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < columns / 4; ++n) {
    int below = n % 2 * 8, right = n / 2 * 8;
    if (rows_are_keys) {
      const char* at = from + (row + below) * sizeof(Stored);
      ((Stored*)tile)[2 * n] = *(const Stored*)(at + (column + right) * pitch);
      ((Stored*)tile)[2 * n + 1] = *(const Stored*)(at + (column + right + 1) * pitch);
    } else {
      ((Pair*)tile)[n] = *(const Pair*)(from + (row + below) * pitch + (column + right) * sizeof(Stored));
    }
  }
}
// The same from global memory. Rows past the end are the last
template <typename Stored, bool rows_are_keys, int columns>
static __device__ __forceinline__ void tl_attention_fetch(
    void* tile, const void* tensor, int base, int stride, int queries, int keys, int query, int key) {
  typedef typename tl_attention_words<sizeof(Stored)>::type Pair;
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const Stored* from = (const Stored*)tensor + base;
#pragma unroll
  for (int n = 0; n < columns / 4; ++n) {
    int below = n % 2 * 8, right = n / 2 * 8;
    if (rows_are_keys) {
      const Stored* at = from + min(key + row + below, keys - 1);
      ((Stored*)tile)[2 * n] = __ldg(at + min(query + column + right, queries - 1) * stride);
      ((Stored*)tile)[2 * n + 1] = __ldg(at + min(query + column + right + 1, queries - 1) * stride);
    } else {
      const Stored* at = from + min(query + row + below, queries - 1) * stride;
      ((Pair*)tile)[n] = __ldg((const Pair*)(at + min(key + column + right, keys - 1 & ~1)));
    }
  }
}
template <typename Stored, typename T>
static __device__ __forceinline__ T tl_attention_fetched(const void* tile, int n) { return T(((const Stored*)tile)[n]); }
static __device__ __forceinline__ void tl_attention_pair(float* to, float x, float y) { *(float2*)to = make_float2(x, y); }
static __device__ __forceinline__ void tl_attention_pair(__nv_bfloat16* to, float x, float y) {
  *(__nv_bfloat162*)to = __floats2bfloat162_rn(x, y);
}
static __device__ __forceinline__ void tl_attention_pair(__nv_bfloat16* to, __nv_bfloat16 x, __nv_bfloat16 y) {
  *(__nv_bfloat162*)to = __nv_bfloat162(x, y);
}
// Stores a tile [64 rows, columns] in the order of an accumulator to out [batch, heads, rows, width], up to the last row and column,
// through shared memory, so that whole sectors are written. A row of out is a multiple of 16 bytes
template <typename Stored, typename Given, int columns>
static __device__ __forceinline__ void tl_attention_store_tile(
    void* out, const void* tile, void* shared, int bytes_of_warp, int batch, int head, int row_of_tile, int column, int heads, int rows,
    int width, int last) {
  constexpr int chunk = 16 / sizeof(Stored), chunks = columns / chunk, pitch = columns * sizeof(Stored) + 16;
  int lane = threadIdx.x % 32, first_row = row_of_tile + threadIdx.x / 32 % 4 * 16;
  char* staged = tl_attention_of_warp(shared, bytes_of_warp);
  __syncwarp();
#pragma unroll
  for (int n = 0; n < columns / 4; ++n) {
    const Given* x = (const Given*)tile + 2 * n;
    Stored* to = (Stored*)(staged + (lane / 4 + n % 2 * 8) * pitch) + lane % 4 * 2 + n / 2 * 8;
    tl_attention_pair(to, x[0], x[1]);
  }
  __syncwarp();
  Stored* to = (Stored*)out + ((long long)(batch * heads + head) * rows + first_row) * width + column;
#pragma unroll
  for (int i = 0; i < 16 * chunks / 32; ++i) {
    int row = (lane + 32 * i) / chunks, part = (lane + 32 * i) % chunks;
    uint4 x = *(const uint4*)(staged + row * pitch + part * 16);
    bool is_inside = first_row + row < rows & column + part * chunk < last;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(
                     to + (long long)row * width + part * chunk),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(int(is_inside))
                 : "memory");
  }
}
