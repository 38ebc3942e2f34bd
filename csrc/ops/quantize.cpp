#include "op.h"

namespace quire {
namespace {

struct Quantize final : RowOp {
  Quantize(Fields& f, Context& c) : RowOp(c, f.buffer("out")), x(f.buffer("x")) {
    f.require(x.dtype == DType::f32 && rounds() && x.cols == out_.cols, "float32 goes to an int8 buffer of its width");
  }

  void run_rows(int begin, int end, int) override {
    for (int r = begin; r < end; ++r) quantize_row(kernels(), out_, r, x.f32_row(r));
  }

  const Buffer& x;
};

QUIRE_OP(Quantize)

}  // namespace
}  // namespace quire
