#include <cstring>

#include "collective.h"

namespace quire {
namespace {

struct AllGather final : Collective {
  AllGather(Fields& f, Context& c)
      : Collective(f, c), x(f.buffer("x")), out(f.buffer("out")), first(f.integer("first")), cols(f.integer("cols")) {
    if (!cols) cols = x.cols - first;
    f.require(x.dtype == out.dtype && x.logits == out.logits && x.per == out.per && x.group == out.group &&
                  x.rotated == out.rotated,
              "out must have rows of x's type");
    f.require(first >= 0 && cols > 0 && first + cols <= x.cols && cols <= out.cols, "x and out must have the columns");
    f.require(x.dtype != DType::i8 || cols == x.cols, "int8 rows are gathered whole");
  }

  void run(int, int) override {
    const bool bytes = x.dtype == DType::i8;
    const size_t each = dtype_bytes(x.dtype);
    gather(x.data() + first * each, x.pitch * each, (bytes ? x.pitch : cols) * each, out.data(), out.pitch * each);
    if (!bytes) return;
    std::memcpy(out.row_scales(), x.row_scales(), context_.rows_of(x) * sizeof(float));  // all ranks have the same
    const size_t group = 2 * sizeof(int32_t);
    gather(reinterpret_cast<const char*>(x.group_numbers()), x.groups() * group, x.groups() * group,
           reinterpret_cast<char*>(out.group_numbers()), out.groups() * group);
  }

 private:
  // Rows of `bytes`, `from_pitch` apart, of all ranks side by side.
  void gather(const char* from, size_t from_pitch, size_t bytes, char* to, size_t to_pitch) {
    exchange({from, from_pitch, bytes, context_.rows_of(x)}, [&](const std::vector<Shown>& all) {
      size_t at = 0;
      for (const Shown& shown : all) at += shown.bytes;
      if (at != to_pitch) return context_.apart.store(true);
      at = 0;
      for (const Shown& shown : all) {
        for (int r = 0; r < shown.rows; ++r)
          std::memcpy(to + r * to_pitch + at, shown.data + r * shown.pitch, shown.bytes);
        at += shown.bytes;
      }
    });
  }

  const Buffer &x, &out;
  int first, cols;
};

QUIRE_OP(AllGather)

}  // namespace
}  // namespace quire
