// V16 in one register: see vec.h. What the operations of all sets mean is said here.
#pragma once

#include "simd/scalar.h"

namespace quire {
namespace QUIRE_ISA {

struct V16 {
  __m512 v;
};
QUIRE_INLINE V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
QUIRE_INLINE void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
QUIRE_INLINE V16 set1(float x) { return {_mm512_set1_ps(x)}; }
QUIRE_INLINE V16 zero() { return {_mm512_setzero_ps()}; }
QUIRE_INLINE V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
QUIRE_INLINE V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
QUIRE_INLINE V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
QUIRE_INLINE V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
QUIRE_INLINE V16 vmax(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
QUIRE_INLINE V16 vmin(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
QUIRE_INLINE V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Bit i set where i < n.
QUIRE_INLINE __mmask16 below(int n) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(n), lane);
}
// Lanes below n from a, the others from b.
QUIRE_INLINE V16 first_n(int n, V16 a, V16 b) { return {_mm512_mask_blend_ps(below(n), b.v, a.v)}; }
QUIRE_INLINE V16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(below(n), p)}; }
// Bit i set where a[i] > b[i] (false for NaN).
QUIRE_INLINE uint32_t mask_gt(V16 a, V16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
QUIRE_INLINE uint32_t mask_ge(V16 a, V16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// Lane i of e where a[i] >= b[i], else 0.
QUIRE_INLINE V16 keep_ge(V16 e, V16 a, V16 b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), e.v)};
}
// Lane i of a where bit i is set, else of b.
QUIRE_INLINE V16 select_bits(uint32_t bits, V16 a, V16 b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), b.v, a.v)};
}
// Bit i set where a[i] is NaN or infinite.
QUIRE_INLINE uint32_t mask_not_finite(V16 a) { return _mm512_fpclass_ps_mask(a.v, 0x99); }
// Nearest integer (ties to even) and 2^n for integral n in [-126, 127].
QUIRE_INLINE V16 round_even(V16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
QUIRE_INLINE V16 pow2n(V16 n) {
  const __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 23))};
}
QUIRE_INLINE V16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
// Round to nearest even, as float_to_bf16 does for every number: vcvtneps2bf16 alone would flush subnormals.
QUIRE_INLINE void store_bf16(uint16_t* p, V16 a) {
  if (__builtin_expect(_mm512_fpclass_ps_mask(a.v, 0x20) == 0, 1)) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
    return;
  }
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}

// P16: sixteen pairs of bf16. dot(acc, a, b): acc += a.hi*b.hi, then += a.lo*b.lo, lane-wise.
struct P16 {
  __m512i v;
};
QUIRE_INLINE P16 load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE P16 set1_pair(const uint16_t* p) {
  int32_t u;
  std::memcpy(&u, p, 4);
  return {_mm512_set1_epi32(u)};
}
// The lower and the higher number of each pair.
QUIRE_INLINE V16 lows(P16 x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))}; }
QUIRE_INLINE V16 highs(P16 x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
QUIRE_INLINE V16 dot(V16 acc, P16 a, P16 b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }

// I16: sixteen int32 lanes. dot_u8s8(acc, a, b): acc += the four products of unsigned bytes of a and signed bytes of b
// in each lane, exactly.
struct I16 {
  __m512i v;
};
QUIRE_INLINE I16 izero() { return {_mm512_setzero_si512()}; }
QUIRE_INLINE I16 iload(const void* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE void istore(void* p, I16 a) { _mm512_storeu_si512(p, a.v); }
QUIRE_INLINE I16 iset1(const void* p) {
  int32_t u;
  std::memcpy(&u, p, 4);
  return {_mm512_set1_epi32(u)};
}
QUIRE_INLINE I16 isub(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
QUIRE_INLINE V16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
QUIRE_INLINE I16 dot_u8s8(I16 acc, I16 a, I16 b) {
  // GCC 12 copies the sum around the intrinsic at every use and runs out of registers; this keeps it in place.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
  return acc;
}
// Sixteen integral floats in [-128, 127], plus 128, as unsigned bytes.
QUIRE_INLINE void store_u8(uint8_t* p, V16 a) {
  const __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(128));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(i));
}
// The low byte of each of sixteen integral floats, shifted right (arithmetically) by `shift` bits first.
QUIRE_INLINE void store_byte(uint8_t* p, V16 a, int shift) {
  const __m512i i = _mm512_srai_epi32(_mm512_cvtps_epi32(a.v), static_cast<unsigned>(shift));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(i));
}
// store_bf16 for zeros and normal numbers only.
QUIRE_INLINE void store_bf16_normal(uint16_t* p, V16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
// The same for two vectors, one after the other.
QUIRE_INLINE void store_bf16_normal(uint16_t* p, V16 a, V16 b) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
}
// r = x - floor(x), and p * 2^floor(x): 0 where x is -inf, NaN where it is NaN.
QUIRE_INLINE V16 fraction(V16 x) { return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
QUIRE_INLINE V16 scale_by_power(V16 p, V16 x) { return {_mm512_scalef_ps(p.v, x.v)}; }
// (high << 8) + low
QUIRE_INLINE I16 join_bytes(I16 high, I16 low) { return {_mm512_add_epi32(_mm512_slli_epi32(high.v, 8), low.v)}; }
// Sixty-four floats in [0, 65535], rounded to integers, as their high and their low bytes. Integer 16*c + 4*l + j is
// byte 16*l + 4*c + j of either.
QUIRE_INLINE void store_two_bytes(uint8_t* high, uint8_t* low, const V16* x) {
  const __m512i a = _mm512_packus_epi32(_mm512_cvtps_epi32(x[0].v), _mm512_cvtps_epi32(x[1].v));
  const __m512i b = _mm512_packus_epi32(_mm512_cvtps_epi32(x[2].v), _mm512_cvtps_epi32(x[3].v));
  const __m512i mask = _mm512_set1_epi16(0xff);
  _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
  _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask)));
}
// a / b to within two units in the last place, for b in [2^-120, 2^120].
QUIRE_INLINE V16 ratio(V16 a, V16 b) {
  const __m512 r = _mm512_rcp14_ps(b.v);
  return {_mm512_mul_ps(a.v, _mm512_fmadd_ps(_mm512_fnmadd_ps(b.v, r, _mm512_set1_ps(1.0f)), r, r))};
}
QUIRE_INLINE __m256 upper_half(V16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
QUIRE_INLINE __m256 lower_half(V16 a) { return _mm512_castps512_ps256(a.v); }
QUIRE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
QUIRE_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
QUIRE_INLINE void prefetch_write(void* p) { __asm__ volatile("prefetchw %0" : : "m"(*static_cast<char*>(p))); }

}  // namespace QUIRE_ISA
}  // namespace quire
