// Rotary embedding with norms of heads, and the write of keys and values to the cache.
//
// A task is tokens of one KV tile: a tile's cache lines hold all of its tokens, so only one thread writes them, and
// whole tiles are transposed in registers.

#include "kernels.h"
#include "kernels/cache_write.h"
#include "kernels/moments.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kAhead = 512;  // floats fetched ahead: where a page ends, so do the hardware's guesses

QUIRE_INLINE void fetch(const float* x, int n) {
  for (int c = 0; c < n; c += 16) prefetch(x + c);
}

// A row and its columns, whose moments a norm takes.
struct Span {
  const float* x;
  int cols;
};

// `cols` elements in place, by the moments of `of`: themselves, or a row that they belong to.
QUIRE_INLINE void normalise(float* x, int cols, const float* weight, const RopeWriteTask& t, Span of) {
  const Moments m = moments(of.x, of.cols, t.layer_norm, t.eps);
  for (int c = 0; c < cols; c += 16) {
    const int n = cols - c;
    const V16 v = mul(mul(sub(load_n(x + c, n), m.mean), m.inverse), load_n(weight + c, n));
    n >= 16 ? store(x + c, v) : store_n(x + c, v, n);
  }
}

// One head in place: dimension i is rotated with i + half, or 2i with 2i + 1.
QUIRE_INLINE void rotate(float* head, const RopeWriteTask& t, const float* cos, const float* sin) {
  const int half = t.rotary_dim / 2;
  if (t.interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cos[i] - b * sin[i];
      head[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int i = 0; i < half; i += 16) {
    const int n = half - i;
    const V16 a = load_n(head + i, n), b = load_n(head + half + i, n);
    const V16 c = load_n(cos + i, n), s = load_n(sin + i, n);
    const V16 x = sub(mul(a, c), mul(b, s)), y = add(mul(b, c), mul(a, s));
    if (n >= 16) {
      store(head + i, x);
      store(head + half + i, y);
    } else {
      store_n(head + i, x, n);
      store_n(head + half + i, y, n);
    }
  }
}

// Both at once, in registers: a head of kVectors vectors that is rotated whole, by halves; `weight` may be null.
template <int kVectors>
QUIRE_INLINE void normalise_and_rotate(float* head, const float* weight, const RopeWriteTask& t, const float* cos,
                                       const float* sin) {
  V16 v[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) v[i] = load(head + 16 * i);
  if (weight) {
    V16 s[4] = {zero(), zero(), zero(), zero()};
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) s[i & 3] = fma(v[i], v[i], s[i & 3]);
    const float sum = reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
    const V16 inverse = set1(inverse_root(sum, kVectors * 16, t.eps));
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) v[i] = mul(mul(v[i], inverse), load(weight + 16 * i));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors / 2; ++i) {
    const V16 a = v[i], b = v[i + kVectors / 2], c = load(cos + 16 * i), s = load(sin + 16 * i);
    store(head + 16 * i, sub(mul(a, c), mul(b, s)));
    store(head + 16 * (i + kVectors / 2), add(mul(b, c), mul(a, s)));
  }
}

template <int kVectors>
QUIRE_INLINE void whole_heads(float* x, int begin, int end, const HeadNorm& norm, const RopeWriteTask& t,
                              const float* cos, const float* sin) {
  for (int h = begin; h < end; ++h) {
    float* head = x + static_cast<size_t>(h) * kVectors * 16;
    fetch(head + kAhead, kVectors * 16);
    normalise_and_rotate<kVectors>(head, norm.weight ? norm.weight + h * norm.step : nullptr, t, cos, sin);
  }
}

// Heads [begin, end) of one token's q or k in place; `all` are those of the norm over all heads.
QUIRE_INLINE void rotate_heads(float* x, int begin, int end, const HeadNorm& norm, int position, const RopeWriteTask& t,
                               Span all) {
  const size_t half = static_cast<size_t>(t.rotary_dim / 2), at = static_cast<size_t>(position) * half;
  const float *cos = t.cos + at, *sin = t.sin + at;
  if (t.rotary_dim == t.head_dim && !t.interleaved && !(norm.weight && (t.whole_norm || t.layer_norm)))
    switch (t.head_dim) {
      case 64: return whole_heads<4>(x, begin, end, norm, t, cos, sin);
      case 96: return whole_heads<6>(x, begin, end, norm, t, cos, sin);
      case 128: return whole_heads<8>(x, begin, end, norm, t, cos, sin);
      case 256: return whole_heads<16>(x, begin, end, norm, t, cos, sin);
    }
  if (norm.weight && t.whole_norm) normalise(x, end * t.head_dim, norm.weight, t, all);
  for (int h = begin; h < end; ++h) {
    float* head = x + static_cast<size_t>(h) * t.head_dim;
    fetch(head + kAhead, t.head_dim);
    if (norm.weight && !t.whole_norm) normalise(head, t.head_dim, norm.weight + h * norm.step, t, {head, t.head_dim});
    rotate(head, t, cos, sin);
  }
}

}  // namespace

void rope_write(const RopeWriteTask& t) {
  const int first = t.positions[t.token_begin], in_block = first % t.kv.block_size, lane = in_block % kTile;
  const auto block = [&](const int32_t* table) {
    return static_cast<char*>(t.cache) + static_cast<size_t>(table[first / t.kv.block_size]) * t.kv.block_bytes;
  };
  const int count = t.token_end - t.token_begin;
  const Tile tile{t, block(t.block_table), in_block / kTile, lane, count, lane + count};
  if (tile.count <= kTile / 4) fetch(tile);
  const int per_kv = t.heads / t.kv_heads;
  RopeWriteTask keys = t;
  if (t.kv.type == KVType::kvquant3) keys.rotary_dim = 0;  // they are rotated when they are read
  for (int i = t.token_begin; i < t.token_end; ++i) {
    float* row = t.qkv + static_cast<size_t>(i) * t.pitch;
    const Span q_all = t.q_row ? Span{t.q_row + static_cast<size_t>(i) * t.q_cols, t.q_cols}
                               : Span{row, t.heads * t.head_dim};
    rotate_heads(row, t.head_begin * per_kv, t.head_end * per_kv, t.q_norm, t.positions[i], t, q_all);
    float* k = row + static_cast<size_t>(t.heads) * t.head_dim;
    const Span k_all = t.k_row ? Span{t.k_row + static_cast<size_t>(i) * t.k_cols, t.k_cols}
                               : Span{k, t.kv_heads * t.head_dim};
    rotate_heads(k, t.head_begin, t.head_end, t.k_norm, t.positions[i], keys, k_all);
    // values are taken head by head, a few lines of each token's row
    fetch(k + static_cast<size_t>(t.kv_heads + t.head_begin) * t.head_dim, (t.head_end - t.head_begin) * t.head_dim);
  }
  const auto write = writer(t.kv.type);
  for (int h = t.head_begin; h < t.head_end; ++h) write(tile, h);
  for (int i = 0; i < t.mirror_count; ++i) {
    const Mirror& m = t.mirrors[i];
    char* of_line = block(t.block_tables + static_cast<size_t>(m.line) * t.blocks_per_row);
    const int end = m.stop - (first - lane);
    const Tile mirror{t, of_line, tile.number, lane, m.count, end < kTile ? end : kTile};
    for (int h = t.head_begin; h < t.head_end; ++h) write(mirror, h);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
