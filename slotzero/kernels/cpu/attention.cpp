// Paged attention and the KV store on the CPU, in float32.
//
// A token is (slot, position). It reads positions (position - window, position] of its slot, or
// those of its chunk up to its own, through the page table and nothing else; a node of a draft tree
// reads all positions before the tree, and those in the tree whose bit is set. A token of slot 0
// writes no KV and gets zeros. Keys are read in blocks that begin at multiples of a constant, so each
// token's arithmetic is the same alone (decode) and among others of its prompt (prefill).
//
// With scales, pages hold codes of e4m3. A block is decoded once for all queries of a run; the scale
// of keys is part of the softmax scale, and that of values is applied to the result.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "float8.h"
#include "simd.h"
#include "tensor.h"
#include "threads.h"
#include "vector_math.h"

namespace slotzero::attention {
namespace {

constexpr int QUERIES = 48;     // queries of one prompt and KV head that share a pass over the KV, about
constexpr int KEYS = 16;        // keys scored before one rescaling of the sums
constexpr int WORTH_LANES = std::max(4, LANES / 2);  // queries from which on a lane for each is faster
constexpr int TOGETHER = 4;     // queries whose sums of values are in registers together
constexpr int64_t WORTH_THREADS = 1 << 17;  // products below which waking threads costs more
constexpr int UNIT = 8;     // keys in registers at once; the order of sums does not depend on it
constexpr int PLACES = 63;  // most nodes of a tree: the same as in tree_shape.py

const float* floats(const Tensor& t) { return static_cast<const float*>(t.data_ptr()); }
const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); }

// Adds to sums[j] the products of a with row j of b, in registers of a row.
template <int ROWS>
[[gnu::always_inline]] inline void add_products(const float* a, const float* b, int64_t stride, int64_t n, Vec* sums) {
  Vec acc[ROWS];
  UNROLL for (int j = 0; j < ROWS; ++j) acc[j] = Vec{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Vec av = load(a + i);
    UNROLL for (int j = 0; j < ROWS; ++j) acc[j] = fused(av, load(b + j * stride + i), acc[j]);
  }
  if (i < n) {
    const Vec av = load_tail(a + i, n - i, 0.0f);
    for (int j = 0; j < ROWS; ++j) acc[j] = fused(av, load_tail(b + j * stride + i, n - i, 0.0f), acc[j]);
  }
  UNROLL for (int j = 0; j < ROWS; ++j) sums[j] = acc[j];
}

// Dot products of one vector with `count` others, `stride` apart; 0 in the other lanes.
Vec dots_of(const float* a, const float* b, int64_t stride, int count, int64_t n) {
  constexpr int ROWS = std::min(LANES, 8);  // whose addresses fit into registers
  Vec sums[LANES];
  if (count == LANES) {
    UNROLL for (int j = 0; j < LANES; j += ROWS)
      add_products<ROWS>(a, b + j * stride, stride, n, sums + j);
    return lane_sums(sums);
  }
  std::fill_n(sums, LANES, Vec{});
  for (int j = 0; j < count; ++j) add_products<1>(a, b + j * stride, stride, n, sums + j);
  return lane_sums(sums);
}

// y[q] += weighted sums of the same BLOCK vectors, `stride` apart, in order, for several y at once. The
// weight of vector j for y[q] is weights[j * step + q * apart].
template <int QUERIES, int BLOCK>
[[gnu::noinline]] void add_weighted(float* const* y, const float* weights, int64_t step, int64_t apart,
                                    const float* x, int64_t stride, int64_t n) {
  // registers of a y: so their sums do not wait for another
  constexpr int WIDE = QUERIES == 1 ? 1 : REGISTERS == 32 ? 4 : 2;
  int64_t i = 0;
  const auto add = [&]<int VECS>() {
    Vec acc[QUERIES][VECS];
    UNROLL for (int q = 0; q < QUERIES; ++q)
      UNROLL for (int v = 0; v < VECS; ++v) acc[q][v] = load(y[q] + i + v * LANES);
    for (int j = 0; j < BLOCK; ++j) {  // not unrolled: all weights would be read before the first sum
      Vec values[VECS];
      UNROLL for (int v = 0; v < VECS; ++v) values[v] = load(x + j * stride + i + v * LANES);
      UNROLL for (int q = 0; q < QUERIES; ++q)
        UNROLL for (int v = 0; v < VECS; ++v)
          acc[q][v] = fused(values[v], all(weights[j * step + q * apart]), acc[q][v]);
    }
    UNROLL for (int q = 0; q < QUERIES; ++q)
      UNROLL for (int v = 0; v < VECS; ++v) store(y[q] + i + v * LANES, acc[q][v]);
  };
  for (; i + WIDE * LANES <= n; i += WIDE * LANES) add.template operator()<WIDE>();
  for (; i + LANES <= n; i += LANES) add.template operator()<1>();
  for (; i < n; ++i)
    for (int q = 0; q < QUERIES; ++q)
      for (int j = 0; j < BLOCK; ++j) y[q][i] += weights[j * step + q * apart] * x[j * stride + i];
}

// The same of `count` vectors for one y.
void add_weighted_some(float* y, const float* weights, int64_t step, const float* x, int count,
                       int64_t stride, int64_t n) {
  for (int j = 0; j < count;) {
    const bool is_unit = j + UNIT <= count;
    const auto add = is_unit ? add_weighted<1, UNIT> : add_weighted<1, 1>;
    add(&y, weights + j * step, step, 0, x + j * stride, stride, n);
    j += is_unit ? UNIT : 1;
  }
}

void scale(float* y, float a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] *= a;
}

struct Shape {
  int64_t head_dim, value_dim, value_at;
  int64_t stride;  // from a key to the next one of its head
  float scale, softcap;  // softcap 0: none
};

// A layer's KV pages: numbers, or codes with a scale of keys and one of values.
struct Pages {
  const float* numbers;
  const uint8_t* codes;
  float key_scale, value_scale;

  // Returns rows of one head as numbers: the first at `from`, `stride` to the next.
  const float* rows(int64_t from, int count, int64_t size, int64_t stride, float* decoded) const {
    if (numbers) return numbers + from;
    const auto& number = float8_numbers();
    for (int j = 0; j < count; ++j)
      for (int64_t i = 0; i < size; ++i) decoded[j * size + i] = number[codes[from + j * stride + i]];
    return decoded;
  }
};

bool has_codes(const Tensor& kv_pages, const std::optional<Tensor>& scales) {
  CHECK(kv_pages.scalar_type() == (scales ? ScalarType::Byte : ScalarType::Float),
        "kv_pages must be uint8 with scales, and float32 without");
  CHECK(!scales || (scales->is_contiguous() && scales->numel() == 2 &&
                    scales->scalar_type() == ScalarType::Float),
        "kv_scales must be two of float32");
  return scales.has_value();
}

Pages pages_of(const Tensor& kv_pages, const std::optional<Tensor>& scales, bool is_mla) {
  if (!has_codes(kv_pages, scales)) return {floats(kv_pages), nullptr, 1, 1};
  const float* by = floats(*scales);
  return {nullptr, static_cast<const uint8_t*>(kv_pages.data_ptr()), by[0], by[is_mla ? 0 : 1]};
}

// One head of one token: running maximum, sum and weighted values of a softmax.
struct Query {
  const float* q;
  float* out;
  int32_t begin, end;  // visible positions: [begin, end)
  int32_t base;        // from here on, only positions whose bit in `seen` is set
  int64_t seen;
  const uint8_t* taken;  // by position: 1 if an indexer has selected the key; null: all
  float max;
  Vec sum;  // of the keys of each lane

  // Whether the query sees all positions of a block.
  bool sees_all(int32_t first, int count) const {
    return begin <= first && first + count <= end && first + count <= base && !taken;
  }
  bool sees(int32_t position) const {
    const int32_t i = position - base;
    if (taken && !taken[position]) return false;
    return i < 0 || (i < PLACES && (seen >> i & 1));
  }
};

// The scores of KEYS keys, and then their weights: a key always has the same lane.
struct Scores {
  Vec lanes[KEYS / LANES];

  float* data() { return reinterpret_cast<float*>(lanes); }
};

inline Vec scores_of(Vec dots, const Shape& shape) {
  const Vec scores = dots * shape.scale;
  return shape.softcap == 0 ? scores : shape.softcap * tanh_of(scores / shape.softcap);
}

// Raises the query's maximum to that of new scores.
inline void raise_max(Query& query, const Scores& scores, int64_t value_dim) {
  Vec highest = scores.lanes[0];
  UNROLL for (const Vec& some : scores.lanes) highest = some > highest ? some : highest;
  const float max = lane_max(highest);
  if (!(max > query.max)) return;
  const float shrink = exp_of(all(query.max - max))[0];
  query.sum *= shrink;
  scale(query.out, shrink, value_dim);
  query.max = max;
}

// Turns scores into weights, and adds them up.
inline void weigh(Query& query, Scores& scores) {
  UNROLL for (Vec& some : scores.lanes) {
    some = exp_of(some - query.max);
    query.sum += some;
  }
}

// Folds the visible ones of positions [first, first + count) into the query's softmax. `kv` is the
// row of the first position: its key, and the value at its end. Lanes of keys that are not visible
// hold zeros, so the order of sums does not depend on the others.
void fold(Query& query, const float* kv, int32_t first, int count, const Shape& shape, int lane = 0) {
  const int unseen = std::max(0, query.begin - first);
  count = std::min<int>(count, query.end - first) - unseen;
  if (count <= 0) return;
  lane += unseen;
  const int64_t stride = shape.stride, value_dim = shape.value_dim;
  const float *keys = kv + unseen * stride, *values = keys + shape.value_at;
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  Scores scores;
  float* weights = scores.data();
  std::fill_n(weights, KEYS, NONE);
  for (int j = 0; j < count; j += LANES) {
    const int some = std::min(LANES, count - j);
    const Vec its = scores_of(dots_of(query.q, keys + j * stride, stride, some, shape.head_dim), shape);
    if (some == LANES)
      store(weights + lane + j, its);
    else
      store_tail(weights + lane + j, some, its);
  }
  raise_max(query, scores, value_dim);
  weigh(query, scores);
  add_weighted_some(query.out, weights + lane, 1, values, count, stride, value_dim);
}

// `fold` of KEYS keys that all of TOGETHER queries see: values are read once for all of them. Each step
// is taken for all queries before the next, so that none waits for the result of another.
void fold_together(Query* queries, const float* kv, const Shape& shape) {
  Scores scores[TOGETHER];
  float* outs[TOGETHER];
  for (int q = 0; q < TOGETHER; ++q) {
    outs[q] = queries[q].out;
    for (int j = 0; j < KEYS; j += LANES) {
      const float* keys = kv + j * shape.stride;
      const Vec dots = dots_of(queries[q].q, keys, shape.stride, LANES, shape.head_dim);
      scores[q].lanes[j / LANES] = scores_of(dots, shape);
    }
  }
  for (int q = 0; q < TOGETHER; ++q) raise_max(queries[q], scores[q], shape.value_dim);
  for (int q = 0; q < TOGETHER; ++q) weigh(queries[q], scores[q]);
  const float* values = kv + shape.value_at;
  add_weighted<TOGETHER, KEYS>(outs, scores[0].data(), 1, KEYS, values, shape.stride, shape.value_dim);
}

// `fold` of a block of which some keys are not seen: one run of visible keys after another.
void fold_branch(Query& query, const float* kv, int32_t first, int count, const Shape& shape) {
  for (int begin = 0, end = 0; begin < count; begin = end + 1) {
    for (end = begin; end < count && query.sees(first + end);) ++end;
    fold(query, kv + begin * shape.stride, first + begin, end - begin, shape, begin);
  }
}

// Up to LANES queries side by side, each in a lane of its own: they share every key and value that is
// read. A lane's arithmetic is that of `fold`, so a query can be here for some of its keys only.
class Lanes {
 public:
  Lanes(Query* queries, int count, const Shape& shape)
      : queries_(queries), count_(count), q_(shape.head_dim), max_{}, sums_{}, begins_{}, ends_{} {
    for (int lane = 0; lane < count; ++lane) {
      const Query& query = queries[lane];
      for (int64_t i = 0; i < shape.head_dim; ++i) q_[i][lane] = query.q[i];
      max_[lane] = query.max, begins_[lane] = query.begin, ends_[lane] = query.end;
      for (int key = 0; key < LANES; ++key) sums_[key][lane] = query.sum[key];
      some_first_ = std::min(some_first_, query.begin), some_last_ = std::max(some_last_, query.end);
      all_first_ = std::max(all_first_, query.begin), all_last_ = std::min(all_last_, query.end);
    }
  }

  // Folds the visible ones of KEYS keys, the first of which has position `first`.
  void fold(const float* kv, int32_t first, const Shape& shape) {
    const int32_t last = first + KEYS;
    if (last <= some_first_ || some_last_ <= first) return;
    if (all_first_ <= first && last <= all_last_)
      fold_keys<true>(kv, first, shape);
    else
      fold_keys<false>(kv, first, shape);
  }

  // Hands the state back to the queries.
  void finish() const {
    for (int lane = 0; lane < count_; ++lane) {
      queries_[lane].max = max_[lane];
      for (int key = 0; key < LANES; ++key) queries_[lane].sum[key] = sums_[key][lane];
    }
  }

 private:
  static constexpr int ROWS = REGISTERS == 32 ? 4 : 2;  // keys whose products are in registers together

  // `fold`; if is_whole, all queries see all keys.
  template <bool is_whole>
  void fold_keys(const float* kv, int32_t first, const Shape& shape) {
    const Vec none = all(-std::numeric_limits<float>::infinity());
    const auto sees = [&](int32_t position) { return (begins_ <= position) & (ends_ > position); };
    Vec scores[KEYS], highest = none;
    for (int j = 0; j < KEYS; j += ROWS) score(kv + j * shape.stride, shape, scores + j);
    UNROLL for (int j = 0; j < KEYS; ++j) {
      scores[j] = scores_of(scores[j], shape);
      if constexpr (!is_whole) scores[j] = sees(first + j) ? scores[j] : none;
      highest = scores[j] > highest ? scores[j] : highest;
    }
    raise_max(highest, shape.value_dim);
    UNROLL for (int j = 0; j < KEYS; ++j) {
      scores[j] = exp_of(scores[j] - max_);
      if constexpr (!is_whole) scores[j] = sees(first + j) ? scores[j] : Vec{};
      sums_[j % LANES] += scores[j];
    }
    const auto* weights = reinterpret_cast<const float*>(scores);
    add_values<is_whole>(weights, kv + shape.value_at, first, shape);
  }

  // Adds the values of visible keys to each query's sums.
  template <bool is_whole>
  void add_values(const float* weights, const float* values, int32_t first, const Shape& shape) {
    int lane = 0;
    if constexpr (is_whole)
      for (; lane + TOGETHER <= count_; lane += TOGETHER) {
        float* outs[TOGETHER];
        for (int i = 0; i < TOGETHER; ++i) outs[i] = queries_[lane + i].out;
        add_weighted<TOGETHER, KEYS>(outs, weights + lane, LANES, 1, values, shape.stride, shape.value_dim);
      }
    for (; lane < count_; ++lane) {
      const int begin = std::max(0, begins_[lane] - first), end = std::min(KEYS, ends_[lane] - first);
      add_weighted_some(queries_[lane].out, weights + begin * LANES + lane, LANES,
                        values + begin * shape.stride, end - begin, shape.stride, shape.value_dim);
    }
  }

  // Dot products of all queries with ROWS keys. A query's products are added as by `dots_of`: those of
  // every LANES-th dimension, and then these sums in the order of `lane_sums`.
  void score(const float* keys, const Shape& shape, Vec* scores) const {
    const int64_t n = shape.head_dim, stride = shape.stride;
    Vec parts[LANES / 4][ROWS];
    UNROLL for (int part = 0; part < LANES / 4; ++part) {
      Vec acc[4][ROWS];
      int64_t at = 4 * part;
      const bool is_whole = at + 4 <= n;
      UNROLL for (int i = 0; i < 4; ++i)
        UNROLL for (int j = 0; j < ROWS; ++j)
          acc[i][j] = is_whole ? q_[at + i] * all(keys[j * stride + at + i]) : Vec{};
      if (is_whole) at += LANES;
      for (; at + 4 <= n; at += LANES)
        UNROLL for (int i = 0; i < 4; ++i)
          UNROLL for (int j = 0; j < ROWS; ++j)
            acc[i][j] = fused(q_[at + i], all(keys[j * stride + at + i]), acc[i][j]);
      UNROLL for (int i = 0; i < 3; ++i)
        if (at + i < n)
          UNROLL for (int j = 0; j < ROWS; ++j)
            acc[i][j] = fused(q_[at + i], all(keys[j * stride + at + i]), acc[i][j]);
      UNROLL for (int j = 0; j < ROWS; ++j)
        parts[part][j] = sum_of_four(acc[0][j], acc[1][j], acc[2][j], acc[3][j]);
    }
    UNROLL for (int size = 1; size < LANES / 4; size *= 2)
      UNROLL for (int part = 0; part < LANES / 4; part += 2 * size)
        UNROLL for (int j = 0; j < ROWS; ++j) parts[part][j] += parts[part + size][j];
    UNROLL for (int j = 0; j < ROWS; ++j) scores[j] = parts[0][j];
  }

  void raise_max(Vec highest, int64_t value_dim) {
    const Ints is_raised = highest > max_;
    if (!any(is_raised)) return;
    const Vec max = is_raised ? highest : max_;
    const Vec shrink = is_raised ? exp_of(max_ - max) : all(1.0f);
    max_ = max;
    float by[LANES];
    store(by, shrink);
    for (Vec& sum : sums_) sum *= shrink;
    for (int lane = 0; lane < count_; ++lane)
      if (is_raised[lane]) scale(queries_[lane].out, by[lane], value_dim);
  }

  Query* queries_;
  int count_;
  std::vector<Vec> q_;  // [head_dim]
  Vec max_, sums_[LANES];  // of the keys of each lane
  Ints begins_, ends_;     // visible positions of each query
  int32_t some_first_ = std::numeric_limits<int32_t>::max(), some_last_ = 0;  // what some query sees
  int32_t all_first_ = 0, all_last_ = std::numeric_limits<int32_t>::max();    // what all of them see
};

// Runs of neighbouring tokens of one slot: [begin, end) in the token batch.
struct Run {
  int64_t begin, end;
};

std::vector<Run> runs_of(const int32_t* slots, int64_t num_tokens, int64_t most) {
  std::vector<Run> runs;
  for (int64_t t = 0; t < num_tokens;) {
    int64_t end = t + 1;
    while (end < num_tokens && end - t < most && slots[end] == slots[t]) ++end;
    runs.push_back({t, end});
    t = end;
  }
  return runs;
}

// q [T, heads, D]; sinks [heads]; kv_pages [pages, page, kv_heads, row], where a row is a key and
// then its value, or an MLA key that ends in its value (the latent); page_table [slots + 1, width];
// out [T, heads, V]
void attend(Tensor q, std::optional<Tensor> sinks, Tensor kv_pages, Tensor page_table,
            std::optional<Tensor> kv_scales, Tensor slots, Tensor positions,
            std::optional<Tensor> bases, std::optional<Tensor> seen, std::optional<Tensor> stands,
            std::optional<Tensor> taken, double softmax_scale, std::optional<int64_t> window,
            bool is_chunked, std::optional<double> softcap,
            Tensor out) {
  CHECK(q.is_contiguous() && kv_pages.is_contiguous() && page_table.is_contiguous() &&
            out.is_contiguous() && (!sinks || sinks->is_contiguous()),
        "attend: q, sinks, kv_pages, page_table and out must be contiguous");
  const int64_t heads = q.size(1), head_dim = q.size(2), value_dim = out.size(2);
  const int64_t page = kv_pages.size(1), kv_heads = kv_pages.size(2), pair = kv_pages.size(3);
  CHECK((pair == head_dim + value_dim || (pair == head_dim && pair >= value_dim)) &&
            heads % kv_heads == 0,
        "attend: kv_pages do not fit q and out");
  CHECK(!sinks || sinks->size(0) == heads, "attend: sinks must have one of each head");
  CHECK(!window || *window > 0, "attend: a window must have a key");
  CHECK(bases.has_value() == seen.has_value() && bases.has_value() == stands.has_value(),
        "attend: a tree has bases, what is seen of it, and where its tokens stand");
  for (const auto* part : {&bases, &seen, &stands})
    CHECK(!*part || ((*part)->is_contiguous() && (*part)->size(0) == q.size(0) &&
                     (*part)->scalar_type() ==
                         (part == &seen ? ScalarType::Long : ScalarType::Int)),
          "attend: of a tree's tensors each token has one: int32, and int64 if seen");
  CHECK(!taken || (taken->is_contiguous() && taken->size(0) == q.size(0) &&
                   taken->size(1) == page_table.size(1) * page),
        "attend: taken must have a value for each token and position");
  const Pages pages = pages_of(kv_pages, kv_scales, pair == head_dim);
  const int64_t stride = kv_heads * pair;
  const Shape shape{head_dim, value_dim, pair - value_dim, pages.codes ? pair : stride,
                    static_cast<float>(softmax_scale) * pages.key_scale,
                    static_cast<float>(softcap.value_or(0))};
  constexpr int32_t ALL = std::numeric_limits<int32_t>::max();
  const auto most = static_cast<int32_t>(std::min<int64_t>(window.value_or(ALL), ALL));
  const int64_t width = page_table.size(1);
  const float *qp = floats(q), *sp = sinks ? floats(*sinks) : nullptr;
  const int32_t *table = ints(page_table), *slot_of = ints(slots), *position_of = ints(positions);
  const int32_t* base_of = bases ? ints(*bases) : nullptr;
  const int32_t* stand_of = stands ? ints(*stands) : position_of;
  const int64_t* seen_of = seen ? static_cast<const int64_t*>(seen->data_ptr()) : nullptr;
  const auto* taken_of = taken ? static_cast<const uint8_t*>(taken->data_ptr()) : nullptr;
  auto* op = static_cast<float*>(out.data_ptr());
  const int block = static_cast<int>(std::min<int64_t>(KEYS, page));  // page is a power of two
  const int64_t group = heads / kv_heads;  // query heads that share a KV head
  const std::vector<Run> runs = runs_of(slot_of, q.size(0), std::max<int64_t>(1, QUERIES / group));
  const int64_t items = static_cast<int64_t>(runs.size()) * kv_heads;
  int64_t work = 0;
  for (int64_t t = 0; t < q.size(0); ++t)
    work += std::min(position_of[t] + 1, most) * heads * head_dim;
  parallel_for(items, work > WORTH_THREADS, [&](int64_t i) {
    const int64_t item = items - 1 - i;  // the last tokens of a prompt first: they have the most keys
    const Run run = runs[item / kv_heads];
    const int64_t kv_head = item % kv_heads;
    const int32_t slot = slot_of[run.begin];
    std::vector<float> decoded(pages.codes ? block * pair : 0);
    Vec one{};
    one[0] = 1;
    std::vector<Query> queries;
    queries.reserve((run.end - run.begin) * group);
    int32_t first = ALL, last = 0, tree = ALL;
    for (int64_t t = run.begin; t < run.end; ++t) {
      const int32_t end = slot ? position_of[t] + 1 : 0;
      const int32_t stand = stand_of[t];
      const int32_t low = is_chunked ? stand - stand % most : std::max(0, stand + 1 - most);
      const int32_t begin = slot ? low : 0;
      const int32_t base = base_of ? base_of[t] : ALL;
      const int64_t bits = seen_of ? seen_of[t] : 0;
      first = std::min(first, begin), last = std::max(last, end), tree = std::min(tree, base);
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        // With a sink, the sum begins with the sink's weight, 1; without one, that 1 decays to 0.
        const float sink = sp ? sp[head] : -std::numeric_limits<float>::infinity();
        const float* vector = qp + (t * heads + head) * head_dim;
        float* sums = op + (t * heads + head) * value_dim;
        const uint8_t* its = taken_of ? taken_of + t * width * page : nullptr;
        queries.push_back({vector, sums, begin, end, base, bits, its, sink, one});
        std::fill_n(sums, value_dim, 0.0f);
      }
    }
    // Calls visit(kv, first) for each block in [first, last).
    const auto each_block = [&](int32_t first, int32_t last, const auto& visit) {
      for (first -= first % block; first < last; first += block) {
        const int64_t page_id = table[slot * width + first / page];
        const int64_t from = ((page_id * page + first % page) * kv_heads + kv_head) * pair;
        visit(pages.rows(from, std::min<int>(block, last - first), pair, stride, decoded.data()), first);
      }
    };
    const auto num = static_cast<int>(queries.size());
    if (num >= WORTH_LANES && block == KEYS && !taken) {
      const int32_t end = std::min(last, tree - tree % KEYS);
      std::vector<Lanes> lanes;
      lanes.reserve((num + LANES - 1) / LANES);
      for (int i = 0; i < num; i += LANES) lanes.emplace_back(&queries[i], std::min(LANES, num - i), shape);
      each_block(first, end, [&](const float* kv, int32_t at) {
        for (Lanes& some : lanes) some.fold(kv, at, shape);
      });
      for (const Lanes& some : lanes) some.finish();
      first = std::max(first, end);
    }
    if (first < last)
      each_block(first, last, [&](const float* kv, int32_t at) {
        const auto sees_all = [&](const Query& query) { return query.sees_all(at, KEYS); };
        for (int i = 0; i < num;) {
          Query* some = queries.data() + i;
          if (block == KEYS && i + TOGETHER <= num && std::all_of(some, some + TOGETHER, sees_all)) {
            fold_together(some, kv, shape);
            i += TOGETHER;
            continue;
          }
          if (at + block <= some->base && !some->taken)
            fold(*some, kv, at, block, shape);
          else
            fold_branch(*some, kv, at, block, shape);
          ++i;
        }
      });
    for (Query& query : queries) scale(query.out, pages.value_scale / lane_sum(query.sum), value_dim);
  });
}

void store_codes(const float* from, int64_t size, float scale, uint8_t* to) {
  for (int64_t i = 0; i < size; ++i) to[i] = float8_code(from[i] / scale);
}

// Stores k [T, kv_heads, D] and v [T, kv_heads, V] side by side at position `positions[t]` of slot
// `slots[t]`; drops slot 0.
void store_kv(Tensor k, Tensor v, Tensor kv_pages, Tensor page_table,
              std::optional<Tensor> kv_scales, Tensor slots, Tensor positions) {
  const int64_t kv_heads = k.size(1), head_dim = k.size(2), value_dim = v.size(2);
  const auto is_rows = [](const Tensor& t) { return t.size(2) == 0 || t.stride(2) == 1; };
  CHECK(is_rows(k) && is_rows(v) && kv_pages.is_contiguous() && page_table.is_contiguous(),
        "store_kv: rows of k and v, kv_pages and page_table must be contiguous");
  const int64_t page = kv_pages.size(1), pair = head_dim + value_dim, width = page_table.size(1);
  CHECK(kv_pages.size(2) == kv_heads && kv_pages.size(3) == pair,
        "store_kv: kv_pages do not fit k and v");
  const int32_t *table = ints(page_table), *slot_of = ints(slots), *position_of = ints(positions);
  const float* scales = has_codes(kv_pages, kv_scales) ? floats(*kv_scales) : nullptr;
  for (int64_t t = 0; t < k.size(0); ++t) {
    if (slot_of[t] == 0) continue;
    const int64_t page_id = table[slot_of[t] * width + position_of[t] / page];
    int64_t at = (page_id * page + position_of[t] % page) * kv_heads * pair;
    for (int64_t head = 0; head < kv_heads; ++head, at += pair) {
      const float* key = floats(k) + t * k.stride(0) + head * k.stride(1);
      const float* value = floats(v) + t * v.stride(0) + head * v.stride(1);
      if (scales) {
        auto* to = static_cast<uint8_t*>(kv_pages.data_ptr()) + at;
        store_codes(key, head_dim, scales[0], to);
        store_codes(value, value_dim, scales[1], to + head_dim);
      } else {
        auto* to = static_cast<float*>(kv_pages.data_ptr()) + at;
        std::copy_n(key, head_dim, to);
        std::copy_n(value, value_dim, to + head_dim);
      }
    }
  }
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<attend>(
            "attend(Tensor q, Tensor? sinks, Tensor kv_pages, Tensor page_table, Tensor? "
            "kv_scales, Tensor slots, Tensor positions, Tensor? bases, Tensor? seen, Tensor? "
            "stands, Tensor? taken, float scale, int? window, bool is_chunked, float? softcap, "
            "Tensor(a!) out) -> ()")
        .add<store_kv>(
            "store_kv(Tensor k, Tensor v, Tensor(a!) kv_pages, Tensor page_table, Tensor? "
            "kv_scales, Tensor slots, Tensor positions) -> ()");

}  // namespace
}  // namespace slotzero::attention
