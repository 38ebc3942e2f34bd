// Building an executor: parameters, packing, buffers and ops, in program order.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "executor.h"

namespace quire {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

int Executor::add_param(Param::Layout layout, int rows, int cols, DType dtype) {
  size_t elems = static_cast<size_t>(rows) * std::max(cols, 1);
  if (layout == Param::Layout::panels) {
    const size_t k = align_up(cols, 4 / dtype_bytes(dtype));
    elems = align_up(rows, kPanel) * k;
  }
  size_t bytes = align_up(elems * dtype_bytes(dtype), 64);
  if (dtype == DType::i8) bytes += align_up(rows, kPanel) * (sizeof(float) + sizeof(int32_t));
  params_.push_back({layout, rows, cols, dtype, weight_total_, bytes, {}});
  weight_total_ += bytes;
  return static_cast<int>(params_.size()) - 1;
}

int Executor::add_weight(int rows, int cols, DType dtype) {
  return add_param(Param::Layout::panels, rows, cols, dtype);
}
int Executor::add_groups(int rows, int cols, const GroupFormat& format) {
  if ((format.bits != 4 && format.bits != 8) || format.size < 16 || format.size > 128 || format.size % 16)
    throw std::invalid_argument("groups of 16, 32, 64 or 128 codes of 4 or 8 bits");
  if (format.rotated && (cols % format.size || (format.size & (format.size - 1))))
    throw std::invalid_argument("rotated groups are whole, and their size is a power of two");
  const size_t bytes = align_up(rows, kPanel) / kPanel * format.panel_bytes(cols);
  params_.push_back({Param::Layout::panels, rows, cols, DType::i8, weight_total_, bytes, format});
  weight_total_ += bytes;
  return static_cast<int>(params_.size()) - 1;
}
int Executor::add_table(int rows, int cols, DType dtype) { return add_param(Param::Layout::rows, rows, cols, dtype); }
int Executor::add_vector(int rows) { return add_param(Param::Layout::vector, rows, 0, DType::f32); }

void Executor::allocate_weights() { weights_.allocate(weight_total_); }

int64_t Executor::put(int index, int row_offset, const void* src, DType src_dtype, int rows, int cols) {
  const Param& p = params_.at(index);
  if (!weights_.data() || weights_.read_only()) throw std::logic_error("put without weights of our own");
  if (row_offset < 0 || rows < 0 || row_offset + rows > p.rows || cols != p.cols)
    throw std::invalid_argument("a part does not fit its parameter");
  char* base = param(index);
  if (p.dtype == DType::i8 && p.layout != Param::Layout::panels) throw std::invalid_argument("only linears are int8");
  const size_t width = static_cast<size_t>(std::max(cols, 1)), src_size = dtype_bytes(src_dtype);
  // each task looks at its rows just before it packs them: they come from memory once
  std::atomic<int64_t> bad{INT64_MAX};
  const auto check = [&](int begin, int end) {
    const int64_t first = begin * static_cast<int64_t>(width);
    const int64_t found = kernels_.first_nonfinite(static_cast<const char*>(src) + first * src_size, src_dtype, p.dtype,
                                                   (end - begin) * width);
    for (int64_t least = bad; found >= 0 && first + found < least;)
      if (bad.compare_exchange_weak(least, first + found)) break;
  };
  if (p.layout != Param::Layout::panels) {
    // rows and vectors keep their order; bf16 and f16 tables are rounded on the way
    const int chunk = static_cast<int>(std::max<size_t>(1, (1 << 18) / width));
    parallel(ceil_div(rows, chunk), [&](int t) {
      const int begin = t * chunk, end = std::min(rows, begin + chunk);
      check(begin, end);
      const char* from = static_cast<const char*>(src) + begin * width * src_size;
      char* to = base + (row_offset + begin) * width * dtype_bytes(p.dtype);
      const size_t n = (end - begin) * width;
      if (p.dtype == src_dtype) {
        std::memcpy(to, from, n * src_size);
      } else if (p.dtype == DType::f32) {
        kernels_.to_f32(from, src_dtype, reinterpret_cast<float*>(to), n);
      } else {
        (p.dtype == DType::f16 ? kernels_.to_f16 : kernels_.to_bf16)(from, src_dtype, reinterpret_cast<uint16_t*>(to), n);
      }
    });
    return bad == INT64_MAX ? -1 : bad.load();
  }
  pack_panels(row_offset, rows, [&](int begin, int end) {
    PackTask task;
    task.src = src;
    task.src_dtype = src_dtype;
    task.dst = base;
    task.rows = rows;
    task.k = cols;
    task.row_offset = row_offset;
    task.row_begin = begin;
    task.row_end = end;
    task.groups = p.groups;
    check(begin, end);
    if (p.groups.bits) {
      kernels_.pack_groups(task);
    } else if (p.dtype == DType::i8) {
      task.scale = scales(index);
      task.offset = offsets(index);
      kernels_.pack_i8(task);
    } else {
      (p.dtype == DType::f32 ? kernels_.pack_f32 : p.dtype == DType::f16 ? kernels_.pack_f16 : kernels_.pack_bf16)(task);
    }
  });
  return bad == INT64_MAX ? -1 : bad.load();
}

// f(first row, row after the last) of a part, for tasks of whole panels: two threads never write one cache line.
template <class F>
void Executor::pack_panels(int row_offset, int rows, F f) {
  const int first = row_offset / kPanel, last = ceil_div(row_offset + rows, kPanel);
  parallel(last - first, [&](int t) {
    f(std::max(0, (first + t) * kPanel - row_offset), std::min(rows, (first + t + 1) * kPanel - row_offset));
  });
}

void Executor::put_codes(int index, int row_offset, int rows, const PackCodesTask& arrays) {
  const Param& p = params_.at(index);
  if (!weights_.data() || weights_.read_only()) throw std::logic_error("put without weights of our own");
  if (!p.groups.bits || row_offset < 0 || rows < 0 || row_offset + rows > p.rows)
    throw std::invalid_argument("codes do not fit their parameter");
  pack_panels(row_offset, rows, [&](int begin, int end) {
    PackCodesTask task = arrays;
    task.dst = param(index);
    task.groups = p.groups;
    task.rows = rows;
    task.k = p.cols;
    task.row_offset = row_offset;
    task.row_begin = begin;
    task.row_end = end;
    kernels_.pack_codes(task);
  });
}

int Executor::add_rope(const float* cos, const float* sin, int max_len, int half, bool interleaved) {
  const size_t n = static_cast<size_t>(max_len) * half;
  ropes_.push_back({std::vector<float>(cos, cos + n), std::vector<float>(sin, sin + n), half, interleaved});
  return static_cast<int>(ropes_.size()) - 1;
}

float* Executor::scales(int index) const {
  const Param& p = params_[index];
  return reinterpret_cast<float*>(param(index) + align_up(p.rows, kPanel) * align_up(p.cols, 4));
}
int32_t* Executor::offsets(int index) const {
  return reinterpret_cast<int32_t*>(scales(index) + align_up(params_[index].rows, kPanel));
}
float* Executor::row_scales(int buffer) const {
  return reinterpret_cast<float*>(activations_.data() + buffers_[buffer].scale_offset);
}

int32_t* Executor::group_numbers(int buffer) const {
  const Buffer& b = buffers_[buffer];
  return reinterpret_cast<int32_t*>(row_scales(buffer)) + b.max_rows;
}

int Executor::add_buffer(int cols, DType dtype, size_t offset, size_t scale_offset, int group, bool rotated,
                         int max_rows, int per) {
  buffers_.push_back({cols, dtype, offset, scale_offset, group, rotated, max_rows, per});
  return static_cast<int>(buffers_.size()) - 1;
}

int Executor::add_kv_layer(int group, int kv_heads, int head_dim, size_t offset) {
  kv_layers_.push_back({group, kv_heads, head_dim, offset});
  return static_cast<int>(kv_layers_.size()) - 1;
}

void Executor::op_embed(int table, int out) {
  Op op{Kind::embed};
  op.weight = table, op.out = out;
  ops_.push_back(op);
}
void Executor::op_norm(int x, int delta, int weight, int bias, bool layer, float eps, int out) {
  Op op{Kind::norm};
  op.in = x, op.delta = delta, op.weight = weight, op.bias = bias, op.layer_norm = layer, op.eps = eps, op.out = out;
  ops_.push_back(op);
}
void Executor::op_add(int x, int delta, float scale) {
  Op op{Kind::add};
  op.in = x, op.delta = delta, op.scale = scale, op.out = x;
  ops_.push_back(op);
}
void Executor::op_scale(int x, float scale, float cap, int maxima) {
  Op op{Kind::scale};
  op.in = x, op.scale = scale, op.softcap = cap, op.out = x, op.maxima = maxima;
  check_maxima(op);
  ops_.push_back(op);
}
// Of a whole row in float32, by who writes it.
void Executor::check_maxima(const Op& op) const {
  if (op.maxima < 0) return;
  const Buffer &out = buffers_.at(op.out), &maxima = buffers_.at(op.maxima);
  if (out.dtype != DType::f32 || maxima.dtype != DType::f32 || maxima.cols != maxima_of(out.cols) || op.first)
    throw std::invalid_argument("maxima must be a column for each 64 of the float32 rows that they are of");
}
void Executor::op_linear(int x, int weight, int bias, int out, int first, int act, float alpha, float limit, int maxima) {
  const Buffer& in = buffers_.at(x);
  const Param& p = params_.at(weight);
  if (in.dtype != input_of(p.dtype) || in.cols != p.cols || in.group != p.groups.size ||
      in.rotated != p.groups.rotated)
    throw std::invalid_argument("a linear's input must have its weight's type, width and groups");
  const int cols = act < 0 ? p.rows : p.rows / 2;
  if (first < 0 || first > buffers_.at(out).cols - cols || (act < 0 && buffers_.at(out).dtype != DType::f32))
    throw std::invalid_argument("a linear's output must have the columns that it fills");
  if (act >= 0 && (p.rows % (2 * kPanel) || first || buffers_.at(out).cols != cols))
    throw std::invalid_argument("a gated linear's halves must be whole panels, and its output as wide as one");
  Op op{Kind::linear};
  op.in = x, op.weight = weight, op.bias = bias, op.out = out, op.first = first;
  op.act = act, op.alpha = alpha, op.limit = limit, op.maxima = maxima;
  if (maxima >= 0 && (act >= 0 || buffers_.at(out).cols != p.rows))
    throw std::invalid_argument("maxima are of a linear that fills its rows");
  check_maxima(op);
  ops_.push_back(op);
}
void Executor::op_rope_write(int qkv, int heads, int layer, int rope, int q_norm, int k_norm, bool layer_norm,
                             bool whole, float eps) {
  if (kv_layers_.at(layer).head_dim > 512) throw std::invalid_argument("head_dim above 512 is not supported");
  Op op{Kind::rope_write};
  op.in = qkv, op.heads = heads, op.layer = layer, op.rope = rope, op.weight = q_norm, op.bias = k_norm, op.eps = eps;
  op.layer_norm = layer_norm, op.whole = whole;
  ops_.push_back(op);
}
void Executor::op_attend(int qkv, int out, int heads, int layer, float scale, int window, float softcap, int sinks,
                         int wide) {
  const Buffer& to = buffers_.at(out);
  if ((to.dtype == DType::i8) != (wide >= 0) ||
      (wide >= 0 && (buffers_.at(wide).dtype != DType::f32 || buffers_.at(wide).cols != to.cols)))
    throw std::invalid_argument("attention needs float32 rows beside an int8 output, of its width");
  if (sinks >= 0 && params_.at(sinks).rows != heads) throw std::invalid_argument("one sink for each head");
  Op op{Kind::attend};
  op.in = qkv, op.out = out, op.heads = heads, op.layer = layer, op.scale = scale, op.window = window;
  op.softcap = softcap, op.weight = sinks, op.wide = wide;
  ops_.push_back(op);
}
void Executor::op_quantize(int x, int out) {
  if (buffers_.at(x).dtype != DType::f32 || buffers_.at(out).dtype != DType::i8 ||
      buffers_.at(x).cols != buffers_.at(out).cols)
    throw std::invalid_argument("quantize takes float32 to an int8 buffer of its width");
  Op op{Kind::quantize};
  op.in = x, op.out = out;
  ops_.push_back(op);
}
void Executor::op_gated_act(int gate_up, int out, int act, float alpha, float limit) {
  Op op{Kind::gated_act};
  op.in = gate_up, op.out = out, op.act = act, op.alpha = alpha, op.limit = limit;
  ops_.push_back(op);
}
void Executor::op_gather(int x, int delta, int out) {
  Op op{Kind::gather};
  op.in = x, op.delta = delta, op.out = out;
  ops_.push_back(op);
}
void Executor::begin_head() { head_begin_ = ops_.size(); }

}  // namespace quire
