// What the ops of a program share: memory that is planned once, and the step that runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "adapter_pool.h"
#include "arena.h"
#include "attention.h"
#include "expert_places.h"
#include "expert_plan.h"
#include "group.h"
#include "kernels.h"
#include "rounding.h"
#include "sizes.h"
#include "weights.h"

namespace quire {

// Sizes of bind(); a step never exceeds them.
struct Limits {
  int max_tokens = 0, max_rows = 0, max_logit_rows = 0, max_len = 0, num_blocks = 0, block_size = 0;
  int branches = 0, branch_blocks = 0;  // rows and blocks beyond these, for trees of drafts
  int max_loras = 0;                    // slots for adapters
  int adapter_pages = 0;                // of all of them
  int lines() const { return max_rows + branches; }
  int blocks() const { return num_blocks + branch_blocks; }
  int blocks_per_row() const { return (max_len + block_size - 1) / block_size; }
};

// Addresses of the caller's int32 arrays; they outlive the executor.
struct StepPointers {
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* query_start = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* logit_rows = nullptr;
  const int32_t* adapters = nullptr;  // slot of the adapter of each line, -1 for none
  // [n, 4]: tokens [begin, end) of a row are written to `line` too, whose row goes up to position stop - 1. An entry that
  // ends at 0 is none.
  const int32_t* mirrors = nullptr;
  std::vector<const int32_t*> block_tables;  // per cache group [lines, blocks_per_row]
};

// An activation. Int8 rows are in groups: see QuantizeTask.
struct Buffer {
  int cols, pitch;  // pitch: columns from one row to the next
  DType dtype;
  size_t offset, scales_at, numbers_at;  // in the arena; int8 rows have scales, and their groups numbers
  int group;
  bool rotated, logits;  // logits: its rows are those whose logits are wanted, else tokens
  int per;               // rows for each of them
  bool shared;           // of the tokens of all replicas that share experts
  const Arena* arena = nullptr;

  char* data() const { return arena->data() + offset; }
  float* f32() const { return reinterpret_cast<float*>(data()); }
  int32_t* i32() const { return reinterpret_cast<int32_t*>(data()); }
  float* f32_row(int row) const { return f32() + static_cast<size_t>(row) * cols; }
  int groups() const { return pitch / group; }
  float* row_scales() const { return reinterpret_cast<float*>(arena->data() + scales_at); }
  int32_t* group_numbers() const { return reinterpret_cast<int32_t*>(arena->data() + numbers_at); }
  // Whether rows of the other are of the same format.
  bool same_format(const Buffer& b) const {
    return cols == b.cols && dtype == b.dtype && group == b.group && rotated == b.rotated;
  }
};

struct Rope {
  std::vector<float> cos, sin;
  int half = 0;
  bool interleaved = false;
};

// A layer's cache: which group's block table, and where it starts inside a block (bytes). Scales and books are those of
// CacheRow; in kvquant3 `rope` rotates keys that are read, -1 for none.
struct KVLayer {
  int group, kv_heads, head_dim;
  size_t offset;
  KVType type;
  std::vector<float> k_scales, v_scales, books = {};
  int rope = -1;
};

// The step's tokens of one row and one tile of the cache.
struct TilePiece {
  int row, begin, end;
  int mirror_begin = 0, mirror_end = 0;
};

struct Context {
  Context(const Kernels& kernels, ThreadPool& pool)
      : kernels(kernels), threads(pool.threads()), weights(kernels, pool), adapters(kernels) {}

  const Kernels& kernels;
  const int threads;
  Weights weights;
  AdapterPool adapters;
  std::deque<Buffer> buffers;  // addresses stay
  std::unordered_map<std::string, const Buffer*> buffer_names;
  std::deque<Rope> ropes;
  std::deque<KVLayer> kv_layers;
  std::deque<ExpertPlaces> expert_places;  // of each router of the program; addresses stay

  // Ranks that run the program together, this one's number, and what they meet in; `apart` once they did not.
  int ranks = 1, rank = 0;
  Group* group = nullptr;
  std::atomic<bool> apart{false};

  // The same of the ranks of all replicas that share experts, and this one's place for rows that it shows them.
  int sharers = 1, sharer = 0;
  Group* share = nullptr;
  char* shown = nullptr;

  // From bind() on.
  Limits limits;
  StepPointers step;
  Arena activations, kv;
  size_t block_bytes = 0;

  // Ops register what they need of these in their constructors; bind() allocates it.
  Attention attention;
  ExpertPlan experts;
  RoundedRows rounded;

  // Of the step that runs.
  int tokens = 0, rows = 0, logit_rows = 0;
  int shared_tokens = 0, first_shared = 0;  // of all replicas that share experts; where those of this one begin
  std::vector<TilePiece> pieces;
  std::vector<Mirror> mirrors;  // of pieces

  int rows_of(const Buffer& b) const { return (b.logits ? logit_rows : b.shared ? shared_tokens : tokens) * b.per; }
  // Rows of a task of an op by rows: a few, but all threads get some.
  int rows_of_task(int rows) const;
  // Tokens [begin, end) of a row of the step, and a layer's cache of the row.
  CacheRow cache_row(const KVLayer& layer, int row, int begin, int end) const;
  // The cache of a line of the block tables, without tokens.
  CacheRow cache_line(const KVLayer& layer, int line) const;
  // The same of a piece, to be written.
  CacheWrite cache_write(const KVLayer& layer, const TilePiece& piece) const;
  // Cuts the step's tokens into pieces, and its attention into parts; the end of the cache's bytes that it uses.
  size_t plan_step();

 private:
  void plan_mirrors();
  KVLayout layout(const KVLayer& layer) const;
  KeyCodes key_codes(const KVLayer& layer) const;
  const int32_t* block_table(int group, int row) const { return table_line(group, step.slots[row]); }
  const int32_t* table_line(int group, int line) const {
    return step.block_tables[group] + line * static_cast<size_t>(limits.blocks_per_row());
  }
};

}  // namespace quire
