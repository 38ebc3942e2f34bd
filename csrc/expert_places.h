// Where the experts of a router's layer are: ranks hold runs of places, and each place has one expert. There may be more
// places than experts: then some experts are at several.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace quire {

class ExpertPlaces {
 public:
  // At the start place p has expert p, and those beyond the experts have the first ones once more.
  ExpertPlaces(int experts, int places)
      : first_(static_cast<size_t>(experts) + 1), pairs_(static_cast<size_t>(places)) {
    std::vector<int32_t> at(pairs_.size());
    for (int p = 0; p < places; ++p) at[static_cast<size_t>(p)] = p % experts;
    put(at);
  }

  // Between steps: the expert at each place. Throws std::invalid_argument unless each expert is somewhere.
  void put(const std::vector<int32_t>& experts) {
    const size_t count = first_.size() - 1;
    std::vector<int32_t> first(count + 1);
    bool fits = experts.size() == pairs_.size();
    for (size_t p = 0; fits && p < experts.size(); ++p) {
      fits = experts[p] >= 0 && static_cast<size_t>(experts[p]) < count;
      if (fits) ++first[static_cast<size_t>(experts[p]) + 1];
    }
    for (size_t e = 0; fits && e < count; ++e) fits = first[e + 1] > 0, first[e + 1] += first[e];
    if (!fits)
      throw std::invalid_argument("experts: " + std::to_string(pairs_.size()) + " places must have all " +
                                  std::to_string(count));
    places_.resize(experts.size());
    std::vector<int32_t> next = first;
    moved_ = false;
    for (size_t p = 0; p < experts.size(); ++p) {
      places_[static_cast<size_t>(next[static_cast<size_t>(experts[p])]++)] = static_cast<int32_t>(p);
      moved_ = moved_ || experts[p] != static_cast<int32_t>(p);
    }
    first_ = std::move(first);
  }
  // Experts [rows, top_k] of rows `begin` … of a step become the numbers of their places. Rows take turns with the places of
  // an expert, which all give the same bits.
  void find(int32_t* ids, int begin, int rows, int top_k) const {
    if (!moved_) return;
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < top_k; ++j, ++ids) {
        const int32_t first = first_[static_cast<size_t>(*ids)], count = first_[static_cast<size_t>(*ids) + 1] - first;
        *ids = places_[static_cast<size_t>(first + (count > 1 ? (begin + r) % count : 0))];
      }
  }

  void count(int place, int pairs) { pairs_[static_cast<size_t>(place)] += static_cast<uint64_t>(pairs); }
  // Pairs of (token, expert) that each place has had since the last call.
  std::vector<uint64_t> take_pairs() { return std::exchange(pairs_, std::vector<uint64_t>(pairs_.size())); }

 private:
  std::vector<int32_t> first_, places_;  // of expert e: places_[first_[e]] … places_[first_[e + 1] - 1]
  std::vector<uint64_t> pairs_;
  bool moved_ = false;
};

}  // namespace quire
