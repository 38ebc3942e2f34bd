// Keeps the threads of a pool on processors of their own.
//
// When one thread of a step is held up, the others sleep, and the kernel may move it to the processor of one of them.
// From there on the two take turns, and each sleeps while the other runs: the load balancer never sees two that want to
// run, and steps take twice as long for up to 100 ms. Pinned threads could not meet, but a busy machine could not move
// them either. So a thread that had to wait for long looks whether another was last seen where it is, and leaves.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

namespace quire {

class Processors {
 public:
  explicit Processors(int threads) : seats_(static_cast<size_t>(threads)) {}
  Processors(const Processors&) = delete;
  Processors& operator=(const Processors&) = delete;

  // Called by a thread: it runs here.
  void note(int thread);
  // The same; and when another thread was last seen here, the caller moves to a processor where none was, if it may use
  // one. Whether it moved. Its affinity is afterwards what it was.
  bool part(int thread);
  // The processor where a thread was last seen, -1 before.
  int seen(int thread) const { return seats_[static_cast<size_t>(thread)].processor.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Seat {
    std::atomic<int> processor{-1};
    std::chrono::steady_clock::time_point moved{};  // the thread's own
  };
  std::vector<Seat> seats_;
};

}  // namespace quire
