// Threads that run one step together.
//
// A step is one parallel region: every thread walks the same list of phases, claims tasks of a phase and meets the
// others at a barrier. Waiting spins briefly (phases are microseconds apart), then yields,
// then sleeps, so a busy machine or an idle engine costs no core.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "processors.h"

namespace quire {

// The owner of an object with threads. A forked child has a copy of the object and none of its threads: there the
// object is left alone, for to wait for the end of threads that are not there would never end.
template <class T>
struct DeleteAtHome {
  pid_t home = getpid();
  void operator()(T* object) const {
    if (getpid() == home) delete object;
  }
};
template <class T>
using ThreadOwner = std::unique_ptr<T, DeleteAtHome<T>>;

// One word that threads wait on until it changes: those of one process, or of several that share its memory.
template <bool kShared>
class BasicGate {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void open();  // change the word and wake everyone
  // Return once the word is no longer `old`: whether it took long. `spin`: expect that soon.
  bool wait_while(uint32_t old, bool spin = true);

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};
using Gate = BasicGate<false>;
using SharedGate = BasicGate<true>;

class ThreadPool {
 public:
  // Throws std::invalid_argument when the system does not start so many threads.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }
  // Jobs from now on run on so many of the threads, the first ones; the others sleep. Not while one runs.
  void use(int threads);

  // Run job(context, thread) once on every thread in use, the caller being thread 0; returns when all are done.
  // One caller at a time.
  void run(void (*job)(void*, int), void* context);

  // Waits for the other threads of the running job. The last to arrive calls between() before any of them continues.
  template <class F>
  void barrier(int thread, F between) {
    const uint32_t before = phase_.value();
    processors_.note(thread);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < active_) {
      if (phase_.wait_while(before)) processors_.part(thread);
      return;
    }
    arrived_.store(0, std::memory_order_relaxed);
    between();
    if (active_ > 1) phase_.open();
  }

 private:
  void work(int thread);
  void end();

  const int threads_;
  Processors processors_;
  std::vector<std::thread> workers_;
  Gate start_, finish_, phase_, more_;  // more_: threads come into use
  std::atomic<int> used_;
  int active_ = 1;                       // threads of the running job
  std::atomic<uint64_t> job_number_{0};  // of the latest job, above its threads in the lowest half
  std::atomic<int> arrived_{0}, finished_{0};
  std::atomic<bool> stop_{false};
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
};

// Tasks of one phase, shared out among threads. Each takes those of a range of its own from the front, so that what
// lies together in memory is read by one thread, and then helps the others with theirs, from the back.
class Tasks {
 public:
  explicit Tasks(int threads) : ranges_(static_cast<size_t>(threads)) {}
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;

  static int first(int tasks, int thread, int threads) {
    return static_cast<int>(static_cast<int64_t>(tasks) * thread / threads);
  }
  // Share out [0, tasks) while no thread claims.
  void deal(int tasks) {
    const int threads = static_cast<int>(ranges_.size());
    for (int t = 0; t < threads; ++t)
      ranges_[t].left.store(pack(first(tasks, t, threads), first(tasks, t + 1, threads)), std::memory_order_relaxed);
  }
  // A task that no other thread does, or -1 when all are taken.
  int claim(int thread) {
    const int threads = static_cast<int>(ranges_.size());
    for (int i = 0; i < threads; ++i) {
      std::atomic<uint64_t>& range = ranges_[(thread + i) % threads].left;
      uint64_t seen = range.load(std::memory_order_relaxed);
      for (int begin = low(seen), end = high(seen); begin < end; begin = low(seen), end = high(seen))
        if (range.compare_exchange_weak(seen, i ? pack(begin, end - 1) : pack(begin + 1, end),
                                        std::memory_order_relaxed))
          return i ? end - 1 : begin;
    }
    return -1;
  }

 private:
  static uint64_t pack(int begin, int end) {
    return static_cast<uint64_t>(static_cast<uint32_t>(end)) << 32 | static_cast<uint32_t>(begin);
  }
  static int low(uint64_t range) { return static_cast<int>(static_cast<uint32_t>(range)); }
  static int high(uint64_t range) { return static_cast<int>(range >> 32); }
  struct alignas(64) Range {
    std::atomic<uint64_t> left{0};
  };
  std::vector<Range> ranges_;
};

// Run f(thread) on every thread of the pool that is in use.
template <class F>
void on_all(ThreadPool& pool, F& f) {
  pool.run([](void* context, int thread) { (*static_cast<F*>(context))(thread); }, &f);
}

// Runs f(task) for every task of [0, tasks) on the pool's free threads.
template <class F>
void parallel(ThreadPool& pool, int tasks, F f) {
  std::atomic<int> next{0};
  auto job = [&](int) {
    for (int t = next.fetch_add(1); t < tasks; t = next.fetch_add(1)) f(t);
  };
  on_all(pool, job);
}

}  // namespace quire
