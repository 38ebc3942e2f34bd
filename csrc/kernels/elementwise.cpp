// Row-wise ops: norms, sums, gated activations, gathers, rounding to int8; and the loops that measure what the
// machine can do.

#include <cstring>

#include "kernels.h"
#include "kernels/moments.h"
#include "kernels/put.h"
#include "kernels/table.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

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

// g / (1 + e^-z)
QUIRE_INLINE V16 swish(V16 g, V16 z) {
  return ratio(g, add(set1(1.0f), exp2(vmin(mul(z, set1(-1.44269504088896341f)), set1(119.0f)))));
}

template <int kAct>
QUIRE_INLINE V16 activate(V16 g) {
  if (kAct == 0) return swish(g, g);
  if (kAct == 1) {
    const V16 half = mul(set1(0.5f), g);
    return fma(half, erf16(mul(g, set1(0.70710678118654752f))), half);
  }
  // (1 + tanh z) / 2 is 1 / (1 + e^-2z)
  return swish(g, mul(set1(2 * 0.7978845608028654f), fma(mul(mul(g, g), g), set1(0.044715f), g)));
}

constexpr int kAhead = 512;  // floats that are fetched ahead: where a page ends, so do the hardware's guesses

#if QUIRE_AVX512
constexpr int kLoopAccs = 16;
#else
constexpr int kLoopAccs = 6;
#endif

}  // namespace

// A row and its moments, `delta` added to it in the same pass.
QUIRE_INLINE Moments add_for_moments(const NormTask& t, float* x, const float* delta) {
  const auto value = [&](int c, int n) {
    prefetch(x + t.cols + c);  // the next row
    prefetch(delta + t.cols + c);
    const V16 v = add(load_n(x + c, n), load_n(delta + c, n));
    n >= 16 ? store(x + c, v) : store_n(x + c, v, n);
    return v;
  };
  if (t.weight && !t.layer) {
    const float sum = sum_in_fours(t.cols, [&](int c, int n, V16& s) {
      const V16 v = value(c, n);
      s = fma(v, v, s);
    });
    return {zero(), set1(inverse_root(sum, t.cols, t.eps))};
  }
  each16(t.cols, value);
  return t.weight ? moments(x, t.cols, t.layer, t.eps) : Moments{};
}

void norm(const NormTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const size_t base = static_cast<size_t>(r) * t.cols;
    float* x = t.x + base;
    Moments m{};
    if (t.delta)
      m = add_for_moments(t, x, t.delta + base);
    else if (t.weight)
      m = moments(x, t.cols, t.layer, t.eps);
    each16(t.cols, [&](int c, int n) {
      V16 v = load_n(x + c, n);
      if (t.weight) v = mul(mul(sub(v, m.mean), m.inverse), load_n(t.weight + c, n));
      if (t.weight && t.bias) v = add(v, load_n(t.bias + c, n));
      put(t.out, t.out_dtype, base + c, v, n);
    });
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

// Both halves clamped, then (up + 1) * gate * sigmoid(alpha * gate).
QUIRE_INLINE V16 clamped_swiglu(const GatedActTask& t, V16 gate, V16 up) {
  const V16 limit = set1(t.limit), one = set1(1.0f);
  gate = vmin(gate, limit);
  up = vmax(vmin(up, limit), sub(zero(), limit));
  return mul(add(up, one), swish(gate, mul(set1(t.alpha), gate)));
}

template <int kAct>
QUIRE_INLINE void gated_rows(const GatedActTask& t) {
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const float* gate = t.gate_up + static_cast<size_t>(r) * 2 * t.width;
    const float* up = gate + t.width;
    for (int c = t.col_begin; c < t.col_end; c += 16) {
      const int n = t.col_end - c;
      prefetch(gate + c + kAhead);
      prefetch(up + c + kAhead);
      const V16 g = load_n(gate + c, n), u = load_n(up + c, n);
      put(t.out, t.out_dtype, static_cast<size_t>(r) * t.out_pitch + c,
          kAct == 3 ? clamped_swiglu(t, g, u) : mul(activate<kAct>(g), u), n);
    }
  }
}

void gated_act(const GatedActTask& t) {
  switch (t.act) {
    case 0: return gated_rows<0>(t);
    case 1: return gated_rows<1>(t);
    case 2: return gated_rows<2>(t);
    default: return gated_rows<3>(t);
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
  const V16 x = set1(1.0000001f), y = set1(1e-9f);
  for (int i = 0; i < kLoopAccs; ++i) acc[i] = set1(static_cast<float>(i));
  for (int64_t k = 0; k < iterations; ++k) {
#pragma GCC unroll 16
    for (int i = 0; i < kLoopAccs; ++i) acc[i] = fma(x, y, acc[i]);
    __asm__ volatile("" : : :);  // with operands in memory the sums would be stored each time
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
  const int whole = t.cols / 16 * 16, left = t.cols - whole;
  const V16 limit = set1(127.0f), low = set1(-127.0f);
  for (int r = t.row_begin; r < t.row_end; ++r) {
    const float* x = t.x + static_cast<size_t>(r) * t.cols;
    struct {
      V16 top, bad;
    } seen[4] = {{zero(), zero()}, {zero(), zero()}, {zero(), zero()}, {zero(), zero()}};
    in_fours(t.cols, seen, [&](int c, int n, auto& s) {
      const V16 v = load_n(x + c, n);
      prefetch(x + c + kAhead);
      s.top = vmax(s.top, vmax(v, sub(zero(), v)));
      s.bad = fma(v, zero(), s.bad);
    });
    for (int j = 1; j < 4; ++j) {
      seen[0].top = vmax(seen[0].top, seen[j].top);
      seen[0].bad = add(seen[0].bad, seen[j].bad);
    }
    const float scale = mask_not_finite(seen[0].bad) ? NAN : reduce_max(seen[0].top) / 127.0f;
    t.scale[r] = scale;
    const V16 inverse = set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    const auto rounded = [&](V16 v) { return round_even(vmax(vmin(mul(v, inverse), limit), low)); };
    uint8_t* out = t.out + static_cast<size_t>(r) * t.pitch;
    for (int c = 0; c < whole; c += 16) store_u8(out + c, rounded(load(x + c)));
    if (!left) continue;
    uint8_t tail[16];
    store_u8(tail, rounded(load_n(x + whole, left)));
    std::memcpy(out + whole, tail, t.pitch - whole);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
