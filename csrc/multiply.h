// Products of rows with a packed weight: what linears of every kind share.
#pragma once

#include "context.h"

namespace quire {

constexpr size_t kTaskBytes = 64 << 10;  // weight bytes that make a task worth claiming
// Panels that make a task of that size, at least one.
inline int panels_of_task(size_t panel_bytes) {
  return static_cast<int>(std::max<size_t>(1, kTaskBytes / std::max<size_t>(1, panel_bytes)));
}

using LinearKernel = void (*)(const LinearTask&);

// The kernel of a weight's format.
inline LinearKernel linear_kernel(const Kernels& kernels, const Param& p) {
  if (p.groups.bits) return kernels.linear_groups;
  switch (p.dtype) {
    case DType::f32: return kernels.linear_f32;
    case DType::f16: return kernels.linear_f16;
    case DType::bf16_24: return kernels.linear_bf16_24;
    default: return kernels.linear_bf16;
  }
}

// Whether rows of a buffer are what a weight is multiplied by.
inline bool can_multiply(const Buffer& x, const Param& p) {
  return p.layout == Param::Layout::panels && x.dtype == input_of(p.dtype) && x.cols == p.cols &&
         x.group == p.groups.size && x.rotated == p.groups.rotated;
}

// Inputs of a task: rows of x from `begin` on, and matrix number `matrix` of a weight.
inline LinearTask linear_task(const Buffer& x, int begin, int end, const Param& p, int matrix = 0) {
  const size_t row = static_cast<size_t>(begin), panels = static_cast<size_t>(matrix) * p.matrix_panels();
  LinearTask t{};
  t.ldx = static_cast<size_t>(x.pitch);
  t.x = x.data() + row * t.ldx * dtype_bytes(x.dtype);
  t.x_scale = x.dtype == DType::i8 ? x.row_scales() + row : nullptr;
  t.x_groups = x.group ? x.group_numbers() + row * x.groups() * 2 : nullptr;
  t.groups = p.groups;
  t.w = p.data() + panels * p.panel_bytes();
  t.rows = end - begin;
  t.k = p.cols;
  t.n = p.matrix_rows;
  return t;
}

// Row `task` of `tasks` even ranges of rows.
inline int even_cut(int rows, int task, int tasks) {
  return static_cast<int>(static_cast<int64_t>(rows) * task / tasks);
}

}  // namespace quire
