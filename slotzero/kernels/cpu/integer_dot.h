// Sums of four products of bytes, in every 32-bit lane of a register, on any instruction set.
//
// Codes are unsigned bytes and activations signed ones. All arithmetic is exact, so every
// instruction set gives the same sums.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

typedef int32_t Sums __attribute__((vector_size(LANES * 4)));
typedef uint8_t Codes __attribute__((vector_size(LANES * 4)));  // four of each lane
typedef uint8_t UnalignedCodes __attribute__((vector_size(LANES * 4), aligned(1)));

static inline Codes load_codes(const uint8_t* p) { return *reinterpret_cast<const UnalignedCodes*>(p); }

static inline Sums all_lanes(int32_t x) { return x - Sums{}; }

#if !defined(SLOTZERO_PLAIN) && defined(__AVX512BW__) && !defined(__AVX512VNNI__)
// Sums of neighbouring products of bytes below 128, in 16 bits and then in 32.
static inline __m512i dot4_small(__m512i w, __m512i x) {
  return _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
}
#elif !defined(SLOTZERO_PLAIN) && defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__) && \
    !defined(__AVXVNNI__)
static inline __m256i dot4_small(__m256i w, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
#endif

// sums + codes[0..3] . x[0..3] of each lane; `x4` holds the four activations. `half`: codes are
// below 16.
template <bool half>
static inline Sums dot4(Sums sums, Codes codes, int32_t x4) {
#if !defined(SLOTZERO_PLAIN) && defined(__AVX512VNNI__)
  return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x4));
#elif !defined(SLOTZERO_PLAIN) && defined(__AVX512BW__)
  const __m512i w = (__m512i)codes, x = _mm512_set1_epi32(x4);
  if constexpr (half) return sums + (Sums)dot4_small(w, x);
  const __m512i low = _mm512_set1_epi8(15);  // 255 * 127 * 2 does not fit into 16 bits
  const __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
  return sums + (Sums)dot4_small(_mm512_and_si512(w, low), x) + ((Sums)dot4_small(high, x) << 4);
#elif !defined(SLOTZERO_PLAIN) && defined(__AVX2__) && defined(__FMA__) && defined(__AVXVNNI__)
  return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(x4));
#elif !defined(SLOTZERO_PLAIN) && defined(__AVX2__) && defined(__FMA__)
  const __m256i w = (__m256i)codes, x = _mm256_set1_epi32(x4);
  if constexpr (half) return sums + (Sums)dot4_small(w, x);
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 4), low);
  return sums + (Sums)dot4_small(_mm256_and_si256(w, low), x) + ((Sums)dot4_small(high, x) << 4);
#elif !defined(SLOTZERO_PLAIN) && defined(__ARM_FEATURE_MATMUL_INT8)
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(x4));
  return (Sums)vusdotq_s32((int32x4_t)sums, (uint8x16_t)codes, x);
#elif !defined(SLOTZERO_PLAIN) && defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(x4));
  if constexpr (half) return (Sums)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, x);
  const uint8x16_t w = (uint8x16_t)codes;  // a code is its lower seven bits, and 128 or nothing
  const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(127)));
  const int8x16_t top = vreinterpretq_s8_u8(vshrq_n_u8(w, 7));
  const int32x4_t high = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), top, x), 7);
  return (Sums)vaddq_s32(vdotq_s32((int32x4_t)sums, low, x), high);
#else
  int8_t x[4];
  std::memcpy(x, &x4, sizeof x);
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < 4; ++i) sums[lane] += static_cast<int32_t>(codes[4 * lane + i]) * x[i];
  return sums;
#endif
}
