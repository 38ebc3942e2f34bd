// V16 in two registers: see vec.h and vec_avx512.h.
#pragma once

#include "simd/scalar.h"

namespace quire {
namespace QUIRE_ISA {

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
QUIRE_INLINE V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
QUIRE_INLINE V16 first_n(int n, V16 x, V16 y) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i m0 = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  const __m256i m1 = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m0)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m1))};
}
QUIRE_INLINE V16 load_n(const float* p, int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)),
          n > 8 ? _mm256_maskload_ps(p + 8, _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane)) : _mm256_setzero_ps()};
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
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
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
QUIRE_INLINE V16 lows(P16 x) { return {pair_lo(x.a), pair_lo(x.b)}; }
QUIRE_INLINE V16 highs(P16 x) { return {pair_hi(x.a), pair_hi(x.b)}; }
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
// The low byte of each lane.
QUIRE_INLINE void store_low_bytes(uint8_t* p, I16 x) {
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i pairs = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  const __m256i turned = _mm256_permute4x64_epi64(pairs, 0xd8);  // packing goes by halves
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(turned), _mm256_extracti128_si256(turned, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
QUIRE_INLINE void store_u8(uint8_t* p, V16 x) {
  const __m256i middle = _mm256_set1_epi32(128);
  store_low_bytes(p, {_mm256_add_epi32(_mm256_cvtps_epi32(x.a), middle),
                      _mm256_add_epi32(_mm256_cvtps_epi32(x.b), middle)});
}
QUIRE_INLINE void store_byte(uint8_t* p, V16 x, int shift) {
  const __m128i by = _mm_cvtsi32_si128(shift);
  store_low_bytes(p, {_mm256_sra_epi32(_mm256_cvtps_epi32(x.a), by), _mm256_sra_epi32(_mm256_cvtps_epi32(x.b), by)});
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

}  // namespace QUIRE_ISA
}  // namespace quire
