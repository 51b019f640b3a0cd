#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "tensor.h"

namespace slotzero {
namespace {

constexpr auto SPIN = std::chrono::microseconds(50);  // about the time to wake a sleeping thread
constexpr int PAUSES = 32;                            // between two looks at the clock

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  int64_t size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int64_t num) { size_.store(std::max<int64_t>(1, num)); }

  void run(int64_t items, int64_t size, Portion portion, const void* work) {
    const std::unique_lock<std::mutex> alone(callers_, std::try_to_lock);
    if (!alone) return portion(work, 0, items);  // another caller has the threads
    start_missing();
    items_ = items, portion_size_ = size, portion_ = portion, work_ = work;
    next_.store(0);
    is_open_.store(true);
    jobs_.fetch_add(1);
    if (sleeping_.load()) jobs_.notify_all();
    work_on();
    is_open_.store(false);
    for (int64_t i = 0; inside_.load(); ++i) i < 1 << 12 ? pause() : std::this_thread::yield();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void start_missing() {
    for (; started_ + 1 < size(); ++started_)
      std::thread([this, index = started_ + 1] { serve(index); }).detach();
  }

  // Keeps an exception for the caller, and leaves the rest of the job undone.
  void work_on() {
    try {
      for (;;) {
        const int64_t first = next_.fetch_add(portion_size_);
        if (first >= items_) return;
        portion_(work_, first, std::min(first + portion_size_, items_));
      }
    } catch (...) {
      next_.store(items_);
      const std::lock_guard<std::mutex> one(failing_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  // A job's fields are read between `inside_` going up and down. The caller changes them only while
  // the job is closed and nobody is inside.
  void serve(int64_t index) {
    for (uint32_t seen = jobs_.load();;) {
      seen = next_job(seen);
      inside_.fetch_add(1);
      if (is_open_.load() && index < size()) work_on();
      inside_.fetch_sub(1);
    }
  }

  uint32_t next_job(uint32_t seen) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < PAUSES; ++i, pause())
        if (const uint32_t now = jobs_.load(); now != seen) return now;
    } while (std::chrono::steady_clock::now() < end);
    sleeping_.fetch_add(1);
    jobs_.wait(seen);
    sleeping_.fetch_sub(1);
    return jobs_.load();
  }

  std::mutex callers_, failing_;
  std::exception_ptr failure_;  // of the job, the first one
  std::atomic<int64_t> size_{1}, next_{0};
  std::atomic<uint32_t> jobs_{0};  // opened so far
  std::atomic<int> sleeping_{0}, inside_{0};
  std::atomic<bool> is_open_{false};
  int64_t started_ = 0, items_ = 0, portion_size_ = 0;
  Portion portion_ = nullptr;
  const void* work_ = nullptr;
};

std::atomic<Pool*> pool_of_process{new Pool};  // never destroyed: its threads run until the end

// The threads of a process stay behind when it forks: the child begins with a new pool.
void renew() {
  Pool* renewed = new Pool;
  renewed->resize(pool_of_process.load()->size());
  pool_of_process.store(renewed);
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, renew);

}  // namespace

void run_portions(int64_t items, int64_t size, Portion portion, const void* work) {
  pool_of_process.load()->run(items, size, portion, work);
}

void set_num_threads(int64_t num) { pool_of_process.load()->resize(num); }

int64_t num_threads() { return pool_of_process.load()->size(); }

namespace {

[[maybe_unused]] const Operators operators =
    Operators("CompositeExplicitAutograd")
        .add<set_num_threads>("set_num_threads(int num) -> ()")
        .add<num_threads>("num_threads() -> int");

}  // namespace
}  // namespace slotzero
