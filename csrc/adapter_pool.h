// Adapters of low rank (LoRA, arXiv 2106.09685) in slots of one arena, and which tokens of a step have which of them.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "kernels.h"

namespace quire {

// A linear's matrices A and B in a slot; see ShrinkTask and ExpandTask for their layout. A stacked linear has parts, each
// with some of the output's columns and matrices of its own.
struct LowRank {
  int cols, rank;           // input features; the greatest rank, in whole vectors
  std::vector<int> starts;  // first column of each part, and the end of the last
  size_t offset = 0;        // in a slot
  std::vector<int> ranks;   // [slots, parts] in whole vectors, 0 for a part without matrices

  static LowRank of(int cols, int rank, const std::vector<int>& rows);
  int parts() const { return static_cast<int>(starts.size()) - 1; }
  int rows(int part) const { return starts[part + 1] - starts[part]; }
  size_t a_elems() const { return static_cast<size_t>(rank) * cols; }
  size_t b_elems(int part) const { return static_cast<size_t>(ceil_div(rows(part), kRankLanes)) * kRankLanes * rank; }
  // Elements from the slot's place of this linear to those of a part; B comes after A.
  size_t at(int part) const {
    size_t elems = 0;
    for (int p = 0; p < part; ++p) elems += a_elems() + b_elems(p);
    return elems;
  }
  size_t bytes() const { return align_up(at(parts()) * sizeof(uint16_t), kAlignment); }
};

// Neighbours in AdapterPool::tokens that have the adapter of a slot.
struct AdapterTokens {
  int slot, begin, end;
};

class AdapterPool {
 public:
  explicit AdapterPool(const Kernels& kernels) : kernels_(kernels) {}

  // ---- building: all linears are declared, then the slots are allocated ------------------------------------------
  void declare(const std::string& name, int cols, int rank, const std::vector<int>& rows);
  void allocate(int slots, int max_tokens);
  // Throws std::invalid_argument for a name that was not declared.
  const LowRank& at(const std::string& name) const;

  // ---- slots, of which no step that runs has a token --------------------------------------------------------------
  void clear(int slot);
  // a [rank, cols] and b [rows of the part, rank], float32, rounded to bfloat16. Throws std::invalid_argument.
  void put(int slot, const std::string& name, int part, const float* a, const float* b, int rank);

  // ---- a step ----------------------------------------------------------------------------------------------------
  // Sorts the tokens of rows by the slot that `adapters` has for the row's line, -1 being none. Throws
  // std::invalid_argument for a slot that does not exist.
  void plan_step(int rows, const int32_t* query_start, const int32_t* lines, const int32_t* adapters);
  const std::vector<int32_t>& tokens() const { return tokens_; }        // those of a slot together, rising
  const std::vector<AdapterTokens>& groups() const { return groups_; }  // one for each slot of the step
  const std::vector<AdapterTokens>& pieces() const { return pieces_; }  // the same cut, for tasks
  const uint16_t* a(const LowRank& l, int slot, int part) const { return place(l, slot) + l.at(part); }
  const uint16_t* b(const LowRank& l, int slot, int part) const { return a(l, slot, part) + l.a_elems(); }

  const Arena& memory() const { return memory_; }

 private:
  uint16_t* place(const LowRank& l, int slot) const {
    return reinterpret_cast<uint16_t*>(memory_.data() + slot_bytes_ * static_cast<size_t>(slot) + l.offset);
  }

  const Kernels& kernels_;
  Arena memory_;
  size_t slot_bytes_ = 0;
  int slots_ = 0;
  std::deque<LowRank> linears_;  // addresses stay
  std::unordered_map<std::string, LowRank*> by_name_;
  std::vector<int32_t> tokens_;
  std::vector<AdapterTokens> groups_, pieces_;
};

}  // namespace quire
