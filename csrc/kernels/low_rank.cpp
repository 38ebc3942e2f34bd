// Adapters of low rank: x to a few numbers, and these to the output's columns. Both are short sums beside a linear's; what
// counts is that their weights are read once, and that a row's sums are its own.

#include "kernels.h"
#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kChains = 4;  // running sums of a row, so that one does not wait for the one before
constexpr int kRows = 2;    // rows that share a load of weights

QUIRE_INLINE V16 input(const float* x) { return set1(*x); }
QUIRE_INLINE V16 input(const uint16_t* x) { return set1(bf16_to_float(*x)); }

// Features k, k + 4, k + 8 … are one chain; the chains are added in pairs.
template <class T, int R>
QUIRE_INLINE void shrink_rows(const ShrinkTask& t, const int32_t* tokens) {
  const T* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const T*>(t.x) + static_cast<size_t>(tokens[r]) * t.ldx;
  V16 acc[R][kChains];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kChains; ++c) acc[r][c] = zero();
  int k = 0;
  for (; k + kChains <= t.k; k += kChains)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      const V16 w = load_bf16(t.a + static_cast<size_t>(k + c) * kRankLanes);
      for (int r = 0; r < R; ++r) acc[r][c] = fma(input(x[r] + k + c), w, acc[r][c]);
    }
  for (int c = 0; k + c < t.k; ++c) {
    const V16 w = load_bf16(t.a + static_cast<size_t>(k + c) * kRankLanes);
    for (int r = 0; r < R; ++r) acc[r][c] = fma(input(x[r] + k + c), w, acc[r][c]);
  }
  for (int r = 0; r < R; ++r)
    store(t.y + static_cast<size_t>(tokens[r]) * t.ldy, add(add(acc[r][0], acc[r][1]), add(acc[r][2], acc[r][3])));
}

template <class T>
void shrink_all(const ShrinkTask& t) {
  int i = 0;
  for (; i + kRows <= t.count; i += kRows) shrink_rows<T, kRows>(t, t.tokens + i);
  for (; i < t.count; ++i) shrink_rows<T, 1>(t, t.tokens + i);
}

// Columns [begin, end) of one vector of a row, whose first is `col`.
QUIRE_INLINE void add_columns(float* y, V16 v, int col, int begin, int end) {
  if (begin <= col && col + kRankLanes <= end) return store(y, add(load(y), v));
  float lanes[kRankLanes];
  store(lanes, v);
  for (int c = 0; c < kRankLanes; ++c)
    if (begin <= col + c && col + c < end) y[c] += lanes[c];
}

template <int R>
QUIRE_INLINE void expand_rows(const ExpandTask& t, const int32_t* tokens) {
  const float* x[R];
  float* y[R];
  for (int r = 0; r < R; ++r) {
    x[r] = t.x + static_cast<size_t>(tokens[r]) * t.ldx;
    y[r] = t.y + static_cast<size_t>(tokens[r] - t.first_token) * t.ldy - t.col_begin;
  }
  for (int col = t.col_begin / kRankLanes * kRankLanes; col < t.col_end; col += kRankLanes) {
    const uint16_t* b = t.b + static_cast<size_t>(col) * t.ldb;
    V16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int k = 0; k < t.rank; ++k) {
      const V16 w = load_bf16(b + static_cast<size_t>(k) * kRankLanes);
      for (int r = 0; r < R; ++r) acc[r] = fma(set1(x[r][k]), w, acc[r]);
    }
    for (int r = 0; r < R; ++r) add_columns(y[r] + col, acc[r], col, t.col_begin, t.col_end);
  }
}

}  // namespace

void shrink(const ShrinkTask& t) { t.x_dtype == DType::f32 ? shrink_all<float>(t) : shrink_all<uint16_t>(t); }

void expand(const ExpandTask& t) {
  int i = 0;
  for (; i + kRows <= t.count; i += kRows) expand_rows<kRows>(t, t.tokens + i);
  for (; i < t.count; ++i) expand_rows<1>(t, t.tokens + i);
}

}  // namespace QUIRE_ISA
}  // namespace quire
