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

constexpr int kColumns = 1024;  // of a task
static_assert(kColumns % kMaximaCols == 0);

struct Scale final : Op {
  Scale(Fields& f, Context& c)
      : Op(c), x(f.buffer("x")), scale(f.number("scale")), cap(f.number("cap")), maxima(f, x, kernels()) {
    f.require(x.dtype == DType::f32, "x must be float32");
  }

  int tasks() const override { return context_.rows_of(x) * ceil_div(x.cols, kColumns); }
  void run(int task, int) override {
    const int chunks = ceil_div(x.cols, kColumns), row = task / chunks, begin = task % chunks * kColumns;
    const int end = std::min(x.cols, begin + kColumns);
    kernels().scale_rows({x.f32_row(row), scale, cap, begin, end});
    maxima.leave(row, 1, begin, end);
  }

  const Buffer& x;
  float scale, cap;
  Maxima maxima;
};

QUIRE_OP(Scale)

}  // namespace
}  // namespace quire

#endif
