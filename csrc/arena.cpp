#include "arena.h"

#include <new>
#include <sys/mman.h>

#include "sizes.h"

namespace quire {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;

// Addresses of `size` bytes, from a huge page's start on where `huge`. What the alignment leaves over is given back, so
// that no huge page reaches past the arena.
char* reserve(size_t size, bool huge) {
  const size_t slack = huge ? kHugePage : 0;
  void* map = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(map);
  if (!huge) return start;
  char* aligned = reinterpret_cast<char*>(align_up(reinterpret_cast<size_t>(start), kHugePage));
  const size_t before = static_cast<size_t>(aligned - start), after = slack - before;
  if (before) munmap(start, before);
  if (after) munmap(aligned + size, after);
  return aligned;
}

}  // namespace

void Arena::allocate(size_t bytes) {
  release();
  if (bytes == 0) return;
  const size_t size = align_up(bytes, 4096);
  const bool huge = size >= 4 * kHugePage;
  data_ = reserve(size, huge);
  bytes_ = size;
  if (huge) madvise(data_, size, MADV_HUGEPAGE);
}

// A file that was written in large pieces, or is read through such a mapping, lies in the page cache as huge pages (Linux
// 6.16, ext4 and xfs).
void Arena::map(int fd, size_t bytes) {
  release();
  if (bytes == 0) return;
  const size_t size = align_up(bytes, 4096);
  data_ = reserve(size, size >= kHugePage);
  bytes_ = size;
  if (mmap(data_, size, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == MAP_FAILED) {
    release();
    throw std::bad_alloc();
  }
  madvise(data_, size, MADV_HUGEPAGE);
  read_only_ = true;
}

void Arena::make_writable(const char* begin, size_t bytes) {
  if (!read_only_) return;
  const size_t page = 4096, first = (begin - data_) / page * page, end = align_up(begin - data_ + bytes, page);
  if (mprotect(data_ + first, end - first, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
}

void Arena::use(char* data, size_t bytes) {
  release();
  data_ = data, bytes_ = bytes, borrowed_ = true;
}

void Arena::release() {
  if (data_ && !borrowed_) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  read_only_ = borrowed_ = false;
}

}  // namespace quire
