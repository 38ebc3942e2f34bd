// Where the experts of a router's layer are: ranks hold runs of places, and each place has one expert.
#pragma once

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace quire {

class ExpertPlaces {
 public:
  explicit ExpertPlaces(int experts) : place_(experts), pairs_(experts) { std::iota(place_.begin(), place_.end(), 0); }

  // Between steps: the place of each expert. Throws std::invalid_argument unless each place is named once.
  void put(const std::vector<int32_t>& places) {
    std::vector<bool> taken(place_.size());
    bool fits = places.size() == taken.size();
    for (size_t e = 0; fits && e < places.size(); ++e) {
      const auto at = static_cast<size_t>(places[e]);
      fits = places[e] >= 0 && at < taken.size() && !taken[at];
      if (fits) taken[at] = true;
    }
    if (!fits) throw std::invalid_argument("places: each of " + std::to_string(place_.size()) + " must be named once");
    place_ = places;
    moved_ = true;
  }
  // Experts [n] become the numbers of their places.
  void find(int32_t* ids, int n) const {
    if (moved_)
      for (int i = 0; i < n; ++i) ids[i] = place_[ids[i]];
  }

  void count(int place, int pairs) { pairs_[place] += pairs; }
  // Pairs of (token, expert) that each place has had since the last call.
  std::vector<uint64_t> take_pairs() { return std::exchange(pairs_, std::vector<uint64_t>(pairs_.size())); }

 private:
  std::vector<int32_t> place_;
  std::vector<uint64_t> pairs_;
  bool moved_ = false;
};

}  // namespace quire
