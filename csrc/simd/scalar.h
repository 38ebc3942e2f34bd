// Numbers and their bits, one at a time.
#pragma once

#include "simd/isa.h"

#include <cstdint>
#include <cstring>

namespace quire {
namespace QUIRE_ISA {

QUIRE_INLINE float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
QUIRE_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
QUIRE_INLINE float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }
// Round to nearest even; a NaN stays a (quiet) NaN.
QUIRE_INLINE uint16_t float_to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace QUIRE_ISA
}  // namespace quire
