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
  void run(int, int) override {
    const auto taking = [this](const std::vector<Shown>& all) { take(all); };
    if (!context_.group->exchange(context_.rank, shown(), taking)) context_.apart.store(true);
  }

 protected:
  virtual Shown shown() const = 0;
  // Not called in other threads of this rank; what is shown may be read by other ranks meanwhile.
  virtual void take(const std::vector<Shown>& all) = 0;

  // Columns [first, first + cols) of a buffer's rows in this step.
  Shown columns(const Buffer& b, int first, int cols) const {
    const size_t each = dtype_bytes(b.dtype);
    return {b.data() + first * each, static_cast<size_t>(b.cols) * each, static_cast<size_t>(cols) * each,
            context_.rows_of(b)};
  }
};

}  // namespace quire
