#include "multiply.h"
#include "op.h"

namespace quire {
namespace {

struct HeadLinear final : Op {
  HeadLinear(Fields& f, Context& c)
      : Op(c), x(f.buffer("x")), weight(f.weight("weight")), out(f.buffer("out")), heads(weight.matrices),
        multiply(linear_kernel(kernels(), weight)) {
    f.require(weight.layout == Param::Layout::panels && weight.dtype != DType::i8, "the weight must hold floats");
    f.require(x.dtype == input_of(weight.dtype) && x.cols == heads * weight.cols &&
                  out.cols == heads * weight.matrix_rows && out.dtype == DType::f32,
              "x and out must have the weight's type and widths");
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
    t.y = out.f32_row(begin) + static_cast<size_t>(head) * weight.matrix_rows;
    t.panel_begin = panel_task * s.panels_per_task;
    t.panel_end = std::min(weight.matrix_panels(), t.panel_begin + s.panels_per_task);
    multiply(t);
  }

  const Buffer& x;
  const Param& weight;
  const Buffer& out;
  int heads;
  LinearKernel multiply;
};

QUIRE_OP(HeadLinear)

}  // namespace
}  // namespace quire
