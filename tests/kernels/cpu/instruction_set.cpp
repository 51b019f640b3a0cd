// What differs between instruction sets, compared with plain loops. Prints the registers' lanes.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "half.h"
#include "integer_dot.h"

template <bool half>
int wrong_dots() {
  int wrong = 0;
  for (int trial = 0; trial < 500; ++trial) {
    uint8_t codes[LANES * 4];
    int8_t x[4];
    for (auto& code : codes) code = static_cast<uint8_t>(trial ? rand() % (half ? 16 : 256) : half ? 15 : 255);
    for (auto& number : x) number = static_cast<int8_t>(trial ? rand() % 255 - 127 : 127);
    int32_t four, begin = rand() % 1000 - 500;
    std::memcpy(&four, x, sizeof four);
    const Sums sums = dot4<half>(all_lanes(begin), load_codes(codes), four);
    for (int lane = 0; lane < LANES; ++lane) {
      int32_t expected = begin;
      for (int i = 0; i < 4; ++i) expected += codes[4 * lane + i] * x[i];
      wrong += sums[lane] != expected;
    }
  }
  return wrong;
}

int wrong_lane_sums() {
  Vec rows[LANES];
  for (auto& row : rows)
    for (int i = 0; i < LANES; ++i) row[i] = static_cast<float>(rand() % 1000);
  const Vec sums = lane_sums(rows);
  int wrong = 0;
  for (int i = 0; i < LANES; ++i) wrong += sums[i] != lane_sum(rows[i]);  // integers: exact
  return wrong;
}

// Lanes added across one register, and the same numbers in registers of their own: to the bit.
int wrong_orders() {
  int wrong = 0;
  for (int trial = 0; trial < 500; ++trial) {
    Vec rows[LANES], fours[LANES / 4];
    for (auto& row : rows)
      for (int i = 0; i < LANES; ++i) row[i] = static_cast<float>(rand()) / static_cast<float>(rand() + 1.0);
    const auto lane = [&](int at) {  // lane `at` of each row
      Vec v;
      for (int i = 0; i < LANES; ++i) v[i] = rows[i][at];
      return v;
    };
    for (int i = 0; i < LANES / 4; ++i)
      fours[i] = sum_of_four(lane(4 * i), lane(4 * i + 1), lane(4 * i + 2), lane(4 * i + 3));
    for (int size = 1; size < LANES / 4; size *= 2)
      for (int i = 0; i < LANES / 4; i += 2 * size) fours[i] += fours[i + size];
    const Vec sums = lane_sums(rows);
    for (int i = 0; i < LANES; ++i) wrong += sums[i] != fours[0][i];
  }
  return wrong;
}

// A number in half precision by its definition.
float number_of(int bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? fraction ? NAN : INFINITY
                     : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                     : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return bits >> 15 ? -size : size;
}

int wrong_halves() {
  int wrong = 0;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    uint16_t same[LANES];
    for (auto& half : same) half = static_cast<uint16_t>(bits);
    const float expected = number_of(bits), one = widened(same[0]), first = load(same)[0];
    for (const float made : {one, first})
      wrong += std::isnan(expected) ? !std::isnan(made) : std::signbit(made) != std::signbit(expected) || made != expected;
  }
  return wrong;
}

int main() {
  const int wrong = wrong_dots<true>() + wrong_dots<false>() + wrong_lane_sums() + wrong_orders() + wrong_halves();
  std::printf("%d lanes, %d wrong\n", LANES, wrong);
  return wrong != 0;
}
