// Norms, gates, softmax, soft caps and RoPE angles on the CPU, in float32.
//
// Each row is computed by itself, from its first value to its last, by the same instructions
// whatever its place in the batch: a row's result is bitwise identical alone and in any batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "simd.h"
#include "tensor.h"
#include "threads.h"
#include "vector_math.h"

namespace slotzero::rowwise {
namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // values below which waking threads costs more

// The rows of a tensor [..., size] with at most two leading axes; they may be slices of wider rows.
struct RowView {
  float* data;
  int64_t outer, inner, size;
  int64_t outer_stride, inner_stride, stride;  // stride 0: one value for the whole row

  RowView(const Tensor& t, const char* name) {
    const int64_t axes = t.dim();
    CHECK((axes == 2 || axes == 3) &&
              t.scalar_type() == ScalarType::Float,
          name, " must be float32 with two or three axes");
    data = static_cast<float*>(t.data_ptr());
    outer = t.size(0);
    inner = axes == 3 ? t.size(1) : 1;
    size = t.size(axes - 1);
    outer_stride = t.stride(0);
    inner_stride = axes == 3 ? t.stride(1) : 0;
    stride = size == 1 ? 1 : t.stride(axes - 1);
    CHECK(stride == 0 || stride == 1, name, ": values of a row must be adjacent");
  }
  int64_t rows() const { return outer * inner; }
  float* row(int64_t i) const {
    return data + i / inner * outer_stride + i % inner * inner_stride;
  }
};

// Calls visit(i, count) for each register of a row; count is LANES for all but the last.
template <class Visit>
[[gnu::always_inline]] inline void each_register(int64_t size, const Visit& visit) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) visit(i, static_cast<int64_t>(LANES));
  if (i < size) visit(i, size - i);
}

inline Vec get(const float* x, int64_t count, float filling = 0.0f) {
  return count == LANES ? load(x) : load_tail(x, count, filling);
}

inline void put(float* y, int64_t count, Vec v) {
  if (count == LANES)
    store(y, v);
  else
    store_tail(y, count, v);
}

template <class Compute>
void each_row(int64_t rows, int64_t size, const Compute& compute) {
  parallel_for(rows, rows * size > WORTH_THREADS, compute);
}

float mean_of(const float* x, int64_t size) {
  Vec sums{};
  each_register(size, [&](int64_t i, int64_t count) { sums += get(x + i, count); });
  return lane_sum(sums) / static_cast<float>(size);
}

// The factor by which RMSNorm multiplies a row from which `mean` is subtracted.
float rms_scale(const float* x, int64_t size, float eps, float mean) {
  Vec sums{};
  each_register(size, [&](int64_t i, int64_t count) {
    const Vec v = get(x + i, count, mean) - mean;
    sums = fused(v, v, sums);
  });
  return 1.0f / std::sqrt(lane_sum(sums) / static_cast<float>(size) + eps);
}

// RMSNorm; if centred, of the row minus its mean: LayerNorm.
void norm_row(const float* x, const float* weight, float eps, bool centred, float* y,
              int64_t size) {
  const float mean = centred ? mean_of(x, size) : 0.0f;
  const Vec scale = all(rms_scale(x, size, eps, mean));
  each_register(size, [&](int64_t i, int64_t count) {
    const Vec normed = (get(x + i, count) - mean) * scale;
    put(y + i, count, weight ? normed * get(weight + i, count) : normed);
  });
}

const float* weight_of(const std::optional<Tensor>& weight, int64_t size, const char* name) {
  if (!weight) return nullptr;
  CHECK(weight->is_contiguous() && weight->numel() == size, name,
        ": a norm's weight must be contiguous and as long as a row");
  return static_cast<const float*>(weight->data_ptr());
}

// x and out [..., size], weight [size]
void rms_norm(Tensor x, std::optional<Tensor> weight, double eps, bool centred, Tensor out) {
  const RowView from(x, "rms_norm: x"), to(out, "rms_norm: out");
  CHECK(from.rows() == to.rows() && from.size == to.size && from.stride && to.stride,
        "rms_norm: x and out must have one shape");
  const float* w = weight_of(weight, from.size, "rms_norm");
  each_row(from.rows(), from.size, [&](int64_t i) {
    norm_row(from.row(i), w, static_cast<float>(eps), centred, to.row(i), from.size);
  });
}

// new_residual = residual + x, where the norm `after`, if given, is applied to x; normed is
// new_residual under the norm `norm`. All are [rows, size]; without `norm`, normed is not written.
void add_norm(Tensor x, Tensor residual, std::optional<Tensor> after, std::optional<Tensor> norm,
              double eps, bool centred, Tensor new_residual, Tensor normed) {
  const RowView change(x, "add_norm: x"), before(residual, "add_norm: residual");
  const RowView sum(new_residual, "add_norm: new_residual"), out(normed, "add_norm: normed");
  const int64_t rows = change.rows(), size = change.size;
  for (const RowView* view : {&before, &sum, &out})
    CHECK(view->rows() == rows && view->size == size && view->stride && change.stride,
          "add_norm: x, residual and what is written must have one shape");
  const float* after_weight = weight_of(after, size, "add_norm");
  const float* norm_weight = weight_of(norm, size, "add_norm");
  each_row(rows, size, [&](int64_t i) {
    const float *a = before.row(i), *b = change.row(i);
    float* total = sum.row(i);
    if (after_weight) norm_row(b, after_weight, static_cast<float>(eps), centred, total, size);
    const float* added = after_weight ? total : b;
    each_register(size, [&](int64_t j, int64_t count) {
      put(total + j, count, get(a + j, count) + get(added + j, count));
    });
    if (norm_weight)
      norm_row(total, norm_weight, static_cast<float>(eps), centred, out.row(i), size);
  });
}

// The order is that of ACTIVATIONS in kernels.py.
enum Activation { SILU, GELU_TANH, CLAMPED_SILU, SIGMOID, RELU };

constexpr float CLAMP = 7.0f, SLOPE = 1.702f;  // of CLAMPED_SILU, as in torch_ops.py

template <int ACTIVATION>
inline Vec gated(Vec gate, Vec value) {
  switch (ACTIVATION) {
    case SILU: return gate * sigmoid_of(gate) * value;
    case GELU_TANH: {  // g / 2 * (1 + tanh u) is g * sigmoid(2 u)
      const Vec cube = gate * gate * gate;
      const Vec u = 0.7978845608f * fused(cube, all(0.044715f), gate);
      return gate * sigmoid_of(u + u) * value;
    }
    case CLAMPED_SILU: {
      const Vec g = gate > CLAMP ? all(CLAMP) : gate;
      Vec v = value > CLAMP ? all(CLAMP) : value;
      v = v < -CLAMP ? all(-CLAMP) : v;
      return (v + 1.0f) * (g * sigmoid_of(SLOPE * g));
    }
    case SIGMOID: return sigmoid_of(gate) * value;
    default: return (gate < 0.0f ? Vec{} : gate) * value;  // RELU; NaN stays NaN
  }
}

template <int ACTIVATION>
void gate_rows(const RowView& gates, const RowView& values, const RowView& out) {
  each_row(values.rows(), values.size, [&](int64_t i) {
    const float *g = gates.row(i), *v = values.row(i);
    float* y = out.row(i);
    each_register(values.size, [&](int64_t j, int64_t count) {
      const Vec gate = gates.stride ? get(g + j, count) : all(*g);
      put(y + j, count, gated<ACTIVATION>(gate, get(v + j, count)));
    });
  });
}

// out = activation(gates) * values, [rows, size] each; a row may have a single gate.
void gate(Tensor gates, Tensor values, int64_t activation, Tensor out) {
  const RowView g(gates, "gate: gates"), v(values, "gate: values"), y(out, "gate: out");
  CHECK(g.rows() == v.rows() && v.rows() == y.rows() && g.size == v.size &&
            v.size == y.size && v.stride && y.stride,
        "gate: gates, values and out must have one shape");
  switch (activation) {
    case SILU: return gate_rows<SILU>(g, v, y);
    case GELU_TANH: return gate_rows<GELU_TANH>(g, v, y);
    case CLAMPED_SILU: return gate_rows<CLAMPED_SILU>(g, v, y);
    case SIGMOID: return gate_rows<SIGMOID>(g, v, y);
    case RELU: return gate_rows<RELU>(g, v, y);
    default: CHECK(false, "gate: no such activation");
  }
}

// out = cap * tanh(x / cap), [rows, size]
void softcap(Tensor x, double cap, Tensor out) {
  const RowView from(x, "softcap: x"), to(out, "softcap: out");
  CHECK(from.rows() == to.rows() && from.size == to.size && from.stride && to.stride,
        "softcap: x and out must have one shape");
  const Vec most = all(static_cast<float>(cap));
  each_row(from.rows(), from.size, [&](int64_t i) {
    const float* a = from.row(i);
    float* b = to.row(i);
    each_register(from.size, [&](int64_t j, int64_t count) {
      put(b + j, count, most * tanh_of(get(a + j, count) / most));
    });
  });
}

// Softmax over the last axis of x [rows, size].
void softmax(Tensor x, Tensor out) {
  const RowView from(x, "softmax: x"), to(out, "softmax: out");
  CHECK(from.rows() == to.rows() && from.size == to.size && from.stride && to.stride,
        "softmax: x and out must have one shape");
  constexpr float INF = std::numeric_limits<float>::infinity();
  each_row(from.rows(), from.size, [&](int64_t i) {
    const float* a = from.row(i);
    float* b = to.row(i);
    const float highest = *std::max_element(a, a + from.size);
    Vec sums{};
    each_register(from.size, [&](int64_t j, int64_t count) {
      const Vec powers = exp_of(get(a + j, count, -INF) - highest);
      sums += powers;
      put(b + j, count, powers);
    });
    const Vec sum = all(lane_sum(sums));
    each_register(from.size, [&](int64_t j, int64_t count) {
      put(b + j, count, get(b + j, count) / sum);
    });
  });
}

// cos and sin [T, 1, size] of positions [T] times frequency [size] or [T, size], times `factor`.
// A pair of frequency 0 stands still: its cosine is 1.
void rope_angles(Tensor positions, Tensor frequency, double factor, Tensor cos, Tensor sin) {
  const int64_t tokens = positions.size(0), size = frequency.size(frequency.dim() - 1);
  CHECK(positions.is_contiguous() && frequency.is_contiguous() && cos.is_contiguous() &&
            sin.is_contiguous() && cos.numel() == tokens * size &&
            sin.numel() == tokens * size &&
            positions.scalar_type() == ScalarType::Int &&
            (frequency.dim() == 1 || frequency.size(0) == tokens),
        "rope_angles: positions, frequency, cos and sin do not fit one another");
  const auto* position = static_cast<const int32_t*>(positions.data_ptr());
  const auto* speed = static_cast<const float*>(frequency.data_ptr());
  auto *c = static_cast<float*>(cos.data_ptr()), *s = static_cast<float*>(sin.data_ptr());
  const bool by_token = frequency.dim() == 2;
  const auto by = static_cast<float>(factor);
  each_row(tokens, size * 16, [&](int64_t t) {  // 16: a cosine costs about that many products
    const float* speeds = speed + (by_token ? t * size : 0);
    for (int64_t i = 0; i < size; ++i) {
      const float angle = static_cast<float>(position[t]) * speeds[i];
      c[t * size + i] = speeds[i] == 0.0f ? 1.0f : std::cos(angle) * by;
      s[t * size + i] = std::sin(angle) * by;
    }
  });
}

// RoPE of x [T, heads, size]: pairs are (i, i + size / 2). cos and sin are [T, 1, size / 2]; products
// are rounded before they are added, as plain torch rounds them.
void rotate(Tensor x, Tensor cos, Tensor sin, Tensor out) {
  const RowView from(x, "rotate: x"), to(out, "rotate: out");
  const int64_t half = from.size / 2;
  CHECK(x.dim() == 3 && out.dim() == 3 && from.rows() == to.rows() && from.size == to.size &&
            from.stride && to.stride && from.size % 2 == 0,
        "rotate: x and out must have one shape [T, heads, size]");
  CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.numel() == from.outer * half &&
            sin.numel() == from.outer * half,
        "rotate: cos and sin do not fit x");
  const auto *c = static_cast<const float*>(cos.data_ptr()), *s = static_cast<const float*>(sin.data_ptr());
  each_row(from.rows(), from.size, [&](int64_t i) {
    const float *first = from.row(i), *second = first + half;
    float *y = to.row(i), *z = y + half;
    const int64_t at = i / from.inner * half;
    each_register(half, [&](int64_t j, int64_t count) {
      const Vec a = get(first + j, count), b = get(second + j, count);
      const Vec cosine = get(c + at + j, count), sine = get(s + at + j, count);
      put(y + j, count, a * cosine - b * sine);
      put(z + j, count, b * cosine + a * sine);
    });
  });
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<rms_norm>(
            "rms_norm(Tensor x, Tensor? weight, float eps, bool centred, Tensor(a!) out) -> ()")
        .add<add_norm>(
            "add_norm(Tensor x, Tensor residual, Tensor? after, Tensor? norm, float eps, bool "
            "centred, Tensor(a!) new_residual, Tensor(b!) normed) -> ()")
        .add<gate>("gate(Tensor gates, Tensor values, int activation, Tensor(a!) out) -> ()")
        .add<softcap>("softcap(Tensor x, float cap, Tensor(a!) out) -> ()")
        .add<softmax>("softmax(Tensor x, Tensor(a!) out) -> ()")
        .add<rotate>("rotate(Tensor x, Tensor cos, Tensor sin, Tensor(a!) out) -> ()")
        .add<rope_angles>(
            "rope_angles(Tensor positions, Tensor frequency, float factor, Tensor(a!) cos, "
            "Tensor(b!) sin) -> ()");

}  // namespace
}  // namespace slotzero::rowwise
