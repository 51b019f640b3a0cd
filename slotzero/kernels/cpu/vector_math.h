// exp, tanh and sigmoid of one SIMD register.
//
// Every lane computes the same function of its own value, so a result does not depend on the lane:
// the last, partial register of a row is padded and computed like any other. (torch's silu, gelu,
// sigmoid and softplus switch to scalar code there, which rounds differently.)
#pragma once

#include <cstdint>
#include <limits>

#include "simd.h"

typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

// Whether a comparison holds for a lane.
static inline bool any(Ints holds) {
#if !defined(SLOTZERO_PLAIN) && defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds);
#else
  int32_t some = 0;
  UNROLL for (int i = 0; i < LANES; ++i) some |= holds[i];
  return some;
#endif
}

// The first `count` lanes from memory, the others `filling`.
static inline Vec load_tail(const float* x, int64_t count, float filling) {
  float lanes[LANES];
  for (int i = 0; i < LANES; ++i) lanes[i] = i < count ? x[i] : filling;
  return load(lanes);
}

static inline void store_tail(float* y, int64_t count, Vec v) {
  for (int64_t i = 0; i < count; ++i) y[i] = v[i];
}

// e^x within 2 units in the last place; 0 and infinity beyond the range of a float, NaN for NaN.
static inline Vec exp_of(Vec x) {
  const Vec round = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
#if !defined(SLOTZERO_PLAIN) && defined(__AVX512F__)
  const Vec clamped = _mm512_min_ps(all(89.0f), _mm512_max_ps(all(-104.0f), x));  // NaN stays NaN
#else
  Vec clamped = x < -104.0f ? all(-104.0f) : x;
  clamped = clamped > 89.0f ? all(89.0f) : clamped;
#endif
  const Vec power = fused(clamped, all(1.44269504f), round) - round;
  Vec r = fused(power, all(-0.693359375f), clamped);  // minus power * log 2, in two parts
  r = fused(power, all(2.12194440e-4f), r);
  Vec p = fused(r, all(1.9875691500e-4f), all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  p = fused(p * r, r, r) + 1.0f;
#if !defined(SLOTZERO_PLAIN) && defined(__AVX512F__)
  return _mm512_scalef_ps(p, power);
#else
  const Ints exponent = __builtin_convertvector(power, Ints);
  const Ints half = exponent >> 1;  // 2^exponent in two factors: neither leaves the range
  return p * (Vec)((half + 127) << 23) * (Vec)((exponent - half + 127) << 23);
#endif
}

static inline Vec sigmoid_of(Vec x) { return 1.0f / (1.0f + exp_of(-x)); }

// Near 0 by a polynomial: 1 - 2 / (e^2x + 1) would lose the digits of a small result there.
static inline Vec tanh_of(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec square = x * x;
  Vec p = fused(square, all(-5.70498872745e-3f), all(2.06390887954e-2f));
  p = fused(p, square, all(-5.37397155531e-2f));
  p = fused(p, square, all(1.33314422036e-1f));
  p = fused(p, square, all(-3.33332819422e-1f));
  const Vec small = fused(p * square, x, x);
  const Vec large = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
  return size < 0.625f ? small : (x < 0.0f ? -large : large);
}
