#include <cmath>
#include <vector>

#include "attention_op.h"

namespace quire {
namespace {

// ALiBi's slopes of all heads (arXiv 2108.12409): 2^(-8 (h + 1) / n) for the power of two n up to the number of heads, then
// every other one of those for 2n.
std::vector<float> alibi_slopes(int heads) {
  int n = 1;
  while (2 * n <= heads) n *= 2;
  std::vector<float> found;
  for (int h = 0; h < heads; ++h) {
    const double power = h < n ? -8.0 * (h + 1) / n : -4.0 * (2 * (h - n) + 1) / n;
    found.push_back(static_cast<float>(std::exp2(power)));
  }
  return found;
}

struct Attend final : AttentionOp {
  // An int8 row is assembled in float32 in `wide`: several threads may compute its heads.
  Attend(Fields& f, Context& c)
      : AttentionOp(f, c, f.buffer("qkv"), f.none("wide") ? f.buffer("out") : f.buffer("wide")), out(f.buffer("out")),
        sinks(f.optional_vector("sinks")), softcap(f.number("softcap")), window(f.integer("window")),
        causal(f.flag("causal")), recent(f.optional_kv_layer("recent")) {
    f.record("shape", "HeadShape");
    want(f.integer("shape.heads"), window, 0, causal, recent);
    f.require(kv_late(layer_.type) == (recent != nullptr), "a kivi cache needs a cache of recent tokens");
    f.require(!recent || (causal && recent->type == KVType::bf16 && recent->kv_heads == layer_.kv_heads &&
                          recent->head_dim == layer_.head_dim),
              "the cache of recent tokens must be bf16, of the same heads, and the op causal");
    if (f.flag("alibi")) slopes = alibi_slopes(heads_);
    f.require(f.integer("shape.kv_heads") == layer_.kv_heads && f.integer("shape.head_dim") == layer_.head_dim &&
                  queries_.cols == (heads_ + 2 * layer_.kv_heads) * layer_.head_dim &&
                  out.cols == heads_ * layer_.head_dim && heads_ % layer_.kv_heads == 0,
              "qkv and out must have the heads of the layer's cache");
    rounds = f.optional_buffer("wide");
    f.require((out.dtype == DType::i8) == rounds && (!rounds || (out_.dtype == DType::f32 && out_.cols == out.cols)),
              "an int8 output needs float32 rows of its width beside it");
    f.require(!sinks || sinks->rows == heads_, "sinks must be one for each head");
    if (rounds) c.attention.want_rounding();
    fetches_ahead_ = true;
  }

  AttendTask task(const AttendPart& part, int thread, CacheRow* beside) const override {
    AttendTask t = AttentionOp::task(part, thread, beside);
    if (recent) {
      *beside = context_.cache_row(*recent, part.row, part.token_begin, part.token_end);
      t.recent = beside;
      t.recent_begin = recent_from(context_.step.positions[part.token_begin]);
    }
    t.softcap = softcap;
    t.sinks = sinks ? sinks->vector() : nullptr;
    t.slopes = slopes.empty() ? nullptr : slopes.data();
    t.window = window;
    if (!causal) t.last = context_.step.positions[context_.step.query_start[part.row + 1] - 1];
    return t;
  }
  void attend(AttendTask& t) override { kernels().attend(t); }
  void merge(AttendTask& t) override { kernels().attend_merge(t); }
  // Rounds the rows whose last heads these are.
  void done(const AttendPart& part) override {
    if (!rounds) return;
    for (int i = part.token_begin; i < part.token_end; ++i)
      if (context_.attention.heads_done(i, part.heads(), layer_.kv_heads))
        quantize_row(kernels(), out, i, out_.f32_row(i));
  }

  const Buffer& out;
  const Param* sinks;
  std::vector<float> slopes;
  float softcap;
  int window;
  bool causal, rounds;
  const KVLayer* recent;
};

QUIRE_OP(Attend)

}  // namespace
}  // namespace quire
