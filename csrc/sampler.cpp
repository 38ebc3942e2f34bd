#include "sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "acceptance.h"
#include "watermark.h"

namespace quire {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

[[noreturn]] void refuse_row(int row, int slot, const std::string& what) {
  refuse("row " + std::to_string(row) + ": slot " + std::to_string(slot) + " " + what);
}

// Tokens by which what a slot keeps of its sequence grows.
constexpr size_t kPastStep = 1024;

size_t mask_words(int vocab) { return (static_cast<size_t>(vocab) + 31) / 32; }

void check_ids(const char* name, const int32_t* ids, size_t n, int vocab) {
  for (size_t i = 0; i < n; ++i)
    if (ids[i] < 0 || ids[i] >= vocab)
      refuse(std::string(name) + ": token id " + std::to_string(ids[i]) + " is not in the vocabulary of " +
             std::to_string(vocab));
}

void check_ids(const char* name, const std::vector<int32_t>& ids, int vocab) {
  check_ids(name, ids.data(), ids.size(), vocab);
}

// A finite logit stays finite, so that no difference is NaN and no token is lost; -inf (not allowed) stays -inf.
float change(float before, float after) { return before == -kInfinity ? before : std::clamp(after, -FLT_MAX, FLT_MAX); }

template <class T>
size_t capacity_bytes(const std::vector<T>& v) {
  return v.capacity() * sizeof(T);
}

}  // namespace

Sampler::Sampler(const SamplerSizes& sizes, const Kernels& kernels, ThreadPool* pool)
    : kernels_(kernels), vocab_(sizes.vocab), max_logprobs_(sizes.max_logprobs), pool_(pool) {
  const auto [vocab, max_slots, max_rows, max_logprobs] = sizes;
  if (max_logprobs < 0) refuse("max_logprobs: " + std::to_string(max_logprobs) + " is negative");
  if (vocab < 1 || vocab > 1 << 24) refuse("vocab: " + std::to_string(vocab) + " is not in [1, 2^24]");
  if (max_slots < 1 || max_slots > 1 << 20) refuse("max_slots: " + std::to_string(max_slots) + " is not in [1, 2^20]");
  if (max_rows < 1 || max_rows > 1 << 20) refuse("max_rows: " + std::to_string(max_rows) + " is not in [1, 2^20]");
  for (int t = 0; t < (pool ? pool->threads() : 1); ++t)
    row_samplers_.push_back(std::make_unique<RowSampler>(kernels, vocab));
  slots_.resize(max_slots);
  seen_.resize(max_slots);
  tokens_.resize(max_rows);
  status_.resize(max_rows);
  logprobs_.assign(max_rows, Logprobs(max_logprobs));
}

// ---- slots --------------------------------------------------------------------------------------------------------

void Sampler::add(int index, const SlotParams& params, const int32_t* tokens, size_t num_tokens) {
  if (index < 0 || index >= max_slots()) refuse("slot: " + std::to_string(index) + " does not exist");
  if (slots_[index]) refuse("slot: " + std::to_string(index) + " is taken");
  if (params.logprobs > max_logprobs_) refuse("logprobs: more than " + std::to_string(max_logprobs_));
  if (params.bias_ids.size() != params.bias_values.size()) refuse("logit_bias: as many ids as values are needed");
  if (params.prompt_len < 0) refuse("prompt_len: " + std::to_string(params.prompt_len) + " is negative");
  check_ids("allowed_token_ids", params.allowed, vocab_);
  check_ids("banned_token_ids", params.banned, vocab_);
  check_ids("stop_ids", params.stop_ids, vocab_);
  check_ids("logit_bias", params.bias_ids, vocab_);
  check_ids("bad_words", params.bad_tokens, vocab_);
  check_ids("dry_sequence_breakers", params.breakers, vocab_);
  if (params.needs_tokens()) check_ids("token_ids", tokens, num_tokens, vocab_);

  auto slot = std::make_unique<Slot>();
  slot->params = params;
  const bool many_banned = params.banned.size() > mask_words(vocab_);
  if (params.restricted || many_banned) {
    slot->mask.assign(mask_words(vocab_), params.restricted ? 0u : ~0u);
    for (int32_t id : params.allowed) slot->mask[id / 32] |= 1u << (id % 32);
    for (int32_t id : params.banned) slot->mask[id / 32] &= ~(1u << (id % 32));
    slot->params.banned = std::vector<int32_t>();
  }
  slot->params.allowed = std::vector<int32_t>();  // now in the mask
  if (params.counts())
    for (size_t i = 0; i < num_tokens; ++i) {
      if (static_cast<int>(i) < params.prompt_len)
        slot->counts.see(tokens[i]);
      else
        slot->counts.add(tokens[i]);
    }
  if (params.looks_back()) slot->past.assign(tokens, tokens + num_tokens);
  if (params.chained()) slot->chain = chain_steps(params, params.ordered ? &params.order : nullptr);
  slot->surprise = slot->next_surprise = params.surprise;
  slots_[index] = std::move(slot);
}

void Sampler::Slot::take(int32_t token) {
  if (params.counts()) counts.add(token);
  if (params.looks_back()) {
    if (past.size() == past.capacity()) past.reserve(past.size() + kPastStep);
    past.push_back(token);
  }
  surprise = next_surprise;
}

void Sampler::drop(int slot) {
  if (slot < 0 || slot >= max_slots() || !slots_[slot]) refuse("slot: " + std::to_string(slot) + " is not in use");
  slots_[slot].reset();
}

// ---- sampling -----------------------------------------------------------------------------------------------------

void Sampler::check(const SampleTask& task) {
  if (task.rows > max_rows())
    refuse("rows: " + std::to_string(task.rows) + " rows, the limit is " + std::to_string(max_rows()));
  if (task.drafts && task.rows && task.drafts[task.rows - 1] >= 0) refuse("drafts: the last row cannot have one");
  ++checks_;
  for (int i = 0; i < task.rows; ++i) {
    const int slot = task.slots[i];
    if (slot < 0 || slot >= max_slots() || !slots_[slot]) refuse_row(i, slot, "is not in use");
    if (task.drafts && task.drafts[i] >= 0 && slots_[slot]->params.mirostat)
      refuse_row(i, slot, "has a draft, and mirostat, which needs each token before the next");
    if (task.drafts && task.drafts[i] >= vocab_)
      refuse_row(i, slot, "has a draft " + std::to_string(task.drafts[i]) + " outside the vocabulary");
    if (i && task.drafts && task.drafts[i - 1] >= 0) {
      if (slot != task.slots[i - 1] || task.positions[i] != task.positions[i - 1] + 1)
        refuse_row(i, slot, "does not follow on the draft before");
      continue;
    }
    if (seen_[slot] == checks_ && !task.guess_count) refuse_row(i, slot, "has another row in this step");
    seen_[slot] = checks_;
    if (task.positions[i] < slots_[slot]->params.prompt_len)
      refuse_row(i, slot, "cannot sample position " + std::to_string(task.positions[i]) + " inside the prompt");
  }
}

const float* Sampler::maxima_of_row(const float* maxima, int row) const {
  return maxima ? maxima + static_cast<size_t>(row) * maxima_of(vocab_) : nullptr;
}

// f(row, its thread's RowSampler) for every row.
template <class F>
void Sampler::for_rows(int rows, F f) {
  if (!pool_ || rows < 2 || pool_->threads() == 1) {
    for (int i = 0; i < rows; ++i) f(i, *row_samplers_[0]);
    return;
  }
  std::atomic<int> next{0};
  auto job = [&](int thread) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < rows;) f(i, *row_samplers_[thread]);
  };
  on_all(*pool_, job);
}

int Sampler::sample(const SampleTask& task) {
  check(task);
  for_rows(task.rows, [&](int row, RowSampler& rows) { sample_row(task, row, rows); });
  return static_cast<int>(
      std::count_if(status_.begin(), status_.begin() + task.rows, [](int32_t s) { return s != 0; }));
}

void Sampler::commit(const int32_t* slots, const int32_t* tokens, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (slots[i] < 0 || slots[i] >= max_slots() || !slots_[slots[i]])
      refuse_row(static_cast<int>(i), slots[i], "is not in use");
  check_ids("tokens", tokens, count, vocab_);
  for (size_t i = 0; i < count; ++i) slots_[slots[i]]->take(tokens[i]);
}

void Sampler::sample_row(const SampleTask& task, int row, RowSampler& rows) {
  Slot& slot = *slots_[task.slots[row]];
  const SlotParams& p = slot.params;
  auto finish = [&](RowStatus status, int32_t token) {
    status_[row] = static_cast<int32_t>(status);
    tokens_[row] = token;
  };
  const size_t guesses = static_cast<size_t>(row) * static_cast<size_t>(task.guess_count);
  std::fill_n(task.guesses + guesses, task.guess_count, -1);
  std::fill_n(task.chances + guesses, task.guess_count, 0.0f);

  RowMax raw_max;
  View raw_view{};
  if (const RowStatus status = read(task, row, rows, &raw_view, &raw_max); status != RowStatus::ok)
    return finish(status, -1);

  RowMax max = raw_max;
  View view = raw_view;
  const float* x = edit(task, row, raw_view.x, rows);
  if (x != raw_view.x) view = rows.rescan(x, &max);
  if (max.max == -kInfinity) return finish(RowStatus::nothing_left, -1);
  Mirostat mirostat;
  const SamplingParams* how = &p;
  static const SamplingParams kPlain;
  if (p.chained()) {
    mirostat = run_chain(task, row, rows, &view, &max.max);
    how = &kPlain;
  }

  int32_t token;
  if (task.guess_count) {
    guess(task, row, view, max.max, *how, rows);
    token = task.guesses[guesses];
  } else if (how->temperature == 0.0) {
    token = rows.argmax(view, max.max);
  } else {
    token = judge(task, row, view, max.max, *how, rows);
  }
  if (task.distributions && how->temperature != 0.0)
    rows.distribution(view, max.max, *how, task.distributions + offset(row), nullptr);
  if (p.mirostat && !task.guess_count) slot.next_surprise = next_surprise(mirostat, p, view.x[token], max.max);
  if (p.logprobs >= 0) fill_logprobs(raw_view, raw_max.max, token, p.logprobs, rows, &logprobs_[row]);
  if (!task.drafts) slot.take(token);
  finish(RowStatus::ok, token);
}

RowStatus Sampler::read(const SampleTask& task, int row, RowSampler& rows, View* view, RowMax* top) const {
  auto scan = [&](int place) {
    *view = rows.scan(task.logits + static_cast<size_t>(place) * vocab_, maxima_of_row(task.maxima, place), top);
    return !top->finite ? RowStatus::not_finite : top->max == -kInfinity ? RowStatus::nothing_left : RowStatus::ok;
  };
  RowStatus status = scan(task.place(row));
  if (!task.guides || task.guides[row] < 0 || status != RowStatus::ok) return status;
  const float* conditional = view->x;
  const double total = rows.log_sum_exp(*view, top->max);
  status = scan(task.guides[row]);
  if (status != RowStatus::ok) return status;
  const double other = rows.log_sum_exp(*view, top->max);
  const float* x = rows.guide(conditional, total, view->x, other, slots_[task.slots[row]]->params.guidance_scale);
  *view = rows.scan(x, nullptr, top);
  return RowStatus::ok;
}

Place Sampler::place_of(const SampleTask& task, int row) const {
  const SlotParams& p = slots_[task.slots[row]]->params;
  return {p.seed, p.sample_index, static_cast<uint32_t>(task.positions[row])};
}

PastTokens Sampler::past_of(const SampleTask& task, int row) const {
  const Slot& slot = *slots_[task.slots[row]];
  int drafts = 0;  // of this slot in the rows before
  while (task.drafts && drafts < row && task.drafts[row - drafts - 1] >= 0) ++drafts;
  return {slot.past, slot.params.prompt_len, drafts ? task.drafts + row - drafts : nullptr, drafts};
}

Mirostat Sampler::run_chain(const SampleTask& task, int row, RowSampler& rows, View* view, float* max) const {
  const Slot& slot = *slots_[task.slots[row]];
  Mirostat mirostat{slot.surprise, 0};
  SamplerChain chain(rows, slot.params, place_of(task, row), &mirostat);
  for (ChainStep step : slot.chain) {
    if (step == ChainStep::penalties) {
      penalize(slot, past_of(task, row), rows);
    } else if (step == ChainStep::dry) {
      if (slot.params.dry())
        penalize_repetitions(past_of(task, row), slot.params, slot.params.breakers, rows.scratch(), rows.edited());
    } else {
      chain.run(step);
    }
  }
  *view = chain.view(max);
  return mirostat;
}

// The draft if it is accepted without being the sample; else the sample, or what takes its place.
int32_t Sampler::judge(const SampleTask& task, int row, const View& view, float max, const SamplingParams& p,
                       RowSampler& rows) const {
  const Place place = place_of(task, row);
  const Judging& judging = task.judging;
  const int32_t draft = task.drafts ? task.drafts[row] : -1;
  if (judging.acceptance == Acceptance::same || draft < 0) return rows.draw(view, max, p, place);
  if (judging.acceptance == Acceptance::rejection) {
    const bool certain = !judging.lines || judging.lines[row] < 0;
    const float* q = certain ? nullptr : judging.proposals + offset(judging.lines[row]);
    return judge_by_rejection(rows.distribution(view, max, p, nullptr, nullptr), q, vocab_, draft, place);
  }
  double entropy;
  const float* share = rows.distribution(view, max, p, nullptr, &entropy);
  return is_typical(share, entropy, draft, judging.epsilon) ? draft : rows.draw(view, max, p, place);
}

void Sampler::guess(const SampleTask& task, int row, const View& view, float max, const SamplingParams& p,
                    RowSampler& rows) const {
  const int count = task.guess_count;
  int32_t* tokens = task.guesses + static_cast<size_t>(row) * static_cast<size_t>(count);
  float* chances = task.chances + static_cast<size_t>(row) * static_cast<size_t>(count);
  if (p.temperature == 0.0) {
    const double log_sum = rows.log_sum_exp(view, max);
    const int found = rows.top(view, count, tokens, chances);
    for (int i = 0; i < found; ++i) chances[i] = static_cast<float>(std::exp(chances[i] - log_sum));
    return;
  }
  Leader leaders[SampleTask::kMostGuesses];
  const int found = rows.race(view, max, p, place_of(task, row), count, leaders);
  double sum = 0;
  for (int i = 0; i < found; ++i) {
    tokens[i] = leaders[i].token;
    // To the power of the temperature: what a change of a logit does to a time then is the same at any temperature.
    chances[i] = static_cast<float>(std::pow(double{leaders[0].time} / leaders[i].time, p.temperature));
    sum += chances[i];
  }
  for (int i = 0; i < found; ++i) chances[i] = static_cast<float>(chances[i] / sum);
}

// The row with masks, bias and penalties applied: a copy, or the row itself when nothing changes it.
const float* Sampler::edit(const SampleTask& task, int row, const float* x, RowSampler& rows) const {
  const Slot& slot = *slots_[task.slots[row]];
  const SlotParams& p = slot.params;
  const bool masked = task.masks && task.lines[row] >= 0;
  const uint32_t* bitmask = masked ? task.masks + static_cast<size_t>(task.lines[row]) * mask_words(vocab_) : nullptr;
  const bool hold_stops = task.positions[row] - p.prompt_len < p.min_tokens && !p.stop_ids.empty();
  if (!bitmask && slot.mask.empty() && p.banned.empty() && !hold_stops && p.bias_ids.empty() && !p.penalized() &&
      !p.chained() && !p.looks_back())
    return x;
  float* y = rows.edited();
  if (!slot.mask.empty()) {
    kernels_.mask_row(x, slot.mask.data(), vocab_, y);
    if (bitmask) kernels_.mask_row(y, bitmask, vocab_, y);
  } else if (bitmask) {
    kernels_.mask_row(x, bitmask, vocab_, y);
  } else {
    std::memcpy(y, x, static_cast<size_t>(vocab_) * sizeof(float));
  }
  for (int32_t id : p.banned) y[id] = -kInfinity;
  if (hold_stops)
    for (int32_t id : p.stop_ids) y[id] = -kInfinity;
  for (size_t i = 0; i < p.bias_ids.size(); ++i) {
    float& logit = y[p.bias_ids[i]];
    logit = change(logit, logit + p.bias_values[i]);
  }
  if (p.watermark_delta > 0) {
    const PastTokens past = past_of(task, row);
    const int32_t* green = rows.scratch();
    const int count = draw_green(past[past.size() - 1], p, vocab_, rows.scratch());
    for (int i = 0; i < count; ++i)
      y[green[i]] = change(y[green[i]], y[green[i]] + static_cast<float>(p.watermark_delta));
  }
  if (!p.bad_ends.empty()) ban_sequences(past_of(task, row), p.bad_tokens, p.bad_ends, y);
  if (p.chained()) return y;  // which has the rest
  penalize(slot, past_of(task, row), rows);
  if (p.dry()) penalize_repetitions(past_of(task, row), p, p.breakers, rows.scratch(), y);
  return y;
}

// Repetition penalty: Keskar et al., CTRL, 2019 (arXiv:1909.05858), over prompt and output. Frequency and presence:
// OpenAI's API reference, over the output. Drafts are outputs too.
void Sampler::penalize(const Slot& slot, const PastTokens& past, RowSampler& rows) const {
  const SlotParams& p = slot.params;
  if (!p.penalized()) return;
  float* x = rows.edited();
  const float repetition = static_cast<float>(p.repetition_penalty);
  const float frequency = static_cast<float>(p.frequency_penalty);
  const float presence = static_cast<float>(p.presence_penalty);
  auto penalize_token = [&](int32_t token, uint32_t outputs) {
    float y = x[token];
    y = change(y, y > 0 ? y / repetition : y * repetition);
    if (outputs) y = y - frequency * static_cast<float>(outputs) - presence;
    x[token] = change(x[token], y);
  };
  if (!p.counts()) return each_of_window(past, past.last(p.repeat_last_n), rows.scratch(), penalize_token);
  const int32_t *drafts = past.drafts(), *end = drafts + past.draft_count();
  auto drafted = [&](int32_t token) { return static_cast<uint32_t>(std::count(drafts, end, token)); };
  slot.counts.each([&](int32_t token, uint32_t outputs) { penalize_token(token, outputs + drafted(token)); });
  for (const int32_t* draft = drafts; draft != end; ++draft)
    if (!slot.counts.has(*draft) && std::count(drafts, draft, *draft) == 0) penalize_token(*draft, drafted(*draft));
}

// ---- log-probabilities ----------------------------------------------------------------------------------------------

void Sampler::fill_logprobs(const View& row, float max, int32_t token, int count, RowSampler& rows,
                            Logprobs* out) const {
  const double log_sum = rows.log_sum_exp(row, max);
  out->chosen = static_cast<float>(row.x[token] - log_sum);
  out->rank = rows.rank(row, token);
  out->count = rows.top(row, count, out->ids.data(), out->values.data());
  for (int i = 0; i < out->count; ++i) out->values[i] = static_cast<float>(out->values[i] - log_sum);
}

bool Sampler::score(const ScoreTask& task, Logprobs* out) {
  check_ids("target_token_ids", task.targets, static_cast<size_t>(task.rows), vocab_);
  if (task.count < 0 || task.count > max_logprobs_)
    refuse("top_n: " + std::to_string(task.count) + " is not in [0, " + std::to_string(max_logprobs_) + "]");
  std::atomic<bool> finite{true};
  for_rows(task.rows, [&](int i, RowSampler& rows) {
    RowMax max;
    const View row = rows.scan(task.logits + static_cast<size_t>(i) * vocab_, maxima_of_row(task.maxima, i), &max);
    if (!max.finite || max.max == -kInfinity) {
      finite.store(false, std::memory_order_relaxed);
      return;
    }
    fill_logprobs(row, max.max, task.targets[i], task.count, rows, &out[i]);
  });
  return finite.load();
}

// ---- memory -----------------------------------------------------------------------------------------------------------

size_t Sampler::memory() const {
  size_t bytes = sizeof(Sampler) + capacity_bytes(row_samplers_) + capacity_bytes(slots_) + capacity_bytes(seen_) +
                 capacity_bytes(tokens_) + capacity_bytes(status_) + capacity_bytes(logprobs_);
  for (const auto& rows : row_samplers_) bytes += rows->bytes();
  for (const Logprobs& row : logprobs_) bytes += capacity_bytes(row.ids) + capacity_bytes(row.values);
  for (const auto& slot : slots_) {
    if (!slot) continue;
    const SlotParams& p = slot->params;
    bytes += sizeof(Slot) + capacity_bytes(slot->mask) + slot->counts.bytes() + capacity_bytes(slot->past) +
             capacity_bytes(slot->chain) + capacity_bytes(p.allowed) + capacity_bytes(p.banned) +
             capacity_bytes(p.stop_ids) + capacity_bytes(p.bias_ids) + capacity_bytes(p.bias_values) +
             capacity_bytes(p.bad_tokens) + capacity_bytes(p.bad_ends) + capacity_bytes(p.breakers) +
             capacity_bytes(p.order);
  }
  return bytes;
}

size_t Sampler::bound(const SamplerSizes& sizes, int threads, int max_len, int named) {
  const auto [vocab, max_slots, max_rows, max_logprobs] = sizes;
  // With a copy of it while it grows. A slot has one of its past and counts.
  const size_t past = 2 * (static_cast<size_t>(max_len) + kPastStep) * sizeof(int32_t);
  const size_t chain = 4 * kMostSteps * sizeof(ChainStep);  // with the order that was asked for, while vectors grow
  const size_t counts = TokenCounts::bound(static_cast<size_t>(std::min(max_len, vocab)));
  const size_t slot = sizeof(Slot) + mask_words(vocab) * 4 + static_cast<size_t>(named) * 8 + chain +
                      std::max(past, counts);
  const size_t per_slot = slot + sizeof(slots_[0]) + sizeof(seen_[0]);
  const size_t per_row = sizeof(tokens_[0]) + sizeof(status_[0]) + sizeof(logprobs_[0]) +
                         static_cast<size_t>(max_logprobs) * (sizeof(int32_t) + sizeof(float));
  return sizeof(Sampler) + static_cast<size_t>(max_slots) * per_slot + static_cast<size_t>(max_rows) * per_row +
         static_cast<size_t>(std::max(threads, 1)) * (RowSampler::bound(vocab) + sizeof(row_samplers_[0]));
}

}  // namespace quire
