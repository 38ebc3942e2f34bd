// float16: to and from float32, one number or sixteen.
#pragma once

#include "simd/vec.h"

namespace quire {
namespace QUIRE_ISA {

QUIRE_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exp = (h >> 10) & 31u, man = h & 0x3ffu;
  if (exp == 31) return bits_to_float(sign | 0x7f800000u | (man << 13));
  if (exp) return bits_to_float(sign | ((exp + 112) << 23) | (man << 13));
  const float tiny = static_cast<float>(man) * 5.9604644775390625e-08f;  // man * 2^-24, exact
  return (h & 0x8000u) ? -tiny : tiny;
}
// Round to nearest even; beyond float16's largest number the largest number.
QUIRE_INLINE uint16_t float_to_half(float f) {
  const uint32_t bits = float_to_bits(f), sign = (bits >> 16) & 0x8000u;
  uint32_t u = bits & 0x7fffffffu;
  if (u > 0x477fe000u) return static_cast<uint16_t>(sign | 0x7bffu);  // 65504
  if (u < 0x38800000u) {  // below 2^-14: whole multiples of 2^-24, rounded by an addition to 0.5
    const float shifted = bits_to_float(u) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  u += 0xfffu + ((u >> 13) & 1u);
  u = (u - 0x38000000u) >> 13;
  return static_cast<uint16_t>(sign | (u > 0x7bffu ? 0x7bffu : u));
}

// Sixteen float16: every number exactly; rounded to nearest even, infinite from 65520 on.
#if QUIRE_AVX512
QUIRE_INLINE V16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
QUIRE_INLINE void store_half(uint16_t* p, V16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
#elif QUIRE_AVX2
QUIRE_INLINE V16 load_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
QUIRE_INLINE void store_half(uint16_t* p, V16 x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
#else  // QUIRE_GENERIC
// Float16 in the upper halves: exponent and mantissa are moved into place, then scaled by 2^112, which is right for
// subnormals too. The exponents of infinities and NaNs stay all ones.
QUIRE_INLINE F4 half4(U4 u) {
  const F4 scaled = (F4)((U4)((I4)u >> 3) & 0x8fffffffu) * 5.192296858534828e33f;
  return (F4)((U4)scaled | ((U4)((u & 0x7c000000u) == 0x7c000000u) & 0x7f800000u));
}
QUIRE_INLINE V16 load_half(const uint16_t* p) {
  typedef uint16_t H8 __attribute__((vector_size(16)));
  const H8 none = {};
  H8 low, high;
  std::memcpy(&low, p, 16);
  std::memcpy(&high, p + 8, 16);
  const auto first = [&](H8 h) { return (U4)__builtin_shufflevector(none, h, 0, 8, 1, 9, 2, 10, 3, 11); };
  const auto second = [&](H8 h) { return (U4)__builtin_shufflevector(none, h, 4, 12, 5, 13, 6, 14, 7, 15); };
  return {half4(first(low)), half4(second(low)), half4(first(high)), half4(second(high))};
}
QUIRE_INLINE void store_half(uint16_t* p, V16 x) {
  float t[16];
  store(t, x);
  for (int i = 0; i < 16; ++i) {
    const uint32_t u = float_to_bits(t[i]), size = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
    p[i] = size < 0x477ff000u   ? float_to_half(t[i])  // 65520
           : size > 0x7f800000u ? static_cast<uint16_t>(sign | 0x7e00u | (u >> 13 & 0x3ffu))
                                : static_cast<uint16_t>(sign | 0x7c00u);
  }
}
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
