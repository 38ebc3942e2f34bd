#include "adapter_pool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

constexpr int kPieceRows = 16;  // of a piece, at the most

}  // namespace

LowRank LowRank::of(int cols, int rank, const std::vector<int>& rows, SharedMatrix shared) {
  LowRank l;
  l.cols = cols;
  l.rank = static_cast<int>(align_up(static_cast<size_t>(rank), kRankLanes));
  l.starts = {0};
  const size_t of_a = static_cast<size_t>(l.rank) * cols;
  for (size_t part = 0; part < rows.size(); ++part) {
    const int n = rows[part];
    const size_t vectors = static_cast<size_t>(ceil_div(n, kRankLanes)), of_b = vectors * kRankLanes * l.rank;
    const bool held = part == 0;
    l.starts.push_back(l.starts.back() + n);
    l.a_at.push_back(shared == SharedMatrix::a && !held ? l.a_at[0] : l.elems);
    if (shared != SharedMatrix::a || held) l.elems += of_a;
    l.b_at.push_back(shared == SharedMatrix::b && !held ? l.b_at[0] : l.elems);
    if (shared != SharedMatrix::b || held) l.elems += of_b;
    l.gain_at.push_back(l.elems);
    if (shared == SharedMatrix::none) l.elems += vectors * kRankLanes * sizeof(float) / sizeof(uint16_t);
  }
  return l;
}

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

void AdapterPool::declare(const std::string& name, int cols, int rank, const std::vector<int>& rows,
                          SharedMatrix shared) {
  LowRank l = LowRank::of(cols, rank, rows, shared);
  l.offset = slot_bytes_;
  linears_.push_back(l);
  if (!by_name_.emplace(name, &linears_.back()).second)
    throw std::invalid_argument(name + ": a second linear of this name");
  slot_bytes_ += l.bytes();
}

void AdapterPool::declare_own(const std::string& name, const Param& param) {
  OwnParam& own = own_[name];
  if (!own.copies.empty()) throw std::invalid_argument(name + ": a second parameter of this name");
  own.copies = {param};
  own.copies[0].arena = &memory_;
  own.copies[0].offset = slot_bytes_;
  slot_bytes_ += align_up(param.bytes(), kAlignment);
}

void AdapterPool::allocate(int slots, int max_tokens, int max_logit_rows) {
  slots_ = slots;
  memory_.allocate(slot_bytes_ * static_cast<size_t>(slots));
  for (LowRank& l : linears_) {
    l.ranks.assign(static_cast<size_t>(slots) * l.parts(), 0);
    l.gains.assign(l.ranks.size(), 0);
  }
  for (auto& [name, own] : own_) {
    own.copies.resize(slots, own.copies[0]);
    own.there.assign(slots, 0);
    for (int slot = 0; slot < slots; ++slot) own.copies[slot].offset += slot_bytes_ * static_cast<size_t>(slot);
  }
  if (!slot_bytes_) return;
  tokens_.reserve(slots, max_tokens);
  logits_.reserve(slots, max_logit_rows);
}

const LowRank& AdapterPool::at(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) throw std::invalid_argument("no linear with adapters is named '" + name + "'");
  return *found->second;
}

const OwnParam& AdapterPool::own(const std::string& name) const {
  const auto found = own_.find(name);
  if (found == own_.end()) throw std::invalid_argument("no parameter that slots have is named '" + name + "'");
  return found->second;
}

void AdapterPool::check_slot(int slot) const {
  if (slot < 0 || slot >= slots_) throw std::invalid_argument("slot: there is no such slot for adapters");
}

void AdapterPool::clear(int slot) {
  check_slot(slot);
  for (LowRank& l : linears_) std::fill_n(l.ranks.begin() + l.at(slot, 0), l.parts(), 0);
  for (auto& [name, own] : own_) own.there[slot] = 0;
}

void AdapterPool::put(int slot, const std::string& name, int part, const float* a, const float* b, const float* gain,
                      int rank) {
  LowRank& l = const_cast<LowRank&>(at(name));
  check_slot(slot);
  if (part < 0 || part >= l.parts() || rank < 1 || rank > l.rank)
    throw std::invalid_argument(name + ": no such part, or a rank beyond the limit");
  const int padded = static_cast<int>(align_up(static_cast<size_t>(rank), kRankLanes)), rows = l.rows(part);
  const size_t k = static_cast<size_t>(l.cols);
  uint16_t *to = place(l, slot), *to_a = to + l.a_at[part], *to_b = to + l.b_at[part];
  std::vector<uint16_t> line(std::max<size_t>(k, rank));
  std::memset(to_a, 0, padded * k * sizeof(uint16_t));
  for (int r = 0; r < rank; ++r) {
    kernels_.to_bf16(a + r * k, DType::f32, line.data(), k);
    uint16_t* lane = to_a + r / kRankLanes * k * kRankLanes + r % kRankLanes;
    for (size_t i = 0; i < k; ++i) lane[i * kRankLanes] = line[i];
  }
  for (int c = 0; c < rows; ++c) {
    const int lane = c % kRankLanes;
    uint16_t* vector = to_b + static_cast<size_t>(c / kRankLanes) * kRankLanes * l.rank;
    if (lane == 0) std::memset(vector, 0, static_cast<size_t>(padded) * kRankLanes * sizeof(uint16_t));
    kernels_.to_bf16(b + static_cast<size_t>(c) * rank, DType::f32, line.data(), rank);
    for (int r = 0; r < rank; ++r) vector[r * kRankLanes + lane] = line[r];
  }
  const size_t at = l.at(slot, part);
  l.gains[at] = gain != nullptr;
  if (gain) std::memcpy(to + l.gain_at[part], gain, rows * sizeof(float));
  l.ranks[at] = padded;
}

void AdapterPool::put_rows(int slot, const std::string& name, int first, const float* rows, int count, int cols) {
  OwnParam& own = const_cast<OwnParam&>(this->own(name));
  check_slot(slot);
  const Param& p = own.copies[slot];
  if (first < 0 || count < 0 || count > p.rows - first || cols != p.cols)
    throw std::invalid_argument(name + ": rows that a slot does not have");
  for (int row = 0; row < count; row += kPanel)
    put_float_rows(kernels_, p, first, rows, DType::f32, row, std::min(count, row + kPanel), count);
  own.there[slot] = 1;
}

void AdapterPool::plan_step(int rows, const int32_t* query_start, const int32_t* lines, const int32_t* adapters) {
  if (!slot_bytes_ || !adapters) return;
  tokens_.slots.clear();
  for (int row = 0; row < rows; ++row) {
    const int slot = adapters[lines[row]];
    if (slot >= slots_) throw std::invalid_argument("adapters: a line names a slot that does not exist");
    tokens_.slots.resize(query_start[row + 1], slot);
  }
  tokens_.plan(slots_);
}

void AdapterPool::plan_head(int logit_rows, const int32_t* tokens) {
  if (!slot_bytes_) return;
  logits_.slots.clear();
  for (int row = 0; row < logit_rows; ++row) logits_.slots.push_back(tokens_.slots[tokens[row]]);
  logits_.plan(slots_);
}

}  // namespace quire
