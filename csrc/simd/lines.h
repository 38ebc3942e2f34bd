// Lines of 32 bfloat16 from bytes and from vectors of sixteen floats: what the tiles of a narrow cache are widened with.
#pragma once

#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

#if QUIRE_AVX512

// Sixteen bytes in as many lanes.
QUIRE_INLINE I16 widen_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

// kBits of each lane, from bit `shift` on, less kLess, as floats: a permutation looks at the low four bits of a lane alone.
template <int kBits, int kLess>
struct Codes {
  __m512 of;
  inline __attribute__((always_inline)) Codes() {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i code = _mm512_and_si512(lane, _mm512_set1_epi32((1 << kBits) - 1));
    of = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(kLess)));
  }
  template <int kShift>
  inline __attribute__((always_inline)) V16 at(I16 x) const {
    return {_mm512_permutexvar_ps(kShift ? _mm512_srli_epi32(x.v, kShift) : x.v, of)};
  }
};

// The first, and the second, of sixteen pairs of bf16.
QUIRE_INLINE V16 first_of(P16 x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))}; }
QUIRE_INLINE V16 second_of(P16 x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

QUIRE_INLINE __m512i both_bf16(V16 a, V16 b) { return (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v); }
// Of sixteen keys the numbers a and b, in turn.
QUIRE_INLINE void store_keys(uint16_t* p, V16 a, V16 b) {
  const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                                          0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d,
                                          0x1e000e, 0x1f000f);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, both_bf16(a, b)));
}
// What codes stand for in two groups, as bf16: scale · code + least.
struct Levels {
  __m512i of;
  inline __attribute__((always_inline)) Levels(float scale0, float least0, float scale1, float least1) {
    const V16 code = {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
    of = both_bf16(fma(code, set1(scale0), set1(least0)), fma(code, set1(scale1), set1(least1)));
  }
};
// Bytes of both groups, the first in the lower half of a lane, as the numbers of a line. Their codes are kBits from bit
// `shift` of each half on.
template <int kBits>
QUIRE_INLINE void store_levels(uint16_t* p, const Levels& levels, __m512i bytes, __m512i shift) {
  const __m512i codes = _mm512_srlv_epi16(bytes, shift);
  constexpr int kMask = (1 << kBits) - 1;
  // (codes & mask) | 16 in the upper half
  const __m512i at = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(kMask << 16 | kMask),
                                               _mm512_set1_epi32(1 << 20), 0xea);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(at, levels.of));
}
// Sixteen bytes, brought to lanes: `order` has a byte for the lower and one for the upper half of each lane.
QUIRE_INLINE __m512i spread_bytes(const uint8_t* p, __m512i order) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), order);
}
// A line of keys: byte i has codes of both groups for lane i, the second kBits above the first.
template <int kBits, int kShift>
QUIRE_INLINE void widen_key_line(uint16_t* p, const uint8_t* bytes, const Levels& levels) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order = _mm512_or_si512(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001)),
                                        _mm512_set1_epi32(static_cast<int>(0x80008000u)));
  store_levels<kBits>(p, levels, spread_bytes(bytes, order), _mm512_set1_epi32((kShift + kBits) << 16 | kShift));
}
// A line of values: bytes 0 … 7 are of the first group, the others of the second; lanes 0 … 7 have their codes kBits below
// those of lanes 8 … 15.
template <int kBits, int kShift>
QUIRE_INLINE void widen_value_line(uint16_t* p, const uint8_t* bytes, const Levels& levels) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i order = _mm512_or_si512(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001)),
                                        _mm512_set1_epi32(static_cast<int>(0x80088000u)));
  const __m512i shift = _mm512_mask_set1_epi32(_mm512_set1_epi32(kShift << 16 | kShift), 0xff00,
                                               (kShift + kBits) << 16 | (kShift + kBits));
  store_levels<kBits>(p, levels, spread_bytes(bytes, order), shift);
}

// Eight levels of codes of three bits, whose low two bits and third bits come apart.
struct EightLevels {
  __m512 of;
  explicit inline __attribute__((always_inline)) EightLevels(V16 levels) : of(levels.v) {}  // twice the eight
  // The code of kAt of each lane: its low bits are two from bit 2 (kAt % 4) on, its third is bit kAt.
  template <int kAt>
  inline __attribute__((always_inline)) V16 of_lane(I16 low, I16 third) const {
    const __m512i high = kAt >= 2 ? _mm512_srli_epi32(third.v, kAt >= 2 ? kAt - 2 : 0)
                                  : _mm512_slli_epi32(third.v, kAt < 2 ? 2 - kAt : 0);
    return at(_mm512_srli_epi32(low.v, kAt % 4 * 2), high);
  }
  // Codes of sixteen numbers, one after the other in either word.
  inline __attribute__((always_inline)) V16 of_words(uint32_t low, uint32_t third) const {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return at(_mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int>(low)), _mm512_add_epi32(lane, lane)),
              _mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int>(third << 2)), lane));
  }

 private:
  // A permutation looks at four bits: the levels are there twice, so the fourth may be anything.
  inline __attribute__((always_inline)) V16 at(__m512i low, __m512i high) const {
    return {_mm512_permutexvar_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(3), low, high, 0xca), of)};
  }
};

// bf16 of bytes by a table of 128 for those without a sign.
struct ByteTable {
  __m512i of[4];
  explicit inline __attribute__((always_inline)) ByteTable(const uint16_t* table) {
    for (int i = 0; i < 4; ++i) of[i] = _mm512_loadu_si512(table + 32 * i);
  }
  inline __attribute__((always_inline)) void widen(const uint8_t* from, uint16_t* out) const {
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __mmask32 upper = _mm512_test_epi16_mask(x, _mm512_set1_epi16(64));
    const __m512i low = _mm512_permutex2var_epi16(of[0], x, of[1]), high = _mm512_permutex2var_epi16(of[2], x, of[3]);
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(x, 7), 15);
    _mm512_storeu_si512(out, _mm512_or_si512(_mm512_mask_blend_epi16(upper, low, high), sign));
  }
};

#else

QUIRE_INLINE V16 nth_of(P16 x, int n) {
  uint16_t t[32];
  std::memcpy(t, &x, sizeof(t));
  uint16_t found[16];
  for (int i = 0; i < 16; ++i) found[i] = t[2 * i + n];
  return load_bf16(found);
}
QUIRE_INLINE V16 first_of(P16 x) { return nth_of(x, 0); }
QUIRE_INLINE V16 second_of(P16 x) { return nth_of(x, 1); }

QUIRE_INLINE I16 widen_bytes(const uint8_t* p) {
  int32_t t[16];
  for (int i = 0; i < 16; ++i) t[i] = p[i];
  return iload(t);
}

template <int kBits, int kLess>
struct Codes {
  template <int kShift>
  inline __attribute__((always_inline)) V16 at(I16 x) const {
    int32_t t[16];
    istore(t, x);
    for (int i = 0; i < 16; ++i) t[i] = (t[i] >> kShift & ((1 << kBits) - 1)) - kLess;
    return to_float(iload(t));
  }
};

QUIRE_INLINE void store_keys(uint16_t* p, V16 a, V16 b) {
  uint16_t t[32];
  store_bf16(t, a);
  store_bf16(t + 16, b);
  for (int i = 0; i < 16; ++i) p[2 * i] = t[i], p[2 * i + 1] = t[16 + i];
}
struct Levels {
  float scale[2], least[2];
  Levels(float scale0, float least0, float scale1, float least1) : scale{scale0, scale1}, least{least0, least1} {}
};
template <int kBits, int kShift>
QUIRE_INLINE void widen_key_line(uint16_t* p, const uint8_t* bytes, const Levels& levels) {
  const Codes<kBits, 0> codes;
  const I16 x = widen_bytes(bytes);
  store_keys(p, fma(codes.template at<kShift>(x), set1(levels.scale[0]), set1(levels.least[0])),
             fma(codes.template at<kShift + kBits>(x), set1(levels.scale[1]), set1(levels.least[1])));
}
template <int kBits, int kShift>
QUIRE_INLINE void widen_value_line(uint16_t* p, const uint8_t* bytes, const Levels& levels) {
  const Codes<kBits, 0> codes;
  const I16 x = widen_bytes(bytes);
  const V16 scale = first_n(8, set1(levels.scale[0]), set1(levels.scale[1]));
  const V16 least = first_n(8, set1(levels.least[0]), set1(levels.least[1]));
  uint16_t t[32];
  store_bf16(t, fma(codes.template at<kShift>(x), scale, least));
  store_bf16(t + 16, fma(codes.template at<kShift + kBits>(x), scale, least));
  for (int i = 0; i < 8; ++i) {
    p[2 * i] = t[i], p[2 * i + 1] = t[8 + i];
    p[16 + 2 * i] = t[16 + i], p[16 + 2 * i + 1] = t[24 + i];
  }
}

struct EightLevels {
  float of[16];
  explicit EightLevels(V16 levels) { store(of, levels); }
  template <int kAt>
  inline __attribute__((always_inline)) V16 of_lane(I16 low, I16 third) const {
    int32_t a[16], b[16];
    istore(a, low);
    istore(b, third);
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = of[(a[i] >> kAt % 4 * 2 & 3) | (b[i] >> kAt & 1) << 2];
    return load(t);
  }
  V16 of_words(uint32_t low, uint32_t third) const {
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = of[(low >> 2 * i & 3) | (third >> i & 1) << 2];
    return load(t);
  }
};

struct ByteTable {
  const uint16_t* of;
  explicit ByteTable(const uint16_t* table) : of(table) {}
  inline __attribute__((always_inline)) void widen(const uint8_t* from, uint16_t* out) const {
    for (int i = 0; i < 32; ++i) out[i] = static_cast<uint16_t>(of[from[i] & 127] | (from[i] & 128) << 8);
  }
};

#endif

}  // namespace QUIRE_ISA
}  // namespace quire
