#include <cstring>

#include "collective.h"

namespace quire {
namespace {

struct AllReduce final : Collective {
  AllReduce(Fields& f, Context& c)
      : Collective(f, c), x(f.buffer("x")), out(f.buffer("out")), sum(f.choice("how", {"bits", "sum"})) {
    f.require(x.dtype == DType::f32 && out.dtype == DType::f32 && x.cols == out.cols && &x != &out,
              "x and out must be two buffers of float32 rows of one width");
  }

  void run(int, int) override {
    exchange(rows(x), [this](const std::vector<Shown>& all) { take(all); });
  }

 private:
  void take(const std::vector<Shown>& all) {
    const size_t count = static_cast<size_t>(all[0].rows) * x.cols;
    float* to = out.f32();
    std::memcpy(to, all[0].data, count * sizeof(float));
    for (size_t rank = 1; rank < all.size(); ++rank) {
      const float* from = reinterpret_cast<const float*>(all[rank].data);
      if (sum) {
        for (size_t i = 0; i < count; ++i) to[i] += from[i];
        continue;
      }
      for (size_t i = 0; i < count; ++i) {
        uint32_t a, b;
        std::memcpy(&a, to + i, 4);
        std::memcpy(&b, from + i, 4);
        a |= b;
        std::memcpy(to + i, &a, 4);
      }
    }
  }

  const Buffer &x, &out;
  bool sum;
};

QUIRE_OP(AllReduce)

}  // namespace
}  // namespace quire
