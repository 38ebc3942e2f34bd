// Causal attention over the paged cache, for decode and prefill alike.
//
//   query rows      (kv head h, query i, head g of its group) -> row (h*queries + i)*G + g
//   keys            0 ........ 64 ........ 128 ...            groups of 64 share one rescale of the running softmax
//   a group         [tile 16][tile 16][tile 16][tile 16]      a tile lies inside one block of the cache
//   partitions      0 ........ 1024 ........ 2048             each starts a fresh softmax state; states are merged
//                                                             in rising order
//
// Cuts are absolute positions, so what a query row goes through depends on its own position and window only: not on
// the chunk, the batch or the threads. A group is worked on head by head, in the order in which a block holds them.
//
// An int8 cache is multiplied as it is, without widening. A query row is rounded to 16 bits and split into two rows of
// bytes (256 * high + low); probabilities, times the scales of their values, likewise. Sums of products are exact in
// int32, so what is lost against float32 is what the cache has lost, at the price of a bf16 cache's arithmetic.

#include "kernels.h"
#include "kernels/micro.h"
#include "kernels/softmax.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kTilesPerGroup = kGroup / kTile;
constexpr float kQuerySteps = 127.0f * 256.0f;   // a high byte of 127 and any low byte
constexpr float kTiny = 1e-30f;                  // a largest number below this counts as zero
constexpr size_t kNarrowBytes = 2048;            // of a tile's keys
constexpr int kSoftmaxLines = 16;                // fetched before softmax of few rows, which takes int8 twice as long
constexpr size_t kLine = 64;  // bytes; every format's multiply-accumulate reads one of keys or values

// What the loops below ask of a cache format: `parts` rows of a query and of its probabilities, where the probabilities
// of step k of a tile are, how sums of scores start, and one multiply-accumulate for each of the two products.
struct FloatCache : F32 {
  static constexpr int parts = 1;
  static constexpr int probability_at(int tile, int k) { return tile * kTile + k; }
  static inline __attribute__((always_inline)) V16 start(int32_t) { return zero(); }
  static inline __attribute__((always_inline)) V16 score(V16 acc, const float* q, const float* k) { return mac(acc, q, k); }
  static inline __attribute__((always_inline)) V16 value(V16 acc, const float* p, const float* v) { return mac(acc, p, v); }
};
struct HalfCache : BF16 {
  static constexpr int parts = 1;
  static constexpr int probability_at(int tile, int k) { return tile * kTile + 2 * k; }
  static inline __attribute__((always_inline)) V16 start(int32_t) { return zero(); }
  static inline __attribute__((always_inline)) V16 score(V16 acc, const uint16_t* q, const uint16_t* k) {
    return mac(acc, q, k);
  }
  static inline __attribute__((always_inline)) V16 value(V16 acc, const uint16_t* p, const uint16_t* v) {
    return mac(acc, p, v);
  }
};
struct ByteCache {
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

// Carved from the task's scratch; every array is 64-byte aligned. `r` counts rows, `part` rows of parts.
template <class T>
struct Scratch {
  typename T::elem* q;      // [part][d16]
  typename T::elem* probs;  // [part][kGroup]
  float* scores;            // [r][kGroup]
  int32_t* offset;          // [part] i8: where sums of scores start, which takes the 128 of the keys off again
  float* acc;               // [r][d16] current partition
  float* total;             // [r][d16] merged partitions
  float* lane_sum;          // [r][16] current partition's sum of probabilities
  float* scales;            // [2][kGroup] i8: of the current group's keys, and of its values
  SoftmaxRow* row;          // [r]
  int d16;

  Scratch(void* base, int rows, int width) : d16(width) {
    char* p = static_cast<char*>(base);
    auto take = [&p](size_t bytes) {
      char* at = p;
      p += (bytes + 63) / 64 * 64;
      return at;
    };
    const size_t n = static_cast<size_t>(rows), part = n * T::parts;
    q = reinterpret_cast<typename T::elem*>(take(sizeof(*q) * part * d16));
    probs = reinterpret_cast<typename T::elem*>(take(sizeof(*probs) * part * kGroup));
    scores = reinterpret_cast<float*>(take(sizeof(float) * n * kGroup));
    offset = reinterpret_cast<int32_t*>(take(sizeof(int32_t) * part));
    acc = reinterpret_cast<float*>(take(sizeof(float) * n * d16));
    total = reinterpret_cast<float*>(take(sizeof(float) * n * d16));
    lane_sum = reinterpret_cast<float*>(take(sizeof(float) * n * 16));
    scales = reinterpret_cast<float*>(take(sizeof(float) * 2 * kGroup));
    row = reinterpret_cast<SoftmaxRow*>(take(sizeof(SoftmaxRow) * n));
  }
  float* acc_of(int r) const { return acc + static_cast<size_t>(r) * d16; }
  float* total_of(int r) const { return total + static_cast<size_t>(r) * d16; }
};

QUIRE_INLINE void to_elem(float* out, V16 v) { store(out, v); }
QUIRE_INLINE void to_elem(uint16_t* out, V16 v) { store_bf16(out, v); }
QUIRE_INLINE V16 magnitude(V16 v) { return vmax(v, sub(zero(), v)); }

// ---- tiles --------------------------------------------------------------------------------------------------------

// Where the tiles of a group and head lie; tiles_of finds those of the call's first head. Tiles begin … end-1 are seen by
// some query of the call; blocks of the others may have been given back, and they point to a tile that is seen instead.
template <class T>
struct Tiles {
  const typename T::elem* k[kTilesPerGroup];
  int begin, end;
  bool fresh;  // the call's first group of a partition

  Tiles of_next_head(const KVLayout& kv) const {
    Tiles found = *this;
    for (const typename T::elem*& tile : found.k) tile += static_cast<size_t>(kv.tiles_per_block) * kv.tile_stride;
    return found;
  }
};

template <class T>
Tiles<T> tiles_of(const AttendTask& t, int group, int lo, int hi) {
  const KVLayout& kv = t.kv;
  Tiles<T> found;
  found.fresh = group % kPartition == 0 || group <= lo;
  found.begin = lo <= group ? 0 : (lo - group) / kTile;
  found.end = hi >= group + kGroup - 1 ? kTilesPerGroup : (hi - group) / kTile + 1;
  for (int i = 0; i < kTilesPerGroup; ++i) {
    const int position = group + kTile * (i < found.begin || i >= found.end ? found.begin : i);
    const size_t block = static_cast<size_t>(t.block_table[position / kv.block_size]);
    found.k[i] = static_cast<const typename T::elem*>(t.cache) + block * kv.block_stride +
                 kv.tile_at(t.head_begin, position);
  }
  return found;
}

// What is fetched beside the products: while scores are made the same tiles' values, and then the next tiles' keys; of
// narrow heads the next tiles' keys and values, or there would be too little under way.
template <class T>
struct Ahead {
  const Tiles<T>&now, &next;

  static size_t values(int d16) { return static_cast<size_t>(kTile) * d16; }
  static bool narrow(int d16) { return values(d16) * sizeof(typename T::elem) < kNarrowBytes; }
  const typename T::elem* of_scores(int d16, int tile) const {
    return narrow(d16) ? next.k[tile] : now.k[tile] + values(d16);
  }
  const typename T::elem* of_values(int d16, int tile) const {
    return next.k[tile] + (narrow(d16) ? values(d16) : 0);
  }
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
QUIRE_INLINE void score_rows(const Scratch<T>& s, int r, const Tiles<T>& now, const Ahead<T>& ahead, int tile, int steps) {
  constexpr int P = R * T::parts;
  constexpr size_t kVector = kLine / sizeof(typename T::elem);
  typename T::sum acc[P * C];
  for (int i = 0; i < P; ++i)
    for (int c = 0; c < C; ++c) acc[i * C + c] = T::start(T::parts == 2 ? s.offset[r * T::parts + i] : 0);
  const size_t pitch = static_cast<size_t>(s.d16);
  const typename T::elem* q = s.q + static_cast<size_t>(r) * T::parts * pitch;
  const typename T::elem *k[C], *fetch[C];
  for (int c = 0; c < C; ++c) k[c] = now.k[tile + c], fetch[c] = ahead.of_scores(s.d16, tile + c);
#pragma GCC unroll 1
  for (int step = 0; step < steps; ++step) {
    const size_t at = static_cast<size_t>(step) * kVector;
    if (Fetch)
      for (int c = 0; c < C; ++c) prefetch(fetch[c] + at);
#pragma GCC unroll 6
    for (int i = 0; i < P; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[i * C + c] = T::score(acc[i * C + c], q + static_cast<size_t>(i) * pitch, k[c] + at);
    }
    q += T::step;
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
QUIRE_INLINE void score_block(const Scratch<T>& s, int r, int head_dim, const Tiles<T>& now, const Ahead<T>& ahead) {
  constexpr int C = cols_for<R * T::parts>();
  const int steps = (head_dim + T::step - 1) / T::step;
  int tile = now.begin;
  for (; tile + C <= now.end; tile += C) score_rows<T, R, C, Fetch>(s, r, now, ahead, tile, steps);
  if (C > 2 && tile + 2 <= now.end) {
    score_rows<T, R, 2, Fetch>(s, r, now, ahead, tile, steps);
    tile += 2;
  }
  if (C > 1)
    for (; tile < now.end; ++tile) score_rows<T, R, 1, Fetch>(s, r, now, ahead, tile, steps);
}

// ---- softmax ------------------------------------------------------------------------------------------------------

QUIRE_INLINE void put_probabilities(float* out, const V16* p) {
  for (int c = 0; c < kTilesPerGroup; ++c) store(out + c * kTile, p[c]);
}
QUIRE_INLINE void put_probabilities(uint16_t* out, const V16* p) {
  for (int c = 0; c < kTilesPerGroup; c += 2) store_bf16_normal(out + c * kTile, p[c], p[c + 1]);
}

// Probabilities of one row and group as an int8 cache takes them: times the scales of their values, in 16 bits of a
// step that is a power of two.
QUIRE_INLINE void put_scaled(const Scratch<ByteCache>& s, int r, int group, V16* p) {
  SoftmaxRow& row = s.row[r];
  for (int c = 0; c < kTilesPerGroup; ++c) p[c] = mul(p[c], load(s.scales + kGroup + c * kTile));
  // scales of tokens that were never written may be anything
  if (!row.sees_all(group)) mask_group(row, group, zero(), p);
  const float largest = reduce_max(vmax(vmax(p[0], p[1]), vmax(p[2], p[3])));
  const bool some = largest > kTiny;
  // largest = m * 2^e with 1 <= m < 2 becomes m * 2^15
  const uint32_t exponent = float_to_bits(largest) & 0x7f800000u;
  row.p_scale = some ? bits_to_float(exponent - (15u << 23)) : 0.0f;
  // a value that was not finite
  if (mask_not_finite(add(add(p[0], p[1]), add(p[2], p[3])))) row.p_scale = NAN;
  const V16 inverse = set1(some ? bits_to_float(((15u + 254u) << 23) - exponent) : 0.0f);
  for (int c = 0; c < kTilesPerGroup; ++c) p[c] = mul(p[c], inverse);
  uint8_t* out = s.probs + 2 * r * kGroup;
  store_two_bytes(out, out + kGroup, p);
}

template <class T>
QUIRE_INLINE void softmax_row(const AttendTask& t, const Scratch<T>& s, int r, int group) {
  SoftmaxRow& row = s.row[r];
  typename T::elem* out = s.probs + r * T::parts * kGroup;
  if (!row.sees(group)) {
    std::memset(out, 0, sizeof(*out) * T::parts * kGroup);
    row.p_scale = 0.0f;
    return;
  }
  V16 x[kTilesPerGroup];
  for (int c = 0; c < kTilesPerGroup; ++c) {
    x[c] = load(s.scores + r * kGroup + c * kTile);
    if (T::parts == 2) x[c] = mul(x[c], load(s.scales + c * kTile));
  }
  softmax_group(row, group, t.softcap, s.lane_sum + r * 16, s.acc_of(r), s.d16, x);
  if constexpr (T::parts == 1)
    put_probabilities(out, x);
  else
    put_scaled(s, r, group, x);
}

// ---- p·v ----------------------------------------------------------------------------------------------------------

// acc[r … r+R][16*c0 … 16*(c0+C)] += probs . v over the tiles of a group (= of a partition's first); fetches as many lines
// of what comes next.
template <class T, int R, int C, bool Fetch>
QUIRE_INLINE void value_rows(const Scratch<T>& s, int r, const Tiles<T>& now, const Ahead<T>& ahead, int c0) {
  constexpr int P = R * T::parts;
  constexpr size_t kVector = kLine / sizeof(typename T::elem);
  const size_t pitch = static_cast<size_t>(s.d16) * T::step, first = static_cast<size_t>(kTile) * s.d16 + c0 * kVector;
  typename T::sum a[P * C];
  for (int i = 0; i < P; ++i)
    for (int c = 0; c < C; ++c) {
      if constexpr (T::parts == 1)
        a[i * C + c] = now.fresh ? zero() : load(s.acc_of(r + i) + (c0 + c) * 16);
      else
        a[i * C + c] = izero();
    }
  const typename T::elem* probs = s.probs + r * T::parts * kGroup;
  for (int tile = now.begin; tile < now.end; ++tile) {
    const typename T::elem *v = now.k[tile] + first, *fetch = ahead.of_values(s.d16, tile) + c0 * kVector;
#pragma GCC unroll 1
    for (int k = 0; k < kTile / T::step; ++k) {
      const typename T::elem* p = probs + T::probability_at(tile, k);
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
                       now.fresh ? zero() : load(acc)));
    }
}

template <class T, int R, bool Fetch>
QUIRE_INLINE void value_block(const Scratch<T>& s, int r, const Tiles<T>& now, const Ahead<T>& ahead) {
  constexpr int C = value_cols<R * T::parts>();
  const int vectors = s.d16 / 16;
  int c = 0;
  for (; c + C <= vectors; c += C) value_rows<T, R, C, Fetch>(s, r, now, ahead, c);
  if (C > 4 && c + 4 <= vectors) {
    value_rows<T, R, 4, Fetch>(s, r, now, ahead, c);
    c += 4;
  }
  if (C > 2 && c + 2 <= vectors) {
    value_rows<T, R, 2, Fetch>(s, r, now, ahead, c);
    c += 2;
  }
  if (C > 1)
    for (; c < vectors; ++c) value_rows<T, R, 1, Fetch>(s, r, now, ahead, c);
}

// ---- rows and partitions ------------------------------------------------------------------------------------------

// A row of q in the format that the cache is multiplied with.
template <class T>
QUIRE_INLINE void put_query(const Scratch<T>& s, int r, const float* q, int head_dim, float scale) {
  const int d16 = s.d16;
  s.row[r].factor = scale * kLog2e;
  if constexpr (T::parts == 1) {
    for (int c = 0; c < d16; c += 16) to_elem(s.q + static_cast<size_t>(r) * d16 + c, load_n(q + c, head_dim - c));
  } else {
    V16 top = zero(), sum = zero();
    for (int c = 0; c < d16; c += 16) {
      const V16 v = magnitude(load_n(q + c, head_dim - c));
      top = vmax(top, v);
      sum = add(sum, mul(v, set1(0.0f)));
    }
    const float largest = reduce_max(top);
    const bool some = largest > kTiny;
    if (some) s.row[r].factor *= largest / kQuerySteps;
    if (mask_not_finite(sum)) s.row[r].factor = NAN;
    const V16 inverse = set1(some ? kQuerySteps / largest : 0.0f), limit = set1(kQuerySteps);
    uint8_t* high = s.q + static_cast<size_t>(2 * r) * d16;
    int32_t sums[2] = {0, 0};
    for (int c = 0; c < d16; c += 16) {
      const V16 v = mul(load_n(q + c, head_dim - c), inverse);
      const V16 x = round_even(vmax(vmin(v, limit), sub(zero(), limit)));
      store_byte(high + c, add(x, set1(128.0f)), 8);
      store_byte(high + d16 + c, x, 0);
    }
    for (int d = 0; d < d16; ++d) {
      sums[0] += static_cast<int8_t>(high[d]);
      sums[1] += static_cast<int8_t>(high[d16 + d]);
    }
    for (int part = 0; part < 2; ++part) s.offset[2 * r + part] = -128 * sums[part];
  }
}

// A row's place: its query's token, and its head.
struct Place {
  int token, head;
};
QUIRE_INLINE Place place_of(const AttendTask& t, int r) {
  const int g = r % t.heads_per_kv, i = r / t.heads_per_kv;
  return {t.token_begin + i % t.queries(), (t.head_begin + i / t.queries()) * t.heads_per_kv + g};
}

// A row that has seen no key yet. A sink is a key that came first and has no value.
QUIRE_INLINE void start_row(const AttendTask& t, SoftmaxRow& row, float* total, Place at) {
  const int position = t.positions[at.token];
  row.lo = t.window && position >= t.window ? position - t.window + 1 : 0;
  row.hi = position;
  row.max = t.sinks ? t.sinks[at.head] * kLog2e : -INFINITY;
  row.sum_total = t.sinks ? 1.0f : 0.0f;
  if (t.sinks) clear(total, t.kv.d16);
}

// Keys that some query of a task sees, inside its partitions.
struct Span {
  int lo, hi;
  explicit Span(const AttendTask& t) {
    const int first = t.positions[t.token_begin], from = t.partition_begin * kPartition;
    const int last = t.positions[t.token_end - 1], to = t.partition_end * kPartition - 1;
    lo = t.window && first >= t.window ? first - t.window + 1 : 0;
    lo = lo > from ? lo : from;
    hi = last < to ? last : to;
  }
  int group() const { return lo / kGroup * kGroup; }
};

template <class T>
Tiles<T> first_tiles(const AttendTask& t) {
  const Span span(t);
  return tiles_of<T>(t, span.group(), span.lo, span.hi);
}

// Stretches of the same size, `pitch` bytes apart, fetched a few lines at a time.
struct Stretches {
  const char* at = nullptr;
  size_t pitch = 0;
  int lines = 0, left = 0;  // lines of a stretch; lines still to fetch
  int line = 0, share = 0;

  // In `turns` calls of next().
  void spread(int turns) { share = (left + turns - 1) / turns; }
  template <bool Write>
  inline __attribute__((always_inline)) void next() {
    for (int i = share < left ? share : left; i > 0; --i, --left) {
      char* p = const_cast<char*>(at) + static_cast<size_t>(line) * kLine;
      Write ? prefetch_write(p) : prefetch(p);
      if (++line == lines) line = 0, at += pitch;
    }
  }
};

// What a call fetches beside its work, from row to row: the next task's queries, and at last the lines it will write.
struct Beside {
  Stretches queries, outputs;
  bool last = false;  // group of keys

  static Stretches stretches(const AttendTask& t, const void* base, size_t pitch, size_t size) {
    const size_t heads = static_cast<size_t>(t.heads_per_kv) * t.kv.head_dim;
    Stretches found;
    found.at = static_cast<const char*>(base) + (t.token_begin * pitch + t.head_begin * heads) * size;
    found.pitch = pitch * size;
    found.lines = static_cast<int>(((t.head_end - t.head_begin) * heads * size + kLine - 1) / kLine);
    found.left = found.lines * t.queries();
    return found;
  }
  Beside(const AttendTask& t, int groups) {
    if (!t.states) outputs = stretches(t, t.out, t.out_pitch, dtype_bytes(t.out_dtype));
    if (t.next) queries = stretches(*t.next, t.next->qkv, t.next->pitch, sizeof(float));
    outputs.spread(t.rows());
    queries.spread(t.rows() * groups);
  }
  inline __attribute__((always_inline)) void some() {
    queries.next<false>();
    if (last) outputs.next<true>();
  }
};

// One group of keys and one head: `rows` rows from `first` on.
template <class T>
QUIRE_INLINE void attend_group(const AttendTask& t, const Scratch<T>& s, int first, int rows, int group,
                               const Tiles<T>& now, const Tiles<T>& next, Beside& beside) {
  if constexpr (T::parts == 2)
    for (int c = now.begin; c < now.end; ++c) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(now.k[c] + t.kv.scale_offset());
      prefetch(next.k[c] + t.kv.scale_offset());
      store(s.scales + c * kTile, load_bf16(scales));
      store(s.scales + kGroup + c * kTile, load_bf16(scales + kTile));
    }
  const int head_dim = t.kv.head_dim;
  const Ahead<T> ahead{now, next};
  row_blocks<T>(rows, [&](auto size, int r) __attribute__((always_inline)) {
    constexpr int R = decltype(size)::value;
    if (r == 0) score_block<T, R, true>(s, first, head_dim, now, ahead);
    else score_block<T, R, false>(s, first + r, head_dim, now, ahead);
  });
  if (rows <= kRows / T::parts)  // few rows: memory is what they wait for, and softmax must not leave it idle
    for (int i = 0; i < kSoftmaxLines * T::parts; ++i)
      prefetch(reinterpret_cast<const char*>(ahead.of_values(t.kv.d16, 0)) + i * kLine);
  for (int r = 0; r < rows; ++r) {
    softmax_row<T>(t, s, first + r, group);
    beside.some();
  }
  row_blocks<T>(rows, [&](auto size, int r) __attribute__((always_inline)) {
    constexpr int R = decltype(size)::value;
    if (r == 0) value_block<T, R, true>(s, first, now, ahead);
    else value_block<T, R, false>(s, first + r, now, ahead);
  });
}

// The partition that this group ends is folded into those before it, or its states are left.
template <class T>
QUIRE_INLINE void end_rows(const AttendTask& t, Scratch<T>* s, int rows, int group) {
  const int partition = group / kPartition;
  if (!t.states && !t.sinks && s->row[0].lo / kPartition == partition) {  // nothing came before
    for (int r = 0; r < rows; ++r) {
      s->row[r].max = s->row[r].part_max;
      s->row[r].sum_total = reduce_add(load(s->lane_sum + r * 16));
    }
    float* const first = s->acc;
    s->acc = s->total;
    s->total = first;
  } else {
    for (int r = 0; r < rows; ++r) {
      const size_t state = static_cast<size_t>((partition - t.partition_begin) * rows + r) * state_floats(s->d16);
      end_partition(s->row[r], s->lane_sum + r * 16, s->acc_of(r), s->total_of(r), s->d16,
                    t.states ? t.states + state : nullptr);
    }
  }
  for (int r = 0; r < rows; ++r) start_partition(s->row[r], s->lane_sum + r * 16);
}

template <class T>
void attend_rows(const AttendTask& t) {
  const int rows = t.rows(), of_head = t.queries() * t.heads_per_kv;
  Scratch<T> s(t.scratch, rows, t.kv.d16);
  for (int r = 0; r < rows; ++r) {
    const Place at = place_of(t, r);
    start_row(t, s.row[r], s.total_of(r), at);
    start_partition(s.row[r], s.lane_sum + r * 16);
    const size_t column = static_cast<size_t>(at.head) * t.kv.head_dim;
    put_query<T>(s, r, t.qkv + static_cast<size_t>(at.token) * t.pitch + column, t.kv.head_dim, t.scale);
  }
  const Span span(t);
  const int lo = span.lo, hi = span.hi;
  int group = span.group();
  Tiles<T> now = tiles_of<T>(t, group, lo, hi);
  Beside beside(t, (hi - group) / kGroup + 1);
  for (; group <= hi; group += kGroup) {
    beside.last = group + kGroup > hi;
    for (int head = t.head_begin; head < t.head_end; ++head) {
      const Tiles<T> next = head + 1 < t.head_end  ? now.of_next_head(t.kv)
                            : group + kGroup <= hi ? tiles_of<T>(t, group + kGroup, lo, hi)
                            : t.next               ? first_tiles<T>(*t.next)
                                                   : now;
      attend_group<T>(t, s, (head - t.head_begin) * of_head, of_head, group, now, next, beside);
      now = next;
    }
    if ((group + kGroup) % kPartition == 0 || group + kGroup > hi) end_rows<T>(t, &s, rows, group);
  }
  if (t.states) return;
  for (int r = 0; r < rows; ++r) {
    const Place at = place_of(t, r);
    write_row(t, t.kv.head_dim, at.token, at.head, s.total_of(r), s.row[r].sum_total);
  }
}

}  // namespace

void attend(const AttendTask& t) {
  switch (t.kv.dtype) {
    case DType::f32: return attend_rows<FloatCache>(t);
    case DType::i8: return attend_rows<ByteCache>(t);
    default: return attend_rows<HalfCache>(t);
  }
}

void attend_merge(const AttendTask& t) {
  const int d16 = t.kv.d16, rows = t.rows();
  float* total = static_cast<float*>(t.scratch);
  for (int r = 0; r < rows; ++r) {
    const Place at = place_of(t, r);
    SoftmaxRow row;
    start_row(t, row, total, at);
    for (int p = 0; p < t.partition_end - t.partition_begin; ++p) {
      const float* state = t.states + (static_cast<size_t>(p) * rows + r) * state_floats(d16);
      fold(row, total, state, state[d16], state[d16 + 1], d16);
    }
    write_row(t, t.kv.head_dim, at.token, at.head, total, row.sum_total);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
