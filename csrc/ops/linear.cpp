#include "activation.h"
#include "adapter_reader.h"
#include "expansion.h"
#include "maxima.h"
#include "multiply.h"
#include "op.h"

namespace quire {
namespace {

constexpr int kStreamRows = 8;  // rows up to which a linear reads memory rather than computes
// Of a task whose rows have several adapters. Tiles of weights in groups have time to fetch a line at a time, and half a tile
// fetches as many as B of one adapter of rank 16 has for eight panels.
constexpr int kAdapterPanels = 3, kAdapterGroupPanels = 8;
// Panels of rows between a product and its activation, at the most: those of a task of 32 rows with several adapters.
constexpr int kSums = 2 * 32 * kAdapterGroupPanels;
static_assert(kPanel % kMaximaCols == 0);

struct Linear final : Op, FetchesAhead {
  Linear(Fields& f, Context& c)
      : Op(c), x(f.buffer("x")), weight(f.weight("weight")), bias(f.optional_vector("bias")), out(f.buffer("out")),
        first(f.integer("first")), count(f.integer("rows")), maxima(f, out, kernels()), expansion(f, c),
        own(f.optional_own("own")), multiply(linear_kernel(kernels(), weight)), act(Activation::optional(f)),
        halves(f.flag("up") ? 2 : 1) {
    f.require(count >= 0 && count <= weight.rows && (!count || (!act && !bias)),
              "the rows that are computed must be some of a weight without a bias");
    if (!count) count = weight.rows;
    if (!act) halves = 1;
    panels = ceil_div(count, kPanel) / halves;
    panel_bytes = weight.panel_bytes();
    f.require(can_multiply(x, weight), "x must have the weight's type, width and groups");
    f.require(!bias || bias->rows == weight.rows, "bias must be a number for each row of the weight");
    const int cols = count / halves;
    f.require(first >= 0 && first <= out.cols - cols && (act || out.dtype == DType::f32),
              "out must have the columns that are filled");
    f.require(!act || (weight.rows % (halves * kPanel) == 0 && !first && out.cols == cols),
              "gate and up must be whole panels, and out as wide as one of them");
    f.require(!expansion || (expansion.rows_of(out) && first + count <= expansion.columns()),
              "an adapted linear must have the rows that were shrunk, and its columns");
    f.require(!own || (!act && out.per == 1 && own->shape.rows == weight.rows && can_multiply(x, own->shape)),
              "the weights of adapters must be of the weight's size and format");
    f.require(!maxima || (!act && !first && out.cols == count), "maxima are of a linear that fills its rows");
  }

  // Panels per task so that a task streams enough weight, and row chunks per panel range. With two halves panels are
  // pairs, of gate and of up.
  struct Split {
    int panels_per_task, panel_tasks, row_tasks;
    int tasks() const { return panel_tasks * row_tasks; }
  };
  Split split(int rows) const {
    Split s;
    s.panels_per_task = panels_of_task(panel_bytes * halves);
    s.row_tasks = ceil_div(rows, kLinearRows);
    // few rows over small panels wait for memory: long streams, but still four tasks a thread to even out; many rows
    // read the same inputs for every panel: some panels while the L2 cache holds them
    if (weight.groups.bits)
      s.panels_per_task = std::max(s.panels_per_task,
                                   rows <= kStreamRows ? panels / (4 * context_.threads)
                                                       : std::min(8, panels * s.row_tasks / (16 * context_.threads)));
    if (expansion.adapters() > 1)  // their columns are pieces from anywhere: long ones
      s.panels_per_task = std::max(s.panels_per_task,
                                   std::min(weight.groups.bits ? kAdapterGroupPanels : kAdapterPanels,
                                            panels / (4 * context_.threads)));
    s.panel_tasks = ceil_div(panels, s.panels_per_task);
    return s;
  }

  int tasks() const override { return split(context_.rows_of(out)).tasks(); }

  bool streams() const override { return true; }
  const char* first_weights(int thread) const override {
    const int rows = context_.rows_of(out);
    if (rows == 0) return nullptr;
    const Split s = split(rows);
    const int task = Tasks::first(s.tasks(), thread, context_.threads);
    return weight.data() + task / s.row_tasks * s.panels_per_task * panel_bytes;
  }

  void run(int task, int thread) override {
    const int rows = context_.rows_of(out);
    const Split s = split(rows);
    // Row chunks of one panel range are neighbours in the task order: the panel is still in the cache.
    const int panel_task = task / s.row_tasks, row_task = task % s.row_tasks;
    const int begin = even_cut(rows, row_task, s.row_tasks), end = even_cut(rows, row_task + 1, s.row_tasks);
    LinearTask t = linear_task(x, begin, end, weight);
    t.n = count;
    t.bias = bias ? bias->vector() : nullptr;
    t.panel_begin = panel_task * s.panels_per_task;
    t.panel_end = std::min(panels, t.panel_begin + s.panels_per_task);
    t.next = t.panel_end < panels ? weight.data() + t.panel_end * panel_bytes : nullptr;
    if (row_task + 1 < s.row_tasks)
      t.next = nullptr;  // the same panels again
    else if (task + 1 == Tasks::first(s.tasks(), thread + 1, context_.threads))
      t.next = next_stream ? next_stream->first_weights(thread) : nullptr;
    if (act) return run_activated(t, {task, s.tasks()}, begin);
    t.ldy = static_cast<size_t>(out.cols);
    t.y = out.f32_row(begin) + first;
    const Share share{task, s.tasks()};
    multiply_ahead(t, share, begin, first + t.panel_begin * kPanel, first + std::min(count, t.panel_end * kPanel));
    if (own) multiply_own(t, begin, end);
    const int from = t.panel_begin * kPanel, to = std::min(count, t.panel_end * kPanel);
    expansion.add(begin, end, t.y + from, t.ldy, first + from, first + to, t.bias ? t.bias - first : nullptr);
    maxima.leave(begin, t.rows, from, to);
  }

  // The product; meanwhile what adapters need for the rows from `row` on and these columns is on its way, and then a share
  // of what the next op needs of them.
  struct Share {
    int part, parts;
  };
  void multiply_ahead(LinearTask& t, Share share, int row, int from, int to) {
    if (!expansion.adapters()) return multiply(t);
    Ahead ahead;
    expansion.list(row, row + t.rows, from, to, &ahead);
    if (next_reader && weight.groups.bits && expansion.adapters() > 1)
      next_reader->list(share.part, share.parts, &ahead);
    t.ahead = &ahead;
    multiply(t);
    t.ahead = nullptr;
  }

  // The task's panels again for the rows among [begin, end) whose adapters have weights of their own.
  void multiply_own(const LinearTask& t, int begin, int end) {
    const AdapterPool& pool = context_.adapters;
    const AdapterRows& rows = pool.rows(out.logits);
    if (rows.groups.empty()) return;
    for (int row = begin; row < end;) {
      const int slot = rows.slots[row], from = row;
      while (row < end && rows.slots[row] == slot) ++row;
      if (slot < 0 || !pool.has_own(*own, slot)) continue;
      for (int panel = t.panel_begin, panels; panel < t.panel_end; panel += panels) {  // neighbours in memory
        const int column = panel * kPanel;
        LinearTask part = linear_task(x, from, row, pool.own(*own, slot, panel, &panels));
        panels = std::min(panels, t.panel_end - panel);
        part.n = std::min(part.n, count - column), part.bias = t.bias ? t.bias + column : nullptr, part.ldy = t.ldy;
        part.panel_begin = 0, part.panel_end = panels;
        part.y = out.f32_row(from) + first + column;
        multiply(part);
      }
    }
  }

  // Panels of gate and then those of up, as many as a piece of memory on the stack takes, which the L2 cache holds; and
  // what the activation makes of them, to rows from `row` on. `t` is the task for panels of gate.
  void run_activated(const LinearTask& t, Share share, int row) {
    alignas(64) float sums[kSums * kPanel];
    const int most = (expansion.adapters() > 1 ? kSums : 2 * kLinearRows) / (halves * t.rows), last = t.panel_end;
    const char *w = static_cast<const char*>(t.w), *after = static_cast<const char*>(t.next);
    const auto product = [&](int panel, int count, float* y, const void* next) {
      LinearTask part = t;
      const size_t column = static_cast<size_t>(panel) * kPanel, ldy = static_cast<size_t>(halves * count) * kPanel;
      part.w = w + panel * panel_bytes;
      if (t.bias) part.bias = t.bias + column;
      part.y = y, part.ldy = ldy;
      part.n = count * kPanel, part.panel_begin = 0, part.panel_end = count, part.next = next;
      const bool up = panel >= panels;
      multiply_ahead(part, {halves * share.part + up, halves * share.parts}, row, panel * kPanel,
                     (panel + count) * kPanel);
      expansion.add(row, row + t.rows, y, ldy, panel * kPanel, (panel + count) * kPanel, t.bias);
    };
    for (int begin = t.panel_begin; begin < last; begin += most) {
      const int count = std::min(most, last - begin), width = count * kPanel;
      const char* next = begin + count < last ? w + (begin + count) * panel_bytes : after;
      product(begin, count, sums, halves == 2 ? w + (panels + begin) * panel_bytes : next);
      if (halves == 2) product(panels + begin, count, sums + width, next);
      const size_t at = static_cast<size_t>(row) * out.cols + static_cast<size_t>(begin) * kPanel;
      kernels().gated_act(act->task(sums, out.data() + at * dtype_bytes(out.dtype), out.dtype, t.rows, width,
                                    static_cast<size_t>(out.cols), halves == 2));
    }
  }

  const Buffer& x;
  const Param& weight;
  const Param* bias;
  const Buffer& out;
  int first, count;  // count: rows of the weight that are computed
  Maxima maxima;
  Expansion expansion;
  const OwnParam* own;  // of adapters, in place of the weight
  LinearKernel multiply;
  std::optional<Activation> act;
  int halves;  // of the weight: with `act` and up it is [gate | up]
  int panels;  // of one of them
  size_t panel_bytes;
};

QUIRE_OP(Linear)

}  // namespace
}  // namespace quire
