// The running softmax of a query row over groups of keys (FlashAttention, arXiv 2205.14135) and its merging over
// partitions of the KV axis (FlashDecoding's split, at fixed cuts).
//
// Scores are in units of log2(e), so that exponentials are powers of two. The maximum of a partition is only raised
// when a score exceeds it by more than kSlack: probabilities then reach 2^kSlack instead of 1, which costs a float
// nothing, and outputs are rescaled a few times in a context instead of a few times in every thousand keys. What a row
// goes through depends on its own scores alone.
#pragma once

#include "kernels.h"
#include "kernels/put.h"
#include "simd/functions.h"

namespace quire {
namespace QUIRE_ISA {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kSlack = 8.0f;
constexpr int kGroupVectors = kGroup / 16;

// One query row's place and softmax state. Beside it lie, of `d16` floats each, its unscaled output in the current
// partition and in the merged ones, and sixteen lanes of the current partition's sum.
struct SoftmaxRow {
  int lo, hi;            // keys it sees: lo <= key <= hi
  float max, sum_total;  // of merged partitions
  float part_max;        // of the current partition, up to kSlack
  float factor;          // what its scores are multiplied by
  float slope;           // added to a score for each position between its key and `position`; 0: nothing
  int position;
  float p_scale;  // i8: what a step of the current group's probabilities is worth

  bool sees(int group) const { return hi >= group && lo < group + kGroup; }
};

QUIRE_INLINE void clear(float* p, int n) {
  for (int c = 0; c < n; c += 16) store(p + c, zero());
}

// The group's first N vectors with `other` in place of keys that the row does not see.
template <int N>
QUIRE_INLINE void mask_group(const SoftmaxRow& row, int group, V16 other, V16* x) {
  if (row.hi < group + 16 * N - 1)
    for (int c = 0; c < N; ++c) x[c] = first_n(row.hi - group - c * 16 + 1, x[c], other);
  if (row.lo > group)
    for (int c = 0; c < N; ++c) x[c] = first_n(row.lo - group - c * 16, other, x[c]);
}

// The largest lanes of N vectors, and their sum: the same whether vectors that are left out are -infinity and 0 or not
// there.
template <int N>
QUIRE_INLINE V16 largest_of(const V16* x) {
  if constexpr (N == 1)
    return x[0];
  else if constexpr (N == 2)
    return vmax(x[0], x[1]);
  else
    return vmax(vmax(x[0], x[1]), N == 3 ? x[2] : vmax(x[2], x[3]));
}
template <int N>
QUIRE_INLINE V16 sum_of(const V16* x) {
  if constexpr (N == 1)
    return x[0];
  else if constexpr (N == 2)
    return add(x[0], x[1]);
  else
    return add(add(x[0], x[1]), N == 3 ? x[2] : add(x[2], x[3]));
}

// A partition begins: nothing has been seen in it. Its output is the caller's to start.
QUIRE_INLINE void start_partition(SoftmaxRow& row, float* lane_sum) {
  row.part_max = -INFINITY;
  clear(lane_sum, 16);
}

// Make `seen` the partition's maximum.
static __attribute__((noinline)) void raise_maximum(SoftmaxRow& row, float seen, float* lane_sum, float* acc, int d16) {
  if (row.part_max > -INFINITY) {
    const V16 shrink = exp2(set1(row.part_max - seen));
    store(lane_sum, mul(load(lane_sum), shrink));
    for (int c = 0; c < d16; c += 16) store(acc + c, mul(load(acc + c), shrink));
  }
  row.part_max = seen;
}

// Scores in units of log2(e) from those of a group's first N vectors, with a bias for each key's distance.
template <int N>
QUIRE_INLINE void bias_group(const SoftmaxRow& row, int group, V16 factor, V16* x) {
  alignas(64) static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const V16 slope = set1(row.slope), lanes = load(kLanes);
  for (int c = 0; c < N; ++c) {
    const V16 ahead = add(lanes, set1(static_cast<float>(group + c * 16 - row.position)));
    x[c] = fma(x[c], factor, mul(slope, vmax(ahead, sub(zero(), ahead))));
  }
}

// Scores of the first N * 16 keys of a group -> probabilities, in place; the row sees none of the others. `lane_sum` [16]
// is the partition's sum of probabilities, `acc` [d16] its output so far.
template <int N = kGroupVectors>
QUIRE_INLINE void softmax_group(SoftmaxRow& row, int group, float softcap, float* lane_sum, float* acc, int d16,
                                V16* x) {
  V16 factor = set1(row.factor);
  if (softcap > 0.0f) {
    const V16 cap = set1(softcap), inner = div(factor, set1(kLog2e * softcap));
    for (int c = 0; c < N; ++c) x[c] = mul(cap, tanh16(mul(x[c], inner)));
    factor = set1(kLog2e);
  }
  if (row.slope != 0.0f) {
    bias_group<N>(row, group, factor, x);
    factor = set1(1.0f);
  }
  mask_group<N>(row, group, set1(-INFINITY), x);
  const V16 top = mul(largest_of<N>(x), factor);
  if (mask_gt(top, set1(row.part_max + kSlack))) raise_maximum(row, reduce_max(top), lane_sum, acc, d16);
  const V16 minus = set1(-row.part_max);
  for (int c = 0; c < N; ++c) x[c] = exp2(fma(x[c], factor, minus));
  store(lane_sum, add(load(lane_sum), sum_of<N>(x)));
}

// Fold a partition's state into what came before it.
QUIRE_INLINE void fold(SoftmaxRow& row, float* total, const float* acc, float part_max, float part_sum, int d16) {
  if (!(row.max > -INFINITY)) {  // nothing came before
    row.max = part_max;
    row.sum_total = part_sum;
    for (int c = 0; c < d16; c += 16) store(total + c, load(acc + c));
    return;
  }
  if (!(part_max > -INFINITY) && part_sum == 0.0f) return;
  const float max = part_max > row.max ? part_max : row.max;
  float scale[16];
  store(scale, exp2(first_n(1, set1(row.max - max), set1(part_max - max))));
  const V16 old_scale = set1(scale[0]), new_scale = set1(scale[1]);
  row.sum_total = row.sum_total * scale[0] + part_sum * scale[1];
  row.max = max;
  for (int c = 0; c < d16; c += 16)
    store(total + c, add(mul(load(total + c), old_scale), mul(load(acc + c), new_scale)));
}

// The end of a partition: its state is folded, or left in `state` for later. See state_floats.
QUIRE_INLINE void end_partition(SoftmaxRow& row, const float* lane_sum, const float* acc, float* total, int d16,
                                float* state) {
  const float sum = reduce_add(load(lane_sum));
  if (state) {
    for (int c = 0; c < d16; c += 16) store(state + c, load(acc + c));
    state[d16] = row.part_max;
    state[d16 + 1] = sum;
  } else {
    fold(row, total, acc, row.part_max, sum, d16);
  }
}

// A row's merged output, `width` numbers of a head of a token.
QUIRE_INLINE void write_row(const AttendTask& t, int width, int token, int head, const float* total, float sum) {
  const V16 inverse = set1(1.0f / sum);
  const size_t at = static_cast<size_t>(token) * t.out_pitch + static_cast<size_t>(head) * width;
  for (int c = 0; c < width; c += 16) {
    // adding zero makes a negative zero positive, whatever tiles of probability zero were added
    put(t.out, t.out_dtype, at + c, add(mul(load(total + c), inverse), zero()), width - c);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
