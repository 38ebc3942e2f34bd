#include "page_warmer.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

namespace {

constexpr size_t kChunk = size_t{2} << 20;
constexpr size_t kPage = 4096;
constexpr std::chrono::milliseconds kRest{20};  // without a step, before pages are warmed: an engine's steps are closer

// Only this thread: it must not compete with the steps.
void lowest_priority() {
  const sched_param none{};
  sched_setscheduler(0, SCHED_BATCH, &none);
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
}

}  // namespace

PageWarmer::PageWarmer(char* data, size_t bytes, size_t ahead)
    : data_(data), bytes_(bytes), ahead_(ahead), most_(bytes) {
  if (bytes_ < 2 * kChunk) return;
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {  // steps touch their pages themselves
  }
}

PageWarmer::~PageWarmer() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

size_t PageWarmer::target() const {
  const size_t used = used_.load(std::memory_order_relaxed);
  return std::min(most_.load(std::memory_order_relaxed), used + std::max(used, ahead_));
}

void PageWarmer::used(size_t bytes) {
  if (bytes <= used_.load(std::memory_order_relaxed) || !thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.store(bytes, std::memory_order_relaxed);
  }
  changed_.notify_one();
}

void PageWarmer::stop_at(size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    most_.store(std::min(bytes, bytes_), std::memory_order_relaxed);
  }
  changed_.notify_one();
}

void PageWarmer::work() {
  lowest_priority();
  for (uint64_t rested = 0;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || warmed() < target(); });
      if (stop_) return;
      const uint64_t steps = steps_.load(std::memory_order_relaxed);
      if (steps % 2 || steps != rested) {
        rested = steps;
        changed_.wait_for(lock, kRest, [this] { return stop_; });
        continue;
      }
    }
    const size_t begin = warmed(), end = std::min(bytes_, begin + kChunk);
    // an atomic "or" with nothing: a step may be writing the same page
    for (size_t i = begin; i < end; i += kPage) __atomic_fetch_or(data_ + i, 0, __ATOMIC_RELAXED);
    warmed_.store(end, std::memory_order_relaxed);
  }
}

}  // namespace quire
