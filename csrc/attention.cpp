#include "attention.h"

#include <algorithm>

namespace quire {

int Attention::want(const AttendShape& shape) {
  const auto same = [&](const AttendShape& s) {
    return s.head_dim == shape.head_dim && s.heads == shape.heads && s.kv_heads == shape.kv_heads &&
           s.window == shape.window && s.rank == shape.rank && s.causal == shape.causal && s.widened == shape.widened &&
           s.recent == shape.recent;
  };
  const auto found = std::find_if(shapes_.begin(), shapes_.end(), same);
  const int number = static_cast<int>(found - shapes_.begin());
  if (found == shapes_.end()) shapes_.push_back(shape);
  return number;
}

void Attention::allocate(int threads, int max_tokens, int max_len) {
  sizes_ = attention_memory(shapes_, threads, max_len);
  states_at_ = sizes_.per_thread * threads;
  memory_.allocate(sizes_.total);
  plans_.reserve(shapes_.size());
  for (const AttendShape& shape : shapes_)
    plans_.emplace_back(shape, threads, max_tokens, sizes_.states / sizeof(float));
  if (rounding_) heads_done_ = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(max_tokens));
}

bool Attention::heads_done(int token, int heads, int all) {
  if (heads_done_[token].fetch_add(heads, std::memory_order_acq_rel) + heads < all) return false;
  heads_done_[token].store(0, std::memory_order_relaxed);  // for the next such op, which starts behind a barrier
  return true;
}

}  // namespace quire
