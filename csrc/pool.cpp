#include "pool.h"

#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

namespace {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kSpins = 4000;  // some tens of microseconds
constexpr int kYields = 50;

}  // namespace

template <bool kShared>
void BasicGate<kShared>::open() {
  word_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), kShared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
            nullptr, 0);
}

template <bool kShared>
bool BasicGate<kShared>::wait_while(uint32_t old, bool spin) {
  for (int i = 0; spin && i < kSpins; ++i) {
    if (word_.load(std::memory_order_acquire) != old) return false;
    pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (word_.load(std::memory_order_acquire) != old) return true;
    sched_yield();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word_.load(std::memory_order_seq_cst) == old)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), kShared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, old, nullptr,
            nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return true;
}

template class BasicGate<false>;
template class BasicGate<true>;

ThreadPool::ThreadPool(int threads) : threads_(threads < 1 ? 1 : threads), processors_(threads_), used_(threads_) {
  workers_.reserve(static_cast<size_t>(threads_ - 1));
  try {
    for (int t = 1; t < threads_; ++t) workers_.emplace_back([this, t] { work(t); });
  } catch (const std::system_error&) {
    const std::string started = std::to_string(workers_.size() + 1);
    end();
    throw std::invalid_argument(
        "threads: the system started " + started + " of " + std::to_string(threads_) +
        " and no more: ask for fewer, or raise the process limit (ulimit -u, or the pids limit of "
        "the container)");
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  stop_.store(true);
  start_.open();
  more_.open();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::use(int threads) {
  const int used = threads < 1 ? 1 : threads > threads_ ? threads_ : threads;
  if (used_.exchange(used) < used) more_.open();
}

void ThreadPool::run(void (*job)(void*, int), void* context) {
  active_ = used_.load(std::memory_order_relaxed);
  processors_.note(0);
  if (active_ == 1) return job(context, 0);
  job_ = job;
  context_ = context;
  finished_.store(0, std::memory_order_relaxed);
  const uint32_t before = finish_.value();
  const uint64_t number = (job_number_.load(std::memory_order_relaxed) >> 32) + 1;
  job_number_.store(number << 32 | static_cast<uint32_t>(active_), std::memory_order_release);
  start_.open();
  job(context, 0);
  finish_.wait_while(before);
}

// The gates are read before what they stand for, so that what changes after is not slept through. A thread that is not
// in use may miss jobs; those of a job are waited for, so none of them misses one.
void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    const uint32_t start = start_.value(), more = more_.value();
    if (stop_.load()) return;
    const uint64_t found = job_number_.load(std::memory_order_acquire);
    if (found == seen || thread >= static_cast<int>(found & UINT32_MAX)) {
      if (thread < used_.load())
        start_.wait_while(start);
      else
        more_.wait_while(more);
      continue;
    }
    seen = found;
    processors_.part(thread);
    const int others = active_ - 1;  // once all have counted themselves the next job may be with fewer
    job_(context_, thread);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == others) finish_.open();
  }
}

}  // namespace quire
