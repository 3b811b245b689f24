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
