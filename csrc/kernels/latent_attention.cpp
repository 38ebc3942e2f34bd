// Latent attention (MLA) over the paged cache: every head's key is a token's one cached row, its value the row's first
// `rank` numbers. Cuts, softmax and merging are those of attention.cpp; so is what a query row goes through.
//
//   query rows      (query i, head h) -> row i*heads + h: all heads of a query pass over a tile together
//   cached tile     [d][16 keys]   latent d < rank, then the rotated key      bf16: [d/2][16 keys][2]
//                   (f16: as float32; a group's latents become float32 when they are turned over)
//   scores          lanes are keys: the tile as it is stored, a range of d at a time for all rows
//   values          lanes are d: a group's latents turned over, a range of d at a time for all rows
//
// Numbers come from memory once, and from the L2 cache twice, however many rows there are.

#include "kernels.h"
#include "kernels/micro.h"
#include "kernels/put.h"
#include "kernels/scratch.h"
#include "kernels/softmax.h"
#include "kernels/table.h"
#include "simd/transpose.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kTilesPerGroup = kGroup / kTile;
constexpr int kScoreSteps = 72;  // of a range of scores: 18 KB of the four tiles
constexpr int kValueCols = 64;   // of a range of values

// What latents are multiplied as once they are turned over.
template <class T>
struct Turned : T {};
template <>
struct Turned<F16> : F32 {};

// Carved from the task's scratch; every array is 64-byte aligned.
template <class T>
struct Scratch {
  typename T::in* q;      // [row][d16]
  typename T::in* probs;  // [row][kGroup]
  typename T::in*
      values;       // [kGroup / step][kValueCols][step], step of Turned<T>: a range of the current group's latents
  float* scores;    // [row][kGroup]
  float* acc;       // [row][v16] current partition
  float* total;     // [row][v16] merged partitions
  float* lane_sum;  // [row][16] current partition's sum of probabilities
  SoftmaxRow* row;  // [row]

  Scratch(void* base, int rows, int d16, int v16) {
    Carver carver(base);
    const size_t n = static_cast<size_t>(rows);
    carver.take(&q, n * d16);
    carver.take(&probs, n * kGroup);
    carver.take(&values, kGroup * kValueCols);
    carver.take(&scores, n * kGroup);
    carver.take(&acc, n * v16);
    carver.take(&total, n * v16);
    carver.take(&lane_sum, n * 16);
    carver.take(&row, n);
  }
};

QUIRE_INLINE int round16(int n) { return (n + 15) / 16 * 16; }
QUIRE_INLINE void put_probabilities(float* out, const V16* p) {
  for (int c = 0; c < kTilesPerGroup; ++c) store(out + c * kTile, p[c]);
}
QUIRE_INLINE void put_probabilities(uint16_t* out, const V16* p) {
  for (int c = 0; c < kTilesPerGroup; c += 2) store_bf16_normal(out + c * kTile, p[c], p[c + 1]);
}

// ---- tiles --------------------------------------------------------------------------------------------------------

// Where the tiles of a group lie; the first `count` hold keys that some query of the call sees, the others repeat one.
template <class T>
struct Tiles {
  const typename T::elem* at[kTilesPerGroup];
  int count;
};

template <class T>
Tiles<T> tiles_of(const AttendTask& t, int group, int hi) {
  const KVLayout& kv = t.kv;
  Tiles<T> found;
  found.count = hi >= group + kGroup - 1 ? kTilesPerGroup : (hi - group) / kTile + 1;
  for (int i = 0; i < kTilesPerGroup; ++i) {
    const int position = group + kTile * (i < found.count ? i : 0);
    const size_t block = static_cast<size_t>(t.block_table[position / kv.block_size]);
    found.at[i] = reinterpret_cast<const typename T::elem*>(static_cast<const char*>(t.cache) +
                                                            block * kv.block_bytes) +
                  static_cast<size_t>(position % kv.block_size / kTile) * kv.v_offset();
  }
  return found;
}

// Sixteen lines of sixteen words, turned over: word i of line k becomes word k of line i; zero for i >= keep.
#if QUIRE_AVX512
struct Lines {
  __m512i line[16];
};
QUIRE_INLINE Lines turn(const uint32_t* in, int keep) {
  const __mmask16 kept = keep >= 16 ? 0xffff : static_cast<__mmask16>((1u << keep) - 1u);
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(kept, in + 16 * i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // quarter q of a[4g + j] holds words 4g … 4g+3 of line 4q + j
  for (int j = 0; j < 4; ++j) {
    b[j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    b[4 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    b[8 + j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    b[12 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
  }
  Lines out;
  for (int j = 0; j < 4; ++j) {
    out.line[j] = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    out.line[4 + j] = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    out.line[8 + j] = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    out.line[12 + j] = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
  }
  return out;
}
QUIRE_INLINE void put_line(const Lines& lines, int i, uint32_t* out) { _mm512_storeu_si512(out, lines.line[i]); }
// Lines i and i + 1 as thirty-two pairs of their halves.
QUIRE_INLINE void put_pairs(const Lines& lines, int i, uint16_t* out) {
  const __m512i low = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007,
                                        0x280008, 0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(lines.line[i], low, lines.line[i + 1]));
  _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(lines.line[i], high, lines.line[i + 1]));
}
#else
struct Lines {
  alignas(64) uint32_t line[16][16];
};
QUIRE_INLINE Lines turn(const uint32_t* in, int keep) {
  Lines out;
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 16; k += 4) transpose4(in + 16 * k + i, 16, out.line[i] + k, 16);
  for (int i = keep < 0 ? 0 : keep; i < 16; ++i) std::memset(out.line[i], 0, sizeof(out.line[i]));
  return out;
}
QUIRE_INLINE void put_line(const Lines& lines, int i, uint32_t* out) { std::memcpy(out, lines.line[i], 64); }
QUIRE_INLINE void put_pairs(const Lines& lines, int i, uint16_t* out) {
  uint16_t a[32], b[32];
  std::memcpy(a, lines.line[i], 64);
  std::memcpy(b, lines.line[i + 1], 64);
  for (int d = 0; d < 32; ++d) {
    out[2 * d] = a[d];
    out[2 * d + 1] = b[d];
  }
}
#endif

// Latents c0 … c0 + cols of a tile with lanes along d; those of keys beyond the first `keep` are zero, whatever lies
// there.
QUIRE_INLINE void turn_tile(const float* tile, int keep, int c0, int cols, float* values) {
  for (int d = 0; d < cols; d += 16) {
    const Lines lines = turn(reinterpret_cast<const uint32_t*>(tile) + 16 * (c0 + d), keep);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) put_line(lines, i, reinterpret_cast<uint32_t*>(values + i * kValueCols + d));
  }
}
QUIRE_INLINE void turn_tile(const uint16_t* tile, int keep, int c0, int cols, float* values) {
  alignas(64) float wide[kTile * kValueCols];
  for (int d = 0; d < cols; ++d) store(wide + d * kTile, load_half(tile + (c0 + d) * kTile));
  turn_tile(wide, keep, 0, cols, values);
}
QUIRE_INLINE void turn_tile(const uint16_t* tile, int keep, int c0, int cols, uint16_t* values) {
  int d = 0;
  for (; d + 32 <= cols; d += 32) {
    const Lines lines = turn(reinterpret_cast<const uint32_t*>(tile) + 8 * (c0 + d), keep);
#pragma GCC unroll 8
    for (int i = 0; i < kTile; i += 2) put_pairs(lines, i, values + (i / 2 * kValueCols + d) * 2);
  }
  for (; d < cols; ++d)
    for (int key = 0; key < kTile; ++key)
      values[(key / 2 * kValueCols + d) * 2 + key % 2] = key < keep ? tile[(c0 + d) / 2 * 2 * kTile + key * 2 + d % 2]
                                                                    : 0;
}

// ---- products -----------------------------------------------------------------------------------------------------

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

// Lines of the next group that a row block fetches beside its own work, tile by tile.
template <class T>
struct Fetch {
  const typename T::elem* tile[kTilesPerGroup];
  int count;
};

// scores[r … r+R][tile … tile+C] = or += q . rows of the cache, over steps first … last - 1.
template <class T, int R, int C>
QUIRE_INLINE void score_rows(const Scratch<T>& s, int r, int d16, const Tiles<T>& now, int tile, int first, int last,
                             const Fetch<T>& fetch) {
  constexpr size_t kVector = static_cast<size_t>(kTile) * T::step;
  V16 acc[R * C];
  float* scores = s.scores + r * kGroup + tile * kTile;
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) acc[i * C + c] = first ? load(scores + i * kGroup + c * kTile) : zero();
  const typename T::in* q = s.q + static_cast<size_t>(r) * d16 + static_cast<size_t>(first) * T::step;
  const typename T::elem* k[C];
  for (int c = 0; c < C; ++c) k[c] = now.at[tile + c];
  for (int step = first; step < last; ++step) {
    const size_t at = step * kVector;
    for (int f = 0; f < fetch.count; ++f) prefetch_l2(fetch.tile[f] + at);
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[i * C + c] = T::mac(acc[i * C + c], q + static_cast<size_t>(i) * d16, k[c] + at);
    }
    q += T::step;
  }
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) store(scores + i * kGroup + c * kTile, acc[i * C + c]);
}

template <class T>
void score_group(const Scratch<T>& s, int rows, int d16, const Tiles<T>& now, const Tiles<T>& next) {
  const int steps = d16 / T::step, blocks = (rows + kRows - 1) / kRows;
  for (int first = 0; first < steps; first += kScoreSteps) {
    const int last = first + kScoreSteps < steps ? first + kScoreSteps : steps;
    row_blocks(rows, [&](auto size, int r) __attribute__((always_inline)) {
      constexpr int R = decltype(size)::value, C = cols_for<R>();
      Fetch<T> fetch{{}, 0}, none{{}, 0};
      for (int i = r / kRows; r % kRows == 0 && i < kTilesPerGroup; i += blocks) fetch.tile[fetch.count++] = next.at[i];
      if (now.count == kTilesPerGroup) {
        for (int tile = 0; tile < kTilesPerGroup; tile += C)
          score_rows<T, R, C>(s, r, d16, now, tile, first, last, tile ? none : fetch);
      } else {
        for (int tile = 0; tile < now.count; ++tile) score_rows<T, R, 1>(s, r, d16, now, tile, first, last, none);
      }
    });
  }
}

// acc[r … r+R][c0 + at … c0 + at + 16*C] += probs . values over the first `tiles` tiles of a group.
template <class T, int R, int C>
QUIRE_INLINE void value_rows(const Scratch<T>& s, int r, int v16, int tiles, int c0, int at) {
  using V = Turned<T>;
  V16 a[R * C];
  float* acc = s.acc + static_cast<size_t>(r) * v16 + c0 + at;
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) a[i * C + c] = load(acc + static_cast<size_t>(i) * v16 + c * 16);
  micro<V, R, C>(a, s.probs + r * kGroup, kGroup, s.values + at * V::step, kValueCols * V::step, 16 * V::step,
                 tiles * kTile / V::step);
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) store(acc + static_cast<size_t>(i) * v16 + c * 16, a[i * C + c]);
}

// `seen`: keys of the group that are seen by some query of the call.
template <class T>
void value_group(const Scratch<T>& s, int rows, int v16, const Tiles<T>& now, int seen) {
  for (int c0 = 0; c0 < v16; c0 += kValueCols) {
    const int cols = v16 - c0 < kValueCols ? v16 - c0 : kValueCols;
    for (int i = 0; i < now.count; ++i)
      turn_tile(now.at[i], seen - i * kTile, c0, cols, s.values + i * kTile * kValueCols);
    row_blocks(rows, [&](auto size, int r) __attribute__((always_inline)) {
      constexpr int R = decltype(size)::value, C = cols_for<R>();
      int at = 0;
      for (; at + 16 * C <= cols; at += 16 * C) value_rows<T, R, C>(s, r, v16, now.count, c0, at);
      for (; at < cols; at += 16) value_rows<T, R, 1>(s, r, v16, now.count, c0, at);
    });
  }
}

// Scores of one row and group -> probabilities.
template <class T>
QUIRE_INLINE void softmax_row(const Scratch<T>& s, int r, int group, int v16) {
  SoftmaxRow& row = s.row[r];
  if (!row.sees(group)) {
    std::memset(s.probs + r * kGroup, 0, sizeof(*s.probs) * kGroup);
    return;
  }
  V16 x[kTilesPerGroup];
  for (int c = 0; c < kTilesPerGroup; ++c) x[c] = load(s.scores + r * kGroup + c * kTile);
  softmax_group(row, group, 0.0f, s.lane_sum + r * 16, s.acc + static_cast<size_t>(r) * v16, v16, x);
  put_probabilities(s.probs + r * kGroup, x);
}

// ---- rows and partitions ------------------------------------------------------------------------------------------

// A row that has seen no key yet.
QUIRE_INLINE void start_row(SoftmaxRow& row, int position, float scale, float* total, int v16) {
  row.lo = 0;
  row.factor = scale * kLog2e;
  row.slope = 0.0f;
  row.hi = position;
  row.max = -INFINITY;
  row.sum_total = 0.0f;
  clear(total, v16);
}

// A query in the latent space and its rotated part, as one row in the format that the cache is multiplied with.
template <class T>
QUIRE_INLINE void put_query(const LatentTask& t, int token, int head, int d16, typename T::in* out) {
  alignas(64) float line[16];
  const float* latent = t.attend.qkv + static_cast<size_t>(token) * t.attend.pitch + static_cast<size_t>(head) * t.rank;
  const float* rotated = t.q_rope + static_cast<size_t>(token) * t.q_pitch + static_cast<size_t>(head) * t.q_head;
  const int width = t.attend.kv.head_dim;
  for (int c = 0; c < d16; c += 16) {
    if (c + 16 <= t.rank) {
      to_elem(out + c, load(latent + c));
      continue;
    }
    for (int i = 0; i < 16; ++i)
      line[i] = c + i < t.rank ? latent[c + i] : c + i < width ? rotated[c + i - t.rank] : 0.0f;
    to_elem(out + c, load(line));
  }
}

template <class T>
void attend_rows(const LatentTask& task, int first, int count) {
  const AttendTask& t = task.attend;
  const int d16 = t.kv.d16, v16 = round16(task.rank), heads = t.heads_per_kv, rows = count * heads;
  const Scratch<T> s(t.scratch, rows, d16, v16);
  for (int r = 0; r < rows; ++r) {
    const int token = first + r / heads;
    start_row(s.row[r], t.positions[token], t.scale, s.total + static_cast<size_t>(r) * v16, v16);
    start_partition(s.row[r], s.lane_sum + r * 16);
    clear(s.acc + static_cast<size_t>(r) * v16, v16);
    put_query<T>(task, token, r % heads, d16, s.q + static_cast<size_t>(r) * d16);
  }
  const int from = t.partition_begin * kPartition, last = t.partition_end * kPartition - 1;
  const int hi = s.row[rows - 1].hi < last ? s.row[rows - 1].hi : last;
  Tiles<T> now = tiles_of<T>(t, from, hi);
  for (int group = from; group <= hi; group += kGroup) {
    const Tiles<T> next = group + kGroup <= hi ? tiles_of<T>(t, group + kGroup, hi) : now;
    score_group<T>(s, rows, d16, now, next);
    for (int r = 0; r < rows; ++r) softmax_row<T>(s, r, group, v16);
    value_group<T>(s, rows, v16, now, hi - group + 1);
    if ((group + kGroup) % kPartition == 0 || group + kGroup > hi) {
      const size_t partition = static_cast<size_t>(group / kPartition - t.partition_begin);
      float* states = t.states ? t.states + partition * rows * state_floats(v16) : nullptr;
      for (int r = 0; r < rows; ++r) {
        const size_t at = static_cast<size_t>(r);
        end_partition(s.row[r], s.lane_sum + at * 16, s.acc + at * v16, s.total + at * v16, v16,
                      states ? states + at * state_floats(v16) : nullptr);
        start_partition(s.row[r], s.lane_sum + at * 16);
        clear(s.acc + at * v16, v16);
      }
    }
    now = next;
  }
  if (t.states) return;
  for (int r = 0; r < rows; ++r)
    write_row(t, task.rank, first + r / heads, r % heads, s.total + static_cast<size_t>(r) * v16, s.row[r].sum_total);
}

template <class T>
void attend_all(const LatentTask& task) {
  const AttendTask& t = task.attend;
  const int per_call = queries_per_call(t.heads_per_kv);
  for (int i = t.token_begin; i < t.token_end; i += per_call) {
    const int left = t.token_end - i;
    attend_rows<T>(task, i, left < per_call ? left : per_call);
  }
}

}  // namespace

void latent_attend(const LatentTask& t) {
  switch (t.attend.kv.type) {
    case KVType::f32: return attend_all<F32>(t);
    case KVType::f16: return attend_all<F16>(t);
    default: return attend_all<BF16>(t);
  }
}

void latent_merge(const LatentTask& task) {
  const AttendTask& t = task.attend;
  const int v16 = round16(task.rank), heads = t.heads_per_kv, rows = (t.token_end - t.token_begin) * heads;
  float* total = static_cast<float*>(t.scratch);
  for (int r = 0; r < rows; ++r) {
    const int token = t.token_begin + r / heads;
    SoftmaxRow row;
    start_row(row, t.positions[token], t.scale, total, v16);
    for (int p = 0; p < t.partition_end - t.partition_begin; ++p) {
      const float* state = t.states + (static_cast<size_t>(p) * rows + r) * state_floats(v16);
      fold(row, total, state, state[v16], state[v16 + 1], v16);
    }
    write_row(t, task.rank, token, r % heads, total, row.sum_total);
  }
}

// ---- what comes before --------------------------------------------------------------------------------------------

namespace {

// Pairs (2i, 2i + 1), or (i, i + half), turned by the angles of a position.
void rotate(float* x, int dim, bool interleaved, const float* cos, const float* sin) {
  const int half = dim / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float a = x[step * i], b = x[step * i + apart];
    x[step * i] = a * cos[i] - b * sin[i];
    x[step * i + apart] = b * cos[i] + a * sin[i];
  }
}

void write_cache(const LatentWriteTask& t, const int32_t* block_table, int position, const float* row) {
  const KVLayout& kv = t.kv;
  const int in_block = position % kv.block_size, lane = in_block % kTile;
  char* block = static_cast<char*>(t.cache) +
                static_cast<size_t>(block_table[position / kv.block_size]) * kv.block_bytes;
  const size_t at = static_cast<size_t>(in_block / kTile) * kv.v_offset();
  if (kv.type == KVType::f32) {
    float* tile = reinterpret_cast<float*>(block) + at;
    for (int d = 0; d < kv.d16; ++d) tile[d * kTile + lane] = d < kv.head_dim ? row[d] : 0.0f;
    return;
  }
  uint16_t* tile = reinterpret_cast<uint16_t*>(block) + at;
  if (kv.type == KVType::f16) {
    uint16_t half[16];
    for (int c = 0; c < kv.d16; c += 16) {
      store_half(half, load_n(row + c, kv.head_dim - c));
      for (int i = 0; i < 16; ++i) tile[(c + i) * kTile + lane] = half[i];
    }
    return;
  }
  for (int c = 0; c < kv.d16; c += 16) {
    uint16_t half[16];
    store_bf16(half, load_n(row + c, kv.head_dim - c));
    for (int i = 0; i < 16; i += 2) std::memcpy(tile + (c + i) * kTile + 2 * lane, half + i, 4);
  }
}

}  // namespace

void latent_write(const LatentWriteTask& t) {
  const size_t half = static_cast<size_t>(t.rope / 2);
  for (int i = t.token_begin; i < t.token_end; ++i) {
    const int position = t.positions[i];
    const float* cos = t.cos + static_cast<size_t>(position) * half;
    const float* sin = t.sin + static_cast<size_t>(position) * half;
    float* kv = t.kv_rows + static_cast<size_t>(i) * t.kv.head_dim;
    norm({kv, nullptr, t.norm, nullptr, false, kv, DType::f32, t.eps, t.rank, 0, 1, static_cast<size_t>(t.rank)});
    rotate(kv + t.rank, t.rope, t.interleaved, cos, sin);
    write_cache(t, t.block_table, position, kv);
    for (const Mirror* m = t.mirrors; m < t.mirrors + t.mirror_count; ++m)
      if (i - t.token_begin < m->count)
        write_cache(t, t.block_tables + static_cast<size_t>(m->line) * t.blocks_per_row, position, kv);
    const int q_head = t.nope + t.rope;
    for (int h = 0; h < t.heads; ++h) {
      float* q = t.q + (static_cast<size_t>(i) * t.heads + h) * q_head;
      rotate(q + t.nope, t.rope, t.interleaved, cos, sin);
      const size_t to = (static_cast<size_t>(i) * t.heads + h) * t.nope;
      for (int c = 0; c < t.nope; c += 16) put(t.q_nope, t.nope_dtype, to + c, load_n(q + c, t.nope - c), t.nope - c);
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
