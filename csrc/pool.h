// Threads that run one step together.
//
// A step is one parallel region: every thread walks the same list of phases, claims tasks of a phase from a shared
// counter and meets the others at a barrier. Waiting spins briefly (phases are microseconds apart), then yields,
// then sleeps, so a busy machine or an idle engine costs no core.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace quire {

// One word that threads wait on until it changes.
class Gate {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void open();                   // change the word and wake everyone
  void wait_while(uint32_t old); // return once the word is no longer `old`

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Run job(context, thread) once on every thread, the caller being thread 0; returns when all are done.
  // One caller at a time.
  void run(void (*job)(void*, int), void* context);

  // Meet the other threads of the running job.
  void barrier();

 private:
  void work(int thread);

  const int threads_;
  std::vector<std::thread> workers_;
  Gate start_, finish_, phase_;
  std::atomic<int> arrived_{0}, finished_{0};
  std::atomic<bool> stop_{false};
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
};

// Run f(thread) on every thread of the pool.
template <class F>
void on_all(ThreadPool& pool, F& f) {
  pool.run([](void* context, int thread) { (*static_cast<F*>(context))(thread); }, &f);
}

}  // namespace quire
