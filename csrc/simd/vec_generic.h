// V16 in GCC's vectors: see vec.h and vec_avx512.h.
#pragma once

#include "simd/scalar.h"

namespace quire {
namespace QUIRE_ISA {

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
#define QUIRE_MUL(m, i) x.m* y.m
#define QUIRE_DIV(m, i) x.m / y.m
#define QUIRE_MAX(m, i) blend4(x.m > y.m, x.m, y.m)
#define QUIRE_MIN(m, i) blend4(x.m < y.m, x.m, y.m)
#define QUIRE_FMA(m, i) x.m* y.m + z.m
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
QUIRE_INLINE V16 lows(P16 x) { return {(F4)(x.a << 16), (F4)(x.b << 16), (F4)(x.c << 16), (F4)(x.d << 16)}; }
QUIRE_INLINE F4 high4(U4 x) { return (F4)(x & 0xffff0000u); }
QUIRE_INLINE V16 highs(P16 x) { return {high4(x.a), high4(x.b), high4(x.c), high4(x.d)}; }
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

}  // namespace QUIRE_ISA
}  // namespace quire
