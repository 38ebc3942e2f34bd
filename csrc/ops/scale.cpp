#include "kernels.h"

namespace quire {

// One row: x = scale * x, then cap * tanh(x / cap) unless cap is 0.
struct ScaleTask {
  float* x;
  float scale, cap;
  int col_begin, col_end;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

void scale_rows(const ScaleTask& t) {
  const V16 scale = set1(t.scale), cap = set1(t.cap);
  for (int c = t.col_begin; c < t.col_end; c += 16) {
    const int n = t.col_end - c;
    V16 v = mul(load_n(t.x + c, n), scale);
    if (t.cap != 0.0f) v = mul(tanh16(div(v, cap)), cap);
    n >= 16 ? store(t.x + c, v) : store_n(t.x + c, v, n);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "maxima.h"
#include "op.h"

namespace quire {
namespace {

struct Scale final : ColumnOp {
  Scale(Fields& f, Context& c)
      : ColumnOp(c, f.buffer("x")), scale(f.number("scale")), cap(f.number("cap")), maxima(f, out_, kernels()) {
    f.require(out_.dtype == DType::f32, "x must be float32");
  }

  void run_columns(int row, int begin, int end) override {
    kernels().scale_rows({out_.f32_row(row), scale, cap, begin, end});
    maxima.leave(row, 1, begin, end);
  }

  float scale, cap;
  Maxima maxima;
};

QUIRE_OP(Scale)

}  // namespace
}  // namespace quire

#endif
