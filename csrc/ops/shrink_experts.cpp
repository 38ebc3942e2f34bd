#include "shrinking.h"

namespace quire {
namespace {

// A task is a chunk of an expert's rows and sixteen ranks of one part.
struct ShrinkExperts final : Op {
  ShrinkExperts(Fields& f, Context& c) : Op(c), each(f, c, f.low_rank("adapted").parts() / f.integer("experts")) {
    // The plan of the router says which rows are whose.
    const int k = f.buffer("places").cols;
    f.require(f.buffer("ids").cols == k && each.out.per == k && (each.x.per == k || each.x.per == 1),
              "out must have a row for each pair, x too, or one for each token");
    f.require(each.x.cols == each.adapted.cols, "x must be of the adapted linear's width");
  }

  int tasks() const override {
    return context_.adapters.rows(false).groups.empty() ? 0 : context_.experts.size() * each.columns();
  }

  void run(int task, int /*thread*/) override {
    const ExpertPlan& plan = context_.experts;
    const ExpertChunk& chunk = plan[task / each.columns()];
    plan.each_slot(chunk, context_.adapters.rows(false).slots, [&](int slot, int begin, int end) {
      const int32_t* rows = plan.numbers() + begin;
      const int32_t* from = each.x.per == 1 ? plan.tokens() + begin : rows;
      each.run(task % each.columns(), slot, chunk.expert * each.parts, 0, from, rows, end - begin);
    });
  }

  Shrinking each;
};

QUIRE_OP(ShrinkExperts)

}  // namespace
}  // namespace quire
