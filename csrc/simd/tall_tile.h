// A register tile of bf16 linears on AVX-512: eight to twelve rows times half a panel (two vectors).
//
// For two to five such tiles of rows it is better than six rows times a whole panel: each line of weights goes to the L1
// cache half as often, while as many more are on their way from memory. Assembly, so that 24 sums stay in registers and a
// step is dot products, loads and one prefetch (see also dot_u8s8).
#pragma once

#include <cstddef>

#include "simd/vec.h"

#if QUIRE_AVX512

namespace quire {
namespace QUIRE_ISA {

constexpr int kTallRows = 12;

struct TallTile {
  const char* x;  // four bytes of each row a step; row r at r * ldx
  size_t ldx;     // bytes
  const char* w;  // 256 bytes a step
  float* sums;    // [rows][64], of these outputs
  size_t steps;
  bool first;         // sums begin with zero
  const char* ahead;  // what is fetched meanwhile: once a step, `fetch` bytes from one to the next
  size_t fetch;
};

// Registers: zmm0-23 sums, 24, 25 weights, 26 inputs.
#define QUIRE_ROW(at, c0, c1)             \
  "vpbroadcastd " at                      \
  ", %%zmm26\n\t"                         \
  "vdpbf16ps %%zmm24, %%zmm26, %%zmm" #c0 \
  "\n\t"                                  \
  "vdpbf16ps %%zmm25, %%zmm26, %%zmm" #c1 "\n\t"
#define QUIRE_THREE(at, x, a0, a1, b0, b1, c0, c1) \
  QUIRE_ROW(at "(" x ")", a0, a1) QUIRE_ROW(at "(" x ", %[ldx])", b0, b1) QUIRE_ROW(at "(" x ", %[ldx], 2)", c0, c1)
#define QUIRE_ROWS_8(at)                     \
  QUIRE_THREE(at, "%[x0]", 0, 1, 2, 3, 4, 5) \
  QUIRE_THREE(at, "%[x3]", 6, 7, 8, 9, 10, 11) QUIRE_ROW(at "(%[x6])", 12, 13) QUIRE_ROW(at "(%[x6], %[ldx])", 14, 15)
#define QUIRE_ROWS_9(at) QUIRE_ROWS_8(at) QUIRE_ROW(at "(%[x6], %[ldx], 2)", 16, 17)
#define QUIRE_ROWS_10(at) QUIRE_ROWS_9(at) QUIRE_ROW(at "(%[x9])", 18, 19)
#define QUIRE_ROWS_11(at) QUIRE_ROWS_10(at) QUIRE_ROW(at "(%[x9], %[ldx])", 20, 21)
#define QUIRE_ROWS_12(at) QUIRE_ROWS_11(at) QUIRE_ROW(at "(%[x9], %[ldx], 2)", 22, 23)

// Sums are cleared, loaded and stored.
#define QUIRE_CLEAR(r, c0, c1) \
  "vpxord %%zmm" #c0 ", %%zmm" #c0 ", %%zmm" #c0 "\n\tvmovdqa64 %%zmm" #c0 ", %%zmm" #c1 "\n\t"
#define QUIRE_LOAD(r, c0, c1) \
  "vmovdqu64 256*" #r "(%[sums]), %%zmm" #c0 "\n\tvmovdqu64 256*" #r "+64(%[sums]), %%zmm" #c1 "\n\t"
#define QUIRE_STORE(r, c0, c1) \
  "vmovdqu64 %%zmm" #c0 ", 256*" #r "(%[sums])\n\tvmovdqu64 %%zmm" #c1 ", 256*" #r "+64(%[sums])\n\t"
#define QUIRE_EACH_8(WHAT) \
  WHAT(0, 0, 1) WHAT(1, 2, 3) WHAT(2, 4, 5) WHAT(3, 6, 7) WHAT(4, 8, 9) WHAT(5, 10, 11) WHAT(6, 12, 13) WHAT(7, 14, 15)
#define QUIRE_EACH_9(WHAT) QUIRE_EACH_8(WHAT) WHAT(8, 16, 17)
#define QUIRE_EACH_10(WHAT) QUIRE_EACH_9(WHAT) WHAT(9, 18, 19)
#define QUIRE_EACH_11(WHAT) QUIRE_EACH_10(WHAT) WHAT(10, 20, 21)
#define QUIRE_EACH_12(WHAT) QUIRE_EACH_11(WHAT) WHAT(11, 22, 23)

#define QUIRE_STEP(R, j)                                \
  "prefetcht0 (%[ahead])\n\tadd %[fetch], %[ahead]\n\t" \
  "vmovdqu64 256*" #j "(%[w]), %%zmm24\n\tvmovdqu64 256*" #j "+64(%[w]), %%zmm25\n\t" QUIRE_ROWS_##R("4*" #j)
#define QUIRE_NEXT(n)                                                                   \
  "add $256*" #n ", %[w]\n\tadd $4*" #n ", %[x0]\n\tadd $4*" #n ", %[x3]\n\tadd $4*" #n \
  ", %[x6]\n\t"                                                                         \
  "add $4*" #n ", %[x9]\n\t"
#define QUIRE_TILE(R) \
  __asm__ volatile(                                                                                  \
      "test %[first], %[first]\n\tjz 1f\n\t" QUIRE_EACH_##R(QUIRE_CLEAR) "jmp 2f\n\t"                \
      "1:\n\t" QUIRE_EACH_##R(QUIRE_LOAD)                                                            \
      "2:\n\tmov %[steps], %[n]\n\tshr $2, %[n]\n\tjz 4f\n\t.p2align 5\n\t"                          \
      "3:\n\t" QUIRE_STEP(R, 0) QUIRE_STEP(R, 1) QUIRE_STEP(R, 2) QUIRE_STEP(R, 3) \
      QUIRE_NEXT(4) "dec %[n]\n\tjnz 3b\n\t"                                                         \
      "4:\n\tand $3, %[steps]\n\tjz 6f\n\t"                                                          \
      "5:\n\t" QUIRE_STEP(R, 0) QUIRE_NEXT(1) "dec %[steps]\n\tjnz 5b\n\t"                      \
      "6:\n\t" QUIRE_EACH_##R(QUIRE_STORE)                                                           \
      : [w] "+r"(w), [x0] "+r"(x0), [x3] "+r"(x3), [x6] "+r"(x6), [x9] "+r"(x9), [ahead] "+r"(ahead), \
        [steps] "+r"(steps), [n] "=&r"(n)                                                            \
      : [ldx] "r"(t.ldx), [fetch] "r"(t.fetch), [sums] "r"(t.sums), [first] "r"(first)               \
      : "memory", "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", \
        "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19",     \
        "zmm20", "zmm21", "zmm22", "zmm23", "zmm24", "zmm25", "zmm26")

// sums += x · w over the steps, in rising order.
template <int kRows>
void tall_tile(const TallTile& t) {
  const char *w = t.w, *x0 = t.x, *x3 = x0 + 3 * t.ldx, *x6 = x3 + 3 * t.ldx, *x9 = x6 + 3 * t.ldx, *ahead = t.ahead;
  size_t steps = t.steps, n;
  const size_t first = t.first;
  if constexpr (kRows == 8) {
    QUIRE_TILE(8);
  } else if constexpr (kRows == 9) {
    QUIRE_TILE(9);
  } else if constexpr (kRows == 10) {
    QUIRE_TILE(10);
  } else if constexpr (kRows == 11) {
    QUIRE_TILE(11);
  } else {
    QUIRE_TILE(12);
  }
}

#undef QUIRE_ROW
#undef QUIRE_THREE
#undef QUIRE_ROWS_8
#undef QUIRE_ROWS_9
#undef QUIRE_ROWS_10
#undef QUIRE_ROWS_11
#undef QUIRE_ROWS_12
#undef QUIRE_CLEAR
#undef QUIRE_LOAD
#undef QUIRE_STORE
#undef QUIRE_EACH_8
#undef QUIRE_EACH_9
#undef QUIRE_EACH_10
#undef QUIRE_EACH_11
#undef QUIRE_EACH_12
#undef QUIRE_STEP
#undef QUIRE_NEXT
#undef QUIRE_TILE

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
