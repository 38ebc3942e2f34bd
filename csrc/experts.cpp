// Ops of a feed-forward of experts: routing, sorting rows by expert, products with each expert's weights, the sum.

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "executor.h"

namespace quire {

namespace {

constexpr int kRouteRows = 4;      // tokens of a routing or dispatch task
constexpr int kCombineColumns = 1024;
constexpr size_t kTaskBytes = 64 << 10;  // weight bytes that make a task worth claiming

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// ---- the plan of a step -------------------------------------------------------------------------------------------

size_t expert_plan_bytes(int experts, int pairs) {
  // an expert has one chunk more than whole ones
  const size_t chunks = static_cast<size_t>(std::min(experts, pairs)) + pairs / kLinearRows;
  return align_up(static_cast<size_t>(experts) * sizeof(int32_t), 64) + chunks * sizeof(ExpertChunk);
}

void ExpertPlan::place(void* memory, int experts) {
  next_ = static_cast<int32_t*>(memory);
  chunks_ = reinterpret_cast<ExpertChunk*>(static_cast<char*>(memory) +
                                           align_up(static_cast<size_t>(experts) * sizeof(int32_t), 64));
}

void ExpertPlan::sort(const int32_t* ids, int tokens, int top_k, int experts, int32_t* places) {
  const int pairs = tokens * top_k;
  std::fill(next_, next_ + experts, 0);
  for (int i = 0; i < pairs; ++i) ++next_[ids[i]];
  size_ = active_ = 0;
  int begin = 0;
  for (int e = 0; e < experts; ++e) {
    const int rows = next_[e], count = ceil_div(rows, kLinearRows), first = size_;
    for (int c = 0; c < count; ++c)
      chunks_[size_++] = {e, begin + static_cast<int>(static_cast<int64_t>(rows) * c / count),
                          begin + static_cast<int>(static_cast<int64_t>(rows) * (c + 1) / count), first, count};
    active_ += rows > 0;
    next_[e] = begin;
    begin += rows;
  }
  for (int i = 0; i < pairs; ++i) places[i] = next_[ids[i]]++;
}

// ---- building -----------------------------------------------------------------------------------------------------

void Executor::set_experts(int param, int experts, int rows) {
  Param& p = params_.at(param);
  if (experts < 1 || rows < 1 || p.rows % experts || (p.layout == Param::Layout::panels && p.rows / experts % kPanel))
    throw std::invalid_argument("an expert's weights are whole panels");
  p.experts = experts, p.matrix_rows = rows;
}

void Executor::op_route(int logits, int correction, int ids, int weights, int places, const Router& router) {
  const bool grouped = router.groups > 1;
  if (router.experts < 1 || router.experts > kMaxExperts || router.top_k < 1 || router.top_k > kMaxTopK ||
      router.top_k > router.experts || router.groups < 1 || router.groups > kMaxTopK ||
      router.experts % router.groups || router.top_groups < 1 || router.top_groups > router.groups ||
      (grouped && router.top_k > router.experts / router.groups * router.top_groups) ||
      (grouped && router.best_two && router.experts / router.groups < 2))
    throw std::invalid_argument("a router beyond the limits of its kernel");
  if (buffers_.at(logits).cols != router.experts || buffers_.at(ids).cols != router.top_k ||
      buffers_.at(weights).cols != router.top_k || buffers_.at(places).cols != router.top_k)
    throw std::invalid_argument("a router's buffers must have its widths");
  Op op{Kind::route};
  op.in = logits, op.weight = correction, op.out = ids;
  op.moe.weights = weights, op.moe.places = places, op.moe.router = router;
  ops_.push_back(op);
}

void Executor::op_dispatch(int x, int places, int out) {
  const Buffer &from = buffers_.at(x), &to = buffers_.at(out);
  if (from.cols != to.cols || from.dtype != to.dtype || from.group != to.group ||
      from.rotated != to.rotated || to.per != buffers_.at(places).cols)
    throw std::invalid_argument("dispatch copies rows of one format, one for each of a token's experts");
  Op op{Kind::dispatch};
  op.in = x, op.out = out, op.moe.places = places;
  ops_.push_back(op);
}

void Executor::op_experts(int x, int weight, int bias, int out) {
  const Buffer& in = buffers_.at(x);
  const Param& p = params_.at(weight);
  if (!p.experts || in.dtype != input_of(p.dtype) || in.cols != p.cols || in.group != p.groups.size ||
      in.rotated != p.groups.rotated || buffers_.at(out).cols != p.matrix_rows ||
      (bias >= 0 && params_.at(bias).rows != p.experts * p.matrix_rows))
    throw std::invalid_argument("experts' input must have their weights' type, width and groups");
  Op op{Kind::experts};
  op.in = x, op.weight = weight, op.bias = bias, op.out = out;
  ops_.push_back(op);
}

void Executor::op_combine(int x, int places, int weights, int shared, int gate, int out) {
  if (buffers_.at(x).per != buffers_.at(places).cols || buffers_.at(x).cols != buffers_.at(out).cols)
    throw std::invalid_argument("combine adds rows of its output's width");
  Op op{Kind::combine};
  op.in = x, op.delta = shared, op.bias = gate, op.out = out, op.moe.places = places, op.moe.weights = weights;
  ops_.push_back(op);
}

void Executor::bind_experts() {
  int experts = 0, top_k = 0;
  for (const Op& op : ops_) {
    experts = std::max(experts, op.moe.router.experts);
    top_k = std::max(top_k, op.moe.router.top_k);
  }
  if (!experts) return;
  expert_memory_.allocate(expert_plan_bytes(experts, limits_.max_tokens * top_k));
  expert_plan_.place(expert_memory_.data(), experts);
}

// ---- running ------------------------------------------------------------------------------------------------------

Executor::ExpertSplit Executor::split_experts(const Param& p) const {
  ExpertSplit s;
  s.panel_bytes = p.groups.bits
                      ? p.groups.panel_bytes(p.cols)
                      : align_up(p.cols, 4 / dtype_bytes(p.dtype)) * kPanel * dtype_bytes(p.dtype);
  s.panels = ceil_div(p.matrix_rows, kPanel);
  const int most = static_cast<int>(std::max<size_t>(1, kTaskBytes / s.panel_bytes));
  // long streams of weights, but still eight tasks a thread to even out
  const int even = s.panels * expert_plan_.experts() / (8 * pool_.threads());
  s.panels_per_task = std::min(s.panels, std::max(most, even));
  s.panel_tasks = ceil_div(s.panels, s.panels_per_task);
  return s;
}

int Executor::expert_tasks(const Op& op) const {
  switch (op.kind) {
    case Kind::experts: return tokens_ ? expert_plan_.size() * split_experts(params_[op.weight]).panel_tasks : 0;
    case Kind::combine: return tokens_ * ceil_div(buffers_[op.out].cols, kCombineColumns);
    default: return ceil_div(tokens_, kRouteRows);
  }
}

void Executor::do_expert_task(const Op& op, int task) {
  switch (op.kind) {
    case Kind::route: return do_route(op, task);
    case Kind::dispatch: return do_dispatch(op, task);
    case Kind::experts: return do_experts(op, task);
    default: return do_combine(op, task);
  }
}

void Executor::do_route(const Op& op, int task) {
  const int begin = task * kRouteRows, end = std::min(tokens_, begin + kRouteRows);
  int32_t* ids = i32(op.out);
  kernels_.route({f32(op.in), vector(op.weight), ids, f32(op.moe.weights), op.moe.router, begin, end});
  // whoever routes the last tokens sorts all of them, before anyone leaves the op
  if (routed_.fetch_add(1, std::memory_order_acq_rel) + 1 < expert_tasks(op)) return;
  routed_.store(0, std::memory_order_relaxed);  // for the next such op, which starts behind a barrier
  expert_plan_.sort(ids, tokens_, op.moe.router.top_k, op.moe.router.experts, i32(op.moe.places));
}

void Executor::do_dispatch(const Op& op, int task) {
  const Buffer &in = buffers_[op.in], &out = buffers_[op.out];
  const size_t bytes = in.pitch() * dtype_bytes(in.dtype), groups = static_cast<size_t>(in.groups()) * 2;
  const int k = out.per, end = std::min(tokens_, (task + 1) * kRouteRows);
  const int32_t* places = i32(op.moe.places);
  for (int i = task * kRouteRows * k; i < end * k; ++i) {
    const size_t from = static_cast<size_t>(i / k), to = static_cast<size_t>(places[i]);
    std::memcpy(buffer(op.out) + to * bytes, buffer(op.in) + from * bytes, bytes);
    if (in.dtype != DType::i8) continue;
    row_scales(op.out)[to] = row_scales(op.in)[from];
    if (in.group)
      std::memcpy(group_numbers(op.out) + to * groups, group_numbers(op.in) + from * groups, groups * sizeof(int32_t));
  }
}

void Executor::do_experts(const Op& op, int task) {
  const Param& p = params_[op.weight];
  const ExpertSplit s = split_experts(p);
  // Row chunks of one panel range of an expert are neighbours in the task order: the panel is still in the cache.
  const int first = expert_plan_[task / s.panel_tasks].first, count = expert_plan_[first].count;
  const int inside = task - first * s.panel_tasks;
  const ExpertChunk& chunk = expert_plan_[first + inside % count];
  const Buffer& in = buffers_[op.in];
  const bool int8 = p.dtype == DType::i8 && !p.groups.bits;
  const size_t begin = static_cast<size_t>(chunk.begin), expert = static_cast<size_t>(chunk.expert);
  const size_t rows64 = expert * s.panels * kPanel;
  LinearTask t;
  t.ldx = in.pitch();
  t.x = buffer(op.in) + begin * t.ldx * dtype_bytes(in.dtype);
  t.x_scale = in.dtype == DType::i8 ? row_scales(op.in) + begin : nullptr;
  t.x_groups = in.group ? group_numbers(op.in) + begin * in.groups() * 2 : nullptr;
  t.groups = p.groups;
  t.w = param(op.weight) + expert * s.panels * s.panel_bytes;
  t.w_scale = int8 ? scales(op.weight) + rows64 : nullptr;
  t.w_offset = int8 ? offsets(op.weight) + rows64 : nullptr;
  t.bias = op.bias < 0 ? nullptr : vector(op.bias) + expert * p.matrix_rows;
  t.ldy = static_cast<size_t>(p.matrix_rows);
  t.y = f32(op.out) + begin * t.ldy;
  t.rows = chunk.end - chunk.begin;
  t.k = p.cols;
  t.n = p.matrix_rows;
  t.panel_begin = inside / count * s.panels_per_task;
  t.panel_end = std::min(s.panels, t.panel_begin + s.panels_per_task);
  multiply(p, t);
}

void Executor::do_combine(const Op& op, int task) {
  const int cols = buffers_[op.out].cols, chunks = ceil_div(cols, kCombineColumns), k = buffers_[op.in].per;
  const size_t token = static_cast<size_t>(task / chunks);
  const int c = task % chunks * kCombineColumns;
  kernels_.combine({f32(op.in), i32(op.moe.places) + token * k, f32(op.moe.weights) + token * k, k,
                    op.delta < 0 ? nullptr : f32(op.delta) + token * cols,
                    op.bias < 0 ? nullptr : f32(op.bias) + token, f32(op.out) + token * cols, cols, c,
                    std::min(cols, c + kCombineColumns)});
}

}  // namespace quire
