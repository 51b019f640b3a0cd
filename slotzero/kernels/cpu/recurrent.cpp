// Recurrent layers on the CPU, in float32: a short convolution, and a state updated by every token.
//
// A row is computed token by token, and each of its channels or heads by itself, so each token's
// arithmetic is the same in a prompt, among drafts and alone. The state from which a row begins and
// the snapshots that it takes follow from its positions and the table of snapshot rows. A token of
// slot 0 gets zeros, changes nothing and ends its row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "simd.h"
#include "tensor.h"
#include "threads.h"

namespace slotzero::recurrent {
namespace {

constexpr int64_t WORTH_THREADS = 1 << 14;  // products below which waking threads costs more
constexpr float L2_EPS = 1e-6f;             // the same as in torch_recurrent.py

float* floats(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }
const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// y = a * y + b * x
void blend(float* y, float a, float b, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    store(y + i, fused(load(x + i), all(b), load(y + i) * all(a)));
  for (; i < n; ++i) y[i] = a * y[i] + b * x[i];
}

struct Row {
  int32_t slot, start;
  int64_t begin, end;  // its real tokens
};

std::vector<Row> rows_of(const Tensor& slots, const Tensor& positions,
                         const std::optional<Tensor>& owners, const std::optional<Tensor>& starts,
                         const std::optional<Tensor>& counts, const std::optional<Tensor>& ends) {
  std::vector<Row> rows;
  const int32_t* slot_of = ints(slots);
  if (!owners) {
    for (int64_t t = 0; t < slots.size(0); ++t)
      if (slot_of[t]) rows.push_back({slot_of[t], ints(positions)[t], t, t + 1});
    return rows;
  }
  for (int64_t r = 0; r < owners->size(0); ++r) {
    const int64_t end = ints(*ends)[r], begin = end - ints(*counts)[r];
    int64_t last = begin;
    while (last < end && slot_of[last]) ++last;
    if (ints(*owners)[r] && last > begin)
      rows.push_back({ints(*owners)[r], ints(*starts)[r], begin, last});
  }
  return rows;
}

// States of one kind: those of slots, their snapshots, and the trail. Each row has `size` values.
struct Places {
  float *table, *kept, *trail;
  const int32_t* rows;
  int64_t size, columns, interval, width;
  int64_t row_stride, token_stride;  // of the trail

  Places(const Tensor& states, const std::optional<Tensor>& kept_states,
         const std::optional<Tensor>& kept_rows, const std::optional<Tensor>& left,
         int64_t interval)
      : table(floats(states)),
        kept(kept_states ? floats(*kept_states) : nullptr),
        trail(left ? floats(*left) : nullptr),
        rows(kept_rows ? ints(*kept_rows) : nullptr),
        size(states.stride(0)),
        columns(kept_rows ? kept_rows->size(1) : 0),
        interval(interval),
        width(left ? left->size(1) : 0),
        row_stride(left ? left->stride(0) : 0),
        token_stride(left ? left->stride(1) : 0) {
    CHECK(states.is_contiguous() && (!kept_states || kept_states->is_contiguous()),
          "recurrent: states and snapshots must be contiguous");
    CHECK(!kept == !rows && !kept == !interval,
          "recurrent: snapshots have a table of rows and an interval");
  }

  // The snapshot for the state after `num_tokens` tokens of a slot; null: none
  float* snapshot(int32_t slot, int64_t num_tokens) const {
    if (!kept || num_tokens == 0 || num_tokens % interval) return nullptr;
    const int64_t column = num_tokens / interval - 1;
    const int32_t row = column < columns ? rows[slot * columns + column] : 0;
    return row ? kept + row * size : nullptr;
  }

  // Reads the state from which a row begins: `n` values from `at` on
  void begin(const Row& row, int64_t at, int64_t n, float* into) const {
    const float* from = snapshot(row.slot, row.start);
    if (!from) from = table + row.slot * size;
    if (row.start == 0)
      std::fill_n(into, n, 0.0f);
    else
      std::copy_n(from + at, n, into);
  }

  void after(const Row& row, int64_t token, int64_t at, int64_t n, const float* state) const {
    if (trail) {
      const int64_t r = token / width, w = token % width;
      std::copy_n(state, n, trail + r * row_stride + w * token_stride + at);
      return;
    }
    if (float* to = snapshot(row.slot, row.start + token - row.begin + 1))
      std::copy_n(state, n, to + at);
    if (token == row.end - 1) std::copy_n(state, n, table + row.slot * size + at);
  }

  // Writes zeros for padding tokens.
  void clear_trail(const Tensor& slots) const {
    for (int64_t t = 0; trail && t < slots.size(0); ++t)
      if (!ints(slots)[t])
        std::fill_n(trail + t / width * row_stride + t % width * token_stride, size, 0.0f);
  }
};

void clear(const Tensor& slots, float* out, int64_t size) {
  for (int64_t t = 0; t < slots.size(0); ++t)
    if (!ints(slots)[t]) std::fill_n(out + t * size, size, 0.0f);
}

// x [T, channels]; weight [channels, width]; conv [slots + 1, channels, width - 1]
// Gated: x [T, 3 * channels], with gates, output gates and values; their products replace silu.
void convolve(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor slots, Tensor positions,
              std::optional<Tensor> owners, std::optional<Tensor> starts,
              std::optional<Tensor> counts, std::optional<Tensor> ends, Tensor conv,
              std::optional<Tensor> kept, std::optional<Tensor> kept_rows,
              std::optional<Tensor> trail, int64_t interval, bool is_gated, Tensor out) {
  CHECK(x.stride(1) == 1 && weight.is_contiguous() && out.is_contiguous(),
        "convolve: weight, out and rows of x must be contiguous");
  const int64_t channels = weight.size(0), width = weight.size(1), past = width - 1;
  CHECK(conv.size(1) == channels && conv.size(2) == past &&
            x.size(1) == (is_gated ? 3 : 1) * channels,
        "convolve: states or inputs do not fit the weight");
  const Places places(conv, kept, kept_rows, trail, interval);
  const std::vector<Row> rows = rows_of(slots, positions, owners, starts, counts, ends);
  const float *xp = floats(x), *wp = floats(weight), *bp = bias ? floats(*bias) : nullptr;
  float* op = floats(out);
  clear(slots, op, channels);
  places.clear_trail(slots);
  const auto num_rows = static_cast<int64_t>(rows.size());
  parallel_for(num_rows, x.size(0) * channels * width > WORTH_THREADS, [&](int64_t r) {
    const Row& row = rows[r];
    std::vector<float> state(channels * past);
    places.begin(row, 0, channels * past, state.data());
    for (int64_t t = row.begin; t < row.end; ++t) {
      for (int64_t c = 0; c < channels; ++c) {
        float *inputs = state.data() + c * past, sum = bp ? bp[c] : 0.0f;
        const float *given = xp + t * x.stride(0) + c, *w = wp + c * width;
        const float newest = is_gated ? given[0] * given[2 * channels] : given[0];
        for (int64_t i = 0; i < past; ++i) sum += inputs[i] * w[i];
        sum += newest * w[past];
        op[t * channels + c] = sum * (is_gated ? given[channels] : sigmoid(sum));
        for (int64_t i = 0; i + 1 < past; ++i) inputs[i] = inputs[i + 1];
        if (past) inputs[past - 1] = newest;
      }
      places.after(row, t, 0, channels * past, state.data());
    }
  });
}

struct Shape {
  bool is_delta, is_kda;
  int64_t heads, groups, head_dim, state_size;
  float least, most;  // limits of dt (mamba)
};

// kda: each dimension of the keys decays by its own gate.
void decay_dims(float* h, const float* gates, const float* bias, float a_log, const Shape& shape,
                float* decays) {
  const int64_t n = shape.state_size;
  const float rate = std::exp(a_log);
  for (int64_t i = 0; i < n; ++i) decays[i] = std::exp(-rate * softplus(gates[i] + bias[i]));
  for (int64_t p = 0; p < shape.head_dim; ++p, h += n)
    for (int64_t i = 0; i < n; ++i) h[i] *= decays[i];
}

// One token of one head: updates the state h [head_dim, state_size] and reads y [head_dim] from it.
void advance(float* h, float* y, float gate, float strength, float a_log, float skip,
             const float* values, const float* key, const float* query, const Shape& shape) {
  const int64_t n = shape.state_size;
  float step = softplus(gate);
  if (!shape.is_delta) step = std::min(std::max(step, shape.least), shape.most);
  const float decay = shape.is_kda ? 1.0f : std::exp(-std::exp(a_log) * step);
  for (int64_t p = 0; p < shape.head_dim; ++p, h += n) {
    if (shape.is_delta) {
      const float missing = values[p] - decay * dot(h, key, n);
      blend(h, decay, strength * missing, key, n);
      y[p] = dot(h, query, n);
    } else {
      blend(h, decay, step * values[p], key, n);
      y[p] = dot(h, query, n) + skip * values[p];
    }
  }
}

void scale_to_unit(const float* x, float factor, int64_t n, float* out) {
  const float scale = factor / std::sqrt(dot(x, x, n) + L2_EPS);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
}

// mixed [T, channels]; gates [T, heads], or kda: [T, heads * state_size], with dt_bias of the same
// size; beta [T, heads]; states [slots + 1, heads, head_dim, state_size]
void scan(Tensor mixed, Tensor gates, std::optional<Tensor> beta, Tensor a_log, Tensor dt_bias,
          std::optional<Tensor> d, Tensor slots, Tensor positions, std::optional<Tensor> owners,
          std::optional<Tensor> starts, std::optional<Tensor> counts, std::optional<Tensor> ends,
          Tensor states, std::optional<Tensor> kept, std::optional<Tensor> kept_rows,
          std::optional<Tensor> trail, int64_t num_groups, double least, double most,
          int64_t interval, bool is_kda, Tensor out) {
  CHECK(mixed.stride(1) == 1 && gates.stride(1) == 1 && out.is_contiguous() &&
            (!beta || beta->stride(1) == 1),
        "scan: out and rows of mixed, gates and beta must be contiguous");
  const Shape shape{beta.has_value(),
                    is_kda,
                    states.size(1),
                    num_groups,
                    states.size(2),
                    states.size(3),
                    static_cast<float>(least),
                    static_cast<float>(most)};
  const int64_t n = shape.state_size, inner = shape.heads * shape.head_dim;
  const int64_t keys = shape.groups * n, channels = mixed.size(1), size = shape.head_dim * n;
  CHECK(channels == inner + 2 * keys && shape.heads % shape.groups == 0,
        "scan: states do not fit what is mixed");
  const Places places(states, kept, kept_rows, trail, interval);
  const std::vector<Row> rows = rows_of(slots, positions, owners, starts, counts, ends);
  const float *mp = floats(mixed), *gp = floats(gates), *bp = beta ? floats(*beta) : nullptr;
  const float *ap = floats(a_log), *tp = floats(dt_bias), *dp = d ? floats(*d) : nullptr;
  float* op = floats(out);
  clear(slots, op, inner);
  places.clear_trail(slots);
  const int64_t items = static_cast<int64_t>(rows.size()) * shape.heads;
  parallel_for(items, mixed.size(0) * inner * n > WORTH_THREADS, [&](int64_t item) {
    const Row& row = rows[item / shape.heads];
    const int64_t head = item % shape.heads, group = head / (shape.heads / shape.groups);
    std::vector<float> state(size), unit(2 * n), decays(n);
    places.begin(row, head * size, size, state.data());
    for (int64_t t = row.begin; t < row.end; ++t) {
      const float* token = mp + t * mixed.stride(0);
      float* y = op + t * inner + head * shape.head_dim;
      const float* gates_of = gp + t * gates.stride(0);
      const float gate = shape.is_kda ? 0.0f : gates_of[head] + tp[head];
      if (shape.is_kda)
        decay_dims(state.data(), gates_of + head * n, tp + head * n, ap[head], shape, decays.data());
      if (shape.is_delta) {
        const float factor = 1.0f / std::sqrt(static_cast<float>(n));
        scale_to_unit(token + group * n, factor, n, unit.data());
        scale_to_unit(token + keys + group * n, 1.0f, n, unit.data() + n);
        advance(state.data(), y, gate, sigmoid(bp[t * beta->stride(0) + head]), ap[head], 0.0f,
                token + 2 * keys + head * shape.head_dim, unit.data() + n, unit.data(), shape);
      } else {
        const float* key = token + inner + group * n;
        advance(state.data(), y, gate, 0.0f, ap[head], dp[head], token + head * shape.head_dim,
                key, key + keys, shape);
      }
      places.after(row, t, head * size, size, state.data());
    }
  });
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<convolve>(
            "convolve(Tensor x, Tensor weight, Tensor? bias, Tensor slots, Tensor positions, "
            "Tensor? owners, Tensor? starts, Tensor? counts, Tensor? ends, Tensor(a!) conv, "
            "Tensor(b!)? kept, Tensor? kept_rows, Tensor(c!)? trail, int interval, bool "
            "is_gated, Tensor(d!) out) -> ()")
        .add<scan>(
            "scan(Tensor mixed, Tensor gates, Tensor? beta, Tensor a_log, Tensor dt_bias, "
            "Tensor? d, Tensor slots, Tensor positions, Tensor? owners, Tensor? starts, Tensor? "
            "counts, Tensor? ends, Tensor(a!) states, Tensor(b!)? kept, Tensor? kept_rows, "
            "Tensor(c!)? trail, int num_groups, float least, float most, int interval, bool "
            "is_kda, Tensor(d!) out) -> ()");

}  // namespace
}  // namespace slotzero::recurrent
