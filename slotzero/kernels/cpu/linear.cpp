// y = x W^T + b in float32, for 1 to thousands of rows: one weight for all rows, one per expert, or
// one per head.
//
// W is packed: [ceil(N / 16), K, 16], sixteen output features side by side, so that a row of x
// reads the weights as one sequential stream. Each output is the sum over k in ascending order in
// one accumulator, whatever the number of rows: a row's result never depends on its neighbours.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "product.h"

namespace slotzero::linear {
namespace {

// x [M, K], weight [ceil(N / 16), K, 16], bias [N], out [M, N]
void linear(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  CHECK(x.is_contiguous() && weight.is_contiguous() && out.is_contiguous(),
        "linear: x, weight and out must be contiguous");
  const int64_t M = x.size(0), K = x.size(1), N = out.size(1);
  CHECK(weight.size(1) == K && weight.size(0) * FEATURES >= N,
        "linear: the packed weight does not fit x and out");
  const auto* xp = static_cast<const float*>(x.data_ptr());
  const auto* wp = static_cast<const float*>(weight.data_ptr());
  const auto* bp = bias ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  auto* yp = static_cast<float*>(out.data_ptr());
  const int64_t blocks = (N + FEATURES - 1) / FEATURES;
  for (int64_t m = 0; m < M; m += ROWS_IN_CACHE) {
    const int64_t rows = std::min(ROWS_IN_CACHE, M - m);
    parallel_for(blocks, rows * K * N > WORTH_THREADS, [&](int64_t i) {
      const int64_t n = i * FEATURES;
      block(xp + m * K, wp + n * K, bp ? bp + n : nullptr, yp + m * N + n, rows, K,
            {K, FEATURES, N}, std::min(FEATURES, N - n));
    });
  }
}

// x [M, K], weights [experts, ceil(N / 16), K, 16], biases [experts, N], starts [experts + 1], out
// [M, N]. Rows [starts[e], starts[e + 1]) are `linear` of weights[e]; the rows after are zeros.
void grouped(Tensor x, Tensor weights, std::optional<Tensor> biases, Tensor starts, Tensor out) {
  CHECK(x.is_contiguous() && weights.is_contiguous() && starts.is_contiguous() &&
            out.is_contiguous() && (!biases || biases->is_contiguous()),
        "grouped: x, weights, biases, starts and out must be contiguous");
  const int64_t M = x.size(0), K = x.size(1), N = out.size(1), experts = weights.size(0);
  const int64_t expert_size = weights.size(1) * K * FEATURES;
  CHECK(weights.size(2) == K && weights.size(1) * FEATURES >= N,
        "grouped: the packed weights do not fit x and out");
  CHECK(starts.scalar_type() == ScalarType::Int && starts.size(0) == experts + 1,
      "grouped: starts must be int32, one for each weight and one more");
  const auto* xp = static_cast<const float*>(x.data_ptr());
  const auto* wp = static_cast<const float*>(weights.data_ptr());
  const auto* bp = biases ? static_cast<const float*>(biases->data_ptr()) : nullptr;
  auto* yp = static_cast<float*>(out.data_ptr());
  const int64_t blocks = (N + FEATURES - 1) / FEATURES;
  const std::vector<Stretch> stretches =
      stretches_of(static_cast<const int32_t*>(starts.data_ptr()), experts, M);
  const int64_t items = static_cast<int64_t>(stretches.size()) * blocks;
  parallel_for(items, M * K * N > WORTH_THREADS, [&](int64_t item) {
    const auto [begin, end, expert] = stretches[item / blocks];
    const int64_t n = item % blocks * FEATURES, features = std::min(FEATURES, N - n);
    float* y = yp + begin * N + n;
    if (expert < experts)
      block(xp + begin * K, wp + expert * expert_size + n * K, bp ? bp + expert * N + n : nullptr,
            y, end - begin, K, {K, FEATURES, N}, features);
    else
      for (int64_t m = begin; m < end; ++m, y += N) std::fill_n(y, features, 0.0f);
  });
}

// x [T, H, K]; out [T, H, N]: each head times its own weight, weights [H, K, N]. Like `tile`, but
// the weight is not packed: if its last block is partial, that block is copied.
void per_head_rows(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N,
                   Strides by, int64_t n) {
  if (n + FEATURES <= N) return block(x, w + n, nullptr, y + n, T, K, by, FEATURES);
  std::vector<float> packed(K * FEATURES);
  for (int64_t k = 0; k < K; ++k) std::copy_n(w + k * N + n, N - n, packed.data() + k * FEATURES);
  block(x, packed.data(), nullptr, y + n, T, K, {by.x, FEATURES, by.y}, N - n);
}

// The same with weights [H, N, K], which are read along K.
void per_head_dots(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N,
                   Strides by, int64_t n) {
  const int64_t end = std::min(n + FEATURES, N);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t i = n; i < end; ++i) y[t * by.y + i] = dot(x + t * by.x, w + i * K, K);
}

void per_head(Tensor x, Tensor weights, bool transposed, Tensor out) {
  CHECK(x.stride(2) == 1 && weights.is_contiguous() && out.is_contiguous(),
        "per_head: values of a head, weights and out must be contiguous");
  const int64_t T = x.size(0), H = x.size(1), K = x.size(2), N = out.size(2);
  CHECK(weights.size(0) == H && weights.size(transposed ? 2 : 1) == K &&
            weights.size(transposed ? 1 : 2) == N && out.size(0) == T && out.size(1) == H,
        "per_head: weights do not fit x and out");
  const auto* xp = static_cast<const float*>(x.data_ptr());
  const auto* wp = static_cast<const float*>(weights.data_ptr());
  auto* yp = static_cast<float*>(out.data_ptr());
  const int64_t blocks = (N + FEATURES - 1) / FEATURES;
  parallel_for(H * blocks, T * H * K * N > WORTH_THREADS, [&](int64_t item) {
    const int64_t h = item / blocks, n = item % blocks * FEATURES;
    const Strides by{x.stride(0), N, H * N};
    const auto product = transposed ? per_head_dots : per_head_rows;
    product(xp + h * x.stride(1), wp + h * K * N, yp + h * N, T, K, N, by, n);
  });
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<linear>("linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()")
        .add<grouped>(
            "grouped(Tensor x, Tensor weights, Tensor? biases, Tensor starts, Tensor(a!) out) -> "
            "()")
        .add<per_head>("per_head(Tensor x, Tensor weights, bool transposed, Tensor(a!) out) -> ()");

}  // namespace
}  // namespace slotzero::linear
