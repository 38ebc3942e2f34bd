// Adapters of low rank: x to a few numbers, and these to the output's columns. Both are short sums beside a linear's; what
// counts is that their weights are read once, and that a row's sums are its own.

#include <algorithm>

#include "kernels.h"
#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kChains = 4;  // running sums of a row, so that one does not wait for the one before; features of a unit
#if QUIRE_AVX512
constexpr int kRows = 4;     // rows that share a load of weights, at the most
constexpr int kVectors = 4;  // vectors of columns that are summed together, of so many rows; sums are in registers
#else
constexpr int kRows = 2;
constexpr int kVectors = 2;
#endif

QUIRE_INLINE V16 input(const float* x) { return set1(*x); }
QUIRE_INLINE V16 input(const uint16_t* x) { return set1(bf16_to_float(*x)); }

// Features k, k + 4, k + 8 … are one chain; the chains are added in pairs. Where units lie decides nothing.
template <class T, int R>
QUIRE_INLINE void shrink_rows(const ShrinkTask& t, int first) {
  const int32_t *tokens = t.tokens + first, *rows = t.rows + first;
  const T* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const T*>(t.x) + static_cast<size_t>(tokens[r]) * t.ldx;
  V16 acc[R][kChains];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kChains; ++c) acc[r][c] = zero();
  const size_t lanes = static_cast<size_t>(t.lanes);
  for (int k = 0; k < t.k;) {
    const PagedUnits::Run run = t.a.from(k / kChains);
    const uint16_t* a = reinterpret_cast<const uint16_t*>(run.data);
    const int end = std::min(t.k, k + run.count * kChains);
    for (; k + kChains <= end; k += kChains)
#pragma GCC unroll 2
      for (int c = 0; c < kChains; c += 2, a += 2 * lanes) {
        const P16 pairs = load_pairs(a);
        const V16 w[2] = {lows(pairs), highs(pairs)};
        for (int r = 0; r < R; ++r)
          for (int i = 0; i < 2; ++i) acc[r][c + i] = fma(input(x[r] + k + c + i), w[i], acc[r][c + i]);
      }
    for (int c = 0; k < end; ++c, ++k) {  // the last features
      const P16 pairs = load_pairs(a + c / 2 * 2 * lanes);
      const V16 w = c % 2 ? highs(pairs) : lows(pairs);
      for (int r = 0; r < R; ++r) acc[r][c] = fma(input(x[r] + k), w, acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    store(t.y + static_cast<size_t>(rows[r]) * t.ldy, add(add(acc[r][0], acc[r][1]), add(acc[r][2], acc[r][3])));
}

template <class T>
void shrink_all(const ShrinkTask& t) {
  int i = 0;
  for (; i + kRows <= t.count; i += kRows) shrink_rows<T, kRows>(t, i);
  if constexpr (kRows > 2)
    for (; i + 2 <= t.count; i += 2) shrink_rows<T, 2>(t, i);
  for (; i < t.count; ++i) shrink_rows<T, 1>(t, i);
}

// y plus the product, and the gain of both without the bias. The same numbers whether the vector is whole or not.
QUIRE_INLINE V16 with_gain(V16 y, V16 product, const float* gains, V16 bias) {
  if (gains) product = fma(load(gains), add(sub(y, bias), product), product);
  return add(y, product);
}

// The task's columns of one vector of a row, whose first is `col`; y is column 0. `gains` are those of the vector, or null.
QUIRE_INLINE void add_columns(const ExpandTask& t, float* y, V16 product, int col, const float* gains) {
  const float* bias = gains ? t.bias : nullptr;
  if (t.col_begin <= col && col + kRankLanes <= t.col_end)
    return store(y + col, with_gain(load(y + col), product, gains, bias ? load(bias + col) : zero()));
  const int begin = std::max(0, t.col_begin - col), end = std::min(kRankLanes, t.col_end - col);
  float lanes[kRankLanes] = {0}, biases[kRankLanes] = {0};
  for (int c = begin; c < end; ++c) {
    lanes[c] = y[col + c];
    if (bias) biases[c] = bias[col + c];
  }
  store(lanes, with_gain(load(lanes), product, gains, load(biases)));
  for (int c = begin; c < end; ++c) y[col + c] = lanes[c];
}

// C vectors of columns, from `col` on, of R rows.
template <int R, int C>
QUIRE_INLINE void expand_vectors(const ExpandTask& t, const float* const* x, float* const* y, int col) {
  const char* b = t.b + static_cast<size_t>(col / kRankLanes) * t.unit;
  V16 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  const auto add_rank = [&](int k, auto half) {
    V16 w[C];
    for (int c = 0; c < C; ++c)
      w[c] = half(load_pairs(reinterpret_cast<const uint16_t*>(b + c * t.unit) + k / 2 * 2 * kRankLanes));
    for (int r = 0; r < R; ++r) {
      const V16 each = set1(x[r][k]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(each, w[c], acc[r][c]);
    }
  };
  for (int k = 0; k < t.rank; ++k) {
    add_rank(k, lows);
    if (++k < t.rank) add_rank(k, highs);
  }
  if (!t.gains && t.col_begin <= col && col + C * kRankLanes <= t.col_end) {  // sums go from registers to their columns
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        float* to = y[r] + col + c * kRankLanes;
        store(to, add(load(to), acc[r][c]));
      }
    return;
  }
  const size_t behind = even_ranks(t.rank) * kRankLanes * sizeof(uint16_t);
  for (int c = 0; c < C; ++c) {
    const float* gains = t.gains ? reinterpret_cast<const float*>(b + c * t.unit + behind) : nullptr;
    for (int r = 0; r < R; ++r) add_columns(t, y[r], acc[r][c], col + c * kRankLanes, gains);
  }
}

template <int R>
QUIRE_INLINE void expand_rows(const ExpandTask& t, const int32_t* tokens) {
  constexpr int C = kVectors * (R < kRows ? 2 : 1);
  const float* x[R];
  float* y[R];
  for (int r = 0; r < R; ++r) {
    x[r] = t.x + static_cast<size_t>(tokens[r]) * t.ldx;
    y[r] = t.y + static_cast<size_t>(tokens[r] - t.first_token) * t.ldy - t.col_begin;
  }
  int col = t.col_begin / kRankLanes * kRankLanes;
  for (; col + (C - 1) * kRankLanes < t.col_end; col += C * kRankLanes) expand_vectors<R, C>(t, x, y, col);
  for (; col < t.col_end; col += kRankLanes) expand_vectors<R, 1>(t, x, y, col);
}

}  // namespace

void shrink(const ShrinkTask& t) { t.x_dtype == DType::f32 ? shrink_all<float>(t) : shrink_all<uint16_t>(t); }

void expand(const ExpandTask& t) {
  int i = 0;
  for (; i + kRows <= t.count; i += kRows) expand_rows<kRows>(t, t.tokens + i);
  if constexpr (kRows > 2)
    for (; i + 2 <= t.count; i += 2) expand_rows<2>(t, t.tokens + i);
  for (; i < t.count; ++i) expand_rows<1>(t, t.tokens + i);
}

}  // namespace QUIRE_ISA
}  // namespace quire
