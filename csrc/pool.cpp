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

void Gate::open() {
  word_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool Gate::wait_while(uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (word_.load(std::memory_order_acquire) != old) return false;
    pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (word_.load(std::memory_order_acquire) != old) return true;
    sched_yield();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word_.load(std::memory_order_seq_cst) == old)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return true;
}

ThreadPool::ThreadPool(int threads) : threads_(threads < 1 ? 1 : threads), processors_(threads_) {
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
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(void (*job)(void*, int), void* context) {
  job_ = job;
  context_ = context;
  finished_.store(0, std::memory_order_relaxed);
  const uint32_t before = finish_.value();
  processors_.note(0);
  start_.open();
  job(context, 0);
  if (threads_ > 1) finish_.wait_while(before);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    start_.wait_while(seen);
    // run() opens the gate once per job and waits for everyone, so the word moves by one at a time
    ++seen;
    if (stop_.load()) return;
    processors_.part(thread);
    job_(context_, thread);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_ - 1) finish_.open();
  }
}

}  // namespace quire
