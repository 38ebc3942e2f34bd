// Activations of sixteen numbers.
#pragma once

#include "kernels.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

// max(g, 0) - |g| / 2 · erfc(|g| / √2), which is g / 2 · (1 + erf(g / √2)). erfc by Abramowitz & Stegun 7.1.26, absolute
// error below 1.5e-7.
QUIRE_INLINE V16 gelu16(V16 g) {
  const V16 a = vmax(g, sub(zero(), g));
  const V16 t = ratio(set1(1.0f), fma(a, set1(0.3275911f * 0.70710678118654752f), set1(1.0f)));
  V16 p = set1(0.5f * 1.061405429f);
  p = fma(p, t, set1(0.5f * -1.453152027f));
  p = fma(p, t, set1(0.5f * 1.421413741f));
  p = fma(p, t, set1(0.5f * -0.284496736f));
  p = fma(p, t, set1(0.5f * 0.254829592f));
  const V16 power = exp2(mul(mul(g, g), set1(-0.5f * 1.44269504088896341f)));
  return sub(vmax(zero(), g), mul(mul(a, power), mul(p, t)));
}

// g / (1 + e^-z)
QUIRE_INLINE V16 swish(V16 g, V16 z) {
  return ratio(g, add(set1(1.0f), exp2(vmin(mul(z, set1(-1.44269504088896341f)), set1(119.0f)))));
}

template <Act kAct>
QUIRE_INLINE V16 activate(V16 g) {
  if (kAct == Act::silu) return swish(g, g);
  if (kAct == Act::gelu) return gelu16(g);
  if (kAct == Act::relu) return vmax(g, zero());
  if (kAct == Act::tanh) return tanh16(g);
  // (1 + tanh z) / 2 is 1 / (1 + e^-2z)
  return swish(g, mul(set1(2 * 0.7978845608028654f), fma(mul(mul(g, g), g), set1(0.044715f), g)));
}

}  // namespace QUIRE_ISA
}  // namespace quire
