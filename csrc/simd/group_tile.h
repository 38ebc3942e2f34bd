// A register tile of weights in groups on AVX-512: three to six rows times half a panel, over a run of groups.
//
// Its int32 sums and its float32 sums stay in registers. A group's int32 sums begin at the bits of 1.5 * 2^(23 + n) for
// inputs that are to be shifted left by n: as float32 they are then that number plus the shifted sum (a group's sum is
// below 2^22), and one exact subtraction replaces shift and conversion. Rounding the inputs has prepared both numbers,
// and the tile reads them where they lie. The last run's sums leave the registers as outputs. It is assembly because
// GCC 12 copies sums around every dot product of a loop (see dot_u8s8), and to begin a row's conversion while the last
// rows' dot products run.
#pragma once

#include <cstddef>

#include "simd/groups.h"

#if QUIRE_AVX512

namespace quire {
namespace QUIRE_ISA {

constexpr int kRunGroups = 64;  // groups of a run, at the most
constexpr int kTileHeight = 6;

// What the outputs of a panel need of each group.
struct PanelNumbers {
  alignas(64) float scale[kRunGroups][64];
  alignas(64) float offset[kRunGroups][64];  // or, as bytes, what is added to the nibbles: all four of a lane alike
};

// What tiles of weights fetch during some groups: from `data` on, `step` bytes from one time to the next.
struct Fetch {
  const char* data;
  size_t step, groups;
};
// How often a tile of this height fetches in a group of `size` features.
constexpr size_t fetches(int rows, int size) { return static_cast<size_t>(size / 8) * (rows <= 4 ? 3 : 2); }

struct GroupTile {
  const uint8_t* codes;  // of the first group
  size_t stride;         // bytes from a group's codes to the next one's
  size_t factors;        // and to those of each eighth group these more; 0 without float offsets
  const int8_t* x;       // row r at r * ldx
  size_t ldx;
  const int32_t* numbers;  // of the inputs' groups, as QuantizeTask: row r at r * ldn bytes
  size_t ldn;
  const PanelNumbers* panel;
  const float* from;  // [rows][64] sums so far, or null: none
  float* to;          // where the sums go: row r at r * ldto bytes
  size_t ldto;
  const float* x_scale;  // of the rows, when the sums become outputs, or null
  const float* bias;     // of the panel's outputs, or null
  size_t count, size;    // groups, features of each
  Fetch fetch;           // what is fetched meanwhile, and what then
  const Fetch* then;
};

// nibbles_half: float16 scales are read where they lie; nibbles_more: something is added to the nibbles.
enum class TileCodes { nibbles, nibbles_half, nibbles_more, bytes };

// Registers: zmm0-11 int32 sums, 12-23 float32 sums, 24, 25 codes, 26 inputs, 27 the nibbles' mask, 28, 29 scales,
// 30, 31 offsets or what is added to nibbles.
#define QUIRE_ROW(at, c0, c1)            \
  "vpbroadcastd " at                     \
  ", %%zmm26\n\t"                        \
  "vpdpbusd %%zmm26, %%zmm24, %%zmm" #c0 \
  "\n\t"                                 \
  "vpdpbusd %%zmm26, %%zmm25, %%zmm" #c1 "\n\t"
#define QUIRE_ROW_0(d) QUIRE_ROW(d "(%[x])", 0, 1)
#define QUIRE_ROW_1(d) QUIRE_ROW(d "(%[x], %[ldx])", 2, 3)
#define QUIRE_ROW_2(d) QUIRE_ROW(d "(%[x], %[ldx], 2)", 4, 5)
#define QUIRE_ROW_3(d) QUIRE_ROW(d "(%[x3])", 6, 7)
#define QUIRE_ROW_4(d) QUIRE_ROW(d "(%[x3], %[ldx])", 8, 9)
#define QUIRE_ROW_5(d) QUIRE_ROW(d "(%[x3], %[ldx], 2)", 10, 11)

// A row's int32 sums begin: symmetric nibbles, with float offsets, nibbles with whole zero points (sixteen times the sum of
// the inputs instead of eight), bytes (128 times).
#define QUIRE_BEGIN_NIBBLES(at, c0) "vpbroadcastd 4" at ", %%zmm" #c0 "\n\t"
#define QUIRE_BEGIN_OFFSET(at, c0) "vpbroadcastd " at ", %%zmm" #c0 "\n\t"
#define QUIRE_BEGIN_MORE(at, c0)                 \
  "vpbroadcastd 4" at ", %%zmm" #c0              \
  "\n\t"                                         \
  "vpaddd %%zmm" #c0 ", %%zmm" #c0 ", %%zmm" #c0 \
  "\n\t"                                         \
  "vpsubd " at "%{1to16%}, %%zmm" #c0 ", %%zmm" #c0 "\n\t"
#define QUIRE_BEGIN_BYTES(at, c0)                   \
  "vpbroadcastd 4" at ", %%zmm" #c0                 \
  "\n\t"                                            \
  "vpsubd " at "%{1to16%}, %%zmm" #c0 ", %%zmm" #c0 \
  "\n\t"                                            \
  "vpslld $4, %%zmm" #c0 ", %%zmm" #c0              \
  "\n\t"                                            \
  "vpaddd " at "%{1to16%}, %%zmm" #c0 ", %%zmm" #c0 "\n\t"
#define QUIRE_BEGIN(KIND, at, c0, c1) QUIRE_BEGIN_##KIND(at, c0) "vmovdqa64 %%zmm" #c0 ", %%zmm" #c1 "\n\t"
// They end. With float offsets the group's second number, less the first, is eight times minus the sum of the inputs.
#define QUIRE_NO_OFFSET(at, c0, s0, s1)
#define QUIRE_OFFSET(at, c0, s0, s1)             \
  "vpbroadcastd 4" at ", %%zmm" #c0              \
  "\n\t"                                         \
  "vsubps %%zmm26, %%zmm" #c0 ", %%zmm" #c0      \
  "\n\t"                                         \
  "vfmadd231ps %%zmm" #c0 ", %%zmm30, %%zmm" #s0 \
  "\n\t"                                         \
  "vfmadd231ps %%zmm" #c0 ", %%zmm31, %%zmm" #s1 "\n\t"
#define QUIRE_END(at, c0, c1, s0, s1, OFFSET)    \
  "vbroadcastss " at                             \
  ", %%zmm26\n\t"                                \
  "vsubps %%zmm26, %%zmm" #c0 ", %%zmm" #c0      \
  "\n\t"                                         \
  "vsubps %%zmm26, %%zmm" #c1 ", %%zmm" #c1      \
  "\n\t"                                         \
  "vfmadd231ps %%zmm" #c0 ", %%zmm28, %%zmm" #s0 \
  "\n\t"                                         \
  "vfmadd231ps %%zmm" #c1 ", %%zmm29, %%zmm" #s1 "\n\t" OFFSET(at, c0, s0, s1)
#define QUIRE_CLEAR(s0, s1) \
  "vpxord %%zmm" #s0 ", %%zmm" #s0 ", %%zmm" #s0 "\n\tvpxord %%zmm" #s1 ", %%zmm" #s1 ", %%zmm" #s1 "\n\t"
#define QUIRE_LOAD(r, s0, s1) "vmovups 256*" #r "(%[n]), %%zmm" #s0 "\n\tvmovups 256*" #r "+64(%[n]), %%zmm" #s1 "\n\t"
#define QUIRE_SCALE(r, s0, s1)              \
  "vbroadcastss 4*" #r                      \
  "(%[n]), %%zmm26\n\t"                     \
  "vmulps %%zmm26, %%zmm" #s0 ", %%zmm" #s0 \
  "\n\t"                                    \
  "vmulps %%zmm26, %%zmm" #s1 ", %%zmm" #s1 "\n\t"
#define QUIRE_BIAS(s0, s1) \
  "vaddps %%zmm28, %%zmm" #s0 ", %%zmm" #s0 "\n\tvaddps %%zmm29, %%zmm" #s1 ", %%zmm" #s1 "\n\t"
#define QUIRE_STORE(s0, s1) "vmovups %%zmm" #s0 ", (%[p])\n\tvmovups %%zmm" #s1 ", 64(%[p])\n\tadd %[n], %[p]\n\t"
#define QUIRE_BEGIN_0(KIND) QUIRE_BEGIN(KIND, "(%[num])", 0, 1)
#define QUIRE_END_0(F) QUIRE_END("(%[num])", 0, 1, 12, 13, F)
#define QUIRE_CLEAR_0(_) QUIRE_CLEAR(12, 13)
#define QUIRE_LOAD_0(_) QUIRE_LOAD(0, 12, 13)
#define QUIRE_SCALE_0(_) QUIRE_SCALE(0, 12, 13)
#define QUIRE_BIAS_0(_) QUIRE_BIAS(12, 13)
#define QUIRE_STORE_0(_) QUIRE_STORE(12, 13)
#define QUIRE_BEGIN_1(KIND) QUIRE_BEGIN(KIND, "(%[num], %[ldn])", 2, 3)
#define QUIRE_END_1(F) QUIRE_END("(%[num], %[ldn])", 2, 3, 14, 15, F)
#define QUIRE_CLEAR_1(_) QUIRE_CLEAR(14, 15)
#define QUIRE_LOAD_1(_) QUIRE_LOAD(1, 14, 15)
#define QUIRE_SCALE_1(_) QUIRE_SCALE(1, 14, 15)
#define QUIRE_BIAS_1(_) QUIRE_BIAS(14, 15)
#define QUIRE_STORE_1(_) QUIRE_STORE(14, 15)
#define QUIRE_BEGIN_2(KIND) QUIRE_BEGIN(KIND, "(%[num], %[ldn], 2)", 4, 5)
#define QUIRE_END_2(F) QUIRE_END("(%[num], %[ldn], 2)", 4, 5, 16, 17, F)
#define QUIRE_CLEAR_2(_) QUIRE_CLEAR(16, 17)
#define QUIRE_LOAD_2(_) QUIRE_LOAD(2, 16, 17)
#define QUIRE_SCALE_2(_) QUIRE_SCALE(2, 16, 17)
#define QUIRE_BIAS_2(_) QUIRE_BIAS(16, 17)
#define QUIRE_STORE_2(_) QUIRE_STORE(16, 17)
#define QUIRE_BEGIN_3(KIND) QUIRE_BEGIN(KIND, "(%[num3])", 6, 7)
#define QUIRE_END_3(F) QUIRE_END("(%[num3])", 6, 7, 18, 19, F)
#define QUIRE_CLEAR_3(_) QUIRE_CLEAR(18, 19)
#define QUIRE_LOAD_3(_) QUIRE_LOAD(3, 18, 19)
#define QUIRE_SCALE_3(_) QUIRE_SCALE(3, 18, 19)
#define QUIRE_BIAS_3(_) QUIRE_BIAS(18, 19)
#define QUIRE_STORE_3(_) QUIRE_STORE(18, 19)
#define QUIRE_BEGIN_4(KIND) QUIRE_BEGIN(KIND, "(%[num3], %[ldn])", 8, 9)
#define QUIRE_END_4(F) QUIRE_END("(%[num3], %[ldn])", 8, 9, 20, 21, F)
#define QUIRE_CLEAR_4(_) QUIRE_CLEAR(20, 21)
#define QUIRE_LOAD_4(_) QUIRE_LOAD(4, 20, 21)
#define QUIRE_SCALE_4(_) QUIRE_SCALE(4, 20, 21)
#define QUIRE_BIAS_4(_) QUIRE_BIAS(20, 21)
#define QUIRE_STORE_4(_) QUIRE_STORE(20, 21)
#define QUIRE_BEGIN_5(KIND) QUIRE_BEGIN(KIND, "(%[num3], %[ldn], 2)", 10, 11)
#define QUIRE_END_5(F) QUIRE_END("(%[num3], %[ldn], 2)", 10, 11, 22, 23, F)
#define QUIRE_CLEAR_5(_) QUIRE_CLEAR(22, 23)
#define QUIRE_LOAD_5(_) QUIRE_LOAD(5, 22, 23)
#define QUIRE_SCALE_5(_) QUIRE_SCALE(5, 22, 23)
#define QUIRE_BIAS_5(_) QUIRE_BIAS(22, 23)
#define QUIRE_STORE_5(_) QUIRE_STORE(22, 23)
#define QUIRE_3(WHAT, _) WHAT##_0(_) WHAT##_1(_) WHAT##_2(_)
#define QUIRE_4(WHAT, _) QUIRE_3(WHAT, _) WHAT##_3(_)
#define QUIRE_5(WHAT, _) QUIRE_4(WHAT, _) WHAT##_4(_)
#define QUIRE_6(WHAT, _) QUIRE_5(WHAT, _) WHAT##_5(_)
#define QUIRE_ROWS_3(d) QUIRE_ROW_0(d) QUIRE_ROW_1(d) QUIRE_ROW_2(d)
#define QUIRE_ROWS_4(d) QUIRE_ROWS_3(d) QUIRE_ROW_3(d)
#define QUIRE_ROWS_5(d) QUIRE_ROWS_4(d) QUIRE_ROW_4(d)
#define QUIRE_ROWS_6(d) QUIRE_ROWS_5(d) QUIRE_ROW_5(d)
// The last dot products of a group, and the ends of rows that are done some before.
#define QUIRE_LAST_3(d, F) QUIRE_ROWS_3(d) QUIRE_END_0(F) QUIRE_END_1(F) QUIRE_END_2(F)
#define QUIRE_UP_TO_3(d, F) QUIRE_ROWS_3(d) QUIRE_END_0(F) QUIRE_ROW_3(d) QUIRE_END_1(F)
#define QUIRE_UP_TO_4(d, F) QUIRE_UP_TO_3(d, F) QUIRE_ROW_4(d) QUIRE_END_2(F)
#define QUIRE_LAST_4(d, F) QUIRE_UP_TO_3(d, F) QUIRE_END_2(F) QUIRE_END_3(F)
#define QUIRE_LAST_5(d, F) QUIRE_UP_TO_4(d, F) QUIRE_END_3(F) QUIRE_END_4(F)
#define QUIRE_LAST_6(d, F) QUIRE_UP_TO_4(d, F) QUIRE_ROW_5(d) QUIRE_END_3(F) QUIRE_END_4(F) QUIRE_END_5(F)

// Codes of four features of step j.
#define QUIRE_NIBBLES_LOW(j) \
  "vpandd 256*" #j "(%[p]), %%zmm27, %%zmm24\n\tvpandd 256*" #j "+64(%[p]), %%zmm27, %%zmm25\n\t"
#define QUIRE_NIBBLES_HIGH(j)                                  \
  "vpsrlw $4, 256*" #j "(%[p]), %%zmm24\n\tvpsrlw $4, 256*" #j \
  "+64(%[p]), %%zmm25\n\t"                                     \
  "vpandd %%zmm24, %%zmm27, %%zmm24\n\tvpandd %%zmm25, %%zmm27, %%zmm25\n\t"
#define QUIRE_PLUS "vpaddd %%zmm30, %%zmm24, %%zmm24\n\tvpaddd %%zmm31, %%zmm25, %%zmm25\n\t"
#define QUIRE_MORE_LOW(j) QUIRE_NIBBLES_LOW(j) QUIRE_PLUS
#define QUIRE_MORE_HIGH(j) QUIRE_NIBBLES_HIGH(j) QUIRE_PLUS
#define QUIRE_BYTES_LOW(j) "vmovdqu64 512*" #j "(%[p]), %%zmm24\n\tvmovdqu64 512*" #j "+64(%[p]), %%zmm25\n\t"
#define QUIRE_BYTES_HIGH(j) "vmovdqu64 512*" #j "+256(%[p]), %%zmm24\n\tvmovdqu64 512*" #j "+320(%[p]), %%zmm25\n\t"
#define QUIRE_NIBBLES_PAIR "512"  // bytes of sixteen features
#define QUIRE_MORE_PAIR "512"
#define QUIRE_BYTES_PAIR "1024"

#define QUIRE_FETCH "prefetcht0 (%[ahead])\n\tadd %[fetch], %[ahead]\n\t"
#define QUIRE_THIRD_3 QUIRE_FETCH
#define QUIRE_THIRD_4 QUIRE_FETCH
#define QUIRE_THIRD_5
#define QUIRE_THIRD_6
// Eight features, and sixteen.
#define QUIRE_LOW(R, CODES, j) \
  QUIRE_FETCH CODES##_LOW(j) QUIRE_ROWS_##R("8*" #j) QUIRE_FETCH CODES##_HIGH(j) QUIRE_THIRD_##R
#define QUIRE_PAIR(R, CODES) QUIRE_LOW(R, CODES, 0) QUIRE_ROWS_##R("4") QUIRE_LOW(R, CODES, 1) QUIRE_ROWS_##R("8+4")
#define QUIRE_LAST_PAIR(R, CODES, F) \
  QUIRE_LOW(R, CODES, 0) QUIRE_ROWS_##R("4") QUIRE_LOW(R, CODES, 1) QUIRE_LAST_##R("8+4", F)
#define QUIRE_NEXT_PAIR(CODES) "add $" CODES##_PAIR ", %[p]\n\tadd $16, %[x]\n\tadd $16, %[x3]\n\t"

// What outputs need of a group, and on to the next.
#define QUIRE_SCALES "vmovaps (%[panel]), %%zmm28\n\tvmovaps 64(%[panel]), %%zmm29\n\tadd $256, %[panel]\n\t"
#define QUIRE_SCALES_MORE \
  "vmovaps %c[extra](%[panel]), %%zmm30\n\tvmovaps %c[extra]+64(%[panel]), %%zmm31\n\t" QUIRE_SCALES
#define QUIRE_SCALES_HALF \
  "vcvtph2ps (%[panel]), %%zmm28\n\tvcvtph2ps 32(%[panel]), %%zmm29\n\tadd 8*7(%[t]), %[panel]\n\t"

// Behind the last of eight groups that have common factors: those of the next ones.
#define QUIRE_NEXT_OFFSET "decq 8*8(%[t])\n\tjnz 6f\n\tmovq $8, 8*8(%[t])\n\tadd 8*9(%[t]), %[p]\n\t6:\n\t"
#define QUIRE_NEXT_NIBBLES
#define QUIRE_NEXT_MORE
#define QUIRE_NEXT_BYTES
// What is fetched from the next group on.
#define QUIRE_NEXT_FETCH                                                                                        \
  "decq 8*10(%[t])\n\tjnz 7f\n\tmov 8*11(%[t]), %[n]\n\tmov 16(%[n]), %[ahead]\n\tmov %[ahead], 8*10(%[t])\n\t" \
  "mov 8(%[n]), %[fetch]\n\tmov (%[n]), %[ahead]\n\tadd $24, %[n]\n\tmov %[n], 8*11(%[t])\n\t7:\n\t"
#define QUIRE_TILE(R, CODES, BEGIN, F, SCALES) \
  __asm__ volatile(                                                                                                       \
      "mov $0x0f0f0f0f, %k[n]\n\tvpbroadcastd %k[n], %%zmm27\n\tmov 8*0(%[t]), %[n]\n\ttest %[n], %[n]\n\tjz 1f\n\t"               \
      QUIRE_##R(QUIRE_LOAD, ) "jmp 2f\n\t1:\n\t" QUIRE_##R(QUIRE_CLEAR, ) ".p2align 5\n2:\n\t"                           \
      SCALES QUIRE_##R(QUIRE_BEGIN, BEGIN)            \
      "mov 8*5(%[t]), %[n]\n\ttest %[n], %[n]\n\tjz 4f\n\t"                                                       \
      "3:\n\t" QUIRE_PAIR(R, CODES) QUIRE_NEXT_PAIR(CODES) "dec %[n]\n\tjnz 3b\n\t"                                     \
      "4:\n\t" QUIRE_LAST_PAIR(R, CODES, F) QUIRE_NEXT_PAIR(CODES)                                                       \
      "add 8*6(%[t]), %[p]\n\t" QUIRE_NEXT_##BEGIN QUIRE_NEXT_FETCH "add $8, %[num]\n\tadd $8, %[num3]\n\tdec %[count]\n\tjnz 2b\n\t" \
      "mov 8*3(%[t]), %[n]\n\ttest %[n], %[n]\n\tjz 5f\n\t" QUIRE_##R(QUIRE_SCALE, )                           \
      "mov 8*4(%[t]), %[n]\n\ttest %[n], %[n]\n\tjz 5f\n\t"                                                       \
      "vmovups (%[n]), %%zmm28\n\tvmovups 64(%[n]), %%zmm29\n\t" QUIRE_##R(QUIRE_BIAS, )                                \
      "5:\n\tmov 8*1(%[t]), %[p]\n\tmov 8*2(%[t]), %[n]\n\t" QUIRE_##R(QUIRE_STORE, )                          \
      : [p] "+r"(p), [x] "+r"(x), [x3] "+r"(x3), [num] "+r"(num), [num3] "+r"(num3), [panel] "+r"(panel),                  \
        [ahead] "+r"(t.fetch.data), [fetch] "+r"(t.fetch.step), [count] "+r"(count), [n] "=&r"(n)                                                           \
      : [ldx] "r"(t.ldx), [ldn] "r"(t.ldn), [t] "r"(&h),                                            \
        [extra] "i"(offsetof(PanelNumbers, offset))                                                                       \
      : "memory", "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11",  \
        "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23",        \
        "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30", "zmm31")
#define QUIRE_TILES(CODES, BEGIN, F, SCALES) \
  if constexpr (kRows == 3) {                \
    QUIRE_TILE(3, CODES, BEGIN, F, SCALES);  \
  } else if constexpr (kRows == 4) {         \
    QUIRE_TILE(4, CODES, BEGIN, F, SCALES);  \
  } else if constexpr (kRows == 5) {         \
    QUIRE_TILE(5, CODES, BEGIN, F, SCALES);  \
  } else {                                   \
    QUIRE_TILE(6, CODES, BEGIN, F, SCALES);  \
  }

// What the assembly reads now and then, from `column` on.
struct HalfTile {
  const float* from;
  float* to;
  size_t ldto;
  const float *x_scale, *bias;
  size_t more;  // pairs of eight features before a group's last
  size_t gap;   // from the end of a group's codes to the next one's
  size_t stride;
  size_t until;    // groups before the next factors
  size_t factors;  // their bytes
  size_t fetched;  // groups that fetch what is fetched now
  const Fetch* then;
};
static_assert(sizeof(HalfTile) == 12 * 8 && offsetof(HalfTile, then) == 11 * 8);  // the assembly counts
static_assert(sizeof(Fetch) == 24 && offsetof(Fetch, step) == 8 && offsetof(Fetch, groups) == 16);

// sums += the groups' scales (and offsets) times their codes · inputs, group after group, for the 32 outputs from `column` on.
template <int kRows, TileCodes kCodes, bool kOffset>
QUIRE_INLINE void half_tile(GroupTile& t, int column) {
  constexpr bool kBytes = kCodes == TileCodes::bytes;
  const uint8_t* p = t.codes + column * 4;
  const int8_t *x = t.x, *x3 = t.x + 3 * t.ldx;
  const char *num = reinterpret_cast<const char*>(t.numbers), *num3 = num + 3 * t.ldn;
  const char* panel = kCodes == TileCodes::nibbles_half ? reinterpret_cast<const char*>(t.codes) - 64 * 2 + column * 2
                                                        : reinterpret_cast<const char*>(t.panel->scale[0] + column);
  size_t count = t.count, n;
  HalfTile h{t.from ? t.from + column : nullptr,
             t.to + column,
             t.ldto,
             t.x_scale,
             t.bias ? t.bias + column : nullptr,
             t.size / 16 - 1,
             t.stride - t.size * (kBytes ? 64 : 32),
             t.stride,
             8,
             t.factors,
             t.fetch.groups,
             t.then};
  if constexpr (kBytes && kOffset) {
    QUIRE_TILES(QUIRE_BYTES, OFFSET, QUIRE_OFFSET, QUIRE_SCALES_MORE)
  } else if constexpr (kBytes) {
    QUIRE_TILES(QUIRE_BYTES, BYTES, QUIRE_NO_OFFSET, QUIRE_SCALES)
  } else if constexpr (kCodes == TileCodes::nibbles_more) {
    QUIRE_TILES(QUIRE_MORE, MORE, QUIRE_NO_OFFSET, QUIRE_SCALES_MORE)
  } else if constexpr (kCodes == TileCodes::nibbles_half) {
    QUIRE_TILES(QUIRE_NIBBLES, NIBBLES, QUIRE_NO_OFFSET, QUIRE_SCALES_HALF)
  } else if constexpr (kOffset) {
    QUIRE_TILES(QUIRE_NIBBLES, OFFSET, QUIRE_OFFSET, QUIRE_SCALES_MORE)
  } else {
    QUIRE_TILES(QUIRE_NIBBLES, NIBBLES, QUIRE_NO_OFFSET, QUIRE_SCALES)
  }
  t.fetch.groups = h.fetched, t.then = h.then;
}

template <int kRows, TileCodes kCodes, bool kOffset>
void group_tile(GroupTile& t) {
  for (int column = 0; column < 64; column += 32) half_tile<kRows, kCodes, kOffset>(t, column);
}

#undef QUIRE_ROW
#undef QUIRE_ROW_0
#undef QUIRE_ROW_1
#undef QUIRE_ROW_2
#undef QUIRE_ROW_3
#undef QUIRE_ROW_4
#undef QUIRE_ROW_5
#undef QUIRE_BEGIN_NIBBLES
#undef QUIRE_BEGIN_OFFSET
#undef QUIRE_BEGIN_MORE
#undef QUIRE_BEGIN_BYTES
#undef QUIRE_BEGIN
#undef QUIRE_NO_OFFSET
#undef QUIRE_OFFSET
#undef QUIRE_END
#undef QUIRE_CLEAR
#undef QUIRE_LOAD
#undef QUIRE_SCALE
#undef QUIRE_BIAS
#undef QUIRE_STORE
#undef QUIRE_BEGIN_0
#undef QUIRE_END_0
#undef QUIRE_CLEAR_0
#undef QUIRE_LOAD_0
#undef QUIRE_SCALE_0
#undef QUIRE_BIAS_0
#undef QUIRE_STORE_0
#undef QUIRE_BEGIN_1
#undef QUIRE_END_1
#undef QUIRE_CLEAR_1
#undef QUIRE_LOAD_1
#undef QUIRE_SCALE_1
#undef QUIRE_BIAS_1
#undef QUIRE_STORE_1
#undef QUIRE_BEGIN_2
#undef QUIRE_END_2
#undef QUIRE_CLEAR_2
#undef QUIRE_LOAD_2
#undef QUIRE_SCALE_2
#undef QUIRE_BIAS_2
#undef QUIRE_STORE_2
#undef QUIRE_BEGIN_3
#undef QUIRE_END_3
#undef QUIRE_CLEAR_3
#undef QUIRE_LOAD_3
#undef QUIRE_SCALE_3
#undef QUIRE_BIAS_3
#undef QUIRE_STORE_3
#undef QUIRE_BEGIN_4
#undef QUIRE_END_4
#undef QUIRE_CLEAR_4
#undef QUIRE_LOAD_4
#undef QUIRE_SCALE_4
#undef QUIRE_BIAS_4
#undef QUIRE_STORE_4
#undef QUIRE_BEGIN_5
#undef QUIRE_END_5
#undef QUIRE_CLEAR_5
#undef QUIRE_LOAD_5
#undef QUIRE_SCALE_5
#undef QUIRE_BIAS_5
#undef QUIRE_STORE_5
#undef QUIRE_3
#undef QUIRE_4
#undef QUIRE_5
#undef QUIRE_6
#undef QUIRE_ROWS_3
#undef QUIRE_ROWS_4
#undef QUIRE_ROWS_5
#undef QUIRE_ROWS_6
#undef QUIRE_LAST_3
#undef QUIRE_UP_TO_3
#undef QUIRE_UP_TO_4
#undef QUIRE_LAST_4
#undef QUIRE_LAST_5
#undef QUIRE_LAST_6
#undef QUIRE_NIBBLES_LOW
#undef QUIRE_NIBBLES_HIGH
#undef QUIRE_PLUS
#undef QUIRE_MORE_LOW
#undef QUIRE_MORE_HIGH
#undef QUIRE_BYTES_LOW
#undef QUIRE_BYTES_HIGH
#undef QUIRE_NIBBLES_PAIR
#undef QUIRE_MORE_PAIR
#undef QUIRE_BYTES_PAIR
#undef QUIRE_FETCH
#undef QUIRE_THIRD_3
#undef QUIRE_THIRD_4
#undef QUIRE_THIRD_5
#undef QUIRE_THIRD_6
#undef QUIRE_LOW
#undef QUIRE_PAIR
#undef QUIRE_LAST_PAIR
#undef QUIRE_NEXT_PAIR
#undef QUIRE_SCALES
#undef QUIRE_SCALES_MORE
#undef QUIRE_SCALES_HALF
#undef QUIRE_NEXT_OFFSET
#undef QUIRE_NEXT_NIBBLES
#undef QUIRE_NEXT_MORE
#undef QUIRE_NEXT_BYTES
#undef QUIRE_NEXT_FETCH
#undef QUIRE_TILE
#undef QUIRE_TILES

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
