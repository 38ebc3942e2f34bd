#include "weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <stdexcept>

namespace quire {

namespace {

int padded_rows(int matrices, int rows) {
  return matrices == 1 ? rows : matrices * static_cast<int>(align_up(rows, kPanel));
}

}  // namespace

Param Param::panels(int matrices, int rows, int cols, DType dtype) {
  if (dtype == DType::i8) throw std::invalid_argument("int8 weights are in groups");
  if (dtype == DType::bf16_24 && cols % 4) throw std::invalid_argument("2:4 weights have fours of inputs");
  return {Layout::panels, padded_rows(matrices, rows), cols, dtype, {}, matrices, rows};
}

Param Param::grouped(int matrices, int rows, int cols, const GroupFormat& format) {
  const bool known = std::find(std::begin(kGroupSizes), std::end(kGroupSizes), format.size) != std::end(kGroupSizes);
  const bool bits = format.bits == 2 || (format.bits == 3 && format.size > 16) || format.bits == 4 || format.bits == 8;
  if (!bits || !known)
    throw std::invalid_argument("groups hold 16, 32, 64 or 128 codes of 2, 4 or 8 bits, or 32, 64 or 128 of 3");
  if (format.rotated && cols % format.size) throw std::invalid_argument("rotated groups are whole");
  return {Layout::panels, padded_rows(matrices, rows), cols, DType::i8, format, matrices, rows};
}

Param Param::table(int rows, int cols, DType dtype) {
  if (dtype == DType::i8 || dtype == DType::bf16_24) throw std::invalid_argument("a table holds floats");
  return {Layout::rows, rows, cols, dtype, {}, 1, rows};
}

Param Param::vectors(int matrices, int rows) {
  return {Layout::vector, matrices * rows, 0, DType::f32, {}, matrices, rows};
}

size_t Param::bytes() const {
  if (layout == Layout::panels) return align_up(rows, kPanel) / kPanel * panel_bytes();
  return align_up(static_cast<size_t>(rows) * std::max(cols, 1) * dtype_bytes(dtype), kAlignment);
}

// Rows and vectors keep their order; bf16 and f16 tables are rounded on the way.
void put_float_rows(const Kernels& kernels, const Param& p, int row_offset, const void* src, DType src_dtype, int begin,
                    int end, int rows) {
  if (p.layout == Param::Layout::panels) {
    const auto pack = p.groups.bits               ? kernels.pack_groups
                      : p.dtype == DType::f32     ? kernels.pack_f32
                      : p.dtype == DType::f16     ? kernels.pack_f16
                      : p.dtype == DType::bf16_24 ? kernels.pack_bf16_24
                                                  : kernels.pack_bf16;
    return pack({src, src_dtype, p.data(), rows, p.cols, row_offset, begin, end, p.groups});
  }
  const size_t width = static_cast<size_t>(std::max(p.cols, 1)), n = (end - begin) * width;
  const char* from = static_cast<const char*>(src) + begin * width * dtype_bytes(src_dtype);
  char* to = p.data() + (row_offset + begin) * width * dtype_bytes(p.dtype);
  if (p.dtype == src_dtype) {
    std::memcpy(to, from, n * dtype_bytes(src_dtype));
  } else if (p.dtype == DType::f32) {
    kernels.to_f32(from, src_dtype, reinterpret_cast<float*>(to), n);
  } else if (p.dtype == DType::f16) {
    kernels.to_f16(from, src_dtype, reinterpret_cast<uint16_t*>(to), n);
  } else {
    kernels.to_bf16(from, src_dtype, 1.0f, reinterpret_cast<uint16_t*>(to), n);
  }
}

void Weights::add(const std::string& name, const Param& param) {
  params_.push_back(param);
  Param& p = params_.back();
  p.arena = &arena_, p.offset = total_;
  declare(name, p);
  total_ += p.bytes();
}

void Weights::declare(const std::string& name, const Param& param) {
  if (!by_name_.emplace(name, &param).second) throw std::invalid_argument(name + ": a second parameter of this name");
}

const Param& Weights::at(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) throw std::invalid_argument("no parameter is named '" + name + "'");
  return *found->second;
}

// The parameter of that name, when it can take these rows.
const Param& Weights::taking(const std::string& name, int row_offset, int rows, int cols) const {
  const Param& p = at(name);
  if (p.arena != &arena_) throw std::logic_error(name + ": belongs to other weights");
  if (!arena_.data() || arena_.read_only())
    throw std::logic_error("weights are put after they are allocated, and not when they are mapped");
  if (row_offset < 0 || rows < 0 || rows > p.matrices * p.matrix_rows - row_offset || cols != p.cols)
    throw std::invalid_argument(name + ": a part does not fit its parameter");
  if (p.layout == Param::Layout::panels && p.matrices > 1 && row_offset % p.matrix_rows + rows > p.matrix_rows)
    throw std::invalid_argument(name + ": rows of several experts in one part");
  return p;
}

// Where rows begin in panels: every matrix is padded to whole ones.
int Weights::packed_row(const Param& p, int row) {
  return row / p.matrix_rows * p.matrix_panels() * kPanel + row % p.matrix_rows;
}

int64_t Weights::put(const std::string& name, int row_offset, const void* src, DType src_dtype, int rows, int cols) {
  const Param& p = taking(name, row_offset, rows, cols);
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
    const int chunk = static_cast<int>(std::max<size_t>(1, (1 << 18) / width));
    parallel(pool_, ceil_div(rows, chunk), [&](int t) {
      const int begin = t * chunk, end = std::min(rows, begin + chunk);
      check(begin, end);
      put_float_rows(kernels_, p, row_offset, src, src_dtype, begin, end, rows);
    });
    return bad == INT64_MAX ? -1 : bad.load();
  }
  const int first = packed_row(p, row_offset);
  pack_panels(first, rows, [&](int begin, int end) {
    check(begin, end);
    put_float_rows(kernels_, p, first, src, src_dtype, begin, end, rows);
  });
  return bad == INT64_MAX ? -1 : bad.load();
}

// f(first row, row after the last) of a part, for tasks of whole panels: two threads never write one cache line.
template <class F>
void Weights::pack_panels(int row_offset, int rows, F f) {
  const int first = row_offset / kPanel, last = ceil_div(row_offset + rows, kPanel);
  parallel(pool_, last - first, [&](int t) {
    f(std::max(0, (first + t) * kPanel - row_offset), std::min(rows, (first + t + 1) * kPanel - row_offset));
  });
}

void Weights::put_codes(const std::string& name, int row_offset, int rows, const PackCodesTask& arrays) {
  const Param& p = taking(name, row_offset, rows, at(name).cols);
  if (!p.groups.bits) throw std::invalid_argument(name + ": codes are for weights in groups");
  const int first = packed_row(p, row_offset);
  pack_panels(first, rows, [&](int begin, int end) {
    PackCodesTask task = arrays;
    task.dst = p.data();
    task.groups = p.groups;
    task.rows = rows;
    task.k = p.cols;
    task.row_offset = first;
    task.row_begin = begin;
    task.row_end = end;
    kernels_.pack_codes(task);
  });
}

std::pair<const char*, size_t> Weights::matrix(const std::string& name, int number) const {
  const Param& p = at(name);
  if (number < 0 || number >= p.matrices) throw std::invalid_argument(name + ": has no matrix of this number");
  if (p.layout == Param::Layout::rows) throw std::invalid_argument(name + ": is not of matrices");
  const size_t bytes = p.layout == Param::Layout::vector ? p.matrix_rows * sizeof(float)
                                                         : p.matrix_panels() * p.panel_bytes();
  return {p.data() + static_cast<size_t>(number) * bytes, bytes};
}

void Weights::replace_matrix(const std::string& name, int number, const void* packed) {
  const auto [begin, bytes] = matrix(name, number);
  if (at(name).arena != &arena_) throw std::logic_error(name + ": belongs to other weights");
  arena_.make_writable(begin, bytes);
  std::memcpy(const_cast<char*>(begin), packed, bytes);
}

}  // namespace quire
