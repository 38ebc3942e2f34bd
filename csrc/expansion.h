// What a linear adds for the adapters of its rows.
#pragma once

#include "op.h"

namespace quire {

class Expansion {
 public:
  // Reads the fields "adapted" and "shrunk"; nothing without them. `matrices`: those of experts, each with some parts.
  Expansion(Fields& f, const Context& c, int matrices = 1)
      : adapted_(f.optional_low_rank("adapted")), shrunk_(f.optional_buffer("shrunk")), context_(c) {
    if (adapted_) parts_ = adapted_->parts() / matrices;
    f.require(!adapted_ == !shrunk_ && (!adapted_ || shrunk_->cols == adapted_->rank * parts_),
              "shrunk must have the ranks of the adapted linear");
  }

  explicit operator bool() const { return adapted_; }
  int columns() const { return adapted_->starts[parts_]; }
  // Whether `out` has the rows that were shrunk.
  bool rows_of(const Buffer& out) const { return out.logits == shrunk_->logits && out.per == shrunk_->per; }

  // Columns [col_begin, col_end) of rows [begin, end), the first of which lies at `y`, with `ldy` from row to row. `bias`
  // is that of column 0, or null.
  void add(int begin, int end, float* y, size_t ldy, int col_begin, int col_end, const float* bias) const {
    if (!adapted_) return;
    const AdapterRows& rows = context_.adapters.rows(shrunk_->logits);
    const bool all = begin == 0 && end == static_cast<int>(rows.slots.size());
    for (size_t g = 0; g < rows.groups.size(); ++g) {
      const AdapterGroup& group = rows.groups[g];
      const int32_t *first = rows.order.data() + group.begin, *last = rows.order.data() + group.end;
      if (!all) first = std::lower_bound(first, last, begin), last = std::lower_bound(first, last, end);
      const int next = g + 1 < rows.groups.size() ? rows.groups[g + 1].slot : -1;
      if (first != last)
        add_parts(group.slot, next, 0,
                  {first, static_cast<int>(last - first), begin, y, ldy, col_begin, col_end, bias});
    }
  }

  // The same for the rows of a chunk, of one expert, whose columns begin with 0.
  void add(const ExpertChunk& chunk, float* y, size_t ldy, int col_begin, int col_end, const float* bias) const {
    if (!adapted_ || context_.adapters.rows(false).groups.empty()) return;
    const ExpertPlan& plan = context_.experts;
    plan.each_slot(chunk, context_.adapters.rows(false).slots, [&](int slot, int begin, int end) {
      add_parts(slot, -1, chunk.expert * parts_,
                {plan.numbers() + begin, end - begin, chunk.begin, y, ldy, col_begin, col_end, bias});
    });
  }

 private:
  static constexpr size_t kAhead = 8 << 10;  // bytes that are fetched ahead, at the most

  struct Rows {
    const int32_t* rows;
    int count, first;  // first: the row at y
    float* y;
    size_t ldy;
    int col_begin, col_end;
    const float* bias;
  };

  // `next`: the slot whose columns are added after these, or -1.
  void add_parts(int slot, int next, int first_part, const Rows& r) const {
    const AdapterPool& pool = context_.adapters;
    for (int p = 0; p < parts_; ++p) {
      const PartPlace& part = pool.part(*adapted_, slot, first_part + p);
      const int start = adapted_->starts[first_part + p] - adapted_->starts[first_part];
      const int end = std::min(r.col_end, start + adapted_->rows(first_part + p));
      if (!part.rank) continue;
      const PagedUnits b = pool.b(slot, part);
      for (int from = std::max(r.col_begin, start); from < end;) {  // a run of columns that are neighbours in memory
        const int unit = (from - start) / kRankLanes, column = start + unit * kRankLanes;
        const PagedUnits::Run run = b.from(unit);
        const int to = std::min(end, column + run.count * kRankLanes);
        ExpandTask t;
        t.x = shrunk_->f32() + p * adapted_->rank, t.ldx = static_cast<size_t>(shrunk_->cols);
        t.tokens = r.rows, t.count = r.count, t.first_token = r.first;
        t.b = run.data, t.unit = b.unit;
        t.y = r.y + (from - r.col_begin), t.ldy = r.ldy;
        t.rank = part.rank, t.col_begin = from - column, t.col_end = to - column;
        t.gains = part.gains, t.bias = r.bias ? r.bias + column : nullptr;
        if (const PartPlace* after = next < 0 ? nullptr : &pool.part(*adapted_, next, first_part + p);
            after && after->rank) {
          const PagedUnits units = pool.b(next, *after);
          const PagedUnits::Run ahead = units.from(unit);
          t.next = ahead.data;
          t.next_bytes = std::min<size_t>(kAhead,
                                          std::min(ahead.count, ceil_div(to - column, kRankLanes)) * units.unit);
        }
        context_.kernels.expand(t);
        from = to;
      }
    }
  }

  const LowRank* adapted_;
  const Buffer* shrunk_;
  const Context& context_;
  int parts_ = 0;  // of a matrix
};

}  // namespace quire
