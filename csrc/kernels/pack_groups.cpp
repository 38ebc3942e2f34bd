// Into and out of groups: packing of weights, rounding of inputs, gathering of embeddings.

#include "kernels.h"
#include "kernels/table.h"
#include "simd/groups.h"
#include "simd/half.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kMaxVectors = 8;  // of the largest group, 128 features
// As quant.groups.SHARES: how much of the widest scale rounding to 4 bits or fewer tries.
constexpr float kShares[] = {1.0f, 0.97f, 0.94f, 0.91f, 0.88f, 0.85f, 0.82f, 0.79f};
constexpr float kTiny = 7.888609052210118e-31f;  // 2^-100

QUIRE_INLINE V16 source(const void* src, DType type, size_t i, int n) {
  if (type == DType::f32) return load_n(static_cast<const float*>(src) + i, n);
  uint16_t h[16] = {0};
  std::memcpy(h, static_cast<const uint16_t*>(src) + i, static_cast<size_t>(n < 16 ? n : 16) * 2);
  return type == DType::bf16 ? load_bf16(h) : load_half(h);
}

// A group's codes of one row into column `col` of a panel.
QUIRE_INLINE void put_codes(const GroupFormat& f, char* group, int col, const uint8_t* codes) {
  uint8_t* out = reinterpret_cast<uint8_t*>(group) + f.codes_at() + col * 4;
  if (f.bits == 8) {
    for (int k = 0; k < f.size; k += 4) std::memcpy(out + k * kPanel, codes + k, 4);
    return;
  }
  const int features = unit_features(f.bits), low = f.bits == 3 ? 2 : f.bits, lines = low * features / 32;
  for (int k = 0; k < f.size; k += features, out += unit_bytes(f.bits)) {
    uint32_t words[3] = {0};
    for (int i = 0; i < features / 4; ++i) {
      uint32_t four;
      std::memcpy(&four, codes + k + 4 * i, 4);
      words[i * low / 8] |= (four & ((1u << low) - 1) * 0x01010101u) << i * low % 8;
      if (f.bits == 3) words[2] |= (four >> 2 & 0x01010101u) << i;
    }
    for (int i = 0; i < lines + (f.bits == 3); ++i) std::memcpy(out + i * 4 * kPanel, &words[i], 4);
  }
}

// Vector v of a group's codes, which begin at `codes`.
QUIRE_INLINE V16 codes_of(const GroupFormat& f, const uint8_t* codes, int v) {
  uint32_t fours[4];
  if (f.bits == 8) {
    for (int i = 0; i < 4; ++i) std::memcpy(&fours[i], codes + (v * 4 + i) * 4 * kPanel, 4);
  } else {
    const int low = f.bits == 3 ? 2 : f.bits, features = unit_features(f.bits);
    for (int i = 0; i < 4; ++i) {
      const int feature = v * 16 + i * 4, four = feature % features / 4;
      const uint8_t* unit = codes + feature / features * unit_bytes(f.bits);
      std::memcpy(&fours[i], unit + four * low / 8 * 4 * kPanel, 4);
      fours[i] = fours[i] >> four * low % 8 & ((1u << low) - 1) * 0x01010101u;
      uint32_t third = 0;
      if (f.bits == 3) std::memcpy(&third, unit + 2 * 4 * kPanel, 4);
      fours[i] |= (third >> four & 0x01010101u) << 2;
    }
  }
  return load_u8(reinterpret_cast<const uint8_t*>(fours));
}

QUIRE_INLINE float stored(GroupKind kind, float x) {
  if (kind == GroupKind::f16) return half_to_float(float_to_half(x));
  return kind == GroupKind::bf16 ? bf16_to_float(float_to_bf16(x)) : x;
}
QUIRE_INLINE void put_scale(GroupKind kind, char* to, int col, float x) {
  const uint16_t h = kind == GroupKind::f16 ? float_to_half(x) : float_to_bf16(x);
  kind == GroupKind::f32 ? std::memcpy(to + col * 4, &x, 4) : std::memcpy(to + col * 2, &h, 2);
}

QUIRE_INLINE float lowest(V16 a) { return -reduce_max(sub(zero(), a)); }

// One group rounded as quant.groups.quantize defines: its codes, and the scale.
QUIRE_INLINE float round_group(const GroupFormat& f, const V16* w, uint8_t* codes) {
  const int vectors = f.size / 16;
  V16 top = w[0], bottom = w[0];
  for (int v = 1; v < vectors; ++v) top = vmax(top, w[v]), bottom = vmin(bottom, w[v]);
  const float high = reduce_max(top), low = lowest(bottom), widest = high >= -low ? high : low;
  const float half = static_cast<float>(1 << (f.bits - 1));
  const int shares = f.bits <= 4 ? 8 : 1;
  float best = INFINITY, best_scale = 0.0f;
  V16 kept[kMaxVectors];
  for (int v = 0; v < vectors; ++v) kept[v] = zero();
  for (int i = 0; i < shares; ++i) {
    float scale = stored(f.scales, widest * (kShares[i] / -half));
    if (!(scale >= kTiny || scale <= -kTiny)) scale = 0.0f;
    const V16 s = set1(scale), inverse = set1(scale != 0.0f ? 1.0f / scale : 0.0f);
    V16 q[kMaxVectors], error = zero();
    for (int v = 0; v < vectors; ++v) {
      q[v] = round_even(vmax(vmin(mul(w[v], inverse), set1(half - 1.0f)), set1(-half)));
      const V16 far = sub(w[v], mul(s, q[v]));
      error = add(error, mul(far, far));
    }
    const float sum = reduce_add(error);
    if (!(sum < best)) continue;
    best = sum;
    best_scale = scale;
    for (int v = 0; v < vectors; ++v) kept[v] = add(q[v], set1(half));
  }
  for (int v = 0; v < vectors; ++v) store_s8(reinterpret_cast<int8_t*>(codes) + v * 16, to_int(kept[v]));
  return best_scale;
}

// Where a row of a weight lies: its panel, and its column there.
struct Place {
  char* panel;
  int col;
};
QUIRE_INLINE Place place(void* dst, const GroupFormat& f, int k, int row) {
  return {static_cast<char*>(dst) + static_cast<size_t>(row / kPanel) * f.panel_bytes(k), row % kPanel};
}

// f(group, row, where it lies) for the rows of a task. Rows of one panel go together, group by group: a group's codes
// stay in the cache until its cache lines are full.
template <class Task, class F>
QUIRE_INLINE void each_group(const Task& t, F f) {
  const int groups = t.groups.groups(t.k);
  for (int r0 = t.row_begin; r0 < t.row_end;) {
    const int room = kPanel - (t.row_offset + r0) % kPanel, r1 = t.row_end - r0 < room ? t.row_end : r0 + room;
    for (int g = 0; g < groups; ++g)
      for (int r = r0; r < r1; ++r) f(g, r, place(t.dst, t.groups, t.k, t.row_offset + r));
    r0 = r1;
  }
}

QUIRE_INLINE float scalar(const char* p, GroupKind kind, size_t i) {
  switch (kind) {
    case GroupKind::f16: return half_to_float(reinterpret_cast<const uint16_t*>(p)[i]);
    case GroupKind::bf16: return bf16_to_float(reinterpret_cast<const uint16_t*>(p)[i]);
    case GroupKind::f32: return reinterpret_cast<const float*>(p)[i];
    default: return static_cast<float>(reinterpret_cast<const uint8_t*>(p)[i]);
  }
}

// Rows of a QuantizeTask in groups of kVectors · 16. Maxima of all groups come first, then their bits, then the bytes:
// three short dependent chains a group instead of a long one.
template <int kVectors, bool kRotated>
void round_rows(const QuantizeTask& t) {
  constexpr int kSize = kVectors * 16;
  const int groups = (t.cols + kSize - 1) / kSize, whole = t.cols / kSize;
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const size_t row = static_cast<size_t>(r) * t.cols;
    const auto vectors_of = [&](int g, V16* x) {
      const int c = g * kSize;
      if (g < whole) {
        for (int v = 0; v < kVectors; ++v) x[v] = load(t.x + row + c + v * 16);
      } else {
        for (int v = 0, left = t.cols - c; v < kVectors; ++v, left -= 16)
          x[v] = left > 0 ? load_n(t.x + row + c + v * 16, left) : zero();
      }
      if (!kRotated) return;
      rotate(x, kVectors);
      for (int v = 0; v < kVectors; ++v) x[v] = mul(x[v], set1(input_share(kVectors)));
    };
    // The second half holds first the bits of each group's maximum, as a positive float's order is that of its bits, then
    // how many bits the group has: that is read before the numbers of earlier groups reach its place.
    int32_t* numbers = t.groups + static_cast<size_t>(r) * groups * 2;
    int32_t* bits = numbers + groups;
    int32_t widest = static_cast<int32_t>(float_to_bits(t.at_least));
    for (int g = 0; g < groups; ++g) {
      V16 x[kVectors];
      vectors_of(g, x);
      V16 most = magnitude(x[0]);
      for (int v = 1; v < kVectors; ++v) most = vmax_bits(most, magnitude(x[v]));
      bits[g] = max_lane_bits(most);
      widest = bits[g] > widest ? bits[g] : widest;
    }
    const float top = widest < 0x7f800000 ? bits_to_float(static_cast<uint32_t>(widest)) : NAN;
    const float scale = top < kTiny ? 0.0f : top / 127.0f;
    t.scale[r] = scale / (1 << kGroupBits);
    if (t.top) t.top[r] = top;
    // how often a group can be doubled and stay within the row: exponents, less one if its mantissa is larger
    for (int g = 0; g < groups; ++g) {
      const int doublings = (widest - bits[g]) >> 23;
      bits[g] = doublings <= 0 ? kGroupBits : doublings < kGroupBits ? kGroupBits - doublings : 0;  // also for NaN
    }
    float times[kGroupBits + 1];
    for (int b = 0; b <= kGroupBits; ++b)
      times[b] = (scale > 0.0f ? 1.0f / scale : 0.0f) * static_cast<float>(1 << (kGroupBits - b));
    int8_t* out = t.out + r * t.pitch;
    for (int g = 0; g < groups; ++g, out += kSize) {
      V16 x[kVectors];
      vectors_of(g, x);
      const V16 inverse = set1(times[bits[g]]);
      const int32_t one = kGroupOne + (bits[g] << 23);
      I16 sum = izero();
      for (int v = 0; v < kVectors; ++v) {
        const I16 q = to_int(mul(x[v], inverse));
        sum = iadd(sum, q);
        store_s8(out + v * 16, q);
      }
      numbers[2 * g] = one;
      numbers[2 * g + 1] = one - 8 * static_cast<int32_t>(reduce_add(to_float(sum)));  // exact: below 2^24
    }
  }
}

}  // namespace

void pack_groups(const PackTask& t) {
  const GroupFormat& f = t.groups;
  const int vectors = f.size / 16;
  each_group(t, [&](int g, int r, const Place& at) {
    const size_t from = static_cast<size_t>(r) * t.k + static_cast<size_t>(g) * f.size;
    V16 w[kMaxVectors];
    for (int v = 0; v < vectors; ++v) {
      const int left = t.k - g * f.size - v * 16;
      w[v] = left > 0 ? source(t.src, t.src_dtype, from + v * 16, left) : zero();
    }
    if (f.rotated) {
      rotate(w, vectors);
      for (int v = 0; v < vectors; ++v) w[v] = mul(w[v], set1(weight_share(vectors)));
    }
    uint8_t codes[kMaxVectors * 16];
    const float scale = round_group(f, w, codes);
    put_codes(f, at.panel + f.at(g), at.col, codes);
    put_scale(f.scales, at.panel + f.at(g), at.col, scale);
  });
}

void pack_codes(const PackCodesTask& t) {
  const GroupFormat& f = t.groups;
  const int groups = f.groups(t.k), supers = (groups + GroupFormat::kSuper - 1) / GroupFormat::kSuper;
  const size_t scale = GroupFormat::kind_bytes(f.scales), offset = GroupFormat::kind_bytes(f.offsets);
  const int factors = f.offset() ? 2 : 1;
  each_group(t, [&](int g, int r, const Place& at) {
    char* group = at.panel + f.at(g);
    const size_t from = static_cast<size_t>(r) * groups + g;
    std::memcpy(group + at.col * scale, t.scales + from * scale, scale);
    if (offset) std::memcpy(group + kPanel * scale + at.col * offset, t.offsets + from * offset, offset);
    if (t.factors && g % GroupFormat::kSuper == 0)
      for (int i = 0; i < factors; ++i)
        std::memcpy(at.panel + f.super_at(g) + (i * kPanel + at.col) * 2,
                    t.factors + (static_cast<size_t>(r) * supers + g / GroupFormat::kSuper) * factors + i, 2);
    uint8_t codes[kMaxVectors * 16] = {0};
    const int left = t.k - g * f.size;
    std::memcpy(codes, t.codes + static_cast<size_t>(r) * t.k + static_cast<size_t>(g) * f.size,
                static_cast<size_t>(left < f.size ? left : f.size));
    put_codes(f, group, at.col, codes);
  });
}

void quantize(const QuantizeTask& t) {
  switch (t.group) {
    case 16: return t.rotated ? round_rows<1, true>(t) : round_rows<1, false>(t);
    case 32: return t.rotated ? round_rows<2, true>(t) : round_rows<2, false>(t);
    case 64: return t.rotated ? round_rows<4, true>(t) : round_rows<4, false>(t);
    default: return t.rotated ? round_rows<8, true>(t) : round_rows<8, false>(t);
  }
}

void embed_groups(const EmbedTask& t) {
  const GroupFormat& f = t.groups;
  const int groups = f.groups(t.cols);
  for (int i = t.token_begin; i < t.token_end; ++i) {
    const int id = t.ids[i] - t.first;
    float* out = t.out + static_cast<size_t>(i) * t.cols;
    if (id < 0 || id >= t.rows) {
      std::memset(out, 0, static_cast<size_t>(t.cols) * sizeof(float));
      continue;
    }
    const Place at = place(const_cast<void*>(t.table), f, t.cols, id);
    for (int g = 0; g < groups; ++g) {
      const char* group = at.panel + f.at(g);
      const uint16_t* factor = reinterpret_cast<const uint16_t*>(at.panel + f.super_at(g));
      float scale = scalar(group, f.scales, at.col), offset = 0.0f, zero_point = 0.0f;
      if (f.scales == GroupKind::f16_u8) scale *= half_to_float(factor[at.col]);
      const char* offsets = group + kPanel * GroupFormat::kind_bytes(f.scales);
      if (!f.offset())
        zero_point = static_cast<float>(1 << (f.bits - 1));
      else if (f.offsets == GroupKind::u8)
        zero_point = scalar(offsets, f.offsets, at.col);
      else
        offset = scalar(offsets, f.offsets, at.col);
      if (f.offsets == GroupKind::f16_u8) offset *= -half_to_float(factor[kPanel + at.col]);
      const uint8_t* codes = reinterpret_cast<const uint8_t*>(group + f.codes_at()) + at.col * 4;
      const int vectors = f.size / 16;
      V16 x[kMaxVectors];
      for (int v = 0; v < vectors; ++v) {
        x[v] = mul(set1(scale), sub(codes_of(f, codes, v), set1(zero_point)));
        if (f.offset() && f.offsets != GroupKind::u8) x[v] = add(x[v], set1(offset));
      }
      if (f.rotated) {
        rotate(x, vectors);
        for (int v = 0; v < vectors; ++v) x[v] = mul(x[v], set1(input_share(vectors)));
      }
      for (int v = 0; v < vectors; ++v) {
        const int k = g * f.size + v * 16, left = t.cols - k;
        if (left >= 16)
          store(out + k, x[v]);
        else if (left > 0)
          store_n(out + k, x[v], left);
      }
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
