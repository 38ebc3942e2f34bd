// What every kind of attention does with the parts of a plan; the last thread of a split merges its partitions.
#pragma once

#include "op.h"

namespace quire {

class AttentionOp : public Op {
 public:
  int tasks() const override { return static_cast<int>(context_.attention.plan(plan_).parts().size()); }
  void run(int task, int thread) override;

 protected:
  AttentionOp(Fields& f, Context& c, const Buffer& queries, const Buffer& out);
  // The shape, with the layer's heads of keys and values; called once by a kind's constructor.
  void want(int heads, int window, int rank, bool causal = true, bool recent = false) {
    heads_ = heads;
    plan_ = context_.attention.want(
        {layer_.head_dim, heads, layer_.kv_heads, window, rank, causal, kv_widened(layer_.type), recent});
  }

  virtual void attend(AttendTask& t) = 0;  // `next` may be set
  virtual void merge(AttendTask& t) = 0;
  // All that the queries and heads of a part see is done.
  virtual void done(const AttendPart& /*part*/) {}
  // The task of a part, without states; `recent` is where it may leave a cache of recent tokens.
  virtual AttendTask task(const AttendPart& part, int thread, CacheRow* recent) const;

  const Buffer &queries_, &out_;
  const KVLayer& layer_;
  const float scale_;
  int heads_ = 0, plan_ = -1;
  bool fetches_ahead_ = false;  // the kernel fetches what the next task reads
};

}  // namespace quire
