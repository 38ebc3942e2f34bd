// The loops that measure what the machine can do.

#include "kernels.h"
#include "kernels/table.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

#if QUIRE_AVX512
constexpr int kLoopAccs = 16;
#else
constexpr int kLoopAccs = 6;
#endif

}  // namespace

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

}  // namespace QUIRE_ISA
}  // namespace quire
