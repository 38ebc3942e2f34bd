#include "op.h"

#include <cstring>

namespace quire {
namespace {

// Its tasks are rows of `places`: tokens.
struct Dispatch final : RowOp {
  Dispatch(Fields& f, Context& c) : RowOp(c, f.buffer("places")), x(f.buffer("x")), out(f.buffer("out")) {
    f.require(x.same_format(out) && out.per == out_.cols,
              "rows are copied in one format, one for each of a token's experts");
  }

  void run_rows(int begin, int end, int) override {
    const size_t bytes = x.pitch * dtype_bytes(x.dtype);
    const int k = out.per;
    for (int i = begin * k; i < end * k; ++i) {
      const size_t from = static_cast<size_t>(i / k), to = static_cast<size_t>(out_.i32()[i]);
      std::memcpy(out.data() + to * bytes, x.data() + from * bytes, bytes);
      if (x.dtype != DType::i8) continue;
      const size_t groups = static_cast<size_t>(x.groups()) * 2;
      out.row_scales()[to] = x.row_scales()[from];
      std::memcpy(out.group_numbers() + to * groups, x.group_numbers() + from * groups, groups * sizeof(int32_t));
    }
  }

  const Buffer &x, &out;
};

QUIRE_OP(Dispatch)

}  // namespace
}  // namespace quire
