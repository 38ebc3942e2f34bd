#include "kernels.h"

namespace quire {

struct GatherTask {
  const float* x;
  const float* delta;  // or null
  const int32_t* rows;
  float* out;
  int cols, row_begin, row_end;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

void gather(const GatherTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const size_t from = static_cast<size_t>(t.rows[r]) * t.cols;
    float* out = t.out + static_cast<size_t>(r) * t.cols;
    for (int c = 0; c < t.cols; c += 16) {
      const int n = t.cols - c;
      V16 v = load_n(t.x + from + c, n);
      if (t.delta) v = add(v, load_n(t.delta + from + c, n));
      n >= 16 ? store(out + c, v) : store_n(out + c, v, n);
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"

namespace quire {
namespace {

struct GatherRows final : RowOp {
  GatherRows(Fields& f, Context& c) : RowOp(c, f.buffer("out")), x(f.buffer("x")), delta(f.optional_buffer("delta")) {
    f.require(x.dtype == DType::f32 && out_.dtype == DType::f32 && x.cols == out_.cols &&
                  (!delta || delta->cols == x.cols),
              "x, delta and out must be float32 rows of one width");
  }

  void run_rows(int begin, int end, int) override {
    kernels().gather(
        {x.f32(), delta ? delta->f32() : nullptr, context_.step.logit_rows, out_.f32(), out_.cols, begin, end});
  }

  const Buffer& x;
  const Buffer* delta;
};

QUIRE_OP(GatherRows)

}  // namespace
}  // namespace quire

#endif
