// Row-wise ops: norms, sums, rotary embedding with the KV write, gated activations, gathers; and the loops that
// measure what the machine can do.

#include <cstring>

#include "kernels.h"
#include "kernels/micro.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

QUIRE_INLINE void put(void* out, DType type, size_t i, V16 v, int n) {
  if (type == DType::f32) {
    float* p = static_cast<float*>(out) + i;
    n >= 16 ? store(p, v) : store_n(p, v, n);
  } else {
    uint16_t* p = static_cast<uint16_t*>(out) + i;
    n >= 16 ? store_bf16(p, v) : store_bf16_n(p, v, n);
  }
}

// 1 / sqrt(mean(x^2) + eps): four interleaved sums of lanes, one fixed tree.
QUIRE_INLINE float inverse_rms(const float* x, int cols, float eps) {
  V16 s[4] = {zero(), zero(), zero(), zero()};
  for (int c = 0; c < cols; c += 16) {
    const V16 v = load_n(x + c, cols - c);
    s[(c >> 4) & 3] = fma(v, v, s[(c >> 4) & 3]);
  }
  const float sum = reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(cols) + eps);
}

// What a norm takes off each element and multiplies it by. The mean of an RMS norm is 0, which changes no bit.
struct Moments {
  V16 mean, inverse;
};

QUIRE_INLINE Moments moments(const float* x, int cols, bool layer, float eps) {
  if (!layer) return {zero(), set1(inverse_rms(x, cols, eps))};
  V16 s[4] = {zero(), zero(), zero(), zero()};
  for (int c = 0; c < cols; c += 16) s[(c >> 4) & 3] = add(s[(c >> 4) & 3], load_n(x + c, cols - c));
  const V16 mean = set1(reduce_add(add(add(s[0], s[1]), add(s[2], s[3]))) / static_cast<float>(cols));
  for (V16& sum : s) sum = zero();
  for (int c = 0; c < cols; c += 16) {
    const int n = cols - c;
    V16 v = sub(load_n(x + c, n), mean);
    if (n < 16) v = first_n(n, v, zero());
    s[(c >> 4) & 3] = fma(v, v, s[(c >> 4) & 3]);
  }
  const float sum = reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
  return {mean, set1(1.0f / __builtin_sqrtf(sum / static_cast<float>(cols) + eps))};
}

constexpr int kMaxHeadDim = 512;

// Heads of q or k in place: each of `heads` spans of `cols` elements is normalised by its own moments.
void normalise(float* x, int heads, int cols, const float* weight, size_t weight_step, const RopeWriteTask& t) {
  for (int h = 0; h < heads; ++h, x += cols, weight += weight_step) {
    const Moments m = moments(x, cols, t.layer_norm, t.eps);
    for (int c = 0; c < cols; c += 16) {
      const int n = cols - c;
      const V16 v = mul(mul(sub(load_n(x + c, n), m.mean), m.inverse), load_n(weight + c, n));
      n >= 16 ? store(x + c, v) : store_n(x + c, v, n);
    }
  }
}

void normalise_heads(float* x, int heads, const HeadNorm& norm, const RopeWriteTask& t) {
  if (!norm.weight) return;
  if (t.whole_norm)
    normalise(x, 1, heads * t.head_dim, norm.weight, 0, t);
  else
    normalise(x, heads, t.head_dim, norm.weight, norm.step, t);
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

// x [head_dim] as round(x / scale) in [-127, 127], zeros up to d16; returns the scale as bf16. See RopeWrite in ops.py.
QUIRE_INLINE uint16_t quantize_head(const float* x, int head_dim, int d16, float* out) {
  V16 top = zero(), bad = zero();
  for (int d = 0; d < head_dim; d += 16) {
    const V16 v = load_n(x + d, head_dim - d);
    top = vmax(top, vmax(v, sub(zero(), v)));
    bad = add(bad, mul(v, zero()));
  }
  const float exact = reduce_max(top) / 127.0f;
  uint16_t scale = 0;
  if (mask_not_finite(bad))
    scale = 0x7fc0;  // NaN: what is wrong with this token must reach its output
  else if (exact >= 1e-30f)
    scale = static_cast<uint16_t>((float_to_bits(exact) + 0xffffu) >> 16);  // the next bf16, away from zero
  const V16 inverse = set1(exact >= 1e-30f ? 1.0f / bf16_to_float(scale) : 0.0f), limit = set1(127.0f);
  for (int d = 0; d < d16; d += 16) {
    const V16 v = mul(load_n(x + d, head_dim - d), inverse);
    store(out + d, round_even(vmax(vmin(v, limit), sub(zero(), limit))));
  }
  return scale;
}

// As write_kv, for an int8 cache. Nothing needs clearing: bytes are always finite, and attention masks scales.
void write_bytes(const RopeWriteTask& t, uint8_t* block, size_t tile, int lane, const float* k, const float* v) {
  const KVLayout& kv = t.kv;
  float whole[kMaxHeadDim];
  uint8_t bytes[kMaxHeadDim];
  uint16_t* scales = reinterpret_cast<uint16_t*>(block + 2 * kv.v_offset + tile * kScaleBytes);
  scales[lane] = quantize_head(k, kv.head_dim, kv.d16, whole);
  for (int d = 0; d < kv.d16; d += 16) store_u8(bytes + d, load(whole + d));
  uint8_t* kt = block + tile * kv.tile_elems + 4 * lane;
  for (int d = 0; d < kv.d16; d += 4) std::memcpy(kt + d * kTile, bytes + d, 4);
  scales[kTile + lane] = quantize_head(v, kv.head_dim, kv.d16, whole);
  for (int d = 0; d < kv.d16; d += 16) store_byte(bytes + d, load(whole + d), 0);
  uint8_t* vt = block + kv.v_offset + tile * kv.tile_elems + static_cast<size_t>(lane >> 2) * 4 * kv.d16 + (lane & 3);
  for (int d = 0; d < kv.d16; ++d) vt[4 * d] = bytes[d];
}

// Put one token's key and value of one head into their tiles. Attention multiplies the values of tokens not yet
// written by a probability of zero, so they must be finite: the step that starts a tile clears what lies behind its
// last token. (Clearing when the first token comes would race with other threads that write the same tile.)
void write_kv(const RopeWriteTask& t, int head, int position, const float* k, const float* v) {
  const KVLayout& kv = t.kv;
  const int in_block = position % kv.block_size, lane = in_block % kTile;
  const size_t block = static_cast<size_t>(t.block_table[position / kv.block_size]);
  const size_t tile = static_cast<size_t>(head) * kv.tiles_per_block + static_cast<size_t>(in_block / kTile);
  const size_t at = block * kv.block_stride + tile * kv.tile_elems;
  if (kv.dtype == DType::i8)
    return write_bytes(t, static_cast<uint8_t*>(t.cache) + block * kv.block_stride, tile, lane, k, v);
  const bool clear = position == t.chunk_last && position - lane >= t.chunk_begin;
  if (kv.dtype == DType::f32) {
    float* kt = static_cast<float*>(t.cache) + at;
    float* vt = kt + kv.v_offset + static_cast<size_t>(lane) * kv.d16;
    for (int d = 0; d < kv.head_dim; ++d) kt[d * kTile + lane] = k[d];
    std::memcpy(vt, v, static_cast<size_t>(kv.head_dim) * sizeof(float));
    for (int d = kv.head_dim; d < kv.d16; ++d) vt[d] = 0.0f;
    if (clear) std::memset(vt + kv.d16, 0, static_cast<size_t>(kTile - 1 - lane) * kv.d16 * sizeof(float));
  } else {
    uint16_t* kt = static_cast<uint16_t*>(t.cache) + at;
    uint16_t* vt = kt + kv.v_offset;
    uint16_t kb[kMaxHeadDim], vb[kMaxHeadDim];
    for (int d = 0; d < kv.d16; d += 16) {
      store_bf16(kb + d, load_n(k + d, kv.head_dim - d));
      store_bf16(vb + d, load_n(v + d, kv.head_dim - d));
    }
    for (int d = 0; d < kv.d16; ++d) kt[(d >> 1) * 2 * kTile + lane * 2 + (d & 1)] = kb[d];
    uint16_t* pairs = vt + static_cast<size_t>(lane >> 1) * 2 * kv.d16;
    for (int d = 0; d < kv.d16; ++d) pairs[2 * d + (lane & 1)] = vb[d];
    if (clear) {
      if ((lane & 1) == 0)
        for (int d = 0; d < kv.d16; ++d) pairs[2 * d + 1] = 0;
      const int next = (lane >> 1) + 1;
      std::memset(vt + static_cast<size_t>(next) * 2 * kv.d16, 0,
             static_cast<size_t>(kTile / 2 - next) * 2 * kv.d16 * sizeof(uint16_t));
    }
  }
}

// erf by Abramowitz & Stegun 7.1.26, absolute error below 1.5e-7.
QUIRE_INLINE V16 erf16(V16 x) {
  const V16 minus = sub(zero(), x), a = vmax(x, minus);
  const V16 t = div(set1(1.0f), fma(a, set1(0.3275911f), set1(1.0f)));
  V16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const V16 y = sub(set1(1.0f), mul(mul(p, t), exp(sub(zero(), mul(a, a)))));
  // the sign of x: x / |x| away from zero, and erf(0) is 0 to within the error anyway
  const V16 sign = div(x, vmax(a, set1(1e-30f)));
  return mul(y, sign);
}

QUIRE_INLINE V16 activate(int act, V16 g) {
  if (act == 0) return div(g, add(set1(1.0f), exp(sub(zero(), g))));
  const V16 half = mul(set1(0.5f), g);
  if (act == 1) return fma(half, erf16(mul(g, set1(0.70710678118654752f))), half);
  const V16 inner = mul(set1(0.7978845608028654f), fma(mul(mul(g, g), g), set1(0.044715f), g));
  return fma(half, tanh16(inner), half);
}

#if QUIRE_AVX512
constexpr int kLoopAccs = 16;
#else
constexpr int kLoopAccs = 6;
#endif

}  // namespace

void norm(const NormTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    float* x = t.x + static_cast<size_t>(r) * t.cols;
    if (t.delta) {
      const float* delta = t.delta + static_cast<size_t>(r) * t.cols;
      for (int c = 0; c < t.cols; c += 16) {
        const int n = t.cols - c;
        const V16 v = add(load_n(x + c, n), load_n(delta + c, n));
        n >= 16 ? store(x + c, v) : store_n(x + c, v, n);
      }
    }
    const size_t base = static_cast<size_t>(r) * t.cols;
    if (!t.weight) {
      for (int c = 0; c < t.cols; c += 16) put(t.out, t.out_dtype, base + c, load_n(x + c, t.cols - c), t.cols - c);
      continue;
    }
    const Moments m = moments(x, t.cols, t.layer, t.eps);
    for (int c = 0; c < t.cols; c += 16) {
      const int n = t.cols - c;
      V16 v = mul(mul(sub(load_n(x + c, n), m.mean), m.inverse), load_n(t.weight + c, n));
      if (t.bias) v = add(v, load_n(t.bias + c, n));
      put(t.out, t.out_dtype, base + c, v, n);
    }
  }
}

void add_rows(const AddTask& t) {
  const size_t begin = static_cast<size_t>(t.row_begin) * t.cols, end = static_cast<size_t>(t.row_end) * t.cols;
  const V16 scale = set1(t.scale);
  for (size_t c = begin; c < end; c += 16) {
    const int n = end - c < 16 ? static_cast<int>(end - c) : 16;
    const V16 v = add(load_n(t.x + c, n), mul(load_n(t.delta + c, n), scale));
    n >= 16 ? store(t.x + c, v) : store_n(t.x + c, v, n);
  }
}

void scale_rows(const ScaleTask& t) {
  const V16 scale = set1(t.scale), cap = set1(t.cap);
  for (int c = t.col_begin; c < t.col_end; c += 16) {
    const int n = t.col_end - c;
    V16 v = mul(load_n(t.x + c, n), scale);
    if (t.cap != 0.0f) v = mul(tanh16(div(v, cap)), cap);
    n >= 16 ? store(t.x + c, v) : store_n(t.x + c, v, n);
  }
}

void rope_write(const RopeWriteTask& t) {
  const size_t half = static_cast<size_t>(t.rotary_dim / 2);
  for (int i = t.token_begin; i < t.token_end; ++i) {
    float* row = t.qkv + static_cast<size_t>(i) * t.pitch;
    const int position = t.positions[i];
    const float* cos = t.cos + static_cast<size_t>(position) * half;
    const float* sin = t.sin + static_cast<size_t>(position) * half;
    normalise_heads(row, t.heads, t.q_norm, t);
    for (int h = 0; h < t.heads; ++h) rotate(row + h * t.head_dim, t, cos, sin);
    float* k = row + static_cast<size_t>(t.heads) * t.head_dim;
    const float* v = k + static_cast<size_t>(t.kv_heads) * t.head_dim;
    normalise_heads(k, t.kv_heads, t.k_norm, t);
    for (int h = 0; h < t.kv_heads; ++h) {
      rotate(k + h * t.head_dim, t, cos, sin);
      write_kv(t, h, position, k + h * t.head_dim, v + h * t.head_dim);
    }
  }
}

void gated_act(const GatedActTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const float* gate = t.gate_up + static_cast<size_t>(r) * 2 * t.width;
    const float* up = gate + t.width;
    for (int c = t.col_begin; c < t.col_end; c += 16) {
      const int n = t.col_end - c;
      put(t.out, t.out_dtype, static_cast<size_t>(r) * t.width + c,
          mul(activate(t.act, load_n(gate + c, n)), load_n(up + c, n)), n);
    }
  }
}

void gather(const GatherTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const size_t from = static_cast<size_t>(t.rows[r]) * t.cols;
    float* out = t.out + static_cast<size_t>(r) * t.cols;
    for (int c = 0; c < t.cols; c += 16) {
      const int n = t.cols - c;
      V16 v = load_n(t.x + from + c, n);
      if (t.delta) v = add(v, load_n(t.delta + from + c, n));
      n >= 16 ? store(out + c, v) : store_n(out + c, v, n);
    }
  }
}

float read_sum(const void* src, size_t bytes) {
  const float* p = static_cast<const float*>(src);
  V16 s[8];
  for (int i = 0; i < 8; ++i) s[i] = zero();
  for (size_t k = 0; k + 128 <= bytes / sizeof(float); k += 128) {
    for (int i = 0; i < 8; ++i) prefetch(p + k + i * 16 + 1024);
    for (int i = 0; i < 8; ++i) s[i] = vmax(s[i], load(p + k + i * 16));
  }
  for (int i = 1; i < 8; ++i) s[0] = vmax(s[0], s[i]);
  return reduce_max(s[0]);
}

int64_t fma_loop(int64_t iterations, float* sink) {
  V16 acc[kLoopAccs];
  V16 x = set1(1.0000001f), y = set1(1e-9f);
  for (int i = 0; i < kLoopAccs; ++i) acc[i] = set1(static_cast<float>(i));
  for (int64_t k = 0; k < iterations; ++k) {
#pragma GCC unroll 16
    for (int i = 0; i < kLoopAccs; ++i) acc[i] = fma(x, y, acc[i]);
    __asm__ volatile("" : : "m"(x), "m"(y) :);
  }
  for (int i = 1; i < kLoopAccs; ++i) acc[0] = add(acc[0], acc[i]);
  *sink = reduce_add(acc[0]);
  return iterations * kLoopAccs * 16 * 2;
}

int64_t bf16_loop(int64_t iterations, float* sink) {
  V16 acc[kLoopAccs];
  const uint16_t ones[2] = {0x3f80, 0x3f80}, small[2] = {0x3000, 0x3000};
  const P16 x = set1_pair(ones), y = set1_pair(small);
  for (int i = 0; i < kLoopAccs; ++i) acc[i] = set1(static_cast<float>(i));
  for (int64_t k = 0; k < iterations; ++k) {
#pragma GCC unroll 16
    for (int i = 0; i < kLoopAccs; ++i) acc[i] = dot(acc[i], x, y);
    __asm__ volatile("" : : :);
  }
  for (int i = 1; i < kLoopAccs; ++i) acc[0] = add(acc[0], acc[i]);
  *sink = reduce_add(acc[0]);
  return iterations * kLoopAccs * 32 * 2;
}

int64_t i8_loop(int64_t iterations, float* sink) {
  I16 acc[kLoopAccs];
  const uint8_t ones[4] = {1, 1, 1, 1}, twos[4] = {2, 2, 2, 2};
  const I16 x = iset1(ones), y = iset1(twos);
  for (int i = 0; i < kLoopAccs; ++i) acc[i] = izero();
  for (int64_t k = 0; k < iterations; ++k) {
#pragma GCC unroll 16
    for (int i = 0; i < kLoopAccs; ++i) acc[i] = dot_u8s8(acc[i], x, y);
    __asm__ volatile("" : : :);
  }
  V16 sum = zero();
  for (int i = 0; i < kLoopAccs; ++i) sum = add(sum, to_float(acc[i]));
  *sink = reduce_add(sum);
  return iterations * kLoopAccs * 64 * 2;
}

void quantize(const QuantizeTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const size_t base = static_cast<size_t>(r) * t.cols;
    auto at = [&](int c) {
      const int n = t.cols - c;
      if (t.x_dtype == DType::f32) return load_n(static_cast<const float*>(t.x) + base + c, n);
      uint16_t h[16] = {0};
      std::memcpy(h, static_cast<const uint16_t*>(t.x) + base + c, static_cast<size_t>(n < 16 ? n : 16) * 2);
      return load_bf16(h);
    };
    V16 top = zero();
    for (int c = 0; c < t.cols; c += 16) {
      const V16 v = at(c);
      top = vmax(top, vmax(v, sub(zero(), v)));
    }
    const float scale = reduce_max(top) / 127.0f;
    t.scale[r] = scale;
    const V16 inverse = set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    uint8_t* out = t.out + static_cast<size_t>(r) * t.pitch;
    for (int c = 0; c < t.cols; c += 16) {
      const V16 q = round_even(vmax(vmin(mul(at(c), inverse), set1(127.0f)), set1(-127.0f)));
      if (static_cast<size_t>(c) + 16 <= t.pitch) {
        store_u8(out + c, q);
      } else {
        uint8_t tail[16];
        store_u8(tail, q);
        std::memcpy(out + c, tail, t.pitch - c);
      }
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
