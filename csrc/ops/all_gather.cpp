#include <cstring>

#include "collective.h"

namespace quire {
namespace {

struct AllGather final : Collective {
  AllGather(Fields& f, Context& c)
      : Collective(f, c), x(f.buffer("x")), out(f.buffer("out")), first(f.integer("first")), cols(f.integer("cols")) {
    if (!cols) cols = x.cols - first;
    f.require(x.dtype == out.dtype && x.dtype != DType::i8 && x.logits == out.logits && x.per == out.per,
              "out must have rows of x's type, of floats");
    f.require(first >= 0 && cols > 0 && first + cols <= x.cols && cols <= out.cols, "x and out must have the columns");
  }

  Shown shown() const override { return columns(x, first, cols); }
  void take(const std::vector<Shown>& all) override {
    const size_t pitch = static_cast<size_t>(out.cols) * dtype_bytes(out.dtype);
    size_t at = 0;
    for (const Shown& from : all) at += from.bytes;
    if (at != pitch) return context_.apart.store(true);
    at = 0;
    for (const Shown& from : all) {
      for (int r = 0; r < from.rows; ++r)
        std::memcpy(out.data() + r * pitch + at, from.data + r * from.pitch, from.bytes);
      at += from.bytes;
    }
  }

  const Buffer &x, &out;
  int first, cols;
};

QUIRE_OP(AllGather)

}  // namespace
}  // namespace quire
