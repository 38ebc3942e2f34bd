#include "executor.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "isa.h"

namespace quire {

namespace {

constexpr int kStreamRows = 8;      // rows up to which a linear layer reads memory rather than computes
constexpr int kSmallRows = 4;       // rows of a norm task
constexpr int kActColumns = 1024;   // columns of an activation task
constexpr size_t kTaskBytes = 64 << 10;  // weight bytes that make a linear task worth claiming

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int round16(int n) { return ceil_div(n, 16) * 16; }

}  // namespace

Executor::Executor(const std::string& isa, int threads)
    : kernels_(kernels_for(isa)), pool_owner_(new ThreadPool(threads)), pool_(*pool_owner_), tasks_(pool_.threads()) {}

void Executor::bind(const Limits& limits, const StepPointers& step, size_t arena_bytes, size_t block_bytes,
                    DType kv_dtype) {
  if (limits.block_size % kTile) throw std::invalid_argument("block_size must be a multiple of 16");
  limits_ = limits;
  step_ = step;
  block_bytes_ = block_bytes;
  kv_dtype_ = kv_dtype;
  activations_.allocate(arena_bytes);
  kv_.allocate(block_bytes * static_cast<size_t>(limits.num_blocks));
  kv_pages_ = ThreadOwner<PageWarmer>(new PageWarmer(kv_.data(), kv_.bytes()));
  bind_attention();
  bind_rounding();
  bind_experts();
  pieces_.reserve(limits.max_tokens);
  for (int i = static_cast<int>(ops_.size()) - 1, next = -1; i >= 0; --i) {
    ops_[i].next_linear = next;
    if (ops_[i].kind == Kind::linear) next = i;
  }
}

void Executor::bind_attention() {
  std::vector<AttendShape> shapes;
  for (Op& op : ops_) {
    if (op.kind != Kind::attend && op.kind != Kind::latent_attend) continue;
    const KVLayer& layer = kv_layers_[op.layer];
    const int rank = op.kind == Kind::latent_attend ? buffers_[op.out].cols / op.heads : 0;
    const AttendShape shape{layer.head_dim, op.heads, layer.kv_heads, op.window, rank};
    const auto same = [&](const AttendShape& s) {
      return s.head_dim == shape.head_dim && s.heads == shape.heads && s.kv_heads == shape.kv_heads &&
             s.window == shape.window && s.rank == shape.rank;
    };
    op.plan = static_cast<int>(std::find_if(shapes.begin(), shapes.end(), same) - shapes.begin());
    if (op.plan == static_cast<int>(shapes.size())) shapes.push_back(shape);
  }
  attention_memory_ = attention_memory(shapes, pool_.threads(), limits_.max_len);
  scratch_.allocate(attention_memory_.total);
  attention_.reserve(shapes.size());
  for (const AttendShape& shape : shapes)
    attention_.emplace_back(shape, pool_.threads(), limits_.max_tokens, attention_memory_.states / sizeof(float));
}

// Rows that are rounded to int8 as they are written: of norms and activations in a thread's own memory, of attention by
// whoever does the last heads of a token.
void Executor::bind_rounding() {
  for (const Op& op : ops_) {
    if (!rounds(op)) continue;
    if (op.kind == Kind::norm || op.kind == Kind::gated_act)
      rounded_row_bytes_ = std::max(rounded_row_bytes_, align_up(buffers_[op.out].cols * sizeof(float), 64));
    if (op.kind == Kind::attend && !heads_done_)
      heads_done_ = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(limits_.max_tokens));
  }
  rounded_rows_.allocate(rounded_row_bytes_ * pool_.threads());
}

std::vector<std::tuple<std::string, uintptr_t, size_t>> Executor::arenas() const {
  std::vector<std::tuple<std::string, uintptr_t, size_t>> found;
  const auto add = [&found](const char* name, const Arena& arena) {
    if (arena.bytes()) found.emplace_back(name, reinterpret_cast<uintptr_t>(arena.data()), arena.bytes());
  };
  add("weights", weights_);
  add("kv", kv_);
  for (const Arena* part : {&activations_, &scratch_, &expert_memory_, &rounded_rows_}) add("activations", *part);
  return found;
}

size_t Executor::table_bytes() const {
  size_t n = 0;
  for (const Rope& r : ropes_) n += (r.cos.size() + r.sin.size()) * sizeof(float);
  return n;
}

KVLayout Executor::kv_layout(const KVLayer& layer) const {
  KVLayout kv;
  kv.dtype = kv_dtype_;
  kv.kv_heads = layer.kv_heads;
  kv.head_dim = layer.head_dim;
  kv.d16 = round16(layer.head_dim);
  kv.block_size = limits_.block_size;
  kv.tiles_per_block = limits_.block_size / kTile;
  kv.tile_stride = kv.scale_offset() + (kv_dtype_ == DType::i8 ? kScaleBytes : 0);
  kv.block_stride = block_bytes_ / dtype_bytes(kv_dtype_);
  return kv;
}



void Executor::set_step(int tokens, int rows, int logit_rows) {
  if (tokens < 0 || tokens > limits_.max_tokens || rows < 0 || rows > limits_.max_rows || logit_rows < 0 ||
      logit_rows > limits_.max_logit_rows)
    throw std::invalid_argument("a step beyond the limits it was bound with");
  tokens_ = tokens, rows_ = rows, logit_rows_ = logit_rows;
  plan_attention(rows);
}

void Executor::run(int tokens, int rows, int logit_rows) {
  set_step(tokens, rows, logit_rows);
  run_ops(0, logit_rows ? ops_.size() : head_begin_);
}

void Executor::run_range(int tokens, int rows, int logit_rows, int begin, int end) {
  if (begin < 0 || begin > end || end > static_cast<int>(ops_.size()))
    throw std::invalid_argument("a range beyond the program's ops");
  set_step(tokens, rows, logit_rows);
  run_ops(begin, end);
}

void Executor::run_head(int logit_rows) {
  if (logit_rows < 0 || logit_rows > limits_.max_logit_rows)
    throw std::invalid_argument("more logit rows than the limit");
  logit_rows_ = logit_rows;
  run_ops(head_begin_, ops_.size());
}

void Executor::fill_cache(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (kv_dtype_ == DType::f16) {
    uint16_t half;
    kernels_.to_f16(&value, DType::f32, &half, 1);
    bits = half * 0x10001u;
  } else if (kv_dtype_ != DType::f32) {
    bits = (bits >> 16) * 0x10001u;
  }
  uint32_t* words = reinterpret_cast<uint32_t*>(kv_.data());
  std::fill(words, words + block_bytes_ * limits_.num_blocks / 4, bits);
}

// What the ops of a step share: pieces of tiles, parts of attention.
void Executor::plan_attention(int rows) {
  pieces_.clear();
  for (int b = 0; b < rows; ++b)
    for (int t = step_.query_start[b], end = step_.query_start[b + 1]; t < end; t = pieces_.back().end)
      pieces_.push_back({b, t, std::min(end, t + kTile - step_.positions[t] % kTile)});
  for (AttentionPlan& plan : attention_) plan.plan(rows, step_.query_start, step_.positions);
  int highest = -1;  // block that the step writes
  for (const TilePiece& piece : pieces_)
    for (const int32_t* table : step_.block_tables)
      highest = std::max(highest, table[static_cast<size_t>(step_.slots[piece.row]) * limits_.blocks_per_row() +
                                        step_.positions[piece.begin] / limits_.block_size]);
  kv_pages_->used(block_bytes_ * static_cast<size_t>(highest + 1));
}

void Executor::run_ops(size_t begin, size_t end) {
  if (stop_after_ >= 0) end = std::min(end, static_cast<size_t>(stop_after_) + 1);
  if (begin >= end) return;
  tasks_.deal(tasks_of(ops_[begin]));
  auto job = [&](int thread) { step(begin, end, thread); };
  kv_pages_->begin();
  on_all(pool_, job);
  kv_pages_->end();
}

void Executor::step(size_t begin, size_t end, int thread) {
  Stopwatch watch(profile_.get(), thread);
  for (size_t i = begin; i < end; ++i) {
    const Op& op = ops_[i];
    for (int t = tasks_.claim(thread); t >= 0; t = tasks_.claim(thread)) do_task(op, t, thread);
    watch.worked(i);
    if (i + 1 < end) pool_.barrier(thread, [&] { tasks_.deal(tasks_of(ops_[i + 1])); });
    watch.met(i);
  }
}

Executor::LinearSplit Executor::split(const Op& op, int rows) const {
  const Param& p = params_[op.weight];
  const int threads = pool_.threads(), together = op.act < 0 ? 1 : 2;
  LinearSplit s;
  s.panels = ceil_div(p.rows, kPanel) / together;
  const size_t size = dtype_bytes(p.dtype);
  s.panel_bytes =
      p.groups.bits ? p.groups.panel_bytes(p.cols) : align_up(static_cast<size_t>(p.cols), 4 / size) * kPanel * size;
  s.panels_per_task =
      static_cast<int>(std::max<size_t>(1, kTaskBytes / std::max<size_t>(1, s.panel_bytes * together)));
  s.row_tasks = ceil_div(rows, kLinearRows);
  // few rows over small panels wait for memory: long streams, but still four tasks a thread to even out; many rows read
  // the same inputs for every panel: some panels while the L2 cache holds them
  if (p.groups.bits)
    s.panels_per_task = std::max(s.panels_per_task, rows <= kStreamRows ? s.panels / (4 * threads)
                                                    : std::min(8, s.panels * s.row_tasks / (16 * threads)));
  s.panel_tasks = ceil_div(s.panels, s.panels_per_task);
  return s;
}

// Rows of a task of an op by rows: a few, but all threads get some.
int Executor::rows_of_task(int rows) const {
  return std::clamp(ceil_div(rows, 2 * pool_.threads()), 1, kSmallRows);
}

int Executor::rows_of(const Op& op) const {
  const bool head = &op - ops_.data() >= static_cast<std::ptrdiff_t>(head_begin_);
  return row_count(head) * (op.out < 0 ? 1 : buffers_[op.out].per);
}

int Executor::tasks_of(const Op& op) const {
  const int rows = rows_of(op);
  switch (op.kind) {
    case Kind::linear: return split(op, rows).tasks();
    case Kind::rope_write: return static_cast<int>(pieces_.size()) * rope_ranges(op);
    case Kind::attend:
    case Kind::latent_attend: return static_cast<int>(attention_[op.plan].parts().size());
    case Kind::head_linear: {
      const HeadSplit s = split_heads(op);
      return op.heads * s.panel_tasks * s.row_tasks;
    }
    case Kind::latent_write: return static_cast<int>(pieces_.size());
    case Kind::gated_act:
      if (rounds(op)) return ceil_div(rows, rows_of_task(rows));
      [[fallthrough]];
    case Kind::scale: return rows * ceil_div(buffers_[op.out].cols, kActColumns);
    case Kind::route:
    case Kind::dispatch:
    case Kind::experts:
    case Kind::combine: return expert_tasks(op);
    default: return ceil_div(rows, rows_of_task(rows));
  }
}

void Executor::do_task(const Op& op, int task, int thread) {
  const int rows = rows_of(op), height = rows_of_task(rows);
  const int begin = task * height, end = std::min(rows, begin + height);
  switch (op.kind) {
    case Kind::embed: {
      const Param& p = params_[op.weight];
      const bool row_scaled = p.dtype == DType::i8 && !p.groups.bits;
      const EmbedTask embed{param(op.weight), p.dtype, p.layout == Param::Layout::panels,
                            row_scaled ? scales(op.weight) : nullptr, step_.token_ids, f32(op.out), p.cols, begin, end,
                            p.groups};
      p.groups.bits ? kernels_.embed_groups(embed) : kernels_.embed(embed);
      return;
    }
    case Kind::norm: return do_norm(op, begin, end, thread);
    case Kind::add:
      kernels_.add({f32(op.in), f32(op.delta), op.scale, buffers_[op.in].cols, begin, end});
      return;
    case Kind::scale: {
      const int cols = buffers_[op.in].cols, chunks = ceil_div(cols, kActColumns);
      const int c = task % chunks * kActColumns;
      const int row = task / chunks, to = std::min(cols, c + kActColumns);
      kernels_.scale({f32(op.in) + static_cast<size_t>(row) * cols, op.scale, op.softcap, c, to});
      return leave_maxima(op, row, 1, c, to);
    }
    case Kind::quantize:
      for (int r = begin; r < end; ++r)
        quantize_row(op.out, r, f32(op.in) + static_cast<size_t>(r) * buffers_[op.in].cols);
      return;
    case Kind::gather:
      kernels_.gather({f32(op.in), op.delta < 0 ? nullptr : f32(op.delta), step_.logit_rows, f32(op.out),
                       buffers_[op.out].cols, begin, end});
      return;
    case Kind::gated_act: return do_gated_act(op, task, thread);
    case Kind::linear: return do_linear(op, task, thread);
    case Kind::rope_write: return do_rope_write(op, task);
    case Kind::attend:
    case Kind::latent_attend: return do_attend(op, task, thread);
    case Kind::head_linear: return do_head_linear(op, task);
    case Kind::latent_write: return do_latent_write(op, task);
    case Kind::route:
    case Kind::dispatch:
    case Kind::experts:
    case Kind::combine: return do_expert_task(op, task);
  }
}

// One row, as Quantize in program/ops.py defines it.
void Executor::quantize_row(int out, int row, const float* x) {
  const Buffer& b = buffers_[out];
  const size_t at = static_cast<size_t>(row);
  const QuantizeTask task{x, reinterpret_cast<uint8_t*>(buffer(out)) + at * b.pitch(), b.pitch(),
                          row_scales(out) + at, b.cols, 0, 1, b.group, b.rotated,
                          b.group ? group_numbers(out) + at * b.groups() * 2 : nullptr};
  b.group ? kernels_.quantize_groups(task) : kernels_.quantize(task);
}

void Executor::do_norm(const Op& op, int begin, int end, int thread) {
  const Buffer& out = buffers_[op.out];
  NormTask t{f32(op.in), op.delta < 0 ? nullptr : f32(op.delta), vector(op.weight), vector(op.bias), op.layer_norm,
             buffer(op.out), out.dtype, op.eps, out.cols, begin, end};
  if (!rounds(op)) return kernels_.norm(t);
  float* row = reinterpret_cast<float*>(rounded_rows_.data() + rounded_row_bytes_ * thread);
  t.out = row, t.out_dtype = DType::f32, t.row_begin = 0, t.row_end = 1;
  const size_t cols = static_cast<size_t>(out.cols);
  t.x += begin * cols;
  if (t.delta) t.delta += begin * cols;
  for (int r = begin; r < end; ++r) {
    kernels_.norm(t);
    quantize_row(op.out, r, row);
    t.x += cols;
    if (t.delta) t.delta += cols;
  }
}

void Executor::do_gated_act(const Op& op, int task, int thread) {
  const Buffer& out = buffers_[op.out];
  GatedActTask t{f32(op.in), buffer(op.out), out.dtype, op.act, out.cols, 0, 1, 0, out.cols,
                 static_cast<size_t>(out.cols), op.alpha, op.limit};
  if (!rounds(op)) {
    const int chunks = ceil_div(out.cols, kActColumns);
    t.row_begin = task / chunks, t.row_end = t.row_begin + 1;
    t.col_begin = task % chunks * kActColumns, t.col_end = std::min(out.cols, t.col_begin + kActColumns);
    return kernels_.gated_act(t);
  }
  const int rows = rows_of(op), height = rows_of_task(rows), end = std::min(rows, (task + 1) * height);
  float* row = reinterpret_cast<float*>(rounded_rows_.data() + rounded_row_bytes_ * thread);
  t.out = row, t.out_dtype = DType::f32;
  for (int r = task * height; r < end; ++r) {
    t.gate_up = f32(op.in) + static_cast<size_t>(r) * 2 * out.cols;
    kernels_.gated_act(t);
    quantize_row(op.out, r, row);
  }
}

void Executor::do_linear(const Op& op, int task, int thread) {
  const bool head = &op - ops_.data() >= static_cast<std::ptrdiff_t>(head_begin_);
  const int rows = row_count(head);
  const Param& p = params_[op.weight];
  const LinearSplit s = split(op, rows);
  // Row chunks of one panel range are neighbours in the task order: the panel is still in the cache.
  const int panel_task = task / s.row_tasks, row_task = task % s.row_tasks;
  const int begin = static_cast<int>(static_cast<int64_t>(rows) * row_task / s.row_tasks);
  const int end = static_cast<int>(static_cast<int64_t>(rows) * (row_task + 1) / s.row_tasks);
  LinearTask t;
  const bool int8 = p.dtype == DType::i8 && !p.groups.bits;
  const Buffer& in = buffers_[op.in];
  t.ldx = in.pitch();
  t.x_scale = in.dtype == DType::i8 ? row_scales(op.in) + begin : nullptr;
  t.x_groups = in.group ? group_numbers(op.in) + static_cast<size_t>(begin) * in.groups() * 2 : nullptr;
  t.groups = p.groups;
  t.w_scale = int8 ? scales(op.weight) : nullptr;
  t.w_offset = int8 ? offsets(op.weight) : nullptr;
  t.x = buffer(op.in) + begin * t.ldx * dtype_bytes(in.dtype);
  t.w = param(op.weight);
  t.bias = vector(op.bias);
  t.ldy = static_cast<size_t>(buffers_[op.out].cols);
  t.y = op.act < 0 ? f32(op.out) + begin * t.ldy + op.first : nullptr;
  t.rows = end - begin;
  t.k = p.cols;
  t.n = p.rows;
  t.panel_begin = panel_task * s.panels_per_task;
  t.panel_end = std::min(s.panels, t.panel_begin + s.panels_per_task);
  t.next = t.panel_end < s.panels ? param(op.weight) + t.panel_end * s.panel_bytes : nullptr;
  if (row_task + 1 < s.row_tasks)
    t.next = nullptr;  // the same panels again
  else if (task + 1 == Tasks::first(s.tasks(), thread + 1, pool_.threads()))
    t.next = first_panel(op.next_linear, thread);
  op.act < 0 ? multiply(p, t) : do_gated_linear(op, t, begin, s.panels, s.panel_bytes);
  leave_maxima(op, begin, t.rows, t.panel_begin * kPanel, std::min(p.rows, t.panel_end * kPanel));
}

// Of columns [begin, end) of rows that an op has just written, while the cache holds them.
void Executor::leave_maxima(const Op& op, int row, int rows, int begin, int end) const {
  static_assert(kPanel % kMaximaCols == 0 && kActColumns % kMaximaCols == 0);
  if (op.maxima < 0) return;
  const size_t pitch = static_cast<size_t>(buffers_[op.out].cols), count = static_cast<size_t>(buffers_[op.maxima].cols);
  kernels_.sampling->maxima({f32(op.out) + row * pitch + begin, pitch, f32(op.maxima) + row * count + begin / kMaximaCols,
                             count, rows, end - begin});
}

// Panels of gate and then those of up, as many as a piece of memory on the stack takes, which the L2 cache holds; and
// what the activation makes of them, to rows from `row` on. `t` is the task for panels of gate; there are `half` of them.
void Executor::do_gated_linear(const Op& op, LinearTask t, int row, int half, size_t panel_bytes) {
  const Param& p = params_[op.weight];
  const Buffer& out = buffers_[op.out];
  alignas(64) float sums[kLinearRows * 2 * kPanel];
  const int most = kLinearRows / t.rows, last = t.panel_end;
  const char* after = static_cast<const char*>(t.next);
  const auto product = [&](int panel, int count, float* y, const void* next) {
    LinearTask part = t;
    const size_t column = static_cast<size_t>(panel) * kPanel;
    part.w = static_cast<const char*>(t.w) + panel * panel_bytes;
    if (t.bias) part.bias = t.bias + column;
    if (t.w_scale) part.w_scale = t.w_scale + column, part.w_offset = t.w_offset + column;
    part.y = y, part.ldy = static_cast<size_t>(2 * count) * kPanel;
    part.n = count * kPanel, part.panel_begin = 0, part.panel_end = count, part.next = next;
    multiply(p, part);
  };
  for (int begin = t.panel_begin; begin < last; begin += most) {
    const int count = std::min(most, last - begin), width = count * kPanel;
    const char* w = static_cast<const char*>(t.w);
    product(begin, count, sums, w + (half + begin) * panel_bytes);
    product(half + begin, count, sums + width, begin + count < last ? w + (begin + count) * panel_bytes : after);
    const size_t at = static_cast<size_t>(row) * out.cols + static_cast<size_t>(begin) * kPanel;
    kernels_.gated_act({sums, buffer(op.out) + at * dtype_bytes(out.dtype), out.dtype, op.act, width, 0, t.rows, 0, width,
                        static_cast<size_t>(out.cols), op.alpha, op.limit});
  }
}

void Executor::multiply(const Param& p, const LinearTask& t) {
  if (p.groups.bits)
    kernels_.linear_groups(t);
  else
    (p.dtype == DType::i8    ? kernels_.linear_i8
     : p.dtype == DType::f32 ? kernels_.linear_f32
     : p.dtype == DType::f16 ? kernels_.linear_f16
                             : kernels_.linear_bf16)(t);
}

// Where a thread begins to read a linear's weights; null for -1 and for a head without rows.
const char* Executor::first_panel(int linear, int thread) const {
  if (linear < 0) return nullptr;
  const Op& op = ops_[linear];
  const int rows = row_count(linear >= static_cast<int>(head_begin_));
  if (rows == 0) return nullptr;
  const LinearSplit s = split(op, rows);
  const int task = Tasks::first(s.tasks(), thread, pool_.threads());
  return param(op.weight) + task / s.row_tasks * s.panels_per_task * s.panel_bytes;
}

HeadNorm Executor::head_norm(int index, int heads, int head_dim) const {
  const bool each = index >= 0 && heads > 1 && params_[index].rows == heads * head_dim;
  return {vector(index), each ? static_cast<size_t>(head_dim) : 0};
}

// Ranges of heads that a piece's rotation is cut into: enough tasks for all threads.
int Executor::rope_ranges(const Op& op) const {
  const int pieces = static_cast<int>(pieces_.size());
  if (op.whole || pieces >= pool_.threads()) return 1;
  return std::min(kv_layers_[op.layer].kv_heads, ceil_div(pool_.threads(), std::max(1, pieces)));
}

void Executor::do_rope_write(const Op& op, int task) {
  const KVLayer& layer = kv_layers_[op.layer];
  static const Rope kNoRope{{}, {}, 0, false};
  const Rope& rope = op.rope < 0 ? kNoRope : ropes_[op.rope];
  RopeWriteTask t;
  t.qkv = f32(op.in);
  t.pitch = static_cast<size_t>(buffers_[op.in].cols);
  t.heads = op.heads;
  t.kv_heads = layer.kv_heads;
  t.head_dim = layer.head_dim;
  t.rotary_dim = rope.half * 2;
  t.q_norm = head_norm(op.weight, op.heads, layer.head_dim);
  t.k_norm = head_norm(op.bias, layer.kv_heads, layer.head_dim);
  t.layer_norm = op.layer_norm;
  t.whole_norm = op.whole;
  t.interleaved = rope.interleaved;
  t.eps = op.eps;
  t.cos = rope.cos.data();
  t.sin = rope.sin.data();
  t.positions = step_.positions;
  t.cache = kv_.data() + layer.offset;
  t.kv = kv_layout(layer);
  // Pieces of one range of heads are neighbours in the task order: threads stay away from each other's pages.
  const int pieces = static_cast<int>(pieces_.size()), range = task / pieces, ranges = rope_ranges(op);
  const TilePiece& piece = pieces_[task % pieces];
  t.block_table =
      step_.block_tables[layer.group] + step_.slots[piece.row] * static_cast<size_t>(limits_.blocks_per_row());
  t.token_begin = piece.begin;
  t.token_end = piece.end;
  t.head_begin = layer.kv_heads * range / ranges;
  t.head_end = layer.kv_heads * (range + 1) / ranges;
  kernels_.rope_write(t);
}

LatentTask Executor::attention_task(const Op& op, const AttendPart& part, int thread) {
  const KVLayer& layer = kv_layers_[op.layer];
  const int to = op.wide < 0 ? op.out : op.wide;
  const Buffer& out = buffers_[to];
  LatentTask latent{};
  AttendTask& t = latent.attend;
  t.qkv = f32(op.in);
  t.pitch = static_cast<size_t>(buffers_[op.in].cols);
  t.out = buffer(to);
  t.out_dtype = out.dtype;
  t.out_pitch = static_cast<size_t>(out.cols);
  t.heads_per_kv = op.heads / layer.kv_heads;
  t.head_begin = part.head_begin;
  t.head_end = part.head_end;
  t.scale = op.scale;
  t.softcap = op.softcap;
  t.sinks = vector(op.weight);
  t.window = op.window;
  t.positions = step_.positions;
  t.block_table =
      step_.block_tables[layer.group] + step_.slots[part.row] * static_cast<size_t>(limits_.blocks_per_row());
  t.cache = kv_.data() + layer.offset;
  t.kv = kv_layout(layer);
  t.token_begin = part.token_begin;
  t.token_end = part.token_end;
  t.partition_begin = part.partition_begin;
  t.partition_end = part.partition_end;
  t.states = nullptr;
  t.scratch = scratch_.data() + attention_memory_.per_thread * thread;
  if (op.kind == Kind::latent_attend) {
    latent.rank = attention_[op.plan].shape().rank;
    latent.q_pitch = static_cast<size_t>(buffers_[op.delta].cols);
    latent.q_head = buffers_[op.delta].cols / op.heads;
    latent.q_rope = f32(op.delta) + latent.q_head - (layer.head_dim - latent.rank);
  }
  return latent;
}

void Executor::do_attend(const Op& op, int task, int thread) {
  AttentionPlan& plan = attention_[op.plan];
  const AttendPart& part = plan.parts()[task];
  const bool is_latent = op.kind == Kind::latent_attend;
  LatentTask latent = attention_task(op, part, thread), after;
  AttendTask& t = latent.attend;
  if (!is_latent && task + 1 < static_cast<int>(plan.parts().size())) {
    after = attention_task(op, plan.parts()[task + 1], thread);
    t.next = &after.attend;
  }
  const auto attend = [&] { is_latent ? kernels_.latent_attend(latent) : kernels_.attend(t); };
  if (part.counter < 0) {
    attend();
    return attended(op, part);
  }
  float* all =
      reinterpret_cast<float*>(scratch_.data() + attention_memory_.per_thread * pool_.threads()) + part.states;
  t.states = all + plan.partition_states(part) * (part.partition_begin - part.whole_begin);
  attend();
  if (!plan.last_of_split(part)) return;
  t.states = all;
  t.partition_begin = part.whole_begin;
  t.partition_end = part.whole_end;
  is_latent ? kernels_.latent_merge(latent) : kernels_.attend_merge(t);
  attended(op, part);
}

// Rounds the rows whose last heads these are.
void Executor::attended(const Op& op, const AttendPart& part) {
  if (op.wide < 0) return;
  const size_t cols = static_cast<size_t>(buffers_[op.wide].cols);
  for (int i = part.token_begin; i < part.token_end; ++i) {
    const int done = heads_done_[i].fetch_add(part.heads(), std::memory_order_acq_rel) + part.heads();
    if (done < kv_layers_[op.layer].kv_heads) continue;
    heads_done_[i].store(0, std::memory_order_relaxed);  // for the next such op, which starts behind a barrier
    quantize_row(op.out, i, f32(op.wide) + i * cols);
  }
}

}  // namespace quire
