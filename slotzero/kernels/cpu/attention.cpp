// Paged attention and the KV store of the CPU, float32.
//
// A token is (slot, position). It reads positions [0, position] of its slot through the page table
// and nothing else; a token of slot 0 writes no KV and gets zeros. Each token's arithmetic is the
// same whether it comes alone (decode) or beside others of its prompt (prefill).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

using torch::stable::Tensor;

namespace {

constexpr int TOKENS = 8;   // queries of one prompt that share a pass over the KV
constexpr int KEYS = 16;    // keys scored before one rescaling of the sums
constexpr int64_t WORTH_THREADS = 1 << 14;  // products below which waking threads costs more
constexpr int UNIT = 8;     // keys in registers at once; the order of sums does not depend on it

const float* floats(const Tensor& t) { return static_cast<const float*>(t.data_ptr()); }
const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); }

// The dot products of one vector with BLOCK others that lie `stride` apart.
template <int BLOCK>
void dots(const float* a, const float* b, int64_t stride, int64_t n, float* out) {
  Vec acc[BLOCK];
  UNROLL for (int j = 0; j < BLOCK; ++j) acc[j] = Vec{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Vec av = load(a + i);
    UNROLL for (int j = 0; j < BLOCK; ++j) acc[j] = fused(av, load(b + j * stride + i), acc[j]);
  }
  UNROLL for (int j = 0; j < BLOCK; ++j) out[j] = lane_sum(acc[j]);
  for (; i < n; ++i)
    for (int j = 0; j < BLOCK; ++j) out[j] += a[i] * b[j * stride + i];
}

// y += sum of BLOCK vectors that lie `stride` apart, weighted, in order.
template <int BLOCK>
void add_weighted(float* y, const float* weight, const float* x, int64_t stride, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vec acc = load(y + i);
    UNROLL for (int j = 0; j < BLOCK; ++j) acc = fused(load(x + j * stride + i), all(weight[j]), acc);
    store(y + i, acc);
  }
  for (; i < n; ++i)
    for (int j = 0; j < BLOCK; ++j) y[i] += weight[j] * x[j * stride + i];
}

void scale(float* y, float a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] *= a;
}

// One head of one token: running maximum, sum and weighted values of a softmax.
struct Query {
  const float* q;
  float* out;
  int32_t position;
  float max, sum;
};

// Scores keys [first, first + count) of one page and folds them into the query's softmax.
void fold(Query& query, const float* keys, const float* values, int32_t first, int count,
          int64_t stride, int64_t head_dim, float softmax_scale) {
  count = std::min<int>(count, query.position + 1 - first);
  if (count <= 0) return;
  float score[KEYS], max = query.max;
  int j = 0;
  for (; j + UNIT <= count; j += UNIT)
    dots<UNIT>(query.q, keys + j * stride, stride, head_dim, score + j);
  for (; j < count; ++j) dots<1>(query.q, keys + j * stride, stride, head_dim, score + j);
  for (j = 0; j < count; ++j) max = std::max(max, score[j] *= softmax_scale);
  if (max > query.max) {
    const float shrink = std::exp(query.max - max);
    query.sum *= shrink;
    scale(query.out, shrink, head_dim);
    query.max = max;
  }
  for (j = 0; j < count; ++j) query.sum += score[j] = std::exp(score[j] - query.max);
  for (j = 0; j + UNIT <= count; j += UNIT)
    add_weighted<UNIT>(query.out, score + j, values + j * stride, stride, head_dim);
  for (; j < count; ++j)
    add_weighted<1>(query.out, score + j, values + j * stride, stride, head_dim);
}

// Runs of neighbouring tokens of one slot: [begin, end) in the token batch.
struct Run {
  int64_t begin, end;
};

std::vector<Run> runs_of(const int32_t* slots, int64_t num_tokens) {
  std::vector<Run> runs;
  for (int64_t t = 0; t < num_tokens;) {
    int64_t end = t + 1;
    while (end < num_tokens && end - t < TOKENS && slots[end] == slots[t]) ++end;
    runs.push_back({t, end});
    t = end;
  }
  return runs;
}

// q [T, heads, D]; kv_pages [2, pages, page, kv_heads, D]; page_table [slots + 1, width]
void attend(Tensor q, Tensor kv_pages, Tensor page_table, Tensor slots, Tensor positions,
            double softmax_scale, Tensor out) {
  STD_TORCH_CHECK(q.is_contiguous() && out.is_contiguous() && page_table.is_contiguous(),
                  "attend: q, out and page_table must be contiguous");
  const int64_t heads = q.size(1), head_dim = q.size(2);
  const int64_t page = kv_pages.size(2), kv_heads = kv_pages.size(3);
  const int64_t stride = kv_heads * head_dim, width = page_table.size(1);
  const float *qp = floats(q), *kp = floats(kv_pages), *vp = kp + kv_pages.stride(0);
  const int32_t *table = ints(page_table), *slot_of = ints(slots), *position_of = ints(positions);
  auto* op = static_cast<float*>(out.data_ptr());
  const int block = static_cast<int>(std::min<int64_t>(KEYS, page));  // page is a power of two
  const std::vector<Run> runs = runs_of(slot_of, q.size(0));
  const int64_t group = heads / kv_heads;  // query heads that share a KV head
  const int64_t items = static_cast<int64_t>(runs.size()) * kv_heads;
  int64_t work = 0;
  for (int64_t t = 0; t < q.size(0); ++t) work += (position_of[t] + 1) * heads * head_dim;
#pragma omp parallel for schedule(dynamic, 1) if (work > WORTH_THREADS)
  for (int64_t item = 0; item < items; ++item) {
    const Run run = runs[item / kv_heads];
    const int64_t kv_head = item % kv_heads;
    const int32_t slot = slot_of[run.begin];
    std::vector<Query> queries;
    queries.reserve((run.end - run.begin) * group);
    int32_t last = -1;
    for (int64_t t = run.begin; t < run.end; ++t) {
      const int32_t position = slot ? position_of[t] : -1;
      last = std::max(last, position);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t at = (t * heads + kv_head * group + g) * head_dim;
        queries.push_back({qp + at, op + at, position, -std::numeric_limits<float>::infinity(), 0});
        std::fill_n(op + at, head_dim, 0.0f);
      }
    }
    for (int32_t first = 0; first <= last; first += block) {
      const int64_t page_id = table[slot * width + first / page];
      const int64_t at = (page_id * page + first % page) * stride + kv_head * head_dim;
      for (Query& query : queries)
        fold(query, kp + at, vp + at, first, block, stride, head_dim, softmax_scale);
    }
    for (Query& query : queries)
      if (query.position >= 0) scale(query.out, 1.0f / query.sum, head_dim);
  }
}

// k, v [T, kv_heads, D] go to position `positions[t]` of slot `slots[t]`; slot 0 is dropped.
void store_kv(Tensor k, Tensor v, Tensor kv_pages, Tensor page_table, Tensor slots,
              Tensor positions) {
  STD_TORCH_CHECK(k.is_contiguous() && v.is_contiguous() && page_table.is_contiguous(),
                  "store_kv: k, v and page_table must be contiguous");
  const int64_t page = kv_pages.size(2), row = k.size(1) * k.size(2), width = page_table.size(1);
  const int32_t *table = ints(page_table), *slot_of = ints(slots), *position_of = ints(positions);
  auto* kp = static_cast<float*>(kv_pages.data_ptr());
  auto* vp = kp + kv_pages.stride(0);
  for (int64_t t = 0; t < k.size(0); ++t) {
    if (slot_of[t] == 0) continue;
    const int64_t page_id = table[slot_of[t] * width + position_of[t] / page];
    const int64_t at = (page_id * page + position_of[t] % page) * row;
    std::copy_n(floats(k) + t * row, row, kp + at);
    std::copy_n(floats(v) + t * row, row, vp + at);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(slotzero, m) {
  m.def(
      "attend(Tensor q, Tensor kv_pages, Tensor page_table, Tensor slots, Tensor positions, "
      "float scale, Tensor(a!) out) -> ()");
  m.def(
      "store_kv(Tensor k, Tensor v, Tensor(a!) kv_pages, Tensor page_table, Tensor slots, "
      "Tensor positions) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(slotzero, CPU, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("store_kv", TORCH_BOX(&store_kv));
}
