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
  Stopwatch(Profile* profile, int thread) : profile_(profile), thread_(thread), begin_(profile ? now() : 0) {}

  // The thread's own tasks of an op are done.
  void worked(size_t op) {
    if (profile_) profile_->busy_[thread_][op] += now() - begin_;
  }
  // So are those of all threads.
  void met(size_t op) {
    if (!profile_) return;
    const int64_t end = now();
    if (thread_ == 0) profile_->took_[op] += end - begin_;
    begin_ = end;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  Profile* profile_;
  int thread_;
  int64_t begin_;
};

}  // namespace quire
