// Causal attention over the paged cache, for decode and prefill alike.
//
//   query rows      (query i, head g of the kv group) -> row i*G + g, at most kAttendRows at a time
//   keys            0 ........ 64 ........ 128 ...            groups of 64 share one rescale of the running softmax
//   a group         [tile 16][tile 16][tile 16][tile 16]      a tile lies inside one block of the cache
//   partitions      0 ........ 1024 ........ 2048             each starts a fresh softmax state; states are merged
//                                                             in rising order (FlashDecoding's split, at fixed cuts)
//
// The running softmax is that of FlashAttention (arXiv 2205.14135). Cuts are absolute positions, so what a query
// row goes through depends on its own position and window only: not on the chunk, the batch or the threads.
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
constexpr float kProbabilitySteps = 65535.0f;
constexpr float kTiny = 1e-30f;                  // a largest number below this counts as zero

struct Row : SoftmaxRow {
  float q_scale;  // i8: what a step of the rounded query is worth
  float p_scale;  // i8: and of the current group's probabilities
};

// What the loops below ask of a cache format: `parts` rows of a query and of its probabilities, how sums of scores
// start, and one multiply-accumulate for each of the two products.
struct FloatCache : F32 {
  static constexpr int parts = 1;
  static inline __attribute__((always_inline)) V16 start(int32_t) { return zero(); }
  static inline __attribute__((always_inline)) V16 score(V16 acc, const float* q, const float* k) { return mac(acc, q, k); }
  static inline __attribute__((always_inline)) V16 value(V16 acc, const float* p, const float* v) { return mac(acc, p, v); }
};
struct HalfCache : BF16 {
  static constexpr int parts = 1;
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
  static inline __attribute__((always_inline)) I16 start(int32_t offset) {
    return iset1(&offset);
  }
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
  char* scores;             // [part][kGroup] sums of four bytes
  int32_t* offset;          // [part] i8: where sums of scores start, which takes the 128 of the keys off again
  float* acc;               // [r][d16] current partition
  float* total;             // [r][d16] merged partitions
  float* lane_sum;          // [r][16] current partition's sum of probabilities
  Row* row;                 // [r]

  Scratch(void* base, int rows, int d16) {
    char* p = static_cast<char*>(base);
    auto take = [&p](size_t bytes) {
      char* at = p;
      p += (bytes + 63) / 64 * 64;
      return at;
    };
    const size_t n = static_cast<size_t>(rows), part = n * T::parts;
    q = reinterpret_cast<typename T::elem*>(take(sizeof(*q) * part * d16));
    probs = reinterpret_cast<typename T::elem*>(take(sizeof(*probs) * part * kGroup));
    scores = take(4 * part * kGroup);
    offset = reinterpret_cast<int32_t*>(take(sizeof(int32_t) * part));
    acc = reinterpret_cast<float*>(take(sizeof(float) * n * d16));
    total = reinterpret_cast<float*>(take(sizeof(float) * n * d16));
    lane_sum = reinterpret_cast<float*>(take(sizeof(float) * n * 16));
    row = reinterpret_cast<Row*>(take(sizeof(Row) * n));
  }
};

QUIRE_INLINE void to_elem(float* out, V16 v) { store(out, v); }
QUIRE_INLINE void to_elem(uint16_t* out, V16 v) { store_bf16(out, v); }
// Probabilities are zero or normal: exp gives nothing below e^-87.
QUIRE_INLINE void put_probability(float* out, V16 v) { store(out, v); }
QUIRE_INLINE void put_probability(uint16_t* out, V16 v) { store_bf16_normal(out, v); }
QUIRE_INLINE void put_sum(char* out, V16 v) { store(reinterpret_cast<float*>(out), v); }
QUIRE_INLINE void put_sum(char* out, I16 v) { istore(out, v); }
// Sums of the high and the low parts of sixteen products.
QUIRE_INLINE V16 join(I16 high, I16 low) { return fma(to_float(high), set1(256.0f), to_float(low)); }
QUIRE_INLINE V16 magnitude(V16 v) { return vmax(v, sub(zero(), v)); }

// ---- tiles --------------------------------------------------------------------------------------------------------

// Where the tiles of a group lie. Tiles begin … end-1 are seen by some query of the call; blocks of the others may
// have been given back, and they point to a tile that is seen instead.
template <class T>
struct Tiles {
  const typename T::elem* k[kTilesPerGroup];
  const typename T::elem* v[kTilesPerGroup];
  const uint16_t* scale[kTilesPerGroup];  // i8: of keys, and behind them of values
  int begin, end;
};

template <class T>
Tiles<T> tiles_of(const AttendTask& t, int group, int lo, int hi) {
  const KVLayout& kv = t.kv;
  Tiles<T> found;
  found.begin = lo <= group ? 0 : (lo - group) / kTile;
  found.end = hi >= group + kGroup - 1 ? kTilesPerGroup : (hi - group) / kTile + 1;
  for (int i = 0; i < kTilesPerGroup; ++i) {
    const int position = group + kTile * (i < found.begin || i >= found.end ? found.begin : i);
    const size_t block = static_cast<size_t>(t.block_table[position / kv.block_size]);
    const size_t tile = static_cast<size_t>(t.kv_head) * kv.tiles_per_block + position % kv.block_size / kTile;
    const auto* base = static_cast<const typename T::elem*>(t.cache) + block * kv.block_stride;
    found.k[i] = base + tile * kv.tile_elems;
    found.v[i] = found.k[i] + kv.v_offset;
    if (T::parts == 2)
      found.scale[i] = reinterpret_cast<const uint16_t*>(base + 2 * kv.v_offset + tile * kScaleBytes);
  }
  return found;
}

// Largest row blocks first.
template <int N>
struct Int {
  static constexpr int value = N;
};
template <class F>
QUIRE_INLINE void row_blocks(int rows, F f) {
  int r = 0;
  for (; r + kRows <= rows; r += kRows) f(Int<kRows>(), r);
  if (kRows > 4 && r + 4 <= rows) {
    f(Int<4>(), r);
    r += 4;
  }
  for (; r + 2 <= rows; r += 2) f(Int<2>(), r);
  if (r < rows) f(Int<1>(), r);
}

// ---- q·k ----------------------------------------------------------------------------------------------------------

// scores[r … r+R][tile … tile+C] = q . k, over `steps` vectors of a tile; fetches the tiles of the next group.
template <class T, int R, int C>
QUIRE_INLINE void score_rows(const Scratch<T>& s, int r, int d16, const Tiles<T>& now, const Tiles<T>& next, int tile,
                             int steps) {
  constexpr size_t kVector = static_cast<size_t>(kTile) * T::step;
  typename T::sum acc[R * C];
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) acc[i * C + c] = T::start(T::parts == 2 ? s.offset[r + i] : 0);
  const typename T::elem* q = s.q + static_cast<size_t>(r) * d16;
  const typename T::elem* k[C];
  for (int c = 0; c < C; ++c) k[c] = now.k[tile + c];
  size_t at = 0;
  for (int ahead = 0, done = 0; ahead < C; ++ahead) {  // one tile of the next group after the other
    const typename T::elem* fetch = next.k[tile + ahead];
    for (const int stop = steps * (ahead + 1) / C; done < stop; ++done) {
      for (int c = 0; c < C; ++c) prefetch_l2(fetch + c * kVector);
      fetch += C * kVector;
#pragma GCC unroll 6
      for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[i * C + c] = T::score(acc[i * C + c], q + static_cast<size_t>(i) * d16, k[c] + at);
      }
      q += T::step;
      at += kVector;
    }
  }
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) put_sum(s.scores + 4 * ((r + i) * kGroup + (tile + c) * kTile), acc[i * C + c]);
}

template <class T>
void score_group(const Scratch<T>& s, int rows, const KVLayout& kv, const Tiles<T>& now, const Tiles<T>& next) {
  const int steps = (kv.head_dim + T::step - 1) / T::step, d16 = kv.d16;
  row_blocks(rows * T::parts, [&](auto size, int r) __attribute__((always_inline)) {
    constexpr int R = decltype(size)::value, C = cols_for<R>();
    const Tiles<T>& fetch = r == 0 ? next : now;
    if (now.begin == 0 && now.end == kTilesPerGroup) {
      for (int tile = 0; tile < kTilesPerGroup; tile += C) score_rows<T, R, C>(s, r, d16, now, fetch, tile, steps);
    } else {
      for (int tile = now.begin; tile < now.end; ++tile) score_rows<T, R, 1>(s, r, d16, now, fetch, tile, steps);
    }
  });
}

// ---- softmax ------------------------------------------------------------------------------------------------------

// Sixteen scores of one row, as numbers.
template <class T>
QUIRE_INLINE V16 load_scores(const Scratch<T>& s, const Tiles<T>& tiles, int r, int tile, V16 scale) {
  if constexpr (T::parts == 1) {
    return mul(load(reinterpret_cast<const float*>(s.scores) + r * kGroup + tile * kTile), scale);
  } else {
    const char* at = s.scores + 4 * (2 * r * kGroup + tile * kTile);
    return mul(mul(join(iload(at), iload(at + 4 * kGroup)), scale), load_bf16(tiles.scale[tile]));
  }
}

// Probabilities of one row and group as an int8 cache takes them: times the scales of their values, in 16 bits.
QUIRE_INLINE void put_scaled(const Scratch<ByteCache>& s, const Tiles<ByteCache>& tiles, int r, int first, const V16* p,
                             bool whole) {
  Row& row = s.row[r];
  V16 x[kTilesPerGroup];
  V16 top = zero(), sum = zero();
  for (int c = 0; c < kTilesPerGroup; ++c) {
    x[c] = mul(p[c], load_bf16(tiles.scale[c] + kTile));
    if (!whole) {  // scales of tokens that were never written may be anything
      const int at = first + c * kTile;
      x[c] = first_n(row.hi - at + 1, x[c], zero());
      x[c] = first_n(row.lo - at, zero(), x[c]);
    }
    top = vmax(top, x[c]);
    sum = add(sum, x[c]);
  }
  const float largest = reduce_max(top);
  row.p_scale = largest > kTiny ? largest / kProbabilitySteps : 0.0f;
  if (mask_not_finite(sum)) row.p_scale = NAN;  // a value that was not finite
  const V16 inverse = set1(largest > kTiny ? kProbabilitySteps / largest : 0.0f);
  uint8_t* out = s.probs + 2 * r * kGroup;
  for (int c = 0; c < kTilesPerGroup; ++c) {
    const V16 whole_number = round_even(vmin(mul(x[c], inverse), set1(kProbabilitySteps)));
    store_byte(out + c * kTile, whole_number, 8);
    store_byte(out + kGroup + c * kTile, whole_number, 0);
  }
}

template <class T>
QUIRE_INLINE void put_nothing(const Scratch<T>& s, int r) {
  std::memset(s.probs + r * T::parts * kGroup, 0, sizeof(*s.probs) * T::parts * kGroup);
  s.row[r].p_scale = 0.0f;
}

// Scores of one row and group -> probabilities; rescales the row's state when its maximum grows.
template <class T>
QUIRE_INLINE void softmax_row(const AttendTask& t, const Scratch<T>& s, const Tiles<T>& tiles, int r, int group) {
  Row& row = s.row[r];
  if (row.hi < group || row.lo >= group + kGroup) return put_nothing(s, r);
  const bool whole = row.lo <= group && row.hi >= group + kGroup - 1;
  const V16 minus_inf = set1(-INFINITY), scale = set1(t.scale * row.q_scale);
  V16 x[kTilesPerGroup];
  V16 top = minus_inf;
  for (int c = 0; c < kTilesPerGroup; ++c) {
    V16 v = load_scores(s, tiles, r, c, scale);
    if (t.softcap > 0.0f) v = mul(set1(t.softcap), tanh16(div(v, set1(t.softcap))));
    if (!whole) {
      const int first = group + c * kTile;
      v = first_n(row.hi - first + 1, v, minus_inf);
      v = first_n(row.lo - first, minus_inf, v);
    }
    x[c] = v;
    top = vmax(top, v);
  }
  grow_row(row, reduce_max(top), s.lane_sum + r * 16, s.acc + static_cast<size_t>(r) * t.kv.d16, t.kv.d16);
  V16 sum = load(s.lane_sum + r * 16);
  const V16 max = set1(row.part_max);
  for (int c = 0; c < kTilesPerGroup; ++c) {
    x[c] = exp(sub(x[c], max));
    sum = add(sum, x[c]);
  }
  store(s.lane_sum + r * 16, sum);
  if constexpr (T::parts == 1) {
    for (int c = 0; c < kTilesPerGroup; ++c) put_probability(s.probs + r * kGroup + c * kTile, x[c]);
  } else {
    put_scaled(s, tiles, r, group, x, whole);
  }
}

// ---- p·v ----------------------------------------------------------------------------------------------------------

// acc[r … r+R][c0 … c0+16*C] += probs . v over the tiles of a group; fetches those of the next group.
template <class T, int R, int C>
QUIRE_INLINE void value_rows(const Scratch<T>& s, int r, int d16, const Tiles<T>& now, const Tiles<T>& next, int c0) {
  constexpr size_t kVector = static_cast<size_t>(kTile) * T::step;
  typename T::sum a[R * C];
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) {
      if constexpr (T::parts == 1)
        a[i * C + c] = load(s.acc + static_cast<size_t>(r + i) * d16 + c0 + c * 16);
      else
        a[i * C + c] = izero();
    }
  for (int tile = now.begin; tile < now.end; ++tile) {
    const typename T::elem* p = s.probs + r * kGroup + tile * kTile;
    const typename T::elem* v = now.v[tile] + static_cast<size_t>(c0) * T::step;
    const typename T::elem* fetch = next.v[tile] + static_cast<size_t>(c0) * T::step;
#pragma GCC unroll 1
    for (int k = 0; k < kTile / T::step; ++k) {
      for (int c = 0; c < C; ++c) prefetch_l2(fetch + c * kVector);
#pragma GCC unroll 6
      for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) a[i * C + c] = T::value(a[i * C + c], p + i * kGroup, v + c * kVector);
      }
      p += T::step;
      v += static_cast<size_t>(d16) * T::step;
      fetch += static_cast<size_t>(d16) * T::step;
    }
  }
  for (int i = 0; i < R; i += T::parts)
    for (int c = 0; c < C; ++c) {
      float* acc = s.acc + static_cast<size_t>(r + i) / T::parts * d16 + c0 + c * 16;
      if constexpr (T::parts == 1)
        store(acc, a[i * C + c]);
      else
        store(acc, fma(join(a[i * C + c], a[(i + 1) * C + c]), set1(s.row[(r + i) / 2].p_scale), load(acc)));
    }
}

template <class T>
void value_group(const Scratch<T>& s, int rows, int d16, const Tiles<T>& now, const Tiles<T>& next) {
  row_blocks(rows * T::parts, [&](auto size, int r) __attribute__((always_inline)) {
    constexpr int R = decltype(size)::value, C = cols_for<R>();
    if constexpr (R % T::parts == 0) {
      const Tiles<T>& fetch = r == 0 ? next : now;
      int c0 = 0;
      for (; c0 + 16 * C <= d16; c0 += 16 * C) value_rows<T, R, C>(s, r, d16, now, fetch, c0);
      if (C == 4 && c0 + 32 <= d16) {
        value_rows<T, R, 2>(s, r, d16, now, fetch, c0);
        c0 += 32;
      }
      for (; c0 < d16; c0 += 16) value_rows<T, R, 1>(s, r, d16, now, fetch, c0);
    }
  });
}

// ---- rows and partitions ------------------------------------------------------------------------------------------

// A row of q in the format that the cache is multiplied with.
template <class T>
QUIRE_INLINE void put_query(const Scratch<T>& s, int r, const float* q, int head_dim, int d16) {
  if constexpr (T::parts == 1) {
    for (int c = 0; c < d16; c += 16) to_elem(s.q + static_cast<size_t>(r) * d16 + c, load_n(q + c, head_dim - c));
    s.row[r].q_scale = 1.0f;
  } else {
    V16 top = zero(), sum = zero();
    for (int c = 0; c < d16; c += 16) {
      const V16 v = magnitude(load_n(q + c, head_dim - c));
      top = vmax(top, v);
      sum = add(sum, mul(v, set1(0.0f)));
    }
    const float largest = reduce_max(top);
    const bool some = largest > kTiny;
    s.row[r].q_scale = mask_not_finite(sum) ? NAN : some ? largest / kQuerySteps : 0.0f;
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

// A row that has seen no key yet. A sink is a key that came first and has no value.
QUIRE_INLINE void start_row(const AttendTask& t, Row& row, float* total, int token, int g) {
  const int position = t.positions[token];
  row.lo = t.window && position >= t.window ? position - t.window + 1 : 0;
  row.hi = position;
  row.max = t.sinks ? t.sinks[t.kv_head * t.heads_per_kv + g] : -INFINITY;
  row.sum_total = t.sinks ? 1.0f : 0.0f;
  clear(total, t.kv.d16);
}

template <class T>
void attend_rows(const AttendTask& t, int first, int count) {
  const int head_dim = t.kv.head_dim, d16 = t.kv.d16, heads = t.heads_per_kv, rows = count * heads;
  const Scratch<T> s(t.scratch, rows, d16);
  for (int r = 0; r < rows; ++r) {
    const int token = first + r / heads, g = r % heads;
    start_row(t, s.row[r], s.total + static_cast<size_t>(r) * d16, token, g);
    start_partition(s.row[r], s.lane_sum + r * 16, s.acc + static_cast<size_t>(r) * d16, d16);
    const size_t head = static_cast<size_t>(t.kv_head * heads + g);
    put_query<T>(s, r, t.qkv + static_cast<size_t>(token) * t.pitch + head * head_dim, head_dim, d16);
  }
  // Keys that some query of this call sees, inside the task's partitions.
  const int from = t.partition_begin * kPartition, last = t.partition_end * kPartition - 1;
  const int lo = s.row[0].lo > from ? s.row[0].lo : from, hi = s.row[rows - 1].hi < last ? s.row[rows - 1].hi : last;
  int group = lo / kGroup * kGroup;
  Tiles<T> now = tiles_of<T>(t, group, lo, hi);
  for (; group <= hi; group += kGroup) {
    const Tiles<T> next = group + kGroup <= hi ? tiles_of<T>(t, group + kGroup, lo, hi) : now;
    score_group<T>(s, rows, t.kv, now, next);
    for (int r = 0; r < rows; ++r) softmax_row<T>(t, s, now, r, group);
    value_group<T>(s, rows, d16, now, next);
    if ((group + kGroup) % kPartition == 0 || group + kGroup > hi) {
      const size_t partition = static_cast<size_t>(group / kPartition - t.partition_begin);
      float* states = t.states ? t.states + partition * rows * state_floats(d16) : nullptr;
      for (int r = 0; r < rows; ++r) {
        const size_t at = static_cast<size_t>(r);
        end_partition(s.row[r], s.lane_sum + at * 16, s.acc + at * d16, s.total + at * d16, d16,
                      states ? states + at * state_floats(d16) : nullptr);
      }
    }
    now = next;
  }
  if (t.states) return;
  for (int r = 0; r < rows; ++r)
    write_row(t, head_dim, first + r / heads, t.kv_head * heads + r % heads, s.total + static_cast<size_t>(r) * d16,
              s.row[r].sum_total);
}

template <class T>
void attend_all(const AttendTask& t) {
  const int per_call = queries_per_call(t.heads_per_kv);
  for (int i = t.token_begin; i < t.token_end; i += per_call) {
    const int left = t.token_end - i;
    attend_rows<T>(t, i, left < per_call ? left : per_call);
  }
}

}  // namespace

void attend(const AttendTask& t) {
  switch (t.kv.dtype) {
    case DType::f32: return attend_all<FloatCache>(t);
    case DType::i8: return attend_all<ByteCache>(t);
    default: return attend_all<HalfCache>(t);
  }
}

void attend_merge(const AttendTask& t) {
  const int d16 = t.kv.d16, heads = t.heads_per_kv, rows = (t.token_end - t.token_begin) * heads;
  float* total = static_cast<float*>(t.scratch);
  for (int r = 0; r < rows; ++r) {
    const int token = t.token_begin + r / heads;
    Row row;
    start_row(t, row, total, token, r % heads);
    for (int p = 0; p < t.partition_end - t.partition_begin; ++p) {
      const float* state = t.states + (static_cast<size_t>(p) * rows + r) * state_floats(d16);
      fold(row, total, state, state[d16], state[d16 + 1], d16);
    }
    write_row(t, t.kv.head_dim, token, t.kv_head * heads + r % heads, total, row.sum_total);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
