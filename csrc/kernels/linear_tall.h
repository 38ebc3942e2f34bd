// Linears of bf16 for some tens of rows, in tiles of their own (simd/tall_tile.h).
#pragma once

#include "kernels.h"
#include "simd/vec.h"

#if QUIRE_AVX512

namespace quire {
namespace QUIRE_ISA {

// Rows that are done in tall tiles: with fewer, blocks of k that stay in the L1 cache wait less for memory; of more,
// inputs that are read twice no longer stay in it.
constexpr int kTallFrom = 16, kTallTo = 60;
inline bool in_tall_tiles(int rows) { return rows >= kTallFrom && rows <= kTallTo; }

void linear_tall_bf16(const LinearTask& task);

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
