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

void run_tile(int rows, const TallTile& t) {
  switch (rows) {
    case 8: return tall_tile<8>(t);
    case 9: return tall_tile<9>(t);
    case 10: return tall_tile<10>(t);
    case 11: return tall_tile<11>(t);
    default: return tall_tile<12>(t);
  }
}

// Sums of row r of panel p to outputs.
QUIRE_INLINE void write_row(const LinearTask& task, int p, int r, const float* sums) {
  const size_t column = static_cast<size_t>(p) * kPanel;
  float* y = task.y + r * task.ldy + column;
  for (int c = 0; c < kPanel; c += 16) {
    const int left = task.n - p * kPanel - c;
    V16 v = load(sums + c);
    if (task.bias) v = add(v, load_n(task.bias + column + c, left));
    if (left >= 16)
      store(y + c, v);
    else if (left > 0)
      store_n(y + c, v, left);
  }
}

// The same for rows [begin, end) of `sums`, where all columns exist and there is no bias.
void write_whole(const LinearTask& task, int p, int begin, int end, const float* sums) {
  for (int r = begin; r < end; ++r) {
    float* y = task.y + r * task.ldy + static_cast<size_t>(p) * kPanel;
    for (int c = 0; c < kPanel; c += 16) store(y + c, load(sums + r * kPanel + c));
  }
}

}  // namespace

void linear_tall_bf16(const LinearTask& task) {
  const int k_steps = (task.k + 1) / 2, cuts = (k_steps + kMostSteps - 1) / kMostSteps;
  const int block = (k_steps + cuts - 1) / cuts, tiles = (task.rows + kTallRows - 1) / kTallRows;
  alignas(64) float sums[kTallTo * kPanel];
  const size_t panels = static_cast<size_t>(task.panel_end - task.panel_begin);
  const size_t share = task.ahead ? task.ahead->share(panels * cuts * tiles * 2) : 0;
  TallTile t;
  t.ldx = task.ldx * sizeof(uint16_t);
  for (int p = task.panel_begin; p < task.panel_end; ++p) {
    const bool whole = task.n - p * kPanel >= kPanel && !task.bias;
    for (int k0 = 0; k0 < k_steps; k0 += block) {
      const char* w = static_cast<const char*>(task.w) + (static_cast<size_t>(p) * k_steps + k0) * kStepBytes;
      t.steps = static_cast<size_t>(k_steps - k0 < block ? k_steps - k0 : block);
      t.first = k0 == 0;
      const bool last = k0 + block >= k_steps;
      const char* next = last && p + 1 == task.panel_end ? static_cast<const char*>(task.next)
                                                         : w + t.steps * kStepBytes;
      t.fetch = next ? kStepBytes / (2 * static_cast<size_t>(tiles)) : 0;
      t.ahead = next ? next : w;  // an address that is nowhere would cost a walk of the page tables each time
      for (int b = 0; b < tiles; ++b) {
        const int r0 = task.rows * b / tiles, rows = task.rows * (b + 1) / tiles - r0;
        t.x = static_cast<const char*>(task.x) + r0 * t.ldx + static_cast<size_t>(k0) * 4;
        for (int c = 0; c < kPanel; c += 32, t.ahead += t.fetch * t.steps) {
          t.w = w + c * 4;
          t.sums = sums + r0 * kPanel + c;
          if (share) task.ahead->fetch(share);
          run_tile(rows, t);
        }
        if (!last) continue;
        if (whole)
          write_whole(task, p, r0, r0 + rows, sums);
        else
          for (int r = r0; r < r0 + rows; ++r) write_row(task, p, r, sums + r * kPanel);
      }
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
