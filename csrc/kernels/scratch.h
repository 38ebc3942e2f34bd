// What both attentions do with the scratch of a task.
#pragma once

#include "kernels.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

// Arrays carved from scratch, one after the other; each begins on a cache line.
class Carver {
 public:
  explicit Carver(void* base) : at_(static_cast<char*>(base)) {}

  template <class T>
  void take(T** array, size_t count) {
    *array = reinterpret_cast<T*>(at_);
    at_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  char* at_;
};

// Sixteen numbers in the format of one side of a product.
QUIRE_INLINE void to_elem(float* out, V16 v) { store(out, v); }
QUIRE_INLINE void to_elem(uint16_t* out, V16 v) { store_bf16(out, v); }

}  // namespace QUIRE_ISA
}  // namespace quire
