#include "rounding.h"

#include "context.h"

namespace quire {

void quantize_row(const Kernels& kernels, const Buffer& out, int row, const float* x, float at_least, float* top) {
  const size_t at = static_cast<size_t>(row);
  kernels.quantize({x, reinterpret_cast<int8_t*>(out.data()) + at * out.pitch, static_cast<size_t>(out.pitch),
                    out.row_scales() + at, out.cols, 0, 1, out.group, out.rotated,
                    out.group_numbers() + at * out.groups() * 2, at_least, top});
}

}  // namespace quire
