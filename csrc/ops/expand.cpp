#include "expansion.h"
#include "op.h"

namespace quire {
namespace {

struct Expand final : ColumnOp {
  Expand(Fields& f, Context& c) : ColumnOp(c, f.buffer("out")), expansion(f, c) {
    f.require(expansion && expansion.columns() == out_.cols && expansion.rows_of(out_) && out_.dtype == DType::f32,
              "out must have the columns of the adapted linear, and its rows");
  }

  int tasks() const override { return context_.adapters.rows(out_.logits).groups.empty() ? 0 : ColumnOp::tasks(); }

  void run_columns(int row, int begin, int end) override {
    const size_t ldy = static_cast<size_t>(out_.cols);
    expansion.add(row, row + 1, out_.f32_row(row) + begin, ldy, begin, end, nullptr);
  }

  Expansion expansion;
};

QUIRE_OP(Expand)

}  // namespace
}  // namespace quire
