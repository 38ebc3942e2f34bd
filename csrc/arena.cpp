#include "arena.h"

#include <new>
#include <sys/mman.h>

namespace quire {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

void Arena::allocate(size_t bytes) {
  release();
  if (bytes == 0) return;
  // Whole huge pages only when they cost little: a small arena stays on small pages.
  const size_t size = align_up(bytes, bytes >= 8 * kHugePage ? kHugePage : 4096);
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  if (size >= 8 * kHugePage) madvise(p, size, MADV_HUGEPAGE);
  data_ = static_cast<char*>(p);
  bytes_ = size;
}

void Arena::release() {
  if (data_) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace quire
