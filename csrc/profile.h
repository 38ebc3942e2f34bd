// Where the time of steps goes, op by op. An executor that is not being profiled has none of this.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

class Profile {
 public:
  Profile(size_t ops, int threads) : ops_(ops), threads_(threads), took_(ops), busy_(threads) {
    for (std::vector<int64_t>& one : busy_) one.resize(ops);
  }

  // Seconds of each op since the last call, then for each op the mean seconds that a thread spent waiting for others.
  std::vector<double> take() {
    std::vector<double> found(2 * ops_);
    for (size_t i = 0; i < ops_; ++i) {
      int64_t busy = 0;
      for (std::vector<int64_t>& one : busy_) busy += one[i], one[i] = 0;
      found[i] = 1e-9 * static_cast<double>(took_[i]);
      // the last op of a step has no barrier behind it: another thread may end later than the first
      found[ops_ + i] = std::max(0.0, found[i] - 1e-9 * static_cast<double>(busy) / threads_);
      took_[i] = 0;
    }
    return found;
  }

 private:
  friend class Stopwatch;
  size_t ops_;
  int threads_;
  std::vector<int64_t> took_;               // nanoseconds of thread 0, waiting included
  std::vector<std::vector<int64_t>> busy_;  // nanoseconds of each thread's tasks
};

// One thread's walk over the ops of a step. Without a profile it does nothing.
class Stopwatch {
 public:
  static constexpr size_t kMostOps = 4;  // between two meetings

  Stopwatch(Profile* profile, int thread) : profile_(profile), thread_(thread), begin_(profile ? now() : 0), lap_(begin_) {}

  // Since the last call, or since the threads met, this thread did tasks of the n-th op behind `first`.
  void worked(size_t first, size_t n) {
    if (!profile_) return;
    const int64_t end = now();
    profile_->busy_[thread_][first + n] += end - lap_;
    laps_[n] += end - lap_;
    lap_ = end;
  }
  // Ops [first, first + count) are done by all threads. Waiting counts for the first.
  void met(size_t first, size_t count) {
    if (!profile_) return;
    int64_t took = now() - begin_;
    begin_ = lap_ = begin_ + took;
    for (size_t n = count - 1; n > 0; took -= laps_[n], laps_[n--] = 0)
      if (thread_ == 0) profile_->took_[first + n] += laps_[n];
    laps_[0] = 0;
    if (thread_ == 0) profile_->took_[first] += took;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  Profile* profile_;
  int thread_;
  int64_t begin_, lap_;
  int64_t laps_[kMostOps] = {};
};

}  // namespace quire
