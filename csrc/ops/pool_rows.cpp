#include "kernels.h"

namespace quire {

// The mean of rows begin … end-1 of x, added in rising order.
struct PoolTask {
  const float* x;  // [tokens, cols]
  float* out;      // [cols]
  int cols, begin, end;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

void pool_rows(const PoolTask& t) {
  const V16 count = set1(static_cast<float>(t.end - t.begin));
  for (int c = 0; c < t.cols; c += 16) {
    const int n = t.cols - c;
    V16 sum = zero();
    for (int i = t.begin; i < t.end; ++i) sum = add(sum, load_n(t.x + static_cast<size_t>(i) * t.cols + c, n));
    const V16 mean = div(sum, count);
    n >= 16 ? store(t.out + c, mean) : store_n(t.out + c, mean, n);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"
#include "words.h"

namespace quire {
namespace {

// One row of `out` for each text: the mean of its tokens, or its first.
struct PoolRows final : RowOp {
  PoolRows(Fields& f, Context& c)
      : RowOp(c, f.buffer("out")), x(f.buffer("x")), mean(f.choice("kind", kPoolKinds) == 0) {
    f.require(x.dtype == DType::f32 && out_.dtype == DType::f32 && x.cols == out_.cols && !x.logits && out_.logits,
              "x must be float32 rows of tokens, and out of texts, of one width");
  }

  void run_rows(int begin, int end, int) override {
    const int32_t* starts = context_.step.query_start;
    for (int r = begin; r < end; ++r) {
      const int32_t* after = std::upper_bound(starts, starts + context_.rows + 1, context_.step.logit_rows[r]);
      kernels().pool_rows({x.f32(), out_.f32_row(r), x.cols, after[-1], mean ? *after : after[-1] + 1});
    }
  }

  const Buffer& x;
  bool mean;
};

QUIRE_OP(PoolRows)

}  // namespace
}  // namespace quire

#endif
