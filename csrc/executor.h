// Runs a program natively: weights packed for the machine, one KV arena, one activation arena, one call a step.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "context.h"
#include "op.h"
#include "page_warmer.h"
#include "pool.h"
#include "profile.h"

namespace quire {

class Executor {
 public:
  Executor(const std::string& isa, int threads);
  // Takes turns with another one on its threads; the other outlives it.
  Executor(const std::string& isa, Executor& beside);

  // ---- building, in this order: weights are declared and filled, then what the ops name, then the ops -------------
  Weights& weights() { return context_.weights; }
  const Weights& weights() const { return context_.weights; }
  void add_rope(const float* cos, const float* sin, int max_len, int half, bool interleaved);
  void add_buffer(const std::string& name, const Buffer& buffer);
  AdapterPool& adapters() { return context_.adapters; }
  const AdapterPool& adapters() const { return context_.adapters; }
  void add_kv_layer(const KVLayer& layer);
  void add_op(const std::string& kind, const FieldMap& fields);
  // Later ops are over rows that want logits.
  void begin_head() { head_begin_ = ops_.size(); }
  // `activations`: where those are, in memory that outlives the executor; null for memory of its own.
  void bind(const Limits& limits, const StepPointers& step, size_t arena_bytes, size_t block_bytes,
            char* activations = nullptr);
  // Later steps are in these arrays. Their limits and groups are those of bind.
  void use_step(const StepPointers& step) { context_.step = step; }
  // Meet the other ranks of the program there, from the next step on; the group outlives the executor.
  void join(Group& group, int rank);
  // The same of the ranks of all replicas that share experts; `shown` is where this one puts rows for them, in memory that
  // outlives the executor.
  void share_experts(Group& group, int rank, char* shown);

  // ---- running --------------------------------------------------------------------------------------------------
  void run(int tokens, int rows, int logit_rows);
  void run_head(int logit_rows);
  // Only ops begin … end - 1 of the program, counted over body and head: one op's time, or what must run before it.
  void run_range(int tokens, int rows, int logit_rows, int begin, int end);
  // Copies blocks[i] of the cache to targets[i], on all threads.
  void copy_blocks(const int32_t* blocks, const int32_t* targets, size_t count);
  // Pages of blocks from this one on are not brought into memory ahead of use.
  void warm_blocks(int count) { kv_pages_->stop_at(context_.block_bytes * static_cast<size_t>(count < 0 ? 0 : count)); }
  // Of the routers of the program, in its order: see ExpertPlaces. Throws std::out_of_range for one that does not exist.
  ExpertPlaces& experts(int router) { return context_.expert_places.at(static_cast<size_t>(router)); }
  void fill_cache(uint8_t byte);  // every byte of the cache; tests fill it with NaN of each format
  void stop_after(int op) { stop_after_ = op; }
  // Measure every op of later steps, or no longer; after bind.
  void profile(bool on) { profile_ = on ? std::make_unique<Profile>(ops_.size(), pool_.threads()) : nullptr; }
  std::vector<double> take_profile() { return profile_ ? profile_->take() : std::vector<double>(); }

  const Buffer& buffer(const std::string& name) const;
  size_t kv_bytes() const { return context_.kv.bytes(); }
  size_t kv_warmed() const { return kv_pages_ ? kv_pages_->warmed() : 0; }
  size_t activation_bytes() const;
  size_t table_bytes() const;
  // Where its large parts lie: name, address, bytes.
  std::vector<std::tuple<std::string, uintptr_t, size_t>> arenas() const;
  const char* isa() const { return kernels_.isa; }
  int threads() const { return pool_.threads(); }
  ThreadPool& pool() { return pool_; }
  const Kernels& kernels() const { return kernels_; }

 private:
  std::vector<const Arena*> activation_arenas() const;
  void set_step(int tokens, int rows, int logit_rows);
  void run_ops(size_t begin, size_t end);
  void step(size_t begin, size_t end, int thread);
  void deal(size_t op, size_t end);
  size_t deal_from(size_t op, size_t end);

  const Kernels& kernels_;
  const ThreadOwner<ThreadPool> pool_owner_;
  ThreadPool& pool_;
  Context context_;
  std::vector<std::unique_ptr<Op>> ops_;
  size_t head_begin_ = 0;
  ThreadOwner<PageWarmer> kv_pages_;  // after the arena: it ends first
  std::vector<bool> beside_next_;     // by op: whether the one behind it may run at the same time
  Tasks tasks_, more_;                // of the op that runs, and of one that runs beside it
  size_t next_ = 0;                   // the op after it; set while all threads wait
  std::unique_ptr<Profile> profile_;
  int stop_after_ = -1;
};

}  // namespace quire
