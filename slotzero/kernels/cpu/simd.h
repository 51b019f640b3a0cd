// One SIMD register of floats, whatever the machine calls it.
//
// Products are added by `fused` alone and the compiler contracts nothing (-ffp-contract=off): it
// would fuse in one instance of a template and not in another, and a row's result would then
// depend on how many rows came with it.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
constexpr int LANES = 8;
#elif defined(__ARM_NEON)
#include <arm_neon.h>
constexpr int LANES = 4;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
// The same register at an address that is only aligned to a float.
typedef float UnalignedVec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

#define UNROLL _Pragma("GCC unroll 16")

static inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
static inline Vec all(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_set1_ps(x);
#elif defined(__ARM_NEON)
  return vdupq_n_f32(x);
#else
  return Vec{x, x, x, x};
#endif
}

// a * b + c
static inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

static inline float lane_sum(Vec v) {
  float sum = 0;
  UNROLL for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}
