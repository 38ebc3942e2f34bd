// Which rows of a step belong to which expert: pairs of (token, expert) sorted by expert, and by token inside one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Rows [begin, end) of the sorted pairs, all of one expert; its chunks are numbers first … first + count - 1.
struct ExpertChunk {
  int expert, begin, end, first, count;
};

// Bytes that a plan needs for up to `experts` experts and `pairs` pairs.
size_t expert_plan_bytes(int experts, int pairs);

class ExpertPlan {
 public:
  // `memory` holds expert_plan_bytes(experts, the most pairs of a step); it outlives the plan.
  void place(void* memory, int experts);

  // Sort the pairs of ids [tokens, top_k]; places [tokens, top_k] gets each pair's row.
  void sort(const int32_t* ids, int tokens, int top_k, int experts, int32_t* places);

  int size() const { return size_; }     // chunks
  int experts() const { return active_; }  // experts that have rows
  const ExpertChunk& operator[](int i) const { return chunks_[i]; }

 private:
  int32_t* next_ = nullptr;  // [experts]
  ExpertChunk* chunks_ = nullptr;
  int size_ = 0, active_ = 0;
};

}  // namespace quire
