#include "attention_plan.h"

#include <algorithm>

#include "kernels.h"
#include "sizes.h"

namespace quire {

namespace {

// Bringing a key and its value from memory takes about as long as eight query rows' work on them.
constexpr int kMemoryRows = 8;
// Parts are cut until there are about this many of equal size for each thread.
constexpr int kPartsPerThread = 6;
constexpr size_t kStatesPerThread = size_t{1} << 20;  // bytes

int heads_per_kv(const AttendShape& s) { return s.heads / s.kv_heads; }
int d16(const AttendShape& s) { return static_cast<int>(align_up(s.rank ? s.rank : s.head_dim, 16)); }
size_t scratch_bytes(const AttendShape& s) {
  return s.rank ? latent_scratch_bytes(s.head_dim, s.rank, s.heads)
                : attend_scratch_bytes(s.head_dim, heads_per_kv(s), s.widened);
}
// Heads of keys and values that a call takes with so many queries.
int heads_per_call(const AttendShape& s, int queries) {
  return std::clamp(kAttendRows / (queries * heads_per_kv(s)), 1, s.kv_heads);
}
// Queries whose rows of a head fill the kernel's blocks of six rows, if a call takes a few times as many.
int whole_queries(const AttendShape& s) {
  int queries = 1;
  while (queries * heads_per_kv(s) % 6) ++queries;
  const int most = queries_per_call(heads_per_kv(s));
  return most / queries * queries * 4 >= most * 3 ? queries : 1;
}

}  // namespace

size_t attention_states(const std::vector<AttendShape>& shapes, int threads, int max_len) {
  if (threads == 1 || max_len <= kPartition) return 0;
  size_t most = 0;
  for (const AttendShape& s : shapes) {
    const size_t partitions = (static_cast<size_t>(max_len) + kPartition - 1) / kPartition;
    most = std::max(most, threads * partitions * std::max(kAttendRows, heads_per_kv(s)) * state_floats(d16(s)));
  }
  return std::min(most, kStatesPerThread * threads / sizeof(float));
}

AttentionMemory attention_memory(const std::vector<AttendShape>& shapes, int threads, int max_len) {
  AttentionMemory m{0, attention_states(shapes, threads, max_len) * sizeof(float), 0};
  for (const AttendShape& s : shapes) m.per_thread = std::max(m.per_thread, align_up(scratch_bytes(s), 4096));
  m.total = align_up(m.per_thread * threads + m.states, 4096);
  return m;
}

AttentionPlan::AttentionPlan(const AttendShape& shape, int threads, int max_tokens, size_t states)
    : shape_(shape), threads_(threads), states_(states),
      counters_(new std::atomic<int>[2 * kPartsPerThread * threads]()) {
  // With q queries a call takes at least half as many heads as it would with one, over q. Cuts at most double the
  // pieces that they are to make.
  const size_t of_query = ceil_div(shape.kv_heads, heads_per_call(shape, 1));
  parts_.reserve(static_cast<size_t>(max_tokens) * 2 * of_query + 4 * kPartsPerThread * threads);
}

void AttentionPlan::plan(int rows, const int32_t* query_start, const int32_t* positions) {
  parts_.clear();
  for (int b = 0; b < rows; ++b) add_row(b, query_start[b], query_start[b + 1], positions);
  if (threads_ > 1) split_long();
  std::sort(parts_.begin(), parts_.end(), [](const AttendPart& a, const AttendPart& b) {
    if (a.head_begin != b.head_begin) return a.head_begin < b.head_begin;
    if (a.work != b.work) return a.work > b.work;
    return a.token_begin != b.token_begin ? a.token_begin < b.token_begin : a.partition_begin < b.partition_begin;
  });
}

void AttentionPlan::add_row(int row, int begin, int end, const int32_t* positions) {
  const int last = positions[end - 1];
  if (!shape_.recent) return add_queries(row, begin, end, positions, last);
  for (int next; begin < end; begin = next) {
    next = std::min(end, begin + kRecentStretch - positions[begin] % kRecentStretch);
    add_queries(row, begin, next, positions, last);
  }
}

void AttentionPlan::add_queries(int row, int begin, int end, const int32_t* positions, int last) {
  const int whole = whole_queries(shape_), units = ceil_div(end - begin, whole);
  const int count = ceil_div(units, queries_per_call(heads_per_kv(shape_)) / whole);
  for (int i = 0; i < count; ++i) {  // of even size
    AttendPart part{};
    part.row = row;
    part.token_begin = begin + static_cast<int>(int64_t{units} * i / count) * whole;
    part.token_end = std::min(end, begin + static_cast<int>(int64_t{units} * (i + 1) / count) * whole);
    const int hi = last_key(positions[part.token_end - 1], last);
    const int lo = shape_.window ? std::max(0, positions[part.token_begin] - shape_.window + 1) : 0;
    part.whole_begin = part.partition_begin = lo / kPartition;
    part.whole_end = part.partition_end = hi / kPartition + 1;
    part.counter = -1;
    part.pieces = 1;
    const int calls = ceil_div(shape_.kv_heads, heads_per_call(shape_, part.queries()));
    for (int call = 0; call < calls; ++call) {
      part.head_begin = shape_.kv_heads * call / calls;
      part.head_end = shape_.kv_heads * (call + 1) / calls;
      const int64_t query_rows = static_cast<int64_t>(part.queries()) * heads_per_kv(shape_);
      part.work = (hi - lo + 1) * (query_rows + kMemoryRows) * part.heads();
      parts_.push_back(part);
    }
  }
}

int AttentionPlan::last_key(int position, int last) const {
  if (shape_.causal) return position;
  return shape_.window ? std::min(last, position + shape_.window - 1) : last;
}

void AttentionPlan::split_long() {
  int64_t total = 0;
  for (const AttendPart& part : parts_) total += part.work;
  const int64_t target = std::max<int64_t>(1, total / (kPartsPerThread * threads_));
  used_states_ = 0;
  used_counters_ = 0;
  const size_t count = parts_.size();
  for (size_t i = 0; i < count; ++i) {
    const AttendPart& part = parts_[i];
    if (part.work <= target) continue;
    const int pieces = static_cast<int>((part.work + target - 1) / target);
    // partitions first: heads of a block are neighbours in memory
    int cuts = std::min(pieces, part.whole_end - part.whole_begin);
    const size_t states = partition_states(part) * (part.whole_end - part.whole_begin);
    if (used_states_ + states > states_ || used_counters_ + pieces > 2 * kPartsPerThread * threads_) cuts = 1;
    split(i, cuts, std::min(ceil_div(pieces, cuts), part.heads()));
  }
}

void AttentionPlan::split(size_t index, int partition_pieces, int head_pieces) {
  const AttendPart whole = parts_[index];
  const int partitions = whole.whole_end - whole.whole_begin, pieces = partition_pieces * head_pieces;
  for (int h = 0; h < head_pieces; ++h) {
    AttendPart piece = whole;
    piece.head_begin = whole.head_begin + whole.heads() * h / head_pieces;
    piece.head_end = whole.head_begin + whole.heads() * (h + 1) / head_pieces;
    if (partition_pieces > 1) {
      piece.counter = used_counters_++;
      piece.pieces = partition_pieces;
      piece.states = used_states_;
      used_states_ += partition_states(piece) * partitions;
    }
    for (int p = 0; p < partition_pieces; ++p) {
      piece.partition_begin = whole.whole_begin + partitions * p / partition_pieces;
      piece.partition_end = whole.whole_begin + partitions * (p + 1) / partition_pieces;
      piece.work = whole.work / pieces;
      h + p == 0 ? void(parts_[index] = piece) : parts_.push_back(piece);
    }
  }
}

size_t AttentionPlan::partition_states(const AttendPart& part) const {
  return static_cast<size_t>(part.queries()) * heads_per_kv(shape_) * part.heads() * state_floats(d16(shape_));
}

bool AttentionPlan::last_of_split(const AttendPart& part) {
  std::atomic<int>& done = counters_[part.counter];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < part.pieces) return false;
  done.store(0, std::memory_order_relaxed);  // for the next op of this shape, which starts behind a barrier
  return true;
}

}  // namespace quire
