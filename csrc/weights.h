// The parameters of a program by name: linear weights packed into panels, tables and vectors, in one arena.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "pool.h"
#include "sizes.h"

namespace quire {

// A parameter, as it is declared. Throws std::invalid_argument for formats that do not go together.
struct Param {
  // `matrices` matrices of `rows` rows, each padded to whole panels.
  static Param panels(int matrices, int rows, int cols, DType dtype);
  static Param grouped(int matrices, int rows, int cols, const GroupFormat& format);
  static Param table(int rows, int cols, DType dtype);
  static Param vectors(int matrices, int rows);

  enum class Layout { panels, rows, vector } layout;
  int rows, cols;  // of panels: every matrix padded to whole ones
  DType dtype;
  GroupFormat groups;
  int matrices, matrix_rows;  // matrices of equal rows, one after the other; rows of one without padding
  const Arena* arena = nullptr;
  size_t offset = 0;

  char* data() const { return arena->data() + offset; }
  const float* vector() const { return reinterpret_cast<const float*>(data()); }
  size_t panel_bytes() const {
    const size_t size = dtype_bytes(dtype);
    if (dtype == DType::bf16_24) return static_cast<size_t>(cols) / 4 * kFourBytes;
    return groups.bits ? groups.panel_bytes(cols) : align_up(cols, 4 / size) * kPanel * size;
  }
  int matrix_panels() const { return ceil_div(matrix_rows, kPanel); }
  size_t bytes() const;  // in the arena
};

// Rows [begin, end) of the `rows` rows of src that go to a parameter from `row_offset` on, padding between matrices counted.
void put_float_rows(const Kernels& kernels, const Param& p, int row_offset, const void* src, DType src_dtype, int begin,
                    int end, int rows);

class Weights {
 public:
  Weights(const Kernels& kernels, ThreadPool& pool) : kernels_(kernels), pool_(pool) {}

  // ---- declaring, in the order in which they lie in the arena ---------------------------------------------------
  void add(const std::string& name, const Param& param);
  void allocate() { arena_.allocate(total_); }
  // A parameter of other weights, which outlive these, under its name there.
  void borrow(const Weights& lender, const std::string& name) { declare(name, lender.at(name)); }

  // ---- filling --------------------------------------------------------------------------------------------------
  // Index of the first NaN or infinity among the source's elements, or -1.
  int64_t put(const std::string& name, int row_offset, const void* src, DType src_dtype, int rows, int cols);
  // Rows of a weight in groups that come quantized; the arrays are those of PackCodesTask.
  void put_codes(const std::string& name, int row_offset, int rows, const PackCodesTask& arrays);

  // Write chunks [first, first + count) of the packed weights to their place in a file; their checksums.
  // Throws std::system_error when the file cannot be written.
  std::vector<uint64_t> save(int fd, size_t first, size_t count);
  // Take the weights from a file that `save` wrote, instead of `put`: mapped, and every checksum compared.
  // False, with the weights empty as before, when one differs. The file holds at least `bytes()`.
  bool map(int fd, const std::vector<uint64_t>& sums);

  // One of a parameter's matrices as it is packed, and its bytes. Throws std::invalid_argument for a name or number that
  // does not exist.
  std::pair<const char*, size_t> matrix(const std::string& name, int number) const;
  // Put another in its place, which is packed as this one. Weights that are mapped get pages of their own for it.
  void replace_matrix(const std::string& name, int number, const void* packed);

  // Throws std::invalid_argument for a name that was not declared.
  const Param& at(const std::string& name) const;
  const Arena& arena() const { return arena_; }

 private:
  void declare(const std::string& name, const Param& param);
  template <class F>
  void pack_panels(int row_offset, int rows, F f);
  const Param& taking(const std::string& name, int row_offset, int rows, int cols) const;
  static int packed_row(const Param& p, int row);

  const Kernels& kernels_;
  ThreadPool& pool_;
  Arena arena_;
  size_t total_ = 0;
  std::deque<Param> params_;  // addresses stay
  std::unordered_map<std::string, const Param*> by_name_;
};

}  // namespace quire
