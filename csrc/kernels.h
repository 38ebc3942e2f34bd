// The kernels of one instruction set, as a table of plain functions over raw pointers.
//
// Callers split work into tasks; a kernel does its task on the calling thread, allocates nothing and keeps no
// state. What a kernel computes for one row never depends on the other rows of the call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ahead.h"
#include "kernels/sampling.h"
#include "kv_layout.h"
#include "paged.h"
#include "sizes.h"

namespace quire {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, i32 = 4, bf16_24 = 5 };
constexpr size_t dtype_bytes(DType t) { return t == DType::f32 || t == DType::i32 ? 4 : t == DType::i8 ? 1 : 2; }
// Of the input of a linear whose weight is t.
inline DType input_of(DType t) { return t == DType::f16 ? DType::f32 : t == DType::bf16_24 ? DType::bf16 : t; }
constexpr size_t kFourBytes = 64 * 4 + 64 / 2;  // of four features of a bf16_24 panel

// Columns (output features) of a packed panel.
//
//   f32  panel p:  [k][64]        w[p*64 + c, k] at k*64 + c
//   bf16 panel p:  [k/2][64][2]   w[p*64 + c, k] at (k/2)*128 + c*2 + k%2
//   f16  panel p:  [k/2][4][2][16]  w[p*64 + c, k] at (k/2)*128 + (c/16)*32 + k%2*16 + c%16: a cache line holds two
//                                 features of sixteen columns, each as one conversion to float32 takes them
//
//   bf16_24 panel p:  for each four features [64][2] the two of them that are not zero, and [4][2] words of 32 bits for
//                     sixteen columns each: features 0 and 1 of column c are there where bits 2c and 2c + 1 of the
//                     first are set, features 2 and 3 where those of the second are; k is a multiple of four
//
//   groups panel p:  see GroupFormat
//
// Columns past the last output feature are zero.
constexpr int kPanel = 64;
// Raise it with every change of what packing writes: a layout, a rounding, the order of parameters. Packed weights
// on disk are found by this number (tests/loader/test_packed.py holds the bytes that belong to it).
constexpr int kPackLayout = 1;
// Keys that share one softmax rescale, counted from position 0.
constexpr int kGroup = 64;
// Positions of one KV partition: softmax states are merged partition by partition, in rising order.
constexpr int kPartition = 1024;
// Query rows (queries x heads of a group) that one attention call works on at a time.
constexpr int kAttendRows = 48;
// What kernels have room for on their stacks.
constexpr int kMaxHeadDim = 512;
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 64;

// Formats of scales and offsets.
enum class GroupKind : int32_t { none = 0, u8 = 1, f16 = 2, bf16 = 3, f32 = 4, f16_u8 = 5 };

// A weight in groups of input features; what its numbers stand for is in program/formats.py. A panel is one stream:
//
//   before every eighth group, when scales are two-level: float16 factor[64], and one of the offsets
//   group g:  scale[64] · offset[64] · codes
//     8 bits: [size/4][64][4] bytes   feature 4s+j at (s*64 + c)*4 + j
//     4 bits: [size/8][64][4] bytes   features 8s+j (low nibble) and 8s+4+j of column c at byte (s*64 + c)*4 + j
//     2 bits: [size/16][64][4] bytes  features 16s+4i+j, i below 4, from bit 2i on of byte (s*64 + c)*4 + j
//     3 bits: [size/32] times the low two bits of features 32s … as above, [2][64][4], and then their third bits,
//             [64][4]: that of feature 32s+4i+j, i below 8, is bit i of byte c*4 + j
constexpr int kGroupSizes[] = {16, 32, 64, 128};
struct GroupFormat {
  int bits = 0;  // 2, 3, 4 or 8; 0: not in groups
  int size = 0;  // one of kGroupSizes; of 3 bits 32 at least
  GroupKind scales = GroupKind::none, offsets = GroupKind::none;
  bool rotated = false;  // a group's numbers were multiplied by a Hadamard matrix; `size` divides k

  static constexpr int kSuper = 8;
  static constexpr size_t kind_bytes(GroupKind k) {
    return k == GroupKind::none ? 0 : k == GroupKind::f32 ? 4 : k == GroupKind::f16 || k == GroupKind::bf16 ? 2 : 1;
  }
  bool offset() const { return offsets != GroupKind::none; }
  int groups(int k) const { return (k + size - 1) / size; }
  size_t code_bytes() const { return static_cast<size_t>(size) * kPanel * bits / 8; }
  size_t codes_at() const { return (kind_bytes(scales) + kind_bytes(offsets)) * kPanel; }
  size_t super_bytes() const { return scales == GroupKind::f16_u8 ? (offset() ? 4 : 2) * kPanel : 0; }
  // Of the first n groups and the factors before them.
  size_t block_bytes(int n) const {
    return n * (codes_at() + code_bytes()) + (n + kSuper - 1) / kSuper * super_bytes();
  }
  // From the panel's start: group g, and the factors that it shares with its neighbours.
  size_t at(int g) const { return g * (codes_at() + code_bytes()) + (g / kSuper + 1) * super_bytes(); }
  size_t super_at(int g) const { return at(g / kSuper * kSuper) - super_bytes(); }
  size_t panel_bytes(int k) const { return block_bytes(groups(k)); }
  // Scales, offsets and factors of one output.
  size_t row_number_bytes(int k) const { return (panel_bytes(k) - groups(k) * code_bytes()) / kPanel; }
};

// Rows of a linear task, at the most; a multiple of every register tile.
constexpr int kLinearRows = 120;

struct LinearTask {
  const void* x;  // [rows, k] in the weight's dtype (f16: float32), row pitch ldx elements
  size_t ldx;
  const void* w;            // packed panels
  const float* bias;        // [n] or null
  const float* x_scale;     // groups: [rows] of x
  const int32_t* x_groups;  // groups: [rows, groups, 2], see QuantizeTask
  GroupFormat groups;
  float* y;  // [rows, n], row pitch ldy
  size_t ldy;
  int rows, k, n;
  int panel_begin, panel_end;
  const void* next =
      nullptr;             // weights that the thread reads after these panels, or null: what to prefetch at their end
  Ahead* ahead = nullptr;  // what is read after the task, or null
};

// Lanes of a vector of ranks, or of output columns, of an adapter.
constexpr int kRankLanes = 16;
constexpr size_t even_ranks(int rank) { return static_cast<size_t>((rank + 1) / 2) * 2; }

// y[t] = A x[t] for up to sixteen ranks and some tokens. A unit of A is bfloat16 [2][lanes][2], pairs of its four features;
// vectors are read from each pair's first lane on, so that what is behind the lanes must be readable, and columns of y behind
// them are undefined.
struct ShrinkTask {
  const void* x;  // [tokens, k] of x_dtype, float32 or bfloat16
  DType x_dtype;
  size_t ldx;
  const int32_t* tokens;  // rows of x
  const int32_t* rows;    // those of y
  int count;
  PagedUnits a;
  int lanes;
  float* y;  // the first of sixteen columns of row 0
  size_t ldy;
  int k;
};

// y[t] += p, where p = B x[t], or p + gain (y[t] - bias + p) where there are gains; for some tokens and columns. A unit of
// B is bfloat16 [rank / 2][16 columns][2], pairs of ranks, and behind it the float32 gains of these columns.
struct ExpandTask {
  const float* x;  // [tokens, rank]
  size_t ldx;
  const int32_t* tokens;  // rows of x; the row of y is that less first_token
  int count, first_token;
  const char* b;  // neighbouring units; column 0 is the first of them
  size_t unit;
  float* y;  // column col_begin of the first row
  size_t ldy;
  int rank, col_begin, col_end;
  bool gains;
  const float* bias;  // [n], or null
};

struct PackTask {
  const void* src;  // [rows, k] row-major, `src_dtype`
  DType src_dtype;
  void* dst;  // packed panels of `dst_dtype`, zero-filled before the first part
  int rows, k;
  int row_offset;          // first output feature of this part
  int row_begin, row_end;  // rows of the part that this task packs
  GroupFormat groups;      // pack_groups rounds floats to it; symmetric only
};

// Rows of a weight in groups that come quantized, as quant.groups.GroupCodes.
struct PackCodesTask {
  const uint8_t* codes;     // [rows, k]
  const char* scales;       // [rows, groups] of the format's kinds
  const char* offsets;      // or null
  const uint16_t* factors;  // float16 [rows, ceil(groups / 8), 1 or 2], or null
  void* dst;
  GroupFormat groups;
  int rows, k;
  int row_offset, row_begin, row_end;
};

// Rows to int8, padded with zeros to whole groups. A group's numbers are scale · 2^bits · bytes with
// scale = max|x| / 127 / 2^kGroupBits of the whole row, and bits in [0, kGroupBits] the fewest that hold the group.
// A row that is not finite has the scale NaN.
constexpr int kGroupBits = 8;
constexpr int32_t kGroupOne = 0x4b400000;  // the float32 1.5 * 2^23
struct QuantizeTask {
  const float* x;  // [rows, cols]
  int8_t* out;     // [rows, pitch]
  size_t pitch;
  float* scale;  // [rows]
  int cols, row_begin, row_end;
  int group;
  bool rotated;  // groups are multiplied by a Hadamard matrix before they are rounded; whole groups only
  // [rows, groups, 2]: of each group the bits of the float32 m = 1.5 * 2^(23 + bits), and of m - 8 * 2^bits * sum of its
  // bytes. With codes between 0 and 15, int32 sums that begin there are those over codes less 8, shifted, as m plus them.
  int32_t* groups;
  float at_least;  // a magnitude that rows have elsewhere, or NaN; else 0
  float* top;      // or null: [rows], the greatest magnitude, of what is rounded
};

struct NormTask {
  float* x;             // [rows, cols], updated when delta is given
  const float* delta;   // [rows, cols] or null
  const float* weight;  // [cols] or null: out is x
  const float* bias;    // [cols] or null
  bool layer;           // take the mean off first
  void* out;            // [rows, out_pitch] of out_dtype, of which cols are filled; may be x
  DType out_dtype;
  float eps;
  int cols, row_begin, row_end;
  size_t out_pitch;
};

// Weight of q's or k's norm: null, [head_dim] (step 0) or one for every head (step head_dim).
struct HeadNorm {
  const float* weight;
  size_t step;
};

// kvquant3: what codes of keys stand for before they are rotated, and how they are.
struct KeyCodes {
  const float* books = nullptr;                // [kv heads][kv_codebook(d16)]
  const float *cos = nullptr, *sin = nullptr;  // [positions, rotary_dim/2]
  int positions = 0, rotary_dim = 0;
  bool interleaved = false;
};

// Some tokens of one row of the step, and one layer's cache of the row.
struct CacheRow {
  const int32_t* positions;    // of the step's tokens
  const int32_t* block_table;  // of this row
  void* cache;                 // this layer's part of block 0
  KVLayout kv;
  const float *k_scales, *v_scales;  // [kv heads] e4m3, e5m2: what a stored 1 stands for
  int token_begin, token_end;
  KeyCodes codes;
};

// Where the first `count` tokens of a task are written too: to a line of the block tables, whose row of the step goes up
// to position stop - 1. It is another branch of a tree of drafts, and has the rest of the tile's tokens.
struct Mirror {
  int line, count, stop;
};

// Tokens that are written to the cache.
struct CacheWrite : CacheRow {
  const Mirror* mirrors;
  int mirror_count;             // 0 but for trees of drafts
  const int32_t* block_tables;  // [lines, blocks_per_row]
  int blocks_per_row;
};

// The tokens are all that the step has of one tile.
struct RopeWriteTask : CacheWrite {
  float* qkv;  // [tokens, pitch]
  size_t pitch;
  int heads, kv_heads, head_dim, rotary_dim;
  HeadNorm q_norm, k_norm;
  const float *q_row, *k_row;  // [tokens, q_cols] and [tokens, k_cols] of all ranks' heads for whole_norm, or null
  int q_cols, k_cols;
  bool layer_norm, whole_norm, interleaved;
  float eps;
  const float* cos;  // [max_len, rotary_dim/2]
  const float* sin;
  int head_begin, head_end;  // of keys and values, with the query heads that read them; all when whole_norm
};

// Some queries of one row against some heads of keys and values; at most kAttendRows query rows, or one query and head, or
// as many as the scratch is for.
struct AttendTask : CacheRow {
  const float* qkv;  // [tokens, pitch]; the rotated q of head h at h*head_dim
  size_t pitch;
  void* out;  // [tokens, heads*head_dim]
  DType out_dtype;
  size_t out_pitch;
  int heads_per_kv;
  int head_begin, head_end;  // of keys and values
  float scale;               // above zero
  float softcap;             // c > 0: scores become c * tanh(score / c)
  const float* sinks;        // [heads] logits that count in the denominator only, or null
  const float* slopes;       // [heads] what a key loses for each position between it and the query, or null
  int window;
  int last;                            // -1: causal; else the row's last position, and a window reaches forward too
  const CacheRow* recent;              // of a kivi cache: bf16 of what the queries see from recent_begin on; else null
  int recent_begin;                    // the same for all of them
  int partition_begin, partition_end;  // positions of the KV axis, in units of kPartition
  // Null: the partitions are all that the queries see, and `out` is written. Else each partition's state is left in
  // [partition - partition_begin][query row][state_floats(d16)] for attend_merge.
  float* states;
  void* scratch;                     // attend_scratch_bytes(head_dim, heads_per_kv)
  const AttendTask* next = nullptr;  // what the thread does after this, or null: queries and keys to fetch meanwhile
  size_t* tiles_read = nullptr;      // counts the tiles of keys and values that were read; null: nobody asks

  int queries() const { return token_end - token_begin; }
  // Query rows: [kv head][query][head of its group].
  int rows() const { return (head_end - head_begin) * queries() * heads_per_kv; }
};

// Queries of one kv head that one call works on.
constexpr int queries_per_call(int heads_per_kv) {
  return kAttendRows / heads_per_kv > 0 ? kAttendRows / heads_per_kv : 1;
}
// A query row's state after a partition: unscaled output [d16], maximum score in units of log2(e), sum of exponentials.
constexpr size_t state_floats(int d16) { return static_cast<size_t>(d16) + 16; }

// Latent attention (LatentAttend in program/ops). The cache is one row a token, K tiles alone: kv_heads 1, head_dim rank +
// rope, tiles v_offset() apart. `attend` has the queries in the latent space, head h at h*rank, and no window, cap or sink;
// states are state_floats(rank rounded up to 16) a query row.
struct LatentTask {
  AttendTask attend;
  const float* q_rope;  // [tokens, q_pitch]; the rotated part of head h at h*q_head
  size_t q_pitch;
  int q_head, rank;
};

// The tokens are all that the step has of one tile.
struct LatentWriteTask : CacheWrite {
  float* q;        // [tokens, heads * (nope + rope)]: rotated in place
  float* kv_rows;  // [tokens, rank + rope]; scratch afterwards
  void* q_nope;    // [tokens, heads * nope]
  DType nope_dtype;
  const float* norm;  // [rank]
  int heads, rank, nope, rope;
  bool interleaved;
  float eps;
  const float* cos;  // [max_len, rope/2]
  const float* sin;
};

enum class Act { silu, gelu, gelu_tanh, relu, tanh, clamped_swiglu };  // gelu: by erf

struct GatedActTask {
  const float* gate_up;  // [rows, 2*width]; without `up`, [rows, width]: the gate alone
  void* out;             // [rows, width]
  DType out_dtype;
  Act act;
  int width, row_begin, row_end;
  int col_begin, col_end;
  size_t out_pitch;  // elements
  bool up;
  float alpha, limit;  // clamped swiglu: (up + 1) * gate * sigmoid(alpha * gate), gate <= limit, |up| <= limit
};

struct EmbedTask {
  const void* table;  // row-major [vocab, cols] or packed panels
  DType dtype;
  bool packed;
  const int32_t* ids;
  float* out;  // [tokens, cols]
  int cols, token_begin, token_end;
  int first, rows;  // tokens that the table has: first … first + rows - 1; those of others become 0
  GroupFormat groups;
};

// Check sums of pages of 1024 bytes, the last one padded with zeros: a page has kPageSums of 64 bits, each of which is equal
// for two pages that differ with a probability of 2^-32 over random keys.
constexpr size_t kSumPage = 1024;
constexpr int kPageWords = kSumPage / 8, kPageSums = 4, kSumKeyWords = kPageWords + 2 * (kPageSums - 1);
struct PageSumTask {
  const void* data;  // aligned to 8 bytes
  size_t bytes;
  const uint64_t* key;  // [kSumKeyWords]
  uint64_t* out;        // [pages, kPageSums]
};

// Tasks of kernels that are defined in an op's own file.
struct AddTask;
struct CompressTask;
struct EmbedSumTask;
struct PoolTask;
struct CombineTask;
struct GatherTask;
struct RouteTask;
struct ScaleTask;

// Every kernel by name: X(name, result, arguments …). The table of a set is made from this list and nothing else, so two
// kernels of one signature cannot be mixed up.
#define QUIRE_KERNELS(X)                                                                                          \
  X(linear_f32, void, const LinearTask&)                                                                          \
  X(linear_bf16, void, const LinearTask&)                                                                         \
  X(linear_f16, void, const LinearTask&)                                                                          \
  X(linear_bf16_24, void, const LinearTask&)                                                                      \
  X(linear_groups, void, const LinearTask&)                                                                       \
  X(shrink, void, const ShrinkTask&)                                                                              \
  X(expand, void, const ExpandTask&)                                                                              \
  X(pack_f32, void, const PackTask&)                                                                              \
  X(pack_bf16, void, const PackTask&)                                                                             \
  X(pack_f16, void, const PackTask&)                                                                              \
  X(pack_bf16_24, void, const PackTask&)                                                                          \
  X(pack_groups, void, const PackTask&)                                                                           \
  X(pack_codes, void, const PackCodesTask&)                                                                       \
  X(quantize, void, const QuantizeTask&)                                                                          \
  X(norm, void, const NormTask&)                                                                                  \
  X(add_rows, void, const AddTask&)                                                                               \
  X(scale_rows, void, const ScaleTask&)                                                                           \
  X(rope_write, void, const RopeWriteTask&)                                                                       \
  X(attend, void, const AttendTask&)                                                                              \
  X(attend_merge, void, const AttendTask&) /* states of all partitions -> out */                                  \
  X(compress_kv, void, const CompressTask&)                                                                       \
  X(latent_write, void, const LatentWriteTask&)                                                                   \
  X(latent_attend, void, const LatentTask&)                                                                       \
  X(latent_merge, void, const LatentTask&)                                                                        \
  X(gated_act, void, const GatedActTask&)                                                                         \
  X(route, void, const RouteTask&)                                                                                \
  X(combine, void, const CombineTask&)                                                                            \
  X(embed, void, const EmbedTask&)                                                                                \
  X(embed_groups, void, const EmbedTask&)                                                                         \
  X(gather, void, const GatherTask&)                                                                              \
  X(embed_sum, void, const EmbedSumTask&)                                                                         \
  X(pool_rows, void, const PoolTask&)                                                                             \
  X(to_f32, void, const void* src, DType dtype, float* dst, size_t n)                                             \
  X(to_bf16, void, const void* src, DType dtype, float scale, uint16_t* dst, size_t n)                            \
  X(to_f16, void, const void* src, DType dtype, uint16_t* dst, size_t n)                                          \
  /* Maxima of a row and of its blocks; optionally looks for NaN and +inf. */                                     \
  X(row_max, RowMax, const float* x, int n, bool check, float* block_max)                                         \
  /* The same from what `maxima` left of the row. */                                                              \
  X(row_max_of, RowMax, const float* maxima, int n, float* block_max)                                             \
  X(maxima, void, const MaximaTask&)                                                                              \
  /* y = x where the token's bit is set (bit i%32 of word i/32), else -inf. y may be x. */                        \
  X(mask_row, void, const float* x, const uint32_t* bits, int n, float* y)                                        \
  X(exp_row, void, const ExpTask&)                                                                                \
  /* out[j] = number of x >= pivots[j], or the sum of their weights. */                                           \
  X(measure, void, const MeasureTask&, double* out)                                                               \
  /* Copies matching values and ids in rising id order. Returns how many, or capacity + 1 when there are more. */ \
  X(collect, int, const CollectTask&)                                                                             \
  /* What bounds the times of spans; then tokens of a span, or of a list: a better one becomes the leader. */     \
  X(race_bounds, void, const Race&, const SpansTask&)                                                             \
  X(race_span, void, const Race&, const float* x, int n, int32_t span, float first, int32_t pick, Leader*)        \
  X(race_list, void, const Race&, const float* x, const int32_t* ids, int n, Leader*)                             \
  /* How many tokens come before (value, id): greater values, and equal ones with a lower id. */                  \
  X(count_before, int64_t, const RankTask&)                                                                       \
  /* Index of a NaN or infinity, or of what the format that it is kept in cannot hold; or -1. */                  \
  X(first_nonfinite, int64_t, const void* src, DType dtype, DType kept, size_t n)                                 \
  X(sum_pages, void, const PageSumTask&)                                                                          \
  /* Reads memory as fast as it can: the limit of bandwidth. */                                                   \
  X(read_sum, float, const void* src, size_t bytes)                                                               \
  /* Return the operations that they did: the limits of computing. */                                             \
  X(fma_loop, int64_t, int64_t iterations, float* sink)                                                           \
  X(bf16_loop, int64_t, int64_t iterations, float* sink)                                                          \
  X(i8_loop, int64_t, int64_t iterations, float* sink)

struct Kernels {
  const char* isa;
#define X(name, result, ...) result (*name)(__VA_ARGS__);
  QUIRE_KERNELS(X)
#undef X
};

// Bytes of scratch that one thread needs for attend; of a call of one head and more than kAttendRows rows, for so many
// in place of `heads_per_kv`.
constexpr size_t attend_scratch_bytes(int head_dim, int heads_per_kv, bool widened) {
  const size_t d16 = (static_cast<size_t>(head_dim) + 15) / 16 * 16;
  const size_t rows = heads_per_kv > kAttendRows ? static_cast<size_t>(heads_per_kv) : kAttendRows;
  // q, current and total outputs, scores, probabilities, lane sums, offsets of q, softmax states; scales of a group;
  // widened keys or values of a group; each 64-byte aligned
  const size_t wide = widened ? kGroup * d16 * 2 : 0;
  return rows * (3 * d16 * 4 + 2 * kGroup * 4 + 16 * 4 + 2 * 4 + 32) + 2 * kGroup * 4 + wide + 10 * 64;
}

// And for latent_attend: q, current and total outputs, scores, probabilities, lane sums, softmax states; 64 columns of
// a group's values.
constexpr size_t latent_scratch_bytes(int width, int rank, int heads) {
  const size_t d16 = (static_cast<size_t>(width) + 15) / 16 * 16, v16 = (static_cast<size_t>(rank) + 15) / 16 * 16;
  const size_t rows = heads > kAttendRows ? static_cast<size_t>(heads) : kAttendRows;
  return rows * (d16 * 4 + 2 * v16 * 4 + 2 * kGroup * 4 + 16 * 4 + 32) + kGroup * 64 * 4 + 8 * 64;
}

}  // namespace quire
