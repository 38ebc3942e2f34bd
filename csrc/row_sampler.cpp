#include "row_sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>

#include "sums.h"

namespace quire {

namespace {

// Candidates that are sorted directly, and race one by one.
constexpr int kSmall = 1024;
// Values looked at to place the first pivots, and later ones, when most values lie outside the bracket.
constexpr int kFirstProbes = 512;
constexpr int kProbes = 4096;
// A nucleus is first looked for above this many block maxima: most are smaller.
constexpr int kFirstBlocks = 64;
// Probabilities are float32: a cumulative sum this close below top_p has reached it.
constexpr double kTopPTolerance = 4.0 * FLT_EPSILON;

// Unsigned integers in the order of the floats. -0 and 0 are one value.
uint32_t ordered(float x) {
  const float positive_zero = x + 0.0f;
  uint32_t u;
  std::memcpy(&u, &positive_zero, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
float from_ordered(uint32_t o) {
  const uint32_t u = o & 0x80000000u ? o & 0x7fffffffu : ~o;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// Greater keys come first in the order of tokens.
uint64_t key_of(float x, int32_t id) { return uint64_t{ordered(x)} << 32 | (0xffffffffu - static_cast<uint32_t>(id)); }
float value_of(uint64_t key) { return from_ordered(static_cast<uint32_t>(key >> 32)); }
int32_t id_of(uint64_t key) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key)); }

float to_finite(double x) { return static_cast<float>(std::clamp(x, -double{FLT_MAX}, double{FLT_MAX})); }
float next_up(float x) { return std::nextafter(x, INFINITY); }
float next_down(float x) { return std::nextafter(x, -INFINITY); }

Cut tighter(const Cut& a, const Cut& b) {
  if (a.least == b.least) return {a.least, std::min(a.tie_id, b.tie_id)};
  return a.least > b.least ? a : b;
}

// Runs a race again and again for the next token behind those before; returns how many there were.
template <class F>
int in_order(Race* race, int count, Leader* out, F run) {
  for (int i = 0; i < count; ++i) {
    out[i] = {INFINITY, -1};
    run(&out[i]);
    if (out[i].token < 0) return i;
    race->after = out[i];
  }
  return count;
}

// Below this logit a probability is exactly 0.
float zero_below(float max, double temperature) { return to_finite(max + kLowestExponent * temperature); }

}  // namespace

RowSampler::RowSampler(const Kernels& kernels, int vocab)
    : k_(kernels), vocab_(vocab), guided_(vocab), edited_(vocab), weights_(vocab), values_(vocab), ids_(vocab),
      raw_block_max_(sample_blocks(vocab)), block_max_(sample_blocks(vocab)), block_sum_(sample_blocks(vocab)),
      block_order_(sample_blocks(vocab)), span_max_(maxima_of(vocab)), span_first_(maxima_of(vocab)),
      span_bound_(maxima_of(vocab)), spans_(maxima_of(vocab)), span_picks_(maxima_of(vocab)), small_x_(kSmall),
      small_e_(kSmall), small_ids_(kSmall), keys_(kSmall) {}

size_t RowSampler::bound(int vocab) {
  const size_t n = static_cast<size_t>(vocab), blocks = static_cast<size_t>(sample_blocks(vocab));
  return sizeof(RowSampler) + n * 20 + blocks * 16 + static_cast<size_t>(maxima_of(vocab)) * 20 + kSmall * 20;
}

size_t RowSampler::bytes() const { return bound(vocab_); }

View RowSampler::scan(const float* x, const float* maxima, RowMax* top) {
  float* block_max = raw_block_max_.data();
  *top = maxima ? k_.row_max_of(maxima, vocab_, block_max) : k_.row_max(x, vocab_, true, block_max);
  return {x, nullptr, vocab_, raw_block_max_.data(), maxima};
}

View RowSampler::rescan(const float* x, RowMax* top) {
  *top = k_.row_max(x, vocab_, false, block_max_.data());
  return {x, nullptr, vocab_, block_max_.data()};
}

const float* RowSampler::guide(const float* conditional, double total, const float* other, double other_total,
                               double scale) {
  for (int i = 0; i < vocab_; ++i) {
    const double c = conditional[i] - total, u = other[i] - other_total;
    if (conditional[i] == -INFINITY)
      guided_[i] = -INFINITY;
    else
      guided_[i] = to_finite(other[i] == -INFINITY ? c : u + scale * (c - u));
  }
  return guided_.data();
}

int32_t RowSampler::argmax(const View& row, float max) const {
  int i = 0;
  while (row.block_max[i / kSampleBlock] != max) i += kSampleBlock;
  while (row.x[i] != max) ++i;
  return i;
}

int RowSampler::race(const View& row, float max, const SamplingParams& p, const Place& place, int count, Leader* out) {
  // Not above FLT_MAX, so that 0 * it is 0 at the maximum however small the temperature.
  const float inv_temperature = to_finite(1.0 / p.temperature);
  View left = row;
  const Cut cut = truncation(row, max, p, inv_temperature, &left);
  Race race{max, inv_temperature, cut.least, cut.tie_id, place.key0(), place.key1(), place.sample, place.position};
  if (cut.least > -FLT_MAX) {
    const int n = k_.collect({left.x, left.ids, left.n, left.block_max, cut.least, INFINITY, cut.tie_id, kSmall,
                              small_x_.data(), small_ids_.data()});
    if (n <= kSmall)
      return in_order(&race, count, out,
                      [&](Leader* leader) { k_.race_list(race, small_x_.data(), small_ids_.data(), n, leader); });
  }
  return race_of_row(row, race, count, out);
}

const float* RowSampler::distribution(const View& row, float max, const SamplingParams& p, float* out,
                                      double* entropy) {
  const float inv_temperature = to_finite(1.0 / p.temperature);
  View left = row;
  const Cut cut = truncation(row, max, p, inv_temperature, &left);
  float* share = out ? out : weights_.data();
  k_.exp_row({row.x, row.n, max, inv_temperature, row.block_max, share, nullptr});
  for (int i = 0; i < row.n; ++i) share[i] = cut.keeps(row.x[i], i) ? share[i] : 0.0f;
  const double total = sum_of(0, row.n, [&](int i) { return share[i]; });
  if (entropy) {  // ln of the total, less the mean exponent
    auto exponent = [&](int i) { return share[i] > 0 ? share[i] * ((row.x[i] - max) * inv_temperature) : 0.0f; };
    *entropy = std::log(total) - sum_of(0, row.n, exponent) / total;
  }
  for (int i = 0; i < row.n; ++i) share[i] = static_cast<float>(share[i] / total);
  return share;
}

Cut RowSampler::cut(const View& row, float max, const SamplingParams& params) {
  View left = row;
  return truncation(row, max, params, 1.0f, &left);
}

const float* RowSampler::weigh(const View& row, float max, double* total) {
  k_.exp_row({row.x, row.n, max, 1.0f, row.block_max, weights_.data(), nullptr});
  *total = sum_of(0, row.n, [&](int i) { return weights_[i]; });
  return weights_.data();
}

double RowSampler::log_sum_exp(const View& row, float max) {
  k_.exp_row({row.x, row.n, max, 1.0f, row.block_max, nullptr, block_sum_.data()});
  double sum = 0;
  for (float s : block_sum_) sum += s;
  return max + std::log(sum);
}

int RowSampler::top(const View& row, int count, int32_t* ids, float* values) {
  if (count < 1) return 0;
  Cut cut{-FLT_MAX};
  cut_top_k(row, count, -FLT_MAX, &cut);
  const View best = keep(row, cut);
  for (int i = 0; i < best.n; ++i) keys_[i] = key_of(best.x[i], best.ids[i]);
  std::sort(keys_.begin(), keys_.begin() + best.n, std::greater<>());
  for (int i = 0; i < best.n; ++i) {
    ids[i] = id_of(keys_[i]);
    values[i] = value_of(keys_[i]);
  }
  return best.n;
}

int RowSampler::rank(const View& row, int32_t token) const {
  return 1 + static_cast<int>(k_.count_before({row.x, row.n, row.block_max, row.x[token], token}));
}

// ---- truncation -----------------------------------------------------------------------------------------------

// What top_k, top_p and min_p leave of a row, each of what the one before left. All of it is in `left`.
Cut RowSampler::truncation(const View& row, float max, const SamplingParams& p, float inv_temperature, View* left) {
  Cut cut{-FLT_MAX};
  const bool cuts = p.top_k > 0 && cut_top_k(row, p.top_k, zero_below(max, p.temperature), &cut);
  if (cuts && p.top_p < 1.0) *left = keep(row, cut);
  if (p.top_p < 1.0) cut = tighter(cut, cut_top_p(*left, max, p, inv_temperature));
  if (p.min_p > 0.0) cut = tighter(cut, Cut{to_finite(max + p.temperature * std::log(p.min_p))});
  return cut;
}

// False, and `cut` untouched, when no more than k values are at or above `floor`.
bool RowSampler::cut_top_k(const View& v, int k, float floor, Cut* cut) {
  if (k >= v.n) return false;
  Bracket b{floor, INFINITY, 0.0, -1.0, static_cast<double>(k)};
  // k blocks have a maximum at or above the k-th largest maximum, so the k-th value is too.
  const float guess = v.block_max && k <= sample_blocks(v.n) ? block_quantile(v, k) : -INFINITY;
  if (guess >= floor) {
    b.least = guess;
  } else {
    b.below = measure_from(v, Weights{}, floor);
    if (b.below <= b.target) return false;
  }
  *cut = find_cut(v, Weights{}, b, b.least);
  return true;
}

Cut RowSampler::cut_top_p(const View& v, float max, const SamplingParams& p, float inv_temperature) {
  k_.exp_row({v.x, v.n, max, inv_temperature, v.block_max, weights_.data(), block_sum_.data()});
  double total = 0;
  for (int i = 0; i < sample_blocks(v.n); ++i) total += block_sum_[i];
  const double share = p.top_p * (1.0 - kTopPTolerance);
  // All n values below max - depth * temperature weigh less than 1 - share together, and the total is at least 1.
  const double depth = std::log(v.n / (1.0 - share)) + 1.0;
  const float least = std::max(to_finite(max - depth * p.temperature), zero_below(max, p.temperature));
  const Bracket b{least, INFINITY, 0.0, total, share * total};
  float guess = least;
  if (v.block_max && v.n > kSmall)
    guess = std::max(guess, block_quantile(v, std::min(kFirstBlocks, sample_blocks(v.n))));
  return find_cut(v, Weights{weights_.data(), max, inv_temperature}, b, guess);
}

// The count-th largest block maximum.
float RowSampler::block_quantile(const View& v, int count) {
  const int blocks = sample_blocks(v.n);
  std::copy(v.block_max, v.block_max + blocks, block_order_.begin());
  std::nth_element(block_order_.begin(), block_order_.begin() + (count - 1), block_order_.begin() + blocks,
                   std::greater<>());
  return block_order_[count - 1];
}

// Tries the values from `guess` up, then narrows the bracket until what is inside can be sorted.
Cut RowSampler::find_cut(const View& v, const Weights& w, Bracket b, float guess) {
  Cut cut{b.least};
  double measured = 0;
  Found found = cut_inside(v, w, b, guess, &measured, &cut);
  if (found == Found::too_few && guess > b.least) {
    b.upper = guess;
    b.above = measured;
  } else if (found != Found::too_many) {
    return cut;
  }
  if (b.below < 0) b.below = measure_from(v, w, b.least);
  for (int pass = 0; next_up(b.least) < b.upper; ++pass) {
    float pivots[kPivots];
    if (choose_pivots(v, w, b, pass, pivots) <= kSmall / 2) {
      cut = Cut{b.least};
      if (cut_inside(v, w, b, b.least, &measured, &cut) != Found::too_many) return cut;
    }
    narrow(v, w, pivots, &b);
  }
  return cut_ties(v, w, b);
}

// Sorts the values in [least, b.upper) if they are few and finds the cut among them. When they measure too little,
// *measured is measure(x >= least) and *cut is untouched (rounding apart, this happens only for least > b.least).
RowSampler::Found RowSampler::cut_inside(const View& v, const Weights& w, const Bracket& b, float least,
                                         double* measured, Cut* cut) {
  const CollectTask task{v.x,
                         v.ids,
                         v.n,
                         v.block_max,
                         least,
                         b.upper,
                         std::numeric_limits<int32_t>::max(),
                         kSmall,
                         small_x_.data(),
                         small_ids_.data()};
  const int n = k_.collect(task);
  if (n > kSmall) return Found::too_many;
  for (int i = 0; i < n; ++i) keys_[i] = key_of(small_x_[i], small_ids_[i]);
  int last = 0;  // keys up to and with this one are kept
  if (!w.e) {
    last = static_cast<int>(b.target - b.above) - 1;
    *measured = b.above + n;
    if (last < n) std::nth_element(keys_.begin(), keys_.begin() + last, keys_.begin() + n, std::greater<>());
  } else {
    std::sort(keys_.begin(), keys_.begin() + n, std::greater<>());
    for (int i = 0; i < n; ++i) small_x_[i] = value_of(keys_[i]);
    k_.exp_row({small_x_.data(), n, w.max, w.inv_temperature, nullptr, small_e_.data(), nullptr});
    *measured = b.above;
    for (last = 0; last < n && (*measured += small_e_[last]) < b.target;) ++last;
  }
  if (last >= n) return Found::too_few;
  *cut = Cut{value_of(keys_[last]), id_of(keys_[last])};
  return Found::cut;
}

// Every value in the bracket is b.least: as many of them, in id order, as the target asks for.
Cut RowSampler::cut_ties(const View& v, const Weights& w, const Bracket& b) const {
  float weight = 1.0f;
  if (w.e) k_.exp_row({&b.least, 1, w.max, w.inv_temperature, nullptr, &weight, nullptr});
  double left = weight > 0 ? std::ceil((b.target - b.above) / weight) : INFINITY;
  for (int i = 0; i < v.n; ++i)
    if (v.x[i] == b.least && --left < 1.0) return Cut{b.least, v.ids ? v.ids[i] : i};
  return Cut{b.least};
}

// Pivots around where a sample of the bracket puts the cut. Returns about how many values the bracket holds.
int RowSampler::choose_pivots(const View& v, const Weights& w, const Bracket& b, int pass, float* pivots) {
  const int stride = std::max(1, v.n / (pass == 0 ? kFirstProbes : kProbes));
  int hits = 0;
  double total = 0;
  for (int i = 0; i < v.n && hits < kSmall; i += stride)
    if (v.x[i] >= b.least && v.x[i] < b.upper) {
      keys_[hits++] = uint64_t{ordered(v.x[i])} << 32 | static_cast<uint32_t>(i);
      total += w.e ? w.e[i] : 1.0f;
    }
  // Halving the representable values ends the search whatever the sample says.
  const uint32_t low = ordered(b.least), high = ordered(std::min(b.upper, FLT_MAX));
  const float middle = from_ordered(low + (high - low) / 2);
  std::fill(pivots, pivots + kPivots, middle);
  if (hits) {
    std::sort(keys_.begin(), keys_.begin() + hits, std::greater<>());
    const double goal = total * (b.target - b.above) / (b.below - b.above);
    int at = 0;
    for (double sum = 0; at < hits - 1; ++at)
      if ((sum += w.e ? w.e[static_cast<uint32_t>(keys_[at])] : 1.0f) >= goal) break;
    // A quantile of a sample is off by about the root of the number of values beyond it.
    const int spread = 1 + static_cast<int>(std::sqrt(static_cast<double>(std::min(at, hits - 1 - at))));
    const int offsets[kPivots] = {-3 * spread, -spread, spread, 3 * spread};
    for (int j = pass % 2; j < kPivots; ++j) pivots[j] = value_of(keys_[std::clamp(at + offsets[j], 0, hits - 1)]);
  }
  for (int j = 0; j < kPivots; ++j) pivots[j] = std::clamp(pivots[j], next_up(b.least), next_down(b.upper));
  return hits * stride;
}

// Moves the bracket's ends to the nearest pivots on either side of the cut.
void RowSampler::narrow(const View& v, const Weights& w, const float* pivots, Bracket* b) const {
  MeasureTask task{v.x, w.e, v.n, v.block_max, {}};
  std::copy(pivots, pivots + kPivots, task.pivots);
  double measured[kPivots];
  k_.measure(task, measured);
  for (int j = 0; j < kPivots; ++j)
    if (measured[j] >= b->target && pivots[j] > b->least) {
      b->least = pivots[j];
      b->below = measured[j];
    }
  for (int j = 0; j < kPivots; ++j)
    if (pivots[j] > b->least && pivots[j] < b->upper) {
      b->upper = pivots[j];
      b->above = measured[j];
    }
}

double RowSampler::measure_from(const View& v, const Weights& w, float least) const {
  double measured[kPivots];
  k_.measure({v.x, w.e, v.n, v.block_max, {least, least, least, least}}, measured);
  return measured[0];
}

View RowSampler::keep(const View& v, const Cut& cut) {
  const CollectTask task{v.x,      v.ids,      v.n,    v.block_max,    cut.least,
                         INFINITY, cut.tie_id, vocab_, values_.data(), ids_.data()};
  return {values_.data(), ids_.data(), k_.collect(task), nullptr};
}

// ---- the draw ---------------------------------------------------------------------------------------------------

int RowSampler::race_of_row(const View& row, Race race, int count, Leader* out) {
  const float* maxima = row.span_max;
  if (!maxima) {
    maxima = values_.data();
    k_.maxima({row.x, static_cast<size_t>(row.n), values_.data(), static_cast<size_t>(maxima_of(row.n)), 1, row.n});
  }
  int n = 0;  // spans with a token that races
  for (int b = 0; b < sample_blocks(row.n); ++b) {
    if (row.block_max[b] < race.least) continue;
    const int end = std::min((b + 1) * kMaximaOfBlock, maxima_of(row.n));
    for (int s = b * kMaximaOfBlock; s < end; ++s) {
      spans_[n] = s;
      span_max_[n] = maxima[s];
      n += maxima[s] >= race.least;
    }
  }
  k_.race_bounds(race,
                 {spans_.data(), span_max_.data(), n, span_first_.data(), span_picks_.data(), span_bound_.data()});
  auto race_span = [&](int i, Leader* leader) {
    const int begin = spans_[i] * kSpan;
    k_.race_span(race, row.x + begin, std::min(kSpan, row.n - begin), spans_[i], span_first_[i], span_picks_[i],
                 leader);
  };
  // The span that may have the best token first: it excludes most others.
  const int first = static_cast<int>(std::min_element(span_bound_.begin(), span_bound_.begin() + n) -
                                     span_bound_.begin());
  return in_order(&race, count, out, [&](Leader* leader) {
    race_span(first, leader);
    for (int i = 0; i < n; ++i)
      if (span_bound_[i] <= leader->time && i != first) race_span(i, leader);
  });
}

}  // namespace quire
