// What norms divide by.
#pragma once

#include "simd/vec.h"

namespace quire {
namespace QUIRE_ISA {

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

}  // namespace QUIRE_ISA
}  // namespace quire
