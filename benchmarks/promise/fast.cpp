// Linear layers and attention of a step, by Quire's kernels and with sums cut freely. Not a part of Quire: promise.py builds
// it for the instruction set at hand, once for each length of a partition of the KV axis (QUIRE_PARTITION).

#include "kernels/sampling.h"
#define kPartition kShippedPartition
#include "kernels.h"
#undef kPartition
namespace quire {
constexpr int kPartition = QUIRE_PARTITION;
}

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "attention_plan.cpp"
#include "kernels/attention.cpp"
#include "kernels/linear.cpp"
#include "pool.cpp"
#include "processors.cpp"

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Panels as Quire packs them ("split": each half of k packed by itself), or rows of features ("dot").
struct Weight {
  const char* data;
  int k, n;
};

enum Way { kFixed = 0, kSplit = 1, kSums = 2, kDot = 3 };

struct Linears {
  Way way;
  DType dtype;
  int rows, threads;
  const Weight* weights;
  int count;
  const char* x;  // [rows][ldx]
  size_t ldx;
  float *y, *part;  // [rows][widest output]; `part` is the second half of a split k

  size_t element() const { return dtype_bytes(dtype); }
  // A product over `k` features from `from` on, of panels [begin, end), into `out`.
  void product(const Weight& w, const char* data, int from, int k, int begin, int end, int row, int rows_, float* out,
               const void* next) const {
    LinearTask t{};
    t.ldx = ldx;
    t.x = x + (static_cast<size_t>(row) * ldx + from) * element();
    t.w = data;
    t.rows = rows_;
    t.k = k;
    t.n = w.n;
    t.ldy = static_cast<size_t>(w.n);
    t.y = out + static_cast<size_t>(row) * w.n;
    t.panel_begin = begin;
    t.panel_end = end;
    t.next = next;
    dtype == DType::f32 ? QUIRE_ISA::linear_f32(t) : QUIRE_ISA::linear_bf16(t);
  }
};

// One row, one panel, two sums an output: features of even and of odd steps.
template <class T>
void two_sums(const typename T::in* x, const typename T::elem* w, float* y, int steps) {
  using namespace QUIRE_ISA;
  constexpr size_t stride = static_cast<size_t>(kPanel) * T::step;
  for (int half = 0; half < 2; ++half) {
    V16 a[2] = {zero(), zero()}, b[2] = {zero(), zero()};
    const typename T::elem* p = w + half * 32 * T::step;
    for (int s = 0; s + 1 < steps; s += 2) {
      for (int c = 0; c < 2; ++c) {
        prefetch(p + 32 * stride + c * 16 * T::step);
        prefetch(p + 33 * stride + c * 16 * T::step);
        a[c] = T::mac(a[c], x + s * T::step, p + c * 16 * T::step);
        b[c] = T::mac(b[c], x + (s + 1) * T::step, p + stride + c * 16 * T::step);
      }
      p += 2 * stride;
    }
    for (int c = 0; c < 2; ++c) store(y + half * 32 + c * 16, add(a[c], b[c]));
  }
}

// One row times rows of features: four running sums of sixteen lanes each, added up at the end.
template <bool kHalf>
void dots(const float* x, const char* w, float* y, int k, int begin, int end) {
  using namespace QUIRE_ISA;
  const size_t element = kHalf ? 2 : 4;
  for (int o = begin; o < end; ++o) {
    const char* row = w + static_cast<size_t>(o) * k * element;
    V16 sum[4] = {zero(), zero(), zero(), zero()};
    for (int i = 0; i < k; i += 64)
      for (int c = 0; c < 4; ++c) {
        const char* at = row + (i + c * 16) * element;
        prefetch(at + 2048);
        const V16 v = kHalf ? load_bf16(reinterpret_cast<const uint16_t*>(at)) : load(reinterpret_cast<const float*>(at));
        sum[c] = fma(load(x + i + c * 16), v, sum[c]);
      }
    y[o] = reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  }
}

int panels_of(const Weight& w) { return (w.n + kPanel - 1) / kPanel; }

// A task of a phase of one linear; threads meet between phases.
void run_linear(const Linears& l, int number, int task, int phase, int tasks, int thread) {
  const Weight& w = l.weights[number];
  const int panels = panels_of(w);
  const size_t panel_bytes = static_cast<size_t>(w.k) * kPanel * l.element();
  if (l.way == kFixed) {
    const int row_tasks = ceil_div(l.rows, kLinearRows), panel_tasks = tasks / row_tasks;
    const int per = ceil_div(panels, panel_tasks), at = task / row_tasks * per, end = std::min(panels, at + per);
    const int r = task % row_tasks, begin = static_cast<int>(int64_t{l.rows} * r / row_tasks);
    const int stop = static_cast<int>(int64_t{l.rows} * (r + 1) / row_tasks);
    const void* next = end < panels ? w.data + end * panel_bytes : nullptr;
    if (r + 1 < row_tasks) next = nullptr;
    else if (task + 1 == Tasks::first(tasks, thread + 1, l.threads) && number + 1 < l.count)
      next = l.weights[number + 1].data;
    l.product(w, w.data, 0, w.k, at, end, begin, stop - begin, l.y, next);
  } else if (l.way == kSplit && phase == 0) {
    const int half = task * 2 / tasks, in_half = tasks / 2, per = ceil_div(panels, in_half);
    const int at = task % in_half * per, end = std::min(panels, at + per);
    const char* data = w.data + half * (panels * panel_bytes / 2);
    for (int row = 0; row < l.rows; row += kLinearRows)
      l.product(w, data, half * w.k / 2, w.k / 2, at, end, row, std::min(kLinearRows, l.rows - row), half ? l.part : l.y,
                end < panels && row + kLinearRows >= l.rows ? data + end * (panel_bytes / 2) : nullptr);
  } else if (l.way == kSplit) {
    using namespace QUIRE_ISA;
    const size_t all = static_cast<size_t>(l.rows) * w.n / 16;
    for (size_t i = all * task / tasks; i < all * (task + 1) / tasks; ++i)
      store(l.y + i * 16, add(load(l.y + i * 16), load(l.part + i * 16)));
  } else if (l.way == kSums) {
    const int per = ceil_div(panels, tasks), end = std::min(panels, (task + 1) * per);
    for (int p = task * per; p < end; ++p) {
      const char* data = w.data + p * panel_bytes;
      if (l.dtype == DType::f32)
        two_sums<QUIRE_ISA::F32>(reinterpret_cast<const float*>(l.x), reinterpret_cast<const float*>(data),
                                 l.y + p * kPanel, w.k);
      else
        two_sums<QUIRE_ISA::BF16>(reinterpret_cast<const uint16_t*>(l.x), reinterpret_cast<const uint16_t*>(data),
                                  l.y + p * kPanel, w.k / 2);
    }
  } else {
    const int begin = static_cast<int>(int64_t{w.n} * task / tasks), end = static_cast<int>(int64_t{w.n} * (task + 1) / tasks);
    const float* x = reinterpret_cast<const float*>(l.x);
    l.dtype == DType::f32 ? dots<false>(x, w.data, l.y, w.k, begin, end) : dots<true>(x, w.data, l.y, w.k, begin, end);
  }
}

int tasks_of(const Linears& l, int number, int phase) {
  const Weight& w = l.weights[number];
  const size_t panel_bytes = static_cast<size_t>(w.k) * kPanel * l.element() / (l.way == kSplit ? 2 : 1);
  const int per = static_cast<int>(std::max<size_t>(1, (64 << 10) / panel_bytes)), tasks = ceil_div(panels_of(w), per);
  if (l.way == kFixed) return tasks * ceil_div(l.rows, kLinearRows);
  if (l.way == kSplit) return phase == 0 ? 2 * tasks : l.threads;
  return tasks;
}

struct Attended {
  AttentionPlan* plan;
  AttendTask task;  // what all parts share
  const int32_t* tables;
  int pitch, layers, layer = 0;
  size_t layer_bytes;
  char* cache;
  float* states;
  char* scratch;
  size_t per_thread;

  void run(int number, int thread) const {
    const AttendPart& part = plan->parts()[number];
    AttendTask t = of(part, thread), after;
    if (number + 1 < static_cast<int>(plan->parts().size())) {
      after = of(plan->parts()[number + 1], thread);
      t.next = &after;
    }
    if (part.counter < 0) return QUIRE_ISA::attend(t);
    float* all = states + part.states;
    t.states = all + plan->partition_states(part) * (part.partition_begin - part.whole_begin);
    QUIRE_ISA::attend(t);
    if (!plan->last_of_split(part)) return;
    t.states = all;
    t.partition_begin = part.whole_begin;
    t.partition_end = part.whole_end;
    QUIRE_ISA::attend_merge(t);
  }
  AttendTask of(const AttendPart& p, int thread) const {
    AttendTask t = task;
    t.head_begin = p.head_begin, t.head_end = p.head_end;
    t.block_table = tables + static_cast<size_t>(p.row) * pitch;
    t.cache = cache + layer * layer_bytes;
    t.token_begin = p.token_begin, t.token_end = p.token_end;
    t.partition_begin = p.partition_begin, t.partition_end = p.partition_end;
    t.scratch = scratch + thread * per_thread;
    return t;
  }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" __attribute__((visibility("default"))) void* pool_of(int threads) { return new ThreadPool(threads); }

// Seconds of one pass over all weights.
extern "C" __attribute__((visibility("default"))) double linears(void* pool_, int way, int dtype, int rows,
                                                                 const void* const* data, const int* k, const int* n,
                                                                 int count, const void* x, size_t ldx, float* y,
                                                                 float* part) {
  ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
  std::vector<Weight> weights;
  for (int i = 0; i < count; ++i) weights.push_back({static_cast<const char*>(data[i]), k[i], n[i]});
  const Linears l{static_cast<Way>(way), static_cast<DType>(dtype), rows, pool.threads(), weights.data(), count,
                  static_cast<const char*>(x), ldx, y, part};
  const int phases = l.way == kSplit ? 2 : 1;
  Tasks tasks(pool.threads());
  tasks.deal(tasks_of(l, 0, 0));
  const auto start = Clock::now();
  auto job = [&](int thread) {
    for (int i = 0; i < count; ++i)
      for (int phase = 0; phase < phases; ++phase) {
        const int all = tasks_of(l, i, phase);
        for (int task = tasks.claim(thread); task >= 0; task = tasks.claim(thread))
          run_linear(l, i, task, phase, all, thread);
        const int after = phase + 1 < phases ? i : i + 1;
        pool.barrier(thread, [&] { if (after < count) tasks.deal(tasks_of(l, after, phase + 1 < phases ? 1 : 0)); });
      }
  };
  on_all(pool, job);
  return since(start);
}

// Seconds of the attention of all layers: `rows` sequences of `queries` tokens that end at `context`, in bfloat16.
extern "C" __attribute__((visibility("default"))) double attention(void* pool_, int rows, int queries, int context,
                                                                   int heads, int kv_heads, int head_dim, int layers,
                                                                   const float* qkv, float* out, void* cache,
                                                                   size_t layer_bytes) {
  ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
  const AttendShape shape{head_dim, heads, kv_heads, 0};
  const AttentionMemory memory = attention_memory({shape}, pool.threads(), context);
  const int blocks = ceil_div(context, kTile), tokens = rows * queries, d16 = (head_dim + 15) / 16 * 16;
  std::vector<int32_t> tables(static_cast<size_t>(rows) * blocks), positions, starts{0};
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<int32_t>(i * 769 % tables.size());
  for (int r = 0; r < rows; ++r) {
    for (int q = 0; q < queries; ++q) positions.push_back(context - queries + q);
    starts.push_back(starts.back() + queries);
  }
  static char* scratch = nullptr;
  static size_t size = 0;
  if (memory.total > size) {
    size = memory.total;
    scratch = static_cast<char*>(aligned_alloc(4096, size));
    std::memset(scratch, 0, size);
  }
  AttentionPlan plan(shape, pool.threads(), tokens, memory.states / sizeof(float));
  plan.plan(rows, starts.data(), positions.data());
  Attended a{&plan, {}, tables.data(), blocks, layers, 0, layer_bytes, static_cast<char*>(cache),
             reinterpret_cast<float*>(scratch + memory.per_thread * pool.threads()), scratch, memory.per_thread};
  const size_t tile = 2 * static_cast<size_t>(kTile) * d16;
  a.task.qkv = qkv;
  a.task.pitch = static_cast<size_t>(heads + 2 * kv_heads) * head_dim;
  a.task.out = out;
  a.task.out_dtype = DType::f32;
  a.task.out_pitch = static_cast<size_t>(heads) * head_dim;
  a.task.heads_per_kv = heads / kv_heads;
  a.task.scale = 0.1f;
  a.task.positions = positions.data();
  a.task.kv = {DType::bf16, kv_heads, head_dim, d16, kTile, 1, tile, tile * kv_heads};
  const int parts = static_cast<int>(plan.parts().size());
  Tasks tasks(pool.threads());
  tasks.deal(parts);
  const auto start = Clock::now();
  auto job = [&](int thread) {
    for (int layer = 0; layer < layers; ++layer) {
      for (int task = tasks.claim(thread); task >= 0; task = tasks.claim(thread)) a.run(task, thread);
      pool.barrier(thread, [&] { tasks.deal(parts), ++a.layer; });
    }
  };
  on_all(pool, job);
  return since(start);
}
