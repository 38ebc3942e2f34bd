#include "expansion.h"
#include "multiply.h"
#include "op.h"

namespace quire {
namespace {

struct HeadLinear final : Op {
  HeadLinear(Fields& f, Context& c)
      : Op(c), x(f.buffer("x")), weight(f.weight("weight")), out(f.buffer("out")), heads(weight.matrices),
        expansion(f, c), multiply(linear_kernel(kernels(), weight)) {
    f.require(weight.layout == Param::Layout::panels && weight.dtype != DType::i8, "the weight must hold floats");
    f.require(x.dtype == input_of(weight.dtype) && x.cols == heads * weight.cols &&
                  out.cols == heads * weight.matrix_rows && out.dtype == DType::f32,
              "x and out must have the weight's type and widths");
    f.require(!expansion || (expansion.rows_of(out) && expansion.columns() == out.cols),
              "an adapted linear must have the rows that were shrunk, and its columns");
  }

  struct Split {
    int panels_per_task, panel_tasks, row_tasks;
  };
  Split split(int rows) const {
    const int panels = panels_of_task(weight.panel_bytes());
    return {panels, ceil_div(weight.matrix_panels(), panels), ceil_div(rows, kLinearRows)};
  }

  int tasks() const override {
    const Split s = split(context_.rows_of(out));
    return heads * s.panel_tasks * s.row_tasks;
  }
  void run(int task, int) override {
    const int rows = context_.rows_of(out);
    const Split s = split(rows);
    // Row chunks of one panel range are neighbours in the task order: the panel is still in the cache.
    const int row_task = task % s.row_tasks, panel_task = task / s.row_tasks % s.panel_tasks;
    const int head = task / s.row_tasks / s.panel_tasks;
    const int begin = even_cut(rows, row_task, s.row_tasks);
    LinearTask t = linear_task(x, begin, even_cut(rows, row_task + 1, s.row_tasks), weight, head);
    t.x = static_cast<const char*>(t.x) + static_cast<size_t>(head) * weight.cols * dtype_bytes(x.dtype);
    t.ldy = static_cast<size_t>(out.cols);
    const int column = head * weight.matrix_rows;
    t.y = out.f32_row(begin) + column;
    t.panel_begin = panel_task * s.panels_per_task;
    t.panel_end = std::min(weight.matrix_panels(), t.panel_begin + s.panels_per_task);
    multiply(t);
    const int from = t.panel_begin * kPanel, to = std::min(weight.matrix_rows, t.panel_end * kPanel);
    expansion.add(begin, begin + t.rows, t.y + from, t.ldy, column + from, column + to, nullptr);
  }

  const Buffer& x;
  const Param& weight;
  const Buffer& out;
  int heads;
  Expansion expansion;
  LinearKernel multiply;
};

QUIRE_OP(HeadLinear)

}  // namespace
}  // namespace quire
