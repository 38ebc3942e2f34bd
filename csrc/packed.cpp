#include "packed.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unistd.h>

#include "weights.h"

namespace quire {

namespace {

constexpr int kLanes = 8;
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ull;  // odd, so that multiplying loses nothing

inline uint64_t mix(uint64_t state, uint64_t word) {
  const uint64_t x = (state ^ word) * kMultiplier;
  return (x << 31) | (x >> 33);
}

void write_all(int fd, const char* data, size_t bytes, size_t offset) {
  while (bytes) {
    const ssize_t n = pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw std::system_error(n ? errno : EIO, std::generic_category());
    data += n, bytes -= static_cast<size_t>(n), offset += static_cast<size_t>(n);
  }
}

// Touches every huge page of a mapped file while it lives, so that several are on their way from the disk at once. (Asked
// for with MADV_WILLNEED they would come as small pages, and stay so in the page cache.)
class Readers {
 public:
  Readers(const char* data, size_t bytes) {
    for (size_t i = 0; i < kReaders; ++i)
      threads_.emplace_back([=] {
        for (size_t at = i * kPiece; at < bytes && !stop_; at += kReaders * kPiece)
          static_cast<void>(*static_cast<const volatile char*>(data + at));
      });
  }
  ~Readers() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Readers(const Readers&) = delete;
  Readers& operator=(const Readers&) = delete;

 private:
  static constexpr size_t kReaders = 4, kPiece = size_t{2} << 20;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace

uint64_t checksum(const char* data, size_t bytes, uint64_t seed) {
  uint64_t lanes[kLanes], words[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = mix(seed, i);
  for (size_t at = 0; at < bytes; at += sizeof words) {
    std::memcpy(words, data + at, sizeof words);
    for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  uint64_t sum = bytes;
  for (uint64_t lane : lanes) sum = mix(sum, lane);
  return sum ^ (sum >> 29);
}

std::vector<uint64_t> Weights::save(int fd, size_t first, size_t count) {
  const size_t chunks = (arena_.bytes() + kChunkBytes - 1) / kChunkBytes;
  if (first > chunks || count > chunks - first) throw std::invalid_argument("chunks beyond the weights");
  std::vector<uint64_t> sums(count);
  std::atomic<int> failed{0};
  parallel(pool_, static_cast<int>(count), [&](int t) {
    const size_t offset = (first + t) * kChunkBytes, size = std::min(kChunkBytes, arena_.bytes() - offset);
    sums[t] = checksum(arena_.data() + offset, size, first + t);
    try {
      if (!failed) write_all(fd, arena_.data() + offset, size, offset);
    } catch (const std::system_error& error) {
      failed = error.code().value();
    }
  });
  if (failed) throw std::system_error(failed, std::generic_category());
  return sums;
}

bool Weights::map(int fd, const std::vector<uint64_t>& sums) {
  const size_t chunks = (align_up(total_, 4096) + kChunkBytes - 1) / kChunkBytes;
  if (sums.size() != chunks) throw std::invalid_argument("one checksum a chunk");
  arena_.map(fd, total_);
  std::atomic<bool> good{true};
  {
    const Readers readers(arena_.data(), arena_.bytes());
    parallel(pool_, static_cast<int>(chunks), [&](int t) {
      const size_t offset = t * kChunkBytes, size = std::min(kChunkBytes, arena_.bytes() - offset);
      if (good && checksum(arena_.data() + offset, size, static_cast<uint64_t>(t)) != sums[t]) good = false;
    });
  }
  if (!good) allocate();
  return good;
}

}  // namespace quire
