#include "attention_op.h"
#include "latent_shape.h"

namespace quire {
namespace {

struct LatentAttend final : AttentionOp {
  LatentAttend(Fields& f, Context& c)
      : AttentionOp(f, c, f.buffer("q_latent"), f.buffer("out")), q(f.buffer("q")), shape(f, layer_) {
    want(shape.heads, 0, shape.rank);
    f.require(queries_.cols == heads_ * shape.rank && out_.cols == queries_.cols && q.cols == heads_ * shape.q_head(),
              "widths must be those of the shape");
  }

  LatentTask latent(const AttendTask& t) const {
    return {t, q.f32() + shape.nope, static_cast<size_t>(q.cols), shape.q_head(), shape.rank};
  }
  void attend(AttendTask& t) override { kernels().latent_attend(latent(t)); }
  void merge(AttendTask& t) override { kernels().latent_merge(latent(t)); }

  const Buffer& q;
  LatentShape shape;
};

QUIRE_OP(LatentAttend)

}  // namespace
}  // namespace quire
