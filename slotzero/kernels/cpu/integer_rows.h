// Activations in 8 bits: each chunk of a row has its own scale.
//
// A row is rounded by itself, from its numbers alone. A chunk with a number that is not finite has
// the scale NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "product.h"
#include "simd.h"
#include "threads.h"
#include "vector_math.h"

constexpr int64_t PANEL = 16;  // the rows of a matrix tile
constexpr float MOST = 127.0f;
constexpr float LEAST_PEAK = 1e-30f;  // 127 / peak overflows for smaller ones: such chunks are zeros

// Activations in panels of `width` rows: codes [panel, chunk, row of the panel, `chunk` codes], so that
// the rows of a register tile lie side by side. The other numbers are [panel, chunk, row]: scale,
// scale * sum of the codes, and -zero * sum of the codes, with which a product in integers begins.
struct IntegerRows {
  int64_t chunk = 0, chunks = 0, width = 1;
  std::vector<int8_t> codes;
  std::vector<float> scales, offsets;
  std::vector<int32_t> begins;
  std::vector<int64_t> panels;  // the first panel of each stretch of rows

  // Where the first chunk of a row of a stretch is; its next one is `width` further.
  int64_t at(int64_t stretch, int64_t row) const {
    const int64_t panel = row < width ? 0 : row / PANEL;  // a stretch has several only if they are full
    return (panels[stretch] + panel) * chunks * width + row - panel * PANEL;
  }

  template <int SIZE>
  void round_chunk(const float* x, int64_t at, int32_t zero) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    constexpr int PARTS = SIZE / LANES;
    Vec parts[PARTS], peaks{};
    Ints is_tainted{}, total{};
    UNROLL for (int i = 0; i < PARTS; ++i) {
      const Vec v = parts[i] = load(x + i * LANES), v_size = v < 0.0f ? -v : v;
      peaks = v_size > peaks ? v_size : peaks;
      is_tainted |= v - v != Vec{};  // infinite, or not a number
    }
    const float peak = lane_max(peaks);
    const bool is_small = peak < LEAST_PEAK;
    const Vec inverse = all(is_small ? 0.0f : MOST / peak), round = all(12582912.0f);
    UNROLL for (int i = 0; i < PARTS; ++i) {
      const Ints code = __builtin_convertvector((parts[i] * inverse + round) - round, Ints);
      total += code;
      const Bytes bytes = __builtin_convertvector(code, Bytes);
      std::memcpy(codes.data() + at * SIZE + i * LANES, &bytes, sizeof bytes);
    }
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
    const float scale = any(is_tainted) ? NAN : is_small ? 0.0f : peak / MOST;
    scales[at] = scale;
    offsets[at] = scale * static_cast<float>(sum);
    begins[at] = -zero * sum;
  }

  template <int SIZE>
  void round_row(const float* x, int64_t columns, int64_t at, int32_t zero) {
    for (; columns >= SIZE; x += SIZE, columns -= SIZE, at += width) round_chunk<SIZE>(x, at, zero);
    if (!columns) return;
    float padded[SIZE] = {};
    std::copy_n(x, columns, padded);
    round_chunk<SIZE>(padded, at, zero);
  }

  // Rounds the rows of all stretches of x [.., columns]; a stretch begins with a panel of its own.
  void round(const float* x, const std::vector<Stretch>& stretches, int64_t columns, int64_t its_chunk,
             int32_t zero) {
    chunk = its_chunk;
    chunks = (columns + chunk - 1) / chunk;
    width = 1;
    for (const Stretch& rows : stretches) width = std::max(width, rows.end - rows.begin);
    width = std::min(width, PANEL);
    int64_t num_panels = 0;
    panels.clear();
    for (const Stretch& rows : stretches) {
      panels.push_back(num_panels);
      num_panels += (rows.end - rows.begin + width - 1) / width;
    }
    const int64_t size = num_panels * width * chunks;
    codes.resize(size * chunk);
    for (auto* part : {&scales, &offsets}) part->resize(size);
    begins.resize(size);
    const auto count = static_cast<int64_t>(stretches.size());
    slotzero::parallel_for(count, size * chunk > 1 << 15, [&](int64_t i) {
      const auto [begin, end, which] = stretches[i];
      for (int64_t row = begin; row < end; ++row)
        if (chunk == 32)
          round_row<32>(x + row * columns, columns, at(i, row - begin), zero);
        else
          round_row<16>(x + row * columns, columns, at(i, row - begin), zero);
    });
  }
};
