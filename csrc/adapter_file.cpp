#include "adapter_file.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <unistd.h>

namespace quire {

namespace {

// Bytes of a file in memory of one's own: it is used again, so that no page of it is touched for the first time twice,
// and small enough to be in the cache when they are packed.
class Piece {
 public:
  const char* read(int file, uint64_t begin, size_t bytes) {
    if (bytes_.size() < bytes) bytes_.resize(bytes);
    for (size_t done = 0; done < bytes;) {
      const ssize_t got = pread(file, bytes_.data() + done, bytes - done, static_cast<off_t>(begin + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0)
        throw std::runtime_error(std::string("an adapter's file: ") +
                                 (got ? std::strerror(errno) : "it became shorter while it was read"));
      done += static_cast<size_t>(got);
    }
    return bytes_.data();
  }

 private:
  std::vector<char> bytes_;
};

}  // namespace

void put_stored(AdapterPool* pool, int slot, int file, const std::vector<StoredPair>& pairs) {
  Piece a, b;
  for (const StoredPair& pair : pairs) {
    const LowRank& l = pool->layout().at(pair.linear);
    if (pair.part < 0 || pair.part >= l.parts() || pair.rank < 1 || pair.rank > l.rank)
      throw std::invalid_argument(pair.linear + ": no such part, or rank");
    const size_t rank = static_cast<size_t>(pair.rank);
    const size_t a_bytes = rank * static_cast<size_t>(l.cols) * dtype_bytes(pair.a_dtype);
    const size_t b_bytes = rank * static_cast<size_t>(l.rows(pair.part)) * dtype_bytes(pair.b_dtype);
    const Matrix first{a.read(file, pair.a, a_bytes), pair.a_dtype, 1};
    const Matrix second{b.read(file, pair.b, b_bytes), pair.b_dtype, pair.scale};
    pool->put(slot, pair.linear, pair.part, first, second, nullptr, pair.rank);
  }
}

}  // namespace quire
