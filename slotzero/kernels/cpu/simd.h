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

#if !defined(SLOTZERO_PLAIN) && (defined(__AVX512F__) || defined(__aarch64__))
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
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

// The sum of the lanes of each of LANES registers: that of v[i] in lane i.
static inline Vec lane_sums(const Vec* v) {
#if !defined(SLOTZERO_PLAIN) && defined(__AVX512F__)
  __m512 pairs[8], fours[4];
  UNROLL for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  UNROLL for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
    fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  UNROLL for (int i = 0; i < 2; ++i)
    pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88),
                       _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xdd));
#elif !defined(SLOTZERO_PLAIN) && defined(__AVX2__) && defined(__FMA__)
  __m256 pairs[4], fours[2];
  UNROLL for (int i = 0; i < 4; ++i)
    pairs[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  UNROLL for (int i = 0; i < 2; ++i) {
    const __m256d a = (__m256d)pairs[2 * i], b = (__m256d)pairs[2 * i + 1];
    fours[i] = _mm256_add_ps((__m256)_mm256_unpacklo_pd(a, b), (__m256)_mm256_unpackhi_pd(a, b));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
                       _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#elif !defined(SLOTZERO_PLAIN) && defined(__ARM_NEON) && defined(__aarch64__)
  return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
#else
  Vec sums;
  for (int i = 0; i < LANES; ++i) {
    sums[i] = v[i][0];
    for (int lane = 1; lane < LANES; ++lane) sums[i] += v[i][lane];
  }
  return sums;
#endif
}

// Four numbers in the order in which `lane_sums` adds four neighbouring lanes; it adds the sums of two
// neighbouring fours, and then of two neighbouring eights.
static inline Vec sum_of_four(Vec a, Vec b, Vec c, Vec d) {
#if !defined(SLOTZERO_PLAIN) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
  return (a + c) + (b + d);
#elif !defined(SLOTZERO_PLAIN) && defined(__ARM_NEON) && defined(__aarch64__)
  return (a + b) + (c + d);
#else
  return a + b + c + d;
#endif
}

static inline float lane_sum(Vec v) {
  float sum = 0;
  UNROLL for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}

// The largest lane; any number or NaN if a lane is NaN.
static inline float lane_max(Vec v) {
#if !defined(SLOTZERO_PLAIN) && defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#elif !defined(SLOTZERO_PLAIN) && defined(__ARM_NEON) && defined(__aarch64__)
  return vmaxvq_f32(v);
#else
  float max = v[0];
  UNROLL for (int i = 1; i < LANES; ++i) max = max < v[i] ? v[i] : max;
  return max;
#endif
}

[[maybe_unused]] static float dot(const float* a, const float* b, int64_t n) {
  Vec sums{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sums = fused(load(a + i), load(b + i), sums);
  float sum = lane_sum(sums);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
