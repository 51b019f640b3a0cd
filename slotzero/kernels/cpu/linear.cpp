// y = x W^T + b in float32, for 1 to thousands of rows.
//
// W is packed: [ceil(N / 16), K, 16], sixteen output features side by side, so that a row of x
// meets the weights as one sequential stream. Each output is the sum over k in ascending order in
// one accumulator, whatever the number of rows: a row's result never depends on its neighbours.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "simd.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t FEATURES = 16;              // output features of one packed block
constexpr int VECS = FEATURES / LANES;        // registers across a block
constexpr int ROWS = 4;                       // rows of x in one register tile
constexpr int64_t ROWS_IN_CACHE = 32;         // rows of x that stay in the first-level cache
constexpr int64_t WORTH_THREADS = 1 << 16;    // products below which waking threads costs more

template <int M>
void tile(const float* x, const float* w, const float* b, float* y, int64_t K, int64_t N, int64_t n) {
  Vec acc[M][VECS];
  UNROLL for (int m = 0; m < M; ++m) UNROLL for (int j = 0; j < VECS; ++j) acc[m][j] = Vec{};
  for (int64_t k = 0; k < K; ++k) {
    Vec wv[VECS];
    UNROLL for (int j = 0; j < VECS; ++j) wv[j] = load(w + k * FEATURES + j * LANES);
    UNROLL for (int m = 0; m < M; ++m) {
      const Vec xv = all(x[m * K + k]);
      UNROLL for (int j = 0; j < VECS; ++j) acc[m][j] = fused(wv[j], xv, acc[m][j]);
    }
  }
  UNROLL for (int m = 0; m < M; ++m) {  // unrolled, or the sums above would live in memory
    float out[FEATURES];
    UNROLL for (int j = 0; j < VECS; ++j) store(out + j * LANES, acc[m][j]);
    for (int64_t i = 0; i < n; ++i) y[m * N + i] = b ? out[i] + b[i] : out[i];
  }
}

void block(const float* x, const float* w, const float* b, float* y, int64_t M, int64_t K, int64_t N,
           int64_t n) {
  int64_t m = 0;
  for (; m + ROWS <= M; m += ROWS) tile<ROWS>(x + m * K, w, b, y + m * N, K, N, n);
  switch (M - m) {
    case 3: return tile<3>(x + m * K, w, b, y + m * N, K, N, n);
    case 2: return tile<2>(x + m * K, w, b, y + m * N, K, N, n);
    case 1: return tile<1>(x + m * K, w, b, y + m * N, K, N, n);
  }
}

// x [M, K], weight [ceil(N / 16), K, 16], bias [N], out [M, N]
void linear(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && out.is_contiguous(),
                  "linear: x, weight and out must be contiguous");
  const int64_t M = x.size(0), K = x.size(1), N = out.size(1);
  STD_TORCH_CHECK(weight.size(1) == K && weight.size(0) * FEATURES >= N,
                  "linear: the packed weight does not fit x and out");
  const auto* xp = static_cast<const float*>(x.data_ptr());
  const auto* wp = static_cast<const float*>(weight.data_ptr());
  const auto* bp = bias ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  auto* yp = static_cast<float*>(out.data_ptr());
  const int64_t blocks = (N + FEATURES - 1) / FEATURES;
  for (int64_t m = 0; m < M; m += ROWS_IN_CACHE) {
    const int64_t rows = std::min(ROWS_IN_CACHE, M - m);
#pragma omp parallel for schedule(static) if (rows * K * N > WORTH_THREADS)
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t n = i * FEATURES;
      block(xp + m * K, wp + n * K, bp ? bp + n : nullptr, yp + m * N + n, rows, K, N,
            std::min(FEATURES, N - n));
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slotzero, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(slotzero, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }
