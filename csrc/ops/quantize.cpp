#include "beside.h"
#include "op.h"

namespace quire {
namespace {

struct Quantize final : RowOp, Beside {
  Quantize(Fields& f, Context& c)
      : RowOp(c, f.buffer("out")), x(f.buffer("x")), top(f.optional_buffer("top")), tops(f.optional_buffer("tops")) {
    f.require(x.dtype == DType::f32 && rounds() && x.cols == out_.cols, "float32 goes to an int8 buffer of its width");
    f.require((!top || (top->dtype == DType::f32 && top->cols == 1)) && (!tops || tops->dtype == DType::f32),
              "top and tops must be float32");
  }

  void run_rows(int begin, int end, int) override {
    for (int r = begin; r < end; ++r)
      quantize_row(kernels(), out_, r, x.f32_row(r), tops ? widest(r) : 0.0f, top ? top->f32_row(r) : nullptr);
  }

  const Buffer& input() const override { return x; }

  // The greatest of a row of `tops`; NaN when there is one.
  float widest(int row) const {
    const float* found = tops->f32_row(row);
    float most = 0.0f;
    for (int i = 0; i < tops->cols && most == most; ++i)
      if (!(found[i] <= most)) most = found[i];
    return most;
  }

  const Buffer& x;
  const Buffer *top, *tops;
};

QUIRE_OP(Quantize)

}  // namespace
}  // namespace quire
