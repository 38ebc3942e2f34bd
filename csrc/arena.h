// Anonymous memory in one piece, huge pages where the kernel gives them; zero until touched.
#pragma once

#include <cstddef>

namespace quire {

class Arena {
 public:
  Arena() = default;
  ~Arena() { release(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void allocate(size_t bytes);  // throws std::bad_alloc
  void release();
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

constexpr size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace quire
