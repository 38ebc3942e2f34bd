#include "op.h"

#include <cstring>

namespace quire {
namespace {

constexpr int kRows = 4;  // tokens of a task

struct Dispatch final : Op {
  Dispatch(Fields& f, Context& c) : Op(c), x(f.buffer("x")), places(f.buffer("places")), out(f.buffer("out")) {
    f.require(x.same_format(out) && out.per == places.cols,
              "rows are copied in one format, one for each of a token's experts");
  }

  int tasks() const override { return ceil_div(context_.tokens, kRows); }
  void run(int task, int) override {
    const size_t bytes = x.pitch() * dtype_bytes(x.dtype), groups = static_cast<size_t>(x.groups()) * 2;
    const int k = out.per, end = std::min(context_.tokens, (task + 1) * kRows);
    for (int i = task * kRows * k; i < end * k; ++i) {
      const size_t from = static_cast<size_t>(i / k), to = static_cast<size_t>(places.i32()[i]);
      std::memcpy(out.data() + to * bytes, x.data() + from * bytes, bytes);
      if (x.dtype != DType::i8) continue;
      out.row_scales()[to] = x.row_scales()[from];
      if (x.group)
        std::memcpy(out.group_numbers() + to * groups, x.group_numbers() + from * groups, groups * sizeof(int32_t));
    }
  }

  const Buffer &x, &places, &out;
};

QUIRE_OP(Dispatch)

}  // namespace
}  // namespace quire
