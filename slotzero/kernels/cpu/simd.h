// One SIMD register of floats on any instruction set.
//
// Products are added by `fused` only, and the compiler contracts nothing (-ffp-contract=off): it
// would fuse in one instance of a template and not in another, and a row's result would then
// depend on the number of rows in the batch.
#pragma once

#include <cstdint>

#if defined(SLOTZERO_PLAIN)
#define FUSED(a, b, c) ((a) * (b) + (c))
constexpr int LANES = 4;
#elif defined(__AVX512F__)
#include <immintrin.h>
#define FUSED(a, b, c) _mm512_fmadd_ps(a, b, c)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define FUSED(a, b, c) _mm256_fmadd_ps(a, b, c)
constexpr int LANES = 8;
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define FUSED(a, b, c) vfmaq_f32(c, a, b)
constexpr int LANES = 4;
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
// The same register at an address that is only aligned to a float.
typedef float UnalignedVec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

#define UNROLL _Pragma("GCC unroll 16")

static inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
static inline Vec all(float x) { return x - Vec{}; }

// a * b + c
static inline Vec fused(Vec a, Vec b, Vec c) { return FUSED(a, b, c); }

static inline float lane_sum(Vec v) {
  float sum = 0;
  UNROLL for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}

[[maybe_unused]] static float dot(const float* a, const float* b, int64_t n) {
  Vec sums{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sums = fused(load(a + i), load(b + i), sums);
  float sum = lane_sum(sums);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
