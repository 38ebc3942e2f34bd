// The one inner loop of Quire: R rows times C vectors of sixteen columns, summed over k in rising order.
//
// Linear layers, q·k and p·v are this loop over different strides. Each lane is one running sum over k, so the
// bits of an output depend only on its own row and column, never on R, C or the thread that computes the neighbours.
#pragma once

#include "kernels.h"
#include "simd/half.h"

namespace quire {
namespace QUIRE_ISA {

// A number format of the loop: elements of x and of w, sums, and one multiply-accumulate of a vector.
struct F32 {
  using in = float;
  using elem = float;
  using sum = V16;
  static constexpr int step = 1;  // k elements that one vector step consumes
  static inline __attribute__((always_inline)) V16 mac(V16 acc, const elem* x, const elem* w) {
    return fma(set1(*x), load(w), acc);
  }
};

struct BF16 {
  using in = uint16_t;
  using elem = uint16_t;
  using sum = V16;
  static constexpr int step = 2;
  static inline __attribute__((always_inline)) V16 mac(V16 acc, const elem* x, const elem* w) {
    return dot(acc, set1_pair(x), load_pairs(w));
  }
};

// float32 times float16, which becomes float32 in registers: the bits are those of F32. Two elements of k lie one after
// the other, sixteen columns each.
struct F16 {
  using in = float;
  using elem = uint16_t;
  using sum = V16;
  static constexpr int step = 2;
  static inline __attribute__((always_inline)) V16 mac_one(V16 acc, const in* x, const elem* w) {
    return fma(set1(*x), load_half(w), acc);
  }
  static inline __attribute__((always_inline)) V16 mac(V16 acc, const in* x, const elem* w) {
    return mac_one(mac_one(acc, x, w), x + 1, w + 16);
  }
};

// Clang loads the vectors of a step together, ahead of their sums, and then has too few registers for both: here the
// next load waits for the sums before it. Nothing is executed.
template <class Elem>
QUIRE_INLINE void in_turn([[maybe_unused]] V16& sum, [[maybe_unused]] const Elem*& w) {
#if defined(__clang__) && QUIRE_AVX2
  __asm__("" : "+x"(sum.a), "+x"(sum.b), "+r"(w));
#endif
}

// acc[r*C + c] += x[r*ldx + k] * w[k, c*16 ...] for `steps` steps; w advances wstride, vectors lie cstride apart.
template <class T, int R, int C>
QUIRE_INLINE void micro(V16* acc, const typename T::in* x, size_t ldx, const typename T::elem* w, size_t wstride,
                        size_t cstride, int steps) {
  for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        acc[r * C + c] = T::mac(acc[r * C + c], x + r * ldx, w + c * cstride);
        if (R == 1) in_turn(acc[r * C + c], w);
      }
    }
    x += T::step;
    w += wstride;
  }
}

// Register tiles of the set: at most kRows rows at a time, kCols(R) vectors at a time.
#if QUIRE_AVX512
constexpr int kRows = 6;
template <int R>
constexpr int cols_for() {
  return 4;
}
#elif QUIRE_AVX2  // sixteen registers of eight lanes: eight hold sums
constexpr int kRows = 4;
template <int R>
constexpr int cols_for() {
  return R == 1 ? 4 : R == 2 ? 2 : 1;
}
#else             // sixteen registers of four lanes; one row streams whole panels, sums spill to the L1 cache
constexpr int kRows = 2;
template <int R>
constexpr int cols_for() {
  return R == 1 ? 4 : 1;
}
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
