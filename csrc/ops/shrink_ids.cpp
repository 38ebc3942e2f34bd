#include <cstring>

#include "op.h"

namespace quire {
namespace {

float widened(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// The columns of A that belong to the tokens' ids.

struct ShrinkIds final : RowOp {
  ShrinkIds(Fields& f, Context& c) : RowOp(c, f.buffer("out")), adapted(f.low_rank("adapted")) {
    f.require(out_.dtype == DType::f32 && !out_.logits && out_.per == 1 && adapted.parts() == 1 &&
                  out_.cols == adapted.rank,
              "out must be float32 with the ranks of an embedding");
  }

  int tasks() const override { return context_.adapters.rows(false).groups.empty() ? 0 : RowOp::tasks(); }

  void run_rows(int begin, int end, int) override {
    const AdapterPool& pool = context_.adapters;
    for (int row = begin; row < end; ++row) {
      const int slot = pool.rows(false).slots[row];
      if (slot < 0) continue;
      const PartPlace& part = pool.part(adapted, slot, 0);
      const int id = context_.step.token_ids[row];
      float* out = out_.f32_row(row);
      for (int group = 0, first = 0; first < part.rank; ++group, first += kRankLanes) {
        const int unit = id / PartPlace::kFeatures, lanes = part.lanes(group);
        const char* data = pool.a(adapted, slot, 0, group).from(unit).data;
        const int feature = id % PartPlace::kFeatures;
        const uint16_t* a = reinterpret_cast<const uint16_t*>(data) + feature / 2 * 2 * lanes + feature % 2;
        for (int r = 0; r < lanes; ++r) out[first + r] = widened(a[2 * r]);
      }
    }
  }

  const LowRank& adapted;
};

QUIRE_OP(ShrinkIds)

}  // namespace
}  // namespace quire
