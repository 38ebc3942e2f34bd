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
  // Adapters of the step's rows.
  int adapters() const {
    return adapted_ ? static_cast<int>(context_.adapters.rows(shrunk_->logits).groups.size()) : 0;
  }

  // Columns [col_begin, col_end) of rows [begin, end), the first of which lies at `y`, with `ldy` from row to row. `bias`
  // is that of column 0, or null.
  void add(int begin, int end, float* y, size_t ldy, int col_begin, int col_end, const float* bias) const {
    each_group(begin, end, [&](int slot, const int32_t* first, int count) {
      add_parts(slot, 0, {first, count, begin, y, ldy, col_begin, col_end, bias});
    });
  }

  // What add() reads of matrices for these rows and columns.
  void list(int begin, int end, int col_begin, int col_end, Ahead* ahead) const {
    each_group(begin, end, [&](int slot, const int32_t*, int) {
      each_run(slot, 0, col_begin, col_end, [&](const Run& run) {
        ahead->add(run.b, static_cast<size_t>(ceil_div(run.end - run.column, kRankLanes)) * run.unit);
      });
    });
  }

  // The same for the rows of a chunk, of one expert, whose columns begin with 0.
  void add(const ExpertChunk& chunk, float* y, size_t ldy, int col_begin, int col_end, const float* bias) const {
    if (!adapted_ || context_.adapters.rows(false).groups.empty()) return;
    const ExpertPlan& plan = context_.experts;
    plan.each_slot(chunk, context_.adapters.rows(false).slots, [&](int slot, int begin, int end) {
      add_parts(slot, chunk.expert * parts_,
                {plan.numbers() + begin, end - begin, chunk.begin, y, ldy, col_begin, col_end, bias});
    });
  }

 private:
  struct Rows {
    const int32_t* rows;
    int count, first;  // first: the row at y
    float* y;
    size_t ldy;
    int col_begin, col_end;
    const float* bias;
  };
  // Columns [begin, end) of a part, whose units are neighbours in memory; the first has the columns from `column` on.
  struct Run {
    const PartPlace& part;
    int number;  // of the part
    const char* b;
    size_t unit;
    int column, begin, end;
  };

  // use(slot, rows, how many) for each adapter that some of the rows [begin, end) have.
  template <class Use>
  void each_group(int begin, int end, Use use) const {
    if (!adapted_) return;
    const AdapterRows& rows = context_.adapters.rows(shrunk_->logits);
    const bool all = begin == 0 && end == static_cast<int>(rows.slots.size());
    for (const AdapterGroup& group : rows.groups) {
      const int32_t *first = rows.order.data() + group.begin, *last = rows.order.data() + group.end;
      if (!all) first = std::lower_bound(first, last, begin), last = std::lower_bound(first, last, end);
      if (first != last) use(group.slot, first, static_cast<int>(last - first));
    }
  }

  template <class Use>
  void each_run(int slot, int first_part, int col_begin, int col_end, Use use) const {
    const AdapterPool& pool = context_.adapters;
    for (int p = 0; p < parts_; ++p) {
      const PartPlace& part = pool.part(*adapted_, slot, first_part + p);
      const int start = adapted_->starts[first_part + p] - adapted_->starts[first_part];
      const int end = std::min(col_end, start + adapted_->rows(first_part + p));
      int from = std::max(col_begin, start);
      if (!part.rank || from >= end) continue;
      const PagedUnits b = pool.b(slot, part);
      while (from < end) {
        const int unit = (from - start) / kRankLanes, column = start + unit * kRankLanes;
        const PagedUnits::Run run = b.from(unit);
        const int to = std::min(end, column + run.count * kRankLanes);
        use(Run{part, p, run.data, b.unit, column, from, to});
        from = to;
      }
    }
  }

  void add_parts(int slot, int first_part, const Rows& r) const {
    each_run(slot, first_part, r.col_begin, r.col_end, [&](const Run& run) {
      ExpandTask t;
      t.x = shrunk_->f32() + run.number * adapted_->rank, t.ldx = static_cast<size_t>(shrunk_->cols);
      t.tokens = r.rows, t.count = r.count, t.first_token = r.first;
      t.b = run.b, t.unit = run.unit;
      t.y = r.y + (run.begin - r.col_begin), t.ldy = r.ldy;
      t.rank = run.part.rank, t.col_begin = run.begin - run.column, t.col_end = run.end - run.column;
      t.gains = run.part.gains, t.bias = r.bias ? r.bias + run.column : nullptr;
      context_.kernels.expand(t);
    });
  }

  const LowRank* adapted_;
  const Buffer* shrunk_;
  const Context& context_;
  int parts_ = 0;  // of a matrix
};

}  // namespace quire
