#include "rounding.h"

#include "context.h"

namespace quire {

void quantize_row(const Kernels& kernels, const Buffer& out, int row, const float* x, float at_least,
                  float* top) {
  const size_t at = static_cast<size_t>(row);
  const QuantizeTask task{x, reinterpret_cast<uint8_t*>(out.data()) + at * out.pitch(), out.pitch(),
                          out.row_scales() + at, out.cols, 0, 1, out.group, out.rotated,
                          out.group ? out.group_numbers() + at * out.groups() * 2 : nullptr, at_least, top};
  out.group ? kernels.quantize_groups(task) : kernels.quantize(task);
}

}  // namespace quire
