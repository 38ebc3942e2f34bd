// Linear layers over weights in groups: 4- or 8-bit codes, a scale and perhaps an offset for each group.
//
// Codes are unsigned and inputs signed, as the dot-product instructions want them. For one output, group after group:
//
//   I = sum of x·code, exactly, less middle · (sum of x) when the format is symmetric
//   t = scale · I  (+ offset · (sum of x))
//   y = y + x_scale · t
//
// in this order for any number of rows.

#include "kernels.h"
#include "kernels/micro.h"
#include "kernels/table.h"
#include "simd/groups.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kBlockK = 512;           // input features whose codes are taken apart at once: 32 KiB of bytes
constexpr int kBlockGroups = kBlockK / 16;
constexpr int kDirectRows = kRows < 4 ? kRows : 4;  // so few rows use nibbles as they are loaded
constexpr size_t kPrefetch = 4096;     // a single row block: bytes ahead of the running load

// Scales and offsets of a block of groups as float32.
struct Scales {
  alignas(64) float scale[kBlockGroups * kPanel];
  alignas(64) float offset[kBlockGroups * kPanel];
};

QUIRE_INLINE V16 load_kind(const char* p, GroupKind kind) {
  switch (kind) {
    case GroupKind::f16: return load_half(reinterpret_cast<const uint16_t*>(p));
    case GroupKind::bf16: return load_bf16(reinterpret_cast<const uint16_t*>(p));
    case GroupKind::f32: return load(reinterpret_cast<const float*>(p));
    default: return load_u8(reinterpret_cast<const uint8_t*>(p));
  }
}

// What is added for each unit of a group's sum of inputs: -scale · zero, or the offset.
QUIRE_INLINE void expand(const GroupFormat& f, const char* panel, int g, float* scale, float* offset) {
  const char* at = panel + f.at(g);
  const uint16_t* factor = reinterpret_cast<const uint16_t*>(panel + f.super_at(g));
  const size_t step = 16 * GroupFormat::kind_bytes(f.scales), offset_step = 16 * GroupFormat::kind_bytes(f.offsets);
  for (int c = 0; c < kPanel / 16; ++c) {
    V16 s = load_kind(at + c * step, f.scales);
    if (f.scales == GroupKind::f16_u8) s = mul(load_half(factor + c * 16), s);
    store(scale + c * 16, s);
    if (!f.offset()) continue;
    const V16 raw = load_kind(at + kPanel / 16 * step + c * offset_step, f.offsets);
    V16 o = raw;
    if (f.offsets == GroupKind::u8) o = sub(zero(), mul(s, raw));
    if (f.offsets == GroupKind::f16_u8) o = sub(zero(), mul(load_half(factor + kPanel + c * 16), raw));
    store(offset + c * 16, o);
  }
}

// One group of one row block.
struct Tile {
  const int8_t* x;        // first row, at the group's first feature
  size_t ldx;
  const float* x_scale;   // first row, of this group
  const int32_t* x_sum;
  size_t groups;          // pitch of both
  const uint8_t* w;       // codes: packed nibbles or bytes
  const float* scale;     // [64]
  const float* offset;
  float* y;               // running sums [R][64]
  int size, middle;
  const char* ahead;      // lines to prefetch beside the work
  int lines;
  bool near;              // into the L1 cache
};

QUIRE_INLINE void fetch(const Tile& t, int from, int to) {
  for (int i = from; i < to && i < t.lines; ++i) t.near ? prefetch(t.ahead + i * 64) : prefetch_l2(t.ahead + i * 64);
}

// acc[r][c] += codes of C vectors · four features of R rows.
template <bool kNibbles, int R, int C>
QUIRE_INLINE void dots(I16* acc, const I16* w, const int8_t* x, size_t ldx) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const I16 v = iset1(x + r * ldx);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      acc[r * C + c] = kNibbles ? dot_u4s8(acc[r * C + c], w[c], v) : dot_u8s8(acc[r * C + c], w[c], v);
  }
}

// kPacked: w holds nibbles; else bytes, below 16 when kNibbles.
template <bool kPacked, bool kNibbles, bool kOffset, int R>
QUIRE_INLINE void tile_rows(const Tile& t) {
  constexpr int C = cols_for<R>();
  for (int c0 = 0; c0 < kPanel / 16; c0 += C) {
    I16 acc[R * C], w[C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const I16 first = kOffset ? izero() : iset(-t.middle * t.x_sum[r * t.groups]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r * C + c] = first;
    }
    const uint8_t* p = t.w + c0 * 64;
    const int8_t* x = t.x;
    const int steps = t.size / (kPacked ? 8 : 4), lines = c0 == 0 ? (t.lines + steps - 1) / steps : 0;
    for (int s = 0; s < steps; ++s) {
      fetch(t, s * lines, (s + 1) * lines);
      if (kPacked) {
        for (int c = 0; c < C; ++c) w[c] = low_nibbles(iload(p + c * 64));
        dots<kNibbles, R, C>(acc, w, x, t.ldx);
        for (int c = 0; c < C; ++c) w[c] = high_nibbles(iload(p + c * 64));
        x += 4;
      } else {
        for (int c = 0; c < C; ++c) w[c] = iload(p + c * 64);
      }
      dots<kNibbles, R, C>(acc, w, x, t.ldx);
      x += 4;
      p += kPanel * 4;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const V16 x_scale = set1(t.x_scale[r * t.groups]);
      const V16 x_sum = set1(static_cast<float>(t.x_sum[r * t.groups]));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const int col = (c0 + c) * 16;
        V16 v = mul(load(t.scale + col), to_float(acc[r * C + c]));
        if (kOffset) v = fma(load(t.offset + col), x_sum, v);
        store(t.y + r * kPanel + col, fma(x_scale, v, load(t.y + r * kPanel + col)));
      }
    }
  }
}

template <bool kPacked, bool kNibbles, bool kOffset>
void tile(int rows, const Tile& t) {
  switch (rows) {
    case 1: return tile_rows<kPacked, kNibbles, kOffset, 1>(t);
    case 2: return tile_rows<kPacked, kNibbles, kOffset, 2>(t);
#if QUIRE_AVX512 || QUIRE_AVX2
    case 3: return tile_rows<kPacked, kNibbles, kOffset, 3>(t);
    case 4: return tile_rows<kPacked, kNibbles, kOffset, 4>(t);
#endif
#if QUIRE_AVX512
    case 5: if (!kPacked) return tile_rows<false, kNibbles, kOffset, 5>(t); break;
    case 6: if (!kPacked) return tile_rows<false, kNibbles, kOffset, 6>(t); break;
#endif
  }
}

using TileFn = void (*)(int, const Tile&);
TileFn pick(bool packed, int bits, bool offset) {
  if (packed) return offset ? tile<true, true, true> : tile<true, true, false>;
  if (bits == 4) return offset ? tile<false, true, true> : tile<false, true, false>;
  return offset ? tile<false, false, true> : tile<false, false, false>;
}

// A group's nibbles as bytes [size/4][64][4].
QUIRE_INLINE void unpack(const uint8_t* from, uint8_t* to, int size) {
  for (int s = 0; s < size / 8; ++s) {
    for (int c = 0; c < kPanel / 16; ++c) {
      const I16 v = iload(from + c * 64);
      istore(to + c * 64, low_nibbles(v));
      istore(to + (c + 4) * 64, high_nibbles(v));
    }
    from += kPanel * 4;
    to += kPanel * 8;
  }
}

// One panel: all rows over all groups, block by block.
class Panel {
 public:
  Panel(const LinearTask& task, int p)
      : t_(task), f_(task.groups), panel_(static_cast<const char*>(task.w) + p * task.groups.panel_bytes(task.k)),
        end_(static_cast<const char*>(task.w) + task.panel_end * task.groups.panel_bytes(task.k)),
        first_(p * kPanel), width_(task.n - first_ < kPanel ? task.n - first_ : kPanel), groups_(f_.groups(task.k)) {}

  void run() {
    const bool direct = f_.bits == 4 && t_.rows <= kDirectRows;
    const TileFn tile = pick(direct, f_.bits, f_.offset());
    const int row_blocks = (t_.rows + kRows - 1) / kRows, block = kBlockK / f_.size;
    for (int g0 = 0; g0 < groups_; g0 += block) {
      const int count = groups_ - g0 < block ? groups_ - g0 : block;
      for (int g = 0; g < count; ++g) {
        expand(f_, panel_, g0 + g, scales_.scale + g * kPanel, scales_.offset + g * kPanel);
        if (f_.bits == 4 && !direct) unpack(codes(g0 + g), bytes_ + static_cast<size_t>(g) * f_.size * kPanel, f_.size);
      }
      // rows in blocks of nearly equal height: 8 rows are 4 + 4, not 6 + 2
      for (int b = 0; b < row_blocks; ++b) {
        const int r0 = static_cast<int>(static_cast<int64_t>(t_.rows) * b / row_blocks);
        const int r1 = static_cast<int>(static_cast<int64_t>(t_.rows) * (b + 1) / row_blocks);
        if (g0 == 0 || row_blocks > 1) load_sums(r0, r1, g0 == 0);
        for (int g = 0; g < count; ++g) row_block(tile, direct, r0, r1, g0, g, count, b, row_blocks);
        if (g0 + count == groups_ || row_blocks > 1) store_sums(r0, r1, g0 + count == groups_);
      }
    }
  }

 private:
  const uint8_t* codes(int g) const { return reinterpret_cast<const uint8_t*>(panel_ + f_.at(g) + f_.codes_at()); }

  void row_block(TileFn tile, bool direct, int r0, int r1, int g0, int g, int count, int b, int row_blocks) {
    Tile t;
    const size_t at = r0 * static_cast<size_t>(groups_) + g0 + g;
    t.x = static_cast<const int8_t*>(t_.x) + r0 * t_.ldx + static_cast<size_t>(g0 + g) * f_.size;
    t.ldx = t_.ldx;
    t.x_scale = t_.x_scale + at;
    t.x_sum = t_.x_sum + at;
    t.groups = static_cast<size_t>(groups_);
    t.w = f_.bits == 8 || direct ? codes(g0 + g) : bytes_ + static_cast<size_t>(g) * f_.size * kPanel;
    t.scale = scales_.scale + g * kPanel;
    t.offset = scales_.offset + g * kPanel;
    t.y = sums_;
    t.size = f_.size;
    t.middle = 1 << (f_.bits - 1);
    t.near = row_blocks == 1;
    if (t.near) {  // the stream a fixed distance ahead
      t.ahead = panel_ + f_.at(g0 + g) + kPrefetch;
      t.lines = static_cast<int>((f_.at(g0 + g + 1) - f_.at(g0 + g)) / 64);
    } else {  // the next block, fetched once by all row blocks together
      const size_t bytes = f_.at(g0 + count) - f_.at(g0);
      const int share = static_cast<int>((bytes / 64 + row_blocks * count - 1) / (row_blocks * count));
      t.ahead = panel_ + f_.at(g0 + count) + (static_cast<size_t>(b) * count + g) * share * 64;
      t.lines = share;
    }
    const std::ptrdiff_t left = (end_ - t.ahead + 63) / 64;
    if (left < t.lines) t.lines = left < 0 ? 0 : static_cast<int>(left);
    tile(r1 - r0, t);
  }

  // Between blocks the sums of several row blocks rest in y; a store and a load change no bit.
  void load_sums(int r0, int r1, bool clear) {
    for (int r = r0; r < r1; ++r)
      for (int c = 0; c < kPanel; c += 16)
        store(sums_ + (r - r0) * kPanel + c, clear ? zero() : load_n(row(r) + c, width_ - c));
  }
  void store_sums(int r0, int r1, bool last) {
    for (int r = r0; r < r1; ++r)
      for (int c = 0; c < width_; c += 16) {
        V16 v = load(sums_ + (r - r0) * kPanel + c);
        if (last && t_.bias) v = add(v, load_n(t_.bias + first_ + c, width_ - c));
        width_ - c >= 16 ? store(row(r) + c, v) : store_n(row(r) + c, v, width_ - c);
      }
  }
  float* row(int r) const { return t_.y + r * t_.ldy + first_; }

  const LinearTask& t_;
  const GroupFormat f_;
  const char* panel_;
  const char* end_;
  const int first_, width_, groups_;
  Scales scales_;
  alignas(64) float sums_[kRows * kPanel];
  alignas(64) uint8_t bytes_[kBlockK * kPanel];
};

}  // namespace

void linear_groups(const LinearTask& task) {
  for (int p = task.panel_begin; p < task.panel_end; ++p) Panel(task, p).run();
}

}  // namespace QUIRE_ISA
}  // namespace quire
