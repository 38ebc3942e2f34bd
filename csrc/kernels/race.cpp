#include "race.h"

#include "kernels/row_passes.h"
#include "kernels/table.h"
#include "simd/words.h"

namespace quire {
namespace QUIRE_ISA {

// Four words for each of sixteen blocks: Philox4x32-10 as in philox.h, a lane for each block.
QUIRE_INLINE void words_of(const Race& race, Draw purpose, const uint32_t* blocks, uint32_t (*words)[kLanes]) {
  U16 c0 = uset1(race.position), c1 = uload(blocks), c2 = uset1(race.sample),
      c3 = uset1(static_cast<uint32_t>(purpose));
  uint32_t key0 = race.key0, key1 = race.key1;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    U16 a_high, a_low, b_high, b_low;
    multiply(c0, kPhiloxMultiplier0, &a_high, &a_low);
    multiply(c2, kPhiloxMultiplier1, &b_high, &b_low);
    c0 = uxor(uxor(b_high, c1), uset1(key0));
    c1 = b_low;
    c2 = uxor(uxor(a_high, c3), uset1(key1));
    c3 = a_low;
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  ustore(words[0], c0);
  ustore(words[1], c1);
  ustore(words[2], c2);
  ustore(words[3], c3);
}

QUIRE_INLINE V16 exponentials(const uint32_t* words) {
  float e[kLanes];
  for (int i = 0; i < kLanes; ++i) e[i] = exponential(words[i]);
  return load(e);
}

QUIRE_INLINE V16 weights(const Race& race, V16 x) {
  return exp_unfused(mul(sub(x, set1(race.max)), set1(race.inv_temperature)));
}

QUIRE_INLINE void first_of_spans(const Race& race, const int32_t* spans, float* first, int32_t* picks) {
  uint32_t words[4][kLanes];
  words_of(race, Draw::span, reinterpret_cast<const uint32_t*>(spans), words);
  store(first, mul(exponentials(words[0]), set1(1.0f / kSpan)));
  for (int i = 0; i < kLanes; ++i) picks[i] = static_cast<int32_t>(words[1][i] >> 26);
}

void race_bounds(const Race& race, const SpansTask& t) {
  for (int i = 0; i < t.n; i += kLanes) {
    const int n = t.n - i < kLanes ? t.n - i : kLanes;
    int32_t spans[kLanes] = {}, picks[kLanes];
    float first[kLanes];
    std::memcpy(spans, t.spans + i, static_cast<size_t>(n) * sizeof(int32_t));
    first_of_spans(race, spans, first, picks);
    std::memcpy(t.first + i, first, static_cast<size_t>(n) * sizeof(float));
    std::memcpy(t.picks + i, picks, static_cast<size_t>(n) * sizeof(int32_t));
    store_n(t.bounds + i, div(load(first), weights(race, load_until(t.maxima, i, t.n, -INFINITY))), n);
  }
}

// Sixteen tokens with their times. Lanes at and past n do not race.
QUIRE_INLINE void lead(const Race& race, V16 x, const int32_t* ids, V16 times, int n, Leader* leader) {
  const V16 finish = div(times, weights(race, x));
  const uint32_t lanes = n >= kLanes ? 0xffffu : (1u << n) - 1u;
  uint32_t bits = mask_ge(set1(leader->time), finish) & mask_ge(finish, set1(race.after.time)) &
                  mask_ge(x, set1(race.least)) & lanes;
  if (!bits) return;
  float finished[kLanes], value[kLanes];
  store(finished, finish);
  store(value, x);
  for (; bits; bits &= bits - 1) {
    const int i = __builtin_ctz(bits);
    if (value[i] == race.least && ids[i] > race.tie_id) continue;
    if (finished[i] == race.after.time && ids[i] <= race.after.token) continue;
    if (finished[i] < leader->time || (finished[i] == leader->time && ids[i] < leader->token))
      *leader = {finished[i], ids[i]};
  }
}

void race_span(const Race& race, const float* x, int n, int32_t span, float first, int32_t pick, Leader* leader) {
  uint32_t blocks[kLanes], words[4][kLanes];
  for (int i = 0; i < kLanes; ++i) blocks[i] = static_cast<uint32_t>(span) * kBlocksOfSpan + static_cast<uint32_t>(i);
  words_of(race, Draw::token, blocks, words);
  for (int begin = 0; begin < n; begin += kLanes) {
    float times[kLanes];
    store(times, add(set1(first), exponentials(words[begin / kLanes])));
    if (pick / kLanes == begin / kLanes) times[pick % kLanes] = first;
    int32_t ids[kLanes];
    for (int i = 0; i < kLanes; ++i) ids[i] = span * kSpan + begin + i;
    lead(race, load_until(x, begin, n, -INFINITY), ids, load(times), n - begin, leader);
  }
}

void race_list(const Race& race, const float* x, const int32_t* ids, int n, Leader* leader) {
  for (int begin = 0; begin < n; begin += kLanes) {
    const int count = n - begin < kLanes ? n - begin : kLanes;
    int32_t id[kLanes] = {}, spans[kLanes], picks[kLanes];
    std::memcpy(id, ids + begin, static_cast<size_t>(count) * sizeof(int32_t));
    uint32_t blocks[kLanes], words[4][kLanes], own[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      spans[i] = id[i] / kSpan;
      blocks[i] = static_cast<uint32_t>(spans[i]) * kBlocksOfSpan + static_cast<uint32_t>(id[i] % kLanes);
    }
    float first[kLanes], times[kLanes];
    first_of_spans(race, spans, first, picks);
    words_of(race, Draw::token, blocks, words);
    for (int i = 0; i < kLanes; ++i) own[i] = words[id[i] % kSpan / kLanes][i];
    store(times, add(load(first), exponentials(own)));
    for (int i = 0; i < kLanes; ++i) times[i] = id[i] % kSpan == picks[i] ? first[i] : times[i];
    lead(race, load_until(x, begin, n, -INFINITY), id, load(times), count, leader);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
