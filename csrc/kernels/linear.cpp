// Linear layers over packed weights, and rows of an embedding. Packing is in pack.cpp.

#include <type_traits>

#include "kernels.h"
#include "kernels/linear_tall.h"
#include "kernels/micro.h"
#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kVectors = kPanel / 16;
constexpr int kLines = 4;  // cache lines of one step of a panel, in every format

// k is walked in blocks. Many rows: a panel's part stays in the L2 cache while all rows pass over it. A few row blocks
// wait for memory, so theirs stay in the L1 cache, and lines on their way from memory hold nothing up. Between blocks
// the sums are kept in memory as float32; a store and a load change no bit.
constexpr int kFarSteps = 512;  // 128 KiB
constexpr int kNearSteps = 64;  // 16 KiB
constexpr int kNearBlocks = 3;  // row blocks that are few

// One row block alone: how far ahead of the running load it prefetches, in steps of the lines that it loads.
constexpr size_t kPrefetch = 4096;

template <class T>
struct Tile {
  const typename T::in* x;
  size_t ldx;
  const typename T::elem* w;
  float* y;  // first output of the panel for this row block
  size_t ldy;
  float* sums;        // [rows][64] of this row block, between k blocks
  const float* bias;  // of the panel, or null
  int steps, width;   // width: valid columns of the panel
  bool first, last;
  bool odd;    // f16: half of the last step is beyond x
  bool whole;  // all columns exist, and there is no bias
  // What is prefetched: alone, the running stream; else the weights at `next` (nothing when null), an even share of
  // them in each of the `turns` passes of all row blocks. `turn` is the first pass of this one.
  const char* next;
  bool alone, near;
  int turn, turns;
};

// Steps of one pass: C vectors of the panel from w on, for R rows.
template <class T, int R, int C>
QUIRE_INLINE void walk(const Tile<T>& t, int pass, const typename T::elem* w, V16* acc) {
  constexpr size_t wstride = static_cast<size_t>(kPanel) * T::step, cstride = 16 * T::step;
  if (t.alone) {
    const char* next = reinterpret_cast<const char*>(w) + kPrefetch * kVectors / C;
    for (int s = 0; s < t.steps; ++s, next += kLines * 64) {
      for (int i = 0; i < C; ++i) prefetch(next + i * 64);
      micro<T, R, C>(acc, t.x + s * T::step, t.ldx, w + s * wstride, wstride, cstride, 1);
    }
    return;
  }
  if (!t.next) return micro<T, R, C>(acc, t.x, t.ldx, w, wstride, cstride, t.steps);
  // this pass fetches lines from first / turns on: steps * kLines lines, evenly over the steps of all passes
  const int first = (t.turn + pass) * t.steps * kLines;
  const char* next = t.next + first / t.turns * 64;
  int due = first % t.turns;
  for (int s = 0; s < t.steps; ++s) {
    for (due += kLines; due >= t.turns; due -= t.turns, next += 64) t.near ? prefetch(next) : prefetch_l2(next);
    micro<T, R, C>(acc, t.x + s * T::step, t.ldx, w + s * wstride, wstride, cstride, 1);
  }
}

// Half a step of two features, behind the whole ones.
QUIRE_INLINE V16 last_feature(const Tile<F16>& t, int r, int vector, V16 acc) {
  const size_t step = static_cast<size_t>(t.steps) * F16::step;
  return F16::mac_one(acc, t.x + r * t.ldx + step, t.w + step * kPanel + vector * 16 * F16::step);
}

template <bool kWhole, class T, int R, int C>
QUIRE_INLINE void write(const Tile<T>& t, int c0, const V16* acc) {
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      const int col = (c0 + c) * 16;
      float* y = t.y + r * t.ldy + col;
      V16 v = acc[r * C + c];
      if (!kWhole && t.bias) v = add(v, load_n(t.bias + col, t.width - col));
      if (kWhole || t.width - col >= 16)
        store(y, v);
      else if (t.width > col)
        store_n(y, v, t.width - col);
    }
}

template <class T, int R>
QUIRE_INLINE void tile_rows(const Tile<T>& t) {
  constexpr int C = cols_for<R>();
  for (int c0 = 0; c0 < kVectors; c0 += C) {
    V16 acc[R * C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r * C + c] = t.first ? zero() : load(t.sums + r * kPanel + (c0 + c) * 16);
    walk<T, R, C>(t, c0 / C, t.w + c0 * 16 * T::step, acc);
    if constexpr (std::is_same_v<T, F16>)
      if (t.odd)
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) acc[r * C + c] = last_feature(t, r, c0 + c, acc[r * C + c]);
    if (t.last) {
      t.whole ? write<true, T, R, C>(t, c0, acc) : write<false, T, R, C>(t, c0, acc);
      continue;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store(t.sums + r * kPanel + (c0 + c) * 16, acc[r * C + c]);
  }
}

template <class T>
void tile(int rows, const Tile<T>& t) {
  switch (rows) {
    case 1: return tile_rows<T, 1>(t);
    case 2: return tile_rows<T, 2>(t);
#if QUIRE_AVX512 || QUIRE_AVX2
    case 3: return tile_rows<T, 3>(t);
    case 4: return tile_rows<T, 4>(t);
#endif
#if QUIRE_AVX512
    case 5: return tile_rows<T, 5>(t);
    case 6: return tile_rows<T, 6>(t);
#endif
  }
}

// Passes of a row block over a panel.
constexpr int passes(int rows) {
  return kVectors / (rows == 1 ? cols_for<1>() : rows == 2 ? cols_for<2>() : cols_for<3>());
}

// Rows in blocks of nearly equal height: 8 rows are 4 + 4, not 6 + 2.
struct RowBlocks {
  int rows, count;
  int begin(int b) const { return static_cast<int>(static_cast<int64_t>(rows) * b / count); }
};

// Block k0 of a panel for all rows. `t` holds what all row blocks share.
template <class T>
QUIRE_INLINE void panel_block(const LinearTask& task, const RowBlocks& blocks, Tile<T> t, float* y, int k0) {
  const typename T::in* x = static_cast<const typename T::in*>(task.x) + static_cast<size_t>(k0) * T::step;
  float* sums = t.sums;
  for (int b = 0; b < blocks.count; ++b) {
    const int r0 = blocks.begin(b), rows = blocks.begin(b + 1) - r0;
    t.x = x + r0 * task.ldx;
    t.y = y + r0 * task.ldy;
    t.sums = sums + r0 * kPanel;
    tile<T>(rows, t);
    t.turn += passes(rows);
  }
}

// ---- 2:4 ----------------------------------------------------------------------------------------------------------

// Sixteen columns of four features, whose values are at v and whose bits are `first` and `second`: the pairs of bf16 that a
// bf16 panel has in their place. The second value is that of feature 3, and of feature 2 or 1 if one came before.
#if QUIRE_AVX512
using P24 = P16;
QUIRE_INLINE void pairs_of_four(const char* v, uint32_t first, uint32_t second, P16* out) {
  const __m512i x = _mm512_loadu_si512(v), turned = _mm512_rol_epi32(x, 16);
  const uint32_t alone = ~(first << 1) & 0xaaaaaaaau, before = (first | first >> 1) & 0x55555555u;
  out[0].v = _mm512_maskz_mov_epi16(first, _mm512_mask_blend_epi16(alone, x, turned));
  out[1].v = _mm512_maskz_mov_epi16(second, _mm512_mask_blend_epi16(before, x, turned));
}
QUIRE_INLINE void store_pairs(uint16_t* to, P16 x) { _mm512_storeu_si512(to, x.v); }
#else
struct P24 {
  uint16_t of[32];
};
QUIRE_INLINE void pairs_of_four(const char* v, uint32_t first, uint32_t second, P24* out) {
  uint16_t values[32];
  std::memcpy(values, v, sizeof(values));
  for (int c = 0; c < 16; ++c) {
    const uint32_t a = first >> 2 * c & 3, b = second >> 2 * c & 3;
    const uint16_t low = values[2 * c], high = values[2 * c + 1];
    out[0].of[2 * c] = a & 1 ? low : uint16_t{0};
    out[0].of[2 * c + 1] = a & 2 ? (a & 1 ? high : low) : uint16_t{0};
    out[1].of[2 * c] = b & 1 ? (a ? high : low) : uint16_t{0};
    out[1].of[2 * c + 1] = b & 2 ? high : uint16_t{0};
  }
}
QUIRE_INLINE void store_pairs(uint16_t* to, const P24& x) { std::memcpy(to, x.of, sizeof(x.of)); }
#endif

// f(vector, the two pairs of it) for the four vectors of four features at p.
template <class F>
QUIRE_INLINE void each_of_four(const char* p, F f) {
  uint32_t bits[2 * kVectors];
  std::memcpy(bits, p + kPanel * 4, sizeof(bits));
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) {
    P24 pairs[2];
    pairs_of_four(p + c * 64, bits[2 * c], bits[2 * c + 1], pairs);
    f(c, pairs);
  }
}

// Two pairs of features a four, [fours][2][64][2], as in a bf16 panel.
void widen_fours(const char* from, int fours, uint16_t* to) {
  for (int s = 0; s < fours; ++s, from += kFourBytes, to += 4 * kPanel)
    each_of_four(from, [&](int c, const P24* pairs) {
      store_pairs(to + c * 32, pairs[0]);
      store_pairs(to + 2 * kPanel + c * 32, pairs[1]);
    });
}

#if QUIRE_AVX512
// A few rows multiply the pairs in registers: the products and sums of a bf16 panel, in its order.
template <int R>
void few_rows_24(const LinearTask& task) {
  const int fours = task.k / 4;
  for (int p = task.panel_begin; p < task.panel_end; ++p) {
    const char* w = static_cast<const char*>(task.w) + static_cast<size_t>(p) * fours * kFourBytes;
    const uint16_t* x = static_cast<const uint16_t*>(task.x);
    V16 acc[R * kVectors];
    for (V16& sum : acc) sum = zero();
    for (int s = 0; s < fours; ++s, w += kFourBytes, x += 4) {
      for (size_t i = 0; i < kFourBytes; i += 64) prefetch(w + kPrefetch + i);
      each_of_four(w, [&](int c, const P16* pairs) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          V16& sum = acc[r * kVectors + c];
          sum = dot(dot(sum, set1_pair(x + r * task.ldx), pairs[0]), set1_pair(x + r * task.ldx + 2), pairs[1]);
        }
      });
    }
    Tile<BF16> t;
    const size_t column = static_cast<size_t>(p) * kPanel;
    t.y = task.y + column;
    t.ldy = task.ldy;
    t.bias = task.bias ? task.bias + column : nullptr;
    t.width = task.n - p * kPanel < kPanel ? task.n - p * kPanel : kPanel;
    write<false, BF16, R, kVectors>(t, 0, acc);
  }
}
#endif

// kFours: a bf16_24 weight, of which each block of a panel is widened before all rows pass over it.
template <class T, bool kFours = false>
void linear(const LinearTask& task) {
  using E = typename T::elem;
  const int k_steps = (task.k + T::step - 1) / T::step;
  const size_t step_elems = static_cast<size_t>(kPanel) * T::step;
  const RowBlocks blocks{task.rows, (task.rows + kRows - 1) / kRows};
  const bool few = blocks.count > (kFours ? 0 : 1) && blocks.count <= kNearBlocks;
  const int most = few ? kNearSteps : kFarSteps, blocks_of_k = (k_steps + most - 1) / most;
  const int even = (k_steps + blocks_of_k - 1) / blocks_of_k;  // equal: a short one would fetch only part of the next
  const int block = kFours ? even + (even & 1) : even;
  alignas(64) E wide[kFours ? (kFarSteps + 1) * kPanel * T::step : 1];
  alignas(64) float sums[kLinearRows * kPanel];
  Tile<T> t;
  t.ldx = task.ldx;
  t.ldy = task.ldy;
  t.alone = !kFours && blocks.count == 1;
  t.near = few;
  t.turns = 0;
  for (int b = 0; b < blocks.count; ++b) t.turns += passes(blocks.begin(b + 1) - blocks.begin(b));
  const int passes_over_panels = (task.panel_end - task.panel_begin) * blocks_of_k;
  const size_t share = task.ahead ? task.ahead->share(static_cast<size_t>(passes_over_panels)) : 0;
  for (int p = task.panel_begin; p < task.panel_end; ++p) {
    const size_t column = static_cast<size_t>(p) * kPanel;
    float* y = task.y + column;
    t.sums = sums;
    t.bias = task.bias ? task.bias + column : nullptr;
    t.width = task.n - p * kPanel < kPanel ? task.n - p * kPanel : kPanel;
    t.whole = t.width == kPanel && !t.bias;
    for (int k0 = 0; k0 < k_steps; k0 += block) {
      t.steps = k_steps - k0 < block ? k_steps - k0 : block;
      t.w = static_cast<const E*>(task.w) + (static_cast<size_t>(p) * k_steps + k0) * step_elems;
      t.first = k0 == 0;
      t.last = k0 + t.steps == k_steps;
      t.turn = 0;
      t.next = reinterpret_cast<const char*>(t.w + t.steps * step_elems);
      if constexpr (kFours) {
        const size_t fours = static_cast<size_t>(p) * (k_steps / 2) + k0 / 2;
        widen_fours(static_cast<const char*>(task.w) + fours * kFourBytes, t.steps / 2, wide);
        t.w = wide;
        t.next = static_cast<const char*>(task.w) + (fours + t.steps / 2) * kFourBytes;
      }
      t.odd = std::is_same_v<T, F16> && t.last && task.k % T::step;
      t.steps -= t.odd;
      if (t.last && p + 1 == task.panel_end) t.next = static_cast<const char*>(task.next);
      if (share) task.ahead->fetch(share);
      panel_block<T>(task, blocks, t, y, k0);
    }
  }
}

}  // namespace

void linear_f32(const LinearTask& t) { linear<F32>(t); }
void linear_bf16(const LinearTask& t) {
#if QUIRE_AVX512
  if (in_tall_tiles(t.rows)) return linear_tall_bf16(t);
#endif
  linear<BF16>(t);
}
void linear_f16(const LinearTask& t) { linear<F16>(t); }
void linear_bf16_24(const LinearTask& t) {
#if QUIRE_AVX512
  switch (t.rows) {
    case 1: return few_rows_24<1>(t);
    case 2: return few_rows_24<2>(t);
    case 3: return few_rows_24<3>(t);
    case 4: return few_rows_24<4>(t);
  }
#endif
  linear<BF16, true>(t);
}

}  // namespace QUIRE_ISA
}  // namespace quire
