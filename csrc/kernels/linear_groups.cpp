// Linear layers over weights in groups: codes of 2, 3, 4 or 8 bits, a scale and perhaps an offset for each group.
//
// Codes are unsigned and inputs signed, as the dot-product instructions want them. A row's inputs have one scale, and a
// group of them is that many bits to the left (QuantizeTask). For one output, group after group:
//
//   I = sum of x·(code - middle or zero point), exactly
//   y = scale · (I << bits) + y
//   y = offset · ((sum of x) << bits) + y      with float offsets
//
// in this order for any number of rows, and then y · x_scale + bias.

#include <utility>

#include "kernels.h"
#include "kernels/table.h"
#include "simd/group_tile.h"
#include "simd/half.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Input features that all rows pass over together. Of few rows the next block is fetched meanwhile, and both stay in the
// L1 cache; of many rows fewer passes over their sums count for more.
constexpr int kBlockK = 1024, kFewBlockK = 512;
constexpr int kFewTiles = 4;
constexpr size_t kPrefetch = 4096;  // a single pass over the weights: bytes ahead of the running load

// Register tiles: at most kTileRows rows at a time, tile_cols(R) vectors of sixteen outputs. A tile holds int32 sums of
// the running group and float32 sums of all before it.
#if QUIRE_AVX512  // more than two rows are another tile's: simd/group_tile.h
constexpr int kTileRows = 2;
constexpr int tile_cols(int) { return 4; }
#elif QUIRE_AVX2
constexpr int kTileRows = 4;
constexpr int tile_cols(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int kTileRows = 2;
constexpr int tile_cols(int rows) { return rows == 1 ? 4 : 1; }
#endif

constexpr int kMaxGroups = kBlockK / 16;

// What a tile's rows need of each group of a block, at fixed distances: offsets of loads are then constants.
struct Numbers {
  alignas(64) int32_t less[kTileRows][kMaxGroups];   // minus eight times a group's sum
  alignas(64) int32_t start[kTileRows][kMaxGroups];  // minus that sum times 2^middle, or 0 with float offsets
  alignas(64) int32_t bits[kTileRows][kMaxGroups];
};

// A format's distances in bytes.
struct Layout {
  explicit Layout(const GroupFormat& f)
      : scales(f.scales), offsets(f.offsets), size(f.size), scale(static_cast<int>(GroupFormat::kind_bytes(f.scales))),
        offset(static_cast<int>(GroupFormat::kind_bytes(f.offsets))), codes(static_cast<int>(f.codes_at())),
        group(static_cast<int>(f.codes_at() + f.code_bytes())), factors(static_cast<int>(f.super_bytes())) {}

  GroupKind scales, offsets;
  int size;            // features
  int scale, offset;   // of one output
  int codes;           // from the group's start
  int group, factors;  // of a panel
};

// Groups [0, count) of one panel for some rows.
struct Tile {
  explicit Tile(const GroupFormat& format) : f(format) {}

  const Layout f;
  const int8_t* x;  // first row, at the first group's first feature
  size_t ldx;
  const Numbers* in;
  const float* x_scale;  // of the rows
  const char* w;         // the first group, or the factors before it
  float* y;              // [R][width], running sums between two calls
  size_t ldy;
  const float* bias;  // of the panel, or null
  int count, width;
  int next;  // rows of the tile after this, whose part of y is fetched meanwhile
  bool first, last;
  const char* ahead;  // to be fetched beside the work, `lines` cache lines a group until `end`
  const char* end;
  int lines;
  size_t far;  // or 0; a stream: what lies so far behind is fetched as it is read
};

// use(scales of sixteen outputs from column `col`); `group` is where the group begins, `factors` where its factors do. Each
// kind has a branch of its own: scales that come from several go through memory, half by half, and stall.
template <class Use>
QUIRE_INLINE void with_scales(const Layout& f, const char* group, const char* factors, int col, Use use) {
  const char* p = group + col * f.scale;
  if (__builtin_expect(f.scales == GroupKind::f16, 1)) return use(load_half(reinterpret_cast<const uint16_t*>(p)));
  if (f.scales == GroupKind::bf16) return use(load_bf16(reinterpret_cast<const uint16_t*>(p)));
  if (f.scales == GroupKind::f16_u8)
    return use(
        mul(load_half(reinterpret_cast<const uint16_t*>(factors) + col), load_u8(reinterpret_cast<const uint8_t*>(p))));
  use(load(reinterpret_cast<const float*>(p)));
}

// The same of minus an eighth of the offsets: what is added for each eighth of minus a group's sum of inputs.
template <class Use>
QUIRE_INLINE void with_offsets(const Layout& f, const char* group, const char* factors, int col, V16 scale, Use use) {
  const char* p = group + kPanel * f.scale + col * f.offset;
  const uint16_t* half = reinterpret_cast<const uint16_t*>(p);
  const V16 eighth = set1(0.125f);
  if (f.offsets == GroupKind::f16_u8) {
    const V16 factor = load_half(reinterpret_cast<const uint16_t*>(factors) + kPanel + col);
    return use(mul(mul(factor, load_u8(reinterpret_cast<const uint8_t*>(p))), eighth));
  }
  if (f.offsets == GroupKind::u8) return use(mul(mul(scale, load_u8(reinterpret_cast<const uint8_t*>(p))), eighth));
  if (f.offsets == GroupKind::f16) return use(mul(sub(zero(), load_half(half)), eighth));
  if (f.offsets == GroupKind::bf16) return use(mul(sub(zero(), load_bf16(half)), eighth));
  use(mul(sub(zero(), load(reinterpret_cast<const float*>(p))), eighth));
}

// With all sixteen registers in use, GCC adds the products of several steps before it adds them to sums in memory. Behind
// this a sum is in its registers. Nothing is executed.
QUIRE_INLINE void settle([[maybe_unused]] I16& sum) {
#if QUIRE_AVX2
  __asm__("" : "+x"(sum.a), "+x"(sum.b));
#endif
}

// acc[r][c] += codes of four features of C vectors of the unit at p, with `more` added if they have zero points, · those
// features of R rows.
template <int kBits, bool kZeroed, int R, int C, int kFour>
QUIRE_INLINE void four(I16* acc, const uint8_t* p, const I16* more, const int8_t* x, const int8_t* x3, size_t ldx) {
  x += 4 * kFour, x3 += 4 * kFour;
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    I16 w = codes_of_four<kBits, kFour>(p + c * 64);
    if (kZeroed) w = iadd(w, more[c]);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      acc[r * C + c] = dot_u5s8(acc[r * C + c], w, iset1(r < 3 ? x + r * ldx : x3 + (r - 3) * ldx));
    if (R == 1) settle(acc[c]);
  }
}

// The same of eight-bit codes at p.
template <int R, int C>
QUIRE_INLINE void bytes(I16* acc, const uint8_t* p, const int8_t* x, const int8_t* x3, size_t ldx) {
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    const ByteCodes w = byte_codes(iload(p + c * 64));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      acc[r * C + c] = dot_bytes(acc[r * C + c], w, iset1(r < 3 ? x + r * ldx : x3 + (r - 3) * ldx));
    if (R == 1) settle(acc[c]);
  }
}

template <int kBits, bool kZeroed, int R, int C, int... kFour>
QUIRE_INLINE void unit(I16* acc, const uint8_t* p, const I16* more, const int8_t* x, const int8_t* x3, size_t ldx,
                       std::integer_sequence<int, kFour...>) {
  (four<kBits, kZeroed, R, C, kFour>(acc, p, more, x, x3, ldx), ...);
}

// One group's int32 sums, over its codes from column `col` on.
template <int kBits, bool kZeroed, int R, int C>
QUIRE_INLINE void products(const Layout& f, I16* acc, const char* group, int col, const int8_t* x, size_t ldx,
                           const int32_t* start, size_t far) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(group) + f.codes + col * 4;
  I16 more[C];
  if (kZeroed) {
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(group) + kPanel * f.scale + col;
    for (int c = 0; c < C; ++c) more[c] = isub(iset(0x10101010), four_times(zeros + c * 16));
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const I16 first = iset1(start + r * kMaxGroups);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r * C + c] = first;
  }
  const int8_t* x3 = x + 3 * ldx;  // two row pointers and one distance reach six rows
  const int8_t* const end = x + f.size;
  constexpr int kFeatures = kBits == 8 ? 8 : unit_features(kBits), kBytes = kFeatures * kPanel * kBits / 8;
  do {
    if (far)
      for (int i = 0; i < kBytes; i += 64) prefetch(p + far + i);
    if constexpr (kBits == 8) {
      bytes<R, C>(acc, p, x, x3, ldx);
      bytes<R, C>(acc, p + kPanel * 4, x + 4, x3 + 4, ldx);
    } else {
      unit<kBits, kZeroed, R, C>(acc, p, more, x, x3, ldx, std::make_integer_sequence<int, kFeatures / 4>());
    }
    p += kBytes;
    x += kFeatures;
    x3 += kFeatures;
  } while (x < end);
}

template <int R, int C>
QUIRE_INLINE void store_sums(const Tile& t, const V16* sum, int col) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const int at = col + c * 16, left = t.width - at;
      V16 v = sum[r * C + c];
      if (t.last) v = mul(v, set1(t.x_scale[r]));
      if (t.last && t.bias) v = add(v, load_n(t.bias + at, left));
      if (left >= 16)
        store(t.y + r * t.ldy + at, v);
      else if (left > 0)
        store_n(t.y + r * t.ldy + at, v, left);
    }
}

template <int kBits, bool kZeroed, bool kOffset, int R>
void tile_rows(const Tile& t) {
  constexpr int C = tile_cols(R);
  const Layout f = t.f;
  const char* ahead = t.ahead;
  for (int col = 0; col < kPanel; col += C * 16) {
    V16 sum[R * C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        sum[r * C + c] = t.first ? zero() : load_n(t.y + r * t.ldy + col + c * 16, t.width - col - c * 16);
    for (int r = R; r < R + t.next; ++r)
      for (int c = 0; c < C; ++c) prefetch(t.y + r * t.ldy + col + c * 16);
    const char* group = t.w;
    const char* factors = group;
    const int8_t* x = t.x;
    for (int g = 0; g < t.count; ++g) {
      if (ahead < t.end)
        for (int i = 0; i < t.lines; ++i, ahead += 64) prefetch(ahead);
      if (f.factors && g % GroupFormat::kSuper == 0) factors = group, group += f.factors;
      I16 acc[R * C];
      if (t.far)
        for (int i = 0; i < f.codes; i += 64) prefetch(group + t.far + i);
      products<kBits, kZeroed, R, C>(f, acc, group, col, x, t.ldx, &t.in->start[0][g], t.far);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        with_scales(f, group, factors, col + c * 16, [&](V16 scale) {
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r)
            sum[r * C + c] = fma(scale, to_float_shifted(acc[r * C + c], &t.in->bits[r][g]), sum[r * C + c]);
          if (!kOffset) return;
          with_offsets(f, group, factors, col + c * 16, scale, [&](V16 offset) {
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
              sum[r * C + c] = fma(offset, to_float_shifted(iset1(&t.in->less[r][g]), &t.in->bits[r][g]),
                                   sum[r * C + c]);
          });
        });
      }
      group += f.group;
      x += f.size;
    }
    store_sums<R, C>(t, sum, col);
  }
}

template <int kBits, bool kZeroed, bool kOffset>
void tile(int rows, const Tile& t) {
  switch (rows) {
    case 1: return tile_rows<kBits, kZeroed, kOffset, 1>(t);
    case 2: return tile_rows<kBits, kZeroed, kOffset, 2>(t);
#if QUIRE_AVX2
    case 3: return tile_rows<kBits, kZeroed, kOffset, 3>(t);
    case 4: return tile_rows<kBits, kZeroed, kOffset, 4>(t);
#endif
  }
}

// How a panel's codes become the unsigned operand. With fewer than eight bits and whole zero points it is code - zero
// point + 16, else the code.
struct Form {
  void (*tile)(int rows, const Tile&);
  int middle;  // 2^middle is taken off each operand
  bool offset, bytes;
};
template <int kBits>
Form form(const GroupFormat& f) {
  if (kBits != 8 && f.offsets == GroupKind::u8) return {tile<kBits, kBits != 8, false>, 4, false, false};
  if (f.offset()) return {tile<kBits, false, true>, 0, true, kBits == 8};
  return {tile<kBits, false, false>, kBits - 1, false, kBits == 8};
}
Form pick(const GroupFormat& f) {
  switch (f.bits) {
    case 2: return form<2>(f);
    case 3: return form<3>(f);
    case 4: return form<4>(f);
    default: return form<8>(f);
  }
}

// Rows [r0, r1) of the block's numbers.
void gather(const LinearTask& task, int r0, int r1, int g0, int count, Form form, Numbers* in) {
  const size_t groups = static_cast<size_t>(task.groups.groups(task.k));
  for (int r = r0; r < r1; ++r) {
    const int32_t* numbers = task.x_groups + (r * groups + g0) * 2;
    int32_t *less = in->less[r - r0], *start = in->start[r - r0], *bits = in->bits[r - r0];
    for (int g = 0; g < count; ++g) {
      less[g] = numbers[2 * g + 1] - numbers[2 * g];
      start[g] = form.offset ? 0 : less[g] * (1 << form.middle) / 8;
      if (form.bytes && kSignedBytes) start[g] -= less[g] * 16;
      bits[g] = (numbers[2 * g] - kGroupOne) >> 23;
    }
  }
}

// One panel: all rows over all groups, block by block. The highest tiles do most for a load: 8 rows are 6 + 2.
void panel(const LinearTask& task, int p, Numbers* in) {
  const GroupFormat& f = task.groups;
  const Form form = pick(f);
  const char* w = static_cast<const char*>(task.w) + p * f.panel_bytes(task.k);
  const int groups = f.groups(task.k), tiles = (task.rows + kTileRows - 1) / kTileRows;
  const int block = (tiles > kFewTiles ? kBlockK : kFewBlockK) / f.size;
  const bool once = tiles == 1 && tile_cols(task.rows) * 16 == kPanel;
  const size_t share = task.ahead ? task.ahead->share(static_cast<size_t>(task.panel_end - p)) : 0;
  if (share) task.ahead->fetch(share);
  Tile t(f);
  t.in = in;
  t.ldx = task.ldx;
  t.ldy = task.ldy;
  t.bias = task.bias ? task.bias + p * kPanel : nullptr;
  t.width = task.n - p * kPanel < kPanel ? task.n - p * kPanel : kPanel;
  for (int g0 = 0; g0 < groups; g0 += block) {
    const size_t bytes = f.block_bytes(block);
    t.w = w + f.block_bytes(g0);
    t.count = groups - g0 < block ? groups - g0 : block;
    t.first = g0 == 0;
    t.last = g0 + t.count == groups;
    for (int b = 0; b < tiles; ++b) {
      const int r0 = b * kTileRows, r1 = task.rows - r0 < kTileRows ? task.rows : r0 + kTileRows;
      gather(task, r0, r1, g0, t.count, form, in);
      t.x = static_cast<const int8_t*>(task.x) + r0 * task.ldx + static_cast<size_t>(g0) * f.size;
      t.x_scale = task.x_scale + r0;
      t.next = task.rows - r1 < kTileRows ? task.rows - r1 : kTileRows;
      t.y = task.y + r0 * task.ldy + p * kPanel;
      t.far = once ? kPrefetch : 0;
      if (once) {
        t.ahead = t.end = nullptr;
        t.lines = 0;
      } else {  // the next block, fetched once by all tiles together
        const size_t lines = bytes / 64, begin = lines * r0 / task.rows, end = lines * r1 / task.rows;
        const int times = t.count * (kPanel / 16 / tile_cols(r1 - r0));
        t.ahead = t.w + bytes + begin * 64;
        t.end = t.w + bytes + end * 64;
        t.lines = static_cast<int>((end - begin + times - 1) / times);
      }
      form.tile(r1 - r0, t);
    }
  }
}

#if QUIRE_AVX512

// Input features that all tiles pass over together, at the most: runs so long that their ends count for little.
constexpr int kTilesK = 1024;
static_assert(kTilesK / 16 <= kRunGroups);

struct Scratch {
  PanelNumbers panel;
  alignas(64) float sums[kLinearRows][kPanel];
  alignas(64) uint8_t nibbles[kTilesK * kPanel / 2];  // of a run whose codes have fewer bits
};

// Codes of fewer bits as nibbles, for the tiles of four bits. kMore: what makes their middle 8.
template <int kBits, int kMore, int... kPair>
QUIRE_INLINE void unit_to_nibbles(const uint8_t* from, uint8_t* to, std::integer_sequence<int, kPair...>) {
  const I16 more = iset(kMore * 0x01010101);
  for (int c = 0; c < kPanel; c += 16, from += 64, to += 64)
    (istore(to + kPair * 256, either(iadd(codes_of_four<kBits, 2 * kPair>(from), more),
                                     fields<-4, 0xf0>(iadd(codes_of_four<kBits, 2 * kPair + 1>(from), more)))),
     ...);
}
template <int kBits, bool kSymmetric>
void group_to_nibbles(const uint8_t* from, uint8_t* to, int size) {
  constexpr int kFeatures = unit_features(kBits), kMore = kSymmetric ? 8 - (1 << (kBits - 1)) : 0;
  for (int k = 0; k < size; k += kFeatures, from += unit_bytes(kBits), to += kFeatures * kPanel / 2)
    unit_to_nibbles<kBits, kMore>(from, to, std::make_integer_sequence<int, kFeatures / 8>());
}
// The codes of `count` groups, the factors between them left out.
void to_nibbles(const GroupFormat& f, const char* w, int count, uint8_t* to) {
  const auto one = f.bits == 2 ? (f.offset() ? group_to_nibbles<2, false> : group_to_nibbles<2, true>)
                               : (f.offset() ? group_to_nibbles<3, false> : group_to_nibbles<3, true>);
  for (int g = 0; g < count; ++g, to += f.size * kPanel / 2)
    one(reinterpret_cast<const uint8_t*>(w) + f.at(g) + f.codes_at(), to, f.size);
}

template <TileCodes kCodes, bool kOffset>
void run_tile(int rows, GroupTile& t) {
  switch (rows) {
    case 3: return group_tile<3, kCodes, kOffset>(t);
    case 4: return group_tile<4, kCodes, kOffset>(t);
    case 5: return group_tile<5, kCodes, kOffset>(t);
    default: return group_tile<6, kCodes, kOffset>(t);
  }
}
using RunTile = void (*)(int rows, GroupTile&);
// Tiles read the scales themselves.
bool own_scales(const GroupFormat& f) { return f.bits == 4 && f.scales == GroupKind::f16 && !f.offset(); }
RunTile pick_tile(const GroupFormat& f) {
  if (f.bits == 8) return f.offset() ? run_tile<TileCodes::bytes, true> : run_tile<TileCodes::bytes, false>;
  if (f.offsets == GroupKind::u8) return run_tile<TileCodes::nibbles_more, false>;
  if (f.offset()) return run_tile<TileCodes::nibbles, true>;
  return own_scales(f) ? run_tile<TileCodes::nibbles_half, false> : run_tile<TileCodes::nibbles, false>;
}

// Scales and offsets of `count` groups from w on.
void read_numbers(const Layout& f, const Form& form, const char* w, int count, PanelNumbers* to) {
  const char* factors = w;
  const char* group = w;
  for (int g = 0; g < count; ++g, group += f.group) {
    if (g % GroupFormat::kSuper == 0) factors = group, group += f.factors;
    for (int col = 0; col < kPanel; col += 16) {
      with_scales(f, group, factors, col, [&](V16 scale) {
        store(to->scale[g] + col, scale);
        if (!form.offset) return;
        with_offsets(f, group, factors, col, scale, [&](V16 offset) { store(to->offset[g] + col, offset); });
      });
      if (!form.offset && f.offsets == GroupKind::u8)
        istore(to->offset[g] + col,
               isub(iset(0x10101010), four_times(reinterpret_cast<const uint8_t*>(group) + kPanel * f.scale + col)));
    }
  }
}

// Sums [rows][64] of a tile to the outputs of a panel that isn't full.
void write_tile(const LinearTask& task, int p, int r0, int rows, const float* sums) {
  const int width = task.n - p * kPanel;
  for (int r = r0; r < r0 + rows; ++r, sums += kPanel)
    for (int c = 0; c < width; c += 16) {
      V16 v = mul(load(sums + c), set1(task.x_scale[r]));
      if (task.bias) v = add(v, load_n(task.bias + p * kPanel + c, width - c));
      store_n(task.y + r * task.ldy + p * kPanel + c, v, width - c);
    }
}

// What the tiles of a block fetch, evenly: the weights of the next block, and a share of what is read after the task.
class Fetches {
 public:
  // `groups`: how many times a tile has a group; `each`: how often it fetches in one; `shares`: blocks to the task's end.
  void plan(GroupTile* t, const char* next, size_t bytes, size_t groups, size_t each, Ahead* ahead, size_t shares) {
    const size_t wanted = (next ? bytes : 0) + (ahead ? ahead->bytes() / shares : 0);
    const size_t step = std::min<size_t>(64, wanted / (groups * each) + 1);
    const char* const nowhere = reinterpret_cast<const char*>(t->codes);  // it costs no walk of the page tables
    Fetch* f = list_;
    const auto add = [&](const char* data, size_t count) {
      f->data = data, f->step = step, f->groups = std::min(groups, (count + step * each - 1) / (step * each));
      groups -= f->groups;
      return std::min(count, f++->groups * step * each);
    };
    if (next && bytes) add(next, bytes);
    if (ahead)
      for (Ahead::Piece* p = ahead->next(); p && groups && f < list_ + kMost; p = ahead->next())
        ahead->take(p, add(p->data, static_cast<size_t>(p->end - p->data)));
    *f = {nowhere, 0, SIZE_MAX};
    t->fetch = list_[0], t->then = list_ + 1;
  }

 private:
  static constexpr int kMost = 64;
  Fetch list_[kMost + 1];
};

// One panel for more than two rows, block by block of input features. Sums rest in float32 in between.
void panel_tiles(const LinearTask& task, int p, Scratch* s) {
  const GroupFormat& f = task.groups;
  const Layout layout(f);
  const Form form = pick(f);
  const RunTile run = pick_tile(f);
  const int groups = f.groups(task.k), tiles = (task.rows + kTileHeight - 1) / kTileHeight;
  const int cuts = (groups + kTilesK / f.size - 1) / (kTilesK / f.size);
  const int even = (groups + cuts - 1) / cuts, super = GroupFormat::kSuper;
  // factors end a run where a tile has no place for them
  const int block = !layout.factors ? even : form.offset ? (even + super - 1) / super * super : super;
  const char* w = static_cast<const char*>(task.w) + p * f.panel_bytes(task.k);
  const char* const end = w + f.panel_bytes(task.k);
  const bool whole = task.n - p * kPanel >= kPanel;
  GroupTile t;
  t.stride = static_cast<size_t>(f.bits < 4 ? f.size * kPanel / 2 : layout.group);
  t.factors = static_cast<size_t>(f.bits < 4 ? 0 : layout.factors);
  t.ldx = task.ldx;
  t.ldn = static_cast<size_t>(groups) * 2 * sizeof(int32_t);
  t.panel = &s->panel;
  t.size = static_cast<size_t>(f.size);
  const size_t each = QUIRE_ISA::fetches((task.rows + tiles - 1) / tiles, f.size);
  const size_t blocks = static_cast<size_t>(task.panel_end - p) * ((groups + block - 1) / block);
  size_t done = 0;
  Fetches plans;
  for (int g0 = 0; g0 < groups; g0 += block) {
    const int count = groups - g0 < block ? groups - g0 : block;
    const size_t bytes = f.block_bytes(count);
    if (!own_scales(f)) read_numbers(layout, form, w, count, &s->panel);
    if (f.bits < 4) to_nibbles(f, w, count, s->nibbles);
    t.codes = f.bits < 4 ? s->nibbles : reinterpret_cast<const uint8_t*>(w) + layout.factors + layout.codes;
    t.count = static_cast<size_t>(count);
    w += bytes;
    const char* after = w == end && p + 1 == task.panel_end ? static_cast<const char*>(task.next) : w;
    plans.plan(&t, after, bytes, t.count * tiles * 2, each, task.ahead, blocks - done++);
    for (int b = 0; b < tiles; ++b) {
      const int r0 = static_cast<int>(static_cast<int64_t>(task.rows) * b / tiles);
      const int rows = static_cast<int>(static_cast<int64_t>(task.rows) * (b + 1) / tiles) - r0;
      t.x = static_cast<const int8_t*>(task.x) + r0 * task.ldx + static_cast<size_t>(g0) * f.size;
      t.numbers = task.x_groups + (static_cast<size_t>(r0) * groups + g0) * 2;
      t.from = g0 ? s->sums[r0] : nullptr;
      const bool last = g0 + count == groups, out = last && whole;
      t.to = out ? task.y + r0 * task.ldy + p * kPanel : s->sums[r0];
      t.ldto = (out ? task.ldy : kPanel) * sizeof(float);
      t.x_scale = out ? task.x_scale + r0 : nullptr;
      t.bias = out && task.bias ? task.bias + p * kPanel : nullptr;
      run(rows, t);
      if (last && !whole) write_tile(task, p, r0, rows, s->sums[r0]);
    }
  }
}

#endif

}  // namespace

void linear_groups(const LinearTask& task) {
#if QUIRE_AVX512
  if (task.rows > kTileRows) {
    Scratch s;
    for (int p = task.panel_begin; p < task.panel_end; ++p) panel_tiles(task, p, &s);
    return;
  }
#endif
  Numbers in;
  const char* w = static_cast<const char*>(task.w) + task.panel_begin * task.groups.panel_bytes(task.k);
  for (size_t i = 0; i < kPrefetch; i += 64) prefetch(w + i);
  for (int p = task.panel_begin; p < task.panel_end; ++p) panel(task, p, &in);
}

}  // namespace QUIRE_ISA
}  // namespace quire
