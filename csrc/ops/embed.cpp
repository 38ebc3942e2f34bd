#include "kernels.h"

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include "kernels/table.h"
#include "simd/half.h"

namespace quire {
namespace QUIRE_ISA {

QUIRE_INLINE float source(const void* src, DType type, size_t i) {
  switch (type) {
    case DType::f32: return static_cast<const float*>(src)[i];
    case DType::bf16: return bf16_to_float(static_cast<const uint16_t*>(src)[i]);
    default: return half_to_float(static_cast<const uint16_t*>(src)[i]);
  }
}

void embed(const EmbedTask& t) {
  for (int i = t.token_begin; i < t.token_end; ++i) {
    const int id = t.ids[i];
    float* out = t.out + static_cast<size_t>(i) * t.cols;
    if (!t.packed) {
      const size_t base = static_cast<size_t>(id) * t.cols;
      for (int k = 0; k < t.cols; ++k) out[k] = source(t.table, t.dtype, base + k);
    } else if (t.dtype == DType::f32) {
      const float* panel = static_cast<const float*>(t.table) + static_cast<size_t>(id / kPanel) * t.cols * kPanel;
      for (int k = 0; k < t.cols; ++k) out[k] = panel[static_cast<size_t>(k) * kPanel + id % kPanel];
    } else {
      const size_t panel_elems = static_cast<size_t>((t.cols + 1) / 2) * 2 * kPanel;
      const uint16_t* panel = static_cast<const uint16_t*>(t.table) + (id / kPanel) * panel_elems;
      const int column = id % kPanel;
      for (int k = 0; k < t.cols; ++k) {
        const uint16_t* step = panel + static_cast<size_t>(k / 2) * 2 * kPanel;
        out[k] = t.dtype == DType::bf16 ? bf16_to_float(step[column * 2 + (k & 1)])
                                        : half_to_float(step[column / 16 * 32 + (k & 1) * 16 + column % 16]);
      }
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"

namespace quire {
namespace {

struct Embed final : RowOp {
  Embed(Fields& f, Context& c) : RowOp(c, f.buffer("out")), table(f.weight("table")) {
    f.require(out_.dtype == DType::f32 && out_.cols == table.cols, "out must be float32 rows of the table's width");
    kernel = table.groups.bits ? kernels().embed_groups : kernels().embed;
  }

  void run_rows(int begin, int end, int) override {
    kernel({table.data(), table.dtype, table.layout == Param::Layout::panels, context_.step.token_ids,
            out_.f32(), table.cols, begin, end, table.groups});
  }

  const Param& table;
  void (*kernel)(const EmbedTask&);
};

QUIRE_OP(Embed)

}  // namespace
}  // namespace quire

#endif
