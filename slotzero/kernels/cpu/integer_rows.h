// Activations in 8 bits: each chunk of a row has its own scale.
//
// A row is rounded by itself, from its numbers alone. A chunk with a number that is not finite has
// the scale NaN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"
#include "threads.h"

constexpr float MOST = 127.0f;
constexpr float LEAST_PEAK = 1e-30f;  // 127 / peak overflows for smaller ones: such chunks are zeros

// Rows [num, size] of codes, and by chunk: scale, sum of the codes, and scale * sum.
struct IntegerRows {
  int64_t size = 0, chunk = 0, chunks = 0;
  std::vector<int8_t> codes;
  std::vector<float> scales, offsets;
  std::vector<int32_t> sums;

  void resize(int64_t num, int64_t columns, int64_t its_chunk) {
    chunk = its_chunk;
    chunks = (columns + chunk - 1) / chunk;
    size = chunks * chunk;
    codes.resize(num * size);
    for (auto* part : {&scales, &offsets}) part->resize(num * chunks);
    sums.resize(num * chunks);
  }

  void round_chunk(const float* x, int64_t at, int64_t i) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    typedef int32_t Whole __attribute__((vector_size(LANES * 4)));
    Vec peaks{}, taint{};
    for (int64_t k = 0; k < chunk; k += LANES) {
      const Vec v = load(x + k), v_size = v < 0.0f ? -v : v;
      peaks = v_size > peaks ? v_size : peaks;
      taint += v * 0.0f;
    }
    float peak = 0;
    for (int lane = 0; lane < LANES; ++lane) peak = std::max(peak, peaks[lane]);
    const bool is_small = peak < LEAST_PEAK;
    const Vec inverse = all(is_small ? 0.0f : MOST / peak), round = all(12582912.0f);
    Whole total{};
    for (int64_t k = 0; k < chunk; k += LANES) {
      const Vec scaled = load(x + k) * inverse;
      const Whole code = __builtin_convertvector((scaled + round) - round, Whole);
      total += code;
      const Bytes bytes = __builtin_convertvector(code, Bytes);
      std::memcpy(codes.data() + at * size + i * chunk + k, &bytes, sizeof bytes);
    }
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
    const float scale = (is_small ? 0.0f : peak / MOST) + lane_sum(taint);
    scales[at * chunks + i] = scale;
    offsets[at * chunks + i] = scale * static_cast<float>(sum);
    sums[at * chunks + i] = sum;
  }

  void round_row(const float* x, int64_t columns, int64_t at) {
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t first = i * chunk, count = std::min(chunk, columns - first);
      if (count == chunk) {
        round_chunk(x + first, at, i);
        continue;
      }
      float padded[32] = {};
      std::copy_n(x + first, count, padded);
      round_chunk(padded, at, i);
    }
  }

  void round(const float* x, int64_t num, int64_t columns, int64_t its_chunk) {
    resize(num, columns, its_chunk);
    slotzero::parallel_for(num, num * columns > 1 << 15,
                           [&](int64_t i) { round_row(x + i * columns, columns, i); });
  }
};
