// What weights in groups need beside V16: nibbles, dot products with unsigned weights, and stored scale formats.
#pragma once

#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

// load_u8: sixteen bytes as floats. iset: one int32 in all lanes. fields: of each byte the bits of a mask, after a shift to
// the right (to the left when below zero). lane_butterflies: see rotate, for d = 1, 2, 4, 8. four_times: each of sixteen bytes four times. dot_u5s8: as dot_u8s8
// for bytes below 32. to_float_shifted: lanes times 2^n, below 2^31, rounded once. to_int: to nearest, ties to even.
// store_s8: numbers in [-128, 127]. vmax_bits, max_lane_bits: the maximum of magnitudes by their bits, in which a NaN is
// above infinity and so is never lost.
#if QUIRE_AVX512

QUIRE_INLINE V16 load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
QUIRE_INLINE I16 iset(int32_t x) { return {_mm512_set1_epi32(x)}; }
template <int kShift, int kMask>
QUIRE_INLINE I16 fields(I16 a) {
  const __m512i x = kShift > 0 ? _mm512_srli_epi16(a.v, kShift > 0 ? kShift : 0)
                               : _mm512_slli_epi16(a.v, kShift < 0 ? -kShift : 0);
  return {_mm512_and_si512(kShift ? x : a.v, _mm512_set1_epi8(kMask))};
}
QUIRE_INLINE I16 either(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
QUIRE_INLINE I16 four_times(const uint8_t* p) {
  const __m512i each = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_shuffle_epi8(each, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0))};
}
QUIRE_INLINE I16 iadd(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
QUIRE_INLINE V16 to_float_shifted(I16 a, const int32_t* n) {
  return {_mm512_cvtepi32_ps(_mm512_sllv_epi32(a.v, _mm512_set1_epi32(*n)))};
}
QUIRE_INLINE I16 dot_u5s8(I16 acc, I16 w, I16 x) { return dot_u8s8(acc, w, x); }
QUIRE_INLINE I16 to_int(V16 a) { return {_mm512_cvtps_epi32(a.v)}; }
QUIRE_INLINE V16 magnitude(V16 a) { return {_mm512_abs_ps(a.v)}; }
QUIRE_INLINE V16 vmax_bits(V16 a, V16 b) {
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
QUIRE_INLINE int32_t max_lane_bits(V16 a) { return _mm512_reduce_max_epi32(_mm512_castps_si512(a.v)); }
QUIRE_INLINE void store_s8(int8_t* p, I16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

QUIRE_INLINE V16 lane_butterflies(V16 x) {
  const auto step = [](__m512 v, __m512 other, __mmask16 high) {
    return _mm512_mask_sub_ps(_mm512_add_ps(v, other), high, other, v);
  };
  __m512 v = x.v;
  v = step(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
  v = step(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
  v = step(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
  return {step(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00)};
}

#elif QUIRE_AVX2

QUIRE_INLINE V16 load_u8(const uint8_t* p) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8)))};
}
QUIRE_INLINE I16 iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
template <int kShift, int kMask>
QUIRE_INLINE __m256i fields8(__m256i x) {
  if (kShift > 0) x = _mm256_srli_epi16(x, kShift > 0 ? kShift : 0);
  if (kShift < 0) x = _mm256_slli_epi16(x, kShift < 0 ? -kShift : 0);
  return _mm256_and_si256(x, _mm256_set1_epi8(kMask));
}
template <int kShift, int kMask>
QUIRE_INLINE I16 fields(I16 x) {
  return {fields8<kShift, kMask>(x.a), fields8<kShift, kMask>(x.b)};
}
QUIRE_INLINE I16 either(I16 x, I16 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
QUIRE_INLINE I16 four_times(const uint8_t* p) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i times = _mm256_set1_epi32(0x01010101);
  return {_mm256_mullo_epi32(_mm256_cvtepu8_epi32(b), times),
          _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8)), times)};
}
QUIRE_INLINE I16 iadd(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
QUIRE_INLINE V16 to_float_shifted(I16 x, const int32_t* n) {
  const __m256i bits = _mm256_set1_epi32(*n);
  return {_mm256_cvtepi32_ps(_mm256_sllv_epi32(x.a, bits)), _mm256_cvtepi32_ps(_mm256_sllv_epi32(x.b, bits))};
}
// Two products of 31 and 127 cannot saturate pmaddubsw.
QUIRE_INLINE __m256i dot8_u5(__m256i acc, __m256i w, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
QUIRE_INLINE I16 dot_u5s8(I16 acc, I16 w, I16 x) { return {dot8_u5(acc.a, w.a, x.a), dot8_u5(acc.b, w.b, x.b)}; }
// Codes less 128 are signed: their magnitudes times inputs of their signs. Two products of 128 and 127 cannot saturate.
constexpr bool kSignedBytes = true;
struct ByteCodes {
  I16 code, magnitude;
};
QUIRE_INLINE ByteCodes byte_codes(I16 w) {
  const __m256i m = _mm256_set1_epi8(-128);
  const I16 code = {_mm256_xor_si256(w.a, m), _mm256_xor_si256(w.b, m)};
  return {code, {_mm256_abs_epi8(code.a), _mm256_abs_epi8(code.b)}};
}
QUIRE_INLINE I16 dot_bytes(I16 acc, const ByteCodes& w, I16 x) {
  return {dot8_u5(acc.a, w.magnitude.a, _mm256_sign_epi8(x.a, w.code.a)),
          dot8_u5(acc.b, w.magnitude.b, _mm256_sign_epi8(x.b, w.code.b))};
}
QUIRE_INLINE I16 to_int(V16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
QUIRE_INLINE V16 magnitude(V16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
QUIRE_INLINE __m256i max8_bits(__m256 x, __m256 y) {
  return _mm256_max_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y));
}
QUIRE_INLINE V16 vmax_bits(V16 x, V16 y) {
  return {_mm256_castsi256_ps(max8_bits(x.a, y.a)), _mm256_castsi256_ps(max8_bits(x.b, y.b))};
}
QUIRE_INLINE int32_t max_lane_bits(V16 x) {
  const __m256i e = max8_bits(x.a, x.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
QUIRE_INLINE void store_s8(int8_t* p, I16 x) { store_low_bytes(reinterpret_cast<uint8_t*>(p), x); }

QUIRE_INLINE V16 lane_butterflies(V16 x) {
  const auto step = [](__m256 v, __m256 other, auto blend) {
    return blend(_mm256_add_ps(v, other), _mm256_sub_ps(other, v));
  };
  const auto within = [&](__m256 v) {
    v = step(v, _mm256_permute_ps(v, 0xb1), [](__m256 a, __m256 b) { return _mm256_blend_ps(a, b, 0xaa); });
    v = step(v, _mm256_permute_ps(v, 0x4e), [](__m256 a, __m256 b) { return _mm256_blend_ps(a, b, 0xcc); });
    return step(v, _mm256_permute2f128_ps(v, v, 1), [](__m256 a, __m256 b) { return _mm256_blend_ps(a, b, 0xf0); });
  };
  const __m256 a = within(x.a), b = within(x.b);
  return {_mm256_add_ps(a, b), _mm256_sub_ps(a, b)};
}

#else  // QUIRE_GENERIC

QUIRE_INLINE V16 load_u8(const uint8_t* p) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = static_cast<float>(p[i]);
  return load(t);
}
QUIRE_INLINE I16 iset(int32_t x) {
  const I4 f = {x, x, x, x};
  return {f, f, f, f};
}
template <int kShift, int kMask>
QUIRE_INLINE I4 fields4(I4 x) {
  const U4 u = (U4)x;
  return (I4)(kShift > 0 ? u >> (kShift > 0 ? kShift : 0) : u << (kShift < 0 ? -kShift : 0)) & (kMask * 0x01010101);
}
template <int kShift, int kMask>
QUIRE_INLINE I16 fields(I16 x) {
  return {fields4<kShift, kMask>(x.a), fields4<kShift, kMask>(x.b), fields4<kShift, kMask>(x.c),
          fields4<kShift, kMask>(x.d)};
}
QUIRE_INLINE I16 either(I16 x, I16 y) { return {x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d}; }
QUIRE_INLINE I16 four_times(const uint8_t* p) {
  int32_t t[16];
  for (int i = 0; i < 16; ++i) t[i] = p[i] * 0x01010101;
  return iload(t);
}
QUIRE_INLINE I16 iadd(I16 x, I16 y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
// No vector shift by a variable in SSE2; a power of two changes no bit of the rounding.
QUIRE_INLINE V16 to_float_shifted(I16 x, const int32_t* n) {
  return mul(to_float(x), set1(static_cast<float>(1 << *n)));
}
QUIRE_INLINE I16 dot_u5s8(I16 acc, I16 w, I16 x) { return dot_u8s8(acc, w, x); }
QUIRE_INLINE I16 to_int(V16 x) {
  float t[16];
  int32_t n[16];
  store(t, round_even(x));
  for (int i = 0; i < 16; ++i) n[i] = static_cast<int32_t>(t[i]);
  return iload(n);
}
QUIRE_INLINE F4 magnitude4(F4 x) { return (F4)((I4)x & 0x7fffffff); }
QUIRE_INLINE V16 magnitude(V16 x) { return {magnitude4(x.a), magnitude4(x.b), magnitude4(x.c), magnitude4(x.d)}; }
QUIRE_INLINE F4 max4_bits(F4 x, F4 y) { return blend4((I4)x > (I4)y, x, y); }
QUIRE_INLINE V16 vmax_bits(V16 x, V16 y) {
  return {max4_bits(x.a, y.a), max4_bits(x.b, y.b), max4_bits(x.c, y.c), max4_bits(x.d, y.d)};
}
QUIRE_INLINE int32_t max_lane_bits(V16 x) {
  const I4 most = (I4)max4_bits(max4_bits(x.a, x.b), max4_bits(x.c, x.d));
  const int32_t low = most[0] > most[1] ? most[0] : most[1], high = most[2] > most[3] ? most[2] : most[3];
  return low > high ? low : high;
}
QUIRE_INLINE void store_s8(int8_t* p, I16 x) {
  int32_t t[16];
  istore(t, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(t[i]);
}
QUIRE_INLINE V16 lane_butterflies(V16 x) {
  float t[16];
  store(t, x);
  for (int d = 1; d < 16; d *= 2)
    for (int i = 0; i < 16; ++i)
      if (!(i & d)) {
        const float a = t[i], b = t[i + d];
        t[i] = a + b, t[i + d] = a - b;
      }
  return load(t);
}

#endif

// Eight-bit codes as the dot product takes them. kSignedBytes: it takes 128 off each.
#if !QUIRE_AVX2
constexpr bool kSignedBytes = false;
struct ByteCodes {
  I16 code;
};
QUIRE_INLINE ByteCodes byte_codes(I16 w) { return {w}; }
QUIRE_INLINE I16 dot_bytes(I16 acc, const ByteCodes& w, I16 x) { return dot_u8s8(acc, w.code, x); }
#endif

// Codes of few bits, see GroupFormat: a unit is what a few lines of bytes hold together.
constexpr int unit_features(int bits) { return bits == 3 ? 32 : 32 / bits; }
constexpr int unit_bytes(int bits) { return bits == 3 ? 3 * 256 : 256; }  // of a panel

// The codes of features 4 kFour … 4 kFour + 3 of sixteen columns, whose first bytes of the unit are at p.
template <int kBits, int kFour>
QUIRE_INLINE I16 codes_of_four(const uint8_t* p) {
  if constexpr (kBits != 3) return fields<kFour * kBits, (1 << kBits) - 1>(iload(p));
  return either(fields<kFour % 4 * 2, 3>(iload(p + kFour / 4 * 256)), fields<kFour - 2, 4>(iload(p + 512)));
}

// A group of `vectors` times sixteen numbers multiplied by the Hadamard matrix of +1 and -1: number i and number i + d
// become their sum and their difference, for d = 1, 2, 4, ... half the group (quant.groups.rotate).
QUIRE_INLINE void rotate(V16* x, int vectors) {
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) x[v] = lane_butterflies(x[v]);
#pragma GCC unroll 3
  for (int d = 1; d < vectors; d *= 2)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v)
      if (!(v & d)) {
        const V16 a = x[v], b = x[v + d];
        x[v] = add(a, b), x[v + d] = sub(a, b);
      }
}
// Twice a rotation multiplies by the group's size. Inputs, and what was stored, take the first factor after it, weights
// before they are rounded the second: powers of two whose product is one over the size.
QUIRE_INLINE float input_share(int vectors) { return vectors >= 8 ? 0.0625f : vectors >= 2 ? 0.125f : 0.25f; }
QUIRE_INLINE float weight_share(int vectors) { return vectors >= 4 ? 0.125f : 0.25f; }

}  // namespace QUIRE_ISA
}  // namespace quire
