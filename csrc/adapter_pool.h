// Adapters in the pages of one slab (as in S-LoRA, arXiv 2311.03285): each has as many as its ranks and targets need,
// wherever they are. And which rows of a step have which of them.
#pragma once

#include <vector>

#include "adapter_layout.h"
#include "arena.h"

namespace quire {

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
  // Sorts `slots`, by counting: what is planned once a step is read in every layer.
  void plan(int slot_count);
};

// A matrix of `dtype`, float32 or bfloat16, that is multiplied by `scale` before it is rounded.
struct Matrix {
  const char* data;
  DType dtype;
  float scale;
};

class AdapterPool {
 public:
  explicit AdapterPool(const Kernels& kernels) : kernels_(kernels) {}

  // ---- building: everything is declared, then the pages are allocated ---------------------------------------------
  void set_layout(const AdapterLayout& layout) { layout_ = layout; }
  const AdapterLayout& layout() const { return layout_; }
  void allocate(int slots, int pages, int max_tokens, int max_logit_rows);

  // ---- slots, of which no step that runs has a token; one thread at a time, beside that of steps ------------------
  // Takes pages for an adapter in place of what the slot has. Throws std::invalid_argument for a shape that does not fit
  // the layout, and std::runtime_error if too few pages are free; then the slot is empty.
  void open(int slot, const AdapterShape& shape);
  void clear(int slot);
  // a [rank, cols] and b [rows of the part, rank], rounded to bfloat16; gain [rows] or null, float32, of a part of the
  // shape. Throws std::invalid_argument.
  void put(int slot, const std::string& name, int part, const Matrix& a, const Matrix& b, const float* gain, int rank);
  // Rows [first, first + count) of a slot's own parameter, float32. Throws std::invalid_argument.
  void put_rows(int slot, const std::string& name, int first, const float* rows, int count, int cols);
  const std::vector<int32_t>& pages_of(int slot) const;
  int free_pages() const { return static_cast<int>(free_.size()); }

  // ---- a step ----------------------------------------------------------------------------------------------------
  // Sorts the tokens of rows by the slot that `adapters` has for the row's line, -1 being none. Throws
  // std::invalid_argument for a slot that does not exist.
  void plan_step(int rows, const int32_t* query_start, const int32_t* lines, const int32_t* adapters);
  void plan_head(int logit_rows, const int32_t* tokens);
  const AdapterRows& rows(bool logits) const { return logits ? logits_ : tokens_; }
  const PartPlace& part(const LowRank& l, int slot, int part) const {
    return places_[static_cast<size_t>(slot) * layout_.parts() + l.first + part];
  }
  PagedUnits a(const LowRank& l, int slot, int part, int group) const {
    const PartPlace& p = this->part(l, slot, part);
    return units(slot, group ? layout_.group_of(l, p, group) : p.a, p.a_unit(group));
  }
  PagedUnits b(int slot, const PartPlace& part) const { return units(slot, part.b, part.b_unit()); }
  bool has_own(const OwnParam& own, int slot) const { return own_place(own, slot).page >= 0; }
  // Some neighbouring units of a slot's own parameter, from unit i on, and how many they are.
  Param own(const OwnParam& own, int slot, int i, int* count) const;

  const Arena& memory() const { return memory_; }
  size_t bytes() const { return memory_.bytes() + tables_; }

 private:
  PagedUnits units(int slot, PagePlace at, uint32_t unit) const {
    return {memory_.data(), pages_[slot].data(), layout_.page(), at, unit};
  }
  const PagePlace& own_place(const OwnParam& own, int slot) const {
    return own_[static_cast<size_t>(slot) * layout_.owned() + own.number];
  }
  void check_slot(int slot) const;

  const Kernels& kernels_;
  AdapterLayout layout_;
  Arena memory_;
  size_t tables_ = 0;
  std::vector<int32_t> free_;                // pages
  std::vector<std::vector<int32_t>> pages_;  // by slot
  std::vector<PartPlace> places_;            // [slots, parts]
  std::vector<PagePlace> own_;               // [slots, owned], page -1 for none
  AdapterRows tokens_, logits_;
};

}  // namespace quire
