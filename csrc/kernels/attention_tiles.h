// The two products of attention.cpp over tiles of the paged cache, for each of its formats: scores of a group of keys, and
// their values times probabilities.
//
// An int8 cache is multiplied as it is, without widening. A query row is rounded to 16 bits and split into two rows of
// bytes (256 * high + low); probabilities, times the scales of their values, likewise. Sums of products are exact in
// int32, so what is lost against float32 is what the cache has lost, at the price of a bf16 cache's arithmetic.
//
// Other narrow caches are widened to bfloat16 in scratch, a group of keys and one head at a time, before their products.
#pragma once

#include "kernels.h"
#include "kernels/cache_widen.h"
#include "kernels/micro.h"
#include "kernels/scratch.h"
#include "kernels/softmax.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kTilesPerGroup = kGroup / kTile;
constexpr float kQuerySteps = 127.0f * 256.0f;  // a high byte of 127 and any low byte
constexpr float kTiny = 1e-30f;                 // a largest number below this counts as zero
constexpr size_t kNarrowBytes = 2048;           // of a tile's keys
constexpr int kSoftmaxLines = 16;               // fetched before softmax of few rows, which takes int8 twice as long
constexpr size_t kLine = 64;                    // bytes; every format's multiply-accumulate reads one of keys or values

// What the loops below ask of a cache format: `parts` rows of a query and of its probabilities, where the probabilities
// of step k of a tile are, how sums of scores start, and one multiply-accumulate for each of the two products.
template <class Format>
struct FloatCache : Format {
  using in = typename Format::in;
  using elem = typename Format::elem;
  static constexpr int parts = 1;
  static constexpr bool widened = false;
  static constexpr int probability_at(int tile, int k) { return tile * kTile + Format::step * k; }
  static inline __attribute__((always_inline)) V16 start(int32_t) { return zero(); }
  static inline __attribute__((always_inline)) V16 score(V16 acc, const in* q, const elem* k) {
    return Format::mac(acc, q, k);
  }
  static inline __attribute__((always_inline)) V16 value(V16 acc, const in* p, const elem* v) {
    return Format::mac(acc, p, v);
  }
};
struct WidenedCache : FloatCache<BF16> {
  static constexpr bool widened = true;
};
struct ByteCache {
  static constexpr bool widened = false;
  using in = uint8_t;
  using elem = uint8_t;
  using sum = I16;
  static constexpr int step = 4, parts = 2;
  static constexpr int probability_at(int tile, int k) { return 16 * k + 4 * tile; }  // as store_two_bytes writes them
  static inline __attribute__((always_inline)) I16 start(int32_t offset) { return iset1(&offset); }
  static inline __attribute__((always_inline)) I16 score(I16 acc, const elem* q, const elem* k) {
    return dot_u8s8(acc, iload(k), iset1(q));  // keys are the unsigned side
  }
  static inline __attribute__((always_inline)) I16 value(I16 acc, const elem* p, const elem* v) {
    return dot_u8s8(acc, iset1(p), iload(v));
  }
};

// What some rows see of a group: tiles begin … end-1, and of these the keys below `keys`.
struct Seen {
  int begin, end, keys;

  // By keys lo … hi; nothing when end <= begin.
  Seen(int group, int lo, int hi)
      : begin(lo <= group ? 0 : (lo - group) / kTile), keys(hi - group < kGroup - 1 ? hi - group + 1 : kGroup) {
    end = keys > 0 ? (keys + kTile - 1) / kTile : 0;
  }
  // Steps of a tile's values that `step` keys at a time take.
  int steps(int tile, int step) const {
    const int left = keys - tile * kTile;
    return ((left < kTile ? left : kTile) + step - 1) / step;
  }
};

// Carved from the task's scratch; every array is 64-byte aligned. `r` counts rows, `part` rows of parts.
template <class T>
struct Scratch {
  typename T::in* q;      // [part][d16]
  typename T::in* probs;  // [part][kGroup]
  float* scores;          // [r][kGroup]
  int32_t* offset;        // [part] i8: where sums of scores start, which takes the 128 of the keys off again
  float* acc;             // [r][d16] current partition
  float* total;           // [r][d16] merged partitions
  float* lane_sum;        // [r][16] current partition's sum of probabilities
  float* scales;          // [2][kGroup] i8: of the current group's keys, and of its values
  SoftmaxRow* row;        // [r]
  uint16_t* wide;         // [kGroup][d16] widened: the current group's keys, or its values
  int d16;

  Scratch(void* base, int rows, int width) : d16(width) {
    Carver carver(base);
    const size_t n = static_cast<size_t>(rows), part = n * T::parts;
    carver.take(&q, part * d16);
    carver.take(&probs, part * kGroup);
    carver.take(&scores, n * kGroup);
    carver.take(&offset, part);
    carver.take(&acc, n * d16);
    carver.take(&total, n * d16);
    carver.take(&lane_sum, n * 16);
    carver.take(&scales, 2 * kGroup);
    carver.take(&row, n);
    carver.take(&wide, T::widened ? static_cast<size_t>(kGroup) * d16 : 0);
  }
  float* acc_of(int r) const { return acc + static_cast<size_t>(r) * d16; }
  float* total_of(int r) const { return total + static_cast<size_t>(r) * d16; }
  // What `count` rows from r on see of a group.
  Seen seen(int group, int r, int count) const { return Seen(group, row[r].lo, row[r + count - 1].hi); }
};

QUIRE_INLINE V16 magnitude(V16 v) { return vmax(v, sub(zero(), v)); }

// ---- tiles --------------------------------------------------------------------------------------------------------

// Where the tiles of a group and head lie; tiles_of finds those of the call's first head. `seen` is by some query of the
// call; blocks of other tiles may have been given back, and they point to a tile that is seen instead.
template <class T>
struct Tiles {
  using elem = typename T::elem;
  const char* at[kTilesPerGroup];
  Seen seen;
  bool fresh;       // the call's first group of a partition
  size_t v_offset;  // bytes from a tile's keys to its values
  bool recent;      // tiles of AttendTask::recent

  const elem* keys(int tile) const { return reinterpret_cast<const elem*>(at[tile]); }
  const elem* values(int tile) const { return reinterpret_cast<const elem*>(at[tile] + v_offset); }
  Tiles of_next_head(const AttendTask& t) const {
    const KVLayout& kv = recent ? t.recent->kv : t.kv;
    Tiles found = *this;
    for (const char*& tile : found.at) tile += static_cast<size_t>(kv.tiles_per_block) * kv.tile_bytes;
    return found;
  }
  // The same in scratch, keys and values alike.
  Tiles in(const uint16_t* wide, int d16) const {
    Tiles found = *this;
    for (int i = 0; i < kTilesPerGroup; ++i) found.at[i] = reinterpret_cast<const char*>(wide + i * kTile * d16);
    found.v_offset = 0;
    return found;
  }
};

template <class T>
Tiles<T> tiles_of(const AttendTask& t, int group, int lo, int hi) {
  const bool recent = T::widened && t.recent && group >= t.recent_begin;
  const CacheRow& from = recent ? *t.recent : t;
  const KVLayout& kv = from.kv;
  const Seen seen(group, lo, hi);
  Tiles<T> found{{}, seen, group % kPartition == 0 || group <= lo, kv.key_bytes(), recent};
  for (int i = 0; i < kTilesPerGroup; ++i) {
    const int position = group + kTile * (i < seen.begin || i >= seen.end ? seen.begin : i);
    const size_t block = static_cast<size_t>(from.block_table[position / kv.block_size]);
    found.at[i] = static_cast<const char*>(from.cache) + block * kv.block_bytes + kv.tile_at(t.head_begin, position);
  }
  return found;
}

// What is fetched beside the products: while scores are made the same tiles' values, and then the next tiles' keys; of
// narrow heads the next tiles' keys and values, or there would be too little under way. Lines of values that no query sees
// are left out: the next tiles' keys take their place.
template <class T>
struct Ahead {
  using elem = typename T::elem;
  const Tiles<T>&now, &next;
  int d16;

  size_t values() const { return static_cast<size_t>(kTile) * d16; }
  bool narrow() const { return values() * sizeof(elem) < kNarrowBytes; }
  const elem* of_scores(int tile) const { return narrow() ? next.keys(tile) : now.values(tile); }
  const elem* of_values(int tile) const { return narrow() ? next.values(tile) : next.keys(tile); }
  // Steps of scores that fetch from of_scores, each a line of it; the next tile's keys follow. (Bytes are multiplied in
  // half as many steps: a second loop costs them more than the lines.)
  int cut(int tile, int steps) const {
    const int lines = now.seen.steps(tile, T::step) * (d16 / kTile);
    return T::parts == 2 || narrow() || lines > steps ? steps : lines;
  }
  static void fetch(const elem* from, int line) { prefetch(reinterpret_cast<const char*>(from) + line * kLine); }
};

template <int N>
struct Int {
  static constexpr int value = N;
};
// Largest row blocks first; their sizes times the format's parts fill the register tile.
template <class T, class F>
QUIRE_INLINE void row_blocks(int rows, F f) {
  constexpr int kMost = kRows / T::parts;
  int r = 0;
  for (; r + kMost <= rows; r += kMost) f(Int<kMost>(), r);
  if (kMost > 4 && r + 4 <= rows) {
    f(Int<4>(), r);
    r += 4;
  }
  if (kMost > 2)
    for (; r + 2 <= rows; r += 2) f(Int<2>(), r);
  if (kMost > 1 && r < rows) f(Int<1>(), r);
}
// Vectors of values that R rows are multiplied with at a time: few rows take whole lines of them.
template <int R>
constexpr int value_cols() {
#if QUIRE_AVX512
  return R <= 2 ? 8 : 4;
#else
  return cols_for<R>();
#endif
}

// ---- q·k ----------------------------------------------------------------------------------------------------------

// scores[r … r+R][tile … tile+C] = q . k; fetches as many lines of what comes next.
template <class T, int R, int C, bool Fetch>
QUIRE_INLINE void score_rows(const Scratch<T>& s, int r, const Ahead<T>& ahead, int tile, int steps) {
  constexpr int P = R * T::parts;
  constexpr size_t kVector = kLine / sizeof(typename T::elem);
  typename T::sum acc[P * C];
  for (int i = 0; i < P; ++i)
    for (int c = 0; c < C; ++c) acc[i * C + c] = T::start(T::parts == 2 ? s.offset[r * T::parts + i] : 0);
  const size_t pitch = static_cast<size_t>(s.d16);
  const typename T::in* q = s.q + static_cast<size_t>(r) * T::parts * pitch;
  const typename T::elem *k[C], *fetch[C];
  for (int c = 0; c < C; ++c) k[c] = ahead.now.keys(tile + c), fetch[c] = ahead.of_scores(tile + c);
  int step = 0, until = Fetch ? ahead.cut(tile + C - 1, steps) : steps;
  for (;;) {
#pragma GCC unroll 1
    for (; step < until; ++step) {
      const size_t at = static_cast<size_t>(step) * kVector;
      if (Fetch)
        for (int c = 0; c < C; ++c) prefetch(fetch[c] + at);
#pragma GCC unroll 6
      for (int i = 0; i < P; ++i) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
          acc[i * C + c] = T::score(acc[i * C + c], q + static_cast<size_t>(i) * pitch, k[c] + at);
      }
      q += T::step;
    }
    if (!Fetch || T::parts == 2 || until == steps) break;
    until = steps;
    fetch[C - 1] = ahead.next.keys(tile + C - 1);
  }
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) {
      float* out = s.scores + (r + i) * kGroup + (tile + c) * kTile;
      if constexpr (T::parts == 1)
        store(out, acc[i * C + c]);
      else
        store(out, to_float(join_bytes(acc[2 * i * C + c], acc[(2 * i + 1) * C + c])));
    }
}

template <class T, int R, bool Fetch>
QUIRE_INLINE void score_block(const Scratch<T>& s, int r, int head_dim, Seen seen, const Ahead<T>& ahead) {
  constexpr int C = cols_for<R * T::parts>();
  const int steps = (head_dim + T::step - 1) / T::step;
  int tile = seen.begin;
  for (; tile + C <= seen.end; tile += C) score_rows<T, R, C, Fetch>(s, r, ahead, tile, steps);
  if (C > 3 && tile + 3 == seen.end) return score_rows<T, R, 3, Fetch>(s, r, ahead, tile, steps);
  if (C > 2 && tile + 2 == seen.end) return score_rows<T, R, 2, Fetch>(s, r, ahead, tile, steps);
  if (C > 1)
    for (; tile < seen.end; ++tile) score_rows<T, R, 1, Fetch>(s, r, ahead, tile, steps);
}

// ---- p·v ----------------------------------------------------------------------------------------------------------

// acc[r … r+R][16*c0 … 16*(c0+C)] += probs . v over the tiles of a group (= of a partition's first); fetches as many lines
// of what comes next.
template <class T, int R, int C, bool Fetch>
QUIRE_INLINE void value_rows(const Scratch<T>& s, int r, Seen seen, const Ahead<T>& ahead, int c0) {
  constexpr int P = R * T::parts;
  constexpr size_t kVector = kLine / sizeof(typename T::elem);
  const bool fresh = ahead.now.fresh;
  const size_t pitch = static_cast<size_t>(s.d16) * T::step, first = c0 * kVector;
  typename T::sum a[P * C];
  for (int i = 0; i < P; ++i)
    for (int c = 0; c < C; ++c) {
      if constexpr (T::parts == 1)
        a[i * C + c] = fresh ? zero() : load(s.acc_of(r + i) + (c0 + c) * 16);
      else
        a[i * C + c] = izero();
    }
  const typename T::in* probs = s.probs + r * T::parts * kGroup;
  for (int tile = seen.begin; tile < seen.end; ++tile) {
    const typename T::elem *v = ahead.now.values(tile) + first, *fetch = ahead.of_values(tile) + first;
    const int steps = seen.steps(tile, T::step);
#pragma GCC unroll 1
    for (int k = 0; k < steps; ++k) {
      const typename T::in* p = probs + T::probability_at(tile, k);
      if (Fetch)
        for (int c = 0; c < C; ++c) prefetch(fetch + c * kVector);
#pragma GCC unroll 6
      for (int i = 0; i < P; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) a[i * C + c] = T::value(a[i * C + c], p + i * kGroup, v + c * kVector);
      }
      v += pitch;
      fetch += pitch;
    }
  }
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) {
      float* acc = s.acc_of(r + i) + (c0 + c) * 16;
      if constexpr (T::parts == 1)
        store(acc, a[i * C + c]);
      else
        store(acc, fma(to_float(join_bytes(a[2 * i * C + c], a[(2 * i + 1) * C + c])), set1(s.row[r + i].p_scale),
                       fresh ? zero() : load(acc)));
    }
}

template <class T, int R, bool Fetch>
QUIRE_INLINE void value_block(const Scratch<T>& s, int r, Seen seen, const Ahead<T>& ahead) {
  constexpr int C = value_cols<R * T::parts>();
  const int vectors = s.d16 / 16;
  int c = 0;
  for (; c + C <= vectors; c += C) value_rows<T, R, C, Fetch>(s, r, seen, ahead, c);
  if (C > 4 && c + 4 <= vectors) {
    value_rows<T, R, 4, Fetch>(s, r, seen, ahead, c);
    c += 4;
  }
  if (C > 2 && c + 2 <= vectors) {
    value_rows<T, R, 2, Fetch>(s, r, seen, ahead, c);
    c += 2;
  }
  if (C > 1)
    for (; c < vectors; ++c) value_rows<T, R, 1, Fetch>(s, r, seen, ahead, c);
}

}  // namespace QUIRE_ISA
}  // namespace quire
