#include "group.h"

#include <algorithm>
#include <stdexcept>

namespace quire {

LocalGroup::LocalGroup(int size, bool uneven) : uneven_(uneven) {
  if (size < 1) throw std::invalid_argument("size: a group has at least one rank");
  shown_.resize(static_cast<size_t>(size));
}

bool LocalGroup::meet() {
  const uint32_t before = gate_.value();
  if (left_.load()) return false;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size()) {
    gate_.wait_while(before);
  } else {
    arrived_.store(0, std::memory_order_relaxed);
    gate_.open();
  }
  return !left_.load();
}

bool LocalGroup::exchange(int rank, const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) {
  shown_[static_cast<size_t>(rank)] = mine;
  if (!meet()) return false;
  const bool same = uneven_ ||
                    std::all_of(shown_.begin(), shown_.end(), [&](const Shown& s) { return s.rows == mine.rows; });
  if (same) take(shown_);
  return meet() && same;
}

void LocalGroup::leave() {
  left_.store(true);
  gate_.open();
}

}  // namespace quire
