#include "kernels.h"

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include <cstring>

#include "kernels/table.h"
#include "simd/functions.h"
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
    const int id = t.ids[i] - t.first;
    float* out = t.out + static_cast<size_t>(i) * t.cols;
    if (id < 0 || id >= t.rows) {
      std::memset(out, 0, static_cast<size_t>(t.cols) * sizeof(float));
    } else if (!t.packed) {
      const size_t base = static_cast<size_t>(id) * t.cols;
      for (int k = 0; k < t.cols; ++k) out[k] = source(t.table, t.dtype, base + k);
    } else if (t.dtype == DType::f32) {
      const float* panel = static_cast<const float*>(t.table) + static_cast<size_t>(id / kPanel) * t.cols * kPanel;
      for (int k = 0; k < t.cols; ++k) out[k] = panel[static_cast<size_t>(k) * kPanel + id % kPanel];
    } else {
      const size_t panel_elems = static_cast<size_t>((t.cols + 1) / 2) * 2 * kPanel;
      const uint16_t* panel = static_cast<const uint16_t*>(t.table) + (id / kPanel) * panel_elems;
      const bool bf16 = t.dtype == DType::bf16;
      const int column = id % kPanel, first = bf16 ? column * 2 : column / 16 * 32 + column % 16,
                second = bf16 ? 1 : 16;
      for (int k = 0; k < t.cols; k += 16) {
        uint16_t halves[16] = {0};
        const int n = t.cols - k;
        for (int j = 0; j < 16 && j < n; j += 2) {
          const uint16_t* pair = panel + static_cast<size_t>(k + j) * kPanel + first;
          halves[j] = pair[0], halves[j + 1] = pair[second];
        }
        const V16 v = bf16 ? load_bf16(halves) : load_half(halves);
        n >= 16 ? store(out + k, v) : store_n(out + k, v, n);
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
  Embed(Fields& f, Context& c)
      : RowOp(c, f.buffer("out")), table(f.weight("table")), own(f.optional_own("own")), first(f.integer("first")) {
    f.require(out_.dtype == DType::f32 && out_.cols == table.cols, "out must be float32 rows of the table's width");
    kernel = table.groups.bits ? kernels().embed_groups : kernels().embed;
  }

  void run_rows(int begin, int end, int) override {
    const AdapterPool& pool = context_.adapters;
    const AdapterRows& rows = pool.rows(false);
    if (!own || rows.groups.empty()) return look_up(table, first, begin, end);
    for (int row = begin; row < end;) {
      const int slot = rows.slots[row], from = row;
      const bool owned = slot >= 0 && pool.has_own(*own, slot);
      while (row < end && rows.slots[row] == slot) ++row;
      if (!owned) look_up(table, first, from, row);
      for (int each = from; owned && each < row; ++each) {
        const int id = context_.step.token_ids[each] - first;
        const int unit = id >= 0 && id < table.rows ? id / own->unit_rows() : 0;
        int count;
        look_up(pool.own(*own, slot, unit, &count), first + unit * own->unit_rows(), each, each + 1);
      }
    }
  }

  void look_up(const Param& from, int first, int begin, int end) {
    kernel({from.data(), from.dtype, from.layout == Param::Layout::panels, context_.step.token_ids, out_.f32(),
            from.cols, begin, end, first, from.rows, from.groups});
  }

  const Param& table;
  const OwnParam* own;  // of adapters, in place of the table
  int first;
  void (*kernel)(const EmbedTask&);
};

QUIRE_OP(Embed)

}  // namespace
}  // namespace quire

#endif
