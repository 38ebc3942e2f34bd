#include "attention_plan.h"

#include <algorithm>

#include "arena.h"
#include "kernels.h"

namespace quire {

namespace {

// Bringing a key and its value from memory takes about as long as eight query rows' work on them.
constexpr int kMemoryRows = 8;
// A part is split when it is more than 1 / (kLong * threads) of a step's work, into half of that.
constexpr int kLong = 2;
constexpr size_t kStatesPerThread = size_t{1} << 20;  // bytes

int heads_per_kv(const AttendShape& s) { return s.heads / s.kv_heads; }
int d16(const AttendShape& s) { return static_cast<int>(align_up(s.rank ? s.rank : s.head_dim, 16)); }
size_t scratch_bytes(const AttendShape& s) {
  return s.rank ? latent_scratch_bytes(s.head_dim, s.rank, s.heads) : attend_scratch_bytes(s.head_dim, heads_per_kv(s));
}
size_t floats_of_rows(const AttendShape& s, int queries) {
  return static_cast<size_t>(queries) * heads_per_kv(s) * state_floats(d16(s));
}

}  // namespace

size_t attention_states(const std::vector<AttendShape>& shapes, int threads, int max_len) {
  if (threads == 1 || max_len <= kPartition) return 0;
  size_t most = 0;
  for (const AttendShape& s : shapes) {
    const size_t partitions = (static_cast<size_t>(max_len) + kPartition - 1) / kPartition;
    most = std::max(most, kLong * threads * partitions * floats_of_rows(s, queries_per_call(heads_per_kv(s))));
  }
  return std::min(most, kStatesPerThread * threads / sizeof(float));
}

AttentionMemory attention_memory(const std::vector<AttendShape>& shapes, int threads, int max_len) {
  AttentionMemory m{0, attention_states(shapes, threads, max_len) * sizeof(float), 0};
  for (const AttendShape& s : shapes)
    m.per_thread = std::max(m.per_thread, align_up(scratch_bytes(s), 4096));
  m.total = align_up(m.per_thread * threads + m.states, 4096);
  return m;
}

AttentionPlan::AttentionPlan(const AttendShape& shape, int threads, int max_tokens, size_t states)
    : shape_(shape), threads_(threads), states_(states), counters_(new std::atomic<int>[kLong * threads]()) {
  // A part holds at least one query, and splits make at most 2 * kLong parts a thread and one more for each.
  parts_.reserve(static_cast<size_t>(max_tokens) + 3 * kLong * threads);
}

void AttentionPlan::plan(int rows, const int32_t* query_start, const int32_t* positions) {
  parts_.clear();
  for (int b = 0; b < rows; ++b) add_row(b, query_start[b], query_start[b + 1], positions);
  if (states_) split_long();
  std::sort(parts_.begin(), parts_.end(), [](const AttendPart& a, const AttendPart& b) {
    if (a.work != b.work) return a.work > b.work;
    return a.token_begin != b.token_begin ? a.token_begin < b.token_begin : a.partition_begin < b.partition_begin;
  });
}

void AttentionPlan::add_row(int row, int begin, int end, const int32_t* positions) {
  const int per_call = queries_per_call(heads_per_kv(shape_));
  const int count = (end - begin + per_call - 1) / per_call;
  for (int i = 0; i < count; ++i) {  // of even size
    const int first = begin + static_cast<int>(static_cast<int64_t>(end - begin) * i / count);
    const int stop = begin + static_cast<int>(static_cast<int64_t>(end - begin) * (i + 1) / count);
    const int lo = shape_.window ? std::max(0, positions[first] - shape_.window + 1) : 0, hi = positions[stop - 1];
    const int from = lo / kPartition, to = hi / kPartition + 1;
    const int64_t rows = static_cast<int64_t>(stop - first) * heads_per_kv(shape_);
    parts_.push_back({row, first, stop, from, to, from, to, -1, 1, 0, (hi - lo + 1) * (rows + kMemoryRows)});
  }
}

void AttentionPlan::split_long() {
  int64_t total = 0;
  for (const AttendPart& part : parts_) total += part.work * shape_.kv_heads;
  const int64_t target = std::max<int64_t>(1, total / (2 * kLong * threads_));
  size_t used = 0;
  int counters = 0;
  const size_t count = parts_.size();
  for (size_t i = 0; i < count; ++i) {
    const AttendPart whole = parts_[i];
    const int partitions = whole.partition_end - whole.partition_begin;
    const int pieces = static_cast<int>(std::min<int64_t>(partitions, (whole.work + target - 1) / target));
    const size_t states = head_states(whole) * shape_.kv_heads;
    if (pieces < 2 || whole.work <= 2 * target || used + states > states_ ||
        counters + shape_.kv_heads > kLong * threads_)
      continue;
    for (int p = 0; p < pieces; ++p) {
      AttendPart piece = whole;
      piece.partition_begin = whole.whole_begin + partitions * p / pieces;
      piece.partition_end = whole.whole_begin + partitions * (p + 1) / pieces;
      piece.first_counter = counters;
      piece.pieces = pieces;
      piece.states = used;
      piece.work = whole.work * (piece.partition_end - piece.partition_begin) / partitions;
      p == 0 ? void(parts_[i] = piece) : parts_.push_back(piece);
    }
    used += states;
    counters += shape_.kv_heads;
  }
}

size_t AttentionPlan::head_states(const AttendPart& part) const {
  return (part.whole_end - part.whole_begin) * floats_of_rows(shape_, part.token_end - part.token_begin);
}

bool AttentionPlan::last_of_split(const AttendPart& part, int kv_head) {
  std::atomic<int>& done = counters_[part.first_counter + kv_head];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < part.pieces) return false;
  done.store(0, std::memory_order_relaxed);  // for the next op of this shape, which starts behind a barrier
  return true;
}

}  // namespace quire
