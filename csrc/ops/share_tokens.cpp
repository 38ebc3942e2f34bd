#include <cstring>

#include "sharing.h"

namespace quire {
namespace {

struct ShareTokens final : Sharing {
  ShareTokens(Fields& f, Context& c)
      : Sharing(f, c), x(f.buffer("x")), ids(f.buffer("ids")), out(f.buffer("out")), out_ids(f.buffer("out_ids")),
        places(f.buffer("places")) {
    f.require(x.same_format(out) && x.per == 1 && out.per == 1 && !x.shared && out.shared,
              "out must have rows of x's format, of all replicas");
    f.require(out_ids.cols == ids.cols && places.cols == ids.cols && out_ids.shared && places.shared,
              "ids and places must be those of all replicas");
    c.experts.want(experts_, ids.cols * replicas());
  }

  void run(int, int) override {
    const int rows = context_.tokens;
    const size_t bytes = row_bytes();
    context_.shared_tokens = 0;  // none to compute, unless all meet
    context_.experts.sort(out_ids.i32(), 0, ids.cols, experts_, places.i32());
    for (int r = 0; r < rows; ++r)
      each_piece(x, ids, r, context_.shown + r * bytes,
                 [](char* to, char* from, size_t n) { std::memcpy(to, from, n); });
    exchange(bytes, bytes, rows, [this](const std::vector<Shown>& all) { take(all); });
  }

 private:
  size_t groups_bytes() const { return static_cast<size_t>(x.groups()) * 2 * sizeof(int32_t); }
  size_t row_bytes() const {
    size_t bytes = x.pitch * dtype_bytes(x.dtype) + ids.cols * sizeof(int32_t);
    if (x.dtype == DType::i8) bytes += sizeof(float) + groups_bytes();
    return bytes;
  }

  // copy(a piece as it travels, the same in the buffers, bytes) for the pieces of a row; `travels` is where it lies.
  template <class F>
  void each_piece(const Buffer& of, const Buffer& of_ids, int row, char* travels, F copy) const {
    const size_t at = static_cast<size_t>(row), bytes = x.pitch * dtype_bytes(x.dtype);
    const auto piece = [&](char* held, size_t n) { copy(travels, held, n), travels += n; };
    piece(of.data() + at * bytes, bytes);
    piece(reinterpret_cast<char*>(of_ids.i32() + at * ids.cols), ids.cols * sizeof(int32_t));
    if (x.dtype != DType::i8) return;
    piece(reinterpret_cast<char*>(of.row_scales() + at), sizeof(float));
    piece(reinterpret_cast<char*>(of.group_numbers()) + at * groups_bytes(), groups_bytes());
  }
  // Tokens of all replicas, one replica after the other; ranks of one have the same.
  void take(const std::vector<Shown>& all) {
    int total = 0;
    for (int replica = 0; replica < replicas(); ++replica) {
      const Shown& shown = all[static_cast<size_t>(replica * tensor_ranks_ + tensor_rank())];
      if (shown.bytes != row_bytes() || shown.rows > context_.limits.max_tokens) return context_.apart.store(true);
      if (replica == this->replica()) context_.first_shared = total;
      for (int r = 0; r < shown.rows; ++r, ++total)
        each_piece(out, out_ids, total, const_cast<char*>(shown.data) + r * shown.pitch,
                   [](char* from, char* to, size_t n) { std::memcpy(to, from, n); });
    }
    context_.shared_tokens = total;
    context_.experts.sort(out_ids.i32(), total, ids.cols, experts_, places.i32());
  }

  const Buffer &x, &ids, &out, &out_ids, &places;
};

QUIRE_OP(ShareTokens)

}  // namespace
}  // namespace quire
