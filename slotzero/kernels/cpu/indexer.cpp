// The indexer of sparse attention on the CPU, in float32: the keys that each token attends to.
//
// A token scores the index keys at the positions that it sees, each by itself, and takes the best;
// of equal scores, the earlier positions. An index key is the beginning of a stored row. A token of
// slot 0 takes none.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "simd.h"
#include "tensor.h"
#include "threads.h"

namespace slotzero::indexer {
namespace {

constexpr int PLACES = 63;  // most nodes of a tree: the same as in tree_shape.py

const float* floats(const Tensor& t) { return static_cast<const float*>(t.data_ptr()); }
const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); }

struct Scored {
  float score;
  int32_t position;
  bool operator<(const Scored& other) const {
    return score > other.score || (score == other.score && position < other.position);
  }
};

// q [T, heads, D]; weights [T, heads]; kv_pages [pages, page, 1, row], where a row begins with D
// values of an index key; page_table [slots + 1, width]; out [T, width * page] uint8: 1 if taken
void select_keys(Tensor q, Tensor weights, Tensor kv_pages, Tensor page_table, Tensor slots,
                 Tensor positions, std::optional<Tensor> bases, std::optional<Tensor> seen,
                 int64_t top_k, Tensor out) {
  const int64_t heads = q.size(1), dim = q.size(2), page = kv_pages.size(1);
  const int64_t row = kv_pages.size(3), width = page_table.size(1), most = width * page;
  CHECK(q.is_contiguous() && weights.is_contiguous() && kv_pages.is_contiguous() &&
            page_table.is_contiguous() && out.is_contiguous(),
        "select_keys: all tensors must be contiguous");
  CHECK(kv_pages.size(2) == 1 && dim <= row && out.size(1) == most && top_k > 0,
        "select_keys: kv_pages do not fit q and out");
  const float *qp = floats(q), *wp = floats(weights), *kv = floats(kv_pages);
  const int32_t *table = ints(page_table), *slot_of = ints(slots), *position_of = ints(positions);
  const int32_t* base_of = bases ? ints(*bases) : nullptr;
  const int64_t* seen_of = seen ? static_cast<const int64_t*>(seen->data_ptr()) : nullptr;
  auto* op = static_cast<uint8_t*>(out.data_ptr());
  parallel_for(q.size(0), true, [&](int64_t t) {
    uint8_t* taken = op + t * most;
    std::fill_n(taken, most, 0);
    if (slot_of[t] == 0) return;
    std::vector<Scored> found;
    for (int32_t p = 0; p <= position_of[t]; ++p) {
      const int64_t place = base_of ? static_cast<int64_t>(p) - base_of[t] : -1;
      if (place >= 0 && !(place < PLACES && (seen_of[t] >> place & 1))) continue;
      const int64_t page_id = table[slot_of[t] * width + p / page];
      const float* key = kv + (page_id * page + p % page) * row;
      float score = 0.0f;
      for (int64_t head = 0; head < heads; ++head)
        score += wp[t * heads + head] * std::max(0.0f, dot(qp + (t * heads + head) * dim, key, dim));
      if (score != score) score = -std::numeric_limits<float>::infinity();  // NaN has no order
      found.push_back({score, p});
    }
    const auto num = std::min<int64_t>(top_k, static_cast<int64_t>(found.size()));
    if (num < static_cast<int64_t>(found.size()))
      std::nth_element(found.begin(), found.begin() + num, found.end());
    for (int64_t i = 0; i < num; ++i) taken[found[i].position] = 1;
  });
}

[[maybe_unused]] const Operators operators =
    Operators("CPU")
        .add<select_keys>(
            "select_keys(Tensor q, Tensor weights, Tensor kv_pages, Tensor page_table, Tensor "
            "slots, Tensor positions, Tensor? bases, Tensor? seen, int top_k, Tensor(a!) out) -> "
            "()");

}  // namespace
}  // namespace slotzero::indexer
