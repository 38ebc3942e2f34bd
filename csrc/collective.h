// An op at which the ranks of a group meet: one task, while the other threads of each rank wait at the op's end.
#pragma once

#include "group.h"
#include "op.h"

namespace quire {

class Collective : public Op {
 public:
  Collective(Fields& f, Context& c) : Op(c) {
    const int ranks = f.integer("ranks");
    f.require(ranks > 1 && (c.ranks == 1 || c.ranks == ranks), "ranks must be those of the program");
    c.ranks = ranks;
  }

  int tasks() const override { return 1; }

 protected:
  // See Group; what is shown may be read by other ranks while take() runs.
  void exchange(const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) {
    if (!context_.group->exchange(context_.rank, mine, take)) context_.apart.store(true);
  }
  // A float32 buffer's rows in this step.
  Shown rows(const Buffer& b) const {
    const size_t bytes = b.cols * sizeof(float);
    return {b.data(), bytes, bytes, context_.rows_of(b)};
  }
};

}  // namespace quire
