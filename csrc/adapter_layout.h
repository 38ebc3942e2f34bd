// How an adapter (LoRA, arXiv 2106.09685; DoRA, 2402.09353) lies in pages: what it changes, at the ranks that it has.
#pragma once

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "paged.h"
#include "weights.h"

namespace quire {

// A matrix that all parts of a linear share, which is held once.
enum class SharedMatrix { none, a, b };

// A linear that adapters may change. A stacked linear has parts, each with some of the output's columns, matrices, and a
// gain for each of its columns; the parts of experts follow each other.
struct LowRank {
  std::string name;
  int cols, rank;           // input features; the greatest rank, in whole vectors
  std::vector<int> starts;  // first column of each part, and the end of the last
  SharedMatrix shared;
  int first;  // its first part among those of all linears

  int parts() const { return static_cast<int>(starts.size()) - 1; }
  int rows(int part) const { return starts[part + 1] - starts[part]; }
};

// A parameter of which adapters may have one of their own, in units of whole panels, or of rows of a table.
struct OwnParam {
  std::string name;
  Param shape;
  int number;  // among those of all
  int unit_rows() const { return shape.layout == Param::Layout::panels ? kPanel : 1; }
  uint32_t unit_bytes() const {
    return static_cast<uint32_t>(shape.layout == Param::Layout::panels ? shape.panel_bytes()
                                                                       : shape.cols * dtype_bytes(shape.dtype));
  }
  int units() const { return ceil_div(shape.rows, unit_rows()); }
};

// A part's matrices in the pages of an adapter. A is cut into groups of up to sixteen ranks, one after the other; a unit
// of a group is [2][ranks][2 features]. A unit of B is [rank / 2][16 columns][2 ranks], and the gains of the columns where there
// are some. Pairs of numbers are whole vectors of which half a register is a number: one is shifted, one masked.
struct PartPlace {
  PagePlace a, b;
  int16_t rank = 0;  // 0: the adapter leaves the part alone
  bool gains = false;

  static constexpr int kFeatures = 4;
  int lanes(int group) const { return std::min(kRankLanes, rank - group * kRankLanes); }
  uint32_t a_unit(int group) const { return static_cast<uint32_t>(kFeatures * lanes(group)) * sizeof(uint16_t); }
  uint32_t b_unit() const {
    return kRankLanes * static_cast<uint32_t>(even_ranks(rank) * sizeof(uint16_t) + (gains ? sizeof(float) : 0));
  }
};

// What an adapter has: by linear, the rank of each part (0 for none) and whether it has gains; and parameters of its own.
struct AdapterShape {
  std::unordered_map<std::string, std::vector<std::pair<int, bool>>> parts;
  std::vector<std::string> own;
};

class AdapterLayout {
 public:
  // Throw std::invalid_argument for a name that is taken.
  void declare(const std::string& name, int cols, int rank, const std::vector<int>& rows, SharedMatrix shared);
  void declare_own(const std::string& name, const Param& param);
  // Throw std::invalid_argument for a name that was not declared.
  const LowRank& at(const std::string& name) const;
  const OwnParam& own(const std::string& name) const;

  // Pages that an adapter takes; `places` [parts] and `own` [owned, page -1 for none] are filled where they are given.
  // Throws std::invalid_argument for what was not declared, or does not fit.
  int place(const AdapterShape& shape, PartPlace* places = nullptr, PagePlace* own = nullptr) const;
  // Where a group of a part's A begins.
  PagePlace group_of(const LowRank& l, const PartPlace& part, int group) const;

  bool empty() const { return linears_.empty() && owned_.empty(); }
  int parts() const { return parts_; }
  int owned() const { return static_cast<int>(owned_.size()); }
  PageSize page() const { return page_; }
  // Bytes of a pool: its pages, and the tables that say what lies where.
  size_t table_bytes(int slots, int pages) const;
  size_t slab_bytes(int pages) const { return align_up(static_cast<size_t>(pages) * page_.bytes, 4096); }

 private:
  PageSize page_;
  int parts_ = 0;
  std::vector<LowRank> linears_;
  std::vector<OwnParam> owned_;
  std::unordered_map<std::string, size_t> by_name_, own_by_name_;
};

}  // namespace quire
