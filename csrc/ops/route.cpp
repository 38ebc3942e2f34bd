#include "kernels.h"

namespace quire {

// How a router chooses; see Route in program/ops.
struct Router {
  int experts = 0, top_k = 0, groups = 1, top_groups = 1;
  bool sigmoid = false, best_two = false, renormalise = false;
  float scale = 1;
};

struct RouteTask {
  const float* logits;      // [rows, experts]
  const float* correction;  // [experts] or null
  int32_t* ids;             // [rows, top_k]
  float* weights;           // [rows, top_k]
  Router router;
  int row_begin, row_end;
};

}  // namespace quire

#ifdef QUIRE_ISA  // the kernel, once for every instruction set

#include <limits>

#include "kernels/table.h"
#include "simd/functions.h"

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

}  // namespace QUIRE_ISA
}  // namespace quire

#else  // the op

#include "op.h"
#include "words.h"

#include <atomic>

namespace quire {
namespace {

struct Route final : RowOp {
  Route(Fields& f, Context& c)
      : RowOp(c, f.buffer("ids")), logits(f.buffer("logits")), correction(f.optional_vector("correction")),
        weights(f.buffer("weights")), places(f.buffer("places")), spare(f.integer("spare")) {
    f.record("router", "Router");
    router.experts = f.integer("router.experts"), router.top_k = f.integer("router.top_k");
    router.groups = f.integer("router.groups"), router.top_groups = f.integer("router.top_groups");
    router.sigmoid = f.choice("router.scores", kRouterScores);
    router.best_two = f.choice("router.group_score", kGroupScores);
    router.renormalise = f.flag("router.renormalise"), router.scale = f.number("router.scale");
    f.skip("router.correction"), f.skip("router.bias");  // `correction` says, and the linear before
    const bool grouped = router.groups > 1;
    f.require(router.experts >= 1 && router.experts <= kMaxExperts && router.top_k >= 1 && router.top_k <= kMaxTopK &&
                  router.top_k <= router.experts && spare >= 0 && spare <= router.experts && router.groups >= 1 &&
                  router.groups <= kMaxTopK && router.experts % router.groups == 0 && router.top_groups >= 1 &&
                  router.top_groups <= router.groups &&
                  !(grouped && router.top_k > router.experts / router.groups * router.top_groups) &&
                  !(grouped && router.best_two && router.experts / router.groups < 2),
              "a router beyond the limits of its kernel");
    f.require(logits.cols == router.experts && out_.cols == router.top_k && weights.cols == router.top_k &&
                  places.cols == router.top_k && (!correction || correction->rows == router.experts),
              "buffers must have the router's widths");
    c.experts.want(router.experts + spare, router.top_k);
    experts = &c.expert_places.emplace_back(router.experts, router.experts + spare);
  }

  void run_rows(int begin, int end, int) override {
    kernels().route(
        {logits.f32(), correction ? correction->vector() : nullptr, out_.i32(), weights.f32(), router, begin, end});
    experts->find(out_.i32() + static_cast<size_t>(begin) * router.top_k, begin, end - begin, router.top_k);
    // the last task sorts all pairs, before any thread leaves the op
    if (routed.fetch_add(1, std::memory_order_acq_rel) + 1 < tasks()) return;
    routed.store(0, std::memory_order_relaxed);  // for the next step, which starts behind a barrier
    ExpertPlan& plan = context_.experts;
    plan.sort(out_.i32(), context_.tokens, router.top_k, router.experts + spare, places.i32());
    for (int i = 0; i < plan.size(); ++i) experts->count(plan[i].expert, plan[i].end - plan[i].begin);
  }

  const Buffer& logits;
  const Param* correction;
  const Buffer &weights, &places;
  const int spare;
  Router router;
  ExpertPlaces* experts;
  std::atomic<int> routed{0};  // tasks that are done
};

QUIRE_OP(Route)

}  // namespace
}  // namespace quire

#endif
