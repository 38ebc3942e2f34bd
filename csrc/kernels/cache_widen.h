// Keys and values of tiles of a cache with few bits as the bfloat16 tiles that attention multiplies.
//
// Sixteen bytes of nibbles are a line of 32 numbers, see kv_layout.h. `next` is the tile that is widened after this one: a
// line of memory of it is fetched for every line that is read.
#pragma once

#include "kernels.h"
#include "simd/functions.h"
#include "simd/half.h"
#include "simd/lines.h"
#include "simd/transpose.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kLineNumbers = 32;
template <int N>
struct Number {
  static constexpr int value = N;
};

// ---- fp8 ----------------------------------------------------------------------------------------------------------

// bf16 of every code without a sign; exact.
template <int kMantissa>
struct Fp8Table {
  alignas(64) uint16_t of[128];
  constexpr Fp8Table() : of() {
    constexpr int kBias = kMantissa == 3 ? 7 : 15;
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> kMantissa, mantissa = code & ((1 << kMantissa) - 1);
      if (kMantissa == 3 ? code == 127 : exponent == 31) {
        of[code] = code == 0x7c ? 0x7f80 : 0x7fc0;
        continue;
      }
      if (exponent == 0) {
        if (mantissa == 0) continue;
        exponent = 1;
        for (; !(mantissa >> kMantissa); mantissa <<= 1) --exponent;
        mantissa &= (1 << kMantissa) - 1;
      }
      of[code] = static_cast<uint16_t>((exponent + 127 - kBias) << 7 | mantissa << (7 - kMantissa));
    }
  }
};
template <int kMantissa>
inline constexpr Fp8Table<kMantissa> kFp8;

template <int kMantissa>
QUIRE_INLINE void widen_fp8(const char* from, const char* next, int lines, uint16_t* out) {
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(from);
  const ByteTable table(kFp8<kMantissa>.of);
  for (int i = 0; i < lines; i += 2) {
    prefetch(next + i * kLineNumbers);
    table.widen(codes + i * kLineNumbers, out + i * kLineNumbers);
    if (i + 1 < lines) table.widen(codes + (i + 1) * kLineNumbers, out + (i + 1) * kLineNumbers);
  }
}

// ---- int4 ---------------------------------------------------------------------------------------------------------

QUIRE_INLINE void fetch_bytes(const char* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) prefetch(p + i);
}

QUIRE_INLINE void widen_i4_keys(const KVLayout& kv, const char* tile, const char* next, uint16_t* out) {
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(tile);
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(tile + kv.scale_offset());
  const Codes<4, 8> codes_of;
  const int lines = kv.d16 / 2;
  for (int first = 0; first < lines; first += kKVGroup / 2, scales += kTile) {
    const V16 scale = load_bf16(scales);
    const int end = first + kKVGroup / 2 < lines ? first + kKVGroup / 2 : lines;
    for (int i = first; i < end; ++i) {
      if (i % 4 == 0) prefetch(next + i * 16);
      const I16 bytes = widen_bytes(codes + i * 16);
      store_keys(out + i * kLineNumbers, mul(codes_of.at<0>(bytes), scale), mul(codes_of.at<4>(bytes), scale));
    }
  }
  fetch_bytes(next + kv.scale_offset(), static_cast<size_t>(kv.groups()) * kTile * 2);
}

// ---- values of four bits and less ---------------------------------------------------------------------------------

// Scales of values and what code 0 stands for, [groups][16] each. One line of two tokens after the other, of kBits a number:
// 16 bytes are 4 / kBits lines.
template <int kBits>
QUIRE_INLINE void widen_lines(const KVLayout& kv, const float* scales, const float* least, const uint8_t* codes,
                              const char* next, uint16_t* out) {
  constexpr int kStep = 4 / kBits;
  const int vectors = kv.d16 / 16;
  int at = 0;  // line
  for (int pair = 0; pair < kTile / 2; ++pair)
    for (int v = 0; v < vectors; v += 2) {  // a group: the same levels
      const int of = v / 2 * kTile + 2 * pair;
      const Levels levels(scales[of], least[of], scales[of + 1], least[of + 1]);
      for (int end = v + 2 < vectors ? v + 2 : vectors, i = v; i < end; ++i, ++at) {
        const uint8_t* bytes = codes + at / kStep * 16;
        if (at % (4 * kStep) == 0) prefetch(next + at / kStep * 16);
        if (kStep == 1 || at % 2 == 0)
          widen_value_line<kBits, 0>(out + at * kLineNumbers, bytes, levels);
        else
          widen_value_line<kBits, kStep == 1 ? 0 : 4>(out + at * kLineNumbers, bytes, levels);
      }
    }
}

QUIRE_INLINE void widen_i4_values(const KVLayout& kv, const char* tile, const char* next, uint16_t* out) {
  const size_t count = static_cast<size_t>(kv.groups()) * kTile;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(tile + kv.scale_offset()) + count;
  alignas(64) float numbers[2][kMaxHeadDim / kKVGroup * kTile];
  for (size_t i = 0; i < count; i += 16) {
    const V16 scale = load_bf16(scales + i);
    store(numbers[0] + i, scale);
    store(numbers[1] + i, mul(scale, set1(-8.0f)));
  }
  widen_lines<4>(kv, numbers[0], numbers[1], reinterpret_cast<const uint8_t*>(tile + kv.key_bytes()),
                 next + kv.key_bytes(), out);
  fetch_bytes(next + kv.scale_offset() + count * 2, count * 2);
}

// ---- kivi ---------------------------------------------------------------------------------------------------------

// The keys of 32 tokens, two tiles; `even` is the first of them. Both share what codes stand for.
template <int kBits>
QUIRE_INLINE void widen_kivi_keys(const KVLayout& kv, const char* even, const char* next, uint16_t* out) {
  alignas(64) float scales[kMaxHeadDim], least[kMaxHeadDim];
  const char* odd = even + kv.tile_bytes;
  const size_t numbers = kv.scale_offset();
  for (int d = 0; d < kv.d16; d += 16) {
    store(scales + d, load_bf16(reinterpret_cast<const uint16_t*>(even + numbers) + d));
    store(least + d, load_bf16(reinterpret_cast<const uint16_t*>(odd + numbers) + d));
  }
  constexpr int kStep = 4 / kBits;  // lines of sixteen bytes
  const size_t apart = static_cast<size_t>(kTile) * kv.d16;
  const auto lines = [&](auto shift, int d, size_t at) __attribute__((always_inline)) {
    const Levels levels(scales[d], least[d], scales[d + 1], least[d + 1]);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(even + at);
    uint16_t* to = out + d / 2 * kLineNumbers;
    widen_key_line<kBits, decltype(shift)::value>(to, codes, levels);
    widen_key_line<kBits, decltype(shift)::value>(to + apart, codes + kv.tile_bytes, levels);
  };
  size_t at = 0;
  for (int d = 0; d < kv.d16; d += 2 * kStep, at += 16) {
    if (at % 64 == 0) prefetch(next + at), prefetch(next + kv.tile_bytes + at);
    lines(Number<0>(), d, at);
    if constexpr (kStep == 2) lines(Number<4>(), d + 2, at);
  }
  fetch_bytes(next + numbers, static_cast<size_t>(kv.d16) * 2);
  fetch_bytes(next + kv.tile_bytes + numbers, static_cast<size_t>(kv.d16) * 2);
}

template <int kBits>
QUIRE_INLINE void widen_kivi_values(const KVLayout& kv, const char* tile, const char* next, uint16_t* out) {
  const size_t count = static_cast<size_t>(kv.groups()) * kTile;
  const uint16_t* stored = reinterpret_cast<const uint16_t*>(tile + kv.scale_offset()) + kv.d16;
  alignas(64) float numbers[2 * (kMaxHeadDim / kKVGroup) * kTile];
  for (size_t i = 0; i < 2 * count; i += 16) store(numbers + i, load_bf16(stored + i));
  widen_lines<kBits>(kv, numbers, numbers + count, reinterpret_cast<const uint8_t*>(tile + kv.key_bytes()),
                     next + kv.key_bytes(), out);
  fetch_bytes(next + kv.scale_offset() + static_cast<size_t>(kv.d16) * 2, count * 4);
}

// ---- kvquant3 -----------------------------------------------------------------------------------------------------

// Eight levels, twice.
QUIRE_INLINE V16 both_eights(const float* levels) {
  float t[16];
  std::memcpy(t, levels, 32);
  std::memcpy(t + 8, levels, 32);
  return load(t);
}

// cos or sin of sixteen positions from `first` on, [half][16]; of positions beyond the table those of its last.
QUIRE_INLINE void turn_table(const KeyCodes& codes, const float* table, int first, float* out) {
  const int half = codes.rotary_dim / 2;
  int i = 0;
  if (first + kTile <= codes.positions)
    for (; i + 4 <= half; i += 4)
      for (int lane = 0; lane < kTile; lane += 4)
        transpose4(reinterpret_cast<const uint32_t*>(table) + (first + lane) * static_cast<size_t>(half) + i,
                   static_cast<size_t>(half), reinterpret_cast<uint32_t*>(out) + i * kTile + lane, kTile);
  for (int lane = 0; i < half && lane < kTile; ++lane) {
    const int position = first + lane < codes.positions ? first + lane : codes.positions - 1;
    for (int j = i; j < half; ++j) out[j * kTile + lane] = table[position * static_cast<size_t>(half) + j];
  }
}

// Keys [d16][16] of positions from `first` on, rotated in place.
QUIRE_INLINE void rotate_tile(const KeyCodes& codes, int first, float* x) {
  const int half = codes.rotary_dim / 2;
  alignas(64) float cos[kMaxHeadDim / 2 * kTile], sin[kMaxHeadDim / 2 * kTile];
  turn_table(codes, codes.cos, first, cos);
  turn_table(codes, codes.sin, first, sin);
  for (int i = 0; i < half; ++i) {
    float* low = x + (codes.interleaved ? 2 * i : i) * kTile;
    float* high = low + (codes.interleaved ? 1 : half) * kTile;
    const V16 a = load(low), b = load(high), c = load(cos + i * kTile), s = load(sin + i * kTile);
    store(low, sub(mul(a, c), mul(b, s)));
    store(high, add(mul(b, c), mul(a, s)));
  }
}

// f(d, lane, number) for outliers [count][16]. Tokens that were never written may have anything.
template <class F>
QUIRE_INLINE void each_outlier(const uint32_t* outliers, int count, int d16, F f) {
  for (int i = 0; i < count * kTile; ++i) {
    const uint32_t d = outliers[i] & 0xffff;
    if (d < static_cast<uint32_t>(d16)) f(static_cast<int>(d), i % kTile, static_cast<uint16_t>(outliers[i] >> 16));
  }
}

// The keys of a head's tile whose first token has position `first`.
QUIRE_INLINE void widen_kvquant_keys(const KVLayout& kv, const KeyCodes& codes, int head, int first, const char* tile,
                                     const char* next, uint16_t* out) {
  const float* book = codes.books + static_cast<size_t>(head) * kv_codebook(kv.d16);
  const float *middles = book + 2 * kKVLevels, *scales = middles + kv.d16;
  const EightLevels levels(both_eights(book));
  const uint8_t* from = reinterpret_cast<const uint8_t*>(tile);
  alignas(64) float x[kMaxHeadDim * kTile];
  for (int d = 0; d < kv.d16; d += 8, from += 3 * kTile) {
    prefetch(next + d * 6);
    const I16 low = widen_bytes(from), high = widen_bytes(from + kTile), third = widen_bytes(from + 2 * kTile);
    const auto put = [&](auto at) __attribute__((always_inline)) {
      constexpr int kAt = decltype(at)::value;
      store(x + (d + kAt) * kTile, fma(levels.template of_lane<kAt>(kAt < 4 ? low : high, third), set1(scales[d + kAt]),
                                       set1(middles[d + kAt])));
    };
    put(Number<0>()), put(Number<1>()), put(Number<2>()), put(Number<3>());
    put(Number<4>()), put(Number<5>()), put(Number<6>()), put(Number<7>());
  }
  const int count = kv_outliers(kv.d16);
  each_outlier(reinterpret_cast<const uint32_t*>(tile + kv.scale_offset() + 4 * kTile), count, kv.d16,
               [&](int d, int lane, uint16_t number) { x[d * kTile + lane] = bf16_to_float(number); });
  if (codes.rotary_dim) rotate_tile(codes, first, x);
  for (int d = 0; d < kv.d16; d += 2) store_keys(out + d * kTile, load(x + d * kTile), load(x + (d + 1) * kTile));
}

QUIRE_INLINE void widen_kvquant_values(const KVLayout& kv, const KeyCodes& codes, int head, const char* tile,
                                       const char* next, uint16_t* out) {
  const float* book = codes.books + static_cast<size_t>(head) * kv_codebook(kv.d16);
  const V16 eights = both_eights(book + kKVLevels);
  const size_t row = kv.key_bytes() / kTile;  // bytes of a token
  const char* numbers = tile + kv.scale_offset();
  const uint16_t *scales = reinterpret_cast<const uint16_t*>(numbers), *middles = scales + kTile;
  for (int pair = 0; pair < kTile / 2; ++pair) {
    const auto levels = [&](int token) {
      return EightLevels(fma(eights, set1(bf16_to_float(scales[token])), set1(bf16_to_float(middles[token]))));
    };
    const EightLevels first = levels(2 * pair), second = levels(2 * pair + 1);
    const char* from = tile + kv.key_bytes() + 2 * pair * row;
    prefetch(next + kv.key_bytes() + 2 * pair * row);
    prefetch(next + kv.key_bytes() + (2 * pair + 1) * row);
    for (int d = 0; d < kv.d16; d += 16, from += 6) {
      const auto of = [&](const EightLevels& token, const char* p) __attribute__((always_inline)) {
        uint32_t low;
        uint16_t third;
        std::memcpy(&low, p, 4);
        std::memcpy(&third, p + 4, 2);
        return token.of_words(low, third);
      };
      store_keys(out + pair * 2 * kv.d16 + d * 2, of(first, from), of(second, from + row));
    }
  }
  const int count = kv_outliers(kv.d16);
  each_outlier(reinterpret_cast<const uint32_t*>(numbers + 4 * kTile) + count * kTile, count, kv.d16,
               [&](int d, int lane, uint16_t number) { out[lane / 2 * 2 * kv.d16 + d * 2 + lane % 2] = number; });
  fetch_bytes(next + kv.scale_offset(), 4 * kTile + 8 * static_cast<size_t>(count) * kTile);
}

// ---- tiles --------------------------------------------------------------------------------------------------------

// The keys of a tile, [d/2][16][2], of formats whose keys share nothing with other tiles.
QUIRE_INLINE void widen_keys(const KVLayout& kv, const char* tile, const char* next, uint16_t* out) {
  switch (kv.type) {
    case KVType::e4m3: return widen_fp8<3>(tile, next, kv.d16 / 2, out);
    case KVType::e5m2: return widen_fp8<2>(tile, next, kv.d16 / 2, out);
    default: return widen_i4_keys(kv, tile, next, out);
  }
}
// And of two tiles, 32 tokens, in others.
QUIRE_INLINE void widen_late_keys(const KVLayout& kv, const char* even, const char* next, uint16_t* out) {
  kv.type == KVType::kivi4 ? widen_kivi_keys<4>(kv, even, next, out) : widen_kivi_keys<2>(kv, even, next, out);
}
// The values of a tile, [8][d16][2].
QUIRE_INLINE void widen_values(const KVLayout& kv, const char* tile, const char* next, uint16_t* out) {
  const size_t at = kv.key_bytes();
  switch (kv.type) {
    case KVType::e4m3: return widen_fp8<3>(tile + at, next + at, kv.d16 / 2, out);
    case KVType::e5m2: return widen_fp8<2>(tile + at, next + at, kv.d16 / 2, out);
    case KVType::kivi4: return widen_kivi_values<4>(kv, tile, next, out);
    case KVType::kivi2: return widen_kivi_values<2>(kv, tile, next, out);
    default: return widen_i4_values(kv, tile, next, out);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
