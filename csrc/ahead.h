// Memory that is read after a kernel's work, to be on its way meanwhile.
#pragma once

#include <algorithm>
#include <cstddef>

namespace quire {

// Pieces from anywhere. A kernel fetches a share of their cache lines before each of its tiles: all of them at once would fill
// the queues of the memory that the tiles wait for.
class Ahead {
 public:
  // A piece more, or none where there is no room for it: it is read all the same.
  void add(const char* data, size_t bytes) {
    if (count_ == kPieces || lines_ + bytes / kLine > kLines) return;
    pieces_[count_++] = {data, data + bytes};
    lines_ += bytes / kLine + 1;
  }
  // What is to be fetched each time, for all to be fetched in so many times.
  size_t share(size_t times) const { return (lines_ + times - 1) / times; }
  void fetch(size_t lines) {
    for (; lines && at_ < count_; ++at_) {
      Piece& p = pieces_[at_];
      for (; lines && p.data < p.end; --lines, p.data += kLine) __builtin_prefetch(p.data, 0, 2);  // to the L2 cache
      if (p.data < p.end) return;
    }
  }

 private:
  static constexpr int kPieces = 128;
  static constexpr size_t kLine = 64, kLines = 4096;  // 256 KiB
  struct Piece {
    const char *data, *end;
  };

  Piece pieces_[kPieces];
  int count_ = 0, at_ = 0;
  size_t lines_ = 0;
};

}  // namespace quire
