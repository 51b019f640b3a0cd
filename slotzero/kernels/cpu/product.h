// What products of packed weights share: the register tile, and rows sorted by expert.
//
// A block is sixteen output features side by side. Each output is the sum over k in ascending order
// in one accumulator, whatever the number of rows: a row's result never depends on its neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"
#include "tensor.h"
#include "threads.h"

constexpr int64_t FEATURES = 16;              // output features of one packed block
constexpr int VECS = FEATURES / LANES;        // registers across a block
constexpr int ROWS = 4;                       // rows of x in one register tile
constexpr int64_t ROWS_IN_CACHE = 32;         // rows of x that stay in the first-level cache
constexpr int64_t WORTH_THREADS = 1 << 16;    // products below which waking threads costs more

// Distances, in floats, between consecutive rows of x, of the weight and of y.
struct Strides {
  int64_t x, w, y;
};

template <int M>
static void tile(const float* x, const float* w, const float* b, float* y, int64_t K, Strides by,
                 int64_t n) {
  Vec acc[M][VECS];
  UNROLL for (int m = 0; m < M; ++m) UNROLL for (int j = 0; j < VECS; ++j) acc[m][j] = Vec{};
  for (int64_t k = 0; k < K; ++k) {
    Vec wv[VECS];
    UNROLL for (int j = 0; j < VECS; ++j) wv[j] = load(w + k * by.w + j * LANES);
    UNROLL for (int m = 0; m < M; ++m) {
      const Vec xv = all(x[m * by.x + k]);
      UNROLL for (int j = 0; j < VECS; ++j) acc[m][j] = fused(wv[j], xv, acc[m][j]);
    }
  }
  UNROLL for (int m = 0; m < M; ++m) {  // unrolled, or the sums above would live in memory
    float out[FEATURES];
    UNROLL for (int j = 0; j < VECS; ++j) store(out + j * LANES, acc[m][j]);
    for (int64_t i = 0; i < n; ++i) y[m * by.y + i] = b ? out[i] + b[i] : out[i];
  }
}

[[maybe_unused]] static void block(const float* x, const float* w, const float* b, float* y, int64_t M,
                                   int64_t K, Strides by, int64_t n) {
  int64_t m = 0;
  for (; m + ROWS <= M; m += ROWS) tile<ROWS>(x + m * by.x, w, b, y + m * by.y, K, by, n);
  switch (M - m) {
    case 3: return tile<3>(x + m * by.x, w, b, y + m * by.y, K, by, n);
    case 2: return tile<2>(x + m * by.x, w, b, y + m * by.y, K, by, n);
    case 1: return tile<1>(x + m * by.x, w, b, y + m * by.y, K, by, n);
  }
}

// Rows [begin, end) of a batch, which are multiplied by the same weight.
struct Stretch {
  int64_t begin, end, which;
};

// Rows after those of the last weight are multiplied by none.
[[maybe_unused]] static std::vector<Stretch> stretches_of(const int32_t* starts, int64_t experts,
                                                          int64_t num_rows) {
  std::vector<Stretch> stretches;
  for (int64_t e = 0; e <= experts; ++e) {
    const int64_t past = e < experts ? starts[e + 1] : num_rows;
    CHECK(0 <= starts[e] && starts[e] <= past && past <= num_rows,
          "grouped: starts must ascend, and end within x");
    for (int64_t m = starts[e]; m < past; m += ROWS_IN_CACHE)
      stretches.push_back({m, std::min(m + ROWS_IN_CACHE, past), e});
  }
  return stretches;
}
