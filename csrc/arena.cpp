#include "arena.h"

#include <new>
#include <sys/mman.h>

namespace quire {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

// A large arena starts on a huge page; what the alignment leaves over is unmapped again, so that no huge page
// reaches past the arena and every resident byte is one that was asked for.
void Arena::allocate(size_t bytes) {
  release();
  if (bytes == 0) return;
  const size_t size = align_up(bytes, 4096);
  const bool huge = size >= 4 * kHugePage;
  const size_t slack = huge ? kHugePage : 0;
  void* map = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(map);
  if (huge) {
    char* aligned = reinterpret_cast<char*>(align_up(reinterpret_cast<size_t>(start), kHugePage));
    const size_t before = static_cast<size_t>(aligned - start), after = slack - before;
    if (before) munmap(start, before);
    if (after) munmap(aligned + size, after);
    start = aligned;
    madvise(start, size, MADV_HUGEPAGE);
  }
  data_ = start;
  bytes_ = size;
}

void Arena::map(int fd, size_t bytes) {
  release();
  if (bytes == 0) return;
  const size_t size = align_up(bytes, 4096);
  void* map = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(map);
  bytes_ = size;
  read_only_ = true;
}

void Arena::release() {
  if (data_) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  read_only_ = false;
}

}  // namespace quire
