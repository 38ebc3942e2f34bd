// The numbers of a request's SamplingParams (src/quire/types.py), under the same names.
//
// A line is a field of the record, and it is read from Python's SamplingParams by its name: a new one needs nothing
// more than the code that heeds it.
#pragma once

namespace quire {

// X(type, name, value unless asked for)
#define QUIRE_SAMPLING_PARAMS(X)        \
  X(double, temperature, 1.0)           \
  X(int, top_k, 0) /* below 1 is off */ \
  X(double, top_p, 1.0)                 \
  X(double, min_p, 0.0)                 \
  X(double, repetition_penalty, 1.0)    \
  X(double, frequency_penalty, 0.0)     \
  X(double, presence_penalty, 0.0)      \
  X(int, min_tokens, 0)                 \
  X(int, logprobs, -1) /* -1 for none at all */

struct SamplingParams {
#define QUIRE_FIELD(type, name, value) type name = value;
  QUIRE_SAMPLING_PARAMS(QUIRE_FIELD)
#undef QUIRE_FIELD

  bool penalized() const { return repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0; }
};

}  // namespace quire
