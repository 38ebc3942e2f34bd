// Choosing from one row of logits: truncation, the draw, the most likely tokens, ranks.
//
// Tokens are ordered by falling logit, the lower id first among equals. Every truncation keeps a beginning of that order,
// described by a Cut, and is found by narrowing a bracket of logits until few enough candidates are left to sort: the
// row itself is never sorted. Nothing here depends on the thread or on other rows.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"
#include "race.h"
#include "sampling_params.h"

namespace quire {

// Values and, for a list, their token ids in rising order.
struct View {
  const float* x;
  const int32_t* ids;  // null: a whole row, the index is the id
  int n;
  const float* block_max;           // of a row; null for a list
  const float* span_max = nullptr;  // of each kSpan of a row, if they are known
};

// Keeps x > least, and of x == least the ids up to tie_id.
struct Cut {
  float least;
  int32_t tie_id = std::numeric_limits<int32_t>::max();

  bool keeps(float x, int32_t id) const { return x > least || (x == least && id <= tie_id); }
};

// A thread's buffers for rows of one vocabulary size. Not to be shared between threads.
class RowSampler {
 public:
  RowSampler(const Kernels& kernels, int vocab);

  // Maxima of a row. `scan` looks for NaN and +inf, in `maxima` when they are there (see kernels.h); `rescan` is
  // for a row already checked. The View that a scan returns is valid until the next call of the same function.
  View scan(const float* x, const float* maxima, RowMax* top);
  View rescan(const float* x, RowMax* top);

  int vocab() const { return vocab_; }
  // Where a changed copy of a row is made, [vocab].
  float* edited() { return edited_.data(); }
  // Room for [vocab] numbers, which any function may change.
  int32_t* scratch() { return ids_.data(); }

  // Classifier-free guidance (Sanchez et al., 2023, arXiv:2306.17806) as in transformers' processor: for two rows of
  // logits and the ln of the sums of their exponentials, u + scale * (c - u) of their log-probabilities c and u. A token
  // without a probability has none afterwards; one that only the second row excludes keeps c. Valid until the next call.
  const float* guide(const float* conditional, double total, const float* other, double other_total, double scale);

  // The first token whose logit is `max`.
  int32_t argmax(const View& row, float max) const;

  // The first `count` tokens of the truncated distribution in the race (race.h) of a place, in order; fewer when no more
  // have a weight. Returns how many. The temperature is above 0.
  int race(const View& row, float max, const SamplingParams& params, const Place& place, int count, Leader* out);
  // The token that wins it, -1 when none has a weight.
  int32_t draw(const View& row, float max, const SamplingParams& params, const Place& place) {
    Leader leader{INFINITY, -1};
    race(row, max, params, place, 1, &leader);
    return leader.token;
  }

  // The probabilities [vocab] that `draw` draws by; the temperature is above 0. `entropy`, in nats, if it is wanted.
  // Without `out` they are valid until the next call of any function.
  const float* distribution(const View& row, float max, const SamplingParams& params, float* out, double* entropy);

  // What the truncations leave of a row at temperature 1.
  Cut cut(const View& row, float max, const SamplingParams& params);

  // e^(x - max) of a row, valid until the next call of another function, and their sum.
  const float* weigh(const View& row, float max, double* total);

  // ln of the sum of e^x.
  double log_sum_exp(const View& row, float max);

  // The `count` most likely tokens in order; fewer when fewer are above -inf. Returns how many.
  int top(const View& row, int count, int32_t* ids, float* values);

  // 1 for the most likely token.
  int rank(const View& row, int32_t token) const;

  size_t bytes() const;
  static size_t bound(int vocab);

 private:
  // What a cut is measured by: the number of values, or the sum of their weights e^((x - max) / temperature).
  struct Weights {
    const float* e = nullptr;  // null counts
    float max = 0, inv_temperature = 0;
  };
  // The cut is at a value in [least, upper): below >= target > above.
  struct Bracket {
    float least, upper;
    double above;  // measure(x >= upper)
    double below;  // measure(x >= least), negative when not known yet
    double target;
  };
  enum class Found { cut, too_many, too_few };

  Cut find_cut(const View& v, const Weights& w, Bracket b, float guess);
  Found cut_inside(const View& v, const Weights& w, const Bracket& b, float least, double* measured, Cut* cut);
  Cut cut_ties(const View& v, const Weights& w, const Bracket& b) const;
  int choose_pivots(const View& v, const Weights& w, const Bracket& b, int pass, float* pivots);
  void narrow(const View& v, const Weights& w, const float* pivots, Bracket* b) const;
  double measure_from(const View& v, const Weights& w, float least) const;
  float block_quantile(const View& v, int count);

  Cut truncation(const View& row, float max, const SamplingParams& params, float inv_temperature, View* left);
  bool cut_top_k(const View& v, int k, float floor, Cut* cut);
  Cut cut_top_p(const View& v, float max, const SamplingParams& p, float inv_temperature);
  View keep(const View& v, const Cut& cut);
  int race_of_row(const View& row, Race race, int count, Leader* out);

  const Kernels& k_;
  int vocab_;
  std::vector<float> guided_, edited_, weights_, values_;
  std::vector<int32_t> ids_;
  std::vector<float> raw_block_max_, block_max_, block_sum_, block_order_;
  std::vector<float> span_max_, span_first_, span_bound_;
  std::vector<int32_t> spans_, span_picks_;
  std::vector<float> small_x_, small_e_;
  std::vector<int32_t> small_ids_;
  std::vector<uint64_t> keys_;
};

}  // namespace quire
