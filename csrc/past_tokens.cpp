#include "past_tokens.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace quire {

namespace {

// As in text-generation-webui: bounds the penalty, and the work where a text is one token again and again.
constexpr size_t kLongestRepetition = 50;

}  // namespace

void penalize_repetitions(const PastTokens& past, const SamplingParams& params, const std::vector<int32_t>& breakers,
                          int32_t* marks, float* x) {
  const size_t begin = past.last(params.dry_penalty_last_n), end = past.size();
  if (end - begin < 2) return;
  auto breaks = [&](int32_t token) { return std::binary_search(breakers.begin(), breakers.end(), token); };
  const int32_t latest = past[end - 1];
  if (breaks(latest)) return;
  // How many tokens up to and with i are those at the end.
  auto repeated = [&](size_t i) {
    size_t length = 1;
    for (; length < kLongestRepetition && i - begin >= length; ++length) {
      const int32_t before = past[end - 1 - length];
      if (past[i - length] != before || breaks(before)) break;
    }
    return static_cast<int32_t>(length);
  };
  // f(the token that followed, i) where the latest token stood before.
  auto each = [&](auto f) {
    for (size_t i = begin; i + 1 < end; ++i)
      if (past[i] == latest) f(past[i + 1], i);
  };
  each([&](int32_t next, size_t) { marks[next] = 0; });
  each([&](int32_t next, size_t i) { marks[next] = std::max(marks[next], repeated(i)); });
  each([&](int32_t next, size_t) {
    const int32_t length = marks[next];
    marks[next] = -1;  // done
    if (length < params.dry_allowed_length || length < 1 || breaks(next)) return;
    const double penalty = params.dry_multiplier * std::pow(params.dry_base, length - params.dry_allowed_length);
    if (x[next] == -INFINITY) return;
    x[next] = static_cast<float>(std::clamp(x[next] - penalty, -double{FLT_MAX}, double{FLT_MAX}));
  });
}

void ban_sequences(const PastTokens& past, const std::vector<int32_t>& tokens, const std::vector<int32_t>& ends,
                   float* x) {
  size_t begin = 0;
  for (int32_t stop : ends) {
    const size_t last = static_cast<size_t>(stop) - 1, before = last - begin;
    bool follows = before <= past.outputs();
    for (size_t i = 0; follows && i < before; ++i) follows = past[past.size() - before + i] == tokens[begin + i];
    if (follows) x[tokens[last]] = -INFINITY;
    begin = last + 1;
  }
}

}  // namespace quire
