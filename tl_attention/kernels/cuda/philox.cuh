// Dropout by Philox-4x32 with 7 rounds (Salmon et al. 2011); reference.dropout_keep defines which bits decide on which element.
// A lane holds rows r and r + 8 of its warp's 16 (r = lane / 4), and columns 2t and 2t + 1 of every 8 (t = lane % 4). Two Philox calls
// decide on 32 elements of a block of 16 x 16; 4 lanes hold 8 of them each. For 4 blocks side by side each of the 4 lanes draws for one
// block, and two shuffles give each lane its 8 bits of all 4 blocks.
#pragma once

static __device__ __forceinline__ uint4 tl_attention_philox(uint4 c, unsigned k0, unsigned k1) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    unsigned long long a = 0xD2511F53ull * c.x, b = 0xCD9E8D57ull * c.z;
    c = make_uint4(unsigned(b >> 32) ^ c.y ^ k0, unsigned(b), unsigned(a >> 32) ^ c.w ^ k1, unsigned(a));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}
// Byte i of the result is byte s & 7 of high:low, where s is the i-th hex digit of the selector; with s & 8 its sign bit, 8 times
static __device__ __forceinline__ unsigned tl_attention_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}
// 32 bits of rng_state. Volatile, like the lane, so that a backward by keys holds nothing derived from them over its steps
static __device__ __forceinline__ int tl_attention_random_state(const void* state, int half) {
  int word;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"((const int*)state + half));
  return word;
}
static __device__ __forceinline__ unsigned tl_attention_lane() {
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// keeps[g]: one bit, 1 to keep, per element that a lane holds of columns 64 g .. 64 g + 63 of a tile of 64 rows
template <bool rows_are_keys, int cols>
static __device__ __forceinline__ void tl_attention_draw(
    unsigned* keeps, int row, int col, int head, int offset, int k0, int k1, int drop_below) {
  unsigned lane = rows_are_keys ? tl_attention_lane() : threadIdx.x % 32, r = lane / 4, t = lane % 4;
  unsigned row_block = row / 16 + threadIdx.x / 32 % 4, one_of_4 = rows_are_keys ? r % 4 : t % 2 * 2 + r % 2;
  // One exchange of halves, one of bytes (of nibbles where rows are keys); a lane keeps one part and receives the other
  bool high_half = rows_are_keys ? r & 2 : t & 1, high = r & 1;
  unsigned halves = high_half ? 0x3276 : 0x5410, bytes = high ? 0x3715 : 0x6240;
  unsigned nibbles = high ? 0xF0F0F0F0 : 0x0F0F0F0F, turn = high ? 28 : 4;
#pragma unroll
  for (int g = 0; g < (cols + 63) / 64; ++g) {
    unsigned col_block = col / 16 + 4 * g + one_of_4;
    unsigned query = rows_are_keys ? col_block * 4 + t : row_block * 4 + r / 2;
    unsigned key = rows_are_keys ? row_block * 4 + r / 4 * 2 : col_block * 4 + t / 2 * 2;
    uint4 x = tl_attention_philox(make_uint4(query, key, head, offset), k0, k1);
    uint4 y = tl_attention_philox(make_uint4(query, key + 1, head, offset), k0, k1);
    unsigned words[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}, keep = ~0u;
    // words[i] holds bit i of 32 numbers; keep: whether each is at least drop_below
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      unsigned open = (drop_below >> i & 1) - 1u;
      keep = words[i] & keep | open & (words[i] | keep);
    }
    keep = tl_attention_bytes(keep, __shfl_xor_sync(~0u, keep, rows_are_keys ? 8 : 1), halves);
    unsigned other = __shfl_xor_sync(~0u, keep, 4);
    keeps[g] = rows_are_keys ? keep & nibbles | (other << turn | other >> 32 - turn) & ~nibbles
                             : tl_attention_bytes(keep, other, bytes);
  }
}
// Mask of the n-th pair of elements that a lane holds side by side: ones to keep, 16 bits for each, or 32 for one of the pair
template <bool rows_are_keys>
static __device__ __forceinline__ unsigned tl_attention_mask(const unsigned* keeps, int n, int of_both = -1) {
  unsigned keep = keeps[n / 16];
  int block = n / 4 % 4, bit = n / 2 % 2 | n % 2 << 1;  // column half, row half of the block
  if (rows_are_keys) bit = n / 2 % 2 << 1 | n % 2;
  unsigned low, high, first, second;
  if (rows_are_keys) {
    low = high = keep << 7 - (block % 2 * 4 + bit);
    first = block / 2 * 2, second = first + 1;
  } else {
    low = keep << 7 - bit, high = keep << 3 - bit;
    first = block, second = 4 + block;
  }
  if (of_both == 0) second = first;
  if (of_both == 1) first = second;
  return tl_attention_bytes(low, high, 0x8888 | first * 0x11 | second * 0x1100);
}
template <bool rows_are_keys, int cols>
static __device__ __forceinline__ void tl_attention_drop_half(void* tile, const unsigned* keeps) {
#pragma unroll
  for (int n = 0; n < cols / 4; ++n) ((unsigned*)tile)[n] &= tl_attention_mask<rows_are_keys>(keeps, n);
}
template <bool rows_are_keys, int cols>
static __device__ __forceinline__ void tl_attention_drop_float(void* tile, const unsigned* keeps) {
#pragma unroll
  for (int n = 0; n < cols / 2; ++n) ((unsigned*)tile)[n] &= tl_attention_mask<rows_are_keys>(keeps, n / 2, n % 2);
}
