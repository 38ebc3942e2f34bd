// Units of equal bytes in pages of a slab, in the order of a page table. No unit lies in two pages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// A place among the pages of one owner.
struct PagePlace {
  int32_t page = 0;
  uint32_t offset = 0;
};

// The last bytes of each page hold no unit, so that a whole vector can be read at the end of one.
struct PageSize {
  static constexpr uint32_t kReadBehind = 64;
  uint32_t bytes = 64 << 10;
  uint32_t capacity() const { return bytes - kReadBehind; }
};

// A place behind `count` units that begin at `at`.
inline PagePlace behind(PageSize page, PagePlace at, uint32_t unit, uint32_t count) {
  const uint32_t left = (page.capacity() - at.offset) / unit, each = page.capacity() / unit;
  if (count <= left) return {at.page, at.offset + count * unit};
  const uint32_t more = count - left - 1;
  return {at.page + 1 + static_cast<int32_t>(more / each), (more % each + 1) * unit};
}

struct PagedUnits {
  char* slab;
  const int32_t* pages;  // numbers of the owner's pages in the slab
  PageSize page;
  PagePlace at;
  uint32_t unit;

  // Neighbours from unit i on.
  struct Run {
    char* data;
    int count;
  };
  Run from(int i) const {
    const uint32_t wanted = static_cast<uint32_t>(i), left = (page.capacity() - at.offset) / unit;
    if (wanted < left) return run(at.page, at.offset + wanted * unit, left - wanted);
    const uint32_t each = page.capacity() / unit, more = wanted - left;
    return run(at.page + 1 + static_cast<int32_t>(more / each), more % each * unit, each - more % each);
  }

 private:
  Run run(int32_t number, uint32_t offset, uint32_t count) const {
    return {slab + static_cast<size_t>(pages[number]) * page.bytes + offset, static_cast<int>(count)};
  }
};

}  // namespace quire
