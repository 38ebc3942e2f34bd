#include "op.h"

namespace quire {
namespace {

// A task is sixteen ranks of one part for some rows of one adapter.
struct Shrink final : Op {
  Shrink(Fields& f, Context& c)
      : Op(c), x(f.buffer("x")), adapted(f.low_rank("adapted")), out(f.buffer("out")), apart(f.flag("apart")),
        vectors(adapted.rank / kRankLanes) {
    f.require((x.dtype == DType::f32 || x.dtype == DType::bf16) &&
                  x.cols == adapted.cols * (apart ? adapted.parts() : 1),
              "x must be floats of the adapted linear's width");
    f.require(out.dtype == DType::f32 && out.cols == adapted.rank * adapted.parts(),
              "out must be float32 with the ranks of every part");
    f.require(x.logits == out.logits && x.per == 1 && out.per == 1, "x and out must have the same rows, one each");
  }

  int tasks() const override {
    return static_cast<int>(context_.adapters.rows(out.logits).pieces.size()) * adapted.parts() * vectors;
  }

  void run(int task, int /*thread*/) override {
    const AdapterPool& pool = context_.adapters;
    const AdapterRows& rows = pool.rows(out.logits);
    const int column = task % (adapted.parts() * vectors), part = column / vectors, vector = column % vectors;
    const AdapterGroup& piece = rows.pieces[task / (adapted.parts() * vectors)];
    if (vector * kRankLanes >= adapted.ranks[adapted.at(piece.slot, part)]) return;
    ShrinkTask t;
    const size_t first = apart ? static_cast<size_t>(part) * adapted.cols : 0;
    t.x = x.data() + first * dtype_bytes(x.dtype), t.x_dtype = x.dtype, t.ldx = static_cast<size_t>(x.pitch);
    t.tokens = t.rows = rows.order.data() + piece.begin, t.count = piece.end - piece.begin;
    t.a = pool.a(adapted, piece.slot, part) + static_cast<size_t>(vector) * kRankLanes * adapted.cols;
    t.y = out.f32() + part * adapted.rank + vector * kRankLanes, t.ldy = static_cast<size_t>(out.cols);
    t.k = adapted.cols;
    kernels().shrink(t);
  }

  const Buffer& x;
  const LowRank& adapted;
  const Buffer& out;
  bool apart;  // each part has columns of x of its own
  int vectors;
};

QUIRE_OP(Shrink)

}  // namespace
}  // namespace quire
