#include <cstring>

#include "collective.h"

namespace quire {
namespace {

struct AllToAll final : Collective {
  AllToAll(Fields& f, Context& c)
      : Collective(f, c), x(f.buffer("x")), out(f.buffer("out")), experts(f.integer("experts")) {
    // The plan of the router says which rows are whose.
    f.require(f.buffer("ids").cols == x.per, "x must have a row for each pair");
    f.require(x.dtype == DType::f32 && out.dtype == DType::f32 && x.per == out.per && out.cols <= x.cols,
              "x and out must be float32 rows of pairs");
  }

  void run(int, int) override {
    Shown mine = rows(x);
    mine.span = mine.bytes;
    mine.bytes = out.cols * sizeof(float);  // of this rank's columns, from which the others know where theirs begin
    exchange(mine, [this](const std::vector<Shown>& all) { take(all); });
  }

 private:
  void take(const std::vector<Shown>& all) {
    const ExpertPlan& plan = context_.experts;
    const int ranks = static_cast<int>(all.size());
    size_t at = 0, bytes = out.cols * sizeof(float);
    for (int rank = 0; rank < context_.rank; ++rank) at += all[rank].bytes;
    for (int i = 0; i < plan.size(); ++i) {
      const ExpertChunk& chunk = plan[i];
      const int rank = owner(chunk.expert, ranks);
      for (int r = chunk.begin; r < chunk.end; ++r)
        std::memcpy(out.f32_row(r), all[rank].data + r * all[rank].pitch + at, bytes);
    }
  }

  // Experts are cut at experts * rank / ranks.
  int owner(int expert, int ranks) const {
    int rank = 0;
    while (static_cast<int64_t>(experts) * (rank + 1) / ranks <= expert) ++rank;
    return rank;
  }

  const Buffer &x, &out;
  int experts;
};

QUIRE_OP(AllToAll)

}  // namespace
}  // namespace quire
