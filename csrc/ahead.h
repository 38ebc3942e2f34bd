// Memory that is read after a kernel's work, to be on its way meanwhile.
#pragma once

#include <algorithm>
#include <cstddef>

namespace quire {

// Pieces from anywhere. A kernel fetches some of their cache lines beside each of its tiles: all of them at once would fill
// the queues of the memory that the tiles wait for.
class Ahead {
 public:
  struct Piece {  // bytes that are not fetched yet
    const char *data, *end;
  };

  // A piece more, or none where there is no room for it: it is read all the same.
  void add(const char* data, size_t bytes) {
    if (!bytes || count_ == kPieces || lines_ + bytes / kLine > kLines) return;
    pieces_[count_++] = {data, data + bytes};
    lines_ += bytes / kLine + 1;
    bytes_ += bytes;
  }
  // The next piece of which some is to be fetched, or null.
  Piece* next() {
    while (at_ < count_ && pieces_[at_].data == pieces_[at_].end) ++at_;
    return at_ < count_ ? &pieces_[at_] : nullptr;
  }
  // The first bytes of it are fetched.
  void take(Piece* piece, size_t bytes) {
    piece->data += bytes;
    bytes_ -= bytes;
  }
  size_t bytes() const { return bytes_; }
  // What is to be fetched each time, for all to be fetched in so many times.
  size_t share(size_t times) const { return (lines_ + times - 1) / times; }
  void fetch(size_t lines) {
    for (Piece* p = next(); lines && p; p = next())
      for (; lines && p->data < p->end; --lines, p->data += std::min<size_t>(kLine, p->end - p->data))
        __builtin_prefetch(p->data, 0, 2);  // to the L2 cache
  }

 private:
  static constexpr int kPieces = 256;
  static constexpr size_t kLine = 64, kLines = 16384;  // 1 MiB

  Piece pieces_[kPieces];
  int count_ = 0, at_ = 0;
  size_t lines_ = 0, bytes_ = 0;
};

}  // namespace quire
