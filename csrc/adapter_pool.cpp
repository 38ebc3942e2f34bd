#include "adapter_pool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

constexpr int kPieceTokens = 16;  // of a piece, at the most

}  // namespace

LowRank LowRank::of(int cols, int rank, const std::vector<int>& rows) {
  LowRank l;
  l.cols = cols;
  l.rank = static_cast<int>(align_up(static_cast<size_t>(rank), kRankLanes));
  l.starts = {0};
  for (int n : rows) l.starts.push_back(l.starts.back() + n);
  return l;
}

void AdapterPool::declare(const std::string& name, int cols, int rank, const std::vector<int>& rows) {
  LowRank l = LowRank::of(cols, rank, rows);
  l.offset = slot_bytes_;
  linears_.push_back(l);
  if (!by_name_.emplace(name, &linears_.back()).second)
    throw std::invalid_argument(name + ": a second linear of this name");
  slot_bytes_ += l.bytes();
}

void AdapterPool::allocate(int slots, int max_tokens) {
  slots_ = slots;
  memory_.allocate(slot_bytes_ * static_cast<size_t>(slots));
  for (LowRank& l : linears_) l.ranks.assign(static_cast<size_t>(slots) * l.parts(), 0);
  if (linears_.empty()) return;
  tokens_.reserve(max_tokens);
  groups_.reserve(slots);
  pieces_.reserve(static_cast<size_t>(slots) + max_tokens / kPieceTokens);
}

const LowRank& AdapterPool::at(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) throw std::invalid_argument("no linear with adapters is named '" + name + "'");
  return *found->second;
}

void AdapterPool::clear(int slot) {
  if (slot < 0 || slot >= slots_) throw std::invalid_argument("slot: there is no such slot for adapters");
  for (LowRank& l : linears_) std::fill_n(l.ranks.begin() + slot * l.parts(), l.parts(), 0);
}

void AdapterPool::put(int slot, const std::string& name, int part, const float* a, const float* b, int rank) {
  LowRank& l = const_cast<LowRank&>(at(name));
  if (slot < 0 || slot >= slots_ || part < 0 || part >= l.parts() || rank < 1 || rank > l.rank)
    throw std::invalid_argument(name + ": no such slot or part, or a rank beyond the limit");
  const int padded = static_cast<int>(align_up(static_cast<size_t>(rank), kRankLanes));
  const size_t k = static_cast<size_t>(l.cols);
  uint16_t *to_a = place(l, slot) + l.at(part), *to_b = to_a + l.a_elems();
  std::vector<uint16_t> line(std::max<size_t>(k, rank));
  std::memset(to_a, 0, padded * k * sizeof(uint16_t));
  for (int r = 0; r < rank; ++r) {
    kernels_.to_bf16(a + r * k, DType::f32, line.data(), k);
    uint16_t* lane = to_a + r / kRankLanes * k * kRankLanes + r % kRankLanes;
    for (size_t i = 0; i < k; ++i) lane[i * kRankLanes] = line[i];
  }
  const int rows = l.rows(part);
  for (int c = 0; c < rows; ++c) {
    const int lane = c % kRankLanes;
    uint16_t* vector = to_b + static_cast<size_t>(c / kRankLanes) * kRankLanes * l.rank;
    if (lane == 0) std::memset(vector, 0, static_cast<size_t>(padded) * kRankLanes * sizeof(uint16_t));
    kernels_.to_bf16(b + static_cast<size_t>(c) * rank, DType::f32, line.data(), rank);
    for (int r = 0; r < rank; ++r) vector[r * kRankLanes + lane] = line[r];
  }
  l.ranks[static_cast<size_t>(slot) * l.parts() + part] = padded;
}

void AdapterPool::plan_step(int rows, const int32_t* query_start, const int32_t* lines, const int32_t* adapters) {
  tokens_.clear(), groups_.clear(), pieces_.clear();
  if (linears_.empty() || !adapters) return;
  for (int row = 0; row < rows; ++row) {
    const int slot = adapters[lines[row]];
    if (slot >= slots_) throw std::invalid_argument("adapters: a line names a slot that does not exist");
    const auto has_slot = [slot](const AdapterTokens& group) { return group.slot == slot; };
    if (slot < 0 || std::any_of(groups_.begin(), groups_.end(), has_slot)) continue;
    const int begin = static_cast<int>(tokens_.size());
    for (int other = row; other < rows; ++other)
      if (adapters[lines[other]] == slot)
        for (int t = query_start[other]; t < query_start[other + 1]; ++t) tokens_.push_back(t);
    const int end = static_cast<int>(tokens_.size());
    groups_.push_back({slot, begin, end});
    for (int t = begin; t < end; t += kPieceTokens) pieces_.push_back({slot, t, std::min(end, t + kPieceTokens)});
  }
}

}  // namespace quire
