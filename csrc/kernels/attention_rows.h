// Attention over the paged cache: causal, for decode and prefill alike, and over whole texts in both directions.
//
//   query rows      (kv head h, query i, head g of its group) -> row (h*queries + i)*G + g
//   keys            0 ........ 64 ........ 128 ...            groups of 64 share one rescale of the running softmax
//   a group         [tile 16][tile 16][tile 16][tile 16]      a tile lies inside one block of the cache
//   partitions      0 ........ 1024 ........ 2048             each starts a fresh softmax state; states are merged
//                                                             in rising order
//
// Cuts are absolute positions, so what a query row goes through depends on its own position and window only: not on
// the chunk, the batch or the threads. A group is worked on head by head, in the order in which a block holds them.

#pragma once

#include "kernels.h"
#include "kernels/attention_tiles.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// ---- rows and partitions ------------------------------------------------------------------------------------------

// What a row's scores are multiplied by, and (int8) by how much its query is to be multiplied, which is left in p_scale.
template <class T>
QUIRE_INLINE void measure_query(SoftmaxRow& row, const float* q, int head_dim, float scale) {
  row.factor = scale * kLog2e;
  if constexpr (T::parts == 2) {
    V16 top = zero(), sum = zero();
    for (int c = 0; c < head_dim; c += 16) {
      const V16 v = magnitude(head_dim - c >= 16 ? load(q + c) : load_n(q + c, head_dim - c));
      top = vmax(top, v);
      sum = add(sum, mul(v, set1(0.0f)));
    }
    const float largest = reduce_max(top);
    const bool some = largest > kTiny;
    if (some) row.factor *= largest / kQuerySteps;
    if (mask_not_finite(sum)) row.factor = NAN;
    row.p_scale = some ? kQuerySteps / largest : 0.0f;
  }
}

// A row of q in the format that the cache is multiplied with.
template <class T>
QUIRE_INLINE void put_query(const Scratch<T>& s, int r, const float* q, int head_dim) {
  const int d16 = s.d16;
  if constexpr (T::parts == 1) {
    for (int c = 0; c < d16; c += 16) to_elem(s.q + static_cast<size_t>(r) * d16 + c, load_n(q + c, head_dim - c));
  } else {
    const V16 inverse = set1(s.row[r].p_scale), limit = set1(kQuerySteps), least = set1(-kQuerySteps);
    uint8_t* high = s.q + static_cast<size_t>(2 * r) * d16;
    V16 highs = zero(), lows = zero();  // sums of the bytes, whole numbers below 2^24
    for (int c = 0; c < d16; c += 16) {
      const V16 v = mul(head_dim - c >= 16 ? load(q + c) : load_n(q + c, head_dim - c), inverse);
      const V16 x = round_even(vmax(vmin(v, limit), least));
      store_byte(high + c, add(x, set1(128.0f)), 8);
      store_byte(high + d16 + c, x, 0);
      const V16 byte = round_even(mul(add(x, set1(0.5f)), set1(1.0f / 256.0f)));  // the high one
      highs = add(highs, byte);
      lows = add(lows, fma(byte, set1(-256.0f), x));
    }
    s.offset[2 * r] = -128 * static_cast<int32_t>(reduce_add(highs));
    s.offset[2 * r + 1] = -128 * static_cast<int32_t>(reduce_add(lows));
  }
}

// A row's place: its query's token, and its head.
struct Place {
  int token, head;
};
// f(row, place) for each row of a task.
template <class F>
QUIRE_INLINE void each_row(const AttendTask& t, F f) {
  const int group = t.heads_per_kv;
  int r = 0;
  for (int head = t.head_begin; head < t.head_end; ++head)
    for (int token = t.token_begin; token < t.token_end; ++token)
      for (int g = 0; g < group; ++g) f(r++, Place{token, head * group + g});
}

// The last key that the query at a position sees.
QUIRE_INLINE int last_key(const AttendTask& t, int position) {
  if (t.last < 0) return position;
  return t.window && t.last - position >= t.window ? position + t.window - 1 : t.last;
}

// A row that has seen no key yet. A sink is a key that came first and has no value.
QUIRE_INLINE void start_row(const AttendTask& t, SoftmaxRow& row, float* total, Place at) {
  const int position = t.positions[at.token];
  row.lo = t.window && position >= t.window ? position - t.window + 1 : 0;
  row.hi = last_key(t, position);
  row.slope = t.slopes ? -kLog2e * t.slopes[at.head] : 0.0f;
  row.position = position;
  row.max = t.sinks ? t.sinks[at.head] * kLog2e : -INFINITY;
  row.sum_total = t.sinks ? 1.0f : 0.0f;
  if (t.sinks) clear(total, t.kv.d16);
}

QUIRE_INLINE void write_head(const AttendTask& t, Place at, const float* total, float sum) {
  write_row(t, t.kv.head_dim, at.token, at.head, total, sum / t.v_scales[at.head / t.heads_per_kv]);
}

// Keys that some query of a task sees, inside its partitions.
struct Span {
  int lo, hi;
  explicit Span(const AttendTask& t) {
    const int first = t.positions[t.token_begin], from = t.partition_begin * kPartition;
    const int last = last_key(t, t.positions[t.token_end - 1]), to = t.partition_end * kPartition - 1;
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

// Of the first N tiles; nothing reads those of the others.
template <int N>
QUIRE_INLINE void put_probabilities(float* out, const V16* p) {
  for (int c = 0; c < N; ++c) store(out + c * kTile, p[c]);
}
template <int N>
QUIRE_INLINE void put_probabilities(uint16_t* out, const V16* p) {
  for (int c = 0; c < N; c += 2) store_bf16_normal(out + c * kTile, p[c], c + 1 < N ? p[c + 1] : zero());
}

// Probabilities of one row and group as an int8 cache takes them: times the scales of their values, in 16 bits of a
// step that is a power of two.
template <int N>
QUIRE_INLINE void put_scaled(const Scratch<ByteCache>& s, int r, int group, V16* p) {
  SoftmaxRow& row = s.row[r];
  for (int c = 0; c < N; ++c) p[c] = mul(p[c], load(s.scales + kGroup + c * kTile));
  // scales of tokens that were never written may be anything
  mask_group<N>(row, group, zero(), p);
  const float largest = reduce_max(largest_of<N>(p));
  const bool some = largest > kTiny;
  // largest = m * 2^e with 1 <= m < 2 becomes m * 2^15
  const uint32_t exponent = float_to_bits(largest) & 0x7f800000u;
  row.p_scale = some ? bits_to_float(exponent - (15u << 23)) : 0.0f;
  // a value that was not finite
  if (mask_not_finite(sum_of<N>(p))) row.p_scale = NAN;
  const V16 inverse = set1(some ? bits_to_float(((15u + 254u) << 23) - exponent) : 0.0f);
  for (int c = 0; c < N; ++c) p[c] = mul(p[c], inverse);
  for (int c = N; c < kTilesPerGroup; ++c) p[c] = zero();
  uint8_t* out = s.probs + 2 * r * kGroup;
  store_two_bytes(out, out + kGroup, p);
}

// Of the group's first N tiles.
template <class T, int N>
QUIRE_INLINE void softmax_row(const AttendTask& t, const Scratch<T>& s, int r, int group) {
  SoftmaxRow& row = s.row[r];
  typename T::in* out = s.probs + r * T::parts * kGroup;
  if (!row.sees(group)) {
    std::memset(out, 0, sizeof(*out) * T::parts * kGroup);
    row.p_scale = 0.0f;
    return;
  }
  V16 x[kTilesPerGroup];
  for (int c = 0; c < N; ++c) {
    x[c] = load(s.scores + r * kGroup + c * kTile);
    if (T::parts == 2) x[c] = mul(x[c], load(s.scales + c * kTile));
  }
  softmax_group<N>(row, group, t.softcap, s.lane_sum + r * 16, s.acc_of(r), s.d16, x);
  if constexpr (T::parts == 1)
    put_probabilities<N>(out, x);
  else
    put_scaled<N>(s, r, group, x);
}

template <class T>
QUIRE_INLINE void softmax_rows(const AttendTask& t, const Scratch<T>& s, int r, int rows, int group, Seen seen,
                               Beside& beside) {
  const auto each = [&](auto tiles) __attribute__((always_inline)) {
    for (int i = r; i < r + rows; ++i) {
      softmax_row<T, decltype(tiles)::value>(t, s, i, group);
      beside.some();
    }
  };
  switch (seen.end) {
    case 1: return each(Int<1>());
    case 2: return each(Int<2>());
    case 3: return each(Int<3>());
    default: return each(Int<4>());
  }
}

// Scores of one group of keys and one head, `rows` rows from `first` on, and their probabilities.
template <class T>
QUIRE_INLINE void score_group(const AttendTask& t, const Scratch<T>& s, int first, int rows, int group,
                              const Ahead<T>& ahead, Beside& beside) {
  const Tiles<T>& now = ahead.now;
  if constexpr (T::parts == 2)
    for (int c = now.seen.begin; c < now.seen.end; ++c) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(now.at[c] + t.kv.scale_offset());
      prefetch(ahead.next.at[c] + t.kv.scale_offset());
      store(s.scales + c * kTile, load_bf16(scales));
      store(s.scales + kGroup + c * kTile, load_bf16(scales + kTile));
    }
  // A block of rows works on what it sees, its first query's first key to its last query's last, and the first to see a
  // tile fetches.
  const int head_dim = t.kv.head_dim;
  int fetched = 0;
  row_blocks<T>(rows, [&](auto size, int r) __attribute__((always_inline)) {
    constexpr int R = decltype(size)::value;
    const Seen seen = s.seen(group, first + r, R);
    if (!T::widened && seen.end > fetched)  // widening has fetched
      score_block<T, R, !T::widened>(s, first + r, head_dim, seen, ahead), fetched = seen.end;
    else
      score_block<T, R, false>(s, first + r, head_dim, seen, ahead);
    if (!T::widened && rows == R)  // few rows: memory is what they wait for, and softmax must not leave it idle
      for (int i = 0; i < kSoftmaxLines * T::parts; ++i) Ahead<T>::fetch(ahead.of_values(0), i);
    softmax_rows<T>(t, s, first + r, R, group, seen, beside);
  });
}

// Their values times probabilities.
template <class T>
QUIRE_INLINE void value_group(const Scratch<T>& s, int first, int rows, int group, const Ahead<T>& ahead) {
  int fetched = 0;
  row_blocks<T>(rows, [&](auto size, int r) __attribute__((always_inline)) {
    constexpr int R = decltype(size)::value;
    const Seen seen = s.seen(group, first + r, R);
    if (!T::widened && seen.end > fetched)
      value_block<T, R, !T::widened>(s, first + r, seen, ahead), fetched = seen.end;
    else if (seen.end > seen.begin || ahead.now.fresh)
      value_block<T, R, false>(s, first + r, seen, ahead);
  });
}

template <class T>
QUIRE_INLINE void attend_group(const AttendTask& t, const Scratch<T>& s, int head, int rows, int group,
                               const Ahead<T>& ahead, Beside& beside) {
  const int first = (head - t.head_begin) * rows;
  const Tiles<T>& now = ahead.now;
  const bool widen = T::widened && !now.recent, nuq = widen && t.kv.type == KVType::kvquant3;
  const Tiles<T> wide = widen ? now.in(s.wide, s.d16) : now;
  const Ahead<T> found{wide, ahead.next, ahead.d16};
  if (widen && kv_late(t.kv.type)) {
    for (int c = now.seen.begin & ~1; c < now.seen.end; c += 2) {
      const char* even = c < now.seen.begin ? now.at[c + 1] - t.kv.tile_bytes : now.at[c];
      widen_late_keys(t.kv, even, ahead.next.at[c], s.wide + c * kTile * s.d16);
    }
  } else if (nuq) {
    for (int c = now.seen.begin; c < now.seen.end; ++c)
      widen_kvquant_keys(t.kv, t.codes, head, group + c * kTile, now.at[c], ahead.next.at[c],
                         s.wide + c * kTile * s.d16);
  } else if (widen) {
    for (int c = now.seen.begin; c < now.seen.end; ++c)
      widen_keys(t.kv, now.at[c], ahead.next.at[c], s.wide + c * kTile * s.d16);
  }
  score_group<T>(t, s, first, rows, group, found, beside);
  for (int c = now.seen.begin; widen && c < now.seen.end; ++c)
    if (nuq)
      widen_kvquant_values(t.kv, t.codes, head, now.at[c], ahead.next.at[c], s.wide + c * kTile * s.d16);
    else
      widen_values(t.kv, now.at[c], ahead.next.at[c], s.wide + c * kTile * s.d16);
  value_group<T>(s, first, rows, group, found);
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
  const auto query = [&](Place at) {
    return t.qkv + static_cast<size_t>(at.token) * t.pitch + static_cast<size_t>(at.head) * t.kv.head_dim;
  };
  // Two loops: a row's largest number is long in coming, and the next row need not wait for it.
  each_row(t, [&](int r, Place at) {
    start_row(t, s.row[r], s.total_of(r), at);
    start_partition(s.row[r], s.lane_sum + r * 16);
    measure_query<T>(s.row[r], query(at), t.kv.head_dim, t.scale * t.k_scales[at.head / t.heads_per_kv]);
  });
  each_row(t, [&](int r, Place at) { put_query<T>(s, r, query(at), t.kv.head_dim); });
  const Span span(t);
  const int lo = span.lo, hi = span.hi;
  int group = span.group();
  Tiles<T> now = tiles_of<T>(t, group, lo, hi);
  Beside beside(t, (hi - group) / kGroup + 1);
  for (; group <= hi; group += kGroup) {
    beside.last = group + kGroup > hi;
    for (int head = t.head_begin; head < t.head_end; ++head) {
      const Tiles<T> next = head + 1 < t.head_end  ? now.of_next_head(t)
                            : group + kGroup <= hi ? tiles_of<T>(t, group + kGroup, lo, hi)
                            : t.next               ? first_tiles<T>(*t.next)
                                                   : now;
      const Ahead<T> ahead{now, next, t.kv.d16};
      attend_group<T>(t, s, head, of_head, group, ahead, beside);
      if (t.tiles_read) *t.tiles_read += static_cast<size_t>(now.seen.end - now.seen.begin);
      now = next;
    }
    if ((group + kGroup) % kPartition == 0 || group + kGroup > hi) end_rows<T>(t, &s, rows, group);
  }
  if (t.states) return;
  each_row(t, [&](int r, Place at) { write_head(t, at, s.total_of(r), s.row[r].sum_total); });
}

}  // namespace

// Over a cache that is widened. (In a file of its own: it takes as long to compile as all others.)
void attend_widened(const AttendTask& t);

}  // namespace QUIRE_ISA
}  // namespace quire
