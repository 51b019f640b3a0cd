// The threads of the kernels: one pool per process.
//
// Items are claimed in small portions, so a thread whose core is busy elsewhere simply claims fewer.
// A thread without work spins for a moment, because the next kernel follows in microseconds, and then
// sleeps. The caller works too, and waits only for threads that are in the middle of a portion: one
// that has not woken up in time is not waited for. Which thread computes an item changes no result.
// The first exception of an item reaches the caller, and portions that nobody has begun are left out.
#pragma once

#include <cstdint>

namespace slotzero {

using Portion = void (*)(const void* work, int64_t first, int64_t last);

// Calls `portion` for parts of [0, items), of at most `size` items each.
void run_portions(int64_t items, int64_t size, Portion portion, const void* work);

// Sets the number of threads, the caller included.
void set_num_threads(int64_t num);
int64_t num_threads();

// Calls work(i) for every i in [0, items), on all threads if that is worth waking them.
template <class Work>
void parallel_for(int64_t items, bool is_worth_threads, const Work& work) {
  const int64_t threads = num_threads();
  if (!is_worth_threads || threads == 1 || items < 2) {
    for (int64_t i = 0; i < items; ++i) work(i);
    return;
  }
  constexpr int64_t PORTIONS = 4;  // of each thread
  const int64_t size = items / (PORTIONS * threads);
  const auto portion = [](const void* its, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) (*static_cast<const Work*>(its))(i);
  };
  run_portions(items, size < 1 ? 1 : size, portion, &work);
}

}  // namespace slotzero
