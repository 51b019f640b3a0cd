// Sampling the next token of each row on the CPU; slotzero/sampling/reference.py defines it.
//
// A row reads its logits, its slot's rows and its position, and nothing else. Every stage is linear
// in the vocabulary and none sorts it:
//
// - A greedy row is one pass for the maximum and a search for its first place. The logits are
//   copied only if a mask, a penalty, a bias or a ban changes some of them.
// - Filters are thresholds (floors). top-k and top-p both need the lowest value that has less than
//   a budget of weight strictly above it, and `WeightedFloor` finds it digit by digit.
// - Exact noise costs two logarithms, so it is computed for few tokens: a bound that needs no
//   logarithm rules out nearly all.
//
// Do not build with -ffast-math: NaN and infinities are meaningful here. Products that must
// round as in torch are computed in double and rounded to float, so that no compiler fuses them.

#include "sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "vector_math.h"
#include "threads.h"

namespace slotzero {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 256;  // a multiple of LANES

typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));

// ---- registers ----

Vec max_of(Vec a, Vec b) { return a > b ? a : b; }

float lane_max(Vec v) {
  float best = v[0];
  UNROLL for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

bool any_lane(Ints mask) {
  int32_t any = 0;
  UNROLL for (int i = 0; i < LANES; ++i) any |= mask[i];
  return any != 0;
}

template <class Visit>
inline void each_register(const float* x, int64_t n, const Visit& visit) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) visit(i, load(x + i));
  // The last, partial register is padded with -inf, which neither wins nor has weight.
  if (i < n) visit(i, load_tail(x + i, n - i, -INF));
}

// ---- passes over a row ----

// The maximum, or NaN if there is a NaN: finite exactly when the row has a distribution.
float peak_of(const float* x, int64_t n) {
  constexpr int APART = 4;  // independent maxima, which do not wait for one another
  Vec best[APART];
  Ints bad[APART] = {};
  UNROLL for (int j = 0; j < APART; ++j) best[j] = all(-INF);
  int64_t i = 0;
  const auto visit = [&](int j, Vec v) {
    best[j] = max_of(v, best[j]);
    bad[j] |= v != v;
  };
  for (; i + APART * LANES <= n; i += APART * LANES)
    UNROLL for (int j = 0; j < APART; ++j) visit(j, load(x + i + j * LANES));
  each_register(x + i, n - i, [&](int64_t, Vec v) { visit(0, v); });
  const Vec highest = max_of(max_of(best[0], best[1]), max_of(best[2], best[3]));
  const bool broken = any_lane(bad[0] | bad[1] | bad[2] | bad[3]);
  return broken ? std::numeric_limits<float>::quiet_NaN() : lane_max(highest);
}

float max_of_block(const float* x, int64_t n) {
  Vec best = all(-INF);
  each_register(x, n, [&](int64_t, Vec v) { best = max_of(v, best); });
  return lane_max(best);
}

int64_t first_equal(const float* x, int64_t n, float value) {
  int64_t begin = 0;
  for (; begin + BLOCK <= n; begin += BLOCK) {
    Ints found = {};
    for (int64_t i = begin; i < begin + BLOCK; i += LANES) found |= load(x + i) == value;
    if (any_lane(found)) break;
  }
  return std::find(x + begin, x + n, value) - x;
}

// The sum of exp(x - peak) over the values that are not below the floor.
double sum_exp(const float* x, int64_t n, float peak, float floor) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    Vec sum = {};
    each_register(x + begin, std::min(BLOCK, n - begin),
                  [&](int64_t, Vec v) { sum += exp_of((v < floor ? all(-INF) : v) - peak); });
    total += lane_sum(sum);
  }
  return total;
}

// ---- scratch memory of a thread, reused for every row ----

struct Scratch {
  int64_t capacity = 0;
  std::vector<float> adjusted, scaled, kept, mass, member_mass;
  std::vector<uint32_t> member_keys;
  std::vector<int32_t> tally;  // zeros between rows

  void fit(int64_t vocab) {
    if (capacity >= vocab) return;
    capacity = (vocab + BLOCK - 1) / BLOCK * BLOCK;  // whole blocks, so whole registers too
    for (auto* floats : {&adjusted, &scaled, &kept, &mass, &member_mass}) floats->resize(capacity);
    member_keys.resize(capacity);
    tally.resize(capacity);
  }
};

// ---- mask, penalties, bias, ban ----

struct Row {
  const SampleTables& tables;
  const float* logits;
  int64_t vocab, slot, position;

  bool in_vocab(int32_t id) const { return id >= 0 && id < vocab; }
};

bool is_masked(const Row& row) { return row.tables.is_masked[row.slot] != 0; }

bool has_penalty(const Row& row) {
  const SampleTables& t = row.tables;
  return t.repetition_penalty[row.slot] != 1.0f || t.presence_penalty[row.slot] != 0.0f ||
         t.frequency_penalty[row.slot] != 0.0f;
}

bool has_bias(const Row& row) {
  const int32_t* ids = row.tables.bias_ids + row.slot * row.tables.bias_width;
  return std::any_of(ids, ids + row.tables.bias_width, [](int32_t id) { return id >= 0; });
}

bool has_ban(const Row& row) {
  return row.position - row.tables.prompt_len[row.slot] < row.tables.min_tokens[row.slot];
}

// The logits of the tokens that the mask allows, and -inf for the others.
void copy_allowed(const Row& row, float* x) {
  constexpr int64_t BITS = 32;  // a multiple of LANES
  const int32_t* words = row.tables.allowed + row.slot * row.tables.mask_width;
  Words lane_bit;
  UNROLL for (int i = 0; i < LANES; ++i) lane_bit[i] = 1u << i;
  int64_t begin = 0;
  for (; begin + BITS <= row.vocab; begin += BITS) {
    const uint32_t word = static_cast<uint32_t>(words[begin / BITS]);
    for (int64_t i = 0; i < BITS; i += LANES) {
      const Ints kept = ((Words{} + (word >> i)) & lane_bit) != 0;
      const Vec logits = load(row.logits + begin + i);
      store(x + begin + i, kept ? logits : all(-INF));
    }
  }
  for (int64_t i = begin; i < row.vocab; ++i)
    x[i] = static_cast<uint32_t>(words[i / BITS]) >> i % BITS & 1 ? row.logits[i] : -INF;
}

// a * b as its own rounding: the compiler would fuse a float product with the sum that follows.
float rounded_product(float a, float b) { return static_cast<float>(static_cast<double>(a) * b); }

// A token's tally is 1 if it occurs at all, plus 1 for each occurrence in the output.
void penalise(const Row& row, float* x, std::vector<int32_t>& tally) {
  const SampleTables& t = row.tables;
  const int32_t* tokens = t.tokens + row.slot * t.max_len;
  const int64_t known = std::min(row.position, t.max_len);
  const float repetition = t.repetition_penalty[row.slot];
  for (int64_t i = 0; i < known; ++i) {
    if (!row.in_vocab(tokens[i])) continue;
    int32_t& seen = tally[tokens[i]];
    seen = std::max(seen, 1) + (i >= t.prompt_len[row.slot]);
  }
  for (int64_t i = 0; i < known; ++i) {
    if (!row.in_vocab(tokens[i]) || tally[tokens[i]] == 0) continue;
    const int32_t uses = tally[tokens[i]] - 1;
    float& logit = x[tokens[i]];
    logit = logit > 0 ? logit / repetition : rounded_product(logit, repetition);
    logit -= rounded_product(t.frequency_penalty[row.slot], static_cast<float>(uses));
    logit -= uses > 0 ? t.presence_penalty[row.slot] : 0.0f;
    tally[tokens[i]] = 0;
  }
}

// The logits to choose from: those of the model, or a changed copy.
const float* adjust(const Row& row, Scratch& scratch) {
  const bool penalty = has_penalty(row), bias = has_bias(row), ban = has_ban(row);
  const bool masked = is_masked(row);
  if (!masked && !penalty && !bias && !ban) return row.logits;
  const SampleTables& t = row.tables;
  float* x = scratch.adjusted.data();
  if (masked)
    copy_allowed(row, x);
  else
    std::copy_n(row.logits, row.vocab, x);
  if (penalty) penalise(row, x, scratch.tally);
  for (int64_t j = 0; bias && j < t.bias_width; ++j) {
    const int32_t id = t.bias_ids[row.slot * t.bias_width + j];
    if (row.in_vocab(id)) x[id] += t.bias_values[row.slot * t.bias_width + j];
  }
  for (int64_t j = 0; ban && j < t.stop_width; ++j) {
    const int32_t id = t.stop_ids[row.slot * t.stop_width + j];
    if (row.in_vocab(id)) x[id] = -INF;
  }
  return x;
}

// ---- filters ----

// Scaled logits are at most 0, so the bits of their magnitude order them: the smallest key is the
// likeliest token.
inline uint32_t key_of(float scaled) { return std::bit_cast<uint32_t>(scaled) & 0x7fffffffu; }

// The lowest of `values` that has less than `budget` of weight strictly above it. The 31-bit keys
// are split into digits of 9, 11 and 11 bits: sum the weight of each digit, walk to the digit in
// which the budget runs out, and continue with the members of that digit only.
class WeightedFloor {
 public:
  WeightedFloor(double budget, Scratch& scratch)
      : budget_(budget), keys_(scratch.member_keys.data()), masses_(scratch.member_mass.data()) {}

  template <class Weight>
  float find(const float* values, int64_t n, const Weight& weight) {
    // Neighbours often share a digit; separate sums avoid waiting for the previous addition.
    double sums[FIRST][APART] = {};
    bool used[FIRST] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t digit = key_of(values[i]) >> 22;
      sums[digit][i % APART] += weight(i);
      used[digit] = true;
    }
    double totals[FIRST];
    for (int digit = 0; digit < FIRST; ++digit) totals[digit] = sum(sums[digit]);
    const uint32_t first = walk(totals, used, FIRST);
    int64_t members = 0;
    for (int64_t i = 0; i < n; ++i) {
      keys_[members] = key_of(values[i]);
      masses_[members] = weight(i);
      members += keys_[members] >> 22 == first;
    }
    members = narrow(members, 11);
    narrow(members, 0);
    return -std::bit_cast<float>(keys_[0]);
  }

 private:
  static constexpr int FIRST = 512, REST = 2048, APART = 4;

  static double sum(const double (&parts)[APART]) {
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }

  // The digit in which the budget runs out, or the last used one if rounding prevents that.
  uint32_t walk(const double* totals, const bool* used, int digits) {
    uint32_t last = 0;
    for (int digit = 0; digit < digits; ++digit) {
      if (!used[digit]) continue;
      last = static_cast<uint32_t>(digit);
      if (above_ + totals[digit] >= budget_) break;
      above_ += totals[digit];
    }
    return last;
  }

  int64_t narrow(int64_t n, int shift) {
    double totals[REST] = {};
    bool used[REST] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t digit = (keys_[i] >> shift) & (REST - 1);
      totals[digit] += masses_[i];
      used[digit] = true;
    }
    const uint32_t digit = walk(totals, used, REST);
    int64_t members = 0;
    for (int64_t i = 0; i < n; ++i) {
      keys_[members] = keys_[i];
      masses_[members] = masses_[i];
      members += ((keys_[i] >> shift) & (REST - 1)) == digit;
    }
    return members;
  }

  double budget_, above_ = 0;
  uint32_t* keys_;
  float* masses_;
};

float top_k_floor(const float* scaled, int64_t n, int32_t top_k, Scratch& scratch) {
  return WeightedFloor(top_k, scratch).find(scaled, n, [](int64_t) { return 1.0f; });
}

float top_p_floor(const float* scaled, int64_t n, float top_p, Scratch& scratch) {
  float* mass = scratch.mass.data();
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    Vec sum = {};
    each_register(scaled + begin, std::min(BLOCK, n - begin), [&](int64_t i, Vec v) {
      const Vec weight = exp_of(v);
      store(mass + begin + i, weight);
      sum += weight;
    });
    total += lane_sum(sum);
  }
  const auto weight = [mass](int64_t i) { return mass[i]; };
  return WeightedFloor(top_p * total, scratch).find(scaled, n, weight);
}

// Copies the values that are not below the floor and returns their number. A floor needs only the
// values. `kept` may be the same array as `scaled`.
int64_t gather_kept(const float* scaled, int64_t n, float floor, float* kept) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, n);
    if (max_of_block(scaled + begin, end - begin) < floor) continue;
    for (int64_t i = begin; i < end; ++i) {
      kept[count] = scaled[i];
      count += scaled[i] >= floor;
    }
  }
  return count;
}

float floor_of(const Row& row, const float* scaled, Scratch& scratch) {
  const int32_t top_k = row.tables.top_k[row.slot];
  const float top_p = row.tables.top_p[row.slot];
  const float floor_m = std::log(row.tables.min_p[row.slot]);
  int64_t n = row.vocab;
  float floor = -INF;
  if (is_masked(row) && (top_k > 0 || top_p < 1.0f)) {  // masked values have no weight
    n = gather_kept(scaled, n, std::numeric_limits<float>::lowest(), scratch.kept.data());
    scaled = scratch.kept.data();
  }
  if (top_k > 0 && top_k < n) {
    floor = top_k_floor(scaled, n, top_k, scratch);
    n = gather_kept(scaled, n, floor, scratch.kept.data());
    scaled = scratch.kept.data();
  }
  if (top_p < 1.0f) floor = std::max(floor, top_p_floor(scaled, n, top_p, scratch));
  return std::max(floor, floor_m);
}

// ---- noise: the same integers as in slotzero/sampling/noise.py ----

constexpr float MAX_GUMBEL = 16.7f;  // the largest is 16.64

template <class Word>  // one word or a register of them
Word mix(Word word) {
  word = (word ^ (word >> 16)) * 0x7feb352du;
  word = (word ^ (word >> 15)) * 0x846ca68bu;
  return word ^ (word >> 16);
}

struct Noise {
  uint32_t low = 0x243f6a88u, high = 0x85a308d3u;

  Noise(const int32_t* seed, int64_t position) {
    for (const uint32_t word : {static_cast<uint32_t>(seed[0]), static_cast<uint32_t>(seed[1]),
                                static_cast<uint32_t>(position)}) {
      low = mix((low ^ word) + 0x9e3779b9u);
      high = mix((high ^ word) + 0x9e3779b9u);
    }
  }

  template <class Word>
  Word cell(Word index) const {
    return (mix(index + low) ^ high) >> 9;
  }

  float gumbel(uint32_t index) const {
    const float uniform = (static_cast<float>(cell(index)) + 0.5f) * 0x1p-23f;
    return -std::log(-std::log(uniform));
  }

  // An upper bound of gumbel(index): -log(-log u) <= -log(1 - u), and the bits of a float, read as
  // an integer, are a lower bound of its logarithm in base 2.
  Vec bound(Words index) const {
    const Vec cells = __builtin_convertvector((Ints)cell(index), Vec);
    const Vec rest = (8388608.0f - cells) - 0.5f;  // (1 - u) * 2^23
    const Vec bits = __builtin_convertvector((Ints)rest, Vec);
    return (150.0f - bits * 0x1p-23f) * 0.693147181f + 1e-3f;
  }
};

Words indices_from(int64_t begin) {
  Words index;
  UNROLL for (int i = 0; i < LANES; ++i) index[i] = static_cast<uint32_t>(begin + i);
  return index;
}

// The first index of the largest scaled logit plus noise, among those not below the floor.
// `scaled` is padded to whole blocks with -inf.
int64_t noisy_argmax(const float* scaled, int64_t n, float floor, const Noise& noise) {
  float best = -INF;
  int64_t chosen = 0;
  float bounds[BLOCK];
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const float top = max_of_block(scaled + begin, BLOCK);
    if (top < floor || top + MAX_GUMBEL <= best) continue;
    Vec highest = all(-INF);
    Words index = indices_from(begin);
    for (int64_t i = 0; i < BLOCK; i += LANES, index += static_cast<uint32_t>(LANES)) {
      const Vec value = load(scaled + begin + i), bound = value + noise.bound(index);
      const Vec kept = value < floor ? all(-INF) : bound;
      highest = max_of(kept, highest);
      store(bounds + i, kept);
    }
    if (lane_max(highest) <= best) continue;
    for (int64_t i = 0; i < BLOCK; ++i) {
      if (bounds[i] <= best) continue;
      const float noisy = scaled[begin + i] + noise.gumbel(static_cast<uint32_t>(begin + i));
      if (noisy > best) best = noisy, chosen = begin + i;
    }
  }
  return chosen;
}

// (x - peak) / temperature, padded to a whole block with -inf.
void scale_row(const float* x, int64_t n, float peak, float temperature, float* scaled) {
  each_register(x, n, [&](int64_t i, Vec v) { store(scaled + i, (v - peak) / temperature); });
  std::fill(scaled + n, scaled + (n + BLOCK - 1) / BLOCK * BLOCK, -INF);
}

struct Choice {
  int64_t token = 0;
  float floor = -INF;  // the lowest scaled logit that could be chosen
};

Choice choose(const Row& row, const float* x, float peak, Scratch& scratch) {
  const float temperature = row.tables.temperature[row.slot];
  if (!std::isfinite(peak)) return {};
  if (!(temperature > 0)) return {first_equal(x, row.vocab, peak)};
  float* scaled = scratch.scaled.data();
  scale_row(x, row.vocab, peak, temperature, scaled);
  const Noise noise(row.tables.seed + row.slot * 2, row.position);
  const float floor = floor_of(row, scaled, scratch);
  return {noisy_argmax(scaled, row.vocab, floor, noise), floor};
}

// ---- log probabilities ----

// The ids of the `count` largest of x, largest first, the lower id first among equals.
void largest(const float* x, int64_t n, int64_t count, int32_t* ids) {
  int64_t filled = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, n);
    if (filled == count && max_of_block(x + begin, end - begin) <= x[ids[count - 1]]) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (filled == count && !(x[i] > x[ids[count - 1]])) continue;
      int64_t place = filled < count ? filled++ : count - 1;
      for (; place > 0 && x[i] > x[ids[place - 1]]; --place) ids[place] = ids[place - 1];
      ids[place] = static_cast<int32_t>(i);
    }
  }
}

// Of what the log probabilities of a row are: the model's own logits at temperature 1 without a
// floor, or the adjusted ones.
struct Distribution {
  const float* logits;
  float peak, temperature, floor;  // the floor is one of (logit - peak) / temperature
};

// If the logits have no maximum, every result is NaN.
void report(const Row& row, const Distribution& of, int64_t chosen, int64_t count,
            Scratch& scratch, float* logprob, int32_t* top_ids, float* top_logprobs) {
  count = std::min(count, row.vocab);
  if (!std::isfinite(of.peak)) {
    *logprob = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(top_logprobs, count, *logprob);
    return;
  }
  const bool is_scaled = of.temperature != 1.0f || of.floor != -INF;
  const float* values = is_scaled ? scratch.scaled.data() : of.logits;
  const float peak = is_scaled ? 0.0f : of.peak;
  if (is_scaled) scale_row(of.logits, row.vocab, of.peak, of.temperature, scratch.scaled.data());
  const float log_sum = static_cast<float>(std::log(sum_exp(values, row.vocab, peak, of.floor)));
  const bool is_logit = row.tables.logprobs_mode[row.slot] & 2;
  const auto value = [&](int64_t i) {
    if (is_scaled && values[i] < of.floor) return -INF;
    return is_logit ? of.logits[i] / of.temperature : (values[i] - peak) - log_sum;
  };
  *logprob = value(chosen);
  if (count == 0) return;
  largest(of.logits, row.vocab, count, top_ids);
  for (int64_t j = 0; j < count; ++j) top_logprobs[j] = value(top_ids[j]);
}

}  // namespace

void sample_row(const SampleArgs& args, int64_t index) {
  static thread_local Scratch scratch;
  int32_t* top_ids = args.top_ids_out + index * args.top_width;
  float* top_logprobs = args.top_logprobs_out + index * args.top_width;
  args.tokens_out[index] = 0;
  args.logprobs_out[index] = 0;
  std::fill_n(top_ids, args.top_width, 0);
  std::fill_n(top_logprobs, args.top_width, 0.0f);
  if (args.slots[index] == 0) return;
  scratch.fit(args.vocab);
  const Row row{args.tables, args.logits + index * args.vocab, args.vocab, args.slots[index],
                args.positions[index]};
  const float* x = adjust(row, scratch);
  const float peak = peak_of(x, row.vocab);
  const auto [chosen, floor] = choose(row, x, peak, scratch);
  args.tokens_out[index] = static_cast<int32_t>(chosen);
  const int64_t wanted = std::min<int64_t>(args.tables.num_logprobs[row.slot], args.top_width);
  if (wanted < 0) return;
  const float temperature = args.tables.temperature[row.slot];
  const bool is_processed = args.tables.logprobs_mode[row.slot] & 1;
  const float raw_peak = is_processed || x == row.logits ? peak : peak_of(row.logits, row.vocab);
  const Distribution of = is_processed
                              ? Distribution{x, peak, temperature > 0 ? temperature : 1.0f, floor}
                              : Distribution{row.logits, raw_peak, 1.0f, -INF};
  report(row, of, chosen, wanted, scratch, args.logprobs_out + index, top_ids, top_logprobs);
}

void sample_rows(const SampleArgs& args) {
  parallel_for(args.rows, true, [&](int64_t row) { sample_row(args, row); });
}

}  // namespace slotzero
