// Numbers of e4m3: 1 sign bit, 4 exponent and 3 fraction bits, biased by 7; no infinity.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

// The nearest number of e4m3; of two equally near, the one with an even fraction.
static inline float nearest_float8(float x) {
  const float size = std::min(std::fabs(x), 448.0f);
  float near;
  if (size < 0x1p-6f) {
    near = std::nearbyint(size * 0x1p9f) * 0x1p-9f;
  } else {
    uint32_t bits;
    std::memcpy(&bits, &size, sizeof bits);
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) & ~0xfffffu;
    std::memcpy(&near, &bits, sizeof near);
  }
  return std::isnan(x) ? x : std::copysign(near, x);
}

// The code of the nearest number.
[[maybe_unused]] static uint8_t float8_code(float x) {
  const float near = nearest_float8(x);
  const float size = std::fabs(near);
  uint32_t bits, code = 0x7f;
  std::memcpy(&bits, &size, sizeof bits);
  if (size < 0x1p-6f)
    code = static_cast<uint32_t>(size * 0x1p9f);
  else if (!std::isnan(near))
    code = (bits >> 20) - (120 << 3);
  return static_cast<uint8_t>(code | (std::signbit(near) ? 0x80 : 0));
}

// The numbers of all codes.
[[maybe_unused]] static const std::array<float, 256>& float8_numbers() {
  static const std::array<float, 256> numbers = [] {
    std::array<float, 256> made{};
    for (int code = 0; code < 256; ++code) {
      const int size = code & 0x7f, exponent = size >> 3, fraction = size & 7;
      const float number = exponent ? std::ldexp(8.0f + fraction, exponent - 10)
                                    : std::ldexp(static_cast<float>(fraction), -9);
      made[code] = size == 0x7f ? NAN : code & 0x80 ? -number : number;
    }
    return made;
  }();
  return numbers;
}
