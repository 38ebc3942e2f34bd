// The sampler of one worker: sampling state per sequence slot, and one call for all rows of a step.
//
// Order of operations on a row of raw logits:
//   1. a row with NaN or +inf fails; with guidance two rows become one; log-probabilities are taken here
//   2. allowed tokens, grammar mask, banned tokens, min_tokens, logit bias, watermark, banned sequences
//   3. repetition penalty, frequency penalty, presence penalty, DRY
//   4. temperature 0: argmax. Otherwise temperature, top-k, top-p, min-p and a draw
// A slot with other steps, or another order, has 3 and 4 in a chain (sampler_chain.h) and a draw from what it leaves.
//
// A row's result depends on its logits, its slot's state, its position and nothing else.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "past_tokens.h"
#include "pool.h"
#include "row_sampler.h"
#include "sampler_chain.h"
#include "sampling_params.h"
#include "token_counts.h"

namespace quire {

enum class RowStatus : int32_t { ok = 0, not_finite = 1, nothing_left = 2 };

struct SlotParams : SamplingParams {
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  int prompt_len = 0;
  bool restricted = false;  // only `allowed` may be sampled
  std::vector<int32_t> allowed, banned, stop_ids, bias_ids;
  std::vector<float> bias_values;
  std::vector<int32_t> bad_tokens, bad_ends;  // sequences that must not come out, see ban_sequences
  std::vector<int32_t> breakers;              // of DRY, rising
  bool ordered = false;                       // `order` has the steps of the chain, see ChainStep
  std::vector<int32_t> order;
  double surprise = 0;  // mirostat's mu

  // Whether the order of the tokens so far matters, or only which they are.
  bool looks_back() const {
    return dry() || (penalized() && repeat_last_n > 0) || !bad_ends.empty() || watermark_delta > 0;
  }
  bool counts() const { return penalized() && !looks_back(); }
  bool needs_tokens() const { return counts() || looks_back(); }
  // Whether steps 3 and 4 are a chain.
  bool chained() const { return ordered || beyond_truncation(); }
};

enum class Acceptance { same, rejection, typical };

// How drafts are judged: by default, a draft that equals the sample is right.
struct Judging {
  Acceptance acceptance = Acceptance::same;
  double epsilon = 0;                // of typical
  const float* proposals = nullptr;  // [lines, vocab], what drafts were drawn from
  const int32_t* lines = nullptr;    // [rows], the line of each row's draft, -1 if it was certain; null: all were
};

// One step's rows. Row i belongs to slots[i], and its token will stand at positions[i] of the sequence.
//
// With drafts the rows are looked at and not counted. A slot may then have several rows, one after the other: what each
// samples is drawn as if the drafts of the rows before were outputs already.
//   slots      4   4   4   2   7   7
//   positions  9  10  11  30   5   6
//   drafts     a   b  -1  -1   c  -1      the token that stands at the position for the slot's later rows
//
// With guesses a slot may have any rows.
struct SampleTask {
  static constexpr int kMostGuesses = 64;

  const float* logits;       // [rows, vocab], not changed
  const int32_t* slots;      // [rows], without drafts no slot twice
  const int32_t* positions;  // [rows]
  int rows;
  const uint32_t* masks = nullptr;  // [lines, ceil(vocab/32)] of allowed tokens, or null
  const int32_t* lines = nullptr;   // [rows], with masks: the line of each row, -1 where every token is allowed
  const float* maxima = nullptr;    // [rows, maxima_of(vocab)] of the logits, or null: they are all read
  const int32_t* drafts = nullptr;  // [rows], or null
  const int32_t* places = nullptr;  // [rows], or null: the row of the logits that each row samples
  const int32_t* guides = nullptr;  // [rows], or null: the row of the logits that guides each row, -1 for none
  Judging judging = {};
  float* distributions = nullptr;  // [rows, vocab] that each row's token is drawn from, or null; not with temperature 0
  int guess_count = 0;             // tokens a row that are wanted besides, in the order in which they would be sampled
  int32_t* guesses = nullptr;      // [rows, guess_count], -1 where there are no more
  float* chances = nullptr;        // [rows, guess_count]; see Sampler::guess

  int place(int row) const { return places ? places[row] : row; }
};

struct ScoreTask {
  const float* logits;     // [rows, vocab]
  const float* maxima;     // as in SampleTask
  const int32_t* targets;  // [rows]
  int rows, count;
};

// Log-probabilities under the raw logits: of one given token and of the most likely ones.
struct Logprobs {
  explicit Logprobs(int most) : ids(static_cast<size_t>(most)), values(static_cast<size_t>(most)) {}

  float chosen = 0;
  int32_t rank = 0;
  int32_t count = 0;  // entries of ids and values, in order of rank from 1
  std::vector<int32_t> ids;
  std::vector<float> values;
};

// What a sampler is made for.
struct SamplerSizes {
  int vocab, max_slots, max_rows;
  int max_logprobs;  // most likely tokens that are reported of a row
};

// Not thread-safe: one call at a time.
class Sampler {
 public:
  // `pool` null samples on the calling thread; otherwise rows are spread over the pool, which must outlive this.
  // Throws std::invalid_argument.
  Sampler(const SamplerSizes& sizes, const Kernels& kernels, ThreadPool* pool);

  // Takes a slot for a sequence. `tokens` are its prompt and its outputs so far, looked at if it needs_tokens().
  // Throws std::invalid_argument when the slot is taken or a token id is outside the vocabulary.
  void add(int slot, const SlotParams& params, const int32_t* tokens, size_t num_tokens);
  // Throws std::invalid_argument when the slot is free.
  void drop(int slot);

  // Samples every row into tokens() (-1 for a failed row), status() and, for slots that asked, logprobs(). Sampled
  // tokens count as output in later penalties, unless the task has drafts: see commit(). Returns the number of failed
  // rows. Throws std::invalid_argument, and changes nothing, for a bad slot, position or draft.
  int sample(const SampleTask& task);
  // Counts tokens[i] as output of slots[i]. Throws std::invalid_argument, and changes nothing, for a bad slot or token.
  void commit(const int32_t* slots, const int32_t* tokens, size_t count);

  // Log-probabilities of targets[i] under row i of the task's logits, with the `count` most likely tokens. Returns
  // false when a row holds NaN or +inf, or no finite value. Throws std::invalid_argument for a bad target or count.
  bool score(const ScoreTask& task, Logprobs* out);

  int vocab() const { return vocab_; }
  int max_logprobs() const { return max_logprobs_; }
  int max_slots() const { return static_cast<int>(slots_.size()); }
  int max_rows() const { return static_cast<int>(tokens_.size()); }
  bool used(int slot) const { return slots_[slot] != nullptr; }
  // Mirostat's mu after what was sampled and, of rows with drafts, committed. The slot is in use.
  double surprise(int slot) const { return slots_[slot]->surprise; }
  bool wants_logprobs(int slot) const { return slots_[slot] && slots_[slot]->params.logprobs >= 0; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<int32_t>& status() const { return status_; }
  const std::vector<Logprobs>& logprobs() const { return logprobs_; }

  // Bytes held now, and the most that can ever be held by sequences of up to max_len tokens whose requests name up to
  // `named` tokens (in logit_bias, banned ids and stop ids together).
  size_t memory() const;
  static size_t bound(const SamplerSizes& sizes, int threads, int max_len, int named);

 private:
  struct Slot {
    SlotParams params;           // `allowed` and `banned` are empty once they are in the mask
    std::vector<uint32_t> mask;  // bit set: may be sampled; empty when all may
    TokenCounts counts;          // only if it counts()
    std::vector<int32_t> past;   // only if it looks_back()
    std::vector<ChainStep> chain;
    double surprise, next_surprise;  // mirostat's mu, and what it will be once the sampled token is committed

    void take(int32_t token);
  };

  void check(const SampleTask& task);
  size_t offset(int row) const { return static_cast<size_t>(row) * static_cast<size_t>(vocab_); }
  const float* maxima_of_row(const float* maxima, int row) const;
  void sample_row(const SampleTask& task, int row, RowSampler& rows);
  // What a row is sampled from, before any change: its logits, or what guidance makes of them.
  RowStatus read(const SampleTask& task, int row, RowSampler& rows, View* view, RowMax* top) const;
  // The row after the chain of its slot, in place of `view`, and its maximum.
  Mirostat run_chain(const SampleTask& task, int row, RowSampler& rows, View* view, float* max) const;
  // `how`: what the row is drawn by.
  int32_t judge(const SampleTask& task, int row, const View& view, float max, const SamplingParams& how,
                RowSampler& rows) const;
  // The likeliest samples of a row if its logits were somewhat other ones, and for each a number in [0, 1] that rises
  // with how sure it is: with temperature 0 its probability, else its share of the speeds of those that are named.
  void guess(const SampleTask& task, int row, const View& view, float max, const SamplingParams& how,
             RowSampler& rows) const;
  const float* edit(const SampleTask& task, int row, const float* x, RowSampler& rows) const;
  Place place_of(const SampleTask& task, int row) const;
  PastTokens past_of(const SampleTask& task, int row) const;
  void penalize(const Slot& slot, const PastTokens& past, RowSampler& rows) const;
  void fill_logprobs(const View& row, float max, int32_t token, int count, RowSampler& rows, Logprobs* out) const;
  template <class F>
  void for_rows(int rows, F f);

  const Kernels& kernels_;
  const int vocab_, max_logprobs_;
  ThreadPool* const pool_;
  std::vector<std::unique_ptr<RowSampler>> row_samplers_;  // one a thread
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<uint64_t> seen_;  // per slot: the last check() that met it
  uint64_t checks_ = 0;
  std::vector<int32_t> tokens_, status_;
  std::vector<Logprobs> logprobs_;
};

}  // namespace quire
