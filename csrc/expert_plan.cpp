#include "expert_plan.h"

#include <algorithm>
#include <numeric>

#include "kernels.h"
#include "sizes.h"

namespace quire {

size_t expert_plan_bytes(int experts, int pairs) {
  // an expert has one chunk more than whole ones
  const size_t chunks = static_cast<size_t>(std::min(experts, pairs)) + pairs / kLinearRows;
  return align_up(static_cast<size_t>(experts + 2 * pairs) * sizeof(int32_t), kAlignment) +
         chunks * sizeof(ExpertChunk);
}

void ExpertPlan::allocate(int max_tokens) {
  if (!experts_) return;
  const int pairs = max_tokens * top_k_;
  memory_.allocate(expert_plan_bytes(experts_, pairs));
  next_ = reinterpret_cast<int32_t*>(memory_.data());
  tokens_ = next_ + experts_, numbers_ = tokens_ + pairs;
  std::iota(numbers_, numbers_ + pairs, 0);
  const size_t numbers = static_cast<size_t>(experts_ + 2 * pairs) * sizeof(int32_t);
  chunks_ = reinterpret_cast<ExpertChunk*>(memory_.data() + align_up(numbers, kAlignment));
}

void ExpertPlan::sort(const int32_t* ids, int tokens, int top_k, int experts, int32_t* places) {
  const int pairs = tokens * top_k;
  std::fill(next_, next_ + experts, 0);
  for (int i = 0; i < pairs; ++i) ++next_[ids[i]];
  size_ = active_ = 0;
  int begin = 0;
  for (int e = 0; e < experts; ++e) {
    const int rows = next_[e], count = ceil_div(rows, kLinearRows), first = size_;
    for (int c = 0; c < count; ++c)
      chunks_[size_++] = {e, begin + static_cast<int>(static_cast<int64_t>(rows) * c / count),
                          begin + static_cast<int>(static_cast<int64_t>(rows) * (c + 1) / count), first, count};
    active_ += rows > 0;
    next_[e] = begin;
    begin += rows;
  }
  for (int i = 0; i < pairs; ++i) {
    places[i] = next_[ids[i]]++;
    tokens_[places[i]] = i / top_k;
  }
}

}  // namespace quire
