// Memory in one piece: anonymous (huge pages where the kernel gives them, zero until touched), or a mapped file.
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
  // The first `bytes` of a file, read-only. The file must be that long and must not shrink.
  void map(int fd, size_t bytes);
  // Memory of another owner, who outlives the arena.
  void use(char* data, size_t bytes);
  void release();
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Bytes of a mapped file may be written from now on, in memory of this process: the file does not change. Throws
  // std::bad_alloc.
  void make_writable(const char* begin, size_t bytes);
  bool read_only() const { return read_only_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
  bool read_only_ = false, borrowed_ = false;
};

}  // namespace quire
