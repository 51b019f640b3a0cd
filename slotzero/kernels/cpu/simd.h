// One SIMD register of floats, whatever the machine calls it.
#pragma once

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
// The same register at an address that is only aligned to a float.
typedef float UnalignedVec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

#define UNROLL _Pragma("GCC unroll 16")

static inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
static inline float lane_sum(Vec v) {
  float sum = 0;
  UNROLL for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}
