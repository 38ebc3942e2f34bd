#include "kernels/linear_tall.h"

#include "kernels/micro.h"
#include "simd/functions.h"
#include "simd/tall_tile.h"

#if QUIRE_AVX512

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kMostSteps = 512;            // of a block of k: 128 KiB, in the L2 cache
constexpr size_t kStepBytes = 4 * kPanel;  // of a panel
static_assert(kTallTo <= 5 * kTallRows);

template <bool kBytes>
void run_tile(int rows, const TallTile& t) {
  switch (rows) {
    case 8: return tall_tile<8, kBytes>(t);
    case 9: return tall_tile<9, kBytes>(t);
    case 10: return tall_tile<10, kBytes>(t);
    case 11: return tall_tile<11, kBytes>(t);
    default: return tall_tile<12, kBytes>(t);
  }
}

// Sums of row r of panel p to outputs.
template <bool kBytes>
QUIRE_INLINE void write_row(const LinearTask& task, int p, int r, const float* sums) {
  const size_t column = static_cast<size_t>(p) * kPanel;
  float* y = task.y + r * task.ldy + column;
  for (int c = 0; c < kPanel; c += 16) {
    const int left = task.n - p * kPanel - c;
    V16 v;
    if (kBytes) {  // x was stored with 128 added, see linear.cpp
      const V16 exact = to_float(isub(iload(sums + c), iload(task.w_offset + column + c)));
      v = mul(exact, mul(set1(task.x_scale[r]), load(task.w_scale + column + c)));
    } else {
      v = load(sums + c);
    }
    if (task.bias) v = add(v, load_n(task.bias + column + c, left));
    if (left >= 16)
      store(y + c, v);
    else if (left > 0)
      store_n(y + c, v, left);
  }
}

// The same for rows [begin, end) of `sums`, where all columns exist and there is no bias.
template <bool kBytes>
void write_whole(const LinearTask& task, int p, int begin, int end, const float* sums) {
  constexpr int kVectors = kPanel / 16;
  const size_t column = static_cast<size_t>(p) * kPanel;
  V16 scale[kVectors];
  I16 offset[kVectors];
  for (int c = 0; kBytes && c < kVectors; ++c) {
    scale[c] = load(task.w_scale + column + c * 16);
    offset[c] = iload(task.w_offset + column + c * 16);
  }
  for (int r = begin; r < end; ++r) {
    float* y = task.y + r * task.ldy + column;
    const float* sum = sums + r * kPanel;
    const V16 x_scale = kBytes ? set1(task.x_scale[r]) : zero();
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      V16 v;
      if (kBytes)
        v = mul(to_float(isub(iload(sum + c * 16), offset[c])), mul(x_scale, scale[c]));
      else
        v = load(sum + c * 16);
      store(y + c * 16, v);
    }
  }
}

// Both formats take four bytes of a row a step.
template <bool kBytes>
void linear_tall(const LinearTask& task) {
  const int k_steps = (task.k + (kBytes ? 3 : 1)) / (kBytes ? 4 : 2), cuts = (k_steps + kMostSteps - 1) / kMostSteps;
  const int block = (k_steps + cuts - 1) / cuts, tiles = (task.rows + kTallRows - 1) / kTallRows;
  alignas(64) float sums[kTallTo * kPanel];
  TallTile t;
  t.ldx = task.ldx * (kBytes ? 1 : 2);
  for (int p = task.panel_begin; p < task.panel_end; ++p) {
    if (kBytes) fetch_scales(task, p);
    const bool whole = task.n - p * kPanel >= kPanel && !task.bias;
    for (int k0 = 0; k0 < k_steps; k0 += block) {
      const char* w = static_cast<const char*>(task.w) + (static_cast<size_t>(p) * k_steps + k0) * kStepBytes;
      t.steps = static_cast<size_t>(k_steps - k0 < block ? k_steps - k0 : block);
      t.first = k0 == 0;
      const bool last = k0 + block >= k_steps;
      const char* next = last && p + 1 == task.panel_end ? static_cast<const char*>(task.next) : w + t.steps * kStepBytes;
      t.fetch = next ? kStepBytes / (2 * static_cast<size_t>(tiles)) : 0;
      t.ahead = next ? next : w;  // an address that is nowhere would cost a walk of the page tables each time
      for (int b = 0; b < tiles; ++b) {
        const int r0 = task.rows * b / tiles, rows = task.rows * (b + 1) / tiles - r0;
        t.x = static_cast<const char*>(task.x) + r0 * t.ldx + static_cast<size_t>(k0) * 4;
        for (int c = 0; c < kPanel; c += 32, t.ahead += t.fetch * t.steps) {
          t.w = w + c * 4;
          t.sums = sums + r0 * kPanel + c;
          run_tile<kBytes>(rows, t);
        }
        if (!last) continue;
        if (whole)
          write_whole<kBytes>(task, p, r0, r0 + rows, sums);
        else
          for (int r = r0; r < r0 + rows; ++r) write_row<kBytes>(task, p, r, sums + r * kPanel);
      }
    }
  }
}

}  // namespace

void linear_tall_bf16(const LinearTask& task) { linear_tall<false>(task); }
void linear_tall_i8(const LinearTask& task) { linear_tall<true>(task); }

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
