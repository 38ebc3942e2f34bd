// Stores of sums in the format of what reads them.
#pragma once

#include "kernels.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

// The first n of v (all sixteen when n is more) as float32 or bfloat16 from element i of `out` on.
QUIRE_INLINE void put(void* out, DType type, size_t i, V16 v, int n) {
  if (type == DType::f32) {
    float* p = static_cast<float*>(out) + i;
    n >= 16 ? store(p, v) : store_n(p, v, n);
  } else {
    uint16_t* p = static_cast<uint16_t*>(out) + i;
    n >= 16 ? store_bf16(p, v) : store_bf16_n(p, v, n);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
