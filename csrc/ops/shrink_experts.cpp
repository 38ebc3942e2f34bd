#include "op.h"

namespace quire {
namespace {

// A task is a chunk of an expert's rows and sixteen ranks of one part.
struct ShrinkExperts final : Op {
  ShrinkExperts(Fields& f, Context& c)
      : Op(c), x(f.buffer("x")), adapted(f.low_rank("adapted")), out(f.buffer("out")),
        parts(adapted.parts() / f.integer("experts")), vectors(adapted.rank / kRankLanes) {
    // The plan of the router says which rows are whose.
    const int k = f.buffer("places").cols;
    f.require(f.buffer("ids").cols == k && out.per == k && (x.per == k || x.per == 1),
              "out must have a row for each pair, x too, or one for each token");
    f.require((x.dtype == DType::f32 || x.dtype == DType::bf16) && x.cols == adapted.cols,
              "x must be floats of the adapted linear's width");
    f.require(out.dtype == DType::f32 && out.cols == adapted.rank * parts,
              "out must be float32 with the ranks of an expert's parts");
  }

  int tasks() const override {
    return context_.adapters.rows(false).groups.empty() ? 0 : context_.experts.size() * parts * vectors;
  }

  void run(int task, int /*thread*/) override {
    const AdapterPool& pool = context_.adapters;
    const ExpertPlan& plan = context_.experts;
    const ExpertChunk& chunk = plan[task / (parts * vectors)];
    const int column = task % (parts * vectors), part = column / vectors, vector = column % vectors;
    const int of_expert = chunk.expert * parts + part;
    plan.each_slot(chunk, pool.rows(false).slots, [&](int slot, int begin, int end) {
      if (vector * kRankLanes >= adapted.ranks[adapted.at(slot, of_expert)]) return;
      ShrinkTask t;
      t.x = x.data(), t.x_dtype = x.dtype, t.ldx = static_cast<size_t>(x.pitch);
      t.rows = plan.numbers() + begin, t.tokens = x.per == 1 ? plan.tokens() + begin : t.rows, t.count = end - begin;
      t.a = pool.a(adapted, slot, of_expert) + static_cast<size_t>(vector) * kRankLanes * adapted.cols;
      t.y = out.f32() + part * adapted.rank + vector * kRankLanes, t.ldy = static_cast<size_t>(out.cols);
      t.k = adapted.cols;
      kernels().shrink(t);
    });
  }

  const Buffer& x;
  const LowRank& adapted;
  const Buffer& out;
  int parts, vectors;  // parts of an expert
};

QUIRE_OP(ShrinkExperts)

}  // namespace
}  // namespace quire
