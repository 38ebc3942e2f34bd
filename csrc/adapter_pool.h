// Adapters (LoRA, arXiv 2106.09685; DoRA, 2402.09353) in slots of one arena, and which rows of a step have which of them.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "weights.h"

namespace quire {

// A matrix that all parts of a linear share, which is held once.
enum class SharedMatrix { none, a, b };

// A linear's matrices A and B in a slot; see ShrinkTask and ExpandTask for their layout. A stacked linear has parts, each
// with some of the output's columns, matrices, and a gain for each of its columns; the parts of experts follow each other.
struct LowRank {
  int cols, rank;                           // input features; the greatest rank, in whole vectors
  std::vector<int> starts;                  // first column of each part, and the end of the last
  std::vector<size_t> a_at, b_at, gain_at;  // of each part, in elements from the slot's place of this linear
  size_t elems = 0, offset = 0;             // of this linear; its place in a slot
  std::vector<int> ranks;                   // [slots, parts] in whole vectors, 0 for a part without matrices
  std::vector<char> gains;                  // [slots, parts], whether a part has gains

  static LowRank of(int cols, int rank, const std::vector<int>& rows, SharedMatrix shared);
  int parts() const { return static_cast<int>(starts.size()) - 1; }
  int rows(int part) const { return starts[part + 1] - starts[part]; }
  size_t at(int slot, int part) const { return static_cast<size_t>(slot) * parts() + part; }
  size_t bytes() const { return align_up(elems * sizeof(uint16_t), kAlignment); }
};

// A parameter of which slots have copies of their own.
struct OwnParam {
  std::vector<Param> copies;  // by slot
  std::vector<char> there;    // whether a slot's adapter has one
};

// Neighbours in AdapterRows::order that have the adapter of a slot.
struct AdapterGroup {
  int slot, begin, end;
};

// Which rows of a step, tokens or rows of logits, have which adapter.
struct AdapterRows {
  std::vector<int32_t> slots;        // of each row, -1 for none
  std::vector<int32_t> order;        // rows with an adapter: those of a slot together, rising
  std::vector<AdapterGroup> groups;  // one for each slot of the step
  std::vector<AdapterGroup> pieces;  // the same cut, for tasks
  std::vector<int32_t> next;         // by slot, while they are sorted

  void reserve(int slot_count, int rows);
  void plan(int slot_count);  // from `slots`
};

class AdapterPool {
 public:
  explicit AdapterPool(const Kernels& kernels) : kernels_(kernels) {}

  // ---- building: everything is declared, then the slots are allocated --------------------------------------------
  void declare(const std::string& name, int cols, int rank, const std::vector<int>& rows, SharedMatrix shared);
  void declare_own(const std::string& name, const Param& param);
  void allocate(int slots, int max_tokens, int max_logit_rows);
  // Throw std::invalid_argument for a name that was not declared.
  const LowRank& at(const std::string& name) const;
  const OwnParam& own(const std::string& name) const;

  // ---- slots, of which no step that runs has a token --------------------------------------------------------------
  void clear(int slot);
  // a [rank, cols] and b [rows of the part, rank], float32, rounded to bfloat16; gain [rows] or null, float32. Throws
  // std::invalid_argument.
  void put(int slot, const std::string& name, int part, const float* a, const float* b, const float* gain, int rank);
  // Rows [first, first + count) of a slot's own parameter, float32. Throws std::invalid_argument.
  void put_rows(int slot, const std::string& name, int first, const float* rows, int count, int cols);

  // ---- a step ----------------------------------------------------------------------------------------------------
  // Sorts the tokens of rows by the slot that `adapters` has for the row's line, -1 being none. Throws
  // std::invalid_argument for a slot that does not exist.
  void plan_step(int rows, const int32_t* query_start, const int32_t* lines, const int32_t* adapters);
  void plan_head(int logit_rows, const int32_t* tokens);
  const AdapterRows& rows(bool logits) const { return logits ? logits_ : tokens_; }
  const uint16_t* a(const LowRank& l, int slot, int part) const { return place(l, slot) + l.a_at[part]; }
  const uint16_t* b(const LowRank& l, int slot, int part) const { return place(l, slot) + l.b_at[part]; }
  // Null for a part without gains.
  const float* gain(const LowRank& l, int slot, int part) const {
    return l.gains[l.at(slot, part)] ? reinterpret_cast<const float*>(place(l, slot) + l.gain_at[part]) : nullptr;
  }

  const Arena& memory() const { return memory_; }

 private:
  uint16_t* place(const LowRank& l, int slot) const {
    return reinterpret_cast<uint16_t*>(memory_.data() + slot_bytes_ * static_cast<size_t>(slot) + l.offset);
  }
  void check_slot(int slot) const;

  const Kernels& kernels_;
  Arena memory_;
  size_t slot_bytes_ = 0;
  int slots_ = 0;
  std::deque<LowRank> linears_;  // addresses stay
  std::unordered_map<std::string, LowRank*> by_name_;
  std::unordered_map<std::string, OwnParam> own_;
  AdapterRows tokens_, logits_;
};

}  // namespace quire
