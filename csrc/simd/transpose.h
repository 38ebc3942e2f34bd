// Transposing 4-byte units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/isa.h"

namespace quire {
namespace QUIRE_ISA {

using U32x4 = uint32_t __attribute__((vector_size(16)));

// Four rows of four units, `from_pitch` apart, to four rows of the columns, `to_pitch` apart.
QUIRE_INLINE void transpose4(const uint32_t* from, size_t from_pitch, uint32_t* to, size_t to_pitch) {
  U32x4 r[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], from + i * from_pitch, 16);
  const U32x4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const U32x4 c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  const U32x4 out[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                        __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_pitch, &out[i], 16);
}

}  // namespace QUIRE_ISA
}  // namespace quire
