// The innermost loop of weights in groups on AVX-512, for four to six rows and two vectors of outputs.
//
// It is assembly because GCC 12 copies sums around every dot product of a loop (see dot_u8s8): a third of the time.
#pragma once

#include "simd/groups.h"

#if QUIRE_AVX512

namespace quire {
namespace QUIRE_ISA {

// One group's codes and inputs. Eight features are 256 bytes of nibbles or 512 of bytes.
struct GroupDots {
  const uint8_t* codes;
  const int8_t* x;      // first row; row r at r * ldx
  size_t ldx;
  const int32_t* start;  // what each row's sums begin with, kGroupPitch numbers from row to row
  int size;              // features, a multiple of eight
};
constexpr int kGroupPitch = 64;

// zmm26, zmm27: codes of both vectors; zmm29: four features of a row.
#define QUIRE_FIRST(row)                                     \
  "vpbroadcastd " #row "*256(%[start]), %[a" #row "0]\n\t"   \
  "vmovdqa64 %[a" #row "0], %[a" #row "1]\n\t"
#define QUIRE_ROW(row, at)                          \
  "vpbroadcastd " at ", %%zmm29\n\t"                \
  "vpdpbusd %%zmm29, %%zmm26, %[a" #row "0]\n\t"    \
  "vpdpbusd %%zmm29, %%zmm27, %[a" #row "1]\n\t"
#define QUIRE_FIRST_4 QUIRE_FIRST(0) QUIRE_FIRST(1) QUIRE_FIRST(2) QUIRE_FIRST(3)
#define QUIRE_FIRST_5 QUIRE_FIRST_4 QUIRE_FIRST(4)
#define QUIRE_FIRST_6 QUIRE_FIRST_5 QUIRE_FIRST(5)
#define QUIRE_ROWS_4(from)                      \
  QUIRE_ROW(0, from "(%[x])")                   \
  QUIRE_ROW(1, from "(%[x], %[ldx])")           \
  QUIRE_ROW(2, from "(%[x], %[ldx], 2)")        \
  QUIRE_ROW(3, from "(%[x3])")
#define QUIRE_ROWS_5(from) QUIRE_ROWS_4(from) QUIRE_ROW(4, from "(%[x3], %[ldx])")
#define QUIRE_ROWS_6(from) QUIRE_ROWS_5(from) QUIRE_ROW(5, from "(%[x3], %[ldx], 2)")

#define QUIRE_LOW_NIBBLES "vpandd (%[p]), %[mask], %%zmm26\n\tvpandd 64(%[p]), %[mask], %%zmm27\n\t"
#define QUIRE_HIGH_NIBBLES                                               \
  "vpsrlw $4, (%[p]), %%zmm26\n\tvpsrlw $4, 64(%[p]), %%zmm27\n\t"       \
  "vpandd %%zmm26, %[mask], %%zmm26\n\tvpandd %%zmm27, %[mask], %%zmm27\n\t"
#define QUIRE_MORE "vpaddd %[more0], %%zmm26, %%zmm26\n\tvpaddd %[more1], %%zmm27, %%zmm27\n\t"
#define QUIRE_LOW_BYTES "vmovdqu64 (%[p]), %%zmm26\n\tvmovdqu64 64(%[p]), %%zmm27\n\t"
#define QUIRE_HIGH_BYTES "vmovdqu64 256(%[p]), %%zmm26\n\tvmovdqu64 320(%[p]), %%zmm27\n\t"

#define QUIRE_OUT(row) [a##row##0] "=&v"(acc[row * 2].v), [a##row##1] "=&v"(acc[row * 2 + 1].v)
#define QUIRE_OUT_4 QUIRE_OUT(0), QUIRE_OUT(1), QUIRE_OUT(2), QUIRE_OUT(3)
#define QUIRE_OUT_5 QUIRE_OUT_4, QUIRE_OUT(4)
#define QUIRE_OUT_6 QUIRE_OUT_5, QUIRE_OUT(5)

#define QUIRE_GROUP(rows, low, high, bytes)                                                                     \
  __asm__ volatile(QUIRE_FIRST_##rows                                                                            \
                   ".p2align 5\n1:\n\t" low QUIRE_ROWS_##rows("") high QUIRE_ROWS_##rows("4")                   \
                   "add $" #bytes ", %[p]\n\tadd $8, %[x]\n\tadd $8, %[x3]\n\tcmp %[end], %[x]\n\tjb 1b\n\t"    \
                   : QUIRE_OUT_##rows, [p] "+r"(p), [x] "+r"(x), [x3] "+r"(x3)                                  \
                   : [ldx] "r"(g.ldx), [end] "r"(end), [start] "r"(g.start), [mask] "v"(mask),                  \
                     [more0] "v"(more0), [more1] "v"(more1)                                                     \
                   : "memory", "cc", "zmm26", "zmm27", "zmm29")
#define QUIRE_GROUPS(low, high, bytes)                    \
  if constexpr (kRows == 4) {                                       \
    QUIRE_GROUP(4, low, high, bytes);                     \
  } else if constexpr (kRows == 5) {                              \
    QUIRE_GROUP(5, low, high, bytes);                     \
  } else {                                                \
    QUIRE_GROUP(6, low, high, bytes);                     \
  }

// acc[2r], acc[2r + 1] = start of row r + the group's codes · inputs, exactly. With kMore, more[0] and more[1] are
// added to the nibbles' bytes first.
template <int kRows, bool kBytes, bool kMore>
QUIRE_INLINE void group_dots(const GroupDots& g, const I16* more, I16* acc) {
  const uint8_t* p = g.codes;
  const __m512i mask = _mm512_set1_epi8(15), more0 = kMore ? more[0].v : mask, more1 = kMore ? more[1].v : mask;
  const int8_t *x = g.x, *x3 = g.x + 3 * g.ldx, *end = g.x + g.size;
  if constexpr (kBytes) {
    QUIRE_GROUPS(QUIRE_LOW_BYTES, QUIRE_HIGH_BYTES, 512)
  } else if constexpr (kMore) {
    QUIRE_GROUPS(QUIRE_LOW_NIBBLES QUIRE_MORE, QUIRE_HIGH_NIBBLES QUIRE_MORE, 256)
  } else {
    QUIRE_GROUPS(QUIRE_LOW_NIBBLES, QUIRE_HIGH_NIBBLES, 256)
  }
}

#undef QUIRE_FIRST
#undef QUIRE_ROW
#undef QUIRE_FIRST_4
#undef QUIRE_FIRST_5
#undef QUIRE_FIRST_6
#undef QUIRE_ROWS_4
#undef QUIRE_ROWS_5
#undef QUIRE_ROWS_6
#undef QUIRE_LOW_NIBBLES
#undef QUIRE_HIGH_NIBBLES
#undef QUIRE_MORE
#undef QUIRE_LOW_BYTES
#undef QUIRE_HIGH_BYTES
#undef QUIRE_OUT
#undef QUIRE_OUT_4
#undef QUIRE_OUT_5
#undef QUIRE_OUT_6
#undef QUIRE_GROUP
#undef QUIRE_GROUPS

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
