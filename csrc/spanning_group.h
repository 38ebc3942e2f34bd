// Ranks of a program on several nodes (hosts). Those of one node share memory; each has a connection to the rank that has
// its place on every other node, and takes the rows of that one for its whole node.
#pragma once

#include <utility>
#include <vector>

#include "shared_ranks.h"

namespace quire {

class SpanningGroup final : public Group {
 public:
  // Ranks first … first + size - 1 of `ranks`, which outlives the group; here … here + count - 1 of them are on this node.
  // `peers`: a rank of the group (from 0) that this one is connected to, and the socket, which outlives the group, too.
  SpanningGroup(SharedRanks& ranks, int first, int size, int here, int count,
                const std::vector<std::pair<int, int>>& peers);
  int size() const override { return static_cast<int>(shown_.size()); }
  bool exchange(int rank, const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) override;

 private:
  // What precedes rows on a connection, of machines with one byte order: where the rows are in the memory of their node,
  // which has the same place free for them on all others.
  struct Head {
    uint64_t offset, bytes, span;  // span: bytes of a row that travel
    int32_t rows;
    uint32_t number;  // of the exchange
  };
  struct Peer {
    int rank, fd;
    size_t sent, received;
    Head head;
  };
  bool travel(const Shown& mine);
  bool send(Peer& peer, const Head& head, const Shown& mine, bool& moved);
  bool receive(Peer& peer, bool& moved);
  bool fits(const Head& head) const;
  bool apart();

  SharedRanks& ranks_;
  const int first_, here_, count_;
  uint32_t number_ = 0;
  std::vector<Peer> peers_;
  std::vector<Shown> shown_;
};

}  // namespace quire
