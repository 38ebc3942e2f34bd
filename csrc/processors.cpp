#include "processors.h"

#include <sched.h>

namespace quire {

namespace {

// A move takes some tens of microseconds; on a machine with more to run than processors the kernel may undo each.
constexpr std::chrono::milliseconds kBetweenMoves{1};

}  // namespace

void Processors::note(int thread) {
  const int here = sched_getcpu();
  std::atomic<int>& seat = seats_[static_cast<size_t>(thread)].processor;
  if (seat.load(std::memory_order_relaxed) != here) seat.store(here, std::memory_order_relaxed);
}

bool Processors::part(int thread) {
  note(thread);
  Seat& own = seats_[static_cast<size_t>(thread)];
  const int here = own.processor.load(std::memory_order_relaxed);
  bool shared = false;
  for (const Seat& other : seats_)
    shared = shared || (&other != &own && other.processor.load(std::memory_order_relaxed) == here);
  if (!shared || here < 0) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now - own.moved < kBetweenMoves) return false;
  own.moved = now;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  cpu_set_t free = allowed;
  for (const Seat& other : seats_) {
    const int taken = other.processor.load(std::memory_order_relaxed);
    if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free);
  }
  if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) return false;
  sched_setaffinity(0, sizeof allowed, &allowed);
  note(thread);
  return true;
}

}  // namespace quire
