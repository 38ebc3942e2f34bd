// Maxima of columns that an op has just written, while the cache holds them; see Linear in program/ops.
#pragma once

#include "fields.h"

namespace quire {

class Maxima {
 public:
  // Of `of`, to the buffer that the field `maxima` names, or nowhere.
  Maxima(Fields& f, const Buffer& of, const Kernels& kernels)
      : kernel_(kernels.maxima), of_(of), to_(f.optional_buffer("maxima")) {
    f.require(!to_ || (of.dtype == DType::f32 && to_->dtype == DType::f32 && to_->cols == maxima_of(of.cols)),
              "maxima must be a column for each 64 of the float32 rows that they are of");
  }

  explicit operator bool() const { return to_; }
  // Of columns [begin, end) of some rows.
  void leave(int row, int rows, int begin, int end) const {
    if (!to_) return;
    const size_t pitch = static_cast<size_t>(of_.cols), count = static_cast<size_t>(to_->cols);
    kernel_({of_.f32_row(row) + begin, pitch, to_->f32_row(row) + begin / kMaximaCols, count, rows, end - begin});
  }

 private:
  void (*kernel_)(const MaximaTask&);
  const Buffer& of_;
  const Buffer* to_;
};

}  // namespace quire
