// y = x W^T + b in float32 for a quantised W, whose numbers are (code - zero) * scale + offset.
//
// Codes are packed as dense weights are, sixteen output features side by side: [ceil(N / 16), K, 16]
// bytes, or 8 bytes of two 4-bit codes, feature i in the low half and feature i + 8 in the high one.
// Scales and offsets are [ceil(N / 16), groups, 16] in float32. A number is rounded as plain torch
// rounds it and then used as a dense weight is, so the result is that of the dequantised weight, bit
// for bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "float8.h"
#include "product.h"

namespace slotzero::linear_quantized {
namespace {

constexpr int HALF = FEATURES / 2;

typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

enum Kind { UINT4, UINT8, FLOAT8, MXFP4 };  // numbered as in kernels.py

constexpr bool is_half_byte(Kind kind) { return kind == UINT4 || kind == MXFP4; }

inline Ints whole(int32_t x) { return x - Ints{}; }

inline Vec floats(Ints x) { return __builtin_convertvector(x, Vec); }

inline Vec as_floats(Ints x) {
  Vec v;
  std::memcpy(&v, &x, sizeof v);
  return v;
}

inline Ints as_ints(Vec x) {
  Ints v;
  std::memcpy(&v, &x, sizeof v);
  return v;
}

// The numbers of codes before their scale.
template <Kind kind>
inline Vec numbers(Ints code, Vec zero) {
  if constexpr (kind == FLOAT8) {  // e4m3: 1 sign, 4 exponent and 3 fraction bits, biased by 7
    const Ints sign = (code & 0x80) << 24, size = code & 0x7f;
    const Vec normal = as_floats((size << 20) + whole(120 << 23));
    const Vec small = floats(size) * all(0x1p-9f);
    return as_floats(as_ints(size < whole(8) ? small : normal) | sign);
  } else if constexpr (kind == MXFP4) {  // e2m1; twice its size is 0, 1, 2, 3, 4, 6, 8 or 12
    const Ints size = code & 7, power = size >> 1;
    const Ints twice = power == whole(0) ? size : ((size & 1) | 2) << (power - 1);
    return floats((code & 8) != whole(0) ? -twice : twice) * all(0.5f);
  } else {
    return floats(code) - zero;
  }
}

// One block of a weight.
struct Block {
  const uint8_t* codes;  // [K, 16] or [K, 8]
  const float *scales, *offsets;  // [groups, 16]
};

// What all blocks of a weight share.
struct Shape {
  int64_t K, group, groups;
  const int32_t* group_of;  // [K], or null: groups are consecutive
  float zero;
};

// Widen the codes of sixteen features; of half bytes, features 0 to 7 are in the low halves.
#if !defined(SLOTZERO_PLAIN) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
template <bool half>
inline void widen(const uint8_t* codes, Ints* to) {
  __m128i bytes;
  if constexpr (half) {
    const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m128i low = _mm_set1_epi8(15);
    bytes = _mm_unpacklo_epi64(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
  } else {
    bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  }
#if defined(__AVX512F__)
  to[0] = reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(bytes));
#else
  to[0] = reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(bytes));
  to[1] = reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
#endif
}
#elif !defined(SLOTZERO_PLAIN) && defined(__ARM_NEON)
template <bool half>
inline void widen(const uint8_t* codes, Ints* to) {
  uint8x16_t bytes;
  if constexpr (half) {
    const uint8x8_t both = vld1_u8(codes);
    bytes = vcombine_u8(vand_u8(both, vdup_n_u8(15)), vshr_n_u8(both, 4));
  } else {
    bytes = vld1q_u8(codes);
  }
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  to[0] = reinterpret_cast<Ints>(vmovl_u16(vget_low_u16(low)));
  to[1] = reinterpret_cast<Ints>(vmovl_u16(vget_high_u16(low)));
  to[2] = reinterpret_cast<Ints>(vmovl_u16(vget_low_u16(high)));
  to[3] = reinterpret_cast<Ints>(vmovl_u16(vget_high_u16(high)));
}
#else
template <bool half>
inline void widen(const uint8_t* codes, Ints* to) {
  for (int i = 0; i < FEATURES; ++i) {
    const int code = !half ? codes[i] : i < HALF ? codes[i] & 15 : codes[i - HALF] >> 4;
    to[i / LANES][i % LANES] = code;
  }
}
#endif

template <Kind kind>
inline void decode(const uint8_t* codes, Vec zero, const Vec* scale, const Vec* offset, Vec* out) {
  Ints wide[VECS];
  widen<is_half_byte(kind)>(codes, wide);
  UNROLL for (int j = 0; j < VECS; ++j) {
    const Vec value = numbers<kind>(wide[j], zero) * scale[j];
    out[j] = offset ? value + offset[j] : value;
  }
}

inline void load_group(const float* from, int64_t group, Vec* to) {
  UNROLL for (int j = 0; j < VECS; ++j) to[j] = load(from + group * FEATURES + j * LANES);
}

// Calls visit(k, numbers) for every input feature of a block, in order.
template <Kind kind, class Visit>
inline void each_feature(const Block& block, const Shape& shape, const Visit& visit) {
  constexpr int bytes = is_half_byte(kind) ? HALF : FEATURES;
  const Vec zero = all(shape.zero);
  Vec scale[VECS], offset[VECS], w[VECS];
  const auto take = [&](int64_t group) {
    load_group(block.scales, group, scale);
    if (block.offsets) load_group(block.offsets, group, offset);
  };
  for (int64_t first = 0, group = 0; first < shape.K; first += shape.group, ++group) {
    if (!shape.group_of) take(group);
    const int64_t end = std::min(first + shape.group, shape.K);
    for (int64_t k = first; k < end; ++k) {
      if (shape.group_of) take(shape.group_of[k]);
      decode<kind>(block.codes + k * bytes, zero, scale, block.offsets ? offset : nullptr, w);
      visit(k, w);
    }
  }
}

// Like `tile` of a dense weight.
template <Kind kind, int M>
void quantized_tile(const float* x, const Block& block, const Shape& shape, const float* b, float* y,
                    Strides by, int64_t n) {
  Vec acc[M][VECS];
  UNROLL for (int m = 0; m < M; ++m) UNROLL for (int j = 0; j < VECS; ++j) acc[m][j] = Vec{};
  each_feature<kind>(block, shape, [&](int64_t k, const Vec* w) {
    UNROLL for (int m = 0; m < M; ++m) {
      const Vec xv = all(x[m * by.x + k]);
      UNROLL for (int j = 0; j < VECS; ++j) acc[m][j] = fused(w[j], xv, acc[m][j]);
    }
  });
  UNROLL for (int m = 0; m < M; ++m) {
    float out[FEATURES];
    UNROLL for (int j = 0; j < VECS; ++j) store(out + j * LANES, acc[m][j]);
    for (int64_t i = 0; i < n; ++i) y[m * by.y + i] = b ? out[i] + b[i] : out[i];
  }
}

// More rows than a tile's share the block's numbers, which are decoded once.
template <Kind kind>
void quantized_block(const float* x, const Block& packed, const Shape& shape, const float* b, float* y,
                     int64_t M, Strides by, int64_t n) {
  switch (M) {
    case 1: return quantized_tile<kind, 1>(x, packed, shape, b, y, by, n);
    case 2: return quantized_tile<kind, 2>(x, packed, shape, b, y, by, n);
    case 3: return quantized_tile<kind, 3>(x, packed, shape, b, y, by, n);
    case 4: return quantized_tile<kind, 4>(x, packed, shape, b, y, by, n);
  }
  thread_local std::vector<float> dense;
  dense.resize(shape.K * FEATURES);
  each_feature<kind>(packed, shape, [&](int64_t k, const Vec* w) {
    UNROLL for (int j = 0; j < VECS; ++j) store(dense.data() + k * FEATURES + j * LANES, w[j]);
  });
  block(x, dense.data(), b, y, M, shape.K, {by.x, FEATURES, by.y}, n);
}

// A weight, or those of several experts one after the other.
struct Weight {
  const uint8_t* codes;
  const float *scales, *offsets, *bias;
  Shape shape;
  int64_t blocks, block_bytes, features;

  Block block(int64_t expert, int64_t i) const {
    const int64_t at = expert * blocks + i, group = at * shape.groups * FEATURES;
    return {codes + at * block_bytes, scales + group, offsets ? offsets + group : nullptr};
  }
};

template <class T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

Weight weight_of(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& offsets,
                 const std::optional<Tensor>& group_of, const std::optional<Tensor>& bias, int64_t kind,
                 int64_t zero, int64_t group, int64_t K, int64_t N) {
  const int64_t last = codes.dim() - 1, bytes = is_half_byte(static_cast<Kind>(kind)) ? HALF : FEATURES;
  const int64_t blocks = codes.size(last - 2), groups = scales.size(last - 1);
  CHECK(codes.is_contiguous() && scales.is_contiguous() &&
            (!offsets || offsets->is_contiguous()) &&
            (!group_of || group_of->is_contiguous()) && (!bias || bias->is_contiguous()),
        "quantized: every tensor of a weight must be contiguous");
  CHECK(codes.scalar_type() == ScalarType::Byte && scales.scalar_type() == ScalarType::Float &&
            (!offsets || offsets->scalar_type() == ScalarType::Float) &&
            (!group_of || group_of->scalar_type() == ScalarType::Int),
        "quantized: codes must be uint8, scales and offsets float32, group_of int32");
  CHECK(kind >= UINT4 && kind <= MXFP4, "quantized: unknown kind of codes");
  CHECK(blocks == (N + FEATURES - 1) / FEATURES && codes.size(last - 1) == K &&
            codes.size(last) == bytes && scales.size(last - 2) == blocks &&
            scales.size(last) == FEATURES && (!offsets || offsets->size(last - 1) == groups),
        "quantized: the packed weight does not fit x and out");
  CHECK(group > 0 && (group_of ? group_of->size(group_of->dim() - 1) == K
                               : (K + group - 1) / group == groups),
        "quantized: the groups do not fit the input features");
  return {static_cast<const uint8_t*>(codes.data_ptr()),
          static_cast<const float*>(scales.data_ptr()),
          data_of<float>(offsets),
          data_of<float>(bias),
          {K, group, groups, data_of<int32_t>(group_of), static_cast<float>(zero)},
          blocks,
          K * bytes,
          N};
}

template <Kind kind>
void linear_rows(const float* x, const Weight& weight, float* y, int64_t M) {
  const int64_t K = weight.shape.K, N = weight.features;
  for (int64_t m = 0; m < M; m += ROWS_IN_CACHE) {
    const int64_t rows = std::min(ROWS_IN_CACHE, M - m);
    parallel_for(weight.blocks, rows * K * N > WORTH_THREADS, [&](int64_t i) {
      const int64_t n = i * FEATURES;
      quantized_block<kind>(x + m * K, weight.block(0, i), weight.shape,
                            weight.bias ? weight.bias + n : nullptr, y + m * N + n, rows,
                            {K, FEATURES, N}, std::min(FEATURES, N - n));
    });
  }
}

template <Kind kind>
void grouped_rows(const float* x, const Weight& weight, const std::vector<Stretch>& stretches,
                  int64_t experts, float* y, int64_t M) {
  const int64_t K = weight.shape.K, N = weight.features;
  const int64_t items = static_cast<int64_t>(stretches.size()) * weight.blocks;
  parallel_for(items, M * K * N > WORTH_THREADS, [&](int64_t item) {
    const auto [begin, end, expert] = stretches[item / weight.blocks];
    const int64_t i = item % weight.blocks, n = i * FEATURES, features = std::min(FEATURES, N - n);
    float* out = y + begin * N + n;
    if (expert == experts) {
      for (int64_t m = begin; m < end; ++m, out += N) std::fill_n(out, features, 0.0f);
      return;
    }
    Shape shape = weight.shape;
    if (shape.group_of) shape.group_of += expert * K;
    quantized_block<kind>(x + begin * K, weight.block(expert, i), shape,
                          weight.bias ? weight.bias + expert * N + n : nullptr, out, end - begin,
                          {K, FEATURES, N}, features);
  });
}

// x [M, K], out [M, N], and the tensors of one weight
void quantized(Tensor x, Tensor codes, Tensor scales, std::optional<Tensor> offsets,
               std::optional<Tensor> group_of, std::optional<Tensor> bias, int64_t kind, int64_t zero,
               int64_t group, Tensor out) {
  CHECK(x.is_contiguous() && out.is_contiguous(), "quantized: x and out must be contiguous");
  const int64_t M = x.size(0), K = x.size(1), N = out.size(1);
  CHECK(codes.dim() == 3, "quantized: the weight of one layer is needed");
  const Weight weight = weight_of(codes, scales, offsets, group_of, bias, kind, zero, group, K, N);
  const auto* xp = static_cast<const float*>(x.data_ptr());
  auto* yp = static_cast<float*>(out.data_ptr());
  switch (kind) {
    case UINT4: return linear_rows<UINT4>(xp, weight, yp, M);
    case UINT8: return linear_rows<UINT8>(xp, weight, yp, M);
    case FLOAT8: return linear_rows<FLOAT8>(xp, weight, yp, M);
    case MXFP4: return linear_rows<MXFP4>(xp, weight, yp, M);
  }
}

// The same for experts: rows [starts[e], starts[e + 1]) are `quantized` of the weight of expert e;
// the rows after are zeros. Every tensor of the weights has an axis of experts before the others.
void quantized_grouped(Tensor x, Tensor codes, Tensor scales, std::optional<Tensor> offsets,
                       std::optional<Tensor> group_of, std::optional<Tensor> bias, Tensor starts,
                       int64_t kind, int64_t zero, int64_t group, Tensor out) {
  CHECK(x.is_contiguous() && out.is_contiguous() && starts.is_contiguous(),
        "quantized_grouped: x, starts and out must be contiguous");
  CHECK(codes.dim() == 4, "quantized_grouped: the weights of several experts are needed");
  const int64_t M = x.size(0), K = x.size(1), N = out.size(1), experts = codes.size(0);
  CHECK(starts.scalar_type() == ScalarType::Int && starts.size(0) == experts + 1,
      "quantized_grouped: starts must be int32, one for each expert and one more");
  const Weight weight = weight_of(codes, scales, offsets, group_of, bias, kind, zero, group, K, N);
  const auto* xp = static_cast<const float*>(x.data_ptr());
  auto* yp = static_cast<float*>(out.data_ptr());
  const auto stretches = stretches_of(static_cast<const int32_t*>(starts.data_ptr()), experts, M);
  switch (kind) {
    case UINT4: return grouped_rows<UINT4>(xp, weight, stretches, experts, yp, M);
    case UINT8: return grouped_rows<UINT8>(xp, weight, stretches, experts, yp, M);
    case FLOAT8: return grouped_rows<FLOAT8>(xp, weight, stretches, experts, yp, M);
    case MXFP4: return grouped_rows<MXFP4>(xp, weight, stretches, experts, yp, M);
  }
}

// Rounds each group of x [M, K] to float8 under one scale: the given one, or the least that holds
// its largest number.
void round_float8(Tensor x, std::optional<Tensor> given, int64_t group, Tensor out) {
  CHECK(x.is_contiguous() && out.is_contiguous() && group > 0,
        "round_float8: x and out must be contiguous");
  const int64_t M = x.size(0), K = x.size(1);
  const auto* xp = static_cast<const float*>(x.data_ptr());
  const auto* fixed = data_of<float>(given);
  auto* yp = static_cast<float*>(out.data_ptr());
  parallel_for(M, M * K > WORTH_THREADS, [&](int64_t m) {
    for (int64_t first = 0; first < K; first += group) {
      const int64_t end = std::min(first + group, K);
      const float* row = xp + m * K;
      float scale = fixed ? *fixed : 0.0f;
      if (!fixed) {
        for (int64_t k = first; k < end; ++k) {
          const float size = std::fabs(row[k]);
          scale = size > scale || std::isnan(size) ? size : scale;
        }
        scale = std::isnan(scale) ? scale : std::max(scale / 448.0f, 1e-12f);
      }
      const float inverse = 1.0f / scale;
      for (int64_t k = first; k < end; ++k) {
        yp[m * K + k] = nearest_float8(row[k] * inverse) * scale;
      }
    }
  });
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<quantized>(
            "quantized(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? group_of, "
            "Tensor? bias, int kind, int zero, int group, Tensor(a!) out) -> ()")
        .add<quantized_grouped>(
            "quantized_grouped(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? "
            "group_of, Tensor? bias, Tensor starts, int kind, int zero, int group, Tensor(a!) "
            "out) -> ()")
        .add<round_float8>(
            "round_float8(Tensor x, Tensor? scale, int group, Tensor(a!) out) -> ()");

}  // namespace
}  // namespace slotzero::linear_quantized
