#include "kernels.h"

namespace quire {

// x += scale * delta
struct AddTask {
  float* x;  // [rows, cols]
  const float* delta;
  float scale;
  int cols, row_begin, row_end;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

void add_rows(const AddTask& t) {
  const size_t begin = static_cast<size_t>(t.row_begin) * t.cols, end = static_cast<size_t>(t.row_end) * t.cols;
  const V16 scale = set1(t.scale);
  for (size_t c = begin; c < end; c += 16) {
    const int n = end - c < 16 ? static_cast<int>(end - c) : 16;
    const V16 v = add(load_n(t.x + c, n), mul(load_n(t.delta + c, n), scale));
    n >= 16 ? store(t.x + c, v) : store_n(t.x + c, v, n);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"

namespace quire {
namespace {

struct Add final : RowOp {
  Add(Fields& f, Context& c) : RowOp(c, f.buffer("x")), delta(f.buffer("delta")), scale(f.number("scale")) {
    f.require(out_.dtype == DType::f32 && delta.dtype == DType::f32 && delta.cols == out_.cols,
              "x and delta must be float32 rows of one width");
  }

  void run_rows(int begin, int end, int) override {
    kernels().add_rows({out_.f32(), delta.f32(), scale, out_.cols, begin, end});
  }

  const Buffer& delta;
  float scale;
};

QUIRE_OP(Add)

}  // namespace
}  // namespace quire

#endif
