// What attention kernels share: a query row's running softmax (FlashAttention, arXiv 2205.14135) with a state of its own
// in each partition of the KV axis, and merging of states in rising order.
#pragma once

#include "kernels.h"
#include "simd/vec.h"

namespace quire {
namespace QUIRE_ISA {

// One query row's place and softmax state. Beside it lie, of `d16` floats each, its unscaled output in the current
// partition and in the merged ones, and sixteen lanes of the current partition's sum.
struct SoftmaxRow {
  int lo, hi;            // keys it sees: lo <= key <= hi
  float max, sum_total;  // of merged partitions
  float part_max;        // of the current partition
};

QUIRE_INLINE void clear(float* p, int n) {
  for (int c = 0; c < n; c += 16) store(p + c, zero());
}

// A partition begins: nothing has been seen in it.
QUIRE_INLINE void start_partition(SoftmaxRow& row, float* lane_sum, float* acc, int d16) {
  row.part_max = -INFINITY;
  clear(lane_sum, 16);
  clear(acc, d16);
}

// Scores up to `seen` come: what was summed so far shrinks when they are larger than any before.
QUIRE_INLINE void grow_row(SoftmaxRow& row, float seen, float* lane_sum, float* acc, int d16) {
  if (!(seen > row.part_max)) return;
  const V16 shrink = exp(sub(set1(row.part_max), set1(seen)));  // e^-inf = 0 at the first group
  row.part_max = seen;
  store(lane_sum, mul(load(lane_sum), shrink));
  for (int c = 0; c < d16; c += 16) store(acc + c, mul(load(acc + c), shrink));
}

// Fold a partition's state into what came before it.
QUIRE_INLINE void fold(SoftmaxRow& row, float* total, const float* acc, float part_max, float part_sum, int d16) {
  if (!(part_max > -INFINITY)) return;
  const float max = part_max > row.max ? part_max : row.max;
  float scale[16];
  store(scale, exp(first_n(1, set1(row.max - max), set1(part_max - max))));
  const V16 old_scale = set1(scale[0]), new_scale = set1(scale[1]);
  row.sum_total = row.sum_total * scale[0] + part_sum * scale[1];
  row.max = max;
  for (int c = 0; c < d16; c += 16)
    store(total + c, add(mul(load(total + c), old_scale), mul(load(acc + c), new_scale)));
}

// The end of a partition: its state is folded, or left in `state` for later. See state_floats.
QUIRE_INLINE void end_partition(SoftmaxRow& row, float* lane_sum, float* acc, float* total, int d16, float* state) {
  const float sum = reduce_add(load(lane_sum));
  if (state) {
    for (int c = 0; c < d16; c += 16) store(state + c, load(acc + c));
    state[d16] = row.part_max;
    state[d16 + 1] = sum;
  } else {
    fold(row, total, acc, row.part_max, sum, d16);
  }
  start_partition(row, lane_sum, acc, d16);
}

// A row's merged output, `width` numbers of a head of a token.
QUIRE_INLINE void write_row(const AttendTask& t, int width, int token, int head, const float* total, float sum) {
  const V16 inverse = set1(1.0f / sum);
  const size_t at = static_cast<size_t>(token) * t.out_pitch + static_cast<size_t>(head) * width;
  for (int c = 0; c < width; c += 16) {
    // adding zero makes a negative zero positive, whatever tiles of probability zero were added
    const V16 v = add(mul(load(total + c), inverse), zero());
    const int n = width - c;
    if (t.out_dtype == DType::f32) {
      float* out = static_cast<float*>(t.out) + at + c;
      n >= 16 ? store(out, v) : store_n(out, v, n);
    } else {
      uint16_t* out = static_cast<uint16_t*>(t.out) + at + c;
      n >= 16 ? store_bf16(out, v) : store_bf16_n(out, v, n);
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
