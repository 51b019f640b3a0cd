// y = x W^T + b for a W of 4-bit or 8-bit codes, in integer arithmetic.
//
// Activations are rounded to 8 bits once, in chunks of 16 or 32 (integer_rows.h). A number of W is
// (code - zero) * scale + offset, so a chunk of a product is
//   (sum of code * x - zero * sum of x) * (scale * its scale) + offset * (its scale * sum of x).
// The sums in integers are exact on every instruction set; the chunks are added in ascending order,
// in one accumulator in float32, whatever the number of rows. A row never depends on its neighbours.
//
// Codes are packed with sixteen output features side by side, [ceil(N / 16), K / 4, 16, 4] bytes: a
// register holds four neighbouring codes of each feature. 4-bit codes take [.., K / 8, 16, 4], the
// first four in the low halves. Scales and offsets are [ceil(N / 16), groups, 16]. K is padded to
// whole chunks with codes that are multiplied by zeros.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "half.h"
#include "integer_dot.h"
#include "integer_rows.h"
#include "matrix_tiles.h"
#include "product.h"

namespace slotzero::linear_integer {
namespace {

constexpr int64_t QUAD_BYTES = FEATURES * 4;  // four codes of each feature of a block

// Scales or offsets in float32 or half precision.
struct Numbers {
  const void* data = nullptr;
  bool is_half = false;

  Vec at(int64_t i) const {
    return is_half ? load(static_cast<const uint16_t*>(data) + i)
                   : load(static_cast<const float*>(data) + i);
  }
  float one(int64_t i) const {
    return is_half ? widened(static_cast<const uint16_t*>(data)[i])
                   : static_cast<const float*>(data)[i];
  }
};

// A weight, or those of several experts one after the other.
struct Weight {
  const uint8_t* codes;
  Numbers scales, offsets;
  const float* bias;
  int64_t features, blocks, chunk, chunks, groups, group_chunks;
  int32_t zero;
  bool is_half;  // two codes in a byte

  int64_t chunk_bytes() const { return chunk / 4 * QUAD_BYTES / (is_half ? 2 : 1); }
};

// Where the scales of a block are, from chunk to chunk. It counts, because a division costs as much as
// a chunk of several rows.
class GroupOf {
 public:
  GroupOf(int64_t first, int64_t group_chunks) : at_(first), size_(group_chunks), left_(group_chunks) {}

  int64_t operator*() const { return at_; }
  void next() {
    if (--left_) return;
    at_ += FEATURES;
    left_ = size_;
  }

 private:
  int64_t at_, size_, left_;
};

// Sixteen output features.
struct Block {
  const Weight& weight;
  const uint8_t* codes;
  int64_t groups_at;

  Block(const Weight& its, int64_t at)
      : weight(its), codes(its.codes + at * its.chunks * its.chunk_bytes()),
        groups_at(at * its.groups * FEATURES) {}

  GroupOf first_group() const { return {groups_at, weight.group_chunks}; }
  int64_t group_at(int64_t chunk) const {
    return groups_at + chunk / weight.group_chunks * FEATURES;
  }
};

// Where the results of a block, or of neighbouring ones, go: y[row * stride + i] for the first `count`
// features.
struct Target {
  float* y;
  int64_t stride, count;
  const float* bias;

  Target block(int64_t i) const {
    const int64_t at = i * FEATURES;
    return {y + at, stride, std::min(FEATURES, count - at), bias ? bias + at : nullptr};
  }

  void put(int64_t row, const Vec* values) const {
    if (count == FEATURES) {
      UNROLL for (int j = 0; j < VECS; ++j)
        store(y + row * stride + j * LANES, bias ? values[j] + load(bias + j * LANES) : values[j]);
      return;
    }
    put_some(row, values);
  }

  [[gnu::noinline]] void put_some(int64_t row, const Vec* values) const {
    for (int64_t i = 0; i < count; ++i) {
      const float value = values[i / LANES][i % LANES];
      y[row * stride + i] = bias ? value + bias[i] : value;
    }
  }
};

inline int32_t four(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, sizeof bytes);
  return bytes;
}

// Asks for the codes of a chunk further on. A processor does so by itself only within a page of memory,
// and one or few rows take as long as reading the weight does.
inline void prefetch(const uint8_t* codes, int64_t bytes) {
  constexpr int64_t AHEAD = 2048, LINE = 64;
  for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(codes + AHEAD + i);
}

// Adds to `sums` the products of one chunk of neighbouring rows of a panel.
template <bool half, int M, int QUADS>
inline void add_chunk(const uint8_t* codes, const int8_t* x, Sums (*sums)[VECS]) {
  constexpr int STEP = half ? 2 : 1;
  UNROLL for (int quad = 0; quad < QUADS; quad += STEP) {
    UNROLL for (int j = 0; j < VECS; ++j) {
      const Codes both = load_codes(codes + quad / STEP * QUAD_BYTES + j * 4 * LANES);
      const Codes low = half ? both & 15 : both;
      UNROLL for (int m = 0; m < M; ++m)
        sums[m][j] = dot4<half>(sums[m][j], low, four(x + 4 * (m * QUADS + quad)));
      if constexpr (half) {
        const Codes high = both >> 4;
        UNROLL for (int m = 0; m < M; ++m)
          sums[m][j] = dot4<half>(sums[m][j], high, four(x + 4 * (m * QUADS + quad + 1)));
      }
    }
  }
}

// Rows of a panel: `at` is where the first chunk of the first one is, and `row` its place in y.
struct PanelRows {
  const IntegerRows& x;
  int64_t at, row;
};

template <bool half, int M>
void tile(const PanelRows& rows, const Block& block, const Target& target) {
  const Weight& weight = block.weight;
  const IntegerRows& x = rows.x;
  const int64_t bytes = weight.chunk_bytes(), chunks = x.chunks, width = x.width, chunk = x.chunk;
  const Numbers scales = weight.scales, offsets = weight.offsets;
  const uint8_t* codes = block.codes;
  const int8_t* codes_of_x = x.codes.data() + rows.at * chunk;
  const float *scales_of_x = x.scales.data() + rows.at, *offsets_of_x = x.offsets.data() + rows.at;
  const int32_t* begins = x.begins.data() + rows.at;
  Vec acc[M][VECS];
  UNROLL for (int m = 0; m < M; ++m) UNROLL for (int j = 0; j < VECS; ++j) acc[m][j] = Vec{};
  GroupOf group = block.first_group();
  for (int64_t c = 0; c < chunks; ++c, group.next()) {
    Sums sums[M][VECS];
    UNROLL for (int m = 0; m < M; ++m)
      UNROLL for (int j = 0; j < VECS; ++j) sums[m][j] = all_lanes(begins[m]);
    prefetch(codes, bytes);
    if (chunk == 32)
      add_chunk<half, M, 8>(codes, codes_of_x, sums);
    else
      add_chunk<half, M, 4>(codes, codes_of_x, sums);
    UNROLL for (int j = 0; j < VECS; ++j) {
      const Vec scale = scales.at(*group + j * LANES);
      UNROLL for (int m = 0; m < M; ++m)
        acc[m][j] = fused(__builtin_convertvector(sums[m][j], Vec), scale * all(scales_of_x[m]), acc[m][j]);
      if (!offsets.data) continue;
      const Vec offset = offsets.at(*group + j * LANES);
      UNROLL for (int m = 0; m < M; ++m) acc[m][j] = fused(offset, all(offsets_of_x[m]), acc[m][j]);
    }
    codes += bytes, codes_of_x += width * chunk;
    scales_of_x += width, offsets_of_x += width, begins += width;
  }
  UNROLL for (int m = 0; m < M; ++m) target.put(rows.row + m, acc[m]);
}

constexpr int STRIP_ROWS = LANES == 16 ? 8 : 4, STRIP_BLOCKS = LANES == 16 ? 2 : 1;
static_assert(PANEL % STRIP_ROWS == 0);

// A strip of rows and `BLOCKS` neighbouring blocks, chunk by chunk: codes are unpacked and scales widened
// once for all rows, and the sums in float32 are in memory, so that those in integers have all registers.
// Rows [begin, end) of a stretch are a multiple of STRIP_ROWS.
template <bool half, int BLOCKS, int QUADS>
void strip(const IntegerRows& x, int64_t stretch, int64_t begin, int64_t end, const Block& first,
           const Target& target) {
  constexpr int WIDTH = BLOCKS * VECS, STEP = half ? 2 : 1;
  const Weight& weight = first.weight;
  const int64_t bytes = weight.chunk_bytes(), next_block = bytes * weight.chunks;
  const int64_t next_groups = weight.groups * FEATURES;
  const bool has_offsets = weight.offsets.data;
  const int8_t* codes_of_x = x.codes.data();
  const float *scales_of_x = x.scales.data(), *offsets_of_x = x.offsets.data();
  const int32_t* begins = x.begins.data();
  Vec acc[ROWS_IN_CACHE][WIDTH];
  std::fill_n(acc[0], (end - begin) * WIDTH, Vec{});
  int64_t places[ROWS_IN_CACHE / STRIP_ROWS];
  for (int64_t row = begin; row < end; row += STRIP_ROWS)
    places[(row - begin) / STRIP_ROWS] = x.at(stretch, row);
  const uint8_t* codes = first.codes;
  GroupOf group = first.first_group();
  for (int64_t c = 0; c < x.chunks; ++c, group.next(), codes += bytes) {
    Codes unpacked[QUADS][WIDTH];
    Vec scales[WIDTH], offsets[WIDTH] = {};
    UNROLL for (int b = 0; b < BLOCKS; ++b) {
      const uint8_t* from = codes + b * next_block;
      prefetch(from, bytes);
      UNROLL for (int quad = 0; quad < QUADS; quad += STEP)
        UNROLL for (int j = 0; j < VECS; ++j) {
          const Codes some = load_codes(from + quad / STEP * QUAD_BYTES + j * 4 * LANES);
          unpacked[quad][b * VECS + j] = half ? some & 15 : some;
          if constexpr (half) unpacked[quad + 1][b * VECS + j] = some >> 4;
        }
      UNROLL for (int j = 0; j < VECS; ++j) {
        const int64_t at = *group + b * next_groups + j * LANES;
        scales[b * VECS + j] = weight.scales.at(at);
        if (has_offsets) offsets[b * VECS + j] = weight.offsets.at(at);
      }
    }
    for (int64_t row = begin; row < end; row += STRIP_ROWS) {
      const int64_t at = places[(row - begin) / STRIP_ROWS] + c * x.width;
      const int8_t* its = codes_of_x + at * QUADS * 4;
      Sums sums[STRIP_ROWS][WIDTH];
      UNROLL for (int m = 0; m < STRIP_ROWS; ++m)
        UNROLL for (int j = 0; j < WIDTH; ++j) sums[m][j] = all_lanes(begins[at + m]);
      UNROLL for (int quad = 0; quad < QUADS; ++quad)
        UNROLL for (int m = 0; m < STRIP_ROWS; ++m) {
          const int32_t its_four = four(its + 4 * (m * QUADS + quad));
          UNROLL for (int j = 0; j < WIDTH; ++j)
            sums[m][j] = dot4<half>(sums[m][j], unpacked[quad][j], its_four);
        }
      UNROLL for (int m = 0; m < STRIP_ROWS; ++m) {
        const Vec scale = all(scales_of_x[at + m]), offset = all(offsets_of_x[at + m]);
        UNROLL for (int j = 0; j < WIDTH; ++j) {
          Vec& sum = acc[row - begin + m][j];
          sum = fused(__builtin_convertvector(sums[m][j], Vec), scales[j] * scale, sum);
          if (has_offsets) sum = fused(offsets[j], offset, sum);
        }
      }
    }
  }
  for (int b = 0; b < BLOCKS; ++b) {
    const Target its = target.block(b);
    for (int64_t row = begin; row < end; ++row) its.put(row, acc[row - begin] + b * VECS);
  }
}

#if !defined(SLOTZERO_PLAIN) && defined(__AMX_INT8__) && defined(__linux__)
// Adds the scaled sums of one chunk to sixteen rows, which have the numbers from `at` on.
inline void add_scaled(const IntegerRows& x, int64_t at, const Weight& weight, int64_t group,
                       const int32_t* sums, Vec* acc) {
  const Vec scale = weight.scales.at(group);
  UNROLL for (int m = 0; m < TILE_ROWS; ++m) {
    Sums sum;
    std::memcpy(&sum, sums + m * FEATURES, sizeof sum);
    if (weight.zero) sum += x.begins[at + m];
    acc[m] = fused(__builtin_convertvector(sum, Vec), scale * all(x.scales[at + m]), acc[m]);
  }
  if (!weight.offsets.data) return;
  const Vec offset = weight.offsets.at(group);
  UNROLL for (int m = 0; m < TILE_ROWS; ++m) acc[m] = fused(offset, all(x.offsets[at + m]), acc[m]);
}

// The codes of a block, one per byte.
const uint8_t* unpacked(const Block& block, int64_t size) {
  if (!block.weight.is_half) return block.codes;
  thread_local std::vector<uint8_t> scratch;
  scratch.resize(size);
  for (int64_t i = 0; i < size / 2; i += QUAD_BYTES) {
    const Codes both = load_codes(block.codes + i), low = both & 15, high = both >> 4;
    std::memcpy(scratch.data() + 2 * i, &low, sizeof low);
    std::memcpy(scratch.data() + 2 * i + QUAD_BYTES, &high, sizeof high);
  }
  return scratch.data();
}

// The first `end` rows of a stretch: whole panels.
void matrix_tiles(const IntegerRows& x, int64_t stretch, int64_t end, const Block& block,
                  const Target& target) {
  const Weight& weight = block.weight;
  const int64_t chunk = x.chunk, bytes = chunk / 4 * QUAD_BYTES, step = TILE_ROWS * chunk;
  const uint8_t* codes = unpacked(block, x.chunks * bytes);
  const TileShape shape(chunk);
  alignas(64) int32_t sums[2][TILE_ROWS * FEATURES];
  for (int64_t row = 0; row < end; row += TILE_ROWS) {
    const int64_t at = x.at(stretch, row);
    const int8_t* codes_of_x = x.codes.data() + at * chunk;
    Vec acc[TILE_ROWS];
    UNROLL for (int m = 0; m < TILE_ROWS; ++m) acc[m] = Vec{};
    GroupOf group = block.first_group();
    for (int64_t c = 0; c < x.chunks; c += 2) {
      even_tile_product(codes_of_x + c * step, chunk, codes + c * bytes, sums[0]);
      const bool has_two = c + 1 < x.chunks;
      if (has_two)
        odd_tile_product(codes_of_x + (c + 1) * step, chunk, codes + (c + 1) * bytes, sums[1]);
      add_scaled(x, at + c * TILE_ROWS, weight, *group, sums[0], acc);
      group.next();
      if (has_two) add_scaled(x, at + (c + 1) * TILE_ROWS, weight, *group, sums[1], acc);
      group.next();
    }
    UNROLL for (int m = 0; m < TILE_ROWS; ++m) target.put(row + m, acc + m);
  }
}
#else
inline bool has_tiles() { return false; }
inline void matrix_tiles(const IntegerRows&, int64_t, int64_t, const Block&, const Target&) {}
#endif

// At most STRIP_BLOCKS neighbouring blocks of a weight, the first of which is block `at`, and a stretch of
// `end` rows. A register tile lies in one panel: those before it are full.
template <bool half>
void blocks_of_rows(const IntegerRows& x, int64_t stretch, int64_t end, const Weight& weight, int64_t at,
                    int64_t count, const Target& target) {
  int64_t begin = 0;
  if (end >= PANEL && has_tiles()) {
    begin = end - end % PANEL;
    for (int64_t i = 0; i < count; ++i)
      matrix_tiles(x, stretch, begin, Block(weight, at + i), target.block(i));
  }
  const int64_t strip_end = end - (end - begin) % STRIP_ROWS;
  if (begin < strip_end) {
    const auto multiply_strip = [&]<int BLOCKS>() {
      const auto of_chunk = weight.chunk == 32 ? strip<half, BLOCKS, 8> : strip<half, BLOCKS, 4>;
      of_chunk(x, stretch, begin, strip_end, Block(weight, at), target);
    };
    if (count == STRIP_BLOCKS)
      multiply_strip.template operator()<STRIP_BLOCKS>();
    else
      multiply_strip.template operator()<1>();
  }
  if (strip_end == end) return;
  for (int64_t i = 0; i < count; ++i) {
    const Block block(weight, at + i);
    const Target its = target.block(i);
    int64_t row = strip_end;
    const auto rows = [&] { return PanelRows{x, x.at(stretch, row), row}; };
    if constexpr (STRIP_ROWS > 4)
      for (; row + 4 <= end; row += 4) tile<half, 4>(rows(), block, its);
    for (; row + 2 <= end; row += 2) tile<half, 2>(rows(), block, its);
    for (; row < end; ++row) tile<half, 1>(rows(), block, its);
  }
}

// The scales or offsets of weights [.., blocks]: float32 or float16 [.., blocks, groups, 16].
Numbers numbers_of(const char* name, const Tensor& tensor, const Tensor& codes, int64_t groups) {
  const bool is_half = tensor.scalar_type() == ScalarType::Half;
  const ScalarType dtype = is_half ? ScalarType::Half : ScalarType::Float;
  const int64_t blocks = codes.size(codes.dim() - 3);
  if (codes.dim() == 3)
    expect("integer", name, tensor, dtype, {blocks, groups, FEATURES});
  else
    expect("integer", name, tensor, dtype, {codes.size(0), blocks, groups, FEATURES});
  return {tensor.data_ptr(), is_half};
}

// How the numbers of a weight are stored: WeightFormat, with `group` input features (or all).
struct Format {
  int64_t bits, zero, group;
};

// The tensors of one weight, `dim` 3, or of several, 4, checked against K input and N output features.
Weight weight_of(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& offsets,
                 const std::optional<Tensor>& bias, Format format, int64_t K, int64_t N, int64_t dim) {
  CHECK(format.bits == 4 || format.bits == 8, "integer: codes must have 4 or 8 bits");
  CHECK(0 <= format.zero && format.zero < 1 << format.bits, "integer: zero must be a code");
  CHECK(K > 0 && N > 0 && format.group > 0, "integer: there must be features and groups of them");
  CHECK(codes.dim() == dim, "integer: codes must have ", dim, " axes");
  const int64_t blocks = (N + FEATURES - 1) / FEATURES;
  const int64_t chunk = format.group < K && format.group % 32 ? 16 : 32;
  const int64_t chunks = (K + chunk - 1) / chunk;
  const int64_t group_chunks = format.group < K ? format.group / chunk : chunks;
  CHECK(format.group >= K || format.group % chunk == 0,
        "integer: a group must be a multiple of 16 input features, or all");
  const int64_t groups = (chunks + group_chunks - 1) / group_chunks;
  const int64_t steps = chunks * chunk * format.bits / 32;
  if (dim == 3) {
    expect("integer", "codes", codes, ScalarType::Byte, {blocks, steps, QUAD_BYTES});
    if (bias) expect("integer", "bias", *bias, ScalarType::Float, {N});
  } else {
    expect("integer", "codes", codes, ScalarType::Byte, {codes.size(0), blocks, steps, QUAD_BYTES});
    if (bias) expect("integer", "bias", *bias, ScalarType::Float, {codes.size(0), N});
  }
  return {static_cast<const uint8_t*>(codes.data_ptr()),
          numbers_of("scales", scales, codes, groups),
          offsets ? numbers_of("offsets", *offsets, codes, groups) : Numbers{},
          bias ? static_cast<const float*>(bias->data_ptr()) : nullptr,
          N,
          blocks,
          chunk,
          chunks,
          groups,
          group_chunks,
          static_cast<int32_t>(format.zero),
          format.bits == 4};
}

// y [M, N] = the products of all stretches of x [M, K]. Rows of a stretch past the last weight are zeros.
void multiply(const Tensor& x, const Weight& weight, const std::vector<Stretch>& stretches,
              int64_t num_weights, Tensor& out) {
  const int64_t M = x.size(0), K = x.size(1), N = weight.features;
  thread_local IntegerRows rounded;  // a thread keeps its memory for the next product
  const IntegerRows& rows = rounded;
  rounded.round(static_cast<const float*>(x.data_ptr()), stretches, K, weight.chunk, weight.zero);
  auto* y = static_cast<float*>(out.data_ptr());
  const int64_t strips = (weight.blocks + STRIP_BLOCKS - 1) / STRIP_BLOCKS;
  const int64_t items = static_cast<int64_t>(stretches.size()) * strips;
  parallel_for(items, M * K * N > WORTH_THREADS, [&](int64_t item) {
    const int64_t stretch = item / strips, i = item % strips * STRIP_BLOCKS, n = i * FEATURES;
    const auto [begin, end, which] = stretches[stretch];
    const int64_t blocks = std::min<int64_t>(STRIP_BLOCKS, weight.blocks - i);
    const int64_t count = std::min(blocks * FEATURES, N - n);
    float* to = y + begin * N + n;
    if (which == num_weights) {
      for (int64_t m = begin; m < end; ++m, to += N) std::fill_n(to, count, 0.0f);
      return;
    }
    const Target target{to, N, count, weight.bias ? weight.bias + which * N + n : nullptr};
    (weight.is_half ? blocks_of_rows<true> : blocks_of_rows<false>)(
        rows, stretch, end - begin, weight, which * weight.blocks + i, blocks, target);
  });
}

// x [M, K], out [M, N], and the tensors of one weight
void integer(Tensor x, Tensor codes, Tensor scales, std::optional<Tensor> offsets,
             std::optional<Tensor> bias, int64_t bits, int64_t zero, int64_t group, Tensor out) {
  CHECK(x.dim() == 2 && out.dim() == 2, "integer: x and out must have two axes");
  const int64_t M = x.size(0), K = x.size(1), N = out.size(1);
  expect("integer", "x", x, ScalarType::Float, {M, K});
  expect("integer", "out", out, ScalarType::Float, {M, N});
  const Weight weight = weight_of(codes, scales, offsets, bias, {bits, zero, group}, K, N, 3);
  const int32_t starts[] = {0, static_cast<int32_t>(M)};
  multiply(x, weight, stretches_of(starts, 1, M), 1, out);
}

// The same for experts: rows [starts[e], starts[e + 1]) are `integer` of the weight of expert e; the
// rows after are zeros. Every tensor of the weights has an axis of experts before the others.
void integer_grouped(Tensor x, Tensor codes, Tensor scales, std::optional<Tensor> offsets,
                     std::optional<Tensor> bias, Tensor starts, int64_t bits, int64_t zero,
                     int64_t group, Tensor out) {
  CHECK(x.dim() == 2 && out.dim() == 2, "integer: x and out must have two axes");
  const int64_t M = x.size(0), K = x.size(1), N = out.size(1);
  expect("integer", "x", x, ScalarType::Float, {M, K});
  expect("integer", "out", out, ScalarType::Float, {M, N});
  const Weight weight = weight_of(codes, scales, offsets, bias, {bits, zero, group}, K, N, 4);
  const int64_t experts = codes.size(0);
  expect("integer", "starts", starts, ScalarType::Int, {experts + 1});
  multiply(x, weight, stretches_of(static_cast<const int32_t*>(starts.data_ptr()), experts, M), experts,
           out);
}

// Rows `ids` [T] of a weight as numbers: out [T, K].
void integer_rows(Tensor ids, Tensor codes, Tensor scales, std::optional<Tensor> offsets, int64_t bits,
                  int64_t zero, int64_t group, int64_t num_rows, Tensor out) {
  CHECK(out.dim() == 2, "integer: out must have two axes");
  const int64_t T = out.size(0), K = out.size(1);
  const bool is_long = ids.scalar_type() == ScalarType::Long;
  expect("integer", "ids", ids, is_long ? ScalarType::Long : ScalarType::Int, {T});
  expect("integer", "out", out, ScalarType::Float, {T, K});
  const Weight weight =
      weight_of(codes, scales, offsets, std::nullopt, {bits, zero, group}, K, num_rows, 3);
  auto* y = static_cast<float*>(out.data_ptr());
  for (int64_t t = 0; t < T; ++t) {
    const int64_t id = is_long ? static_cast<const int64_t*>(ids.data_ptr())[t]
                               : static_cast<const int32_t*>(ids.data_ptr())[t];
    CHECK(0 <= id && id < num_rows, "integer: an id is not a row of the weight");
    const Block block(weight, id / FEATURES);
    const int64_t feature = id % FEATURES;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t quad = k / 4, step = weight.is_half ? quad / 2 : quad;
      const int byte = block.codes[step * QUAD_BYTES + feature * 4 + k % 4];
      const int code = !weight.is_half ? byte : quad % 2 ? byte >> 4 : byte & 15;
      const int64_t at = block.group_at(k / weight.chunk) + feature;
      const float number = static_cast<float>(code - weight.zero) * weight.scales.one(at);
      y[t * K + k] = weight.offsets.data ? number + weight.offsets.one(at) : number;
    }
  }
}

// Packs codes [.., N, K], one per byte, into out [.., ceil(N / 16), K / 4 or K / 8, 64].
void pack_integer(Tensor codes, int64_t bits, Tensor out) {
  CHECK(bits == 4 || bits == 8, "integer: codes must have 4 or 8 bits");
  CHECK(codes.dim() >= 2 && out.dim() == codes.dim() + 1, "integer: out must have an axis more than codes");
  const int64_t last = codes.dim() - 1, N = codes.size(last - 1), K = codes.size(last);
  const int64_t blocks = out.size(last - 1), steps = out.size(last), quads = steps * 8 / bits;
  CHECK(codes.is_contiguous() && codes.scalar_type() == ScalarType::Byte && out.is_contiguous() &&
            out.scalar_type() == ScalarType::Byte,
        "integer: codes and out must be contiguous and uint8");
  bool fits = out.size(last + 1) == QUAD_BYTES && quads * 4 >= K && blocks * FEATURES >= N;
  for (int64_t axis = 0; axis < last - 1; ++axis) fits = fits && codes.size(axis) == out.size(axis);
  CHECK(fits, "integer: out does not fit the codes");
  const int64_t weights = N && K ? codes.numel() / (N * K) : 0;
  const auto* from = static_cast<const uint8_t*>(codes.data_ptr());
  auto* to = static_cast<uint8_t*>(out.data_ptr());
  parallel_for(weights * blocks, true, [&](int64_t item) {
    const int64_t first = item % blocks * FEATURES, size = quads * 4;
    uint8_t* packed = to + item * steps * QUAD_BYTES;
    std::vector<uint8_t> rows(FEATURES * size);  // padded with zeros
    for (int64_t i = 0; i < std::min(FEATURES, N - first); ++i)
      std::copy_n(from + (item / blocks * N + first + i) * K, K, rows.data() + i * size);
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t i = 0; i < FEATURES; ++i, packed += 4) {
        const uint8_t* quad = rows.data() + i * size + step * 32 / bits;
        for (int j = 0; j < 4; ++j)
          packed[j] = bits == 8 ? quad[j] : static_cast<uint8_t>(quad[j] | quad[4 + j] << 4);
      }
  });
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<integer>(
            "integer(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? bias, int "
            "bits, int zero, int group, Tensor(a!) out) -> ()")
        .add<integer_grouped>(
            "integer_grouped(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? "
            "bias, Tensor starts, int bits, int zero, int group, Tensor(a!) out) -> ()")
        .add<pack_integer>("pack_integer(Tensor codes, int bits, Tensor(a!) out) -> ()")
        .add<integer_rows>(
            "integer_rows(Tensor ids, Tensor codes, Tensor scales, Tensor? offsets, int bits, "
            "int zero, int group, int num_rows, Tensor(a!) out) -> ()");

}  // namespace
}  // namespace slotzero::linear_integer
