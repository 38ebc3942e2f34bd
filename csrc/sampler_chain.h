// Steps of sampling in any order, each of which changes a row of logits: what it cuts becomes -inf. They are those of
// llama.cpp's samplers, and cost a few passes over the row each; a request without them never comes here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "row_sampler.h"
#include "sampling_params.h"

namespace quire {

// Mirostat: Basu et al., ICLR 2021 (arXiv:2007.14966). The surprise of a token is -log2 of its probability.
struct Mirostat {
  double max_surprise = 0;  // mu, before the row
  double log_total = 0;     // ln of what the weights of the tokens that are left amount to
};

class SamplerChain {
 public:
  // For the row that `rows` edits. `params` is that of the sequence, and `place` that of its row.
  SamplerChain(RowSampler& rows, const SamplingParams& params, const Place& place, Mirostat* mirostat);

  // Any step but penalties and dry. A row with a token keeps one.
  void run(ChainStep step);
  // The row after what was run, and its maximum.
  View view(float* max);

 private:
  void keep(const Cut& cut);
  void keep_first();
  void cut(SamplingParams params, bool at_least_min_keep);
  void top_n_sigma();
  void typical();
  void exclude_top_choices();
  void heat();
  void mirostat();
  Cut cut_by_mirostat(const View& row, float max);

  RowSampler& rows_;
  const SamplingParams& p_;
  const Place place_;
  Mirostat* const mirostat_;
  float* const x_;
  int n_;
};

// The steps of a request: those of `asked`, or without any list Quire's own order.
std::vector<ChainStep> chain_steps(const SamplingParams& params, const std::vector<int32_t>* asked);

// mu after a token whose logit is `x` in a row with the maximum `max`.
double next_surprise(const Mirostat& mirostat, const SamplingParams& params, float x, float max);

}  // namespace quire
