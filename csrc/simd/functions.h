// Functions of V16 that are made of vec.h's, the same for every set: partial stores, sums, e^x, 2^x, tanh.
#pragma once

#include "simd/vec.h"

namespace quire {
namespace QUIRE_ISA {

// The first n lanes, above 0. (As a masked store it made the loops of linear.cpp a tenth slower at eight rows.)
QUIRE_INLINE void store_n(float* p, V16 a, int n) {
  float t[16];
  store(t, a);
  std::memcpy(p, t, static_cast<size_t>(n < 16 ? n : 16) * sizeof(float));
}
QUIRE_INLINE void store_bf16_n(uint16_t* p, V16 a, int n) {
  uint16_t t[16];
  store_bf16(t, a);
  std::memcpy(p, t, static_cast<size_t>(n < 16 ? n : 16) * sizeof(uint16_t));
}

// Fixed tree: halves are added until one lane is left.
#if QUIRE_AVX512 || QUIRE_AVX2
QUIRE_INLINE float reduce_add(V16 a) {
  const __m256 e = _mm256_add_ps(lower_half(a), upper_half(a));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
QUIRE_INLINE float reduce_max(V16 a) {
  const __m256 e = _mm256_max_ps(lower_half(a), upper_half(a));
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
#else
QUIRE_INLINE float reduce_add(V16 a) {
  float t[16];
  store(t, a);
  for (int half = 8; half; half >>= 1)
    for (int i = 0; i < half; ++i) t[i] += t[i + half];
  return t[0];
}
QUIRE_INLINE float reduce_max(V16 a) {
  float t[16];
  store(t, a);
  for (int half = 8; half; half >>= 1)
    for (int i = 0; i < half; ++i) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
}
#endif

// e^x, relative error below 2e-7; exactly 0 below -87 (so e^-inf is 0), exactly 1 at 0, e^88 above 88.
QUIRE_INLINE V16 exp(V16 x) {
  const V16 low = set1(-87.0f);
  const V16 c = vmax(vmin(x, set1(88.0f)), low);
  const V16 n = round_even(mul(c, set1(1.44269504088896341f)));
  V16 r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  // Cephes expf's minimax polynomial
  V16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return keep_ge(mul(p, pow2n(n)), x, low);
}

#if !QUIRE_AVX512
QUIRE_INLINE V16 ratio(V16 a, V16 b) { return div(a, b); }
QUIRE_INLINE void store_bf16_normal(uint16_t* p, V16 a, V16 b) {
  store_bf16_normal(p, a);
  store_bf16_normal(p + 16, b);
}
constexpr float kLeastExponent = -126.0f;
QUIRE_INLINE V16 clamp_exponent(V16 x) { return vmin(set1(127.0f), vmax(set1(kLeastExponent), x)); }  // NaN stays
QUIRE_INLINE V16 fraction(V16 x) {
  const V16 c = clamp_exponent(x);
  return sub(c, floor16(c));
}
QUIRE_INLINE V16 scale_by_power(V16 p, V16 x) {
  return drop_lt(mul(p, pow2n(floor16(clamp_exponent(x)))), x, set1(kLeastExponent));
}
QUIRE_INLINE void store_two_bytes(uint8_t* high, uint8_t* low, const V16* x) {
  for (int c = 0; c < 4; ++c) {
    int32_t t[16];
    istore(t, to_ints(vmin(x[c], set1(65535.0f))));
    for (int i = 0; i < 16; ++i) {
      const int at = 16 * (i / 4) + 4 * c + i % 4;
      high[at] = static_cast<uint8_t>(t[i] >> 8);
      low[at] = static_cast<uint8_t>(t[i]);
    }
  }
}
#endif

// 2^x, relative error below 1.5e-7; exactly 1 at 0, 0 at -inf, NaN at NaN. For x up to 127.
QUIRE_INLINE V16 exp2(V16 x) {
  // minimax on [0, 1) with p(0) = 1
  const V16 r = fraction(x);
  V16 p = set1(1.8671302133e-3f);
  p = fma(p, r, set1(9.0170300187e-3f));
  p = fma(p, r, set1(5.5799913321e-2f));
  p = fma(p, r, set1(2.4016445010e-1f));
  p = fma(p, r, set1(6.9315131181e-1f));
  p = fma(p, r, set1(1.0f));
  return scale_by_power(p, x);
}

// tanh(x) = 1 - 2 / (e^2x + 1), absolute error below 2e-7
QUIRE_INLINE V16 tanh16(V16 x) { return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f)))); }

}  // namespace QUIRE_ISA
}  // namespace quire
