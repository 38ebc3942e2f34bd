// What norms divide by.
#pragma once

#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

// f(c, n) for each sixteen columns from c on, of which n are there.
template <class F>
QUIRE_INLINE void each16(int cols, F f) {
  int c = 0;
  for (; c + 16 <= cols; c += 16) f(c, 16);
  if (c < cols) f(c, cols - c);
}

// The same with what vector i joins, s[i % 4]: four short dependent chains instead of a long one.
template <class S, class F>
QUIRE_INLINE void in_fours(int cols, S (&s)[4], F f) {
  int c = 0;
  for (; c + 64 <= cols; c += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) f(c + 16 * j, 16, s[j]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
    if (c + 16 * j < cols) f(c + 16 * j, cols - c - 16 * j < 16 ? cols - c - 16 * j : 16, s[j]);
}

// The lanes of four sums, which f adds to, by one fixed tree.
template <class F>
QUIRE_INLINE float sum_in_fours(int cols, F f) {
  V16 s[4] = {zero(), zero(), zero(), zero()};
  in_fours(cols, s, f);
  return reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
}

// 1 / sqrt(mean + eps), of what adds up to `sum`.
QUIRE_INLINE float inverse_root(float sum, int cols, float eps) {
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(cols) + eps);
}

// What a norm takes off each element and multiplies it by. The mean of an RMS norm is 0, which changes no bit.
struct Moments {
  V16 mean, inverse;
};

QUIRE_INLINE Moments moments(const float* x, int cols, bool layer, float eps) {
  const auto value = [&](int c, int n) { return load_n(x + c, n); };
  if (!layer) {
    const float sum = sum_in_fours(cols, [&](int c, int n, V16& s) { s = fma(value(c, n), value(c, n), s); });
    return {zero(), set1(inverse_root(sum, cols, eps))};
  }
  const float sum = sum_in_fours(cols, [&](int c, int n, V16& s) { s = add(s, value(c, n)); });
  const V16 mean = set1(sum / static_cast<float>(cols));
  const float squares = sum_in_fours(cols, [&](int c, int n, V16& s) {
    V16 v = sub(value(c, n), mean);
    if (n < 16) v = first_n(n, v, zero());
    s = fma(v, v, s);
  });
  return {mean, set1(inverse_root(squares, cols, eps))};
}

}  // namespace QUIRE_ISA
}  // namespace quire
