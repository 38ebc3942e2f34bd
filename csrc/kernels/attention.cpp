// Attention over the paged cache, see attention_rows.h: of the formats that are multiplied as they are, and merging.

#include "kernels/attention_rows.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

void attend(const AttendTask& t) {
  if (kv_widened(t.kv.type)) return attend_widened(t);
  switch (t.kv.type) {
    case KVType::f32: return attend_rows<FloatCache<F32>>(t);
    case KVType::f16: return attend_rows<FloatCache<F16>>(t);
    case KVType::i8: return attend_rows<ByteCache>(t);
    default: return attend_rows<FloatCache<BF16>>(t);
  }
}

void attend_merge(const AttendTask& t) {
  const int d16 = t.kv.d16, rows = t.rows();
  float* total = static_cast<float*>(t.scratch);
  each_row(t, [&](int r, Place at) {
    SoftmaxRow row;
    start_row(t, row, total, at);
    for (int p = 0; p < t.partition_end - t.partition_begin; ++p) {
      const float* state = t.states + (static_cast<size_t>(p) * rows + r) * state_floats(d16);
      fold(row, total, state, state[d16], state[d16 + 1], d16);
    }
    write_head(t, at, total, row.sum_total);
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
