#include "kernels.h"

namespace quire {

// x += scale * delta, or scale * act(delta)
struct AddTask {
  float* x;  // [rows, cols]
  const float* delta;
  float scale;
  int cols, row_begin, row_end;
  const Act* act;  // null for none
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/activate.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

template <class F>
QUIRE_INLINE void add_each(const AddTask& t, F f) {
  const size_t begin = static_cast<size_t>(t.row_begin) * t.cols, end = static_cast<size_t>(t.row_end) * t.cols;
  const V16 scale = set1(t.scale);
  for (size_t c = begin; c < end; c += 16) {
    const int n = end - c < 16 ? static_cast<int>(end - c) : 16;
    const V16 v = add(load_n(t.x + c, n), mul(f(load_n(t.delta + c, n)), scale));
    n >= 16 ? store(t.x + c, v) : store_n(t.x + c, v, n);
  }
}

}  // namespace

void add_rows(const AddTask& t) {
  if (!t.act) return add_each(t, [](V16 v) { return v; });
  switch (*t.act) {
    case Act::silu: return add_each(t, activate<Act::silu>);
    case Act::gelu: return add_each(t, activate<Act::gelu>);
    case Act::relu: return add_each(t, activate<Act::relu>);
    case Act::tanh: return add_each(t, activate<Act::tanh>);
    default: return add_each(t, activate<Act::gelu_tanh>);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "activation.h"
#include "op.h"

namespace quire {
namespace {

struct Add final : RowOp {
  Add(Fields& f, Context& c)
      : RowOp(c, f.buffer("x")), delta(f.buffer("delta")), scale(f.number("scale")), act(Activation::optional(f)) {
    f.require(out_.dtype == DType::f32 && delta.dtype == DType::f32 && delta.cols == out_.cols,
              "x and delta must be float32 rows of one width");
    f.require(!act || act->kind != Act::clamped_swiglu, "act must be of one number");
  }

  void run_rows(int begin, int end, int) override {
    kernels().add_rows({out_.f32(), delta.f32(), scale, out_.cols, begin, end, act ? &act->kind : nullptr});
  }

  const Buffer& delta;
  float scale;
  std::optional<Activation> act;
};

QUIRE_OP(Add)

}  // namespace
}  // namespace quire

#endif
