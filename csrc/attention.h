// Attention of a step, for all layers: a plan for each shape, threads' scratch, and states that split parts leave.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "arena.h"
#include "attention_plan.h"

namespace quire {

class Attention {
 public:
  // The number of a shape's plan; before `allocate`. Layers of one shape share a plan.
  int want(const AttendShape& shape);
  // Registers an op that rounds its rows when their last heads are done; before `allocate`.
  void want_rounding() { rounding_ = true; }
  void allocate(int threads, int max_tokens, int max_len);

  void plan_step(int rows, const int32_t* query_start, const int32_t* positions) {
    for (AttentionPlan& plan : plans_) plan.plan(rows, query_start, positions);
  }
  AttentionPlan& plan(int number) { return plans_[number]; }
  const AttentionPlan& plan(int number) const { return plans_[number]; }
  char* scratch(int thread) const { return memory_.data() + sizes_.per_thread * thread; }
  float* states() const { return reinterpret_cast<float*>(memory_.data() + states_at_); }
  // Counts heads of keys and values that have finished a token; true when these are the last of `all`.
  bool heads_done(int token, int heads, int all);
  const Arena& memory() const { return memory_; }

 private:
  std::vector<AttendShape> shapes_;
  std::vector<AttentionPlan> plans_;
  AttentionMemory sizes_{0, 0, 0};
  size_t states_at_ = 0;
  Arena memory_;
  bool rounding_ = false;
  std::unique_ptr<std::atomic<int>[]> heads_done_;  // of each token; zero between ops
};

}  // namespace quire
