// Sampling kernels: passes over one row of logits, or over a list of candidates taken from one.
//
// A row is cut into blocks of kSampleBlock tokens. The first pass keeps every block's maximum, and later passes
// skip the blocks that cannot matter. Every operation is one correctly rounded IEEE operation (no fused multiply-add) in
// a fixed order, so that all instruction sets give the same bits for the same logits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int kSampleBlock = 512;
// e^s is exactly 0 below this s.
constexpr float kLowestExponent = -87.0f;
constexpr int kPivots = 4;
// Columns that share a maximum where logits are made (Linear in program/ops).
constexpr int kMaximaCols = 64;
constexpr int kMaximaOfBlock = kSampleBlock / kMaximaCols;

constexpr int sample_blocks(int n) { return (n + kSampleBlock - 1) / kSampleBlock; }
constexpr int maxima_of(int n) { return (n + kMaximaCols - 1) / kMaximaCols; }

struct RowMax {
  float max;    // -inf when every value is -inf; meaningless when not finite
  bool finite;  // no NaN and no +inf (-inf is allowed); true when not asked for
};

// out[r, i] = the maximum of the i-th kMaximaCols of row r, NaN when one of them is NaN or +inf.
struct MaximaTask {
  const float* x;  // [rows, n], row pitch ldx elements
  size_t ldx;
  float* out;  // [rows, maxima_of(n)], row pitch ldo
  size_t ldo;
  int rows, n;
};

struct ExpTask {
  const float* x;  // [n]
  int n;
  float max;  // at least every x, finite
  float inv_temperature;
  const float* block_max;  // or null
  float* e;                // [n] e^((x - max) / temperature), or null
  float* block_sum;        // [sample_blocks(n)] or null
};

struct MeasureTask {
  const float* x;  // [n]
  const float* e;  // [n] weights, or null to count
  int n;
  const float* block_max;  // or null
  float pivots[kPivots];
};

struct CollectTask {
  const float* x;      // [n]
  const int32_t* ids;  // [n] rising, or null: the index is the id
  int n;
  const float* block_max;  // or null
  float least, upper;      // takes least <= x < upper; least is above -inf
  int32_t tie_id;          // of the values equal to least, only ids up to this one
  int capacity;
  float* values;     // [capacity]; may be x itself
  int32_t* out_ids;  // [capacity]; may be ids itself
};

// The token ahead, and its time divided by its weight; of equal times the lowest id.
struct Leader {
  float time;
  int32_t token;
};

// A race (race.h) of the tokens of a row: those above `least`, and of those equal to it the ids up to tie_id; and of all
// these the tokens that finish behind `after`.
struct Race {
  float max, inv_temperature;
  float least;
  int32_t tie_id;
  uint32_t key0, key1, sample, position;  // see Place
  Leader after{-1.0f, -1};
};

struct SpansTask {
  const int32_t* spans;  // [n]
  const float* maxima;   // [n] of these spans
  int n;
  float* first;    // [n] the first time in a span
  int32_t* picks;  // [n] its token in the span
  float* bounds;   // [n] the first time divided by the greatest weight: no token of the span is ahead of it
};

struct RankTask {
  const float* x;  // [n]
  int n;
  const float* block_max;  // or null
  float value;
  int32_t id;
};

}  // namespace quire
