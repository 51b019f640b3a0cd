// Half-precision floats (binary16), widened to float32 exactly.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

static inline float widened(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half >> 15) << 31, size = half & 0x7fff;
  uint32_t bits = (size << 13) + (112u << 23);  // the exponent's bias is 127 instead of 15
  if (size >= 0x7c00) bits += 112u << 23;       // infinity and NaN
  float value;
  std::memcpy(&value, &bits, sizeof value);
  if (size < 0x400) value = static_cast<float>(size) * 0x1p-24f;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline Vec load(const uint16_t* p) {
#if !defined(SLOTZERO_PLAIN) && defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif !defined(SLOTZERO_PLAIN) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif !defined(SLOTZERO_PLAIN) && defined(__ARM_NEON) && defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  Vec v;
  for (int i = 0; i < LANES; ++i) v[i] = widened(p[i]);
  return v;
#endif
}
