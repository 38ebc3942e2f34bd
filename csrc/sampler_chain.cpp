#include "sampler_chain.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "sums.h"

namespace quire {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0.693147180559945309;
// Tokens from which mirostat 1 estimates the exponent of Zipf's law.
constexpr int kZipfTokens = 100;
// Probabilities are float32: a sum this close below a limit has reached it, as with top_p.
constexpr double kTolerance = 4.0 * FLT_EPSILON;
// Below this temperature logits overflow, and the likeliest token has all of the probability anyway.
constexpr double kColdest = 1e-30;
// Candidates that are sorted at once.
constexpr int kSorted = 256;

bool left(float x) { return x > -kInfinity; }

}  // namespace

std::vector<ChainStep> chain_steps(const SamplingParams& p, const std::vector<int32_t>* asked) {
  using S = ChainStep;
  if (p.mirostat) return {S::penalties, S::dry, S::temperature, S::mirostat};
  if (!asked)
    return {S::penalties, S::dry, S::temperature, S::top_n_sigma, S::top_k, S::top_p, S::min_p, S::typ_p, S::xtc};
  std::vector<S> steps;
  for (int32_t step : *asked) steps.push_back(static_cast<S>(step));
  return steps;
}

double next_surprise(const Mirostat& mirostat, const SamplingParams& p, float x, float max) {
  const double surprise = (mirostat.log_total - (double{x} - double{max})) / kLn2;
  return mirostat.max_surprise - p.mirostat_eta * (surprise - p.mirostat_tau);
}

SamplerChain::SamplerChain(RowSampler& rows, const SamplingParams& params, const Place& place, Mirostat* mirostat)
    : rows_(rows), p_(params), place_(place), mirostat_(mirostat), x_(rows.edited()), n_(rows.vocab()) {}

View SamplerChain::view(float* max) {
  RowMax top;
  const View row = rows_.rescan(x_, &top);
  *max = top.max;
  return row;
}

void SamplerChain::run(ChainStep step) {
  SamplingParams only;
  switch (step) {
    case ChainStep::penalties:
    case ChainStep::dry: return;  // of the sampler, which knows the sequence
    case ChainStep::top_n_sigma: return top_n_sigma();
    case ChainStep::top_k: only.top_k = p_.top_k; return cut(only, false);
    case ChainStep::typ_p: return typical();
    case ChainStep::top_p: only.top_p = p_.top_p; return cut(only, true);
    case ChainStep::min_p: only.min_p = p_.min_p; return cut(only, true);
    case ChainStep::xtc: return exclude_top_choices();
    case ChainStep::temperature: return heat();
    case ChainStep::mirostat: return mirostat();
  }
}

void SamplerChain::keep(const Cut& cut) {
  for (int i = 0; i < n_; ++i) x_[i] = cut.keeps(x_[i], i) ? x_[i] : -kInfinity;
}

void SamplerChain::keep_first() {
  float max;
  const View row = view(&max);
  keep(Cut{max, rows_.argmax(row, max)});
}

void SamplerChain::cut(SamplingParams params, bool at_least_min_keep) {
  if (params.top_k < 1 && params.top_p >= 1.0 && params.min_p <= 0.0) return;
  float max;
  const View row = view(&max);
  Cut found = rows_.cut(row, max, params);
  if (at_least_min_keep && p_.min_keep > 1) {
    SamplingParams fewest;
    fewest.top_k = p_.min_keep;
    const Cut least = rows_.cut(row, max, fewest);
    if (least.least < found.least || (least.least == found.least && least.tie_id > found.tie_id)) found = least;
  }
  keep(found);
}

// Top-nσ: Tang et al., 2024 (arXiv:2411.07641).
void SamplerChain::top_n_sigma() {
  if (p_.top_n_sigma <= 0.0) return;
  const double count = sum_of(0, n_, [&](int i) { return left(x_[i]) ? 1.0 : 0.0; });
  const double mean = sum_of(0, n_, [&](int i) { return left(x_[i]) ? double{x_[i]} : 0.0; }) / count;
  const double squares = sum_of(0, n_, [&](int i) {
    const double off = left(x_[i]) ? double{x_[i]} - mean : 0.0;
    return off * off;
  });
  float max;
  view(&max);
  const double least = double{max} - p_.top_n_sigma * std::sqrt(squares / count);
  for (int i = 0; i < n_; ++i) x_[i] = double{x_[i]} >= least ? x_[i] : -kInfinity;
}

// Locally typical sampling: Meister et al., TACL 2023 (arXiv:2202.00666). The entropy less the surprise of a token is
// its logit less the mean logit, so the typical tokens are those with logits nearest to the mean.
void SamplerChain::typical() {
  if (p_.typical_p >= 1.0) return;
  float max;
  const View row = view(&max);
  double total;
  const float* weight = rows_.weigh(row, max, &total);
  const double mean = sum_of(0, n_, [&](int i) { return weight[i] > 0 ? weight[i] * (double{x_[i]} - max) : 0.0; });
  const double middle = max + mean / total;
  int32_t* ids = rows_.scratch();
  int count = 0;
  for (int i = 0; i < n_; ++i)
    if (left(x_[i])) ids[count++] = i;
  auto nearer = [&](int32_t a, int32_t b) {
    const double da = std::abs(x_[a] - middle), db = std::abs(x_[b] - middle);
    return da < db || (da == db && a < b);
  };
  double needed = p_.typical_p * (1.0 - kTolerance) * total;
  int begin = 0, end = count;
  while (end - begin > kSorted) {  // the half that the limit is in
    const int middle_at = begin + (end - begin) / 2;
    std::nth_element(ids + begin, ids + middle_at, ids + end, nearer);
    const double half = sum_of(begin, middle_at, [&](int i) { return weight[ids[i]]; });
    if (half >= needed) {
      end = middle_at;
    } else {
      needed -= half;
      begin = middle_at;
    }
  }
  std::sort(ids + begin, ids + end, nearer);
  int kept = end;
  for (int i = begin; i < end; ++i)
    if ((needed -= double{weight[ids[i]]}) <= 0) {
      kept = i + 1;
      break;
    }
  if (kept < p_.min_keep) {
    kept = std::min(p_.min_keep, count);
    std::nth_element(ids, ids + kept - 1, ids + count, nearer);
  }
  for (int i = kept; i < count; ++i) x_[ids[i]] = -kInfinity;
}

// Exclude top choices: Philipp Emanuel Weidmann, text-generation-webui #6335. With a certain probability all tokens at
// or above a threshold but the least likely of them are excluded.
void SamplerChain::exclude_top_choices() {
  if (p_.xtc_probability <= 0.0 || place_.uniform(Draw::xtc) >= p_.xtc_probability) return;
  float max;
  const View row = view(&max);
  double total;
  const float* weight = rows_.weigh(row, max, &total);
  const double least = p_.xtc_threshold * (1.0 - kTolerance) * total;
  int above = 0, count = 0, last = -1;
  for (int i = 0; i < n_; ++i) {
    count += left(x_[i]);
    if (!left(x_[i]) || weight[i] < least) continue;
    ++above;
    if (last < 0 || x_[i] <= x_[last]) last = i;
  }
  if (above < 2 || count - (above - 1) < p_.min_keep) return;
  for (int i = 0; i < n_; ++i)
    if (weight[i] >= least && i != last) x_[i] = -kInfinity;
}

// With a range, the temperature goes with the entropy: dynamic temperature, as in llama.cpp #4972.
void SamplerChain::heat() {
  double temperature = p_.temperature;
  if (p_.dynatemp_range > 0.0 && !p_.mirostat) {
    float max;
    const View row = view(&max);
    double total;
    const float* weight = rows_.weigh(row, max, &total);
    const double mean = sum_of(0, n_, [&](int i) { return weight[i] > 0 ? weight[i] * (double{x_[i]} - max) : 0.0; });
    const double count = sum_of(0, n_, [&](int i) { return left(x_[i]) ? 1.0 : 0.0; });
    if (count <= 1) return;
    const double share = std::clamp((std::log(total) - mean / total) / std::log(count), 0.0, 1.0);
    const double least = std::max(0.0, temperature - p_.dynatemp_range), most = temperature + p_.dynatemp_range;
    temperature = least + (most - least) * std::pow(share, p_.dynatemp_exponent);
  }
  if (temperature < kColdest) return keep_first();
  for (int i = 0; i < n_; ++i)
    if (left(x_[i])) x_[i] = static_cast<float>(std::clamp(x_[i] / temperature, -double{FLT_MAX}, double{FLT_MAX}));
}

void SamplerChain::mirostat() {
  float max;
  View row = view(&max);
  keep(cut_by_mirostat(row, max));
  row = view(&max);
  double total;
  rows_.weigh(row, max, &total);
  mirostat_->log_total = std::log(total);
}

Cut SamplerChain::cut_by_mirostat(const View& row, float max) {
  if (p_.mirostat == 2) {  // those with a surprise of mu at the most
    double total;
    rows_.weigh(row, max, &total);
    const double least = max + std::log(total) - mirostat_->max_surprise * kLn2;
    if (least > max) return {max, rows_.argmax(row, max)};
    // The least float32 that is not below.
    float bound = static_cast<float>(std::max(least, -double{FLT_MAX}));
    if (double{bound} < least) bound = std::nextafter(bound, kInfinity);
    return {bound};
  }
  int32_t ids[kZipfTokens];
  float top[kZipfTokens];
  const int count = rows_.top(row, kZipfTokens, ids, top);
  double products = 0, squares = 0;
  for (int i = 0; i + 1 < count; ++i) {
    const double t = std::log((i + 2.0) / (i + 1.0));
    products += t * (double{top[i]} - double{top[i + 1]});
    squares += t * t;
  }
  double k = 1;
  if (count > 1) {
    const double zipf = products / squares, excess = zipf - 1;
    // The limit where the exponent is 1.
    const double norm = excess == 0 ? 1 / std::log(n_) : excess / (1 - std::pow(n_, -excess));
    k = std::pow(norm * std::exp2(mirostat_->max_surprise), 1 / zipf);
  }
  SamplingParams only;
  only.top_k = static_cast<int>(std::clamp(std::isnan(k) ? 1.0 : k, 1.0, double{static_cast<float>(n_)}));
  return rows_.cut(row, max, only);
}

}  // namespace quire
