#include "attention_op.h"

namespace quire {

AttentionOp::AttentionOp(Fields& f, Context& c, const Buffer& queries, const Buffer& out)
    : Op(c), queries_(queries), out_(out), layer_(f.kv_layer("layer")), scale_(f.number("scale")) {}

AttendTask AttentionOp::task(const AttendPart& part, int thread, CacheRow* /*recent*/) const {
  AttendTask t{};
  static_cast<CacheRow&>(t) = context_.cache_row(layer_, part.row, part.token_begin, part.token_end);
  t.qkv = queries_.f32();
  t.pitch = static_cast<size_t>(queries_.cols);
  t.out = out_.data();
  t.out_dtype = out_.dtype;
  t.out_pitch = static_cast<size_t>(out_.cols);
  t.heads_per_kv = heads_ / layer_.kv_heads;
  t.head_begin = part.head_begin;
  t.head_end = part.head_end;
  t.scale = scale_;
  t.last = -1;
  t.partition_begin = part.partition_begin;
  t.partition_end = part.partition_end;
  t.scratch = context_.attention.scratch(thread);
  return t;
}

void AttentionOp::run(int number, int thread) {
  AttentionPlan& plan = context_.attention.plan(plan_);
  const AttendPart& part = plan.parts()[number];
  CacheRow recent, recent_after;
  AttendTask t = task(part, thread, &recent), after;
  if (fetches_ahead_ && number + 1 < static_cast<int>(plan.parts().size())) {
    after = task(plan.parts()[number + 1], thread, &recent_after);
    t.next = &after;
  }
  if (part.counter < 0) {
    attend(t);
    return done(part);
  }
  float* all = context_.attention.states() + part.states;
  t.states = all + plan.partition_states(part) * (part.partition_begin - part.whole_begin);
  attend(t);
  if (!plan.last_of_split(part)) return;
  t.states = all;
  t.partition_begin = part.whole_begin;
  t.partition_end = part.whole_end;
  merge(t);
  done(part);
}

}  // namespace quire
