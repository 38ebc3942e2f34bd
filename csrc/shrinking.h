// The first half of what adapters add to a linear, for rows of one adapter: sixteen ranks of a part.
#pragma once

#include "op.h"

namespace quire {

class Shrinking {
 public:
  // Reads the fields "x", "adapted" and "out". `parts`: of the linear, or of one of its experts; 0 for all.
  Shrinking(Fields& f, const Context& c, int parts)
      : x(f.buffer("x")), adapted(f.low_rank("adapted")), out(f.buffer("out")), parts(parts ? parts : adapted.parts()),
        vectors(adapted.rank / kRankLanes), context_(c) {
    f.require(x.dtype == DType::f32 || x.dtype == DType::bf16, "x must be floats");
    f.require(out.dtype == DType::f32 && out.cols == adapted.rank * this->parts,
              "out must be float32 with the ranks of every part");
  }

  // Tasks for some rows: of each part, each vector of ranks.
  int columns() const { return parts * vectors; }

  // Task `column`; the linear's part is that many behind `first_part`. Rows `from` of x, whose first column is `x_column`,
  // become `to` of out.
  void run(int column, int slot, int first_part, int x_column, const int32_t* from, const int32_t* to,
           int count) const {
    const int part = column / vectors, group = column % vectors;
    const PartPlace& place = context_.adapters.part(adapted, slot, first_part + part);
    if (group * kRankLanes >= place.rank) return;
    ShrinkTask t;
    t.x = x.data() + static_cast<size_t>(x_column) * dtype_bytes(x.dtype), t.x_dtype = x.dtype;
    t.ldx = static_cast<size_t>(x.pitch);
    t.tokens = from, t.rows = to, t.count = count;
    t.a = context_.adapters.a(adapted, slot, first_part + part, group), t.lanes = place.lanes(group);
    t.y = out.f32() + part * adapted.rank + group * kRankLanes, t.ldy = static_cast<size_t>(out.cols);
    t.k = adapted.cols;
    context_.kernels.shrink(t);
  }

  // What run() reads of A.
  void list(int column, int slot, int first_part, Ahead* ahead) const {
    const int part = first_part + column / vectors, group = column % vectors;
    const PartPlace& place = context_.adapters.part(adapted, slot, part);
    if (group * kRankLanes >= place.rank) return;
    const PagedUnits a = context_.adapters.a(adapted, slot, part, group);
    for (int unit = 0, units = ceil_div(adapted.cols, PartPlace::kFeatures); unit < units;) {
      const PagedUnits::Run run = a.from(unit);
      const int count = std::min(run.count, units - unit);
      ahead->add(run.data, static_cast<size_t>(count) * a.unit);
      unit += count;
    }
  }

  const Buffer& x;
  const LowRank& adapted;
  const Buffer& out;
  const int parts, vectors;

 private:
  const Context& context_;
};

}  // namespace quire
