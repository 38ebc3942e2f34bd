// Brings the pages of a large arena into memory before they are needed.
//
// The first touch of a page makes the kernel, and under it a hypervisor, find and clear memory: a millisecond and more
// for two MiB. In a step that writes a prompt's keys and values that is a tenth of its time. A thread of the lowest
// priority does it ahead of use instead, a limited way, so that memory that is never used is never taken, and not while
// steps follow each other: a fault holds its processor, and with it a thread of the next step, until it is over.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace quire {

class PageWarmer {
 public:
  static constexpr size_t kAhead = size_t{256} << 20;
  // Pages of [data, data + bytes), which outlive this object; their contents stay. `ahead`: bytes beyond those in use,
  // at least; as many as are in use where those are more.
  PageWarmer(char* data, size_t bytes, size_t ahead = kAhead);
  ~PageWarmer();
  PageWarmer(const PageWarmer&) = delete;
  PageWarmer& operator=(const PageWarmer&) = delete;

  // Marks everything below `bytes` as used.
  void used(size_t bytes);
  // Pages from so many bytes on are not warmed ahead.
  void stop_at(size_t bytes);
  // A step begins, and ends.
  void begin() { steps_.fetch_add(1, std::memory_order_relaxed); }
  void end() { steps_.fetch_add(1, std::memory_order_relaxed); }
  size_t warmed() const { return warmed_.load(std::memory_order_relaxed); }

 private:
  void work();
  size_t target() const;

  char* const data_;
  const size_t bytes_, ahead_;
  std::atomic<size_t> used_{0}, warmed_{0}, most_;
  std::atomic<uint64_t> steps_{0};  // begun and ended: odd during one
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace quire
