// Latent attention in the executor: linears by head, the cache write, and how their work is split.
#include <algorithm>
#include <stdexcept>

#include "executor.h"

namespace quire {

namespace {

constexpr size_t kTaskBytes = 64 << 10;  // weight bytes that make a task worth claiming

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

void Executor::op_head_linear(int x, int weight, int out, int heads) {
  const Buffer &in = buffers_.at(x), &to = buffers_.at(out);
  const Param& p = params_.at(weight);
  const int n = to.cols / heads;
  if (in.dtype != input_of(p.dtype) || p.groups.bits || in.cols != heads * p.cols || to.cols != heads * n ||
      p.rows != heads * static_cast<int>(align_up(n, kPanel)) || to.dtype != DType::f32)
    throw std::invalid_argument("a linear by head needs its weight's type and widths");
  Op op{Kind::head_linear};
  op.in = x, op.weight = weight, op.out = out, op.heads = heads;
  ops_.push_back(op);
}

void Executor::op_latent_write(int q, int kv, int q_nope, int heads, int layer, int rope, int norm, float eps) {
  const int nope = buffers_.at(q_nope).cols / heads, rotated = 2 * ropes_.at(rope).half;
  if (buffers_.at(q).cols != heads * (nope + rotated) || kv_layers_.at(layer).head_dim != buffers_.at(kv).cols ||
      params_.at(norm).rows + rotated != buffers_.at(kv).cols)
    throw std::invalid_argument("latent_write: widths do not fit together");
  Op op{Kind::latent_write};
  op.in = kv, op.delta = q, op.out = q_nope, op.heads = heads, op.layer = layer, op.rope = rope, op.weight = norm;
  op.eps = eps;
  ops_.push_back(op);
}

void Executor::op_latent_attend(int q_latent, int q, int out, int heads, int layer, float scale) {
  if (buffers_.at(q_latent).cols != buffers_.at(out).cols || buffers_.at(q).cols % heads ||
      buffers_.at(out).cols % heads || buffers_.at(out).cols / heads >= kv_layers_.at(layer).head_dim)
    throw std::invalid_argument("latent_attend: widths do not fit together");
  Op op{Kind::latent_attend};
  op.in = q_latent, op.delta = q, op.out = out, op.heads = heads, op.layer = layer, op.scale = scale;
  ops_.push_back(op);
}

Executor::HeadSplit Executor::split_heads(const Op& op) const {
  const Param& p = params_[op.weight];
  const size_t panel_bytes = static_cast<size_t>(p.cols) * kPanel * dtype_bytes(p.dtype);
  HeadSplit s;
  s.panels_per_task = static_cast<int>(std::max<size_t>(1, kTaskBytes / panel_bytes));
  s.panel_tasks = ceil_div(p.rows / kPanel / op.heads, s.panels_per_task);
  s.row_tasks = ceil_div(tokens_, kLinearRows);
  return s;
}

void Executor::do_head_linear(const Op& op, int task) {
  const Param& p = params_[op.weight];
  const HeadSplit s = split_heads(op);
  const int panels = p.rows / kPanel / op.heads, n = buffers_[op.out].cols / op.heads;
  // Row chunks of one panel range are neighbours in the task order: the panel is still in the cache.
  const int row_task = task % s.row_tasks, panel_task = task / s.row_tasks % s.panel_tasks;
  const int head = task / s.row_tasks / s.panel_tasks;
  const int begin = static_cast<int>(static_cast<int64_t>(tokens_) * row_task / s.row_tasks);
  const int end = static_cast<int>(static_cast<int64_t>(tokens_) * (row_task + 1) / s.row_tasks);
  LinearTask t{};
  t.ldx = static_cast<size_t>(buffers_[op.in].cols);
  t.ldy = static_cast<size_t>(buffers_[op.out].cols);
  t.x = buffer(op.in) + (begin * t.ldx + static_cast<size_t>(head) * p.cols) * dtype_bytes(input_of(p.dtype));
  t.y = f32(op.out) + begin * t.ldy + static_cast<size_t>(head) * n;
  const size_t k = align_up(p.cols, 4 / dtype_bytes(p.dtype));
  t.w = param(op.weight) + static_cast<size_t>(head) * panels * kPanel * k * dtype_bytes(p.dtype);
  t.rows = end - begin;
  t.k = p.cols;
  t.n = n;
  t.panel_begin = panel_task * s.panels_per_task;
  t.panel_end = std::min(panels, t.panel_begin + s.panels_per_task);
  multiply(p, t);
}

void Executor::do_latent_write(const Op& op, int task) {
  const KVLayer& layer = kv_layers_[op.layer];
  const Rope& rope = ropes_[op.rope];
  const TilePiece& piece = pieces_[task];
  LatentWriteTask t;
  t.q = f32(op.delta);
  t.kv_rows = f32(op.in);
  t.q_nope = buffer(op.out);
  t.nope_dtype = buffers_[op.out].dtype;
  t.norm = vector(op.weight);
  t.heads = op.heads;
  t.rope = rope.half * 2;
  t.rank = layer.head_dim - t.rope;
  t.nope = buffers_[op.out].cols / op.heads;
  t.interleaved = rope.interleaved;
  t.eps = op.eps;
  t.cos = rope.cos.data();
  t.sin = rope.sin.data();
  t.positions = step_.positions;
  t.block_table =
      step_.block_tables[layer.group] + step_.slots[piece.row] * static_cast<size_t>(limits_.blocks_per_row());
  t.cache = kv_.data() + layer.offset;
  t.kv = kv_layout(layer);
  t.token_begin = piece.begin;
  t.token_end = piece.end;
  kernels_.latent_write(t);
}

}  // namespace quire
