#include "adapter_pool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

constexpr int kPieceRows = 16;  // of a piece, at the most

// Rows of bfloat16, of which pairs of columns are copied row after row; zeros where nothing was written.
class Pairs {
 public:
  Pairs(const Kernels& kernels, int rows, int cols)
      : kernels_(kernels), cols_(cols), width_(align_up(static_cast<size_t>(cols), PartPlace::kFeatures) / 2),
        words_(static_cast<size_t>(rows) * width_) {}
  void clear() { std::fill(words_.begin(), words_.end(), 0u); }
  // Rows [begin, begin + count) of a matrix, which become the first ones.
  void read(const Matrix& from, int begin, int count) {
    const size_t cols = static_cast<size_t>(cols_), bytes = cols * dtype_bytes(from.dtype);
    const char* data = from.data + static_cast<size_t>(begin) * bytes;
    if (cols == 2 * width_) return kernels_.to_bf16(data, from.dtype, from.scale, row(0), cols * count);
    for (int r = 0; r < count; ++r, data += bytes) kernels_.to_bf16(data, from.dtype, from.scale, row(r), cols);
  }
  // Pairs [begin, end) of the first rows, [pair][row].
  void columns(int begin, int end, int rows, char* to) const {
    if (rows == kRankLanes) return copy<kRankLanes>(begin, end, rows, to);
    copy<0>(begin, end, rows, to);
  }

 private:
  uint16_t* row(int i) { return reinterpret_cast<uint16_t*>(words_.data() + static_cast<size_t>(i) * width_); }
  template <int kRows>
  void copy(int begin, int end, int rows, char* to) const {
    if (kRows) rows = kRows;
    for (int p = begin; p < end; ++p)
      for (int r = 0; r < rows; ++r, to += sizeof(uint32_t))
        std::memcpy(to, &words_[static_cast<size_t>(r) * width_ + static_cast<size_t>(p)], sizeof(uint32_t));
  }

  const Kernels& kernels_;
  int cols_;
  size_t width_;
  std::vector<uint32_t> words_;
};

}  // namespace

void AdapterRows::reserve(int slot_count, int rows) {
  slots.reserve(rows), order.reserve(rows), groups.reserve(slot_count), next.reserve(slot_count);
  pieces.reserve(static_cast<size_t>(slot_count) + rows / kPieceRows);
}

void AdapterRows::plan(int slot_count) {
  order.clear(), groups.clear(), pieces.clear();
  if (std::all_of(slots.begin(), slots.end(), [](int32_t slot) { return slot < 0; })) return;
  next.assign(slot_count, 0);
  for (const int32_t slot : slots)
    if (slot >= 0) ++next[slot];
  int begin = 0;
  for (int slot = 0; slot < slot_count; ++slot) {
    const int end = begin + next[slot];
    next[slot] = begin;
    if (begin == end) continue;
    groups.push_back({slot, begin, end});
    for (int r = begin; r < end; r += kPieceRows) pieces.push_back({slot, r, std::min(end, r + kPieceRows)});
    begin = end;
  }
  order.resize(begin);
  for (size_t row = 0; row < slots.size(); ++row)
    if (slots[row] >= 0) order[next[slots[row]]++] = static_cast<int32_t>(row);
}

void AdapterPool::allocate(int slots, int pages, int max_tokens, int max_logit_rows) {
  if (layout_.empty()) return;
  memory_.allocate(layout_.slab_bytes(pages));
  tables_ = layout_.table_bytes(slots, pages);
  pages_.assign(slots, {});
  places_.assign(static_cast<size_t>(slots) * layout_.parts(), {});
  own_.assign(static_cast<size_t>(slots) * layout_.owned(), {-1, 0});
  for (int page = pages; page-- > 0;) free_.push_back(page);
  tokens_.reserve(slots, max_tokens);
  logits_.reserve(slots, max_logit_rows);
}

void AdapterPool::check_slot(int slot) const {
  if (slot < 0 || slot >= static_cast<int>(pages_.size()))
    throw std::invalid_argument("slot: there is no such slot for adapters");
}

const std::vector<int32_t>& AdapterPool::pages_of(int slot) const {
  check_slot(slot);
  return pages_[slot];
}

void AdapterPool::clear(int slot) {
  check_slot(slot);
  std::fill_n(places_.begin() + static_cast<size_t>(slot) * layout_.parts(), layout_.parts(), PartPlace{});
  std::fill_n(own_.begin() + static_cast<size_t>(slot) * layout_.owned(), layout_.owned(), PagePlace{-1, 0});
  free_.insert(free_.end(), pages_[slot].rbegin(), pages_[slot].rend());
  pages_[slot] = {};
}

void AdapterPool::open(int slot, const AdapterShape& shape) {
  clear(slot);
  const int wanted = layout_.place(shape);
  if (wanted > free_pages())
    throw std::runtime_error("the adapter takes " + std::to_string(wanted) + " pages of the pool, of which " +
                             std::to_string(free_pages()) + " are free");
  layout_.place(shape, places_.data() + static_cast<size_t>(slot) * layout_.parts(),
                own_.data() + static_cast<size_t>(slot) * layout_.owned());
  pages_[slot].assign(free_.rbegin(), free_.rbegin() + wanted);
  free_.resize(free_.size() - wanted);
  for (const std::string& name : shape.own) {  // panels are packed over zeros
    const OwnParam& own = layout_.own(name);
    for (int i = 0, count; i < own.units(); i += count) {
      const Param some = this->own(own, slot, i, &count);
      std::memset(some.data(), 0, static_cast<size_t>(count) * own.unit_bytes());
    }
  }
}

void AdapterPool::put(int slot, const std::string& name, int part, const Matrix& a, const Matrix& b, const float* gain,
                      int rank) {
  const LowRank& l = layout_.at(name);
  check_slot(slot);
  if (part < 0 || part >= l.parts()) throw std::invalid_argument(name + ": no such part");
  const PartPlace& place = this->part(l, slot, part);
  if (rank != place.rank || place.gains != (gain != nullptr))
    throw std::invalid_argument(name + ": not the rank that the slot was opened for, or other gains");
  Pairs features(kernels_, kRankLanes, l.cols);
  for (int group = 0; group * kRankLanes < rank; ++group) {
    const int lanes = place.lanes(group);
    const PagedUnits units = this->a(l, slot, part, group);
    features.read(a, group * kRankLanes, lanes);
    for (int i = 0; i < l.cols;) {
      const PagedUnits::Run run = units.from(i / PartPlace::kFeatures);
      const int end = std::min(l.cols, i + run.count * PartPlace::kFeatures);
      features.columns(i / 2, ceil_div(end, PartPlace::kFeatures) * (PartPlace::kFeatures / 2), lanes, run.data);
      i = end;
    }
  }
  const PagedUnits units = this->b(slot, place);
  const int rows = l.rows(part), pairs = static_cast<int>(even_ranks(rank) / 2);
  Pairs ranks(kernels_, kRankLanes, rank);
  for (int c = 0; c < rows; c += kRankLanes) {
    char* unit = units.from(c / kRankLanes).data;
    const int count = std::min(kRankLanes, rows - c);
    if (count < kRankLanes) std::memset(unit, 0, units.unit), ranks.clear();
    ranks.read(b, c, count);
    ranks.columns(0, pairs, kRankLanes, unit);
    if (gain) std::memcpy(unit + pairs * kRankLanes * sizeof(uint32_t), gain + c, count * sizeof(float));
  }
}

Param AdapterPool::own(const OwnParam& own, int slot, int i, int* count) const {
  const PagedUnits::Run run = units(slot, own_place(own, slot), own.unit_bytes()).from(i);
  *count = std::min(run.count, own.units() - i);
  Param p = own.shape;
  p.arena = &memory_, p.offset = static_cast<size_t>(run.data - memory_.data());
  p.rows = std::min(own.shape.rows - i * own.unit_rows(), *count * own.unit_rows());
  p.matrix_rows = p.rows;
  return p;
}

void AdapterPool::put_rows(int slot, const std::string& name, int first, const float* rows, int count, int cols) {
  const OwnParam& own = layout_.own(name);
  check_slot(slot);
  if (!has_own(own, slot) || first < 0 || count < 0 || count > own.shape.rows - first || cols != own.shape.cols)
    throw std::invalid_argument(name + ": rows that a slot does not have");
  for (int row = 0; row < count;) {
    const int unit = (first + row) / own.unit_rows();
    int units;
    const Param p = this->own(own, slot, unit, &units);
    const int into = first + row - unit * own.unit_rows(), end = std::min(count, row + p.rows - into);
    put_float_rows(kernels_, p, into - row, rows, DType::f32, row, end, count);
    row = end;
  }
}

void AdapterPool::plan_step(int rows, const int32_t* query_start, const int32_t* lines, const int32_t* adapters) {
  if (layout_.empty() || !adapters) return;
  tokens_.slots.clear();
  for (int row = 0; row < rows; ++row) {
    const int slot = adapters[lines[row]];
    if (slot >= static_cast<int>(pages_.size()))
      throw std::invalid_argument("adapters: a line names a slot that does not exist");
    tokens_.slots.resize(query_start[row + 1], slot);
  }
  tokens_.plan(static_cast<int>(pages_.size()));
}

void AdapterPool::plan_head(int logit_rows, const int32_t* tokens) {
  if (layout_.empty()) return;
  logits_.slots.clear();
  for (int row = 0; row < logit_rows; ++row) logits_.slots.push_back(tokens_.slots[tokens[row]]);
  logits_.plan(static_cast<int>(pages_.size()));
}

}  // namespace quire
