#include "kernels.h"

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/activate.h"
#include "kernels/put.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kAhead = 512;  // floats that are fetched ahead: where a page ends, so do the hardware's guesses

// Both halves clamped, then (up + 1) * gate * sigmoid(alpha * gate).
QUIRE_INLINE V16 clamped_swiglu(const GatedActTask& t, V16 gate, V16 up) {
  const V16 limit = set1(t.limit), one = set1(1.0f);
  gate = vmin(gate, limit);
  up = vmax(vmin(up, limit), sub(zero(), limit));
  return mul(add(up, one), swish(gate, mul(set1(t.alpha), gate)));
}

template <Act kAct>
QUIRE_INLINE void plain_rows(const GatedActTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const float* x = t.gate_up + static_cast<size_t>(r) * t.width;
    for (int c = t.col_begin; c < t.col_end; c += 16) {
      const int n = t.col_end - c;
      put(t.out, t.out_dtype, static_cast<size_t>(r) * t.out_pitch + c, activate<kAct>(load_n(x + c, n)), n);
    }
  }
}

template <Act kAct>
QUIRE_INLINE void gated_rows(const GatedActTask& t) {
  if constexpr (kAct != Act::clamped_swiglu)
    if (!t.up) return plain_rows<kAct>(t);
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const float* gate = t.gate_up + static_cast<size_t>(r) * 2 * t.width;
    const float* up = gate + t.width;
    for (int c = t.col_begin; c < t.col_end; c += 16) {
      const int n = t.col_end - c;
      prefetch(gate + c + kAhead);
      prefetch(up + c + kAhead);
      const V16 g = load_n(gate + c, n), u = load_n(up + c, n);
      put(t.out, t.out_dtype, static_cast<size_t>(r) * t.out_pitch + c,
          kAct == Act::clamped_swiglu ? clamped_swiglu(t, g, u) : mul(activate<kAct>(g), u), n);
    }
  }
}

}  // namespace

void gated_act(const GatedActTask& t) {
  switch (t.act) {
    case Act::silu: return gated_rows<Act::silu>(t);
    case Act::gelu: return gated_rows<Act::gelu>(t);
    case Act::gelu_tanh: return gated_rows<Act::gelu_tanh>(t);
    case Act::relu: return gated_rows<Act::relu>(t);
    case Act::tanh: return gated_rows<Act::tanh>(t);
    case Act::clamped_swiglu: return gated_rows<Act::clamped_swiglu>(t);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "activation.h"
#include "op.h"

namespace quire {
namespace {

struct GatedAct final : ColumnOp {
  GatedAct(Fields& f, Context& c) : ColumnOp(c, f.buffer("out")), gate_up(f.buffer("gate_up")), act(f) {
    f.require(gate_up.dtype == DType::f32 && gate_up.cols == 2 * out_.cols && gate_up.per == out_.per,
              "gate_up must be float32 rows of twice out's width");
    if (rounds()) c.rounded.want(out_.cols);
  }

  void run_columns(int row, int begin, int end) override {
    GatedActTask t = act.task(gate_up.f32(), out_.data(), out_.dtype, 0, out_.cols, static_cast<size_t>(out_.cols));
    t.row_begin = row, t.row_end = row + 1;
    t.col_begin = begin, t.col_end = end;
    kernels().gated_act(t);
  }
  void run_rows(int begin, int end, int thread) override {
    float* row = context_.rounded.row(thread);
    for (int r = begin; r < end; ++r) {
      kernels().gated_act(act.task(gate_up.f32_row(r), row, DType::f32, 1, out_.cols, static_cast<size_t>(out_.cols)));
      quantize_row(kernels(), out_, r, row);
    }
  }

  const Buffer& gate_up;
  Activation act;
};

QUIRE_OP(GatedAct)

}  // namespace
}  // namespace quire

#endif
