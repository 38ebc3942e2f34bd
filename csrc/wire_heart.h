// Shows a process on another host that this one runs, and counts how often that one shows it: a byte each way some times a
// second, from a thread that needs nothing of the interpreter.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace quire {

class WireHeart {
 public:
  // Over a connected socket, which outlives it, and which has no other use.
  explicit WireHeart(int fd);
  ~WireHeart();
  WireHeart(const WireHeart&) = delete;
  WireHeart& operator=(const WireHeart&) = delete;

  // A number that rises while the other process runs and is reached.
  uint64_t beats() const { return beats_.load(std::memory_order_relaxed); }

 private:
  void beat();

  const int fd_;
  std::atomic<uint64_t> beats_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace quire
