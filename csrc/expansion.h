// What a linear adds for the adapters of its rows.
#pragma once

#include "op.h"

namespace quire {

class Expansion {
 public:
  // Reads the fields "adapted" and "shrunk"; nothing without them.
  Expansion(Fields& f, const Context& c)
      : adapted_(f.optional_low_rank("adapted")), shrunk_(f.optional_buffer("shrunk")), context_(c) {
    f.require(!adapted_ == !shrunk_ && (!adapted_ || shrunk_->cols == adapted_->rank * adapted_->parts()),
              "shrunk must have the ranks of the adapted linear");
  }

  explicit operator bool() const { return adapted_; }
  int columns() const { return adapted_->starts.back(); }

  // Columns [col_begin, col_end) of rows [begin, end), the first of which lies at `y`, with `ldy` from row to row.
  void add(int begin, int end, float* y, size_t ldy, int col_begin, int col_end) const {
    if (!adapted_) return;
    const AdapterPool& pool = context_.adapters;
    const int32_t* tokens = pool.tokens().data();
    for (const AdapterTokens& group : pool.groups()) {
      const int32_t* last = tokens + group.end;
      const int32_t* first = std::lower_bound(tokens + group.begin, last, begin);
      last = std::lower_bound(first, last, end);
      if (first == last) continue;
      for (int part = 0; part < adapted_->parts(); ++part) {
        const int start = adapted_->starts[part], rank = adapted_->ranks[group.slot * adapted_->parts() + part];
        const int from = std::max(col_begin, start), to = std::min(col_end, adapted_->starts[part + 1]);
        if (from >= to || !rank) continue;
        ExpandTask t;
        t.x = shrunk_->f32() + part * adapted_->rank, t.ldx = static_cast<size_t>(shrunk_->cols);
        t.tokens = first, t.count = static_cast<int>(last - first), t.first_token = begin;
        t.b = pool.b(*adapted_, group.slot, part), t.ldb = static_cast<size_t>(adapted_->rank);
        t.y = y + (from - col_begin), t.ldy = ldy;
        t.rank = rank, t.col_begin = from - start, t.col_end = to - start;
        context_.kernels.expand(t);
      }
    }
  }

 private:
  const LowRank* adapted_;
  const Buffer* shrunk_;
  const Context& context_;
};

}  // namespace quire
