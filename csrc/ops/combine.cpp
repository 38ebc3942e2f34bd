#include "kernels.h"

namespace quire {

// out = sum over the token's experts, best first, of weight * row, then + (sigmoid of the gate) * shared.
struct CombineTask {
  const float* x;         // [pairs, cols]
  const int32_t* places;  // [top_k] of this token: rows of x
  const float* weights;   // [top_k]
  int top_k;
  const float* shared;  // [cols] or null
  const float* gate;    // one logit, or null
  float* out;           // [cols]
  int cols, col_begin, col_end;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

void combine(const CombineTask& t) {
  const size_t cols = t.cols;
  const V16 one = set1(1.0f);
  const V16 share = t.gate ? div(one, add(one, exp(sub(zero(), set1(*t.gate))))) : one;
  for (int c = t.col_begin; c < t.col_end; c += 16) {
    const int n = t.col_end - c;
    V16 sum = zero();
    for (int j = 0; j < t.top_k; ++j) sum = add(sum, mul(set1(t.weights[j]), load_n(t.x + t.places[j] * cols + c, n)));
    if (t.shared) sum = add(sum, t.gate ? mul(share, load_n(t.shared + c, n)) : load_n(t.shared + c, n));
    n >= 16 ? store(t.out + c, sum) : store_n(t.out + c, sum, n);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"

namespace quire {
namespace {

struct Combine final : ColumnOp {
  Combine(Fields& f, Context& c)
      : ColumnOp(c, f.buffer("out")), x(f.buffer("x")), places(f.buffer("places")), weights(f.buffer("weights")),
        shared(f.optional_buffer("shared")), gate(f.optional_buffer("gate")) {
    f.require(x.per == places.cols && weights.cols == places.cols && x.cols == out_.cols && out_.dtype == DType::f32 &&
                  (!shared || shared->cols == out_.cols) && (!gate || gate->cols == 1),
              "rows of out's width are added, one for each of a token's experts");
  }

  void run_columns(int token, int begin, int end) override {
    kernels().combine({x.f32(), places.i32() + static_cast<size_t>(token) * x.per, weights.f32_row(token), x.per,
                       shared ? shared->f32_row(token) : nullptr, gate ? gate->f32() + token : nullptr,
                       out_.f32_row(token), out_.cols, begin, end});
  }

  const Buffer &x, &places, &weights;
  const Buffer *shared, *gate;
};

QUIRE_OP(Combine)

}  // namespace
}  // namespace quire

#endif
