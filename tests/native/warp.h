// CUDA's warps on a CPU, for tests/test_warps.py: a thread per lane, warps one after the other.

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define TL_DEVICE static inline

static thread_local struct { int x, y; } threadIdx;
static struct { int x; } blockDim{512};
static std::barrier lanes(32);
static uint32_t exchanged[32];
static unsigned char shared_memory[1 << 17];

template <class To, class From>
static To bits(From x) {
  To y;
  return std::memcpy(&y, &x, sizeof y), y;
}
static inline float __uint_as_float(uint32_t x) { return bits<float>(x); }
static inline int __float_as_int(float x) { return bits<int>(x); }

static uint32_t exchange(uint32_t x, int lane) {
  exchanged[threadIdx.x % 32] = x;
  lanes.arrive_and_wait();
  x = exchanged[lane % 32];
  return lanes.arrive_and_wait(), x;
}
template <class T>
static T __shfl_sync(unsigned, T x, int lane) { return bits<T>(exchange(bits<uint32_t>(x), lane)); }
template <class T>
static T __shfl_xor_sync(unsigned mask, T x, int other) { return __shfl_sync(mask, x, threadIdx.x % 32 ^ other); }
static void __syncwarp() { lanes.arrive_and_wait(); }
static bool __all_sync(unsigned mask, bool x) {
  bool all = true;
  for (int lane = 0; lane < 32; ++lane) all &= __shfl_sync(mask, int(x), lane);
  return all;
}
static unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t both = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

static float of_bf16(uint32_t x) { return __uint_as_float(x << 16); }
static uint32_t to_bf16(float x) {
  uint32_t all = bits<uint32_t>(x);
  return (all + 0x7fff + (all >> 16 & 1)) >> 16;
}
struct __nv_bfloat162 { uint32_t pair; };
static __nv_bfloat162 __hadd2(__nv_bfloat162 x, __nv_bfloat162 y) {
  float low = of_bf16(x.pair & 0xffff) + of_bf16(y.pair & 0xffff), high = of_bf16(x.pair >> 16) + of_bf16(y.pair >> 16);
  return {to_bf16(low) | to_bf16(high) << 16};
}

// ldmatrix.x4: lanes 8 i to 8 i + 7 name the rows of matrix i
static void ldmatrix(uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3, uint32_t address) {
  uint32_t* x[] = {&x0, &x1, &x2, &x3};
  int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint32_t row = __shfl_sync(0, address, 8 * i + lane / 4);
    std::memcpy(x[i], shared_memory + row + lane % 4 * 4, 4);
  }
}
// mma.m16n8k16 of bf16
static void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  float* d[] = {&d0, &d1, &d2, &d3};
  uint32_t a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
  int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  auto half = [](uint32_t pair, int k) { return of_bf16(k % 2 ? pair >> 16 : pair & 0xffff); };
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 4; ++i) {
      uint32_t left = __shfl_sync(0, a[k / 8 * 2 + i / 2], g * 4 + k % 8 / 2);
      uint32_t right[] = {__shfl_sync(0, b[k / 8], c * 8 + k % 8 / 2), __shfl_sync(0, b[k / 8], c * 8 + 4 + k % 8 / 2)};
      *d[i] += half(left, k) * half(right[i % 2], k);
    }
}

// Call body() in each lane of `warps` warps
template <class Body>
static void run(int warps, Body body) {
  for (int warp = 0; warp < warps; ++warp) {
    std::vector<std::thread> threads;
    for (int lane = 0; lane < 32; ++lane)
      threads.emplace_back([=] {
        threadIdx.x = warp * 32 + lane, threadIdx.y = 0;
        body();
      });
    for (auto& thread : threads) thread.join();
  }
}
