#include "activation.h"
#include "op.h"

namespace quire {
namespace {

// The gate of GatedAct alone.
struct Activate final : ColumnOp {
  Activate(Fields& f, Context& c) : ColumnOp(c, f.buffer("out")), x(f.buffer("x")), act(f) {
    f.require(x.dtype == DType::f32 && x.cols == out_.cols && x.per == out_.per && x.logits == out_.logits,
              "x must be float32 rows of out's width");
    f.require(act.kind != Act::clamped_swiglu, "act must be of one number");
    if (rounds()) c.rounded.want(out_.cols);
  }

  void run_columns(int row, int begin, int end) override {
    const size_t pitch = static_cast<size_t>(out_.cols);
    GatedActTask t = act.task(x.f32(), out_.data(), out_.dtype, 0, out_.cols, pitch, false);
    t.row_begin = row, t.row_end = row + 1;
    t.col_begin = begin, t.col_end = end;
    kernels().gated_act(t);
  }
  void run_rows(int begin, int end, int thread) override {
    float* row = context_.rounded.row(thread);
    const size_t pitch = static_cast<size_t>(out_.cols);
    for (int r = begin; r < end; ++r) {
      kernels().gated_act(act.task(x.f32_row(r), row, DType::f32, 1, out_.cols, pitch, false));
      quantize_row(kernels(), out_, r, row);
    }
  }

  const Buffer& x;
  Activation act;
};

QUIRE_OP(Activate)

}  // namespace
}  // namespace quire
