// Runs a program natively: weights packed for the machine, one KV arena, one activation arena, one call a step.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "arena.h"
#include "attention_plan.h"
#include "expert_plan.h"
#include "kernels.h"
#include "page_warmer.h"
#include "pool.h"
#include "profile.h"

namespace quire {

// Sizes of bind(); a step never exceeds them.
struct Limits {
  int max_tokens = 0, max_rows = 0, max_logit_rows = 0, max_len = 0, num_blocks = 0, block_size = 0;
  int blocks_per_row() const { return (max_len + block_size - 1) / block_size; }
};

// Addresses of the caller's int32 arrays; they outlive the executor.
struct StepPointers {
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* query_start = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* logit_rows = nullptr;
  std::vector<const int32_t*> block_tables;  // per cache group [max_rows, blocks_per_row]
};

class Executor {
 public:
  Executor(const std::string& isa, int threads);

  // ---- building: parameters, buffers and ops, in program order; each returns its index -------------------------
  int add_weight(int rows, int cols, DType dtype);  // packed panels
  int add_groups(int rows, int cols, const GroupFormat& format);  // packed panels in groups
  int add_table(int rows, int cols, DType dtype);   // row-major
  int add_vector(int rows);
  void allocate_weights();
  // Index of the first NaN or infinity among the source's elements, or -1.
  int64_t put(int param, int row_offset, const void* src, DType src_dtype, int rows, int cols);

  // Write chunks [first, first + count) of the packed weights to their place in a file; their checksums.
  // Throws std::system_error when the file cannot be written.
  std::vector<uint64_t> save_weights(int fd, size_t first, size_t count);
  // Take the weights from a file that save_weights wrote, instead of `put`: mapped, and every checksum compared.
  // False, with the weights empty as before, when one differs. The file holds at least `weight_bytes`.
  bool map_weights(int fd, const std::vector<uint64_t>& sums);
  // Rows of a weight in groups that come quantized; the arrays are those of PackCodesTask.
  void put_codes(int param, int row_offset, int rows, const PackCodesTask& arrays);

  int add_rope(const float* cos, const float* sin, int max_len, int half, bool interleaved);
  // `scale_offset`: where an int8 buffer's scale of each row lies. Int8 rows are padded to four columns. With `group`
  // two int32 numbers of each group lie behind them (QuantizeTask); rows are padded to whole groups.
  int add_buffer(int cols, DType dtype, size_t offset, size_t scale_offset, int group, bool rotated, int max_rows,
                 int per);
  // A layer's cache: which group's block table, and where it starts inside a block (bytes).
  int add_kv_layer(int group, int kv_heads, int head_dim, size_t offset);

  void op_embed(int table, int out);
  void op_norm(int x, int delta, int weight, int bias, bool layer, float eps, int out);
  void op_add(int x, int delta, float scale);
  void op_scale(int x, float scale, float cap, int maxima);
  // Columns of out from first on; with `act` (else -1) the weight is [gate | up], halves of whole panels. `maxima`: the
  // buffer of what SamplingKernels.maxima says of out, or -1.
  void op_linear(int x, int weight, int bias, int out, int first, int act, float alpha, float limit, int maxima);
  // `rope` -1 rotates nothing; `layer_norm` and `whole` say what q_norm and k_norm do.
  void op_rope_write(int qkv, int heads, int layer, int rope, int q_norm, int k_norm, bool layer_norm, bool whole,
                     float eps);
  void op_attend(int qkv, int out, int heads, int layer, float scale, int window, float softcap, int sinks,
                 int wide);
  // Latent attention; executor_latent.cpp. A weight by head is `heads` weights of whole panels, one behind the other.
  void op_head_linear(int x, int weight, int out, int heads);
  void op_latent_write(int q, int kv, int q_nope, int heads, int layer, int rope, int norm, float eps);
  void op_latent_attend(int q_latent, int q, int out, int heads, int layer, float scale);
  void op_quantize(int x, int out);
  // `alpha` and `limit`: of a clamped swiglu.
  void op_gated_act(int gate_up, int out, int act, float alpha, float limit);
  void op_gather(int x, int delta, int out);
  // Experts; see program/ops.py. A weight's experts are padded to whole panels; `rows` is what one has without.
  void set_experts(int param, int experts, int rows);
  void op_route(int logits, int correction, int ids, int weights, int places, const Router& router);
  void op_dispatch(int x, int places, int out);
  void op_experts(int x, int weight, int bias, int out);
  void op_combine(int x, int places, int weights, int shared, int gate, int out);
  void begin_head();

  void bind(const Limits& limits, const StepPointers& step, size_t arena_bytes, size_t block_bytes, DType kv_dtype);

  // ---- running --------------------------------------------------------------------------------------------------
  void run(int tokens, int rows, int logit_rows);
  void run_head(int logit_rows);
  // Only ops begin … end - 1 of the program, counted over body and head: one op's time, or what must run before it.
  void run_range(int tokens, int rows, int logit_rows, int begin, int end);
  void fill_cache(float value);  // every element of the cache; tests fill it with NaN
  void stop_after(int op) { stop_after_ = op; }
  // Measure every op of later steps, or no longer; after bind.
  void profile(bool on) { profile_ = on ? std::make_unique<Profile>(ops_.size(), pool_.threads()) : nullptr; }
  std::vector<double> take_profile() { return profile_ ? profile_->take() : std::vector<double>(); }

  char* buffer(int index) const { return activations_.data() + buffers_[index].offset; }
  size_t weight_bytes() const { return weights_.bytes(); }
  size_t kv_bytes() const { return kv_.bytes(); }
  size_t kv_warmed() const { return kv_pages_ ? kv_pages_->warmed() : 0; }
  size_t activation_bytes() const { return activations_.bytes() + scratch_.bytes() + expert_memory_.bytes() + rounded_rows_.bytes(); }
  size_t table_bytes() const;
  // Where its large parts lie: name, address, bytes.
  std::vector<std::tuple<std::string, uintptr_t, size_t>> arenas() const;
  const char* isa() const { return kernels_.isa; }
  int threads() const { return pool_.threads(); }
  ThreadPool& pool() { return pool_; }
  const Kernels& kernels() const { return kernels_; }

 private:
  enum class Kind {
    embed, norm, add, scale, linear, quantize, rope_write, attend, head_linear, latent_write, latent_attend, gated_act,
    gather, route, dispatch, experts, combine
  };
  struct Param {
    enum class Layout { panels, rows, vector } layout;
    int rows, cols;
    DType dtype;
    size_t offset, bytes;
    GroupFormat groups;
    int experts = 0, matrix_rows = 0;
  };
  struct Buffer {
    int cols;
    DType dtype;
    size_t offset, scale_offset;
    int group;
    bool rotated;
    int max_rows, per;  // per: rows for each token
    int groups() const { return group ? (cols + group - 1) / group : 1; }
    size_t pitch() const { return dtype == DType::i8 ? align_up(cols, group ? group : 4) : cols; }
  };
  struct Rope {
    std::vector<float> cos, sin;
    int half;
    bool interleaved;
  };
  struct KVLayer {
    int group, kv_heads, head_dim;
    size_t offset;
  };
  // One op; fields not used by its kind stay at their defaults.
  struct Op {
    Kind kind;
    int in = -1, delta = -1, weight = -1, bias = -1, out = -1;
    int layer = -1, rope = -1, heads = 0, window = 0, act = 0, plan = -1, first = 0;
    int next_linear = -1;  // op whose weights are read after this one
    int wide = -1;  // buffer of attention's float32 rows when `out` is int8
    int maxima = -1;
    float eps = 0, scale = 0, softcap = 0;
    bool layer_norm = false, whole = false;
    float alpha = 0, limit = 0;
    struct {
      int weights = -1, places = -1;
      Router router;
    } moe{};
  };
  struct TilePiece {
    int row, begin, end;  // tokens
  };
  // Panels per task so that a task streams enough weight, and row chunks per panel range. A gated linear's panels are
  // pairs, of gate and of up; `panel_bytes` is one's.
  struct LinearSplit {
    size_t panel_bytes;
    int panels, panels_per_task, panel_tasks, row_tasks;
    int tasks() const { return panel_tasks * row_tasks; }
  };
  struct ExpertSplit {
    int panels, panels_per_task, panel_tasks;  // of one expert
    size_t panel_bytes;
  };

  int add_param(Param::Layout layout, int rows, int cols, DType dtype);
  template <class F>
  void pack_panels(int row_offset, int rows, F f);
  char* param(int index) const { return weights_.data() + params_[index].offset; }
  // An int8 weight's scale of each row, and behind them the offsets; see kernels.h.
  float* scales(int index) const;
  int32_t* offsets(int index) const;
  float* row_scales(int buffer) const;
  int32_t* group_numbers(int buffer) const;
  const float* vector(int index) const {
    return index < 0 ? nullptr : reinterpret_cast<const float*>(param(index));
  }
  int32_t* i32(int index) const { return reinterpret_cast<int32_t*>(buffer(index)); }
  HeadNorm head_norm(int param, int heads, int head_dim) const;
  float* f32(int index) const { return reinterpret_cast<float*>(buffer(index)); }
  KVLayout kv_layout(const KVLayer& layer) const;
  void set_step(int tokens, int rows, int logit_rows);
  void bind_attention();
  void bind_rounding();
  void plan_attention(int rows);
  void run_ops(size_t begin, size_t end);
  void step(size_t begin, size_t end, int thread);
  int rows_of_task(int rows) const;
  int tasks_of(const Op& op) const;
  void do_task(const Op& op, int task, int thread);
  void do_linear(const Op& op, int task, int thread);
  void do_gated_linear(const Op& op, LinearTask t, int row, int width, size_t panel_bytes);
  LinearSplit split(const Op& op, int rows) const;
  const char* first_panel(int linear, int thread) const;
  int rope_ranges(const Op& op) const;
  void multiply(const Param& p, const LinearTask& t);  // by the kernel of the weight's format
  void check_maxima(const Op& op) const;
  void leave_maxima(const Op& op, int row, int rows, int begin, int end) const;
  void bind_experts();
  ExpertSplit split_experts(const Param& p) const;
  int expert_tasks(const Op& op) const;
  void do_expert_task(const Op& op, int task);
  void do_route(const Op& op, int task);
  void do_dispatch(const Op& op, int task);
  void do_experts(const Op& op, int task);
  void do_combine(const Op& op, int task);
  int rows_of(const Op& op) const;  // of what an op of rows writes
  bool rounds(const Op& op) const { return op.out >= 0 && buffers_[op.out].dtype == DType::i8; }
  void quantize_row(int buffer, int row, const float* x);
  void do_norm(const Op& op, int begin, int end, int thread);
  void do_gated_act(const Op& op, int task, int thread);
  void do_rope_write(const Op& op, int task);
  LatentTask attention_task(const Op& op, const AttendPart& part, int thread);
  void do_attend(const Op& op, int task, int thread);
  void attended(const Op& op, const AttendPart& part);  // all that its queries and heads see
  struct HeadSplit {
    int panels_per_task, panel_tasks, row_tasks;
  };
  HeadSplit split_heads(const Op& op) const;
  void do_head_linear(const Op& op, int task);
  void do_latent_write(const Op& op, int task);
  int row_count(bool head) const { return head ? logit_rows_ : tokens_; }
  template <class F>
  void parallel(int tasks, F f);  // f(task) for every task, on all threads

  const Kernels& kernels_;
  const ThreadOwner<ThreadPool> pool_owner_;
  ThreadPool& pool_;
  std::vector<Param> params_;
  std::vector<Buffer> buffers_;
  std::vector<Rope> ropes_;
  std::vector<KVLayer> kv_layers_;
  std::vector<Op> ops_;
  size_t head_begin_ = 0;
  size_t weight_total_ = 0;
  Arena weights_, kv_, activations_, scratch_, expert_memory_, rounded_rows_;
  size_t rounded_row_bytes_ = 0;  // of one thread
  ThreadOwner<PageWarmer> kv_pages_;  // after the arena: it ends first
  ExpertPlan expert_plan_;
  size_t block_bytes_ = 0;
  AttentionMemory attention_memory_{0, 0, 0};
  DType kv_dtype_ = DType::f32;
  Limits limits_;
  StepPointers step_;
  Tasks tasks_;  // of the op that runs
  std::atomic<int> routed_{0};  // its tasks that are done, when it routes
  std::unique_ptr<Profile> profile_;
  std::vector<AttentionPlan> attention_;  // one for each shape of attention
  std::unique_ptr<std::atomic<int>[]> heads_done_;  // of each token, while attention runs that rounds its rows
  std::vector<TilePiece> pieces_;         // the step's tokens, cut at rows and at tiles of the cache
  int tokens_ = 0, rows_ = 0, logit_rows_ = 0, stop_after_ = -1;
};

template <class F>
void Executor::parallel(int tasks, F f) {
  std::atomic<int> next{0};
  auto job = [&](int) {
    for (int t = next.fetch_add(1); t < tasks; t = next.fetch_add(1)) f(t);
  };
  on_all(pool_, job);
}

}  // namespace quire
