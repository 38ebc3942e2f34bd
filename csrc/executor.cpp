#include "executor.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "adapter_reader.h"
#include "beside.h"
#include "isa.h"

namespace quire {

namespace {

constexpr size_t kCopied = size_t{256} << 10;  // bytes of a block that a thread copies at a time

}  // namespace

Executor::Executor(const std::string& isa, int threads)
    : kernels_(kernels_for(isa)), pool_owner_(new ThreadPool(threads)), pool_(*pool_owner_), context_(kernels_, pool_),
      tasks_(pool_.threads()), more_(pool_.threads()) {}

Executor::Executor(const std::string& isa, Executor& beside)
    : kernels_(kernels_for(isa)), pool_(beside.pool_), context_(kernels_, pool_), tasks_(pool_.threads()),
      more_(pool_.threads()) {}

void Executor::add_rope(const float* cos, const float* sin, int max_len, int half, bool interleaved) {
  const size_t n = static_cast<size_t>(max_len) * half;
  context_.ropes.push_back({std::vector<float>(cos, cos + n), std::vector<float>(sin, sin + n), half, interleaved});
}

void Executor::add_buffer(const std::string& name, const Buffer& buffer) {
  if ((buffer.dtype == DType::i8) != (buffer.group > 0))
    throw std::invalid_argument(name + ": int8 rows are in groups");
  context_.buffers.push_back(buffer);
  context_.buffers.back().arena = &context_.activations;
  if (!context_.buffer_names.emplace(name, &context_.buffers.back()).second)
    throw std::invalid_argument(name + ": a second buffer of this name");
}

void Executor::add_op(const std::string& kind, const FieldMap& fields) {
  ops_.push_back(make_op(kind, fields, context_));
}

void Executor::add_kv_layer(const KVLayer& layer) {
  const auto heads = static_cast<size_t>(layer.kv_heads);
  if (layer.k_scales.size() != heads || layer.v_scales.size() != heads)
    throw std::invalid_argument("a scale of keys and one of values for each head");
  const size_t book = layer.type == KVType::kvquant3 ? kv_codebook(kv_elems(layer.head_dim)) : 0;
  if (layer.books.size() != heads * book) throw std::invalid_argument("a codebook for each head of kvquant3");
  if (layer.rope >= static_cast<int>(context_.ropes.size())) throw std::invalid_argument("no such rope");
  context_.kv_layers.push_back(layer);
}

void Executor::bind(const Limits& limits, const StepPointers& step, size_t arena_bytes, size_t block_bytes,
                    char* activations) {
  if (limits.block_size % kTile) throw std::invalid_argument("block_size must be a multiple of 16");
  Context& c = context_;
  c.limits = limits;
  c.step = step;
  c.block_bytes = block_bytes;
  if (activations)
    c.activations.use(activations, arena_bytes);
  else
    c.activations.allocate(arena_bytes);
  c.kv.allocate(block_bytes * static_cast<size_t>(limits.blocks()));
  kv_pages_ = ThreadOwner<PageWarmer>(new PageWarmer(c.kv.data(), c.kv.bytes()));
  c.attention.allocate(c.threads, limits.max_tokens, limits.max_len);
  c.rounded.allocate(c.threads);
  c.experts.allocate(limits.max_tokens);
  c.adapters.allocate(limits.max_loras, limits.adapter_pages, limits.max_tokens, limits.max_logit_rows);
  c.pieces.reserve(limits.max_tokens);
  c.mirrors.reserve(static_cast<size_t>(limits.branches) * limits.block_size);
  const Op* next = nullptr;
  const AdapterReader* reader = nullptr;
  for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
    (*op)->next_stream = next;
    if ((*op)->streams()) next = op->get();
    if (auto* fetches = dynamic_cast<FetchesAhead*>(op->get())) fetches->next_reader = reader;
    if (const auto* reads = dynamic_cast<const AdapterReader*>(op->get())) reader = reads;
  }
  beside_next_.assign(ops_.size(), false);
  for (size_t i = 0; i + 1 < ops_.size(); ++i) {
    const auto *one = dynamic_cast<const Beside*>(ops_[i].get()),
               *other = dynamic_cast<const Beside*>(ops_[i + 1].get());
    beside_next_[i] = one && other && &one->input() == &other->input();
  }
}

void Executor::join(Group& group, int rank) {
  if (group.size() != context_.ranks || rank < 0 || rank >= context_.ranks)
    throw std::invalid_argument("rank: " + std::to_string(rank) + " of a group of " + std::to_string(group.size()) +
                                " does not fit a program of " + std::to_string(context_.ranks) + " ranks");
  context_.group = &group;
  context_.rank = rank;
}

void Executor::share_experts(Group& group, int rank, char* shown) {
  if (group.size() != context_.sharers || rank < 0 || rank >= context_.sharers)
    throw std::invalid_argument("rank: " + std::to_string(rank) + " of a group of " + std::to_string(group.size()) +
                                " does not fit experts of " + std::to_string(context_.sharers) + " ranks");
  context_.share = &group;
  context_.sharer = rank;
  context_.shown = shown;
}

const Buffer& Executor::buffer(const std::string& name) const {
  const auto found = context_.buffer_names.find(name);
  if (found == context_.buffer_names.end()) throw std::invalid_argument("no buffer is named '" + name + "'");
  return *found->second;
}

std::vector<const Arena*> Executor::activation_arenas() const {
  const Context& c = context_;
  return {&c.activations, &c.attention.memory(), &c.experts.memory(), &c.rounded.memory()};
}

size_t Executor::activation_bytes() const {
  size_t n = 0;
  for (const Arena* part : activation_arenas()) n += part->bytes();
  return n;
}

size_t Executor::table_bytes() const {
  size_t n = 0;
  for (const Rope& r : context_.ropes) n += (r.cos.size() + r.sin.size()) * sizeof(float);
  for (const KVLayer& layer : context_.kv_layers) n += layer.books.size() * sizeof(float);
  return n;
}

std::vector<std::tuple<std::string, uintptr_t, size_t>> Executor::arenas() const {
  std::vector<std::tuple<std::string, uintptr_t, size_t>> found;
  const auto add = [&found](const char* name, const Arena& arena) {
    if (arena.bytes()) found.emplace_back(name, reinterpret_cast<uintptr_t>(arena.data()), arena.bytes());
  };
  add("weights", weights().arena());
  add("kv", context_.kv);
  add("adapters", context_.adapters.memory());
  for (const Arena* part : activation_arenas()) add("activations", *part);
  return found;
}

void Executor::set_step(int tokens, int rows, int logit_rows) {
  const Limits& limits = context_.limits;
  if (tokens < 0 || tokens > limits.max_tokens || rows < 0 || rows > limits.lines() || logit_rows < 0 ||
      logit_rows > limits.max_logit_rows)
    throw std::invalid_argument("a step beyond the limits it was bound with");
  context_.tokens = tokens, context_.rows = rows, context_.logit_rows = logit_rows;
  kv_pages_->used(context_.plan_step());
}

void Executor::run(int tokens, int rows, int logit_rows) {
  set_step(tokens, rows, logit_rows);
  run_ops(0, logit_rows ? ops_.size() : head_begin_);
}

void Executor::run_range(int tokens, int rows, int logit_rows, int begin, int end) {
  if (begin < 0 || begin > end || end > static_cast<int>(ops_.size()))
    throw std::invalid_argument("a range beyond the program's ops");
  set_step(tokens, rows, logit_rows);
  run_ops(begin, end);
}

void Executor::run_head(int logit_rows) {
  if (logit_rows < 0 || logit_rows > context_.limits.max_logit_rows)
    throw std::invalid_argument("more logit rows than the limit");
  context_.logit_rows = logit_rows;
  context_.adapters.plan_head(logit_rows, context_.step.logit_rows);
  run_ops(head_begin_, ops_.size());
}

void Executor::copy_blocks(const int32_t* blocks, const int32_t* targets, size_t count) {
  char* kv = context_.kv.data();
  const size_t bytes = context_.block_bytes;
  const auto total = static_cast<int32_t>(context_.limits.blocks());
  for (size_t i = 0; i < count; ++i)
    if (blocks[i] < 0 || blocks[i] >= total || targets[i] < 0 || targets[i] >= total)
      throw std::invalid_argument("blocks: a block does not exist");
  const int pieces = static_cast<int>((bytes + kCopied - 1) / kCopied);
  parallel(pool_, static_cast<int>(count) * pieces, [&](int task) {
    const size_t from = kCopied * static_cast<size_t>(task % pieces);
    const char* block = kv + bytes * blocks[task / pieces];
    std::memcpy(kv + bytes * targets[task / pieces] + from, block + from, std::min(kCopied, bytes - from));
  });
}

void Executor::fill_cache(uint8_t byte) {
  std::memset(context_.kv.data(), byte, context_.block_bytes * static_cast<size_t>(context_.limits.blocks()));
}

void Executor::run_ops(size_t begin, size_t end) {
  if (stop_after_ >= 0) end = std::min(end, static_cast<size_t>(stop_after_) + 1);
  if (begin >= end) return;
  if (context_.ranks > 1 && !context_.group) throw std::runtime_error("a program of several ranks runs after join");
  if (context_.sharers > 1 && !context_.share) throw std::runtime_error("shared experts run after share_experts");
  deal(begin, end);
  auto job = [&](int thread) { step(begin, end, thread); };
  kv_pages_->begin();
  on_all(pool_, job);
  kv_pages_->end();
  if (context_.apart.load()) throw std::runtime_error("ranks came apart: one left, or runs another step or program");
}

// Deals the tasks of an op, and of one that runs beside it. Times are measured op by op.
void Executor::deal(size_t op, size_t end) {
  tasks_.deal(ops_[op]->tasks());
  more_.deal(beside_next_[op] && op + 1 < end && !profile_ ? ops_[op + 1]->tasks() : 0);
}

// Deals the tasks of the first op from `op` on that has some; returns its number, or `end`. Threads do not meet for ops
// without tasks.
size_t Executor::deal_from(size_t op, size_t end) {
  for (; op < end; ++op)
    if (ops_[op]->tasks()) {
      deal(op, end);
      break;
    }
  return op;
}

void Executor::step(size_t begin, size_t end, int thread) {
  Stopwatch watch(profile_.get(), thread);
  for (size_t i = begin; i < end;) {
    for (int t = tasks_.claim(thread); t >= 0; t = tasks_.claim(thread)) ops_[i]->run(t, thread);
    if (beside_next_[i] && i + 1 < end && !profile_) {
      ++i;
      for (int t = more_.claim(thread); t >= 0; t = more_.claim(thread)) ops_[i]->run(t, thread);
    }
    watch.worked(i);
    if (i + 1 < end) pool_.barrier(thread, [&] { next_ = deal_from(i + 1, end); });
    watch.met(i);
    i = i + 1 < end ? next_ : end;
  }
}

}  // namespace quire
