#include "adapter_layout.h"

#include <algorithm>
#include <stdexcept>

namespace quire {

namespace {

// A matrix begins at a cache line.
PagePlace aligned(PageSize page, PagePlace at) {
  at.offset = static_cast<uint32_t>(align_up(at.offset, kAlignment));
  return at.offset < page.capacity() ? at : PagePlace{at.page + 1, 0};
}

uint32_t features_in_units(int cols) { return static_cast<uint32_t>(ceil_div(cols, PartPlace::kFeatures)); }

}  // namespace

void AdapterLayout::declare(const std::string& name, int cols, int rank, const std::vector<int>& rows,
                            SharedMatrix shared) {
  LowRank l{name, cols, static_cast<int>(align_up(static_cast<size_t>(rank), kRankLanes)), {0}, shared, parts_};
  for (const int n : rows) l.starts.push_back(l.starts.back() + n);
  if (!by_name_.emplace(name, linears_.size()).second)
    throw std::invalid_argument(name + ": a second linear of this name");
  linears_.push_back(l);
  parts_ += l.parts();
}

void AdapterLayout::declare_own(const std::string& name, const Param& param) {
  if (!own_by_name_.emplace(name, owned_.size()).second)
    throw std::invalid_argument(name + ": a second parameter of this name");
  owned_.push_back({name, param, owned()});
  const size_t least = owned_.back().unit_bytes() + PageSize::kReadBehind;
  page_.bytes = std::max(page_.bytes, static_cast<uint32_t>(align_up(least, kAlignment)));
}

const LowRank& AdapterLayout::at(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) throw std::invalid_argument("no linear with adapters is named '" + name + "'");
  return linears_[found->second];
}

const OwnParam& AdapterLayout::own(const std::string& name) const {
  const auto found = own_by_name_.find(name);
  if (found == own_by_name_.end())
    throw std::invalid_argument("no parameter that adapters replace is named '" + name + "'");
  return owned_[found->second];
}

PagePlace AdapterLayout::group_of(const LowRank& l, const PartPlace& part, int group) const {
  PagePlace at = part.a;
  for (int g = 0; g < group; ++g) at = behind(page_, at, part.a_unit(g), features_in_units(l.cols));
  return at;
}

int AdapterLayout::place(const AdapterShape& shape, PartPlace* places, PagePlace* own) const {
  for (const auto& [name, parts] : shape.parts)
    if (static_cast<int>(parts.size()) != at(name).parts())
      throw std::invalid_argument(name + ": a rank for each part is needed");
  for (const std::string& name : shape.own) (void)this->own(name);
  PagePlace end;
  if (places) std::fill_n(places, parts_, PartPlace{});
  // In the order in which they were declared, whatever that of the shape is.
  for (const auto& l : linears_) {
    const auto found = shape.parts.find(l.name);
    if (found == shape.parts.end()) continue;
    PartPlace before;  // of a part with matrices
    for (int p = 0; p < l.parts(); ++p) {
      const auto [rank, gains] = found->second[p];
      if (rank < 0 || rank > l.rank || (gains && l.shared != SharedMatrix::none))
        throw std::invalid_argument(l.name + ": a rank beyond the limit, or gains of parts that share a matrix");
      if (!rank) continue;
      const bool share = before.rank && l.shared != SharedMatrix::none;
      if (share && before.rank != rank) throw std::invalid_argument(l.name + ": parts that share have one rank");
      PartPlace part;
      part.rank = static_cast<int16_t>(rank), part.gains = gains;
      part.a = part.b = aligned(page_, end);
      if (share && l.shared == SharedMatrix::a)
        part.a = before.a;
      else
        end = group_of(l, part, ceil_div(rank, kRankLanes)), part.b = aligned(page_, end);
      if (share && l.shared == SharedMatrix::b)
        part.b = before.b;
      else
        end = behind(page_, part.b, part.b_unit(), static_cast<uint32_t>(ceil_div(l.rows(p), kRankLanes)));
      if (places) places[l.first + p] = part;
      before = part;
    }
  }
  for (const OwnParam& each : owned_) {
    const bool wanted = std::count(shape.own.begin(), shape.own.end(), each.name);
    const PagePlace begin = wanted ? aligned(page_, end) : PagePlace{-1, 0};
    if (wanted) end = behind(page_, begin, each.unit_bytes(), static_cast<uint32_t>(each.units()));
    if (own) own[each.number] = begin;
  }
  return end.page + (end.offset > 0);
}

size_t AdapterLayout::table_bytes(int slots, int pages) const {
  const size_t of_slot = static_cast<size_t>(parts_) * sizeof(PartPlace) + owned_.size() * sizeof(PagePlace);
  return slots * of_slot + static_cast<size_t>(pages) * 2 * sizeof(int32_t);  // free pages, and those of slots
}

}  // namespace quire
