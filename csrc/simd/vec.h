// V16: sixteen float32 lanes, the unit every kernel is written in.
//
// avx512: one register. avx2: two. baseline: a GCC vector that the compiler lowers to what the target has.
// Operations are lane-wise and rounded once; fma is fused on avx2 and avx512 and two roundings on baseline.
// Horizontal sums use one fixed tree, so a result depends on the instruction set and on nothing else.
#pragma once

#include "simd/isa.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define QUIRE_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_AVX2 1
#include <immintrin.h>
#else
#define QUIRE_GENERIC 1
#endif

#include <cmath>
#include <cstring>

namespace quire {
namespace QUIRE_ISA {

// ---- scalar conversions -----------------------------------------------------------------------------------

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

// ---- V16 ----------------------------------------------------------------------------------------------------

#if QUIRE_AVX512

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
  return {_mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
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
QUIRE_INLINE V16 dot(V16 acc, P16 a, P16 b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
}

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
// The same for two vectors, one behind the other.
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

#elif QUIRE_AVX2

struct V16 {
  __m256 a, b;
};
QUIRE_INLINE V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QUIRE_INLINE void store(float* p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
QUIRE_INLINE V16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QUIRE_INLINE V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
#define QUIRE_BINARY(name, intrinsic) \
  QUIRE_INLINE V16 name(V16 x, V16 y) { return {intrinsic(x.a, y.a), intrinsic(x.b, y.b)}; }
QUIRE_BINARY(add, _mm256_add_ps)
QUIRE_BINARY(sub, _mm256_sub_ps)
QUIRE_BINARY(mul, _mm256_mul_ps)
QUIRE_BINARY(div, _mm256_div_ps)
QUIRE_BINARY(vmax, _mm256_max_ps)
QUIRE_BINARY(vmin, _mm256_min_ps)
#undef QUIRE_BINARY
QUIRE_INLINE V16 fma(V16 x, V16 y, V16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
QUIRE_INLINE V16 first_n(int n, V16 x, V16 y) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i m0 = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  const __m256i m1 = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m0)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m1))};
}
QUIRE_INLINE V16 load_n(const float* p, int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)),
          n > 8 ? _mm256_maskload_ps(p + 8, _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane))
                : _mm256_setzero_ps()};
}
QUIRE_INLINE uint32_t mask_gt(V16 x, V16 y) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))) << 8;
}
QUIRE_INLINE uint32_t mask_ge(V16 x, V16 y) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))) << 8;
}
QUIRE_INLINE V16 keep_ge(V16 e, V16 x, V16 y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), e.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ), e.b)};
}
QUIRE_INLINE V16 select_bits(uint32_t bits, V16 x, V16 y) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i m0 = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
  const __m256i m1 = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits >> 8)), lane);
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(m0, lane))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(_mm256_cmpeq_epi32(m1, lane)))};
}
QUIRE_INLINE uint32_t mask_not_finite(V16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f), inf = _mm256_set1_ps(INFINITY);
  // not (|x| < inf): true for infinities and NaN
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_andnot_ps(sign, x.a), inf, _CMP_NLT_UQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_andnot_ps(sign, x.b), inf, _CMP_NLT_UQ))) << 8;
}
QUIRE_INLINE V16 round_even(V16 x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
QUIRE_INLINE __m256 pow2n8(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
QUIRE_INLINE V16 pow2n(V16 n) { return {pow2n8(n.a), pow2n8(n.b)}; }
QUIRE_INLINE __m256 load_bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
QUIRE_INLINE V16 load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
QUIRE_INLINE __m256i round_bf16_8(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_srli_epi32(
      _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(quiet), nan)), 16);
}
QUIRE_INLINE void store_bf16(uint16_t* p, V16 x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16_8(x.a), round_bf16_8(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
struct P16 {
  __m256i a, b;
};
QUIRE_INLINE P16 load_pairs(const uint16_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
QUIRE_INLINE P16 set1_pair(const uint16_t* p) {
  int32_t u;
  std::memcpy(&u, p, 4);
  const __m256i x = _mm256_set1_epi32(u);
  return {x, x};
}
QUIRE_INLINE __m256 pair_hi(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
QUIRE_INLINE __m256 pair_lo(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
QUIRE_INLINE V16 dot(V16 acc, P16 x, P16 y) {
  acc.a = _mm256_fmadd_ps(pair_hi(x.a), pair_hi(y.a), acc.a);
  acc.b = _mm256_fmadd_ps(pair_hi(x.b), pair_hi(y.b), acc.b);
  acc.a = _mm256_fmadd_ps(pair_lo(x.a), pair_lo(y.a), acc.a);
  acc.b = _mm256_fmadd_ps(pair_lo(x.b), pair_lo(y.b), acc.b);
  return acc;
}

struct I16 {
  __m256i a, b;
};
QUIRE_INLINE I16 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
QUIRE_INLINE I16 iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
QUIRE_INLINE void istore(void* p, I16 x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
QUIRE_INLINE I16 iset1(const void* p) {
  int32_t u;
  std::memcpy(&u, p, 4);
  const __m256i x = _mm256_set1_epi32(u);
  return {x, x};
}
QUIRE_INLINE I16 isub(I16 x, I16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
QUIRE_INLINE V16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// Even and odd bytes are widened to 16 bits first: pmaddubsw would saturate.
QUIRE_INLINE __m256i dot8(__m256i acc, __m256i x, __m256i y) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
QUIRE_INLINE I16 dot_u8s8(I16 acc, I16 x, I16 y) { return {dot8(acc.a, x.a, y.a), dot8(acc.b, x.b, y.b)}; }
QUIRE_INLINE void store_u8(uint8_t* p, V16 x) {
  int32_t t[16];
  istore(t, {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)});
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(t[i] + 128);
}
QUIRE_INLINE void store_byte(uint8_t* p, V16 x, int shift) {
  int32_t t[16];
  istore(t, {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)});
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(t[i] >> shift);
}
QUIRE_INLINE void store_bf16_normal(uint16_t* p, V16 x) { store_bf16(p, x); }
QUIRE_INLINE V16 floor16(V16 x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
// Lane i of e unless x[i] < y[i], else 0.
QUIRE_INLINE V16 drop_lt(V16 e, V16 x, V16 y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), e.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ), e.b)};
}
QUIRE_INLINE __m256i join8(__m256i high, __m256i low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low); }
QUIRE_INLINE I16 join_bytes(I16 high, I16 low) { return {join8(high.a, low.a), join8(high.b, low.b)}; }
QUIRE_INLINE I16 to_ints(V16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
QUIRE_INLINE __m256 upper_half(V16 x) { return x.b; }
QUIRE_INLINE __m256 lower_half(V16 x) { return x.a; }
QUIRE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
QUIRE_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
QUIRE_INLINE void prefetch_write(void* p) { __asm__ volatile("prefetchw %0" : : "m"(*static_cast<char*>(p))); }

#else  // QUIRE_GENERIC

// Four vectors of four lanes: what SSE2 and NEON have registers for. (GCC takes wider generic vectors apart lane by
// lane as soon as a comparison is involved.)
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
struct V16 {
  F4 a, b, c, d;
};
// One expression for each quarter m of a vector; `i` is the quarter's number.
#define QUIRE_QUARTERS(e) {e(a, 0), e(b, 1), e(c, 2), e(d, 3)}
QUIRE_INLINE V16 load(const float* p) {
  V16 r;
  std::memcpy(&r, p, 64);
  return r;
}
QUIRE_INLINE void store(float* p, V16 x) { std::memcpy(p, &x, 64); }
QUIRE_INLINE V16 set1(float x) {
  const F4 f = {x, x, x, x};
  return {f, f, f, f};
}
QUIRE_INLINE V16 zero() { return set1(0.0f); }
// Bits of x where the lane of m is set, else of y.
QUIRE_INLINE F4 blend4(I4 m, F4 x, F4 y) { return (F4)(((I4)x & m) | ((I4)y & ~m)); }
#define QUIRE_ADD(m, i) x.m + y.m
#define QUIRE_SUB(m, i) x.m - y.m
#define QUIRE_MUL(m, i) x.m * y.m
#define QUIRE_DIV(m, i) x.m / y.m
#define QUIRE_MAX(m, i) blend4(x.m > y.m, x.m, y.m)
#define QUIRE_MIN(m, i) blend4(x.m < y.m, x.m, y.m)
#define QUIRE_FMA(m, i) x.m * y.m + z.m
QUIRE_INLINE V16 add(V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_ADD); }
QUIRE_INLINE V16 sub(V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_SUB); }
QUIRE_INLINE V16 mul(V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_MUL); }
QUIRE_INLINE V16 div(V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_DIV); }
QUIRE_INLINE V16 vmax(V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_MAX); }
QUIRE_INLINE V16 vmin(V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_MIN); }
QUIRE_INLINE V16 fma(V16 x, V16 y, V16 z) { return QUIRE_QUARTERS(QUIRE_FMA); }
QUIRE_INLINE I4 lanes(int quarter) {
  const I4 first = {0, 1, 2, 3};
  return first + 4 * quarter;
}
#define QUIRE_FIRST(m, i) blend4(lanes(i) < n, x.m, y.m)
QUIRE_INLINE V16 first_n(int n, V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_FIRST); }
QUIRE_INLINE V16 load_n(const float* p, int n) {
  V16 r = zero();
  if (n > 0) std::memcpy(&r, p, static_cast<size_t>(n < 16 ? n : 16) * 4);
  return r;
}
QUIRE_INLINE uint32_t mask4(I4 m) {
  const I4 weight = {1, 2, 4, 8};
  const I4 w = m & weight;
  return static_cast<uint32_t>(w[0] | w[1] | w[2] | w[3]);
}
QUIRE_INLINE uint32_t mask16(I4 a, I4 b, I4 c, I4 d) {
  return mask4(a) | mask4(b) << 4 | mask4(c) << 8 | mask4(d) << 12;
}
QUIRE_INLINE uint32_t mask_gt(V16 x, V16 y) { return mask16(x.a > y.a, x.b > y.b, x.c > y.c, x.d > y.d); }
QUIRE_INLINE uint32_t mask_ge(V16 x, V16 y) { return mask16(x.a >= y.a, x.b >= y.b, x.c >= y.c, x.d >= y.d); }
#define QUIRE_KEEP(m, i) (F4)((I4)e.m & (x.m >= y.m))
QUIRE_INLINE V16 keep_ge(V16 e, V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_KEEP); }
QUIRE_INLINE I4 bits4(uint32_t bits) {
  const I4 weight = {1, 2, 4, 8};
  return (weight & static_cast<int>(bits & 15u)) != 0;
}
#define QUIRE_SELECT(m, i) blend4(bits4(bits >> (4 * i)), x.m, y.m)
QUIRE_INLINE V16 select_bits(uint32_t bits, V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_SELECT); }
QUIRE_INLINE I4 not_finite4(F4 x) { return ((I4)x & 0x7f800000) == 0x7f800000; }
QUIRE_INLINE uint32_t mask_not_finite(V16 x) {
  return mask16(not_finite4(x.a), not_finite4(x.b), not_finite4(x.c), not_finite4(x.d));
}
QUIRE_INLINE V16 round_even(V16 x) {  // |x| < 2^22: adding 1.5 * 2^23 leaves the nearest integer
  const V16 magic = set1(12582912.0f);
  return sub(add(x, magic), magic);
}
#define QUIRE_POW2(m, i) (F4)((__builtin_convertvector(x.m, I4) + 127) << 23)
QUIRE_INLINE V16 pow2n(V16 x) { return QUIRE_QUARTERS(QUIRE_POW2); }
QUIRE_INLINE F4 widen4(const uint16_t* p) {
  const U4 u = {p[0], p[1], p[2], p[3]};
  return (F4)(u << 16);
}
QUIRE_INLINE V16 load_bf16(const uint16_t* p) { return {widen4(p), widen4(p + 4), widen4(p + 8), widen4(p + 12)}; }
QUIRE_INLINE void store_bf16(uint16_t* p, V16 x) {
  float t[16];
  store(t, x);
  for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(t[i]);
}
struct P16 {
  U4 a, b, c, d;
};
QUIRE_INLINE P16 load_pairs(const uint16_t* p) {
  P16 r;
  std::memcpy(&r, p, 64);
  return r;
}
QUIRE_INLINE P16 set1_pair(const uint16_t* p) {
  uint32_t u;
  std::memcpy(&u, p, 4);
  const U4 f = {u, u, u, u};
  return {f, f, f, f};
}
QUIRE_INLINE F4 dot4(F4 acc, U4 x, U4 y) {
  acc = (F4)(x & 0xffff0000u) * (F4)(y & 0xffff0000u) + acc;
  return (F4)(x << 16) * (F4)(y << 16) + acc;
}
struct I16 {
  I4 a, b, c, d;
};
QUIRE_INLINE I16 iload(const void* p) {
  I16 r;
  std::memcpy(&r, p, 64);
  return r;
}
QUIRE_INLINE void istore(void* p, I16 x) { std::memcpy(p, &x, 64); }
QUIRE_INLINE I16 izero() { return {I4{}, I4{}, I4{}, I4{}}; }
QUIRE_INLINE I16 iset1(const void* p) {
  int32_t u;
  std::memcpy(&u, p, 4);
  const I4 f = {u, u, u, u};
  return {f, f, f, f};
}
QUIRE_INLINE I16 isub(I16 x, I16 y) { return QUIRE_QUARTERS(QUIRE_SUB); }
#define QUIRE_FLOAT(m, i) __builtin_convertvector(x.m, F4)
QUIRE_INLINE V16 to_float(I16 x) { return QUIRE_QUARTERS(QUIRE_FLOAT); }
// Byte k of each lane: unsigned of x, signed of y. The products fit 16 bits, so a float multiply is exact.
QUIRE_INLINE I4 dot_bytes4(I4 acc, I4 x, I4 y) {
  for (int k = 0; k < 4; ++k) {
    const I4 u = (I4)((U4)x >> (8 * k)) & 0xff, v = (y << (24 - 8 * k)) >> 24;
    acc += __builtin_convertvector(__builtin_convertvector(u, F4) * __builtin_convertvector(v, F4), I4);
  }
  return acc;
}
#define QUIRE_BYTES(m, i) dot_bytes4(acc.m, x.m, y.m)
QUIRE_INLINE I16 dot_u8s8(I16 acc, I16 x, I16 y) { return QUIRE_QUARTERS(QUIRE_BYTES); }
QUIRE_INLINE void store_u8(uint8_t* p, V16 x) {
  float t[16];
  store(t, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(static_cast<int>(t[i]) + 128);
}
QUIRE_INLINE void store_byte(uint8_t* p, V16 x, int shift) {
  float t[16];
  store(t, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(static_cast<int>(t[i]) >> shift);
}
QUIRE_INLINE void store_bf16_normal(uint16_t* p, V16 x) { store_bf16(p, x); }
QUIRE_INLINE V16 floor16(V16 x) {  // |x| < 2^22
  const V16 n = round_even(x);
#define QUIRE_DOWN(m, i) n.m - (F4)((n.m > x.m) & (I4)(F4{1.0f, 1.0f, 1.0f, 1.0f}))
  return QUIRE_QUARTERS(QUIRE_DOWN);
#undef QUIRE_DOWN
}
#define QUIRE_DROP(m, i) (F4)((I4)e.m & ~(x.m < y.m))
QUIRE_INLINE V16 drop_lt(V16 e, V16 x, V16 y) { return QUIRE_QUARTERS(QUIRE_DROP); }
#undef QUIRE_DROP
#define QUIRE_JOIN(m, i) (I4)((U4)x.m << 8) + y.m
QUIRE_INLINE I16 join_bytes(I16 x, I16 y) { return QUIRE_QUARTERS(QUIRE_JOIN); }
#undef QUIRE_JOIN
#define QUIRE_INT(m, i) __builtin_convertvector(x.m, I4)
QUIRE_INLINE I16 to_ints(V16 v) {
  const V16 x = round_even(v);
  return QUIRE_QUARTERS(QUIRE_INT);
}
#undef QUIRE_INT
#undef QUIRE_FLOAT
#undef QUIRE_BYTES
#define QUIRE_DOT(m, i) dot4(acc.m, x.m, y.m)
QUIRE_INLINE V16 dot(V16 acc, P16 x, P16 y) { return QUIRE_QUARTERS(QUIRE_DOT); }
#undef QUIRE_ADD
#undef QUIRE_SUB
#undef QUIRE_MUL
#undef QUIRE_DIV
#undef QUIRE_MAX
#undef QUIRE_MIN
#undef QUIRE_FMA
#undef QUIRE_FIRST
#undef QUIRE_KEEP
#undef QUIRE_SELECT
#undef QUIRE_POW2
#undef QUIRE_DOT
#undef QUIRE_QUARTERS
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
QUIRE_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
QUIRE_INLINE void prefetch_write(void* p) { __builtin_prefetch(p, 1); }

#endif

}  // namespace QUIRE_ISA
}  // namespace quire
