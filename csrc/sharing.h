// An op at which the ranks of all replicas that share experts meet. Replicas have different steps, so each rank copies what
// it shows to memory that all of them map.
#pragma once

#include "group.h"
#include "op.h"

namespace quire {

class Sharing : public Op {
 public:
  Sharing(Fields& f, Context& c)
      : Op(c), ranks_(f.integer("ranks")), tensor_ranks_(f.integer("tensor_ranks")), experts_(f.integer("experts")) {
    f.require(tensor_ranks_ > 0 && ranks_ > tensor_ranks_ && ranks_ % tensor_ranks_ == 0 && experts_ >= ranks_ &&
                  (c.sharers == 1 || c.sharers == ranks_),
              "ranks must be those of all replicas, with an expert each");
    c.sharers = ranks_;
  }

  int tasks() const override { return 1; }

 protected:
  // Show `rows` rows of `pitch` bytes that lie where this rank shows them, of which the others know `bytes`.
  void exchange(size_t pitch, size_t bytes, int rows, const std::function<void(const std::vector<Shown>&)>& take) {
    const Shown mine = {context_.shown, pitch, bytes, rows, 0};
    if (!context_.share->exchange(context_.sharer, mine, take)) context_.apart.store(true);
  }
  int replicas() const { return ranks_ / tensor_ranks_; }
  int replica() const { return context_.sharer / tensor_ranks_; }
  int tensor_rank() const { return context_.sharer % tensor_ranks_; }
  // The rank that has an expert: they are cut at experts * rank / ranks.
  int owner(int expert) const {
    int rank = 0;
    while (static_cast<int64_t>(experts_) * (rank + 1) / ranks_ <= expert) ++rank;
    return rank;
  }

  const int ranks_, tensor_ranks_, experts_;  // tensor_ranks_: of a replica
};

}  // namespace quire
