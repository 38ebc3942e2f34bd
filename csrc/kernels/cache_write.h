// How the keys and values of some tokens of one tile are written to it, for each format of the cache.
//
// Threads may write different tokens of one tile at a time (trees of drafts), so no two tokens share a byte.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "simd/functions.h"
#include "simd/half.h"
#include "simd/transpose.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kMaxOutliers = kv_outliers(kMaxHeadDim);

// x [head_dim] as round(x / scale) in [-127, 127], zeros up to d16; returns the scale as bf16. See RopeWrite in program/ops.
QUIRE_INLINE uint16_t quantize_head(const float* x, int head_dim, int d16, float* out) {
  V16 top = zero(), bad = zero();
  for (int d = 0; d < head_dim; d += 16) {
    const V16 v = load_n(x + d, head_dim - d);
    top = vmax(top, vmax(v, sub(zero(), v)));
    bad = add(bad, mul(v, zero()));
  }
  const float exact = reduce_max(top) / 127.0f;
  uint16_t scale = 0;
  if (mask_not_finite(bad))
    scale = 0x7fc0;  // NaN: what is wrong with this token must reach its output
  else if (exact >= 1e-30f)
    scale = static_cast<uint16_t>((float_to_bits(exact) + 0xffffu) >> 16);  // the next bf16, away from zero
  const V16 inverse = set1(exact >= 1e-30f ? 1.0f / bf16_to_float(scale) : 0.0f), limit = set1(127.0f);
  for (int d = 0; d < d16; d += 16) {
    const V16 v = mul(load_n(x + d, head_dim - d), inverse);
    store(out + d, round_even(vmax(vmin(v, limit), sub(zero(), limit))));
  }
  return scale;
}

// Tokens of one tile, and where the tile of head 0 lies.
struct Tile {
  const RopeWriteTask& t;
  char* block;
  int number, lane, count;  // number: of the tile inside its block
  int end;                  // of the lanes that the step or earlier ones write
  char* at(int head) const { return block + t.kv.tile_at(head, number * kTile); }
  // The step that starts a tile clears the values behind its last token: attention multiplies those of tokens not yet
  // written by a probability of zero, so they must be finite.
  bool clear() const { return lane == 0 && end < kTile; }
  const float* row(int i) const { return t.qkv + (t.token_begin + i) * t.pitch; }
  const float* k(int i, int head) const { return row(i) + static_cast<size_t>(t.heads + head) * t.head_dim; }
  const float* v(int i, int head) const { return k(i, head + t.kv_heads); }
};

// Units of each token (`pitch` apart) to the tile [units][16].
QUIRE_INLINE void write_keys(const Tile& tile, const uint32_t* from, size_t pitch, int units, uint32_t* to) {
  int u = 0;
  if (tile.count == kTile)
    for (; u + 4 <= units; u += 4)
      for (int i = 0; i < kTile; i += 4) transpose4(from + i * pitch + u, pitch, to + u * kTile + i, kTile);
  for (int i = 0; u < units && i < tile.count; ++i) {
    uint32_t* column = to + tile.lane + i;
    for (int left = u; left < units; ++left) column[left * kTile] = from[i * pitch + left];
  }
}

void write_f32(const Tile& tile, int head) {
  const KVLayout& kv = tile.t.kv;
  float* keys = reinterpret_cast<float*>(tile.at(head));
  float* values = keys + kv.v_offset() + static_cast<size_t>(tile.lane) * kv.d16;
  write_keys(tile, reinterpret_cast<const uint32_t*>(tile.k(0, head)), tile.t.pitch, kv.head_dim,
             reinterpret_cast<uint32_t*>(keys));
  for (int i = 0; i < tile.count; ++i, values += kv.d16) {
    const float* x = tile.v(i, head);
    for (int d = 0; d < kv.d16; d += 16) store(values + d, load_n(x + d, kv.head_dim - d));
  }
  if (!tile.clear()) return;
  values = keys + kv.v_offset() + static_cast<size_t>(tile.end) * kv.d16;
  std::memset(values, 0, static_cast<size_t>(kTile - tile.end) * kv.d16 * sizeof(float));
}

void write_bf16(const Tile& tile, int head) {
  const KVLayout& kv = tile.t.kv;
  uint16_t* keys = reinterpret_cast<uint16_t*>(tile.at(head));
  alignas(64) uint16_t rows[kTile * kMaxHeadDim];
  const size_t d16 = static_cast<size_t>(kv.d16);
  const auto round = [&](int i, const float* x) {
    for (int d = 0; d < kv.d16; d += 16) store_bf16(rows + i * d16 + d, load_n(x + d, kv.head_dim - d));
  };
  for (int i = 0; i < tile.count; ++i) round(i, tile.k(i, head));
  write_keys(tile, reinterpret_cast<const uint32_t*>(rows), d16 / 2, kv.d16 / 2, reinterpret_cast<uint32_t*>(keys));
  for (int i = 0; i < tile.count; ++i) round(i, tile.v(i, head));
  uint16_t* values = keys + kv.v_offset();
  for (int i = 0; i < tile.count;) {
    const int lane = tile.lane + i;
    uint16_t* pairs = values + (lane >> 1) * 2 * d16;
    const uint16_t* a = rows + i * d16;
    if ((lane & 1) == 0 && i + 1 < tile.count) {
      const uint16_t* b = a + d16;
      for (size_t d = 0; d < d16; ++d) pairs[2 * d] = a[d], pairs[2 * d + 1] = b[d];
      i += 2;
      continue;
    }
    for (size_t d = 0; d < d16; ++d) pairs[2 * d + (lane & 1)] = a[d];
    ++i;
  }
  if (!tile.clear()) return;
  if (tile.end & 1)
    for (size_t d = 0; d < d16; ++d) values[(tile.end - 1) * d16 + 2 * d + 1] = 0;
  const int next = (tile.end + 1) / 2;
  std::memset(values + next * 2 * d16, 0, (kTile / 2 - next) * 2 * d16 * sizeof(uint16_t));
}

void write_f16(const Tile& tile, int head) {
  const KVLayout& kv = tile.t.kv;
  uint16_t* keys = reinterpret_cast<uint16_t*>(tile.at(head));
  const size_t d16 = static_cast<size_t>(kv.d16);
  if (tile.count == kTile) {
    alignas(64) float turned[kTile * kMaxHeadDim];
    write_keys(tile, reinterpret_cast<const uint32_t*>(tile.k(0, head)), tile.t.pitch, kv.head_dim,
               reinterpret_cast<uint32_t*>(turned));
    for (int d = 0; d < kv.d16; ++d) store_half(keys + d * kTile, d < kv.head_dim ? load(turned + d * kTile) : zero());
  } else {
    uint16_t row[kMaxHeadDim];
    for (int i = 0; i < tile.count; ++i) {
      const float* x = tile.k(i, head);
      for (int d = 0; d < kv.d16; d += 16) store_half(row + d, load_n(x + d, kv.head_dim - d));
      uint16_t* column = keys + tile.lane + i;
      for (size_t d = 0; d < d16; ++d) column[d * kTile] = row[d];
    }
  }
  uint16_t* values = keys + kv.v_offset();
  const auto line = [&](int lane, int d) { return values + (lane >> 1) * 2 * d16 + 2 * d + (lane & 1) * 16; };
  for (int i = 0; i < tile.count; ++i) {
    const float* x = tile.v(i, head);
    for (int d = 0; d < kv.d16; d += 16) store_half(line(tile.lane + i, d), load_n(x + d, kv.head_dim - d));
  }
  if (!tile.clear()) return;
  for (int lane = tile.end; lane < kTile; ++lane)
    for (int d = 0; d < kv.d16; d += 16) store_half(line(lane, d), zero());
}

// Nothing needs clearing: bytes are always finite, and attention masks scales.
void write_i8(const Tile& tile, int head) {
  const KVLayout& kv = tile.t.kv;
  uint8_t* keys = reinterpret_cast<uint8_t*>(tile.at(head));
  uint16_t* scales = reinterpret_cast<uint16_t*>(keys + kv.scale_offset());
  alignas(64) uint8_t rows[kTile * kMaxHeadDim];
  float whole[kMaxHeadDim];
  const size_t d16 = static_cast<size_t>(kv.d16);
  for (int i = 0; i < tile.count; ++i) {
    scales[tile.lane + i] = quantize_head(tile.k(i, head), kv.head_dim, kv.d16, whole);
    for (size_t d = 0; d < d16; d += 16) store_u8(rows + i * d16 + d, load(whole + d));
  }
  write_keys(tile, reinterpret_cast<const uint32_t*>(rows), d16 / 4, kv.d16 / 4, reinterpret_cast<uint32_t*>(keys));
  for (int i = 0; i < tile.count; ++i) {
    scales[kTile + tile.lane + i] = quantize_head(tile.v(i, head), kv.head_dim, kv.d16, whole);
    for (size_t d = 0; d < d16; d += 16) store_byte(rows + i * d16 + d, load(whole + d), 0);
  }
  for (int i = 0; i < tile.count;) {
    const int lane = tile.lane + i;
    uint8_t* fours = keys + kv.v_offset() + (lane >> 2) * 4 * d16;
    const uint8_t* a = rows + i * d16;
    if ((lane & 3) == 0 && i + 4 <= tile.count) {
      for (size_t d = 0; d < d16; ++d) {
        fours[4 * d] = a[d], fours[4 * d + 1] = a[d16 + d];
        fours[4 * d + 2] = a[2 * d16 + d], fours[4 * d + 3] = a[3 * d16 + d];
      }
      i += 4;
      continue;
    }
    for (size_t d = 0; d < d16; ++d) fours[4 * d + (lane & 3)] = a[d];
    ++i;
  }
}

// ---- fp8 ----------------------------------------------------------------------------------------------------------

// x / scale to the nearest number of the format, ties to even, beyond its largest number that number; NaN and infinities
// become NaN. (OCP 8-bit floating point specification, 1.0.)
template <int kMantissa>
QUIRE_INLINE void to_fp8(const float* x, int n, float scale, uint8_t* out) {
  constexpr int kDropped = 23 - kMantissa, kBias = kMantissa == 3 ? 7 : 15;
  constexpr uint32_t kLargest = kMantissa == 3 ? 0x7e : 0x7b, kNaN = kMantissa == 3 ? 0x7f : 0x7e;
  constexpr uint32_t kNormal = static_cast<uint32_t>(128 - kBias) << 23;  // the least normal number
  // adding it to a subnormal number leaves that number's multiple of the least one in the low bits
  constexpr uint32_t kAdded = static_cast<uint32_t>(127 + 24 - kBias - kMantissa) << 23;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = float_to_bits(x[i] / scale), u = bits & 0x7fffffffu;
    const uint32_t normal = ((u + (1u << (kDropped - 1)) - 1 + ((u >> kDropped) & 1u)) >> kDropped) -
                            (static_cast<uint32_t>(127 - kBias) << kMantissa);
    const uint32_t tiny = float_to_bits(bits_to_float(u) + bits_to_float(kAdded)) - kAdded;
    uint32_t code = u < kNormal ? tiny : normal;
    code = code > kLargest ? kLargest : code;
    code = u >= 0x7f800000u ? kNaN : code;
    out[i] = static_cast<uint8_t>(code | bits >> 31 << 7);
  }
}

template <int kMantissa>
void write_fp8(const Tile& tile, int head) {
  const KVLayout& kv = tile.t.kv;
  uint8_t* keys = reinterpret_cast<uint8_t*>(tile.at(head));
  const size_t d16 = static_cast<size_t>(kv.d16);
  alignas(64) uint8_t row[kMaxHeadDim] = {0};
  for (int i = 0; i < tile.count; ++i) {
    to_fp8<kMantissa>(tile.k(i, head), kv.head_dim, tile.t.k_scales[head], row);
    uint8_t* column = keys + 2 * (tile.lane + i);
    for (size_t d = 0; d < d16; d += 2) std::memcpy(column + d * kTile, row + d, 2);
  }
  uint8_t* values = keys + kv.key_bytes();
  const auto at = [&](int lane) { return values + static_cast<size_t>(lane >> 1) * 2 * d16 + (lane & 1); };
  for (int i = 0; i < tile.count; ++i) {
    to_fp8<kMantissa>(tile.v(i, head), kv.head_dim, tile.t.v_scales[head], row);
    uint8_t* to = at(tile.lane + i);
    for (size_t d = 0; d < d16; ++d) to[2 * d] = row[d];
  }
  if (!tile.clear()) return;
  for (int lane = tile.end; lane < kTile; ++lane)
    for (size_t d = 0; d < d16; ++d) at(lane)[2 * d] = 0;
}

// ---- int4 ---------------------------------------------------------------------------------------------------------

// n numbers as codes round(x / scale) + 8 in [0, 15]; returns the scale as bf16. See RopeWrite in program/ops.
QUIRE_INLINE uint16_t to_nibbles(const float* x, int n, uint8_t* out) {
  float most = -INFINITY, least = INFINITY, bad = 0.0f;
  for (int i = 0; i < n; ++i) {
    most = x[i] > most ? x[i] : most;
    least = x[i] < least ? x[i] : least;
    bad += x[i] * 0.0f;
  }
  const float extreme = most >= -least ? most : least;
  const bool some = extreme > 1e-30f || extreme < -1e-30f;
  const uint16_t scale = bad != bad ? 0x7fc0 : some ? float_to_bf16(extreme * -0.125f) : 0;
  const V16 inverse = set1(some ? 1.0f / bf16_to_float(scale) : 0.0f);
  for (int c = 0; c < n; c += 16) {
    const V16 whole = round_even(mul(load_n(x + c, n - c), inverse));
    store_byte(out + c, add(vmax(vmin(whole, set1(7.0f)), set1(-8.0f)), set1(8.0f)), 0);
  }
  return scale;
}

void write_i4(const Tile& tile, int head) {
  const KVLayout& kv = tile.t.kv;
  uint8_t* keys = reinterpret_cast<uint8_t*>(tile.at(head));
  uint16_t* k_scales = reinterpret_cast<uint16_t*>(keys + kv.scale_offset());
  uint16_t* v_scales = k_scales + kv.groups() * kTile;
  alignas(64) uint8_t codes[kMaxHeadDim + kKVGroup];
  const auto round = [&](const float* x, uint16_t* scales) {
    std::memset(codes, 8, sizeof(codes));
    for (int g = 0; g < kv.groups(); ++g) {
      const int left = kv.head_dim - g * kKVGroup;
      scales[g * kTile] = left > 0
                              ? to_nibbles(x + g * kKVGroup, left < kKVGroup ? left : kKVGroup, codes + g * kKVGroup)
                              : 0;
    }
  };
  for (int i = 0; i < tile.count; ++i) {
    const int lane = tile.lane + i;
    round(tile.k(i, head), k_scales + lane);
    for (int d = 0; d < kv.d16; d += 2) keys[d / 2 * kTile + lane] = static_cast<uint8_t>(codes[d] | codes[d + 1] << 4);
  }
  uint8_t* values = keys + kv.key_bytes();
  for (int i = 0; i < tile.count; ++i) {
    const int lane = tile.lane + i;
    round(tile.v(i, head), v_scales + lane);
    uint8_t* to = values + static_cast<size_t>(lane >> 1) * kv.d16 + (lane & 1) * 8;
    for (int d = 0; d < kv.d16; d += 16, to += 16)
      for (int j = 0; j < 8; ++j) to[j] = static_cast<uint8_t>(codes[d + j] | codes[d + 8 + j] << 4);
  }
  if (!tile.clear()) return;
  for (int g = 0; g < kv.groups(); ++g)
    for (int lane = tile.end; lane < kTile; ++lane) v_scales[g * kTile + lane] = 0;
}

// ---- kvquant3 -----------------------------------------------------------------------------------------------------

// Codes of n numbers, which are `middle` apart from zero and `inverse` wide, and their outliers: those of the greatest
// magnitudes then, of equal ones the first. All outliers are NaN if a number is not finite. See RopeWrite in program/ops.
struct Nuq {
  alignas(64) uint8_t codes[kMaxHeadDim];
  uint32_t outliers[kMaxOutliers];

  // x [dim] shifted and scaled as y [dim]; the places of outliers in rising order of neither.
  void find_outliers(const float* x, float* size, int dim, int count) {
    float bad = 0.0f;
    for (int d = 0; d < dim; ++d) bad += x[d] * 0.0f;
    for (int i = 0; i < count; ++i) {
      int at = 0;
      for (int d = 1; d < dim; ++d) at = size[d] > size[at] ? d : at;
      outliers[i] = bad != bad ? 0x7fc00000u
                               : static_cast<uint32_t>(float_to_bf16(x[at])) << 16 | static_cast<uint32_t>(at);
      size[at] = -1.0f;
    }
    if (bad == bad) return;
    for (int d = 0; d < dim; ++d) size[d] = -1.0f;
  }

  // The nearest of eight rising levels for each of y [dim], the lower one of two; 0 beyond.
  void find_codes(const float* y, int dim, int d16, const float* levels) {
    for (int d = 0; d < d16; d += 16) {
      const V16 v = load_n(y + d, dim - d);
      V16 code = zero();
      for (int i = 0; i + 1 < kKVLevels; ++i)
        code = add(code, select_bits(mask_gt(v, set1((levels[i] + levels[i + 1]) * 0.5f)), set1(1.0f), zero()));
      store_byte(codes + d, code, 0);
    }
    for (unsigned d = static_cast<unsigned>(dim); d < static_cast<unsigned>(d16); ++d) codes[d] = 0;
  }

  uint32_t low_bits(int first, int count) const {
    uint32_t bits = 0;
    for (int i = 0; i < count; ++i) bits |= static_cast<uint32_t>(codes[first + i] & 3) << 2 * i;
    return bits;
  }
  uint32_t third_bits(int first, int count) const {
    uint32_t bits = 0;
    for (int i = 0; i < count; ++i) bits |= static_cast<uint32_t>(codes[first + i] >> 2) << i;
    return bits;
  }
};

QUIRE_INLINE void write_kvquant_key(const float* x, const KVLayout& kv, const float* book, uint8_t* keys,
                                    uint32_t* outliers) {
  const float *middles = book + 2 * kKVLevels, *scales = middles + kv.d16;
  const int dim = kv.head_dim, count = kv_outliers(kv.d16);
  Nuq nuq;
  alignas(64) float y[kMaxHeadDim], size[kMaxHeadDim];
  for (int d = 0; d < dim; ++d) {
    y[d] = (x[d] - middles[d]) / scales[d];
    size[d] = std::fabs(y[d]);
  }
  nuq.find_outliers(x, size, dim, count);
  nuq.find_codes(y, dim, kv.d16, book);
  for (int d = 0; d < kv.d16; d += 8, keys += 3 * kTile) {
    keys[0] = static_cast<uint8_t>(nuq.low_bits(d, 4));
    keys[kTile] = static_cast<uint8_t>(nuq.low_bits(d + 4, 4));
    keys[2 * kTile] = static_cast<uint8_t>(nuq.third_bits(d, 8));
  }
  for (int i = 0; i < count; ++i) outliers[i * kTile] = nuq.outliers[i];
}

// A value's scale and middle are of what is left without outliers.
QUIRE_INLINE void write_kvquant_value(const float* x, const KVLayout& kv, const float* book, uint8_t* values,
                                      uint16_t* scale, uint16_t* middle, uint32_t* outliers) {
  const int dim = kv.head_dim, count = kv_outliers(kv.d16);
  Nuq nuq;
  alignas(64) float y[kMaxHeadDim], size[kMaxHeadDim];
  for (int d = 0; d < dim; ++d) size[d] = std::fabs(x[d]);
  nuq.find_outliers(x, size, dim, count);
  float most = -INFINITY, least = INFINITY;
  for (int d = 0; d < dim; ++d) {
    if (size[d] < 0.0f) continue;
    most = x[d] > most ? x[d] : most;
    least = x[d] < least ? x[d] : least;
  }
  *scale = *middle = 0x7fc0;
  if (most >= least) {
    *middle = float_to_bf16((most + least) * 0.5f);
    *scale = float_to_bf16((most - least) * 0.5f);
  }
  const float origin = bf16_to_float(*middle), wide = bf16_to_float(*scale),
              inverse = wide > 1e-30f ? 1.0f / wide : 0.0f;
  for (int d = 0; d < dim; ++d) y[d] = (x[d] - origin) * inverse;
  nuq.find_codes(y, dim, kv.d16, book + kKVLevels);
  for (int d = 0; d < kv.d16; d += 16, values += 6) {
    const uint32_t low = nuq.low_bits(d, 16), third = nuq.third_bits(d, 16);
    std::memcpy(values, &low, 4);
    std::memcpy(values + 4, &third, 2);
  }
  for (int i = 0; i < count; ++i) outliers[i * kTile] = nuq.outliers[i];
}

void write_kvquant(const Tile& tile, int head) {
  const KVLayout& kv = tile.t.kv;
  uint8_t *keys = reinterpret_cast<uint8_t*>(tile.at(head)), *values = keys + kv.key_bytes();
  uint16_t *scales = reinterpret_cast<uint16_t*>(keys + kv.scale_offset()), *middles = scales + kTile;
  uint32_t* of_keys = reinterpret_cast<uint32_t*>(middles + kTile);
  const int count = kv_outliers(kv.d16);
  uint32_t* of_values = of_keys + count * kTile;
  const float* book = tile.t.codes.books + static_cast<size_t>(head) * kv_codebook(kv.d16);
  for (int i = 0; i < tile.count; ++i) {
    const int lane = tile.lane + i;
    write_kvquant_key(tile.k(i, head), kv, book, keys + lane, of_keys + lane);
    write_kvquant_value(tile.v(i, head), kv, book, values + lane * (kv.key_bytes() / kTile), scales + lane,
                        middles + lane, of_values + lane);
  }
  if (!tile.clear()) return;
  for (int lane = tile.end; lane < kTile; ++lane) {
    scales[lane] = middles[lane] = 0;
    for (int i = 0; i < count; ++i) of_values[i * kTile + lane] = 0;
  }
}

// A few tokens touch a line for every few bytes of a key: all at once they wait for memory once.
void fetch(const Tile& tile) {
  const KVLayout& kv = tile.t.kv;
  const size_t row_bytes = kv.key_bytes() / 4;  // of interleaved values
  for (int h = tile.t.head_begin; h < tile.t.head_end; ++h) {
    const char* keys = tile.at(h);
    for (size_t i = 0; i < kv.key_bytes(); i += 64) prefetch(keys + i);
    const char* values = keys + kv.key_bytes() + static_cast<size_t>(tile.lane / 4) * row_bytes;
    for (size_t i = 0; i < row_bytes; i += 64) prefetch(values + i);
  }
}

QUIRE_INLINE void (*writer(KVType type))(const Tile&, int) {
  switch (type) {
    case KVType::f32: return write_f32;
    case KVType::f16: return write_f16;
    case KVType::i8: return write_i8;
    case KVType::e4m3: return write_fp8<3>;
    case KVType::e5m2: return write_fp8<2>;
    case KVType::i4: return write_i4;
    case KVType::kvquant3: return write_kvquant;
    default: return write_bf16;
  }
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
