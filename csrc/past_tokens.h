// What a sequence said so far, for the steps of sampling that look at its order and not only at counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sampling_params.h"

namespace quire {

// The tokens before a row: those of the slot, then the drafts of the slot's rows before.
class PastTokens {
 public:
  PastTokens(const std::vector<int32_t>& known, int prompt_len, const int32_t* drafts, int count)
      : known_(known), drafts_(drafts), size_(known.size() + static_cast<size_t>(count)),
        prompt_len_(static_cast<size_t>(prompt_len)) {}

  size_t size() const { return size_; }
  int32_t operator[](size_t i) const { return i < known_.size() ? known_[i] : drafts_[i - known_.size()]; }
  const int32_t* drafts() const { return drafts_; }
  int draft_count() const { return static_cast<int>(size_ - known_.size()); }
  bool is_output(size_t i) const { return i >= prompt_len_; }
  size_t outputs() const { return size_ > prompt_len_ ? size_ - prompt_len_ : 0; }
  // Where the last `count` tokens begin; a negative number stands for all.
  size_t last(int count) const {
    return count < 0 || static_cast<size_t>(count) > size_ ? 0 : size_ - static_cast<size_t>(count);
  }

 private:
  const std::vector<int32_t>& known_;
  const int32_t* drafts_;
  size_t size_, prompt_len_;
};

// f(token, how often it was output) once for each token from `begin` on. `marks` is [vocab] scratch.
template <class F>
void each_of_window(const PastTokens& past, size_t begin, int32_t* marks, F f) {
  constexpr int32_t kDone = -1;
  for (size_t i = begin; i < past.size(); ++i) marks[past[i]] = 0;
  for (size_t i = begin; i < past.size(); ++i) marks[past[i]] += past.is_output(i);
  for (size_t i = begin; i < past.size(); ++i) {
    int32_t& mark = marks[past[i]];
    if (mark != kDone) f(past[i], static_cast<uint32_t>(mark));
    mark = kDone;
  }
}

// DRY: Philipp Emanuel Weidmann, text-generation-webui #5677. What would go on with a repetition of the last tokens loses
// multiplier * base^(length - allowed length), for the longest repetition that it goes on with; breakers (rising ids) end
// one. Changes x [vocab]; `marks` is [vocab] scratch.
void penalize_repetitions(const PastTokens& past, const SamplingParams& params, const std::vector<int32_t>& breakers,
                          int32_t* marks, float* x);

// Excludes the last token of each sequence whose other tokens the output ends with. Sequence i is tokens[ends[i - 1] …
// ends[i] - 1].
void ban_sequences(const PastTokens& past, const std::vector<int32_t>& tokens, const std::vector<int32_t>& ends,
                   float* x);

}  // namespace quire
