// How the attention of one step is cut into tasks.
//
// A part is a few queries of one row and as many heads of keys and values as one call of the kernel takes: what it
// reads of a block is then one stretch of memory. When few parts would leave threads idle, a part is cut again into
// ranges of its partitions of the KV axis, and into single heads. Where it is cut changes no bit: every partition has a
// softmax state of its own either way, and states are folded in rising order, by the kernel when a part covers all its
// partitions and by the last finisher when not.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

// `rank` above 0: latent attention, whose values are the first `rank` numbers of its keys. Not `causal`: the tokens of a
// row are a whole text, and each sees those behind it too, as far as a window reaches.
struct AttendShape {
  int head_dim, heads, kv_heads, window, rank = 0;
  bool causal = true;
  bool widened = false;  // its cache is widened in scratch
  bool recent = false;   // queries of different stretches see different keys in bf16 (kRecentStretch): no part has both
};

// One task: queries of one row against some heads of keys and values, over some partitions.
struct AttendPart {
  int row, token_begin, token_end;     // queries
  int head_begin, head_end;            // of keys and values
  int partition_begin, partition_end;  // of the KV axis
  int whole_begin, whole_end;          // partitions that the queries see; more than the above when split
  int counter;                         // of its split; -1 when its partitions are not split
  int pieces;                          // parts of the split
  size_t states;                       // floats before those of its first partition
  int64_t work;

  int heads() const { return head_end - head_begin; }
  int queries() const { return token_end - token_begin; }
};

class AttentionPlan {
 public:
  // `states`: floats that split parts may leave their states in.
  AttentionPlan(const AttendShape& shape, int threads, int max_tokens, size_t states);

  // Plan a step of `rows` rows; queries of row b are tokens query_start[b] … query_start[b+1]-1. Allocates nothing.
  void plan(int rows, const int32_t* query_start, const int32_t* positions);

  const AttendShape& shape() const { return shape_; }
  // By first head, so that parts which share keys and values are neighbours; then longest first.
  const std::vector<AttendPart>& parts() const { return parts_; }
  // Floats of the states of one partition of a part.
  size_t partition_states(const AttendPart& part) const;
  // Marks a part as done; true for the last part of its split.
  bool last_of_split(const AttendPart& part);

 private:
  void add_row(int row, int begin, int end, const int32_t* positions);
  // Some of the row's queries; `last` is the row's last position.
  void add_queries(int row, int begin, int end, const int32_t* positions, int last);
  int last_key(int position, int last) const;
  void split_long();
  void split(size_t index, int partition_pieces, int head_pieces);

  AttendShape shape_;
  int threads_;
  size_t states_;
  std::vector<AttendPart> parts_;
  size_t used_states_ = 0;
  int used_counters_ = 0;
  std::unique_ptr<std::atomic<int>[]> counters_;
};

// Floats for states that are worth having on `threads` threads; 0 when nothing is ever split.
size_t attention_states(const std::vector<AttendShape>& shapes, int threads, int max_len);

// Bytes that attention needs beside its inputs and outputs: scratch of every thread (`per_thread`) and states.
struct AttentionMemory {
  size_t per_thread, states, total;
};
AttentionMemory attention_memory(const std::vector<AttendShape>& shapes, int threads, int max_len);

}  // namespace quire
