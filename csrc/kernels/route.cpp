// Which experts a token goes to, and the sum of what they gave.

#include <limits>

#include "kernels.h"
#include "kernels/table.h"
#include "simd/vec.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The `count` highest of n numbers, highest first, of equal ones the lower index; those at -infinity last.
struct Best {
  int count;
  int* index;
  float value[kMaxTopK];
  int found = 0;

  void offer(int i, float v) {
    if (found == count && !(v > value[count - 1])) return;
    int at = found < count ? found++ : count - 1;
    for (; at > 0 && v > value[at - 1]; --at) value[at] = value[at - 1], index[at] = index[at - 1];
    value[at] = v;
    index[at] = i;
  }
};

// Scores of all experts, padded with zeros to whole vectors. False when a logit is not finite.
QUIRE_INLINE bool score(const float* logits, const Router& r, float* out) {
  V16 top = set1(-kInfinity);
  uint32_t bad = 0;
  for (int e = 0; e < r.experts; e += 16) {
    const V16 v = load_n(logits + e, r.experts - e);
    bad |= mask_not_finite(v);
    top = vmax(top, first_n(r.experts - e, v, top));
  }
  if (bad) return false;
  const V16 high = set1(reduce_max(top)), one = set1(1.0f);
  V16 sum = zero();
  for (int e = 0; e < r.experts; e += 16) {
    const int n = r.experts - e;
    const V16 v = load_n(logits + e, n);
    const V16 s = r.sigmoid ? div(one, add(one, exp(sub(zero(), v)))) : exp(sub(v, high));
    const V16 kept = first_n(n, s, zero());
    sum = add(sum, kept);
    store(out + e, kept);
  }
  if (r.sigmoid) return true;
  const V16 total = set1(reduce_add(sum));
  for (int e = 0; e < r.experts; e += 16) store(out + e, div(load(out + e), total));
  return true;
}

// A group's claim to be chosen from: its best expert, or the sum of its best two.
QUIRE_INLINE float group_score(const float* choice, int size, bool best_two) {
  int index[2];
  Best best{best_two ? 2 : 1, index, {}};
  for (int i = 0; i < size; ++i) best.offer(i, choice[i]);
  return best_two ? best.value[0] + best.value[1] : best.value[0];
}

void leave_out_groups(const Router& r, float* choice) {
  const int size = r.experts / r.groups;
  int chosen[kMaxTopK];
  Best best{r.top_groups, chosen, {}};
  for (int g = 0; g < r.groups; ++g) best.offer(g, group_score(choice + g * size, size, r.best_two));
  bool keep[kMaxExperts] = {false};
  for (int i = 0; i < r.top_groups; ++i) keep[chosen[i]] = true;
  for (int e = 0; e < r.experts; ++e)
    if (!keep[e / size]) choice[e] = -kInfinity;
}

void route_row(const RouteTask& t, const float* logits, int32_t* ids, float* weights) {
  const Router& r = t.router;
  alignas(64) float scores[kMaxExperts], choice[kMaxExperts];
  if (!score(logits, r, scores)) {
    for (int j = 0; j < r.top_k; ++j) ids[j] = j, weights[j] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  for (int e = 0; e < r.experts; ++e) choice[e] = t.correction ? scores[e] + t.correction[e] : scores[e];
  if (r.groups > 1) leave_out_groups(r, choice);
  Best best{r.top_k, ids, {}};
  for (int e = 0; e < r.experts; ++e) best.offer(e, choice[e]);
  float sum = 0;
  for (int j = 0; j < r.top_k; ++j) sum += scores[ids[j]];
  for (int j = 0; j < r.top_k; ++j) {
    const float share = r.renormalise ? scores[ids[j]] / (sum + 1e-20f) : scores[ids[j]];
    weights[j] = share * r.scale;
  }
}

}  // namespace

void route(const RouteTask& t) {
  const size_t experts = static_cast<size_t>(t.router.experts), k = static_cast<size_t>(t.router.top_k);
  for (int r = t.row_begin; r < t.row_end; ++r) route_row(t, t.logits + r * experts, t.ids + r * k, t.weights + r * k);
}

void combine(const CombineTask& t) {
  const size_t cols = t.cols;
  const V16 one = set1(1.0f);
  const V16 share = t.gate ? div(one, add(one, exp(sub(zero(), set1(*t.gate))))) : one;
  for (int c = t.col_begin; c < t.col_end; c += 16) {
    const int n = t.col_end - c;
    V16 sum = zero();
    for (int j = 0; j < t.top_k; ++j)
      sum = add(sum, mul(set1(t.weights[j]), load_n(t.x + t.places[j] * cols + c, n)));
    if (t.shared) sum = add(sum, t.gate ? mul(share, load_n(t.shared + c, n)) : load_n(t.shared + c, n));
    n >= 16 ? store(t.out + c, sum) : store_n(t.out + c, sum, n);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
