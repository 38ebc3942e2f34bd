// Rows that are rounded to int8 as they are written.
#pragma once

#include <algorithm>
#include <cstddef>

#include "arena.h"
#include "kernels.h"
#include "sizes.h"

namespace quire {

struct Buffer;

// Row `row` of an int8 buffer from float32, as Quantize in program/ops defines it. The row has a magnitude of `at_least`
// elsewhere; `top` gets the greatest.
void quantize_row(const Kernels& kernels, const Buffer& out, int row, const float* x, float at_least = 0.0f,
                  float* top = nullptr);

// A float32 row in each thread's own memory: what an op rounds when it is whole.
class RoundedRows {
 public:
  void want(int cols) { row_bytes_ = std::max(row_bytes_, row_bytes(cols)); }
  void allocate(int threads) { memory_.allocate(row_bytes_ * threads); }
  static size_t row_bytes(int cols) { return align_up(cols * sizeof(float), kAlignment); }
  float* row(int thread) const { return reinterpret_cast<float*>(memory_.data() + row_bytes_ * thread); }
  const Arena& memory() const { return memory_; }

 private:
  size_t row_bytes_ = 0;
  Arena memory_;
};

}  // namespace quire
