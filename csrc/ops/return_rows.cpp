#include <algorithm>
#include <cstring>

#include "sharing.h"

namespace quire {
namespace {

struct ReturnRows final : Sharing {
  ReturnRows(Fields& f, Context& c)
      : Sharing(f, c), x(f.buffer("x")), ids(f.buffer("ids")), shared_places(f.buffer("shared_places")),
        places(f.buffer("places")), out(f.buffer("out")) {
    f.require(x.shared && ids.shared && shared_places.shared && !places.shared && !out.shared && ids.cols == x.per &&
                  shared_places.cols == x.per && places.cols == x.per && out.per == x.per,
              "x must have a row for each pair of all replicas, and out one for each of this one's");
    f.require(x.dtype == DType::f32 && out.dtype == DType::f32 && out.cols <= x.cols, "x and out must be float32");
  }

  // Each rank shows the rows of its own experts, and tells how many of their columns it has itself.
  void run(int, int) override {
    const ExpertPlan& plan = context_.experts;
    const size_t bytes = x.cols * sizeof(float);
    for (int i = 0; i < plan.size(); ++i) {
      const ExpertChunk& chunk = plan[i];
      if (owner(chunk.expert) != context_.sharer) continue;
      std::memcpy(context_.shown + chunk.begin * bytes, x.f32_row(chunk.begin),
                  static_cast<size_t>(chunk.end - chunk.begin) * bytes);
    }
    exchange(bytes, out.cols * sizeof(float), context_.rows_of(x),
             [this](const std::vector<Shown>& all) { take(all); });
  }

 private:
  void take(const std::vector<Shown>& all) {
    const int rows = context_.rows_of(x);
    const bool same = std::all_of(all.begin(), all.end(), [&](const Shown& s) { return s.rows == rows; });
    if (!same) context_.apart.store(true);
    if (context_.apart.load()) return;
    size_t first = 0;  // of this rank's columns
    for (int rank = replica() * tensor_ranks_; rank < context_.sharer; ++rank)
      first += all[static_cast<size_t>(rank)].bytes;
    const int32_t *pairs = places.i32(), skip = context_.first_shared * x.per;
    for (int i = 0; i < context_.tokens * x.per; ++i) {
      const Shown& shown = all[static_cast<size_t>(owner(ids.i32()[skip + i]))];
      const size_t row = static_cast<size_t>(shared_places.i32()[skip + i]);
      std::memcpy(out.f32_row(pairs[i]), shown.data + row * shown.pitch + first, out.cols * sizeof(float));
    }
  }

  const Buffer &x, &ids, &shared_places, &places, &out;
};

QUIRE_OP(ReturnRows)

}  // namespace
}  // namespace quire
