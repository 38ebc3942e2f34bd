#include "expansion.h"
#include "multiply.h"
#include "op.h"

namespace quire {
namespace {

struct Experts final : Op {
  Experts(Fields& f, Context& c)
      : Op(c), x(f.buffer("x")), weight(f.weight("weight")), bias(f.optional_vector("bias")), out(f.buffer("out")),
        first_expert(f.integer("first")), expansion(f, c, weight.matrices), multiply(linear_kernel(kernels(), weight)) {
    // The plan of the router says which rows are whose.
    f.require(f.buffer("ids").cols == x.per && f.buffer("places").cols == x.per, "x must have a row for each pair");
    f.require(first_expert >= 0 && first_expert + weight.matrices <= f.integer("experts"),
              "the weight must hold some of the router's experts");
    f.require(can_multiply(x, weight), "x must have the weights' type, width and groups");
    f.require(!expansion || (expansion.rows_of(out) && expansion.columns() == out.cols && !first_expert),
              "adapted experts must be all of the router's, with the rows that were shrunk and their columns");
    f.require(out.cols == weight.matrix_rows && out.per == x.per && out.dtype == DType::f32 &&
                  (!bias || bias->rows == weight.matrices * weight.matrix_rows),
              "out and bias must have the widths of an expert");
  }

  struct Split {
    int panels_per_task, panel_tasks;  // of one expert
  };
  Split split() const {
    const int panels = weight.matrix_panels();
    // long streams of weights, but still eight tasks a thread to even out
    const int even = panels * context_.experts.active() / (8 * context_.threads);
    Split s;
    s.panels_per_task = std::min(panels, std::max(panels_of_task(weight.panel_bytes()), even));
    s.panel_tasks = ceil_div(panels, s.panels_per_task);
    return s;
  }

  int tasks() const override {
    if (!context_.rows_of(out)) return 0;
    const ExpertPlan& plan = context_.experts;
    int end = plan.size();
    for (begin = 0; begin < end && plan[begin].expert < first_expert;) ++begin;
    while (end > begin && plan[end - 1].expert >= first_expert + weight.matrices) --end;
    return (end - begin) * split().panel_tasks;
  }
  void run(int task, int) override {
    const ExpertPlan& plan = context_.experts;
    const Split s = split();
    // Row chunks of one panel range of an expert are neighbours in the task order: the panel is still in the cache.
    const int first = plan[begin + task / s.panel_tasks].first, count = plan[first].count;
    const int inside = task - (first - begin) * s.panel_tasks;
    const ExpertChunk& chunk = plan[first + inside % count];
    const int matrix = chunk.expert - first_expert;
    LinearTask t = linear_task(x, chunk.begin, chunk.end, weight, matrix);
    t.bias = bias ? bias->vector() + static_cast<size_t>(matrix) * weight.matrix_rows : nullptr;
    t.ldy = static_cast<size_t>(out.cols);
    t.y = out.f32_row(chunk.begin);
    t.panel_begin = inside / count * s.panels_per_task;
    t.panel_end = std::min(weight.matrix_panels(), t.panel_begin + s.panels_per_task);
    multiply(t);
    const int from = t.panel_begin * kPanel, to = std::min(weight.matrix_rows, t.panel_end * kPanel);
    expansion.add(chunk, t.y + from, t.ldy, from, to, t.bias);
  }

  const Buffer& x;
  const Param& weight;
  const Param* bias;
  const Buffer& out;
  int first_expert;       // that the weight holds
  mutable int begin = 0;  // this step's first chunk of one of them
  Expansion expansion;
  LinearKernel multiply;
};

QUIRE_OP(Experts)

}  // namespace
}  // namespace quire
