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

#include "kernels.h"
#include "kernels/micro.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kTilesPerGroup = kGroup / kTile;

// One query row's place and softmax state.
struct Row {
  int lo, hi;            // keys it sees: lo <= key <= hi
  float max, sum_total;  // of merged partitions
  float part_max;        // of the current partition
};

// Carved from the task's scratch; every array is 64-byte aligned.
template <class T>
struct Scratch {
  typename T::elem* q;     // [rows][d16]
  float* scores;           // [rows][kGroup]
  typename T::elem* probs; // [rows][kGroup]
  float* acc;              // [rows][d16] current partition
  float* total;            // [rows][d16] merged partitions
  float* lane_sum;         // [rows][16] current partition's sum of probabilities
  Row* row;                // [rows]

  Scratch(void* base, int rows, int d16) {
    char* p = static_cast<char*>(base);
    auto take = [&p](size_t bytes) {
      char* at = p;
      p += (bytes + 63) / 64 * 64;
      return at;
    };
    q = reinterpret_cast<typename T::elem*>(take(sizeof(*q) * rows * d16));
    scores = reinterpret_cast<float*>(take(sizeof(float) * rows * kGroup));
    probs = reinterpret_cast<typename T::elem*>(take(sizeof(*probs) * rows * kGroup));
    acc = reinterpret_cast<float*>(take(sizeof(float) * rows * d16));
    total = reinterpret_cast<float*>(take(sizeof(float) * rows * d16));
    lane_sum = reinterpret_cast<float*>(take(sizeof(float) * rows * 16));
    row = reinterpret_cast<Row*>(take(sizeof(Row) * rows));
  }
};

QUIRE_INLINE void to_elem(float* out, V16 v) { store(out, v); }
QUIRE_INLINE void to_elem(uint16_t* out, V16 v) { store_bf16(out, v); }

template <class T>
struct Tiles {
  const typename T::elem* k[kTilesPerGroup];
  const typename T::elem* v[kTilesPerGroup];
};

template <class T>
QUIRE_INLINE const typename T::elem* tile_at(const AttendTask& t, int position) {
  const KVLayout& kv = t.kv;
  const size_t block = static_cast<size_t>(t.block_table[position / kv.block_size]);
  const size_t tile = static_cast<size_t>(t.kv_head) * kv.tiles_per_block + position % kv.block_size / kTile;
  return static_cast<const typename T::elem*>(t.cache) + block * kv.block_stride + tile * kv.tile_elems;
}

// scores[r][tile] = q[r] . k for R rows and one tile
template <class T, int R>
QUIRE_INLINE void score_rows(const typename T::elem* q, int d16, const typename T::elem* k, int head_dim,
                             float* scores) {
  V16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  micro<T, R, 1>(acc, q, d16, k, static_cast<size_t>(kTile) * T::step, 0, (head_dim + T::step - 1) / T::step);
  for (int r = 0; r < R; ++r) store(scores + r * kGroup, acc[r]);
}

// acc[r] += probs[r] . v for R rows and one tile
template <class T, int R>
QUIRE_INLINE void value_rows(const typename T::elem* probs, const typename T::elem* v, int d16, float* acc) {
  constexpr int C = cols_for<R>();
  int c0 = 0;
  for (; c0 + 16 * C <= d16; c0 += 16 * C) {
    V16 a[R * C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) a[r * C + c] = load(acc + r * d16 + c0 + c * 16);
    micro<T, R, C>(a, probs, kGroup, v + static_cast<size_t>(c0) * T::step, static_cast<size_t>(d16) * T::step,
                   16 * T::step, kTile / T::step);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) store(acc + r * d16 + c0 + c * 16, a[r * C + c]);
  }
  for (; c0 < d16; c0 += 16) {
    V16 a[R];
    for (int r = 0; r < R; ++r) a[r] = load(acc + r * d16 + c0);
    micro<T, R, 1>(a, probs, kGroup, v + static_cast<size_t>(c0) * T::step, static_cast<size_t>(d16) * T::step, 0,
                   kTile / T::step);
    for (int r = 0; r < R; ++r) store(acc + r * d16 + c0, a[r]);
  }
}

template <class T>
void score_tile(int rows, const Scratch<T>& s, int d16, const typename T::elem* k, int head_dim, int tile) {
  int r = 0;
  for (; r + kRows <= rows; r += kRows)
    score_rows<T, kRows>(s.q + r * d16, d16, k, head_dim, s.scores + r * kGroup + tile * kTile);
  for (; r + 2 <= rows; r += 2)
    score_rows<T, 2>(s.q + r * d16, d16, k, head_dim, s.scores + r * kGroup + tile * kTile);
  if (r < rows) score_rows<T, 1>(s.q + r * d16, d16, k, head_dim, s.scores + r * kGroup + tile * kTile);
}

template <class T>
void value_tile(int rows, const Scratch<T>& s, int d16, const typename T::elem* v, int tile) {
  int r = 0;
  for (; r + kRows <= rows; r += kRows)
    value_rows<T, kRows>(s.probs + r * kGroup + tile * kTile, v, d16, s.acc + r * d16);
  for (; r + 2 <= rows; r += 2)
    value_rows<T, 2>(s.probs + r * kGroup + tile * kTile, v, d16, s.acc + r * d16);
  if (r < rows) value_rows<T, 1>(s.probs + r * kGroup + tile * kTile, v, d16, s.acc + r * d16);
}

// Scores of one row and group -> probabilities; rescales the row's state when its maximum grows.
template <class T>
QUIRE_INLINE void softmax_row(const AttendTask& t, const Scratch<T>& s, int r, int group, int d16) {
  Row& row = s.row[r];
  float* scores = s.scores + r * kGroup;
  typename T::elem* probs = s.probs + r * kGroup;
  if (row.hi < group || row.lo >= group + kGroup) {  // sees nothing here: probabilities are zeros
    for (int c = 0; c < kGroup; c += 16) to_elem(probs + c, zero());
    return;
  }
  const V16 minus_inf = set1(-INFINITY);
  V16 x[kTilesPerGroup];
  V16 top = minus_inf;
  for (int c = 0; c < kTilesPerGroup; ++c) {
    const int first = group + c * 16;
    V16 v = mul(load(scores + c * 16), set1(t.scale));
    if (t.softcap > 0.0f) v = mul(set1(t.softcap), tanh16(div(v, set1(t.softcap))));
    v = first_n(row.hi - first + 1, v, minus_inf);
    v = first_n(row.lo - first, minus_inf, v);
    x[c] = v;
    top = vmax(top, v);
  }
  const float seen = reduce_max(top);
  V16 sum = load(s.lane_sum + r * 16);
  if (seen > row.part_max) {
    const V16 shrink = exp(sub(set1(row.part_max), set1(seen)));  // e^-inf = 0 at the first group
    row.part_max = seen;
    sum = mul(sum, shrink);
    float* acc = s.acc + r * d16;
    for (int c = 0; c < d16; c += 16) store(acc + c, mul(load(acc + c), shrink));
  }
  const V16 max = set1(row.part_max);
  for (int c = 0; c < kTilesPerGroup; ++c) {
    const V16 p = exp(sub(x[c], max));
    sum = add(sum, p);
    to_elem(probs + c * 16, p);
  }
  store(s.lane_sum + r * 16, sum);
}

// Fold the current partition of every row into its total, and start the next one.
template <class T>
void merge_partition(int rows, const Scratch<T>& s, int d16) {
  for (int r = 0; r < rows; ++r) {
    Row& row = s.row[r];
    float* acc = s.acc + r * d16;
    float* total = s.total + r * d16;
    if (row.part_max > -INFINITY) {
      const float part_sum = reduce_add(load(s.lane_sum + r * 16));
      const float max = row.part_max > row.max ? row.part_max : row.max;
      float scale[16];
      store(scale, exp(first_n(1, set1(row.max - max), set1(row.part_max - max))));
      const V16 old_scale = set1(scale[0]), new_scale = set1(scale[1]);
      row.sum_total = row.sum_total * scale[0] + part_sum * scale[1];
      row.max = max;
      for (int c = 0; c < d16; c += 16)
        store(total + c, add(mul(load(total + c), old_scale), mul(load(acc + c), new_scale)));
    }
    row.part_max = -INFINITY;
    store(s.lane_sum + r * 16, zero());
    for (int c = 0; c < d16; c += 16) store(acc + c, zero());
  }
}

template <class T>
void attend_rows(const AttendTask& t, int first, int count) {
  const int head_dim = t.kv.head_dim, d16 = t.kv.d16, heads = t.heads_per_kv;
  const int rows = count * heads;
  Scratch<T> s(t.scratch, rows, d16);
  for (int i = 0; i < count; ++i) {
    const int position = t.positions[first + i];
    for (int g = 0; g < heads; ++g) {
      const int r = i * heads + g;
      const float* q = t.qkv + static_cast<size_t>(first + i) * t.pitch +
                       static_cast<size_t>(t.kv_head * heads + g) * head_dim;
      for (int c = 0; c < d16; c += 16) to_elem(s.q + r * d16 + c, load_n(q + c, head_dim - c));
      const int lo = t.window && position >= t.window ? position - t.window + 1 : 0;
      // A sink is a key that came first and has no value.
      const float sink = t.sinks ? t.sinks[t.kv_head * heads + g] : -INFINITY;
      s.row[r] = {lo, position, sink, t.sinks ? 1.0f : 0.0f, -INFINITY};
      store(s.lane_sum + r * 16, zero());
      for (int c = 0; c < d16; c += 16) {
        store(s.acc + r * d16 + c, zero());
        store(s.total + r * d16 + c, zero());
      }
    }
  }
  // Tiles that some query of this call sees; blocks outside may have been given back.
  const int lo_tile = s.row[0].lo / kTile * kTile, hi = t.positions[first + count - 1];
  for (int group = lo_tile / kGroup * kGroup; group <= hi; group += kGroup) {
    for (int tile = 0; tile < kTilesPerGroup; ++tile) {
      const int position = group + tile * kTile;
      if (position >= lo_tile && position <= hi) {
        score_tile<T>(rows, s, d16, tile_at<T>(t, position), head_dim, tile);
      } else {
        for (int r = 0; r < rows; ++r) store(s.scores + r * kGroup + tile * kTile, zero());
      }
    }
    for (int r = 0; r < rows; ++r) softmax_row<T>(t, s, r, group, d16);
    for (int tile = 0; tile < kTilesPerGroup; ++tile) {
      const int position = group + tile * kTile;
      if (position >= lo_tile && position <= hi)
        value_tile<T>(rows, s, d16, tile_at<T>(t, position) + t.kv.v_offset, tile);
    }
    if ((group + kGroup) % kPartition == 0 || group + kGroup > hi) merge_partition<T>(rows, s, d16);
  }
  for (int i = 0; i < count; ++i)
    for (int g = 0; g < heads; ++g) {
      const int r = i * heads + g;
      const V16 inv = set1(1.0f / s.row[r].sum_total);
      const size_t at = static_cast<size_t>(first + i) * t.out_pitch +
                        static_cast<size_t>(t.kv_head * heads + g) * head_dim;
      for (int c = 0; c < head_dim; c += 16) {
        // adding zero makes a negative zero positive, whatever tiles of probability zero were added
        const V16 v = add(mul(load(s.total + r * d16 + c), inv), zero());
        const int n = head_dim - c;
        if (t.out_dtype == DType::f32) {
          float* out = static_cast<float*>(t.out) + at + c;
          n >= 16 ? store(out, v) : store_n(out, v, n);
        } else {
          uint16_t* out = static_cast<uint16_t*>(t.out) + at + c;
          n >= 16 ? store_bf16(out, v) : store_bf16_n(out, v, n);
        }
      }
    }
}

template <class T>
void attend_all(const AttendTask& t) {
  const int per_call = kAttendRows / t.heads_per_kv > 0 ? kAttendRows / t.heads_per_kv : 1;
  for (int i = t.token_begin; i < t.token_end; i += per_call) {
    const int left = t.token_end - i;
    attend_rows<T>(t, i, left < per_call ? left : per_call);
  }
}

}  // namespace

void attend(const AttendTask& t) {
  if (t.kv.dtype == DType::f32)
    attend_all<F32>(t);
  else
    attend_all<BF16>(t);
}

}  // namespace QUIRE_ISA
}  // namespace quire
