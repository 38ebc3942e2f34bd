// Which rows of a step belong to which expert: pairs of (token, expert) sorted by expert, and by token inside one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.h"

namespace quire {

// Rows [begin, end) of the sorted pairs, all of one expert; its chunks are numbers first … first + count - 1.
struct ExpertChunk {
  int expert, begin, end, first, count;
};

// Bytes that a plan needs for up to `experts` experts and `pairs` pairs.
size_t expert_plan_bytes(int experts, int pairs);

// One for all layers: a router fills it, and the ops up to the next router read it.
class ExpertPlan {
 public:
  // Registers a router that chooses `top_k` of so many experts; before `allocate`.
  void want(int experts, int top_k) { experts_ = std::max(experts_, experts), top_k_ = std::max(top_k_, top_k); }
  void allocate(int max_tokens);

  // Sorts the pairs of ids [tokens, top_k]; places [tokens, top_k] gets each pair's row.
  void sort(const int32_t* ids, int tokens, int top_k, int experts, int32_t* places);

  // Tokens of the pairs, by row; and the numbers 0, 1, … of rows, for who wants a list of some.
  const int32_t* tokens() const { return tokens_; }
  const int32_t* numbers() const { return numbers_; }
  // f(slot, begin, end) for the neighbouring rows of a chunk whose tokens have the same adapter; `slots` are of tokens.
  template <class F>
  void each_slot(const ExpertChunk& chunk, const std::vector<int32_t>& slots, F f) const {
    for (int row = chunk.begin; row < chunk.end;) {
      const int slot = slots[tokens_[row]], begin = row;
      while (row < chunk.end && slots[tokens_[row]] == slot) ++row;
      if (slot >= 0) f(slot, begin, row);
    }
  }
  int size() const { return size_; }      // chunks
  int active() const { return active_; }  // experts that have rows
  const ExpertChunk& operator[](int i) const { return chunks_[i]; }
  const Arena& memory() const { return memory_; }

 private:
  int experts_ = 0, top_k_ = 0;
  Arena memory_;
  int32_t* next_ = nullptr;                         // [experts]
  int32_t *tokens_ = nullptr, *numbers_ = nullptr;  // [pairs]
  ExpertChunk* chunks_ = nullptr;
  int size_ = 0, active_ = 0;
};

}  // namespace quire
